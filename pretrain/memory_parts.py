"""What a memory budget is made of: parts, each with its size, formula, place and time of life. No torch.

What the parts are, memory.py puts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Moment = Literal["start", "forward", "backward", "step", "evaluation", "saving"]
Place = Literal["device", "host"]
Device = Literal["cpu", "cuda"]
PLACES: tuple[Place, ...] = ("device", "host")
MOMENTS: tuple[Moment, ...] = ("start", "forward", "backward", "step", "evaluation", "saving")


@dataclass(frozen=True)
class Part:
    """One kind of tensor a rank holds: its size in bytes, the formula it comes from, where and when it lives.

    `static`: held between the engine's calls, however large a micro-batch is. `state`: of that the training state, so
    weights, gradients and their sums, masters, moments and compensation; the rest are buckets and buffers.
    """

    name: str
    bytes: int
    formula: str
    place: Place = "device"
    moments: tuple[Moment, ...] = MOMENTS
    static: bool = False
    state: bool = False

    @property
    def lives(self) -> str:
        """When, for people."""
        if set(self.moments) == set(MOMENTS):
            return "always"
        return "after start" if set(self.moments) == set(MOMENTS[1:]) else ", ".join(self.moments)


@dataclass(frozen=True)
class Budget:
    """The memory of one rank, part by part."""

    parts: tuple[Part, ...]

    def parts_at(self, moment: Moment, place: Place = "device") -> tuple[Part, ...]:
        """The parts that live in the largest scene of `moment`."""
        return tuple(part for part in self.parts if part.place == place and moment in part.moments)

    def at(self, moment: Moment, place: Place = "device") -> int:
        """The most bytes held at one time in `moment`."""
        return sum(part.bytes for part in self.parts_at(moment, place))

    def peak_bytes(self, place: Place = "device") -> int:
        """The most bytes held at one time in a whole run."""
        return max(self.at(moment, place) for moment in MOMENTS)

    @property
    def peak_moment(self) -> Moment:
        """When the device holds most."""
        return max(MOMENTS, key=self.at)

    @property
    def static_bytes(self) -> int:
        """Of the device: the training state and what else is held between the engine's calls."""
        return sum(part.bytes for part in self.parts if part.static and part.place == "device")

    @property
    def state_bytes(self) -> int:
        """Of the device: the training state alone."""
        return sum(part.bytes for part in self.parts if part.state and part.place == "device")


Scene = Sequence[Part]
