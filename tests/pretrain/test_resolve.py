from __future__ import annotations

import ast
import copy
import importlib.util
import json
import re
from itertools import product
from pathlib import Path

import pytest

from pretrain.config import RecipeError, from_root
from pretrain.resolve import JSON_KEYS, RECIPE_OWNS, ZERO_KEYS, ZERO_REFUSED, read_json, resolve
from tests.pretrain.recipe import recipe

JSONS = [read_json(from_root(f"ds_configs/zero{stage}.json")) for stage in range(4)]
REFUSED = {(0, "fp32", "fp32"), (0, "bf16", "bf16"), (0, "bf16", "fp32"), (1, "bf16", "fp32")}


@pytest.mark.parametrize("stage, master, accumulate", list(product(range(4), ("fp32", "bf16"), ("fp32", "bf16"))))
def test_every_stage_and_precision_is_resolved_or_refused(stage, master, accumulate):
    config = recipe(precision={"master": master, "accumulate": accumulate})
    before = copy.deepcopy(JSONS[stage])
    if (stage, master, accumulate) in REFUSED:
        with pytest.raises(RecipeError, match=f"ZeRO-{stage}"):
            resolve(JSONS[stage], config, 2)
        return
    resolved = resolve(JSONS[stage], config, 2)
    assert resolved["zero_optimization"] == before["zero_optimization"]
    assert resolved["zero_optimization"] is not JSONS[stage]["zero_optimization"]
    assert resolved["train_batch_size"] == 32
    assert resolved["train_micro_batch_size_per_gpu"] == 4
    assert resolved["gradient_accumulation_steps"] == 4
    assert resolved["gradient_clipping"] == 1.0
    assert resolved["data_types"] == {"grad_accum_dtype": accumulate}
    assert resolved["bf16"] == {
        "enabled": True,
        "bf16_master_weights_and_grads": master == "bf16",
        "bf16_optimizer_states": master == "bf16",
    }
    assert "auto" not in json.dumps(resolved)
    assert JSONS[stage] == before


@pytest.mark.parametrize("stage, accumulate", list(product(range(4), ("fp32", "fp16"))))
def test_fp16_is_told_in_full_or_refused(stage, accumulate):
    precision = {"accumulate": accumulate, "initial_scale_power": 12, "loss_scale_window": 500}
    for config in (
        recipe(precision={**precision, "compute": "fp16"}),
        recipe(precision={**precision, "compute": "auto"}),
    ):
        if stage == 0:
            with pytest.raises(RecipeError, match="ZeRO-0 does not scale the loss in fp16"):
                resolve(JSONS[stage], config, 2, "fp16")
            continue
        resolved = resolve(JSONS[stage], config, 2, "fp16")
        assert resolved["bf16"]["enabled"] is False
        assert resolved["data_types"] == {"grad_accum_dtype": accumulate}
        section = resolved["fp16"]
        assert (section["enabled"], section["loss_scale"], section["initial_scale_power"]) == (True, 0, 12)
        assert (section["hysteresis"], section["min_loss_scale"]) == (1, 1)
        assert section["loss_scale_window"] > 10**18, "the engine lets the scale grow, not DeepSpeed"
        known = set(
            re.findall(r"^    (\w+): (?:bool|int|float) = ", deepspeed_source("runtime/precision_config.py"), re.M)
        )
        assert section.keys() <= known
        assert {key for key in known if "bf16" not in key} - section.keys() == {
            "immediate_grad_update",
            "check_grad_overflow",
        }


def test_what_auto_is_decides_what_goes_with_it():
    config = recipe(precision={"compute": "auto", "master": "bf16"})
    assert resolve(JSONS[2], config, 2, "bf16")["fp16"] == {"enabled": False}
    with pytest.raises(RecipeError, match=r'"auto" means fp16 here: precision: compute = "fp16" keeps masters in fp32'):
        resolve(JSONS[2], config, 2, "fp16")


def test_fp16_gradients_are_not_sent_as_bf16():
    config = recipe(precision={"compute": "fp16"})
    with pytest.raises(RecipeError, match='communication_data_type = "bf16" would cut fp16'):
        resolve({"zero_optimization": {"stage": 2}, "communication_data_type": "bf16"}, config, 1)


@pytest.mark.parametrize("stage", range(4))
def test_compiled_blocks_do_not_go_with_gathered_weights(stage):
    config = recipe(compile=True, precision={"compute": "fp32"})
    if stage < 3:
        assert resolve(JSONS[stage], config, 1)
        return
    with pytest.raises(RecipeError, match="compile = true does not go with ZeRO-3"):
        resolve(JSONS[stage], config, 1)


@pytest.mark.parametrize("stage", range(4))
def test_fp32_compute_runs_at_every_stage(stage):
    resolved = resolve(JSONS[stage], recipe(precision={"compute": "fp32"}), 1)
    assert resolved["bf16"]["enabled"] is False
    assert resolved["data_types"] == {"grad_accum_dtype": "fp32"}


def test_clipping_off_is_said_aloud():
    config = recipe(optimizer={"gradient_clipping": "off"})
    assert resolve({"zero_optimization": {"stage": 2}}, config, 1)["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    "ds_json, says",
    [
        ({}, "zero_optimization.stage = 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, "not True"),
        ({"zero_optimization": {"stage": 4}}, "not 4"),
        ({"zero_optimization": {"stage": 2}, "zero_optimisation": {}}, "did you mean zero_optimization"),
        ({"zero_optimization": {"stage": 2, "reduce_bucketsize": 1}}, "did you mean reduce_bucket_size"),
        ({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1}}, "does nothing at stage 2"),
        ({"zero_optimization": {"stage": 2, "offload_optimiser": {}}}, "did you mean offload_optimizer"),
        ({"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 10**5}}, "cannot reduce in the fir"),
        *[
            ({"zero_optimization": {"stage": 2}, key: {}}, f"unknown or unsupported key {key}")
            for key in ("flops_profiler", "comms_logger", "checkpoint", "log_level", "timers")
        ],
        ({"zero_optimization": {"stage": 2}, "train_batch_size": 32}, "batch.global_batch_size"),
        ({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}, "optimizer.gradient_clipping"),
        ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, "precision.compute"),
        ({"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}}, "precision.accumulate"),
        ({"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {}}}, "belongs to the recipe"),
    ],
)
def test_what_is_unknown_or_owned_twice_is_refused(ds_json, says):
    with pytest.raises(RecipeError, match=says) as caught:
        resolve(ds_json, recipe(), 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "zero, says",
    [
        (
            {"reduce_bucket_size": "junk"},
            "zero_optimization.reduce_bucket_size = 'junk': must be a whole number from 1",
        ),
        ({"reduce_bucket_size": -5}, "reduce_bucket_size = -5: must be a whole number"),
        ({"reduce_bucket_size": 2**31}, "from 1 to 2147483647"),
        ({"reduce_bucket_size": True}, "reduce_bucket_size = True"),
        ({"allgather_bucket_size": float("inf")}, "allgather_bucket_size = inf"),
        ({"allgather_bucket_size": 0.5}, "allgather_bucket_size = 0.5"),
        ({"allgather_bucket_size": 0}, "allgather_bucket_size = 0"),
        ({"allgather_bucket_size": 16**5000 - 1}, "= a number of 20000 bits"),
        ({"parameter_alignment": -1}, "parameter_alignment = -1: must be true or false"),
        ({"overlap_comm": "auto"}, "overlap_comm = 'auto': must be true or false"),
        ({"overlap_comm": None}, "overlap_comm = None"),
        ({"stage": 3, "stage3_max_live_parameters": -1}, "from 0 to"),
    ],
)
def test_values_that_a_zero_key_cannot_have_are_refused(zero, says):
    with pytest.raises(RecipeError, match=re.escape(says)) as caught:
        resolve({"zero_optimization": {"stage": 2, **zero}}, recipe(), 1)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "values, says",
    [
        ({"steps_per_print": "x"}, "steps_per_print = 'x': must be a whole number from 1"),
        ({"steps_per_print": 0}, "steps_per_print = 0"),
        ({"communication_data_type": "fp7"}, 'communication_data_type = \'fp7\': must be "bf16" or "fp32"'),
        ({"communication_data_type": ["fp32"]}, "communication_data_type = ['fp32']"),
        ({"dump_state": 1}, "dump_state = 1: must be true or false"),
    ],
)
def test_values_that_a_key_cannot_have_are_refused(values, says):
    with pytest.raises(RecipeError, match=re.escape(says)):
        resolve({"zero_optimization": {"stage": 2}, **values}, recipe(), 1)


@pytest.mark.parametrize("accumulate", ["bf16", "fp32"])
def test_ranks_sum_in_the_dtype_that_gradients_accumulate_in_unless_told(accumulate):
    config = recipe(precision={"accumulate": accumulate})
    assert resolve(JSONS[2], config, 1)["communication_data_type"] == accumulate
    assert resolve({**JSONS[2], "communication_data_type": "bf16"}, config, 1)["communication_data_type"] == "bf16"


def test_values_that_keys_can_have_pass_as_they_stand():
    zero = {"stage": 3, "reduce_bucket_size": 5e7, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
    ds_json = {"zero_optimization": zero, "steps_per_print": 10, "communication_data_type": "fp32"}
    assert ds_json.items() <= resolve(ds_json, recipe(), 1).items()


def test_a_section_of_many_levels_is_refused_like_any_other():
    section = {}
    deepest = section
    for _ in range(2000):
        deepest["a"] = deepest = {}
    deepest["a"] = 1
    with pytest.raises(RecipeError, match="belongs to the recipe"):
        resolve({"zero_optimization": {"stage": 2}, "optimizer": section}, recipe(), 1)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(RecipeError, match="4 × 3 = 12: use 24 or 36"):
        resolve(JSONS[2], recipe(), 3)


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "not valid JSON"),
        ("[]", "one JSON object"),
        ('{"bf16": "auto", "bf16": "auto"}', "stands there twice"),
        ("[" * 100_000, "brackets nested too deep"),
        ('{"steps_per_print": ' + "9" * 5000 + "}", "too many digits"),
        ('{"steps_per_print": NaN}', "NaN is no number"),
        ('{"steps_per_print": -Infinity}', "-Infinity is no number"),
    ],
    ids=range(7),
)
def test_an_unreadable_json_is_one_line(tmp_path, text, says):
    file = tmp_path / "zero.json"
    file.write_text(text)
    with pytest.raises(RecipeError, match=says) as caught:
        read_json(file)
    assert "\n" not in str(caught.value)


def test_a_missing_json_names_the_ones_there_are(tmp_path):
    with pytest.raises(RecipeError, match="ds_configs"):
        read_json(tmp_path / "none.json")


def deepspeed_source(relative: str) -> str:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / relative).read_text()


def test_the_keys_are_those_of_the_installed_deepspeed():
    tree = ast.parse(deepspeed_source("runtime/zero/config.py"))
    (model,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "DeepSpeedZeroConfig")
    names = set()
    for node in model.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            aliases = [k.value.value for k in getattr(node.value, "keywords", ()) if k.arg == "alias"]
            names |= set(aliases or [node.target.id])
    assert names >= ZERO_KEYS.keys() | ZERO_REFUSED.keys()
    sources = "".join(
        deepspeed_source(f"{path}.py")
        for path in (
            "runtime/config",
            "runtime/constants",
            "runtime/precision_config",
            "runtime/zero/config",
            "runtime/activation_checkpointing/config",
            "monitor/config",
            "comm/config",
            "comm/constants",
            "profiling/constants",
            "utils/config",
        )
    )
    missing = [key for key in [*JSON_KEYS, *RECIPE_OWNS] if f'"{key}"' not in sources and f"'{key}'" not in sources]
    assert missing == []
