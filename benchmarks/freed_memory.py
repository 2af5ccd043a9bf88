"""Training speed on a CPU with freed memory kept (`pretrain.runtime.keep_freed_memory`), against glibc's defaults.

The real trainer on one rank with one thread, the demo's recipe on the sample corpus. Each measurement is a process of
its own, since malloc cannot be set back; the two kinds take turns, and the ratio is that of the medians.

    python benchmarks/freed_memory.py [--pairs 4] [--steps 30] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, whose tokenizer.py is no package

from data_pipeline.prepare import Options, prepare
from pretrain import runtime
from pretrain.config import load_recipe
from pretrain.metrics import read_metrics
from pretrain.train import train
from tokenizer.train import train as train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "data_pipeline" / "sample_corpus" / "english.jsonl"


def make_data(folder: Path) -> None:
    texts = [json.loads(line)["text"] for line in SAMPLE.open(encoding="utf-8")]
    train_tokenizer(texts, folder / "tokenizer", vocab_size=4096)
    prepare({"english": [SAMPLE]}, folder / "tokenizer", folder / "data", Options(validation_fraction=0.05))


def measure(kind: str, folder: Path, steps: int) -> float:
    """The median of a run's tokens a second, its first two steps left out."""
    if kind == "default":
        runtime.keep_freed_memory = lambda: None
    overrides = [
        f"data.path={folder / 'data'}",
        f"data.tokenizer={folder / 'tokenizer'}",
        f"schedule.max_steps={steps}",
        "schedule.warmup_steps=2",
        "logging.tensorboard=false",
    ]
    with tempfile.TemporaryDirectory() as run:
        config = load_recipe(ROOT / "pretrain" / "recipes" / "demo.toml", overrides)
        train(config, Path(run), runtime.Ranks.from_environment(os.environ))
        return statistics.median(record["tokens_per_second"] for record in read_metrics(Path(run, "metrics.jsonl"))[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="report as JSON")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, folder = options.one
        print(measure(kind, Path(folder), options.steps))
        return
    rates: dict[str, list[float]] = {"kept": [], "default": []}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder))
        for _ in range(options.pairs):
            for kind, found in rates.items():
                argv = [sys.executable, __file__, "--one", kind, folder, "--steps", str(options.steps)]
                done = subprocess.run(
                    argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
                )
                found.append(float(done.stdout.splitlines()[-1]))
    kept, default = (statistics.median(rates[kind]) for kind in ("kept", "default"))
    if options.json:
        print(json.dumps({"tokens_per_second": rates, "ratio": kept / default}, indent=2))
        return
    print(f"freed memory kept    {kept:10,.0f} tokens/s")
    print(f"glibc's defaults     {default:10,.0f} tokens/s")
    print(f"ratio                {kept / default:10.2f}  (medians of {options.pairs} interleaved processes each)")


if __name__ == "__main__":
    main()
