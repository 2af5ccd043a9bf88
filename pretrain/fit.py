"""What to change so that a recipe fits: a cost model for every change that saves memory, and searches by it.

A change never touches the global batch, the order of data or the schedule: a smaller micro-batch means more of them.
Whatever is proposed has been through `resolve` and `memory.budget`, so nothing is named that the engine refuses.

**The order.** Changes are compared by three things, the first that differs deciding:

1. offloading: none; the optimizer in main memory; parameters too; anything on NVMe. It ties the run to the host's
   memory and to its links, and is the last resort.
2. numerics: those of the recipe; gradients summed in 16 bits; bf16 masters and moments with Kahan compensation (which
   keeps what bf16 loses of the masters, not of the moments); both. All else here leaves the mathematics as it is.
3. time per token, `seconds_per_token`: a sum of arithmetic, communication and traffic with the host.

**Time per token** of one rank, in seconds on a stated machine, of which only the order matters:

- Arithmetic: (training FLOPs + FLOPs computed again) / 1.25e14, 40 % of an A100's dense bf16 peak (3.12e14, NVIDIA's
  data sheet). FLOPs are `model.accounting.flops_per_token`'s, causal. Checkpointing computes again: "full" the forward
  pass of all blocks, "every-N" of each N-th, "selective" no product (Korthikanti et al. 2022, section 5), its norms,
  RoPE and SiLU taken as 5 % of a step.
- A micro-step of t tokens runs at t / (t + 512) of that rate: small products leave a GPU idle. 512 is an assumption.
- Communication by volumes of ZeRO (Rajbhandari et al. 2020, section 7), w the bytes of all weights, g those of all
  gradients in the dtype they are summed in, n ranks, at 25 GB/s (PCIe 4.0 × 16), nothing of it hidden behind
  arithmetic: (n − 1)/n of 2g an optimizer step in stage 0, of g + w in stage 1; in stage 2 of g a micro-step and w a
  step; in stage 3 of g + 2w a micro-step. So a small micro-batch costs more the higher the stage.
- An offloaded optimizer: gradients to the host and weights back over the same link (the gradients a micro-step under
  ZeRO-2 and 3), and AdamW on the CPU, 30 bytes a parameter at 50 GB/s. Offloaded parameters are fetched twice a
  micro-step. What lies on NVMe is read and written at 3 GB/s.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from model.accounting import flops_per_token, parameter_count
from pretrain.config import PROJECT_ROOT, Compute, RecipeError, RunConfig, from_root, parse_recipe, show
from pretrain.device_memory import GB, PROCESS_BYTES, DeviceMemory, show_size
from pretrain.memory import BYTES, MOMENTS, Budget, budget
from pretrain.resolve import read_json, resolve, zero_stage

# What a caching allocator cannot use of memory that was cut into pieces, of the peak.
FRAGMENTATION = 0.05

# The machine of the cost model, per second.
FLOPS = 0.4 * 3.12e14
LINK_BYTES = 25e9
HOST_BYTES = 50e9
NVME_BYTES = 3e9
HALF_RATE_TOKENS = 512
SELECTIVE_SHARE = 0.05
CPU_ADAMW_BYTES = 30  # reads gradient 4, master 4, moments 8; writes master 4, moments 8, weight 2
MOST_TOKENS = 65_536  # of a micro-step; more gain less than a hundredth

MODES = ("none", "selective", "every-2", "full")
MOST_RANKS = 1024
MOST_SIZES = 24
LEAST_RELIEF = 0.05  # of what a rank needs: a change that saves less changes nothing

Where = Literal["none", "cpu", "nvme"]
Kind = Literal["cpu", "cuda"]


# ---------------------------------------------------------------- what a configuration needs


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


# ---------------------------------------------------------------- what may be chosen


@dataclass(frozen=True)
class Layout:
    """A DeepSpeed JSON, by what decides here."""

    path: str
    json: dict[str, Any]
    stage: int
    optimizer: Where
    parameters: Where

    @classmethod
    def read(cls, path: str) -> Layout:
        ds_json = read_json(from_root(path))
        stage = zero_stage(ds_json)

        def where(key: str) -> Where:
            section = ds_json["zero_optimization"].get(key)
            device = section.get("device", "none") if isinstance(section, Mapping) else "none"
            return "cpu" if device == "cpu" else "nvme" if device == "nvme" else "none"

        return cls(path, ds_json, stage, where("offload_optimizer"), where("offload_param"))

    @property
    def offload_level(self) -> int:
        """0 none, 1 the optimizer in main memory, 2 parameters too, 3 the optimizer on NVMe, 4 parameters too."""
        places = {"none": 0, "cpu": 1, "nvme": 3}
        return max(places[self.optimizer], places[self.parameters] + 1 if self.parameters != "none" else 0)

    @property
    def kind(self) -> tuple[int, Where, Where]:
        return self.stage, self.optimizer, self.parameters


@dataclass(frozen=True)
class Numerics:
    """Dtypes that give up something of the recipe's, the more the higher the level."""

    level: int
    values: tuple[tuple[str, str], ...]  # of [precision]


@dataclass(frozen=True)
class Choice:
    """One point of the search: everything that it may set."""

    micro_batch_size: int
    checkpointing: str
    layout: Layout
    numerics: Numerics
    asynchronous: bool = False  # saving, from a copy


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


# ---------------------------------------------------------------- the cost model


def recomputed_share(config: RunConfig, mode: str) -> float:
    """FLOPs that checkpointing computes again, as a share of those of a training step."""
    model = config.model
    total = flops_per_token(model).causal
    blocks = total / 3 - 2 * model.vocab_size * model.d_model  # forward; the head is no block's
    if mode == "none":
        return 0.0
    if mode == "selective":
        return SELECTIVE_SHARE
    period = 1 if mode == "full" else int(mode.removeprefix("every-"))
    return blocks / total * (model.n_layers // period) / model.n_layers


def seconds_per_token(config: RunConfig, choice: Choice, world_size: int, compute: Compute) -> float:
    """The cost model of this module's docstring, for one rank."""
    layout, stage = choice.layout, choice.layout.stage
    micro_tokens = choice.micro_batch_size * config.model.seq_len
    step_tokens = config.batch.global_batch_size * config.model.seq_len / world_size
    parameters = parameter_count(config.model)
    weights = parameters * BYTES[compute]
    accumulate = dict(choice.numerics.values).get("accumulate", config.precision.accumulate)
    gradients = parameters * BYTES[accumulate]
    others = (world_size - 1) / world_size

    repeated = 1 + recomputed_share(config, choice.checkpointing)
    flops = flops_per_token(config.model).causal * repeated * (1 + HALF_RATE_TOKENS / micro_tokens)
    a_micro_step = {2: gradients, 3: gradients + 2 * weights}.get(stage, 0) * others / LINK_BYTES
    a_step = {0: 2 * gradients, 1: gradients + weights, 2: weights}.get(stage, 0) * others / LINK_BYTES
    if layout.optimizer != "none":
        owned = parameters / world_size
        to_host = owned * BYTES[accumulate] / LINK_BYTES
        a_micro_step += to_host if stage >= 2 else 0
        a_step += to_host if stage < 2 else 0
        a_step += owned * (CPU_ADAMW_BYTES / HOST_BYTES + BYTES[compute] / LINK_BYTES)
        if layout.optimizer == "nvme":
            a_step += owned * 2 * 12 / NVME_BYTES
    if layout.parameters != "none":
        rate = NVME_BYTES if layout.parameters == "nvme" else LINK_BYTES
        a_micro_step += 2 * weights / world_size / rate
    return flops / FLOPS + a_micro_step / micro_tokens + a_step / step_tokens


# ---------------------------------------------------------------- the search


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
