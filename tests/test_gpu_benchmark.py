"""benchmarks/gpu.py: its tiny form for real, on this CPU; what it makes of figures, and of a process that fails."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import CaseFailedError, Run, Worker, parse, pick_accelerator
from benchmarks.gpu_cases import Case, behind, losses, speeds
from benchmarks.gpu_report import judged_losses, memory_ratios, to_text
from benchmarks.short import BENCHMARKS

ROOT = Path(__file__).resolve().parents[1]
H200_BYTES = 150_000_000_000


def test_the_tiny_form_measures_every_kind_of_case(tmp_path: Path) -> None:
    """All that a GPU would be asked, in one command: losses, speed and memory, kernels, saves; nothing stays behind."""
    argv = [sys.executable, "benchmarks/gpu.py", "--tiny", "--work", str(tmp_path / "work")]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + (tmp_path / "work" / "cpu.log").read_text()
    report = json.loads((tmp_path / "work" / "report.json").read_text())
    entries = report["cases"]
    assert [one["case"]["kind"] for one in entries] == ["losses"] * 2 + ["speed"] * 5 + ["saving"]
    assert all(one["clean"] for one in entries), "a case left tensors to the next one"
    assert report["losses"]["within"]
    assert 0 < report["losses"]["bf16_from_fp32_on_cpu"] < 0.01
    for one in entries[2:-1]:
        static, peak = memory_ratios(one)
        assert static == pytest.approx(1, abs=0.02)
        assert peak == pytest.approx(1, abs=0.10)
        assert set(one["moments_bytes"]) == {"start", "forward", "backward", "step"}
        assert all(one["parts_seconds"][part] > 0 for part in ("forward", "backward", "optimizer"))
        assert one["tokens_per_second"] == one["tokens_per_step"] / one["step_seconds"]
    assert sum(kernel["share"] for kernel in entries[-2]["kernels"]) > 0.5
    assert entries[-1]["held_seconds"] > 0
    assert entries[-1]["bytes"] > 1e6
    assert not list((tmp_path / "work").glob("*/step-*")), "checkpoints are taken away"
    assert [row.ratio > 0 for row in BENCHMARKS["gpu"].rows(report)] == [True, True]
    for said in ("losses against the CPU's: equal", "2 of 4, selective", "a checkpoint of", "a step of"):
        assert said in done.stdout


# ---------------------------------------------------------------- the cases


def test_every_case_of_a_gpu_can_run_and_fits_an_h200() -> None:
    cases = list(speeds("cuda", tiny=False))
    assert cases[0].name == "16 of 64, none, compiled"
    assert len({one.name for one in cases}) == len(cases) > 10
    for case in [*cases, *behind(cases[0]), *losses("cuda", tiny=False)]:
        assert case.deepspeed()["train_micro_batch_size_per_gpu"] == case.micro_batch_size
        assert case.predicted_peak_bytes < H200_BYTES
    whole, saving = behind(cases[0])
    assert (whole.global_batch_size, whole.profile, whole.compile) == (256, True, True)
    assert saving.config().checkpoint.asynchronous
    assert not whole.config().checkpoint.asynchronous
    assert [one.name for one in losses("cuda", tiny=False)] == [
        "fp32 on the GPU", "bf16 on the GPU", "fp32 on the CPU", "bf16 on the CPU"
    ]  # fmt: skip


# ---------------------------------------------------------------- what figures come to


def losses_of(device: dict[str, list[float]], cpu: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {"case": {"accelerator": where, "compute": compute}, "losses": found}
        for where, both in (("cuda", device), ("cpu", cpu))
        for compute, found in both.items()
    ]


CPU_LOSSES = {"fp32": [10.0, 8.0, 6.0], "bf16": [10.0, 8.01, 6.01]}


@pytest.mark.parametrize(
    "device, within",
    [
        (CPU_LOSSES, True),
        ({"fp32": [10.0, 8.001, 6.001], "bf16": [10.0, 8.02, 6.02]}, True),
        ({"fp32": [10.0, 8.001, 6.01], "bf16": [10.0, 8.02, 6.02]}, False),  # fp32 is off
        ({"fp32": [10.0, 8.001, 6.001], "bf16": [10.0, 8.02, 6.06]}, False),  # bf16 is, by more than rounding
        ({"fp32": [10.0, 10.0, 10.0], "bf16": [10.0, 10.0, 10.0]}, False),  # nothing is learnt
        ({"fp32": [10.0, 8.0, math.nan], "bf16": [10.0, 8.01, 6.01]}, False),
    ],
)
def test_losses_must_agree_with_the_cpus(device: dict[str, list[float]], within: bool) -> None:
    assert judged_losses(losses_of(device, CPU_LOSSES), "cuda")["within"] is within


def test_losses_that_are_missing_agree_with_nothing() -> None:
    judged = judged_losses(losses_of({"bf16": [1.0]}, CPU_LOSSES), "cuda")
    assert judged == {"within": False, "missing": ["fp32 on cuda"]}


def h200_report(tokens_per_second: float, static_bytes: float) -> dict[str, Any]:
    case = next(iter(speeds("cuda", tiny=False)))
    entry = {
        "case": {"kind": "speed"},
        "name": case.name,
        "tokens_per_second": tokens_per_second,
        "flops_per_token": case.flops_per_token,
        "step_seconds": 1.0,
        "first_step_seconds": 30.0,
        "parts_seconds": {"data": 0.0, "forward": 0.3, "backward": 0.6, "optimizer": 0.05, "other": 0.05},
        "static_predicted_bytes": 9.0e9,
        "static_bytes": static_bytes,
        "moments_predicted_bytes": {"forward": 36e9, "step": 10e9},
        "moments_bytes": {"forward": 35e9, "step": 10e9},
    }
    machine = {
        "device": "NVIDIA H200", "memory_bytes": H200_BYTES, "cpus": 16, "torch": "2.11.0", "cuda": "13.0",
        "deepspeed": "0.19.8", "python": "3.12.3", "matrix_flops_per_second": 788e12, "copy_bytes_per_second": 4.3e12,
    }  # fmt: skip
    left_out = {"case": {"kind": "saving"}, "name": "16 of 64", "left_out": "no time is left"}
    return {
        "began_at": "2026-11-30T00:00:00+00:00", "tiny": False, "stage": 2, "machine": machine, "losses": None,
        "cases": [entry, left_out],
    }  # fmt: skip


def test_a_report_tells_the_share_of_the_peak_and_the_goal() -> None:
    """989.5 TFLOP/s and 3.3527 GFLOP a token: half of it is 147,567 tokens a second."""
    text = to_text(h200_report(147_600, 9.05e9))
    assert "50.0%" in text
    assert "would be 147,567: reached" in text
    assert "OUTSIDE" not in text
    assert "not measured: saving 16 of 64: no time is left" in text
    text = to_text(h200_report(73_800, 9.5e9))
    assert "25.0%" in text
    assert "missed, 0.50 of it" in text
    assert "OUTSIDE" in text


# ---------------------------------------------------------------- processes that fail


CASE = Case("speed", 1, 1, "cpu", tiny=True)
BEGINS = "import json, os, sys, time; out = os.fdopen(int(sys.argv[1]), 'w', buffering=1); out.write('{}\\n'); "


def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Worker:
    monkeypatch.setattr(gpu, "SERVE", script)
    tmp_path.mkdir(exist_ok=True)
    return Worker("cpu", tmp_path)


def test_a_process_that_dies_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = worker(tmp_path, monkeypatch, BEGINS + "sys.stdin.readline(); print('first'); sys.exit('out of memory')")
    for _ in range(2):  # the next case has a process of its own
        with pytest.raises(CaseFailedError, match=r"^out of memory$"):
            dying.measure(CASE, 60)
        assert dying.process is None


def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = worker(tmp_path, monkeypatch, BEGINS + "time.sleep(600)")
    with pytest.raises(CaseFailedError, match="took too long"):
        hanging.measure(CASE, 0.5)
    assert hanging.process is None


def test_a_process_that_left_tensors_behind_measures_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = "[out.write(json.dumps({'pid': os.getpid(), 'clean': CLEAN}) + '\\n') for line in sys.stdin]"
    for clean, processes in ((True, 1), (False, 2)):
        subject = worker(tmp_path / str(clean), monkeypatch, BEGINS + answers.replace("CLEAN", str(clean)))
        assert len({subject.measure(CASE, 60)["pid"] for _ in range(2)}) == processes
        subject.close()


def options_of(tmp_path: Path, *arguments: str) -> argparse.Namespace:
    return parse(["--tiny", "--work", str(tmp_path), *arguments])


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--json", "."], "--json .: should be a file"),
        (["--json", "no/such/folder/x.json"], "should be a file in a folder that is there"),
        (["--seconds", "0"], "--seconds 0: nothing is measured in less than 10"),
    ],
)
def test_what_cannot_be_written_or_measured_is_told_at_once(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options_of(tmp_path, *arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_cases_without_time_or_room_are_named_and_left_out(tmp_path: Path) -> None:
    options = options_of(tmp_path)
    options.seconds = 0.0
    run = Run(options, "cpu")
    run.all()
    assert [one["left_out"] for one in run.report["cases"]] == ["no time is left"] * len(run.report["cases"])
    assert json.loads((tmp_path / "report.json").read_text()) == run.report
    run = Run(options_of(tmp_path), "cpu")
    run.workers["cpu"].facts = {"memory_bytes": 5_000_000}
    assert run.outcome(CASE, 0.0)["left_out"].startswith("needs 0.0 GB of")
    assert run.workers["cpu"].process is None


def test_where_no_process_begins_there_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "SERVE", "import no_such_module")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--work", str(tmp_path)])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "error: nothing can be measured here: ModuleNotFoundError: No module named 'no_such_module': see the logs in "
        f"{tmp_path}"
    ]


def test_the_real_model_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert pick_accelerator(tiny=True) == "cpu"
    with pytest.raises(SystemExit) as ended:
        pick_accelerator(tiny=False)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: no GPU here")
