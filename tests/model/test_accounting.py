import math
from dataclasses import replace

import pytest
import torch

from model.accounting import (
    FLOPS_FORMULA,
    flops_formula,
    flops_per_token,
    kv_cache_bytes_per_token,
    parameter_count,
    parameter_parts,
    parameter_shapes,
    static_memory_bytes,
)
from model.config import PRESETS, ModelConfig
from model.transformer import Transformer

LARGE, MINI = PRESETS["0.5b"], PRESETS["mini"]


def test_counts_of_the_presets() -> None:
    assert parameter_count(LARGE) == 502_193_664
    assert parameter_count(MINI) == 35_926_528


def test_untied_costs_one_more_embedding() -> None:
    assert parameter_count(replace(LARGE, tied=False)) - parameter_count(LARGE) == 49_152_000
    assert parameter_count(replace(MINI, tied=False)) - parameter_count(MINI) == 2_097_152


def test_part_table_of_the_large_preset() -> None:
    table = {part.name: (part.parameters, round(100 * part.share, 1), part.share_of) for part in parameter_parts(LARGE)}
    expected = {
        "q_proj": (2_359_296, 9.4, "block"),
        "k_proj": (786_432, 3.1, "block"),
        "v_proj": (786_432, 3.1, "block"),
        "o_proj": (2_359_296, 9.4, "block"),
        "attention": (6_291_456, 25.0, "block"),
        "SwiGLU": (18_874_368, 75.0, "block"),
        "two norms": (3_072, 0.0, "block"),
        "block": (25_168_896, 5.0, "model"),
        "18 blocks": (453_040_128, 90.2, "model"),
        "embedding, shared with the output": (49_152_000, 9.8, "model"),
        "last norm": (1_536, 0.0, "model"),
        "model": (502_193_664, 100.0, "model"),
    }
    assert {name: table[name] for name in expected} == expected


@pytest.mark.parametrize("config", [LARGE, MINI, replace(MINI, tied=False)])
def test_parts_add_up(config: object) -> None:
    parts = {part.name: part.parameters for part in parameter_parts(config)}
    block = sum(parts[f"{name}_proj"] for name in ("q", "k", "v", "o", "gate", "up", "down")) + parts["two norms"]
    assert parts["block"] == block
    outside = [size for name, size in parts.items() if name.startswith(("embedding", "output", "last norm"))]
    assert parts["model"] == config.n_layers * block + sum(outside) == parameter_count(config)


def test_full_multi_head_attention_of_the_large_preset() -> None:
    parts = {part.name: part.parameters for part in parameter_parts(replace(LARGE, n_kv_heads=12))}
    assert parts["attention"] == 9_437_184


def test_kv_cache_figures() -> None:
    assert kv_cache_bytes_per_token(LARGE) == 36_864
    assert kv_cache_bytes_per_token(LARGE, kv_heads=12) == 110_592
    assert kv_cache_bytes_per_token(LARGE) * 2048 / 1e6 == pytest.approx(75.5, abs=0.05)
    assert kv_cache_bytes_per_token(LARGE, kv_heads=12) * 2048 / 1e6 == pytest.approx(226.5, abs=0.05)
    assert kv_cache_bytes_per_token(MINI) == 6_144
    assert kv_cache_bytes_per_token(MINI, kv_heads=8) == 4 * 6_144


def test_static_memory_is_16_bytes_a_parameter() -> None:
    memory = static_memory_bytes(LARGE)
    assert sum(memory.values()) == 16 * 502_193_664
    assert sum(memory.values()) / 1e9 == pytest.approx(8.04, abs=0.005)
    assert [round(size / 1e9, 2) for size in memory.values()] == [1.00, 1.00, 2.01, 2.01, 2.01]


def test_flops_count_each_matrix_and_each_visible_key() -> None:
    flops = flops_per_token(LARGE)
    matrices = 502_193_664 - 18 * 3_072 - 1_536
    assert flops.matrices == 6 * matrices
    # By hand: 12 heads of 128; q·k and scores·v, a multiply-add each; query t meets t + 1 keys; backward is twice.
    visible = sum(t + 1 for t in range(2048))
    assert flops.attention_causal * 2048 == 3 * 18 * visible * 12 * 128 * 2 * 2
    assert flops.attention_full == 3 * 18 * 2048 * 12 * 128 * 2 * 2
    assert flops.causal == flops.matrices + flops.attention_causal < flops.full


def test_untied_models_do_not_pay_for_the_look_up() -> None:
    assert flops_per_token(replace(MINI, tied=False)) == flops_per_token(MINI)


def test_the_published_counts_of_the_other_presets() -> None:
    assert parameter_count(PRESETS["classic"]) == 16_803_840
    assert parameter_count(PRESETS["gpt2"]) == 124_439_808
    names = [part.name for part in parameter_parts(PRESETS["classic"])]
    assert "last norm" not in names
    assert {"ReLU feed-forward", "output"} <= {*names}
    assert {"positions", "last norm", "GELU feed-forward"} <= {part.name for part in parameter_parts(PRESETS["gpt2"])}


MLA = replace(MINI, attention="mla", n_kv_heads=8, mla_latent=64, mla_rope_dim=32)


@pytest.mark.parametrize(
    "config",
    [
        *PRESETS.values(),
        replace(MINI, norm="layer", norm_place="deepnorm", bias=True, qk_norm=True, tied=False),
        replace(MLA, bias=True, residual="hyper", n_streams=3),
    ],
)
def test_shapes_are_those_of_the_module_in_its_order(config: ModelConfig) -> None:
    with torch.device("meta"):
        built = [(name, tuple(parameter.shape)) for name, parameter in Transformer(config).named_parameters()]
    assert list(parameter_shapes(config).items()) == built
    assert parameter_count(config) == sum(math.prod(shape) for _, shape in built)
    assert parameter_parts(config)[-1].parameters == parameter_count(config)


def test_flops_of_mla_and_of_a_sliding_window() -> None:
    flops, window = flops_per_token(MLA), 1024
    d, heads, k, latent, rotary = 512, 8, 64, 64, 32
    attention = d * heads * (k + rotary) + d * (latent + rotary) + latent * heads * 2 * k + heads * k * d
    assert flops.matrices == 6 * (12 * (attention + 3 * d * 1408) + 4096 * d)
    visible = sum(t + 1 for t in range(window))
    assert flops.attention_causal * window == 3 * 12 * visible * heads * 2 * (k + rotary + k)
    slid = flops_per_token(replace(MINI, sliding_window=100))
    visible = sum(min(t + 1, 100) for t in range(window))
    assert slid.attention_causal == 3 * 12 * visible * heads * 2 * (k + k) // window
    assert slid.attention_full == 3 * 12 * 100 * heads * 2 * (k + k)
    assert slid.matrices == flops_per_token(MINI).matrices
    assert flops_per_token(replace(MINI, sliding_window=5000)) == flops_per_token(MINI)
    assert "mla_rope_dim" in flops_formula(MLA)
    assert flops_formula(MINI) == FLOPS_FORMULA


def test_mlas_cache_by_hand() -> None:
    """One layer, 4096 tokens, bf16, in MiB: 8 heads of 64 take 8, with 4 kv heads 4, 2 kv heads 2, MLA 0.75."""
    one = replace(MINI, n_layers=1)
    by_heads = [kv_cache_bytes_per_token(one, kv_heads=heads) * 4096 / 2**20 for heads in (8, 4, 2)]
    assert by_heads == [8, 4, 2]
    assert kv_cache_bytes_per_token(replace(MLA, n_layers=1)) * 4096 / 2**20 == 0.75


def test_flops_at_a_shorter_window() -> None:
    assert flops_per_token(MINI, 256) == flops_per_token(replace(MINI, seq_len=256))
