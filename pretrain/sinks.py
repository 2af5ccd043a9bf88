"""Where a run's numbers go beside metrics.jsonl, which has them all: TensorBoard, Weights & Biases.

A sink is five small methods. Whatever one raises ends no run: it is told once, and that sink gets nothing more. One
that hangs holds training up, as a disk does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pretrain.writing import is_full


@dataclass(frozen=True)
class Histogram:
    """How the numbers of a tensor are spread: `counts[i]` of them lie between `edges[i]` and `edges[i + 1]`."""

    edges: Sequence[float]  # one more than counts
    counts: Sequence[float]
    number: int  # all of them, those that are not finite left out
    sum: float
    sum_of_squares: float


class Sink(Protocol):
    """Takes what is measured, by names such as `train/loss`. Any method may raise."""

    @property
    def name(self) -> str:
        """For people."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def texts(self, step: int, texts: Mapping[str, str]) -> None: ...

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None: ...

    def goes_back(self, step: int) -> None:
        """What was told of later steps than `step` no longer counts: they are made again."""

    def close(self) -> None: ...


class Sinks:
    """Several sinks as one that never raises."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._sinks: list[Sink] = []

    def open(self, name: str, make: Callable[[], Sink]) -> None:
        """Add the sink that `make` gives; one that cannot be opened is told of and left out."""
        try:
            self._sinks.append(make())
        except Exception as error:  # whatever a library of others raises, the run is worth more than its curves
            self._lose(name, error)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda sink: sink.scalars(step, values))

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._each(lambda sink: sink.texts(step, texts))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._each(lambda sink: sink.histograms(step, histograms))

    def goes_back(self, step: int) -> None:
        self._each(lambda sink: sink.goes_back(step))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, act: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                act(sink)
            except Exception as error:  # as in `open`
                if self._drop(sink):
                    self._lose(sink.name, error)

    def _drop(self, sink: Sink) -> bool:
        """False where another thread, an alarm's, has met the same and done it."""
        try:
            self._sinks.remove(sink)
        except ValueError:
            return False
        return True

    def _lose(self, name: str, error: Exception) -> None:
        full = isinstance(error, OSError) and is_full(error)
        lines = str(error).strip().splitlines()
        reason = "the disk is full" if full else f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
        self._say(f"warning: {name} has no more of this attempt, metrics.jsonl has all of it ({reason})")
