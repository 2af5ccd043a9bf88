"""What may be chosen so that a recipe fits, and what each choice costs: a model of its time per token.

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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from model.accounting import flops_per_token, parameter_count
from pretrain.config import Compute, RunConfig, from_root
from pretrain.memory import BYTES
from pretrain.resolve import read_json, zero_stage

# The machine of the cost model, per second.
FLOPS = 0.4 * 3.12e14
LINK_BYTES = 25e9
HOST_BYTES = 50e9
NVME_BYTES = 3e9
HALF_RATE_TOKENS = 512
SELECTIVE_SHARE = 0.05
CPU_ADAMW_BYTES = 30  # reads gradient 4, master 4, moments 8; writes master 4, moments 8, weight 2

Where = Literal["none", "cpu", "nvme"]


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
