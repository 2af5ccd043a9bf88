"""The data room's ratios: text to shards, shards to batches, the first batch, and other projects' loaders.

    python benchmarks/data.py
    python benchmarks/data.py --only loader startup
    python benchmarks/data.py --only peers --peers-python PYTHON     # where benchmarks/peers.txt is installed

Parts: prepare (data_prepare.py), loader (data_loader.py), startup (data_startup.py), peers (data_peers.py); each module
says what it measures. All that is compared is measured in turn, and must give the same. `--work` says on which disk.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, whose tokenizer.py is no package

from benchmarks import data_loader, data_peers, data_prepare, data_startup

PARTS = {"prepare": data_prepare, "loader": data_loader, "startup": data_startup, "peers": data_peers}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts alone")
    parser.add_argument("--repetitions", type=int, default=5, help="of everything, in turn (default 5)")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a micro-batch (default 8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, help="folder in which to make and remove files (the system's for such)")
    parser.add_argument("--json", action="store_true", help="report as JSON")
    for name, part in PARTS.items():
        part.add_options(parser.add_argument_group(name))
    options = parser.parse_args(arguments)
    if min(options.repetitions, options.seq_len, options.batch_size) < 1:
        parser.error("--repetitions, --seq-len and --batch-size must be at least 1")
    return options


def main() -> None:
    options = parse()
    try:
        run(options)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def run(options: argparse.Namespace) -> None:
    report = {}
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="zerohalf-benchmark-", dir=options.work) as folder:
            report[name] = PARTS[name].measure(options, Path(folder))
        report[name]["load"] = os.getloadavg()[0]
        if not options.json:
            print(f"{name}\n{PARTS[name].to_text(report[name])}\nmachine: {os.cpu_count()} CPUs, load"
                  f" {report[name]['load']:.1f}\n", flush=True)  # fmt: skip
    if options.json:
        print(json.dumps({**report, "cpus": os.cpu_count()}, indent=2))


if __name__ == "__main__":
    main()
