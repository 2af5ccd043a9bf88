"""What a search for a configuration that fits finds, and how it is told: needs, changes, proposals."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from pretrain.config import RunConfig
from pretrain.device_memory import GB, PROCESS_BYTES, DeviceMemory, show_size
from pretrain.fit_cost import Choice
from pretrain.memory import MOMENTS, Budget

# What a caching allocator cannot use of memory that was cut into pieces, of the peak.
FRAGMENTATION = 0.05

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Need:
    """What one rank of a configuration needs: the predicted peak, and what is set aside beside it. Bytes.

    On a CPU what is offloaded lies in the same memory, so `peak_bytes` holds it too and `host_bytes` is 0.
    """

    peak_bytes: int
    moment: str
    process_bytes: int
    fragmentation_bytes: int
    host_bytes: int

    @classmethod
    def of(cls, held: Budget, kind: Kind) -> Need:
        shared = kind == "cpu"
        totals = {moment: held.at(moment) + (held.at(moment, "host") if shared else 0) for moment in MOMENTS}
        moment = max(totals, key=totals.__getitem__)
        peak = totals[moment]
        host = 0 if shared else held.peak_bytes("host")
        return cls(peak, moment, PROCESS_BYTES[kind], round(FRAGMENTATION * peak), host)

    @property
    def total_bytes(self) -> int:
        return self.peak_bytes + self.process_bytes + self.fragmentation_bytes

    def fits(self, memory: DeviceMemory) -> bool:
        on_host = memory.host_bytes is None or self.host_bytes <= memory.host_bytes
        return self.total_bytes <= memory.total_bytes and on_host


@dataclass(frozen=True)
class Change:
    """One thing to set; its values are the recipe's keys, several where they belong together."""

    values: tuple[tuple[str, Any], ...]

    def to_text(self) -> str:
        return " with ".join(f"{key} = {json.dumps(value)}" for key, value in self.values)


@dataclass(frozen=True)
class Proposal:
    """A configuration that the engine takes, what it needs, and the changes that lead to it, cheapest first.

    `seconds_per_token` is the cost model's.
    """

    config: RunConfig
    choice: Choice
    changes: tuple[Change, ...]
    need: Need
    seconds_per_token: float
    accumulation_steps: int

    @property
    def values(self) -> list[tuple[str, Any]]:
        return [pair for change in self.changes for pair in change.values]

    def to_text(self) -> str:
        """`batch.micro_batch_size = 2 and memory.activation_checkpointing = "full"`."""
        return _listed([change.to_text() for change in self.changes])

    def to_toml(self) -> str:
        """The changed lines of the recipe, under their tables."""
        tables: dict[str, list[str]] = {}
        for key, value in self.values:
            table, _, name = key.partition(".")
            tables.setdefault(table, []).append(f"{name} = {json.dumps(value)}")
        return "\n\n".join("\n".join([f"[{table}]", *lines]) for table, lines in tables.items())

    def to_overrides(self) -> list[str]:
        """The same as values of `--set`."""
        return [f"{key}={value}" for key, value in self.values]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        precision = self.config.precision
        return {
            "micro_batch_size": self.choice.micro_batch_size,
            "gradient_accumulation_steps": self.accumulation_steps,
            "activation_checkpointing": self.choice.checkpointing,
            "deepspeed": self.choice.layout.path,
            "accumulate": precision.accumulate,
            "master": precision.master,
            "compensation": precision.compensation,
            "needed_bytes": self.need.total_bytes,
            "peak_bytes": self.need.peak_bytes,
            "peak_moment": self.need.moment,
            "host_bytes": self.need.host_bytes,
            "seconds_per_token": self.seconds_per_token,
            "changes": dict(self.values),
        }


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


@dataclass(frozen=True)
class Fit:
    """The first configuration that fits, and in order those tried before it; else the smallest, and what would do.

    Not tried is what is dearer than one tried before and no smaller, and what no micro-batch would make fit.
    """

    passed_over: tuple[Proposal, ...]  # of kinds that cannot fit, before the first that can, the smallest of each
    tried: tuple[Proposal, ...]
    chosen: Proposal | None
    smallest: Proposal  # `chosen`, or what needs least
    memory: DeviceMemory
    world_size: int
    enough_ranks: int | None  # where nothing fits: so many such devices would do

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        chosen = self.chosen
        return {
            "device_memory_bytes": self.memory.total_bytes,
            "passed_over": [one.to_dict() for one in self.passed_over],
            "tried": [one.to_dict() for one in self.tried],
            "chosen": None if chosen is None else chosen.to_dict(),
            "smallest": self.smallest.to_dict(),
            "toml": None if chosen is None else chosen.to_toml(),
            "set": None if chosen is None else chosen.to_overrides(),
            "enough_ranks": self.enough_ranks,
        }

    def to_text(self) -> str:
        """The same for people."""
        shown = (*self.passed_over, *self.tried)
        fastest = (self.tried or self.passed_over)[0].seconds_per_token
        lines = [
            f"configurations for {self.world_size} × {show_size(self.memory.total_bytes)} in the order tried, cheapest "
            "first (pretrain/fit.py)",
            "    batch × accumulation  checkpointing  DeepSpeed JSON                masters, sums         needs  "
            "time/token",
        ]
        for one in shown:
            mark = "*" if one is self.chosen else "-" if one in self.passed_over else " "
            precision = one.config.precision
            kahan = "" if precision.compensation == "none" else f" {precision.compensation}"
            batch = f"{one.choice.micro_batch_size} × {one.accumulation_steps}"
            dtypes = f"{precision.master}{kahan}, {precision.accumulate}"
            host = f"  + host {show_size(one.need.host_bytes)}" if one.choice.layout.offload_level else ""
            lines.append(
                f"  {mark} {batch:>20}  {one.choice.checkpointing:<13}  {one.choice.layout.path:<28}  {dtypes:<16}  "
                f"{show_size(one.need.total_bytes):>9}  {one.seconds_per_token / fastest:10.2f}{host}"
            )
        if self.passed_over:
            lines.append("  - the smallest of its kind of numerics and offloading, none of which can fit")
        if self.chosen is None:
            return "\n".join(lines)
        if not self.chosen.changes:
            return "\n".join([*lines, "  * fits: the recipe as it is"])
        sets = " ".join(f"--set {override}" for override in self.chosen.to_overrides())
        toml = self.chosen.to_toml()
        return "\n".join([*lines, "  * the first that fits; in the recipe:", "", toml, "", f"or {sets}"])

    def failure(self) -> str:
        """One line where nothing fits."""
        smallest, memory = self.smallest, self.memory
        gigabytes = math.ceil(smallest.need.total_bytes / GB)
        ranks = "" if self.enough_ranks is None else f", or {self.enough_ranks} ranks with one such device each"
        return (
            f"nothing fits {self.world_size} × {show_size(memory.total_bytes)}: the smallest, with "
            f"{smallest.to_text() if smallest.changes else 'the recipe as it is'}, needs "
            f"{show_size(smallest.need.total_bytes)} a rank: {_devices(gigabytes, smallest, memory)} would do{ranks}"
        )


def _devices(gigabytes: int, smallest: Proposal, memory: DeviceMemory) -> str:
    if memory.host_bytes is not None and smallest.need.host_bytes > memory.host_bytes:
        return (
            f"{show_size(smallest.need.host_bytes)} of main memory a rank (this one has {show_size(memory.host_bytes)})"
        )
    return f"a device of {gigabytes} GB"
