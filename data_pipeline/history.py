"""A run's past where something of it was changed on the way: other global batches, other windows, other data.

Samples are numbered through the whole run, whatever they are made of, and steps read consecutive ones. A change falls
between two steps. What it says of the samples before it is kept as it was: the sizes of the steps up to there, and the
description of the order they were read in, out of which that order is made again by arithmetic.

Behind a change of data or of the windows' length a new order begins with the next sample:

    given     A source goes on behind the windows it has given where they are the very same ones: tokens with the same
              hash, cut to the same length, in the same kind of rows. Otherwise it begins with the first window of its
              first epoch. So no window comes twice before all came once, through any number of changes and back.
    stages    `from_tokens` counts the run's tokens, samples times their lengths: stages stay where they were. One that
              falls within a window of the new length begins with the next, and nothing is read of one that would
              also end there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from data_pipeline.order import Begin, SampleOrder, Stage
from data_pipeline.steps import Steps

Mixture: TypeAlias = Sequence[tuple[int, Mapping[str, float]]]  # a recipe's stages: from_tokens, weights


@dataclass(frozen=True)
class Read:
    """What samples were read from: an order's description with `content_sha256`, where the collection lay, and of each
    source a hash of its tokens (`shards.Collection.streams`)."""

    order: Mapping[str, Any]
    path: str | None
    streams: Mapping[str, str]


@dataclass(frozen=True)
class Change:
    """What was changed between two steps, and how it had been. `changed`: entries of `name`, `from` and `to`."""

    global_step: int  # steps before it
    consumed_samples: int  # samples before it
    tokens_seen: int
    changed: Sequence[Mapping[str, Any]]
    parts: tuple[tuple[int, int], ...] | None = None  # of the steps before it (`Steps.parts`), if they were changed
    read: Read | None = None  # if the order was changed

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Change:
        """What `to_dict` gave, through JSON. ValueError where it is none."""
        try:
            before = table["before"]
            parts, read = before.get("batch_ramp"), None
            if "order" in before:
                read = Read(dict(before["order"]), before["data_path"], dict(before["streams"]))
            step, samples, tokens = (table[name] for name in ("global_step", "consumed_samples", "tokens_seen"))
            if any(type(count) is not int or count < 0 for count in (step, samples, tokens)):
                raise ValueError
            steps = None if parts is None else Steps.from_json(1, parts).ramp
            return cls(step, samples, tokens, [dict(one) for one in table["changed"]], steps, read)
        except (KeyError, TypeError, AttributeError, ValueError):
            raise ValueError("a change is damaged") from None

    def to_dict(self) -> dict[str, Any]:
        before: dict[str, Any] = {}
        if self.parts is not None:
            before["batch_ramp"] = [list(part) for part in self.parts]
        if self.read is not None:
            before |= {"order": self.read.order, "data_path": self.read.path, "streams": self.read.streams}
        return {
            "global_step": self.global_step,
            "consumed_samples": self.consumed_samples,
            "tokens_seen": self.tokens_seen,
            "changed": list(self.changed),
            "before": before,
        }


@dataclass(frozen=True)
class History:
    """The changes of a run, in order; none for most."""

    changes: tuple[Change, ...] = ()

    @classmethod
    def of(cls, tables: object) -> History:
        """Out of JSON. ValueError where it is none."""
        if not isinstance(tables, list):
            raise ValueError("changes are a list")
        changes = tuple(Change.of(table) for table in tables)
        if any(b.consumed_samples <= a.consumed_samples for a, b in pairwise(changes)):
            raise ValueError("changes are in order")
        return cls(changes)

    def to_json(self) -> list[dict[str, Any]]:
        return [change.to_dict() for change in self.changes]

    def made_at(self, step: int) -> Change | None:
        """The last change, if it was made behind that many steps."""
        return self.changes[-1] if self.changes and self.changes[-1].global_step == step else None

    def steps(self, recipe: Steps) -> Steps:
        """The run's steps: as they were up to the last change of them, from there on those of the recipe.

        ValueError: see `Steps.behind`.
        """
        for change in reversed(self.changes):
            if change.parts is not None:
                return recipe.behind(Steps(1, change.parts), change.consumed_samples)
        return recipe

    def reads(self) -> Iterator[tuple[int, Read]]:
        """What earlier samples were read from, each with the sample at which it ends (exclusive)."""
        return ((change.consumed_samples, change.read) for change in self.changes if change.read is not None)

    def position(self) -> tuple[int, int]:
        """The sample with which the present order begins, and how many of the run's tokens lie before it."""
        sample = token = 0
        for end, read in self.reads():
            sample, token = end, token + (end - sample) * int(read.order["seq_len"])
        return sample, token

    def stages(self, mixture: Mixture, seq_len: int) -> list[Stage]:
        """A recipe's stages for the present order; its windows are of `seq_len` tokens. None where there are none."""
        sample, token = self.position()
        begun = max((number for number, (start, _) in enumerate(mixture) if start <= token), default=0)
        stages = [Stage(sample + max(0, -(-(start - token) // seq_len)), weights) for start, weights in mixture[begun:]]
        return list({stage.first_sample: stage for stage in stages}.values())  # of those within one window the last

    def begin(self, streams: Mapping[str, str], seq_len: int, packing: str) -> Begin | None:
        """Where the present order begins, of these sources; None with the run's first sample."""
        reads = list(self.reads())
        if not reads:
            return None
        orders = [(end, read, SampleOrder.of(read.order)) for end, read in reads]
        given = dict.fromkeys(sorted(streams), 0)
        for name in given:
            for end, read, order in reversed(orders):
                same_rows = (order.packing == "best_fit") == (packing == "best_fit")
                if read.streams.get(name) == streams[name] and order.seq_len == seq_len and same_rows:
                    given[name] = order.counts(end)[name]
                    break
        return Begin(reads[-1][0], given)

    def order(self, plain: SampleOrder, mixture: Mixture, streams: Mapping[str, str]) -> SampleOrder:
        """The present order, where a run without a past would have `plain`. ValueError: the stages do not fit."""
        begin = self.begin(streams, plain.seq_len, plain.packing)
        return plain if begin is None else plain.behind(begin, self.stages(mixture, plain.seq_len))
