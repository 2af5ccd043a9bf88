from __future__ import annotations

import tomllib

import pytest
from pydantic import ValidationError

from pretrain.config import PROJECT_ROOT, RecipeError, RunConfig, from_root, load_recipe, parse_recipe, to_toml
from tests.pretrain.recipe import TEXT, recipe


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(TEXT)
    return file


def refused(path, *overrides):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_then_preset_then_file_then_override(path):
    config = load_recipe(path)
    assert config.optimizer.beta2 == 0.95  # a default
    assert config.model.d_model == 512  # the preset's
    assert config.schedule.max_steps == 100  # the file's
    changed = load_recipe(path, ["schedule.max_steps=200", "model.seq_len=64", "schedule.max_steps=300", "seed=7"])
    assert (changed.schedule.max_steps, changed.model.seq_len, changed.seed) == (300, 64, 7)


def test_every_value_survives_the_way_through_toml(path):
    stages = 'data.stages=[{from_tokens=0,weights={en=1,"z h"=0.25}},{from_tokens=10240,weights={en=0.5}}]'
    config = load_recipe(
        path, [stages, 'data.path="a \\"quoted\\" \\u007f 数据 path"', "optimizer.gradient_clipping=off", "seed=0"]
    )
    assert parse_recipe(tomllib.loads(to_toml(config))) == config
    assert 'gradient_clipping = "off"' in to_toml(config)
    assert "max_tokens" not in to_toml(config)  # absent stays absent
    changed = load_recipe(path, [stages, "compile=true", "initial_weights=runs/x", "evaluation.max_tokens=4096"])
    assert parse_recipe(tomllib.loads(to_toml(changed))) == changed
    left_out = set(RunConfig.model_fields) - set(tomllib.loads(to_toml(changed)))
    assert not left_out


@pytest.mark.parametrize(
    "override, value",
    [
        ("data.path=runs/x.y", "runs/x.y"),
        ('data.path="two words"', "two words"),
        ("data.path=0.5b", "0.5b"),
    ],
)
def test_bare_words_are_strings(path, override, value):
    assert load_recipe(path, [override]).data.path == value


def test_an_evaluation_of_one_window_is_possible(path):
    assert load_recipe(path, ["evaluation.max_tokens=1024"]).evaluation.max_tokens == 1024


def test_a_recipe_cannot_be_changed(path):
    config = load_recipe(path)
    with pytest.raises(ValidationError):
        config.schedule.max_steps = 3


@pytest.mark.parametrize(
    "override, names",
    [
        ("scheduel.peak_lr=1e-3", "did you mean schedule"),
        ("schedule.peek_lr=1e-3", "did you mean schedule.peak_lr"),
        ("optimizer.warmup_steps=3", "did you mean schedule.warmup_steps"),
        ("model.d_modl=512", 'did you mean "d_model"'),
        ("data.stages=[{from_tokens=0,weigths={en=1}}]", "did you mean data.stages.weights"),
    ],
)
def test_unknown_keys_name_their_nearest_neighbour(path, override, names):
    assert names in refused(path, override)


@pytest.mark.parametrize(
    "override, says",
    [
        ("schedule.peak_lr=-1", "schedule.peak_lr = -1: should be greater than 0"),
        ("schedule.peak_lr=abc", "schedule.peak_lr = 'abc': should be a valid number"),
        ("schedule.peak_lr=nan", "finite"),
        ("schedule.peak_lr=1e-300", "raise it to 1e-30 or more"),
        ("schedule.min_lr=0.1", "lower min_lr"),
        ("schedule.warmup_steps=100", "shorten the warm-up"),
        ("batch.micro_batch_size=4.0", "batch.micro_batch_size = 4.0: should be a valid integer"),
        ("batch.micro_batch_size=true", "should be a valid integer"),
        ("batch.micro_batch_size=0", "greater than 0"),
        ("optimizer.gradient_clipping=0", 'positive number, or "off"'),
        ("optimizer.gradient_clipping=inf", 'positive number, or "off"'),
        ("optimizer.gradient_clipping=true", 'positive number, or "off"'),
        ("optimizer.beta1=1.0", "less than 1"),
        ("precision.master=fp16", "'fp32' or 'bf16'"),
        ("model.preset=1b", "presets"),
        ("model.n_kv_heads=3", "n_heads"),
        ("logging.tensorboard=1", "valid boolean"),
        ("data.path=3", "valid string"),
        ("data.stages=[{from_tokens=1024,weights={en=1}}]", "start at 0"),
        ("data.stages=[{from_tokens=0,weights={en=1}},{from_tokens=0,weights={en=1}}]", "increase"),
        ("data.stages=[{from_tokens=0,weights={en=0}}]", "above 0"),
        ("evaluation.max_tokens=1023", "evaluation.max_tokens 1023 is less than one window of model.seq_len 1024"),
        ("data.stages=[{from_tokens=0,weights={en=-1}}]", "data.stages.0.weights.en = -1"),
        ("seed=99999999999999999999", "seed = 99999999999999999999: should be less than"),
        ("batch.micro_batch_size=2147483648", "batch.micro_batch_size = 2147483648: should be less than 2147483648"),
        ("memory.loss_chunk_tokens=99999999999999999999999", "should be less than 2147483648"),
        ("memory.loss_chunk_tokens=0x" + "f" * 5000, "memory.loss_chunk_tokens = a number of 20000 bits"),
        ("memory.activation_checkpointing=every-1", 'should be "none", "selective", "every-N" with N from 2'),
        ("memory.activation_checkpointing=2", "should be a valid string"),
        ("memory.activation_checkpointing=every-13", '"every-13" of model.n_layers 12 blocks: use every-12 at most'),
        ("compile=1", "valid boolean"),
        ("loss.z_loss=-1e-4", "loss.z_loss = -0.0001: should be greater than or equal to 0"),
        ("loss.z_loss=2", "should be less than or equal to 1"),
        ("schedule.max_steps=9999999999999999999", "less than or equal to 4611686018427387904"),
        ("schedule.peak_lr=1e31", "schedule.peak_lr = 1e+31: should be less than"),
        ("optimizer.weight_decay=1e300", "optimizer.weight_decay = 1e+300: should be less than"),
        ("schedule.peak_lr=" + "9" * 400, "schedule.peak_lr = "),
        ("optimizer.gradient_clipping=" + "9" * 400, 'positive number, or "off"'),
        ("model.norm_eps=" + "9" * 400, "norm_eps = a number of 1329 bits must be positive, finite and below 1e+30"),
        ("model.vocab_size=99999999999999999999", "vocab_size = 99999999999999999999 must be positive"),
        ("model.n_layers=0x" + "f" * 5000, "n_layers = a number of 20000 bits"),
        ("model.n_layers." + "a." * 2000 + "a=1", "n_layers = {"),
        ("model.preset=0x" + "f" * 5000, "unknown preset a number of 20000 bits"),
        ("schedule.max_steps=" + "9" * 5000, "too many digits"),
        ("schedule.max_steps=" + "[" * 5000, "brackets nested too deep"),
        ("schedule.max_steps=" + "[" * 100 + "]" * 100, "should be a valid integer"),
        ("data.path=''", "data.path = '': should name a file or folder"),
        ("data.tokenizer=' '", "data.tokenizer = ' ': should name"),
        ("deepspeed.config=''", "deepspeed.config = '': should name"),
        ('data.path="a\\u0000b"', "should name a file or folder"),
        ("schedule=3", "schedule is a table"),
        ("schedule={peak_lr=1}", "one --set for each key"),
        ("seed.x=1", "seed"),
        ("schedule.peak_lr", "table.key=VALUE"),
        ("schedule.peak_lr=", "neither TOML nor a bare word"),
        ("data.path=two words", "quote it"),
        ("data.path=1\nseed = 3", "on one line"),
    ],
    ids=lambda text: text[:40],
)
def test_bad_values_are_one_line_with_the_remedy(path, override, says):
    message = refused(path, override)
    assert says in message
    assert len(message) < 500


def test_a_byte_order_mark_is_no_part_of_the_recipe(path):
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert load_recipe(path).schedule.max_steps == 100


@pytest.mark.parametrize(
    "value, says", [("9" * 5000, "too many digits"), ("[" * 5000, "nested too deep")], ids=["digits", "brackets"]
)
def test_a_recipe_beyond_what_python_parses_is_one_line(path, value, says):
    path.write_text(f"seed = {value}\n" + TEXT)
    assert says in refused(path)


def test_counts_may_be_larger_than_sizes(path):
    config = load_recipe(path, [f"schedule.max_steps={2**62}", "data.stages=[{from_tokens=0,weights={en=1}}]"])
    assert config.schedule.max_steps == 2**62


def test_compiled_blocks_are_checkpointed_whole():
    with pytest.raises(RecipeError, match=r'"selective" chooses among the operations of a block, which compile = true'):
        recipe(compile=True, memory={"activation_checkpointing": "selective"})
    assert recipe(compile=True, memory={"activation_checkpointing": "full"}).compile


def test_fp32_compute_has_no_bf16_state():
    with pytest.raises(RecipeError, match='set master and accumulate to "fp32"'):
        recipe(precision={"compute": "fp32", "master": "bf16"})


@pytest.mark.parametrize(
    "precision, says",
    [
        ({"compute": "fp16", "master": "bf16"}, 'compute = "fp16" keeps masters in fp32: set master = "fp32"'),
        ({"compute": "fp16", "accumulate": "bf16"}, 'no bf16 gradients to sum: set accumulate to "fp32" or "fp16"'),
        ({"compute": "bf16", "accumulate": "fp16"}, 'no fp16 gradients to sum: set accumulate to "fp32" or "bf16"'),
        ({"compute": "fp16", "initial_scale_power": 33}, "less than or equal to 32"),
        ({"compute": "fp16", "loss_scale_window": 0}, "greater than 0"),
    ],
)
def test_precisions_that_do_not_go_together(precision, says):
    with pytest.raises(RecipeError, match=says):
        recipe(precision=precision)


def test_auto_stays_in_the_recipe():
    config = recipe(precision={"compute": "auto", "accumulate": "fp16"})
    assert config.precision.compute_where("fp16") == "fp16"
    assert parse_recipe(tomllib.loads(to_toml(config))).precision.compute == "auto"
    assert recipe(precision={"compute": "fp32"}).precision.compute_where("fp16") == "fp32"


def test_missing_values_and_files_are_named(path, tmp_path):
    path.write_text(TEXT.replace("max_steps = 100\n", ""))
    assert "schedule.max_steps is missing" in refused(path)
    assert "pretrain/recipes/mini.toml" in refused(tmp_path / "mni.toml")
    path.write_text("[model\n")
    assert "not valid TOML" in refused(path)
    path.write_bytes(b"seed = 1 # \xff\n")
    assert "not UTF-8 at byte 11" in refused(path)


def test_paths_count_from_the_project_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert from_root("ds_configs/zero2.json") == PROJECT_ROOT / "ds_configs" / "zero2.json"
    assert from_root(str(tmp_path)) == tmp_path
