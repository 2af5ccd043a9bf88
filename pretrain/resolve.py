"""What DeepSpeed will be told: the recipe and the DeepSpeed JSON as one, with nothing left implicit.

DeepSpeed ignores keys it does not know, fills absent ones with surprising defaults and swaps optimizers without a word.
So `resolve` decides beforehand what the engine will be told, as a pure function: the recipe owns batch, clipping,
precision and optimizer; the DeepSpeed JSON owns ZeRO stage, offloading, buckets and overlap, and says "auto" where the
recipe decides. Imports neither torch nor deepspeed, so that planning stays quick.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.batching import BatchPlan
from pretrain.config import PROJECT_ROOT, Compute, RecipeError, RunConfig, mismatch, nearest, show

AUTO = "auto"

# What a value may be: true or false; one of some words; a whole number of a range (5e7 is one too).
Kind = type[bool] | tuple[str, ...] | range
COUNT = range(1, 2**62)
COUNT_OR_NONE = range(2**62)
BUCKET = range(1, 2**31)  # elements of a buffer that is allocated whole

# fp16's loss scale. At 1 an overflow is no more the scale's fault. DeepSpeed is told a window that never ends: it would
# double the scale before it divides the gradient by it, and so halve that update; here it is done behind the update.
SMALLEST_LOSS_SCALE = 1
ENDLESS_WINDOW = 2**62

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
    if not config.optimizer.fused:
        return (
            "an optimizer in main memory is torch's fused one: set optimizer.fused = true, or remove "
            "zero_optimization.offload_optimizer"
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
    if config.compile is True and stage == 3:
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
    """Whether the recipe's optimizer is torch's own AdamW, in its fused kernel."""
    precision = config.precision
    plain = precision.compensation == "none" and precision.moments_dtype == precision.master
    return config.optimizer.name == "adamw" and config.optimizer.fused and plain


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
