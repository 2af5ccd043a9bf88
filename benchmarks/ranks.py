"""What a second rank gives: two ranks of one thread beside one rank of one thread, the same global batch.

    python benchmarks/ranks.py [--stage N]... [--micro-tokens N] [--accumulation N] [--pairs N] [--quick] [--json]

Our own loop, `mini` in bf16 with fp32 masters, gradients accumulated: one rank makes a step in N micro-steps, each of
two in N/2. Both are processes of their own that take turns in blocks of steps, and their losses must be the same, or
nothing is printed. Speed: seconds of one rank to those of two, 2 at best. Work: CPU seconds of both ranks together to
those of the one, 1 at best; it hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, whose tokenizer.py is no package

from benchmarks.freed_memory import make_data
from benchmarks.overhead import machine
from benchmarks.trainer import LOSS_TOLERANCE, group

STAGES = (0, 1, 2)


@dataclass(frozen=True)
class Found:
    stage: int
    tokens: int  # of a step
    accumulation: int  # micro-steps of one rank
    speed_ratio: float
    speed_low: float
    speed_high: float
    work_ratio: float
    worst_loss: float
    pairs: int

    def line(self) -> str:
        return (
            f"ZeRO-{self.stage}  {self.tokens:6,} tokens a step, {self.accumulation} micro-steps of one rank: "
            f"two ranks {self.speed_ratio:.2f} times as fast ({self.speed_low:.2f} to {self.speed_high:.2f}), with "
            f"{self.work_ratio:.3f} of the CPU seconds; {self.pairs} pairs, losses differ by {self.worst_loss:.0e}"
        )


def measure(stage: int, options: argparse.Namespace) -> Found:
    one, two = copy.copy(options), copy.copy(options)
    for each, ranks in ((one, 1), (two, 2)):
        each.stage, each.tokens = stage, options.micro_tokens * options.accumulation
        each.accumulation = options.accumulation // ranks
    with (
        tempfile.TemporaryDirectory() as runs,
        group("ours", 1, 1, one, runs) as alone,
        group("ours", 2, 1, two, runs) as both,
    ):
        pairs = [(alone.turn(), both.turn()) for _ in range(options.pairs + 1)]
    worst = max(
        abs(mine - other) / other
        for first, second in pairs
        for mine, other in zip(first["losses"], second["losses"], strict=True)
    )
    if worst > LOSS_TOLERANCE:
        sys.exit(f"error: ZeRO-{stage}: losses of one rank and of two differ by {worst:.1e}")
    steady = pairs[1:]  # the first warms both up
    speeds = [first["wall"] / second["wall"] for first, second in steady]
    return Found(
        stage=stage,
        tokens=one.tokens,
        accumulation=options.accumulation,
        speed_ratio=statistics.median(speeds),
        speed_low=min(speeds),
        speed_high=max(speeds),
        work_ratio=statistics.median(second["cpu"] / first["cpu"] for first, second in steady),
        worst_loss=worst,
        pairs=len(steady),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=STAGES, action="append", help="of ZeRO; default: 0, 1 and 2")
    parser.add_argument("--micro-tokens", type=int, default=1024, help="of a rank's micro-step (default: 1024)")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-steps of one rank (default: 4)")
    parser.add_argument("--preset", default="mini", help="of the model (default: mini)")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=5, help="of blocks, behind one that is left out (default: 5)")
    parser.add_argument("--block-steps", type=int, default=2, help="steps of a block (default: 2)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes the recipe")
    parser.add_argument("--quick", action="store_true", help="ZeRO-2 alone, two pairs")
    parser.add_argument("--work", type=Path, help="folder for the data (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="report as JSON")
    options = parser.parse_args()
    if options.accumulation % 2:
        parser.error(f"--accumulation {options.accumulation}: two ranks halve it: make it even")
    os.environ["DS_ACCELERATOR"] = "cpu"
    if options.quick:
        options.stage, options.pairs = options.stage or [2], 2
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        options.work = options.work or Path(temporary)
        if not (options.work / "data").exists():
            make_data(options.work)
        for stage in options.stage or STAGES:
            found.append(measure(stage, options))
            if not options.json:
                print(found[-1].line(), flush=True)
    if options.json:
        print(json.dumps({**machine(), "found": [asdict(one) for one in found]}, indent=2))


if __name__ == "__main__":
    main()
