"""Models of transformers besides plain Llama: scaled RoPE, biases, Mistral's window, Qwen3's norms, GPT-2."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from model import architectures
from model.architectures import ARCHITECTURES, WeightsError, architecture_of, from_config, to_config
from model.config import PRESETS, ModelConfig, ModelConfigError
from model.generate import Sampling, generate
from model.huggingface import read_weights, write_weights
from model.transformer import Transformer
from tests.model.conftest import lively, random_ids, seeded

logging.disable_progress_bar()

TOLERANCE = 1e-5
SCALED = {"rope_scaling_factor": 4.0, "rope_original_seq_len": 12}  # of tiny_config's 48 positions
GPT2: dict[str, Any] = {
    "norm": "layer",
    "bias": True,
    "ffn": "gelu",
    "positions": "learned",
    "n_heads": 2,
    "n_kv_heads": 2,
    "d_model": 128,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_scaling": "linear", **SCALED}),
    "dynamic": ("llama", {"rope_scaling": "dynamic", **SCALED}),
    "yarn": ("llama", {"rope_scaling": "yarn", **SCALED}),
    "biases": ("llama", {"bias": True, "tied": False}),
    "interleaved biases": ("llama", {"bias": True, "rope_layout": "interleaved"}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "qwen3": ("qwen3", {"qk_norm": True}),
    "qwen3, untied, yarn": ("qwen3", {"qk_norm": True, "tied": False, "rope_scaling": "yarn", **SCALED}),
    "qwen3, window": ("qwen3", {"qk_norm": True, "sliding_window": 7}),
    "qwen3, interleaved": ("qwen3", {"qk_norm": True, "rope_layout": "interleaved"}),
    "gpt2": ("gpt2", GPT2),
    "gpt2, untied": ("gpt2", GPT2 | {"tied": False, "rope_layout": "interleaved"}),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest, tiny_config: ModelConfig) -> tuple[str, ModelConfig]:
    kind, changes = request.param
    return kind, replace(tiny_config, **changes)


def write(folder: Path, model: Transformer) -> Path:
    folder.mkdir()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_weights(folder, weights, model.config, max_shard_bytes=10**9)
    (folder / "config.json").write_text(json.dumps(to_config(model.config, torch.float32)))
    return folder


def read(folder: Path, rope_layout: str = "rotate_half") -> Transformer:
    config = replace(from_config(json.loads((folder / "config.json").read_text())), rope_layout=rope_layout)
    model = Transformer(config)
    assert not model.load_state_dict(read_weights(folder, config), strict=False).unexpected_keys
    return model.eval()


def opened(folder: Path) -> transformers.PreTrainedModel:
    """By transformers' own loader, which finds neither too much nor too little."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert info == {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
    return model.eval()


@torch.no_grad()
def difference(ours: Transformer, theirs: transformers.PreTrainedModel) -> float:
    """Of logits: below the length that a scaling was trained for, and over the whole window, each as its own text."""
    worst = 0.0
    for tokens in (10, 12, 13, 48):
        ids_bt = random_ids(ours.config, 2, tokens)
        expected = theirs(ids_bt).logits
        worst = max(worst, float((ours(ids_bt) - expected).abs().max() / expected.abs().max().clamp(min=1)))
    return worst


def test_ours_there_and_back(case: tuple[str, ModelConfig], tmp_path: Path) -> None:
    kind, config = case
    model = lively(Transformer(config, seeded(0))).eval()
    folder = write(tmp_path / "x", model)
    theirs = opened(folder)
    assert type(theirs).__name__ == ARCHITECTURES[kind][0]
    assert difference(model, theirs) <= TOLERANCE
    back = read(folder, config.rope_layout)
    assert back.config == config
    assert all(map(torch.equal, back.parameters(), model.parameters()))


def test_theirs_here_and_back(case: tuple[str, ModelConfig], tmp_path: Path) -> None:
    """A model that transformers builds, draws and saves, with its own whole config.json; every bit of it returns."""
    kind, config = case
    torch.manual_seed(3)
    table = to_config(replace(config, init_std=0.2), torch.float32)
    theirs = getattr(transformers, ARCHITECTURES[kind][0])(transformers.AutoConfig.for_model(**table)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.ndim == 1:  # biases and norms are drawn as 0 and 1, which would hide much
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=seeded(len(name))))
    theirs.save_pretrained(tmp_path / "theirs")
    model = read(tmp_path / "theirs")
    assert difference(model, theirs) <= TOLERANCE
    back, state = opened(write(tmp_path / "back", model)).state_dict(), theirs.state_dict()
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("name", ["mistral", "qwen3", "gpt2"])
def test_greedy_text_is_equal(name: str, tiny_config: ModelConfig, tmp_path: Path) -> None:
    """With both caches at work, beyond Mistral's window."""
    model = lively(Transformer(replace(tiny_config, **CASES[name][1]), seeded(5))).eval()
    theirs = opened(write(tmp_path / "x", model))
    prompt = random_ids(tiny_config, 9).tolist()
    produced = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generate(model, [prompt], 32, Sampling(temperature=0)) == [produced[0, 9:].tolist()]


def test_gpt2_itself(tmp_path: Path) -> None:
    """The preset's widths, two of its twelve layers, a small vocabulary."""
    config = replace(PRESETS["gpt2"], n_layers=2, vocab_size=500, seq_len=128)
    model = Transformer(config, seeded(0)).eval()
    assert difference(model, opened(write(tmp_path / "x", model))) <= TOLERANCE


# ---------------------------------------------------------------- what the comparison catches


def exact_gelu(config: ModelConfig) -> dict[str, Any]:
    return {**original_gpt2(config), "activation_function": "gelu"}


def window_one_longer(config: ModelConfig, kind: str) -> dict[str, Any]:
    table = original_llama(config, kind)
    return table | ({"sliding_window": 8} if config.sliding_window else {})


def no_factor(config: ModelConfig) -> dict[str, Any]:
    table = original_rope(config)
    return table | {"rope_parameters": {**table["rope_parameters"], "attention_factor": 1.0}, "rope_scaling": None}


original_gpt2, original_llama, original_rope = (
    architectures._gpt2_config,
    architectures._llama_config,
    architectures._rope_config,
)


@pytest.mark.parametrize(
    "name, function, mutant",
    [
        ("gpt2", "_gpt2_config", exact_gelu),
        ("mistral", "_llama_config", window_one_longer),
        ("qwen3, window", "_llama_config", window_one_longer),
        ("yarn", "_rope_config", no_factor),
    ],
)
def test_the_comparison_catches_mutants(
    name: str,
    function: str,
    mutant: Callable[..., Any],
    tiny_config: ModelConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = lively(Transformer(replace(tiny_config, **CASES[name][1]), seeded(0))).eval()
    monkeypatch.setattr(architectures, function, mutant)
    assert difference(model, opened(write(tmp_path / "x", model))) > 10 * TOLERANCE


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"attention": "mla", "mla_latent": 8, "mla_rope_dim": 4, "n_kv_heads": 4}, "attention = 'mla' beside"),
        ({"positions": "none"}, "positions = 'none' beside .*LlamaForCausalLM, the nearest, has positions = 'rope'"),
        ({"norm": "layer"}, "norm = 'layer' beside"),
        ({"norm_place": "post"}, "norm_place = 'post' beside"),
        ({"ffn": "relu"}, "ffn = 'relu' beside"),
        ({"residual": "hyper", "n_streams": 2}, "residual = 'hyper' beside"),
        ({"bias": True, "sliding_window": 5}, "bias = True beside|sliding_window = 5 beside"),
        ({"bias": True, "qk_norm": True}, "bias = True beside|qk_norm = True beside"),
        (GPT2 | {"norm": "rms"}, "norm = 'rms' beside .*GPT2LMHeadModel, the nearest"),
        (GPT2 | {"n_kv_heads": 1}, "n_kv_heads = 1, .*as many key/value heads as heads"),
        (GPT2 | {"d_model": 96}, "which divide d_model = 96"),
    ],
)
def test_components_that_no_model_of_theirs_has(changes: dict[str, Any], words: str, tiny_config: ModelConfig) -> None:
    with pytest.raises(ModelConfigError, match=words) as caught:
        to_config(replace(tiny_config, **changes), torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu': this model has gelu_new alone"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
        ("gpt2", {"n_head": 3}, "n_embd = 128 is no multiple of n_head = 3"),
        ("gpt2", {"n_embd": None}, "n_embd = None"),
        ("mistral", {"sliding_window": 1}, "sliding_window = 1"),
        ("qwen3", {"attention_bias": True}, "attention_bias = true: this model has false alone"),
        ("qwen3, window", {"max_window_layers": 1}, "in some of its layers"),
        ("qwen3, window", {"layer_types": ["sliding_attention", "full_attention"] * 2}, "in some of its layers"),
        ("yarn", {"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "factor '4' of max_position"),
    ],
)
def test_what_theirs_can_be_and_ours_cannot(
    name: str, changes: dict[str, Any], words: str, tiny_config: ModelConfig
) -> None:
    table = to_config(replace(tiny_config, **CASES[name][1]), torch.float32)
    with pytest.raises(WeightsError, match=words) as caught:
        from_config({**table, **changes})
    assert "\n" not in str(caught.value)


def test_what_a_config_leaves_out(tiny_config: ModelConfig) -> None:
    """The defaults are transformers'; a trained length that nothing tells is the window over the factor."""
    table = to_config(replace(tiny_config, sliding_window=7), torch.float32)
    del table["sliding_window"]
    assert from_config(table).sliding_window == 4096
    table = to_config(replace(tiny_config, **GPT2, d_ff=512), torch.float32)
    del table["n_inner"], table["activation_function"], table["tie_word_embeddings"]
    assert from_config(table) == replace(tiny_config, **GPT2, d_ff=512)
    for kind, changes in (("linear", {"seq_len": 48}), ("dynamic", {"seq_len": 48}), ("yarn", {"seq_len": 48})):
        config = replace(tiny_config, rope_scaling=kind, **SCALED)
        table = to_config(config, torch.float32)
        table.pop("original_max_position_embeddings", None)
        table.pop("seq_len", None)
        assert from_config(table) == replace(config, **changes)
    table = to_config(replace(tiny_config, qk_norm=True), torch.float32)
    del table["head_dim"], table["num_key_value_heads"]
    with pytest.raises(WeightsError, match="lacks num_key_value_heads, head_dim"):
        from_config(table)


def test_masks_that_old_transformers_stored_are_left(tiny_config: ModelConfig, tmp_path: Path) -> None:
    folder = write(tmp_path / "x", lively(Transformer(replace(tiny_config, **GPT2))))
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 48, 48)
    tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    read(folder)


def test_presets_by_name() -> None:
    kinds = {name: architecture_of(config) for name, config in PRESETS.items() if name != "classic"}
    assert kinds == {"0.5b": "llama", "mini": "llama", "gpt2": "gpt2"}
    with pytest.raises(ModelConfigError, match="is no model that transformers has"):
        architecture_of(PRESETS["classic"])
