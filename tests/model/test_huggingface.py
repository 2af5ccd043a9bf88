"""Held against transformers itself: its models read here, ours read there, with nothing left over and equal logits."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from model import huggingface
from model.architectures import stored_tensors
from model.config import PRESETS, ModelConfig, ModelConfigError
from model.huggingface import WeightsError, from_config, read_weights, to_config, write_weights
from model.transformer import Transformer
from tests.model.conftest import lively, random_ids, seeded

logging.disable_progress_bar()

LOGITS_TOLERANCE = 1e-5
ONE_FILE = 10**9


def weights_of(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def write(folder: Path, model: Transformer, max_shard_bytes: int = ONE_FILE) -> Path:
    folder.mkdir()
    weights = weights_of(model)
    write_weights(folder, weights, model.config, max_shard_bytes=max_shard_bytes)
    dtype = weights["norm.weight"].dtype
    (folder / "config.json").write_text(json.dumps(to_config(model.config, dtype)))
    return folder


def read(folder: Path, **changes: Any) -> Transformer:
    config = replace(from_config(json.loads((folder / "config.json").read_text())), **changes)
    weights = read_weights(folder, config)
    model = Transformer(config).to(next(iter(weights.values())).dtype)
    model.load_state_dict(weights, strict=False)
    return model.eval()


def opened(folder: Path) -> LlamaForCausalLM:
    """By transformers' own loader, which finds neither too much nor too little."""
    model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert info == {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
    return model.eval()


def assert_equal_logits(ours: Transformer, theirs: LlamaForCausalLM) -> float:
    ids_bt = random_ids(ours.config, 2, min(ours.config.seq_len, 128))
    with torch.no_grad():
        difference = float((ours(ids_bt) - theirs(ids_bt).logits).abs().max())
    assert difference <= LOGITS_TOLERANCE
    return difference


def theirs(config: ModelConfig, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A model that transformers builds and draws."""
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**to_config(config, dtype))).to(dtype).eval()


# ---------------------------------------------------------------- config


def test_a_config_survives_both_ways(tiny_config: ModelConfig) -> None:
    odd = replace(tiny_config, tied=False, rope_base=500000.0, init_std=0.01)
    for config in (PRESETS["0.5b"], PRESETS["mini"], tiny_config, odd):
        table = to_config(config, torch.bfloat16)
        assert from_config(table) == config
        by_transformers = LlamaConfig(**table).to_dict()
        assert from_config(by_transformers) == config
        assert by_transformers["dtype"] == "bfloat16"
        of_transformers_4 = {"torch_dtype", "rope_theta"}
        assert set(table) - set(LlamaConfig().to_dict()) <= of_transformers_4


@pytest.mark.filterwarnings("ignore:head_dim = 8")
def test_what_a_config_leaves_out_is_what_transformers_takes(tiny_config: ModelConfig) -> None:
    optional = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_parameters", "rope_theta", "hidden_act")
    table = {name: value for name, value in to_config(tiny_config, torch.float32).items() if name not in optional}
    config = from_config(table)
    assert config == from_config(LlamaConfig(**table).to_dict())
    assert (config.n_kv_heads, config.head_dim, config.tied, config.rope_base) == (4, 8, False, 10000.0)


def test_transformers_4_spells_rope_otherwise_than_5(tiny_config: ModelConfig) -> None:
    table = to_config(tiny_config, torch.float32)
    del table["rope_parameters"], table["rope_theta"]
    assert from_config({**table, "rope_theta": 5e5, "rope_scaling": None}).rope_base == 5e5
    assert from_config({**table, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}).rope_base == 5e5


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]},
            "'GemmaForCausalLM': LlamaForCausalLM, Mistral",
        ),
        ({"model_type": "mistral"}, "'LlamaForCausalLM': "),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": None, "architectures": []}, "describes None"),
        ({"attention_bias": True}, "mlp_bias = false: this model has true alone"),
        ({"mlp_bias": True}, "mlp_bias = true: this model has false alone"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}}, "scales RoPE .*type 'llama3'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_scaling: factor None of max_position"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 0.5}},
            "factor 0.5 of .*from 1",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "scales RoPE in several ways"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}}, "beta_fast = 16: .* 32 alone"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1, "mscale_all_dim": 1}}, "has neither"),
        ({"rope_scaling": "x"}, "rope_scaling = 'x' is no table"),
        ({"rope_theta": 5e5}, "gives RoPE several bases .500000.0, 10000.0.: leave one"),
        ({"rms_norm_eps": 10**30}, "norm_eps = 1.*must be positive, finite and below 1e.30"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"num_attention_heads": 0}, "n_heads = 0 must be positive"),
        ({"num_attention_heads": "4"}, "must be of type int"),
        ({"num_attention_heads": None, "head_dim": None}, "num_attention_heads = None"),
        ({"num_key_value_heads": 3}, "n_kv_heads = 3"),
        ({"hidden_size": -1}, "d_model = -1"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
    ],
)
def test_what_this_model_cannot_be_is_refused(changes: dict[str, Any], words: str, tiny_config: ModelConfig) -> None:
    with pytest.raises(WeightsError, match=words) as caught:
        from_config({**to_config(tiny_config, torch.float32), **changes})
    assert "\n" not in str(caught.value)


def test_a_size_that_is_missing_is_named(tiny_config: ModelConfig) -> None:
    table = to_config(tiny_config, torch.float32)
    del table["hidden_size"], table["rms_norm_eps"]
    with pytest.raises(WeightsError, match="lacks hidden_size, rms_norm_eps"):
        from_config(table)


def test_a_width_that_transformers_refuses_is_refused_here(tiny_config: ModelConfig) -> None:
    config = replace(tiny_config, d_model=33)
    with pytest.raises(ModelConfigError, match="d_model = 33 is no multiple of n_heads = 4"):
        to_config(config, torch.float32)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("tied", [True, False])
def test_the_names_and_shapes_are_those_of_the_model(tied: bool, tiny_config: ModelConfig) -> None:
    model = Transformer(replace(tiny_config, tied=tied))
    expected = {n if n == "lm_head.weight" else f"model.{n}": tuple(p.shape) for n, p in model.named_parameters()}
    assert {stored.name: stored.shape for stored in stored_tensors(model.config)} == expected


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_bytes", [ONE_FILE, 60_000])
def test_ours_there(tied: bool, max_shard_bytes: int, tiny_config: ModelConfig, tmp_path: Path) -> None:
    model = lively(Transformer(replace(tiny_config, tied=tied), seeded(0))).eval()
    folder = write(tmp_path / "x", model, max_shard_bytes)
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_bytes == 60_000)
    names = [name for file in files for name in load_file(file)]
    assert ("lm_head.weight" in names) == (not tied)
    assert len(names) == len(set(names))
    assert_equal_logits(model, opened(folder))
    if len(files) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
        assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
        assert all(
            sum(tensor.nbytes for tensor in tensors.values()) <= 60_000 or len(tensors) == 1
            for tensors in map(load_file, files)
        )
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            assert tensors.metadata() == {"format": "pt"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", [None, "50KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_theirs_here_and_back(
    tied: bool, shard: str | None, dtype: torch.dtype, tiny_config: ModelConfig, tmp_path: Path
) -> None:
    """Every bit of what transformers wrote is in what is written of it, and in fp32 the logits are equal."""
    llama = theirs(replace(tiny_config, tied=tied, init_std=0.2), dtype)
    llama.save_pretrained(tmp_path / "theirs", **({} if shard is None else {"max_shard_size": shard}))
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (shard is not None)
    model = read(tmp_path / "theirs")
    if dtype == torch.float32:
        assert_equal_logits(model, llama)
    back = opened(write(tmp_path / "back", model))
    state = llama.state_dict()
    assert back.state_dict().keys() == state.keys()
    for name, tensor in back.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, state[name]), name
    assert back.config.to_dict() == {**llama.config.to_dict(), "_name_or_path": back.config._name_or_path}


def test_greedy_text_is_equal(tiny_config: ModelConfig, tmp_path: Path) -> None:
    from model.generate import Sampling, generate

    model = lively(Transformer(tiny_config, seeded(5))).eval()
    llama = opened(write(tmp_path / "x", model))
    prompt = random_ids(tiny_config, 7).tolist()
    produced = llama.generate(
        torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generate(model, [prompt], 32, Sampling(temperature=0)) == [produced[0, 7:].tolist()]


@pytest.mark.parametrize("name", ["mini", pytest.param("0.5b", marks=pytest.mark.soak)])
def test_a_preset_is_theirs_both_ways(name: str, tmp_path: Path) -> None:
    """Nothing is tiny here: the published sizes, in fp32."""
    model = Transformer(PRESETS[name], seeded(0)).eval()
    folder = write(tmp_path / "ours", model)
    out = assert_equal_logits(model, opened(folder))
    del model
    llama = theirs(PRESETS[name])
    llama.save_pretrained(tmp_path / "theirs")
    into = assert_equal_logits(read(tmp_path / "theirs"), llama)
    print(f"{name}: max |difference of logits| {out:.2e} out, {into:.2e} in")


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_umask_says_who_may_read_the_weights(tiny: Transformer, tmp_path: Path, umask: int, mode: int) -> None:
    earlier = os.umask(umask)
    try:
        write(tmp_path / "whole", tiny)
        write(tmp_path / "cut", tiny, max_shard_bytes=200_000)
    finally:
        os.umask(earlier)
    weights = list(tmp_path.rglob("*.safetensors"))
    assert len(weights) > 2
    assert {path.stat().st_mode & 0o777 for path in weights} == {mode}


# ---------------------------------------------------------------- RoPE layouts


def test_the_other_layout_is_reordered_on_its_way(tiny_config: ModelConfig, tmp_path: Path) -> None:
    config = replace(tiny_config, rope_layout="interleaved")
    model = lively(Transformer(config, seeded(0))).eval()
    folder = write(tmp_path / "x", model)
    assert_equal_logits(model, opened(folder))
    back = read(folder, rope_layout="interleaved")
    for name, weight in weights_of(back).items():
        assert torch.equal(weight, weights_of(model)[name])
    other = weights_of(read(folder))["layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(other, weights_of(model)["layers.0.self_attn.q_proj.weight"])


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def folder(tiny: Transformer, tmp_path: Path) -> Path:
    return write(tmp_path / "model", tiny)


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path, words: str, **sizes: Any) -> None:
    config = replace(from_config(json.loads((folder / "config.json").read_text())), **sizes)
    with pytest.raises(WeightsError, match=words) as caught:
        read_weights(folder, config)
    assert "\n" not in str(caught.value)


def test_a_file_cut_short_anywhere_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for kept in (0, 1, 7, 8, 9, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        refused(folder, r"model.safetensors is cut short or damaged \(.*\): copy it again")
    path.write_bytes(whole + b"\0")
    refused(folder, "damaged")
    path.write_bytes(b"\xff" * len(whole))
    refused(folder, "damaged")


def test_a_config_of_another_shape_is_refused(folder: Path) -> None:
    refused(folder, r"model.embed_tokens.weight is 97 x 32, by config.json it is 98 x 32", vocab_size=98)
    refused(folder, r"k_proj.weight is 128 x 32, by config.json it is 256 x 32", n_kv_heads=4)
    refused(folder, r"lacks model.layers.3.input_layernorm.weight", n_layers=4)
    refused(folder, r"lacks model.layers.3.", n_layers=1000)
    refused(folder, r"holds model.layers.2.input_layernorm.weight \(9 such\)", n_layers=2)
    refused(folder, r"lacks lm_head.weight", tied=False)


def test_tensors_of_another_model_are_refused(folder: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    changed(folder, lambda tensors: tensors.pop(name))
    refused(folder, re.escape(f"lacks {name}"))
    changed(folder, lambda tensors: tensors.update({name: torch.zeros(256, 32, dtype=torch.int8)}))
    refused(folder, "stored as I8: F32, BF16, F16 can be taken")
    changed(folder, lambda tensors: tensors.update({name: torch.zeros(256, 32, dtype=torch.bfloat16)}))
    refused(folder, "F32.*BF16.*in one dtype")
    changed(folder, lambda tensors: tensors.update({name: torch.full((256, 32), float("nan"))}))
    refused(folder, re.escape(f"{name} is not finite: the training that made it diverged"))
    changed(folder, lambda tensors: tensors.update({name: torch.zeros(256, 32), "model.extra": torch.zeros(2)}))
    refused(folder, r"holds model.extra \(1 such\)")


def test_a_tied_head_may_stand_there_if_it_is_the_embedding(folder: Path) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(32)}  # as transformers once stored it
    changed(folder, lambda t: t.update({**old, "lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in read_weights(folder, read(folder).config)
    changed(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    refused(folder, "lm_head.weight is not the embedding")


def test_no_safetensors_is_refused_with_the_reason(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin, a pickle, which may run any code")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, "neither model.safetensors nor")


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 5}', '{"weight_map": {"a": 1}}']
)
def test_a_damaged_index_is_refused(index: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / huggingface.INDEX).write_text(index)
    refused(folder, "copy the folder again")


def test_shards_that_are_missing_or_double_are_refused(tiny: Transformer, tmp_path: Path) -> None:
    folder = write(tmp_path / "x", tiny, 60_000)
    files = sorted(folder.glob("*.safetensors"))
    content = files[1].read_bytes()
    files[1].unlink()
    refused(folder, f"{files[1].name} is missing")
    files[1].symlink_to(folder)
    refused(folder, f"{files[1].name} is missing")
    files[1].unlink()
    shutil.copy(files[0], files[1])
    refused(folder, f"{files[1].name} holds model.embed_tokens.weight, and so does another file")
    files[1].write_bytes(content)
    read(folder)
    index = folder / huggingface.INDEX
    index.write_text(index.read_text().replace(files[1].name, "../x/" + files[1].name))
    refused(folder, "names no files beside it")
