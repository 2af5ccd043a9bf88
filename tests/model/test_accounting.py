from dataclasses import replace

import pytest

from model.accounting import (
    flops_per_token,
    kv_cache_bytes_per_token,
    parameter_count,
    parameter_parts,
    static_memory_bytes,
)
from model.config import PRESETS

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


def test_flops_at_a_shorter_window() -> None:
    assert flops_per_token(MINI, 256) == flops_per_token(replace(MINI, seq_len=256))
