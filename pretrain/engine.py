"""Everything that touches DeepSpeed, and nothing else in this package does.

DeepSpeed ignores keys it does not know, fills absent ones with surprising defaults and swaps optimizers without a word.
So `resolve` decides beforehand what the engine will be told, as a pure function: the recipe owns batch, clipping,
precision and optimizer; the DeepSpeed JSON owns ZeRO stage, offloading, buckets and overlap, and says "auto" where the
recipe decides. DeepSpeed and torch are imported inside the functions that need them, so that planning stays quick.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pretrain.batching import BatchPlan
from pretrain.config import PROJECT_ROOT, Compute, RecipeError, RunConfig, mismatch, nearest, show

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from model.loss import LossSum
    from model.transformer import Transformer
    from pretrain.elastic import Layout
    from pretrain.muon import Matrix
    from pretrain.runtime import Ranks
    from pretrain.snapshot import Snapshot

AUTO = "auto"

# By name, what writes a file of a checkpoint to a path.
Files: TypeAlias = dict[str, Callable[[Path], None]]

# What a value may be: true or false; one of some words; a whole number of a range (5e7 is one too).
Kind = type[bool] | tuple[str, ...] | range
COUNT = range(1, 2**62)
COUNT_OR_NONE = range(2**62)
BUCKET = range(1, 2**31)  # elements of a buffer that is allocated whole

# fp16's loss scale. At 1 an overflow is no more the scale's fault. DeepSpeed is told a window that never ends: it would
# double the scale before it divides the gradient by it, and so halve that update; here it is done behind the update.
SMALLEST_LOSS_SCALE = 1
ENDLESS_WINDOW = 2**62

# How long a rank waits for the others. The longest it waits for nothing bad is what the first does alone: it verifies
# the checkpoint that the run goes on from.
TIMEOUT_MINUTES = 10.0

# What the JSON may set beside zero_optimization, as DeepSpeed spells it. Left out on purpose: keys that take a number
# away from the recipe (below), what changes the mathematics behind the recipe's back, and sections of tools whose
# values nothing here checks.
JSON_KEYS: dict[str, Kind] = {
    "communication_data_type": ("bf16", "fp32"),
    "steps_per_print": COUNT,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "dump_state": bool,
    "disable_python_gc": bool,
}
# What it may set in zero_optimization beside the stage.
ZERO_KEYS: dict[str, Kind] = {
    "contiguous_gradients": bool,
    "reduce_scatter": bool,
    "reduce_bucket_size": BUCKET,
    "use_multi_rank_bucket_allreduce": bool,
    "allgather_partitions": bool,
    "allgather_bucket_size": BUCKET,
    "overlap_comm": bool,
    "load_from_fp32_weights": bool,
    "round_robin_gradients": bool,
    "parameter_alignment": bool,
    "ignore_unused_parameters": bool,
    "log_trace_cache_warnings": bool,
    "enable_sanity_checks": bool,
    "sub_group_size": COUNT,
    "stage3_prefetch_bucket_size": COUNT_OR_NONE,
    "stage3_param_persistence_threshold": COUNT_OR_NONE,
    "stage3_model_persistence_threshold": COUNT_OR_NONE,
    "stage3_max_live_parameters": COUNT_OR_NONE,
    "stage3_max_reuse_distance": COUNT_OR_NONE,
    "stage3_gather_16bit_weights_on_model_save": bool,
    "stage3_use_all_reduce_for_fetch_params": bool,
    "stage3_allgather_sequential": bool,
}
# Keys that DeepSpeed has for this section, and why each is refused.
ZERO_REFUSED: dict[str, str] = {
    "stage3_module_granularity_threshold": (
        "with it DeepSpeed 0.19 gathers whole modules, whose gradients it cannot reduce in the first backward"
    ),
}

# What may be held in main memory, each a section of zero_optimization: from which stage on, and its keys.
OFFLOAD_STAGE = {"offload_optimizer": 1, "offload_param": 3}
OFFLOAD_KEYS: dict[str, Kind] = {"device": ("cpu",), "pin_memory": bool}
# Keys that DeepSpeed has for these sections, and why each is refused.
OFFLOAD_REFUSED: dict[str, str] = {
    "ratio": "a part of the optimizer on the device needs DeepSpeed's own CPU Adam, which is not used here",
    "super_offload": "it needs DeepSpeed's own CPU Adam, which is not used here",
    "cpuadam_cores_perc": "it belongs to super_offload, which is not used here",
    **dict.fromkeys(
        ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init"),
        "it belongs to NVMe, which is not supported",
    ),
}

# DeepSpeed's key → the recipe's key that owns the number. In the JSON each may only be "auto".
RECIPE_OWNS: dict[str, str] = {
    "train_batch_size": "batch.global_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.global_batch_size and batch.micro_batch_size",
    "gradient_clipping": "optimizer.gradient_clipping",
    "optimizer": "optimizer",
    "scheduler": "schedule",
    "bf16": "precision.compute and precision.master",
    "fp16": "precision.compute, initial_scale_power and loss_scale_window",
    "torch_autocast": "precision.compute",
    "data_types": "precision.accumulate",
    "activation_checkpointing": "memory.activation_checkpointing",
    "tensorboard": "logging.tensorboard",
}


def refusal(stage: int, compute: Compute, master: str, accumulate: str) -> str | None:
    """Why DeepSpeed 0.19 cannot hold this combination, with what to change; None when it can.

    Two ZeRO-0 ones are refusals of the engine itself. The others are worse, since it would train: at ZeRO-0 in fp16 it
    divides the gradient by a loss scale that it never multiplied the loss by, at ZeRO-1 it has other masters.
    """
    reason = mismatch(compute, master, accumulate)
    if reason is not None:
        return f"precision: {reason}"
    if stage == 0 and master == "bf16":
        return 'ZeRO-0 has no bf16 masters (stages 1, 2, 3 have): set precision.master = "fp32" or raise the stage'
    if stage == 0 and compute == "fp16":
        return "ZeRO-0 does not scale the loss in fp16, and small gradients would vanish: raise the stage to 1, 2 or 3"
    if stage == 0 and compute == "bf16" and accumulate == "fp32":
        return (
            "ZeRO-0 cannot accumulate the gradients of a bf16 model in fp32 (DeepSpeed: unsupported mix): "
            'set precision.accumulate = "bf16" or raise the stage'
        )
    if stage == 1 and master == "bf16" and accumulate == "fp32":
        return (
            "ZeRO-1 with fp32 accumulation silently keeps fp32 masters instead of bf16 ones: "
            'set precision.accumulate = "bf16" or use stage 2 or 3'
        )
    return None


def offload_refusal(ds_json: Mapping[str, Any], config: RunConfig) -> str | None:
    """Why the optimizer of this recipe cannot be offloaded as a valid JSON asks, with what to change; None if it can.

    DeepSpeed 0.19 demands its own CPU Adam for bf16 masters there. Its fp32 moments come back from a checkpoint rounded
    to bf16, at every stage, and it knows no compensation (tests/pretrain/test_offload.py shows what is offered).
    """
    if offloaded(ds_json, "offload_optimizer") is None:
        return None
    if config.optimizer.name != "adamw":
        return (
            f'an optimizer in main memory is AdamW: set optimizer.name = "adamw" instead of "{config.optimizer.name}", '
            "or remove zero_optimization.offload_optimizer"
        )
    if config.precision.master == "bf16":
        return (
            "an optimizer in main memory keeps fp32 masters (DeepSpeed would take bf16 ones only with a CPU Adam that "
            'rounds their fp32 moments to bf16 at every resume): set precision.master = "fp32", or remove '
            "zero_optimization.offload_optimizer"
        )
    return None


def offloaded(ds_json: Mapping[str, Any], section: str) -> str | None:
    """Where "offload_optimizer" or "offload_param" of a valid JSON puts what it is about; None where it stays."""
    found = ds_json["zero_optimization"].get(section)
    return None if found is None else str(found["device"])


def read_json(path: Path) -> dict[str, Any]:
    """The DeepSpeed JSON as written. RecipeError: missing, not JSON, not an object, or a key given twice."""

    def refuse_constant(name: str) -> None:
        raise RecipeError(f"{path}: not valid JSON: {name} is no number of JSON: write a finite number")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise RecipeError(f"{path}: key {twice!r} stands there twice: keep one")
        return dict(pairs)

    if not path.is_file():
        offered = sorted(file.stem for file in (PROJECT_ROOT / "ds_configs").glob("*.json"))
        raise RecipeError(
            f"{path}: no such DeepSpeed JSON: did you mean ds_configs/{nearest(path.stem, offered)}.json? There are "
            f"{', '.join(offered)}"
        )
    try:
        parsed = json.loads(path.read_bytes(), object_pairs_hook=once, parse_constant=refuse_constant)
    except RecipeError:
        raise
    except json.JSONDecodeError as error:
        raise RecipeError(f"{path}: not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 at byte {error.start}: save it as UTF-8") from None
    except RecursionError:
        raise RecipeError(f"{path}: brackets nested too deep: a DeepSpeed JSON has two levels") from None
    except ValueError as error:  # what int() says of thousands of digits
        raise RecipeError(f"{path}: a number there has too many digits ({str(error).partition(':')[0]})") from None
    if not isinstance(parsed, dict):
        raise RecipeError(f"{path}: must hold one JSON object, not a {type(parsed).__name__}")
    return parsed


def zero_stage(ds_json: Mapping[str, Any]) -> int:
    """The ZeRO stage the JSON asks for, 0 to 3. RecipeError when it is absent or anything else."""
    zero = ds_json.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3:
        raise RecipeError(
            f"the DeepSpeed JSON must say the ZeRO stage: zero_optimization.stage = 0, 1, 2 or 3, not {show(stage)}"
        )
    return stage


def resolve(ds_json: dict[str, Any], config: RunConfig, world_size: int, auto: Compute = "bf16") -> dict[str, Any]:
    """What `deepspeed.initialize` will be told: the JSON with every number of the recipe filled in, none left implicit.

    A recipe's precision.compute = "auto" stands for `auto`. Pure: neither argument is changed. RecipeError: unknown key
    (nearest named), a value that its key cannot have, a number two files own, a batch that does not divide, or a
    combination of stage and precision that the engine refuses or silently changes. The optimizer and the schedule are
    handed over as objects, so they have no section here.
    """
    _check_json(ds_json)
    stage = zero_stage(ds_json)
    precision = config.precision
    compute = precision.compute_where(auto)
    reason = refusal(stage, compute, precision.master, precision.accumulate)
    if reason is not None:
        told = "" if precision.compute == compute else f'precision.compute = "auto" means {compute} here: '
        raise RecipeError(told + reason)
    if compute == "fp16" and ds_json.get("communication_data_type") == "bf16":
        raise RecipeError(
            'DeepSpeed JSON: communication_data_type = "bf16" would cut fp16 gradients to 8 bits: '
            'write "fp32" there or remove it'
        )
    reason = offload_refusal(ds_json, config)
    if reason is not None:
        raise RecipeError(reason)
    if config.compile and stage == 3:
        raise RecipeError(
            "compile = true does not go with ZeRO-3, which gathers weights between a block's operations: "
            "use stage 0, 1 or 2, or set compile = false"
        )
    batch = BatchPlan.from_config(config, world_size)

    resolved: dict[str, Any] = {key: _copy(value) for key, value in ds_json.items() if key not in RECIPE_OWNS}
    resolved["train_batch_size"] = batch.global_batch_size
    resolved["train_micro_batch_size_per_gpu"] = batch.micro_batch_size
    resolved["gradient_accumulation_steps"] = batch.gradient_accumulation_steps
    # Absent would mean 1.0, not "off".
    resolved["gradient_clipping"] = config.optimizer.clipping_norm
    bf16_masters = precision.master == "bf16"
    resolved["bf16"] = {
        "enabled": compute == "bf16",
        "bf16_master_weights_and_grads": bf16_masters,
        # fp32 moments beside bf16 masters would need the offloaded CPU optimizer.
        "bf16_optimizer_states": bf16_masters,
    }
    resolved["fp16"] = {"enabled": False}
    if compute == "fp16":
        resolved["fp16"] = {
            "enabled": True,
            "auto_cast": False,
            "loss_scale": 0,  # DeepSpeed's word for a scale that adapts
            "initial_scale_power": precision.initial_scale_power,
            "loss_scale_window": ENDLESS_WINDOW,
            "hysteresis": 1,  # every overflow halves the scale
            "consecutive_hysteresis": False,
            "min_loss_scale": SMALLEST_LOSS_SCALE,
            "fp16_master_weights_and_grads": False,
        }
    # Absent would mean the model's dtype.
    resolved["data_types"] = {"grad_accum_dtype": precision.accumulate}
    # Absent would mean the compute dtype, and what is accumulated in fp32 would pass through bf16 between the ranks.
    resolved.setdefault("communication_data_type", precision.accumulate)
    for section in OFFLOAD_STAGE:
        if offloaded(ds_json, section) is not None:
            resolved["zero_optimization"][section].setdefault("pin_memory", True)
    if offloaded(ds_json, "offload_optimizer") is not None:
        # Absent would demand DeepSpeed's CPU Adam, compiled at its first use; torch's fused AdamW is as fast.
        resolved["zero_force_ds_cpu_optimizer"] = False
    return resolved


def is_torchs(config: RunConfig) -> bool:
    """Whether the recipe's optimizer is torch's own AdamW."""
    precision = config.precision
    plain = precision.compensation == "none" and precision.moments_dtype == precision.master
    return config.optimizer.name == "adamw" and plain


def rounding_warnings(config: RunConfig) -> list[str]:
    """What bf16 numbers lose in this recipe's optimizer, a line each.

    A second moment v in bf16 moves by (1 − beta2)(g² − v): downwards at most, where g = 0, by a part 1 − beta2 of
    itself. Below 1/256, half the distance to the next number, that is rounded away: v grows and does not shrink. The
    same goes for the first moment, and for Muon's momentum.
    """
    precision, optimizer = config.precision, config.optimizer
    moments = {"beta1": "first moments", "beta2": "second moments"}
    if optimizer.name == "muon":
        moments["muon_momentum"] = "Muon's momenta"
    found = []
    if precision.master == "bf16" and precision.compensation == "none":
        found.append(
            "warning: bf16 masters lose every update below 1/512 of a weight, weight decay among them: "
            'precision.compensation = "kahan" (2 bytes a parameter) or "stochastic" (none) keeps them'
        )
    for key, moment in moments.items():
        if precision.moments_dtype == "bf16" and 1 - getattr(optimizer, key) < 1 / 256:
            found.append(
                f"warning: {moment} in bf16 do not shrink with optimizer.{key} = {getattr(optimizer, key)}: "
                'set it to 0.99 or less, or precision.moments = "fp32"'
            )
    return found


def _check_json(ds_json: Mapping[str, Any]) -> None:
    allowed = sorted({"zero_optimization", *JSON_KEYS, *RECIPE_OWNS})
    for key, value in ds_json.items():
        if key not in allowed:
            raise RecipeError(
                f"DeepSpeed JSON: unknown or unsupported key {key}: did you mean {nearest(key, allowed)}?"
            )
        if key in RECIPE_OWNS and not _is_auto(value):
            raise RecipeError(
                f"DeepSpeed JSON: {key} = {show(value)} belongs to the recipe ({RECIPE_OWNS[key]}): "
                f'write "auto" there or remove it'
            )
        if key in JSON_KEYS:
            _check_value(key, value, JSON_KEYS[key])
    stage = zero_stage(ds_json)
    for key, value in ds_json["zero_optimization"].items():
        if key == "stage":
            continue
        if key in OFFLOAD_STAGE:
            _check_offload(key, value, stage)
            continue
        if key in ZERO_REFUSED:
            raise RecipeError(f"DeepSpeed JSON: zero_optimization.{key}: {ZERO_REFUSED[key]}: remove it")
        if key not in ZERO_KEYS:
            near = nearest(key, sorted({"stage", *ZERO_KEYS, *OFFLOAD_STAGE}))
            raise RecipeError(
                f"DeepSpeed JSON: unknown or unsupported key zero_optimization.{key}: did you mean {near}?"
            )
        if (key.startswith("stage3_") or key == "sub_group_size") and stage != 3:
            raise RecipeError(f"DeepSpeed JSON: zero_optimization.{key} does nothing at stage {stage}: remove it")
        _check_value(f"zero_optimization.{key}", value, ZERO_KEYS[key])


def _check_offload(section: str, values: object, stage: int) -> None:
    name = f"zero_optimization.{section}"
    if stage < OFFLOAD_STAGE[section]:
        able = "stage 3 has" if section == "offload_param" else "stages 1, 2 and 3 have"
        raise RecipeError(f"DeepSpeed JSON: {name} does nothing at stage {stage}, {able} it: remove it")
    if not isinstance(values, Mapping) or "device" not in values:
        raise RecipeError(f'DeepSpeed JSON: {name} must say where to: write {{"device": "cpu"}}, or remove it')
    if values["device"] == "nvme":
        raise RecipeError(f'DeepSpeed JSON: {name}.device: NVMe is not supported: write "cpu", or remove {section}')
    for key, value in values.items():
        if key in OFFLOAD_REFUSED:
            raise RecipeError(f"DeepSpeed JSON: {name}.{key}: {OFFLOAD_REFUSED[key]}: remove it")
        if key not in OFFLOAD_KEYS:
            near = nearest(key, sorted(OFFLOAD_KEYS))
            raise RecipeError(f"DeepSpeed JSON: unknown or unsupported key {name}.{key}: did you mean {near}?")
        _check_value(f"{name}.{key}", value, OFFLOAD_KEYS[key])


def _check_value(key: str, value: object, kind: Kind) -> None:
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(kind, range):
        allowed = f"a whole number from {kind.start} to {kind.stop - 1}"
        fits = isinstance(number, int) and not isinstance(number, bool) and number in kind
    elif isinstance(kind, tuple):
        allowed = " or ".join(f'"{word}"' for word in kind)
        fits = isinstance(value, str) and value in kind
    else:
        allowed = "true or false"
        fits = isinstance(value, kind)
    if not fits:
        raise RecipeError(f"DeepSpeed JSON: {key} = {show(value)}: must be {allowed}, or left out")


def _is_auto(value: object) -> bool:
    """ "auto" itself, or a section whose every value is "auto"."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, Mapping):
            pending += one.values()
        elif one != AUTO:
            return False
    return True


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_copy(entry) for entry in value]
    return value


def device_refusal(compute: Compute) -> str | None:
    """Why this process's device cannot train in `compute`, as DeepSpeed's accelerator has it; None where it can."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if compute != "fp16" or accelerator.is_fp16_supported():
        return None
    on_cpu = accelerator.device_name() == "cpu"
    device, instead = ("this CPU", "bf16") if on_cpu else ("this GPU (compute capability below 7.0)", "fp32")
    return (
        f"{device} cannot train in fp16: DeepSpeed finds no arithmetic for it: "
        f'set precision.compute = "{instead}", or use a GPU that has it'
    )


@contextmanager
def process_group(device: torch.device, timeout_minutes: float = TIMEOUT_MINUTES) -> Iterator[None]:
    """A process group over the ranks that the launcher's variables describe: NCCL on GPUs, gloo on CPUs.

    Who waits for another rank longer than `timeout_minutes`, to meet or in a collective, raises.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found nothing better
    import deepspeed
    import torch.distributed as dist

    timeout = timedelta(minutes=timeout_minutes)
    # DeepSpeed clones the group for its own collectives, and what it doesn't say is torch's: 30 minutes with gloo.
    defaults: Any = dist.distributed_c10d
    defaults.default_pg_timeout = defaults.default_pg_nccl_timeout = timeout
    # An operation for inference on CPUs, which DeepSpeed would otherwise compile here: a compiler needed for nothing.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 has begun to rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    backend = "nccl" if device.type == "cuda" else "gloo"
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        socket.getaddrinfo(os.environ["MASTER_ADDR"], None)
        deepspeed.init_distributed(dist_backend=backend, timeout=timeout, auto_mpi_discovery=False, verbose=False)
    except (dist.DistError, OSError) as error:
        raise OSError(f"the ranks cannot meet at MASTER_ADDR:MASTER_PORT = {address}: {error}") from None
    try:
        yield
    finally:
        dist.destroy_process_group()


class TrainingEngine:
    """The DeepSpeed engine, reduced to what the loop asks of it. Every method is called on all ranks together."""

    def __init__(
        self, model: Transformer, config: RunConfig, resolved: Mapping[str, Any], ranks: Ranks, device: torch.device
    ) -> None:
        """`model` in fp32, equal on all ranks; DeepSpeed casts it to the compute dtype and takes its master copy."""
        import deepspeed
        import torch
        from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

        from pretrain.muon import OrthogonalizingAdamW
        from pretrain.optimizer import build_optimizer

        self.model_config = model.config
        self.ranks = ranks
        self.device = device
        self.zero_stage = zero_stage(resolved)
        in_fp16, in_bf16 = bool(resolved["fp16"]["enabled"]), bool(resolved["bf16"]["enabled"])
        self._unpartitioned = self.zero_stage == 0 and not in_fp16 and not in_bf16
        self._measured_norm = 0.0
        self._loss_scale_window = config.precision.loss_scale_window if in_fp16 else None
        self.loss_scale: float | None = None
        self.overflowed = False
        dtype = torch.float16 if in_fp16 else torch.bfloat16 if in_bf16 else torch.float32
        for parameter in model.parameters():  # as DeepSpeed would, but before the device holds them in fp32
            parameter.data = parameter.data.to(dtype)
        model.to(device)
        # ZeRO-0 in bf16 takes a step on zero gradients to make its state: at rate 0 that decays no weight, and with the
        # state cleared, AdamW's step count begins at 1 (else the first update is a quarter too small).
        optimizer = build_optimizer(model, config, initial_lr=0.0, rank=ranks.rank, world_size=ranks.world_size)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._sizes = {names[p]: p.numel() for group in optimizer.param_groups for p in group["params"]}
        # Of an optimizer that it has not tested DeepSpeed warns; ours are, in tests/pretrain/test_optimizer.py.
        ZERO_SUPPORTED_OPTIMIZERS.append(type(optimizer))
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=dict(resolved), dist_init_required=False
        )
        if self.zero_stage == 0:
            optimizer.state.clear()
        elif isinstance(optimizer, OrthogonalizingAdamW):
            optimizer.layouts.update(self._matrix_layouts(optimizer))
        if in_fp16:
            # At the smallest scale DeepSpeed would raise a bare Exception; `metrics.Report` says it better.
            self._engine.optimizer.loss_scaler.raise_error_at_min_scale = False
        self._collector = _Collector()
        storage = self._engine.checkpoint_engine
        storage.load, storage.save, storage.makedirs = _load_tensors, self._collector.save, _make_no_folder
        self._engine._copy_recovery_script = self._collector.copy_scripts

    def _matrix_layouts(self, optimizer: torch.optim.Optimizer) -> dict[Tensor, list[Matrix]]:
        """Where the hidden matrices lie in the flat partitions that DeepSpeed made of them, from its own tables."""
        from pretrain.muon import cut, spread

        marked = [number for number, group in enumerate(optimizer.param_groups) if group.get("hidden")]
        zero, world_size = self._engine.optimizer, self.ranks.world_size
        if self.zero_stage == 3:
            return {
                flat: spread([tuple(parameter.ds_shape) for parameter in zero.fp16_groups[number]], world_size)
                for number, flat in enumerate(zero.fp32_partitioned_groups_flat)
                if zero.sub_group_to_group_id[number] in marked
            }
        layouts = {}
        for number in marked:
            if hasattr(zero, "bf16_groups"):  # the ZeRO-1 engine of bf16 with fp32 accumulation
                flat, parameters = zero.fp32_groups_flat_partition[number], zero.bf16_groups[number]
                offsets = [0, *itertools.accumulate(parameter.numel() for parameter in parameters)][:-1]
            else:
                flat, parameters = zero.single_partition_of_fp32_groups[number], zero.round_robin_bit16_groups[number]
                offsets = zero.round_robin_bit16_offsets[number]
            layouts[flat] = cut([tuple(parameter.shape) for parameter in parameters], offsets, flat.numel())
        return layouts

    def forward(
        self, inputs: NDArray[np.int64], targets: NDArray[np.int64], documents: NDArray[np.int64] | None = None
    ) -> LossSum:
        """Loss sums (nats, fp32) and token count of a micro-batch, each array (micro_batch_size, seq_len).

        Where `documents` numbers them, attention and positions stay within documents.
        """
        loss: LossSum = self._engine(*self._on_device(inputs, targets), **self._masked(documents))
        return loss

    def forward_only(
        self, inputs: NDArray[np.int64], targets: NDArray[np.int64], documents: NDArray[np.int64] | None = None
    ) -> LossSum:
        """`forward` for evaluation: no gradients, and DeepSpeed's counters of micro-steps stay as they are."""
        import torch

        with torch.no_grad():
            loss: LossSum = self._engine.module(*self._on_device(inputs, targets), **self._masked(documents))
        return loss

    def _on_device(self, *arrays: NDArray[np.int64]) -> list[Tensor]:
        import torch

        return [torch.from_numpy(array).to(self.device, non_blocking=True) for array in arrays]

    def _masked(self, documents: NDArray[np.int64] | None) -> dict[str, Tensor]:
        return {} if documents is None else {"documents_bt": self._on_device(documents)[0]}

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        """End a micro-step; the last one of an accumulation clips the gradient and updates the weights.

        Where an element of the gradient is not finite, it leaves them as they are: `overflowed` then says so, and
        `skipped_steps` counts it. `loss_scale` is the scale of that gradient, None where it has none (bf16, fp32).
        """
        updates = self._engine.is_gradient_accumulation_boundary()
        if self._unpartitioned and updates:
            # DeepSpeed measures no norm here unless it clips; behind the last backward the gradients are reduced.
            import torch

            gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            self._measured_norm = float(torch.nn.utils.get_total_norm(gradients))
        skipped_before = self.skipped_steps
        if self._loss_scale_window is not None:
            self.loss_scale = float(self._engine.optimizer.loss_scaler.cur_scale)
        self._engine.step()
        if updates:
            self.overflowed = self.skipped_steps > skipped_before
            if self.overflowed:
                self._forget_gradient()
            self._grow_loss_scale()

    def _forget_gradient(self) -> None:
        """Let go of a gradient that overflowed: ZeRO-1 and 2 that offload would add all later ones to its fp32 sums."""
        zero = self._engine.optimizer
        if getattr(zero, "cpu_offload", False):
            zero.averaged_gradients.update(dict.fromkeys(zero.averaged_gradients))

    def _grow_loss_scale(self) -> None:
        if self._loss_scale_window is None:
            return
        scaler = self._engine.optimizer.loss_scaler  # in DeepSpeed's checkpoints with its counts
        updates = scaler.cur_iter - scaler.last_overflow_iter - 1  # since the last overflow
        if updates > 0 and updates % self._loss_scale_window == 0:
            scaler.cur_scale *= 2.0

    def drop_accumulation(self) -> None:
        """Forget the micro-steps since the last update, gradients and counts, as if they had not been."""
        zero = self._engine.optimizer
        zero.zero_grad()  # under ZeRO-3 the count of micro-steps too
        self._engine.micro_steps = 0
        for sums in ("averaged_gradients", "all_grad_tensors"):
            if hasattr(zero, sums):
                getattr(zero, sums).update(dict.fromkeys(getattr(zero, sums)))
        if self.zero_stage in (1, 2) and hasattr(zero, "micro_step_id"):
            zero.micro_step_id = -1  # of the micro-step before the first

    def set_global_batch_size(self, sequences: int) -> None:
        """The global batch of the next step, between two steps: the micro-batch stays, the accumulation follows."""
        if sequences != self._engine.train_batch_size():
            self._engine.set_train_batch_size(sequences)
            self._engine.micro_steps = 0  # a step ends at its multiples of the accumulation: they begin anew

    @property
    def learning_rate(self) -> float:
        """The rate of the last step, behind `load` too."""
        return float(self._engine.optimizer.param_groups[0]["lr"])

    def set_learning_rate(self, lr: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr

    def gradient_norm(self) -> float:
        """The norm of the last update's whole gradient, before clipping; not finite where it overflowed."""
        return self._measured_norm if self._unpartitioned else float(self._engine.get_global_grad_norm())

    @property
    def skipped_steps(self) -> int:
        """Updates that DeepSpeed left out because a gradient overflowed."""
        return int(self._engine.skipped_steps)

    def sum_over_ranks(self, *values: Tensor | float) -> list[float]:
        """Each value summed over all ranks, in float64; one collective for all of them."""
        import torch

        parts = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values]
        summed: list[float] = self.ranks.sum(torch.stack(parts)).tolist()
        return summed

    def is_finite(self) -> bool:
        """Whether every weight, master and moment that the ranks hold is finite, and so each tensor's norm in fp32.

        Numbers whose squares overflow are no better than infinite ones: with them no norm is finite, nor a gradient's.
        """
        import torch

        optimizer = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        # Under ZeRO-3 a parameter is empty, and its rank's share is in `ds_tensor`; masters are keys of the state.
        held = [getattr(parameter, "ds_tensor", parameter) for parameter in self._engine.module.parameters()]
        for master, state in optimizer.state.items():
            held += [master, *(value for value in state.values() if isinstance(value, torch.Tensor))]
        # Those of bf16 are summed in fp32 too and may stay in bf16, of the same range: on CPUs twenty times as quick.
        norms = [
            torch.linalg.vector_norm(tensor.detach(), dtype=None if tensor.dtype == torch.bfloat16 else torch.float32)
            for tensor in held
            if tensor.is_floating_point()
        ]
        (infinite,) = self.sum_over_ranks(sum(not bool(norm.isfinite()) for norm in norms))
        return infinite == 0

    def save(self, folder: Path) -> None:
        """Write DeepSpeed's own files of all ranks below `folder`, and its scripts beside it."""
        for name, write in self.files(folder=folder.name).items():
            (folder.parent / name).parent.mkdir(parents=True, exist_ok=True)
            write(folder.parent / name)
        self.ranks.barrier()

    def files(self, snapshot: Snapshot | None = None, folder: str = "engine") -> Files:
        """DeepSpeed's own files of this rank, below `folder`, and its scripts. Nothing is written here.

        They have the numbers of now where a `snapshot` copies them; else those of when they are written.
        """
        collector = self._collector
        collector.files, collector.snapshot = {}, snapshot
        self._engine.save_checkpoint(".", tag=folder, save_latest=False)
        files, collector.files, collector.snapshot = collector.files, {}, None
        return files

    def load(self, folder: Path) -> Layout | None:
        """Read what `save` wrote. Where that lies otherwise here (other ranks, another stage), it is spread anew, and
        the layout of the files is returned.

        Weight decay, betas, eps and the kernel stay those of this run, though the files have them too.
        pickle.UnpicklingError where a file holds anything but tensors, numbers and a few classes of DeepSpeed's.
        """
        from pretrain.elastic import saved_layout

        with _safe_classes():
            saved, own = saved_layout(folder, _map_tensors, self._sizes), self.layout()
            if saved != own:
                self._load_otherwise(folder, saved, own)
                return saved
            self._load_same(folder)
        return None

    def lies_otherwise(self, folder: Path) -> bool:
        """Whether `load` would spread anew what `save` wrote there, and so reads the files of all ranks."""
        from pretrain.elastic import saved_layout

        with _safe_classes():
            return saved_layout(folder, _map_tensors, self._sizes) != self.layout()

    def _load_same(self, folder: Path) -> None:
        names = {"weight_decay", "betas", "eps", "fused"}
        groups = self._engine.optimizer.param_groups
        settings = [{name: group[name] for name in names & group.keys()} for group in groups]
        loaded, _ = self._engine.load_checkpoint(str(folder.parent), tag=folder.name)
        if loaded is None:
            raise RuntimeError(f"DeepSpeed loaded nothing from {folder}")
        for group, ours in zip(self._engine.optimizer.param_groups, settings, strict=True):
            group.update(ours)

    def layout(self) -> Layout:
        """How masters and states are spread over the ranks here."""
        from pretrain.elastic import Layout, partitions_of

        whole = tuple(((name, size),) for name, size in self._sizes.items())
        partitions = whole if self.zero_stage == 0 else partitions_of(self._engine._get_zero_param_shapes())
        return Layout(self.zero_stage, self.ranks.world_size, partitions, bool(self._engine.zero_parameter_alignment()))

    def _load_otherwise(self, folder: Path, saved: Layout, own: Layout) -> None:
        """Fill masters and states, then what DeepSpeed derives from them, then its counts."""
        from pretrain.elastic import SCALER, SavedState, fill, model_file, places

        state = SavedState(folder, saved, _map_tensors)
        zero = self._engine.optimizer
        optimizer = getattr(zero, "optimizer", zero)
        if self.zero_stage == 3:
            zero.checkpoint_event_prologue()
        held = self._partitions()
        gaps = getattr(zero, "round_robin_bit16_padding", [[0] * len(partition) for partition in own.partitions])
        rank = self.ranks.rank if self.zero_stage else 0  # under ZeRO-0 all ranks have the same
        fused = bool(optimizer.defaults.get("fused"))
        for number, where in enumerate(places(own, [weights.numel() for weights in held], gaps)):
            optimizer.state[held[number]] = fill(state, where, rank, held[number], number, fused=fused)
        for name in SCALER:
            if name in state.scaler and hasattr(zero, name):
                setattr(zero, name, state.scaler[name])
        self.set_learning_rate(state.lr)
        if self.zero_stage == 3:
            same = {**{name: getattr(zero, name) for name in SCALER}, "fp32_flat_groups": held}
            zero.load_state_dict({self.ranks.rank: same}, load_optimizer_states=False)
            zero.checkpoint_event_epilogue()
        elif self.zero_stage:
            zero.update_lp_params()
        elif not self._unpartitioned:
            for weight, master in zip(itertools.chain(*zero.fp16_groups), held, strict=True):
                weight.data.copy_(master.data)
        header = _map_tensors(model_file(folder))
        for count in ("global_steps", "global_samples", "skipped_steps"):
            setattr(self._engine, count, header[count])

    def _partitions(self) -> list[Tensor]:
        """This rank's masters: its flat partitions or, under ZeRO-0, one a parameter."""
        zero = self._engine.optimizer
        if self.zero_stage == 0:
            groups = getattr(zero, "optimizer", zero).param_groups
            return [master for group in groups for master in group["params"]]
        if self.zero_stage == 3:
            return list(zero.fp32_partitioned_groups_flat)
        in_bf16 = hasattr(zero, "bf16_groups")  # ZeRO-1 with sums in fp32
        return list(zero.fp32_groups_flat_partition if in_bf16 else zero.single_partition_of_fp32_groups)

    def gather_weights(self, snapshot: Snapshot | None = None) -> dict[str, Tensor]:
        """On the first rank, a copy of all weights on the CPU in the compute dtype, tied ones once; else empty.

        In a `snapshot` that has DeepSpeed's files they take no more room, unless ZeRO-3 has to gather them.
        """
        import deepspeed

        weights: dict[str, Tensor] = {}
        for name, parameter in self._engine.module.named_parameters():
            # Under ZeRO-3 a parameter is whole only inside this context; one at a time keeps memory flat.
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.zero_stage == 3):
                if not self.ranks.is_first:
                    continue
                if snapshot is None:
                    weights[name] = parameter.detach().to("cpu", copy=True).contiguous()
                elif self.zero_stage == 3:
                    weights[name] = snapshot.take_alone(parameter)
                else:
                    weights[name] = snapshot.take(parameter.detach())
        return weights


class _Collector:
    """Takes what DeepSpeed would write to a disk, so that it can be written elsewhere, and later."""

    def __init__(self) -> None:
        self.files: Files = {}
        self.snapshot: Snapshot | None = None

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        import torch

        kept = state_dict if self.snapshot is None else self.snapshot.take(state_dict)
        self.files[os.path.normpath(path)] = partial(torch.save, kept)

    def copy_scripts(self, folder: str) -> None:
        """Those that DeepSpeed puts beside its files."""
        import deepspeed

        for name in ("zero_to_fp32.py", "zero_to_torch.py"):
            self.files[name] = partial(_copy_script, Path(deepspeed.__file__).parent / "utils" / name)


def _make_no_folder(path: str, exist_ok: bool = False) -> None:
    """Whoever writes a file makes its folder."""


def _copy_script(source: Path, path: Path) -> None:
    """Executable, as DeepSpeed has it."""
    shutil.copyfile(source, path)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


def _safe_classes() -> AbstractContextManager[None]:
    """DeepSpeed would unpickle whatever stands in a file. These classes of its own are all that its files need."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from torch.serialization import safe_globals

    context: AbstractContextManager[None] = safe_globals(
        [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    )
    return context


def _load_tensors(path: str, map_location: Any = None) -> Any:
    """What DeepSpeed's checkpoint engine does with a file of a checkpoint, without running anything that is in it."""
    import torch

    return torch.load(path, map_location=map_location, weights_only=True)


def _map_tensors(path: Path) -> Any:
    """A file of a checkpoint, without running anything that is in it; tensors are read from it where they are used."""
    import torch

    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
