"""The commands of docs/reference-run.md, run as they stand there on a small stand-in of the same shape.

The stand-in has the same folders, file kinds and columns; the sizes of tokenizer, model, batch and run are smaller.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import orjson
import pyarrow
import pytest
from pyarrow import parquet

from model.accounting import flops_per_token, parameter_count
from pretrain.config import load_recipe

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "docs" / "reference-run.md"
SAMPLE = ROOT / "data_pipeline" / "sample_corpus"
COLUMNS = {"english": "text", "chinese": "text", "code": "content"}
SMALLER = {
    "--vocab-size 32000": "--vocab-size 2000",
    "--character-coverage 0.9999": "",
    "--validation-fraction 0.001": "--validation-fraction 0.05",
    "--ranks 8": "--ranks 2",
    "--world-size 8": "--world-size 2",
}
RECIPE = """
[model]
vocab_size = 2000
d_model = 64
n_layers = 2
n_heads = 2
n_kv_heads = 1
head_dim = 32
d_ff = 128
seq_len = 128
norm_eps = 1e-5
tied = true
"""


def commands() -> list[str]:
    """The lines of the paper that call this project, continued lines joined."""
    blocks = re.findall(r"```sh\n(.*?)```", PAPER.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.startswith(("python -m", "cp "))]


def make_stand_in(folder: Path) -> None:
    for name, column in COLUMNS.items():
        lines = (SAMPLE / f"{name}.jsonl").read_bytes().splitlines()
        texts = [orjson.loads(line)["text"] for line in lines]
        held_out, rest = texts[:3], texts[3:]
        (folder / "raw" / name).mkdir(parents=True)
        for number in range(2):
            table = pyarrow.table({"id": list(range(len(rest[number::2]))), column: rest[number::2]})
            parquet.write_table(table, folder / "raw" / name / f"train-0000{number}.parquet")
        short = {"english": "en", "chinese": "zh", "code": "py"}[name]
        (folder / "my").mkdir(exist_ok=True)
        (folder / "my" / f"heldout-{short}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in held_out))


def smaller_recipe(text: str, folder: Path) -> str:
    """The recipe with the paper's stages, a small model and paths into `folder`, a few steps long."""
    stages = PAPER.read_text(encoding="utf-8")
    stage = "\n".join(line.removeprefix("#").strip() for line in re.findall(r"^#    .*$", stages, flags=re.MULTILINE))
    assert stage.startswith("[[data.stages]]")
    text = re.sub(r"\[model\].*?(?=\n\[data\])", RECIPE, text, flags=re.DOTALL)
    for old, new in (
        ('path = "data/', f'path = "{folder}/data/'),
        ('tokenizer = "tokenizers/', f'tokenizer = "{folder}/tokenizers/'),
        ('config = "ds_configs/', f'config = "{ROOT}/ds_configs/'),
        ("global_batch_size = 256", "global_batch_size = 8"),
        ("micro_batch_size = 8", "micro_batch_size = 2"),
        ("max_steps = 20000", "max_steps = 12"),
        ("warmup_steps = 500", "warmup_steps = 2"),
        ("max_tokens = 2097152", "max_tokens = 2048"),
        ("every_steps = 1000", "every_steps = 6"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    return text.replace("\n[batch]", f"\n{stage}\n\n[batch]")


def test_the_hours_are_what_the_flops_and_the_stated_mfu_give() -> None:
    text = PAPER.read_text(encoding="utf-8")
    config = load_recipe(ROOT / "pretrain" / "recipes" / "0.5b.toml")
    tokens = config.batch.global_batch_size * config.model.seq_len * config.schedule.max_steps
    each = flops_per_token(config.model).causal
    flops = each * tokens
    for figure in (f"{parameter_count(config.model):,} parameters", f"{tokens:,} tokens", f"{each:,} a token"):
        assert figure in text
    assert f"{flops:.3g}".replace("e+", "e") in text
    rows = re.findall(r"^\| (\d+) × (\S.*?) \| (\d+) TFLOP/s \| (\d+) % \| ([\d.]+) \|$", text, flags=re.MULTILINE)
    assert len(rows) == 4
    for devices, name, peak, mfu, stated in rows:
        hours = flops / (int(devices) * float(peak) * 1e12 * int(mfu) / 100) / 3600
        digits = len(stated.partition(".")[2])
        assert f"{hours:.{digits}f}" == stated, name


@pytest.mark.soak
def test_the_reference_run_on_a_stand_in(tmp_path: Path) -> None:
    make_stand_in(tmp_path)
    ran = []
    for command in commands():
        for old, new in SMALLER.items():
            command = command.replace(old, new)
        if command.startswith("cp "):
            _, source, target = command.split()
            (tmp_path / target).write_text(smaller_recipe((ROOT / source).read_text(encoding="utf-8"), tmp_path))
            continue
        command = command.replace("--step 10000", "--step 10")
        done = subprocess.run(
            command.replace("python", sys.executable, 1),
            shell=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, (command, done.stdout[-1000:], done.stderr[-1000:])
        ran.append(done.stdout)
    assert len(ran) == 10
    counts = json.loads(
        subprocess.run(
            [sys.executable, "-m", "data_pipeline", "inspect", "data/0.5b", "--json"],
            cwd=tmp_path,
            capture_output=True,
            check=True,
        ).stdout
    )
    assert set(counts["sources"]) == set(COLUMNS)
