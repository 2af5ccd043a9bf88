"""What to change so that a recipe fits: an order of all changes that save memory, and searches by it.

A change never touches the global batch, the order of data or the schedule: a smaller micro-batch means more of them.
Whatever is proposed has been through `resolve` and `memory.budget`, so nothing is named that the engine refuses.

**The order.** Changes are compared by three things, the first that differs deciding:

1. offloading: none; the optimizer in main memory; parameters too; anything on NVMe. It ties the run to the host's
   memory and to its links, and is the last resort.
2. numerics: those of the recipe; gradients summed in 16 bits; bf16 masters and moments with Kahan compensation (which
   keeps what bf16 loses of the masters, not of the moments); both. All else here leaves the mathematics as it is.
3. time per token, `fit_cost.seconds_per_token`: a sum of arithmetic, communication and traffic with the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from pretrain.config import PROJECT_ROOT, Compute, RecipeError, RunConfig, from_root, parse_recipe, show
from pretrain.device_memory import DeviceMemory, show_size
from pretrain.fit_cost import Choice, Layout, Numerics, recomputed_share, seconds_per_token
from pretrain.fit_found import FRAGMENTATION, Change, Fit, Kind, Need, Proposal
from pretrain.memory import budget
from pretrain.resolve import read_json, resolve

MOST_TOKENS = 65_536  # of a micro-step; more gain less than a hundredth
MODES = ("none", "selective", "every-2", "full")
MOST_RANKS = 1024
MOST_SIZES = 24
LEAST_RELIEF = 0.05  # of what a rank needs: a change that saves less changes nothing


class Search:
    """All configurations that may stand in for one recipe on a number of ranks, and what each needs.

    A configuration needs least with a micro-batch of 1, or with all that a rank reads of a step at once: then nothing
    is accumulated beside it. Where neither fits, no size between them is looked at. RecipeError where the global batch
    cannot be divided over the ranks at all.
    """

    def __init__(self, config: RunConfig, world_size: int, kind: Kind, compute: Compute) -> None:
        self.config, self.world_size, self.kind, self.compute = config, world_size, kind, compute
        self._proposals: dict[tuple[int, str, str, int, bool], Proposal | None] = {}
        if not 1 <= world_size < 2**31:
            raise RecipeError(f"world size {show(world_size)}: must be at least 1 and below 2^31")
        sizes = [config.batch.global_batch_size, *(part.global_batch_size for part in config.batch.ramp)]
        undivided = next((size for size in sizes if size % world_size), None)
        if undivided is not None:
            raise RecipeError(
                f"a step of {undivided} sequences (batch.global_batch_size, batch.ramp) cannot be divided over "
                f"{world_size} ranks: change one of them"
            )
        self._per_rank = math.gcd(*sizes) // world_size

    @cached_property
    def own(self) -> Layout:
        """The recipe's DeepSpeed JSON."""
        return Layout.read(self.config.deepspeed.config)

    @cached_property
    def layouts(self) -> list[Layout]:
        """The recipe's own DeepSpeed JSON, and one of ds_configs for whatever else these can do.

        Where ranks run on CPUs, moving something to main memory moves it nowhere.
        """
        found = {self.own.kind: self.own}
        for path in sorted((PROJECT_ROOT / "ds_configs").glob("zero*.json")):
            try:
                layout = Layout.read(str(path.relative_to(PROJECT_ROOT)))
            except RecipeError:
                continue  # not this recipe's file: whoever names it is told
            if self.kind == "cuda" or "cpu" not in (layout.optimizer, layout.parameters):
                found.setdefault(layout.kind, layout)
        return list(found.values())

    @cached_property
    def numerics(self) -> list[Numerics]:
        """The recipe's, and those that give up something."""
        precision = self.config.precision
        half = (("accumulate", self.compute),) if precision.accumulate == "fp32" and self.compute != "fp32" else ()
        masters: tuple[tuple[str, str], ...] = ()
        if precision.master == "fp32" and self.compute == "bf16":
            masters = (("master", "bf16"), ("compensation", "kahan"))
            if precision.moments != "master":
                masters += (("moments", "master"),)
        levels = [(), half, masters, (*half, *masters)]
        return [Numerics(level, values) for level, values in enumerate(levels) if values not in levels[:level]]

    def micro_batch_sizes(self, most: int) -> list[int]:
        """Those that divide what a rank reads of a step, the largest first.

        Of very many some: 1, the recipe's own and the whole are always among them.
        """
        whole = self._per_rank
        low = [size for size in range(1, math.isqrt(whole) + 1) if whole % size == 0]
        sizes = sorted(size for size in {*low, *(whole // size for size in low)} if size <= most)
        some = {*sizes[:: -(-len(sizes) // MOST_SIZES)], self.config.batch.micro_batch_size, whole}
        return [size for size in reversed(sizes) if size in some]

    def modes(self) -> list[str]:
        """Checkpointing by what it computes again, the recipe's own mode among the usual ones."""
        modes = {*MODES, self.config.memory.activation_checkpointing}
        return sorted(modes, key=lambda mode: recomputed_share(self.config, mode))

    def cost(self, choice: Choice) -> tuple[int, int, float]:
        """What the order goes by: offloading, numerics, seconds a token."""
        seconds = seconds_per_token(self.config, choice, self.world_size, self.compute)
        return choice.layout.offload_level, choice.numerics.level, seconds

    def changes(self, choice: Choice) -> tuple[Change, ...]:
        """What of the recipe `choice` sets otherwise, cheapest first: each costed as if it were the only one."""
        config, own = self.config, self._own_choice
        alone: list[tuple[Choice, Change]] = []
        if choice.micro_batch_size != config.batch.micro_batch_size:
            one = Choice(choice.micro_batch_size, own.checkpointing, own.layout, own.numerics)
            alone.append((one, Change((("batch.micro_batch_size", choice.micro_batch_size),))))
        if choice.checkpointing != own.checkpointing:
            one = Choice(own.micro_batch_size, choice.checkpointing, own.layout, own.numerics)
            alone.append((one, Change((("memory.activation_checkpointing", choice.checkpointing),))))
        if choice.layout is not own.layout:
            one = Choice(own.micro_batch_size, own.checkpointing, choice.layout, own.numerics)
            alone.append((one, Change((("deepspeed.config", choice.layout.path),))))
        if choice.asynchronous != own.asynchronous:  # costs no training step anything
            alone.append((own, Change((("checkpoint.asynchronous", choice.asynchronous),))))
        for values in _split(choice.numerics.values):
            one = Choice(own.micro_batch_size, own.checkpointing, own.layout, choice.numerics)
            alone.append((one, Change(tuple((f"precision.{key}", value) for key, value in values))))
        return tuple(change for _, change in sorted(alone, key=lambda pair: self.cost(pair[0])))

    def count(self, choice: Choice) -> int:
        """How many changes that is."""
        differ = (
            choice.micro_batch_size != self.config.batch.micro_batch_size,
            choice.checkpointing != self.config.memory.activation_checkpointing,
            choice.layout is not self.own,
            choice.asynchronous != self.config.checkpoint.asynchronous,
        )
        return sum(differ) + len(_split(choice.numerics.values))

    def propose(self, choice: Choice) -> Proposal | None:
        """`choice` as a configuration with what it needs; None where recipe or engine refuse it."""
        key = (
            choice.micro_batch_size, choice.checkpointing, choice.layout.path, choice.numerics.level,
            choice.asynchronous,
        )  # fmt: skip
        if key not in self._proposals:
            self._proposals[key] = self._propose(choice)
        return self._proposals[key]

    def least_of_kind(self, choice: Choice) -> list[Proposal]:
        """`choice` with the micro-batches of which one needs least."""
        found = [self.propose(replace(choice, micro_batch_size=size)) for size in sorted({1, self._per_rank})]
        return [one for one in found if one is not None]

    def _propose(self, choice: Choice) -> Proposal | None:
        config = self.config
        try:
            changed = parse_recipe(
                {
                    **{name: getattr(config, name) for name in RunConfig.model_fields},
                    "batch": {**config.batch.model_dump(), "micro_batch_size": choice.micro_batch_size},
                    "memory": {**config.memory.model_dump(), "activation_checkpointing": choice.checkpointing},
                    "checkpoint": {**config.checkpoint.model_dump(), "asynchronous": choice.asynchronous},
                    "deepspeed": {"config": choice.layout.path},
                    "precision": {**config.precision.model_dump(), **dict(choice.numerics.values)},
                }
            )
            need = needed(changed, self.world_size, self.kind, self.compute, choice.layout.json)
        except RecipeError:
            return None
        return Proposal(
            config=changed,
            choice=choice,
            changes=self.changes(choice),
            need=need,
            seconds_per_token=self.cost(choice)[2],
            accumulation_steps=config.batch.global_batch_size // (choice.micro_batch_size * self.world_size),
        )

    def choices(self, *, only_less: bool) -> Iterator[Choice]:
        """All of them; `only_less`: those alone that keep or lower what the recipe's own settings hold."""
        own = self._own_choice
        tokens = MOST_TOKENS // self.config.model.seq_len
        most = own.micro_batch_size if only_less else max(own.micro_batch_size, tokens)
        modes = self.modes()
        least = recomputed_share(self.config, own.checkpointing) if only_less else 0.0
        copies_or_not = [True, False] if own.asynchronous else [False]
        for size in self.micro_batch_sizes(most):
            for mode in modes:
                if recomputed_share(self.config, mode) < least:
                    continue
                for layout in self.layouts:
                    lower = (layout.offload_level, layout.stage) < (own.layout.offload_level, own.layout.stage)
                    if only_less and (lower or layout.stage < own.layout.stage):
                        continue
                    for numerics, copies in itertools.product(self.numerics, copies_or_not):
                        yield Choice(size, mode, layout, numerics, copies)

    @cached_property
    def _own_choice(self) -> Choice:
        config = self.config
        return Choice(
            config.batch.micro_batch_size, config.memory.activation_checkpointing, self.own, self.numerics[0],
            config.checkpoint.asynchronous,
        )  # fmt: skip

    def shortest_changes(
        self, memory: DeviceMemory, *, resumable: bool = False
    ) -> tuple[Proposal | None, Proposal | None]:
        """See the function of that name."""

        def order(choice: Choice) -> tuple[int, int, int, float]:
            offload, numerics, seconds = self.cost(choice)
            return offload, numerics, self.count(choice), seconds

        choices = [
            choice
            for choice in self.choices(only_less=True)
            if not resumable or (choice.layout is self.own and not choice.numerics.level)
        ]
        for proposal in self._that_may_fit(sorted(choices, key=order), memory):
            if proposal.need.fits(memory):
                return proposal, proposal
        return None, self._smallest(choices)

    def first_fit(self, memory: DeviceMemory) -> Fit:
        """See the function of that name."""

        def order(choice: Choice) -> tuple[int, int, float, int]:
            return (*self.cost(choice), self.count(choice))

        choices = sorted(self.choices(only_less=False), key=order)
        tried: list[Proposal] = []
        for proposal in self._that_may_fit(choices, memory):
            if any(_no_smaller(proposal.need, one.need) for one in tried):
                continue
            tried.append(proposal)
            if proposal.need.fits(memory):
                over = self._passed_over(choices, proposal.choice)
                return Fit(over, tuple(tried), proposal, proposal, memory, self.world_size, None)
        smallest = self._smallest(choices)
        if smallest is None:
            resolve(self.own.json, self.config, self.world_size, self.compute)  # says why
            raise RecipeError("no configuration of this recipe can run")
        enough = self._enough_ranks(smallest.choice, memory)
        over = self._passed_over(choices, None)
        return Fit(over, (), None, smallest, memory, self.world_size, enough)

    def _that_may_fit(self, choices: Iterable[Choice], memory: DeviceMemory) -> Iterator[Proposal]:
        for choice in choices:
            if any(one.need.fits(memory) for one in self.least_of_kind(choice)):
                proposal = self.propose(choice)
                if proposal is not None:
                    yield proposal

    def _passed_over(self, choices: Iterable[Choice], chosen: Choice | None) -> tuple[Proposal, ...]:
        """Of each kind of offloading and numerics that comes before `chosen`'s, what needs least."""
        kinds: dict[tuple[int, int], list[Choice]] = {}
        for choice in choices:
            kinds.setdefault(self.cost(choice)[:2], []).append(choice)
        before = [kind for kind in sorted(kinds) if chosen is None or kind < self.cost(chosen)[:2]]
        smallest = [self._smallest(kinds[kind]) for kind in before]
        return tuple(one for one in smallest if one is not None)

    def _smallest(self, choices: Iterable[Choice]) -> Proposal | None:
        """What needs least of the device, and of those that need no more the one with the fewest changes."""
        least = [self.propose(choice) for choice in choices if choice.micro_batch_size in (1, self._per_rank)]
        proposals = (one for one in least if one is not None)
        return min(proposals, key=lambda one: (one.need.total_bytes, len(one.changes)), default=None)

    def _enough_ranks(self, choice: Choice, memory: DeviceMemory) -> int | None:
        """On how many ranks `choice` fits, each with such a device; None where that does not help, or all share one."""
        if self.kind == "cpu":
            return None
        ranks = 2 * self.world_size
        while ranks <= MOST_RANKS and self.config.batch.global_batch_size % ranks == 0:
            wider = Search(self.config, ranks, self.kind, self.compute).least_of_kind(choice)
            if any(one.need.fits(memory) for one in wider):
                return ranks
            ranks *= 2
        return None


def _split(values: tuple[tuple[str, str], ...]) -> list[tuple[tuple[str, str], ...]]:
    """The accumulation dtype is one change, the masters with what goes with them another."""
    sums = tuple(pair for pair in values if pair[0] == "accumulate")
    masters = tuple(pair for pair in values if pair[0] != "accumulate")
    return [part for part in (sums, masters) if part]


def needed(
    config: RunConfig,
    world_size: int,
    kind: Kind,
    compute: Compute,
    ds_json: dict[str, Any] | None = None,
) -> Need:
    """What one rank of `config` needs. RecipeError where it cannot run as written."""
    read = read_json(from_root(config.deepspeed.config)) if ds_json is None else ds_json
    deepspeed = resolve(read, config, world_size, compute)
    return Need.of(budget(config, deepspeed, world_size, compute=compute, device=kind), kind)


def shortest_changes(
    config: RunConfig, world_size: int, memory: DeviceMemory, compute: Compute, *, resumable: bool = False
) -> tuple[Proposal | None, Proposal | None]:
    """The shortest list of changes with which `config` fits, and the smallest configuration where none does.

    First come lists without offloading, then those that keep the numerics, then the shorter ones, then the quicker
    ones. The first of the pair is None where nothing fits. `resumable`: only what a checkpoint of the recipe goes on
    under, so neither stage nor dtypes.
    """
    return Search(config, world_size, memory.kind, compute).shortest_changes(memory, resumable=resumable)


def first_fit(config: RunConfig, world_size: int, memory: DeviceMemory, compute: Compute) -> Fit:
    """The cheapest configuration that fits, whatever micro-batch, checkpointing and stage the recipe has now.

    Numerics are the recipe's or give up more, never less. RecipeError where the global batch cannot be divided over
    the ranks, or the recipe cannot run in any configuration.
    """
    return Search(config, world_size, memory.kind, compute).first_fit(memory)


def _no_smaller(need: Need, than: Need) -> bool:
    return need.total_bytes >= than.total_bytes and need.host_bytes >= than.host_bytes


# ---------------------------------------------------------------- what is said


def too_big(config: RunConfig, world_size: int, memory: DeviceMemory, need: Need, compute: Compute) -> str | None:
    """One line with the shortest list of changes, where `need` is more than `memory` has; None where it fits."""
    if need.fits(memory):
        return None
    proposal, smallest = shortest_changes(config, world_size, memory, compute)
    larger = "use more ranks or a larger device" if memory.kind == "cuda" else "use a machine with more memory"
    if memory.occupied:
        larger = f"wait until others free theirs, or {larger}"
    if proposal is not None:
        remedy = f"set {proposal.to_text()}, then it needs {_needs(proposal)}"
    elif smallest is not None and smallest.changes:
        remedy = f"even with {smallest.to_text()} it needs {_needs(smallest)}: {larger}"
    else:
        remedy = f"no change makes it smaller: {larger}"
    if memory.occupied and larger not in remedy:
        remedy += "; or wait until others free theirs"
    if need.total_bytes > memory.total_bytes:
        beside = "context" if memory.kind == "cuda" else "process"
        lacks = (
            f"a rank needs {show_size(need.total_bytes)} (the predicted peak {show_size(need.peak_bytes)} in "
            f"{need.moment}, {show_size(need.process_bytes)} {beside}, {FRAGMENTATION:.0%} for fragmentation) and has "
            f"{show_size(memory.total_bytes)} ({memory.source})"
        )
    else:
        lacks = f"a rank needs {show_size(need.host_bytes)} of main memory and has {show_size(memory.host_bytes or 0)}"
    return f"does not fit: {lacks}: {remedy}"


def _needs(proposal: Proposal) -> str:
    host = f" and {show_size(proposal.need.host_bytes)} of main memory" if proposal.choice.layout.offload_level else ""
    return show_size(proposal.need.total_bytes) + host


def relief(
    config: RunConfig, world_size: int, kind: Kind, compute: Compute, missing_bytes: int
) -> tuple[Proposal | None, bool]:
    """What to change where a run met the end of its memory, `missing_bytes` short, and whether its checkpoints go on.

    The shortest list of changes that a checkpoint of the run resumes under and that needs so much less, at least
    `LEAST_RELIEF`; without one, the shortest of all; without that, what of the former needs least. None where even that
    saves less than `LEAST_RELIEF`.
    """
    now = needed(config, world_size, kind, compute).total_bytes
    helpful = now - round(LEAST_RELIEF * now)
    wanted = DeviceMemory(kind, min(now - missing_bytes, helpful), "less than now")
    resuming, smallest = shortest_changes(config, world_size, wanted, compute, resumable=True)
    other = None if resuming is not None else shortest_changes(config, world_size, wanted, compute)[0]
    if other is not None:
        return other, False
    found = resuming or smallest
    if found is None or found.need.total_bytes > helpful:
        return None, True
    return found, True
