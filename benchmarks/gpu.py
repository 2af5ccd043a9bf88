"""How fast, and in how much memory, the recipe 0.5b trains on this machine's GPU. One command, at most eight minutes.

    python benchmarks/gpu.py [--json FILE] [--seconds 480] [--only losses speed saving] [--stage 2]
    python benchmarks/gpu.py --tiny        the same road with a tiny model, in seconds, on a CPU too

Losses first: four updates of a third of its blocks on one batch, in fp32 and in bf16, on the GPU and on the CPU, which
must agree. Then tokens a second, MFU and memory, predicted and measured, of micro-batches × checkpointing × compile;
of the fastest once more with the recipe's own global batch, kernel by kernel; and for how long its saves hold training
up. What is predicted not to fit, or for which no time is left, is named and left out. The engine and the step are
those of a run; the ids are random.

It needs no network and no data, and writes below --work alone (runs/gpu-benchmark), compilers' caches too. The report
is written anew behind each case. Ends with 1 where losses differ or nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # before this folder, whose tokenizer.py is no package

from benchmarks.gpu_cases import Accelerator, Case, behind, losses, speeds  # noqa: E402
from benchmarks.gpu_report import judged_losses, to_text  # noqa: E402
from pretrain.device_memory import DRIVER_FILES  # noqa: E402

CPU: Accelerator = "cpu"
KINDS = ("losses", "speed", "saving")
CASE_SECONDS = 120.0  # a case is given up behind them
SHORTEST_SECONDS = 10.0  # none is begun with less
RESERVED_SECONDS = 140.0  # of all, for what follows the sweep
SERVE = "import sys; from benchmarks.gpu_worker import serve; serve(int(sys.argv[1]), sys.argv[2])"


class CaseFailedError(Exception):
    """A case could not be measured; the message says why, in one line."""


@dataclass
class Worker:
    """A process of benchmarks/gpu_worker.py, for as many cases as it measures cleanly."""

    accelerator: Accelerator
    work: Path
    process: subprocess.Popen[str] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def measure(self, case: Case, seconds: float) -> dict[str, Any]:
        """The figures of a case. CaseFailedError: the process ended, or took longer than `seconds`."""
        deadline = time.monotonic() + seconds
        if self.process is None:
            self._start(deadline)
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; its log says why
            self.process.stdin.write(json.dumps(asdict(case)) + "\n")
            self.process.stdin.flush()
        found = self._answer(deadline)
        if not found["clean"]:  # what the case has left would count as the next one's
            self.close()
        return found

    def _start(self, deadline: float) -> None:
        reading, writing = os.pipe()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(writing), str(self.work)],
                cwd=ROOT, env=environment(self.accelerator, self.work), pass_fds=[writing],
                stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
            )  # fmt: skip
        os.close(writing)
        self._answers = os.fdopen(reading)
        self.facts = self._answer(deadline)

    def _answer(self, deadline: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
        line = self._answers.readline() if ready else ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.close()
        raise CaseFailedError(self._last_words() if ready else "it took too long and was ended")

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "it ended without a word"

    @property
    def log(self) -> Path:
        return self.work / f"{self.accelerator}.log"

    def close(self) -> None:
        """End the process, at once: between cases it holds nothing that matters."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self._answers.close()
        self.process = None


def environment(accelerator: Accelerator, work: Path) -> dict[str, str]:
    """This process's, with one device to see, and with every cache of a compiler below `work`."""
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launchers}
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "TORCH_EXTENSIONS_DIR": "extensions",
        "CUDA_CACHE_PATH": "cuda", "XDG_CACHE_HOME": "cache", "TRITON_HOME": "triton-home", "TMPDIR": "tmp",
    }  # fmt: skip
    for name in caches.values():
        (work / name).mkdir(parents=True, exist_ok=True)
    only_cpu = {"CUDA_VISIBLE_DEVICES": ""} if accelerator == "cpu" else {}
    return (
        kept
        | {name: str(work / folder) for name, folder in caches.items()}
        | only_cpu
        | {"DS_ACCELERATOR": accelerator}
    )


class Run:
    """All cases in turn, within the time there is, and the report of them."""

    def __init__(self, options: argparse.Namespace, accelerator: Accelerator) -> None:
        self.options = options
        self.accelerator = accelerator
        self.ends_at = time.monotonic() + options.seconds
        self.workers = {name: Worker(name, options.work) for name in dict.fromkeys((accelerator, CPU))}
        self.report: dict[str, Any] = {
            "began_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "tiny": options.tiny,
            "stage": options.stage,
            "machine": {},
            "losses": None,
            "cases": [],
        }

    def all(self) -> None:
        """Whatever was measured stands in the report, also where this is ended in the midst of it."""
        tiny, only = self.options.tiny, self.options.only
        try:
            if "losses" in only:
                self.take(losses(self.accelerator, tiny=tiny), reserved=0.0)
                self.report["losses"] = judged_losses(self.report["cases"], self.accelerator)
                if self.accelerator != CPU:
                    self.workers[CPU].close()
            if "speed" in only:
                reserved = 0.0 if tiny else RESERVED_SECONDS
                self.take(speeds(self.accelerator, tiny=tiny), reserved)
            best = self.best or next(speeds(self.accelerator, tiny=tiny))
            self.take([one for one in behind(best) if one.kind in only], reserved=0.0)
        finally:
            for worker in self.workers.values():
                worker.close()
            self.write()

    @property
    def best(self) -> Case | None:
        measured = [one for one in self.report["cases"] if "tokens_per_second" in one]
        fastest = max(measured, key=lambda one: one["tokens_per_second"], default=None)
        return None if fastest is None else Case(**fastest["case"])

    def take(self, cases: Iterable[Case], reserved: float) -> None:
        """Measure the cases in turn, `reserved` seconds of all being kept for later ones."""
        for case in cases:
            if case.kind != "losses":
                case = replace(case, stage=self.options.stage)
            entry = {"case": asdict(case), "name": case.name, **self.outcome(case, reserved)}
            self.report["cases"].append(entry)
            say(f"{case.kind}: {case.name}: {entry.get('failed') or entry.get('left_out') or 'measured'}")
            self.write()

    def outcome(self, case: Case, reserved: float) -> dict[str, Any]:
        """The figures of a case, or why there are none."""
        worker = self.workers[case.accelerator]
        seconds = min(CASE_SECONDS, self.ends_at - time.monotonic() - reserved)
        if seconds < SHORTEST_SECONDS:
            return {"left_out": "no time is left"}
        memory, needed = worker.facts.get("memory_bytes"), case.predicted_peak_bytes
        if memory is not None and needed > memory:
            return {"left_out": f"needs {needed / 1e9:.1f} GB of {memory / 1e9:.1f}"}
        started = time.monotonic()
        try:
            found = worker.measure(case, seconds)
        except CaseFailedError as error:
            if not worker.facts:  # it never began: no other case will either
                raise
            found = {"failed": str(error)}
        if worker.accelerator == self.accelerator and worker.facts:
            self.report["machine"] = worker.facts
        return {**found, "whole_seconds": time.monotonic() - started}

    def write(self) -> None:
        """The report as far as it is, whole or not at all."""
        path = self.options.json
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".partial")
        aside.write_text(json.dumps(self.report, indent=2) + "\n", encoding="utf-8")
        aside.replace(path)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def pick_accelerator(tiny: bool) -> Accelerator:
    """A GPU where a driver is loaded and DS_ACCELERATOR allows it; a CPU measures the tiny model alone."""
    if os.environ.get("DS_ACCELERATOR") != CPU and any((Path("/") / name).exists() for name in DRIVER_FILES):
        return "cuda"
    if not tiny:
        say("error: no GPU here, no driver of one is loaded: --tiny measures a tiny model on this CPU")
        sys.exit(2)
    return CPU


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU too; says nothing of `0.5b`")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="these parts alone")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all together (default 480)")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2), default=2, help="ZeRO's (default 2, the recipe's)")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "gpu-benchmark", help="for all that is written")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the report (default: report.json in --work)")
    options = parser.parse_args(arguments)
    options.work = options.work.resolve()
    options.json = options.json or options.work / "report.json"
    if options.json.is_dir() or (options.json.parent != options.work and not options.json.parent.is_dir()):
        parser.error(f"--json {options.json}: should be a file in a folder that is there")
    if options.seconds < SHORTEST_SECONDS:
        parser.error(f"--seconds {options.seconds:g}: nothing is measured in less than {SHORTEST_SECONDS:g}")
    return options


def main() -> None:
    options = parse()
    run = Run(options, pick_accelerator(options.tiny))
    options.work.mkdir(parents=True, exist_ok=True)
    try:
        run.all()
    except CaseFailedError as error:
        say(f"error: nothing can be measured here: {error}: see the logs in {options.work}")
        sys.exit(2)
    print(to_text(run.report))
    say(f"report: {options.json}")
    failed = run.report["losses"] is not None and not run.report["losses"]["within"]
    sys.exit(failed or all("failed" in one or "left_out" in one for one in run.report["cases"]))


if __name__ == "__main__":
    main()
