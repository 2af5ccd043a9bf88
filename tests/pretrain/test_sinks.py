"""Where numbers go beside metrics.jsonl: real files of TensorBoard and W&B; a sink that fails ends nothing."""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain import wandb_sink
from pretrain.config import RecipeError
from pretrain.histograms import BINS, histogram_of
from pretrain.sinks import Histogram, Sink, Sinks
from pretrain.tensorboard_sink import TensorBoardSink
from pretrain.wandb_sink import WandbSink, refuse_without_wandb

RECIPE: Mapping[str, bool | float | str] = {"schedule.peak_lr": 0.5, "model.tied": True, "data.path": "data/x"}
TEXT = "一 line\nand *another* <b>"


def spread(*numbers: float) -> Histogram:
    found = histogram_of(torch.tensor(numbers))
    assert found is not None
    return found


class Failing:
    """Fails at the second call."""

    name = "Failing"

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def act(self, *_: Any) -> None:
        self.calls += 1
        if self.calls > 1:
            raise self.error

    scalars = texts = histograms = goes_back = close = act


class Keeping(Failing):
    name = "Keeping"

    def act(self, *_: Any) -> None:
        self.calls += 1

    scalars = texts = histograms = goes_back = close = act


@pytest.mark.parametrize(
    "error, reason",
    [
        (RuntimeError("no way\nat all"), "RuntimeError: no way"), (KeyError(), "KeyError: no reason given"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
    ],
)  # fmt: skip
def test_a_sink_that_fails_is_told_once_and_left_out(error: Exception, reason: str) -> None:
    said: list[str] = []
    sinks, failing, keeping = Sinks(said.append), Failing(error), Keeping(error)

    def opening() -> Sink:
        raise error

    for name, make in (("Failing", lambda: failing), ("Keeping", lambda: keeping), ("Closed", opening)):
        sinks.open(name, make)
    for step in (1, 2, 3):
        sinks.scalars(step, {"train/loss": 1.0})
        sinks.histograms(step, {"weights/x": spread(1, 2)})
    sinks.texts(3, {"samples/The": "x"})
    sinks.close()
    assert said == [
        f"warning: {name} has no more of this attempt, metrics.jsonl has all of it ({reason})"
        for name in ("Closed", "Failing")
    ]
    assert (failing.calls, keeping.calls) == (2, 8)


def test_two_threads_that_meet_the_same_fault_tell_it_once() -> None:
    said: list[str] = []
    sinks = Sinks(said.append)
    both = threading.Barrier(2)

    class Meeting(Failing):
        def scalars(self, step: int, values: Mapping[str, float]) -> None:
            both.wait(10)
            raise self.error

    sinks.open("Failing", lambda: Meeting(ValueError("no")))
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(sinks.scalars, 1, {}) for _ in range(2)]:
            done.result()
    assert len(said) == 1


def test_a_histogram_counts_all_numbers_that_are_finite() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    found = histogram_of(torch.cat([values, torch.tensor([float("nan"), float("inf")])]).view(2, -1), factor=2.0)
    assert found is not None
    assert (found.number, sum(found.counts), len(found.counts), len(found.edges)) == (10_000, 10_000, BINS, BINS + 1)
    assert found.sum == pytest.approx(2 * float(values.double().sum()), abs=1e-3)
    assert found.sum_of_squares == pytest.approx(4 * float(values.double().square().sum()), rel=1e-6)
    assert (found.edges[0], found.edges[-1]) == (2 * float(values.min()), 2 * float(values.max()))
    middle = sum(count for count, edge in zip(found.counts, found.edges, strict=False) if -1 < edge < 1)
    assert middle == pytest.approx(float(((2 * values).abs() < 1).sum()), rel=0.15)
    for alone in (0.0, 3.0, -3.0):
        same = spread(alone, alone)
        assert sum(same.counts) == 2
        assert same.edges[0] < alone < same.edges[-1]
    assert histogram_of(torch.tensor([float("nan")])) is None
    assert histogram_of(torch.tensor([])) is None


def test_tensorboard_shows_what_it_was_given(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first in (0, 2):  # a resume at step 2
        sink = TensorBoardSink(tmp_path, global_step=first, recipe=RECIPE)
        for step in range(first + 1, first + 4):
            sink.scalars(step, {"train/loss": step + first / 10})
        sink.texts(first + 3, {"samples/The": TEXT})
        sink.histograms(first + 3, {"weights/x": spread(1, 2, 4)})
        sink.close()
    shown = EventAccumulator(str(tmp_path), {"tensors": 0, "histograms": 0, "scalars": 0}).Reload()
    assert [(one.step, round(one.value, 3)) for one in shown.Scalars("train/loss")] == [
        (1, 1.0), (2, 2.0), (3, 3.2), (4, 4.2), (5, 5.2),
    ]  # fmt: skip
    (text, *_) = (one.tensor_proto.string_val[0].decode() for one in shown.Tensors("samples/The/text_summary"))
    assert text == "    一 line\n    and *another* <b>"  # Markdown shows what is set in as it is
    last = shown.Histograms("weights/x")[-1].histogram_value
    assert (last.min, last.max, last.num, last.sum, last.sum_squares) == (1, 4, 3, 7, 21)
    assert sum(last.bucket) == 3
    session = shown.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    for word in (b"schedule.peak_lr", b"model.tied", b"data/x"):
        assert word in session


def logged(file: bytes) -> Iterator[bytes]:
    """The records of a W&B file: LevelDB's log format behind 7 bytes, blocks of 32 KiB, records in pieces."""
    at, whole = 7, b""
    while at + 7 <= len(file):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", file, at)
        whole += file[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def test_weights_and_biases_keeps_offline_what_it_was_given(tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    run = tmp_path / "a run"
    run.mkdir()
    sink = WandbSink(run, "offline", project="zerohalf", recipe=RECIPE)
    sink.scalars(7, {"train/loss": 1.5})
    sink.scalars(5, {"train/loss": 2.5})  # replayed behind a resume
    sink.texts(7, {"samples/The": TEXT})
    sink.histograms(7, {"weights/x": spread(1, 2, 4)})
    sink.close()
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    history, config = [], {}
    for data in logged(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        history += [{item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}]
        config |= {item.key or item.nested_key[0]: item.value_json for item in record.run.config.update}
    losses = [(one["step"], one["train/loss"]) for one in history if "train/loss" in one]
    assert losses == [("7", "1.5"), ("5", "2.5")]
    assert any("weights/x" in key for one in history for key in one)
    assert config["schedule.peak_lr"] == "0.5"
    (table,) = run.glob("wandb/offline-run-*/files/media/table/*.json")
    assert "*another*" in table.read_text()


def test_what_is_not_installed_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_sink, "find_spec", lambda name: None)
    refuse_without_wandb("off")
    with pytest.raises(RecipeError, match=r'logging\.wandb = "offline", but wandb is not installed: pip install'):
        refuse_without_wandb("offline")


def test_without_a_key_nothing_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    said: list[str] = []
    sinks = Sinks(said.append)
    sinks.open("Weights & Biases", lambda: WandbSink(tmp_path, "online", project="zerohalf", recipe=RECIPE))
    assert said == [
        "warning: Weights & Biases has no more of this attempt, metrics.jsonl has all of it "
        "(RuntimeError: no API key: wandb login, or set WANDB_API_KEY)"
    ]
