import subprocess
import sys
from dataclasses import replace

import pytest

from model.config import COMPONENTS, PRESETS, ModelConfig, ModelConfigError, from_table


def test_a_preset_with_overrides() -> None:
    assert from_table({"preset": "mini", "seq_len": 256}) == replace(PRESETS["mini"], seq_len=256)


def test_a_config_survives_its_dict() -> None:
    for config in PRESETS.values():
        assert ModelConfig(**config.to_dict()) == config
        assert from_table(config.to_dict()) == config
        assert config.to_dict()["rope_layout"] == "rotate_half"
        assert None not in config.to_dict().values()


@pytest.mark.parametrize(
    "table, words",
    [
        ({"preset": "mini", "n_layer": 3}, 'unknown key "n_layer".*"n_layers"'),
        ({"preset": "mimi"}, 'unknown preset.*"mini"'),
        ({"preset": 5}, "unknown preset 5"),
        ({"vocab_size": 10}, "lacks d_model, .*tied"),
        ({"preset": "mini", "n_layers": 2.5}, "n_layers = 2.5 must be of type int"),
        ({"preset": "mini", "n_layers": True}, "n_layers = True must be of type int"),
        ({"preset": "mini", "n_layers": 0}, "n_layers = 0 must be positive"),
        ({"preset": "mini", "n_layers": 1001}, "n_layers = 1001 is too deep: at most 1000"),
        ({"preset": "mini", "n_layers": 2**31 - 1}, "n_layers = 2147483647 is too deep"),
        ({"preset": "mini", "norm_eps": float("nan")}, "norm_eps = nan"),
        ({"preset": "mini", "norm_eps": 10**400}, "norm_eps = a number of 1329 bits must be .*below 1e"),
        ({"preset": "mini", "rope_base": 16**5000 - 1}, "rope_base = a number of 20000 bits"),
        ({"preset": "mini", "vocab_size": 2**31}, "vocab_size = 2147483648 must be .*below 2.14748e"),
        ({"preset": 16**5000}, "unknown preset a number of 20001 bits"),
        ({"preset": "mini", "tied": 1}, "tied = 1 must be of type bool"),
        ({"preset": "mini", "n_heads": 7}, "n_heads = 7 must be a multiple of n_kv_heads = 2"),
        ({"preset": "mini", "head_dim": 63}, "head_dim = 63 must be even"),
        ({"preset": "mini", "rope_layout": "half"}, 'rope_layout = "half" is unknown; known: rotate_half, interleaved'),
        (
            {"preset": "mini", "norm": "layr"},
            r"norm = 'layr' is unknown \(did you mean \"layer\"\?\); known: rms, layer",
        ),
        ({"preset": "mini", "norm": None}, "norm = None must be of type str"),
        ({"preset": "mini", "bias": "on"}, "bias = 'on' must be of type bool"),
        ({"preset": "mini", "sliding_window": 0}, "sliding_window = 0 must be positive"),
        ({"preset": "mini", "sliding_window": 2.0}, "sliding_window = 2.0 must be of type int"),
        ({"preset": "mini", "sliding_window": 1}, "sliding_window = 1 leaves a token itself alone"),
        ({"preset": "mini", "mla_latent": 64}, 'mla_latent = 64 is for attention = "mla"'),
        ({"preset": "mini", "attention": "mla", "n_kv_heads": 8, "mla_rope_dim": 32}, "needs mla_latent"),
        ({"preset": "mini", "attention": "mla", "n_kv_heads": 8, "mla_latent": 32}, "needs mla_rope_dim"),
        (
            {"preset": "mini", "attention": "mla", "mla_latent": 8, "mla_rope_dim": 4},
            "n_kv_heads = 2 must be n_heads = 8",
        ),
        (
            {"preset": "mini", "attention": "mla", "n_kv_heads": 8, "mla_latent": 8, "mla_rope_dim": 3},
            "mla_rope_dim = 3 must be even",
        ),
        ({"preset": "classic", "d_model": 511}, 'd_model = 511 must be even for positions = "sinusoidal"'),
        ({"preset": "mini", "n_streams": 4}, 'n_streams = 4 is for residual = "hyper"'),
        ({"preset": "mini", "residual": "hyper", "n_streams": 65}, "n_streams = 65 is too many: at most 64"),
        ({"preset": "classic", "residual": "hyper"}, 'residual = "hyper" needs norm_place = "pre", not "post"'),
        ({"preset": "mini", "rope_scaling_factor": 2.0}, "rope_scaling_factor = 2.0 is for rope_scaling"),
        ({"preset": "mini", "rope_original_seq_len": 64}, "rope_original_seq_len = 64 is for rope_scaling"),
        ({"preset": "mini", "rope_scaling": "yarn", "rope_scaling_factor": 2.0}, '"yarn" needs rope_original_seq_len'),
        (
            {"preset": "mini", "rope_scaling": "yarn", "rope_scaling_factor": 0.5, "rope_original_seq_len": 64},
            "rope_scaling_factor = 0.5 must be at least 1",
        ),
    ],
)
def test_a_wrong_table_is_refused_in_one_line(table: dict[str, object], words: str) -> None:
    with pytest.raises(ModelConfigError, match=words) as caught:
        from_table(table)
    assert "\n" not in str(caught.value)


def test_a_model_of_before_its_components_had_names_is_a_llama() -> None:
    assert len(PRESETS["mini"].to_dict()) == 13
    assert {name: getattr(PRESETS["mini"], name) for name in COMPONENTS} == {
        "norm": "rms", "norm_place": "pre", "bias": False, "ffn": "swiglu", "positions": "rope", "attention": "gqa",
        "qk_norm": False, "sliding_window": None, "residual": "plain", "n_streams": 1, "mla_latent": None,
        "mla_rope_dim": None, "rope_scaling": "none", "rope_scaling_factor": 1.0, "rope_original_seq_len": None,
    }  # fmt: skip


def test_an_integer_is_a_valid_float() -> None:
    assert from_table({"preset": "mini", "rope_base": 500000}).rope_base == 500000.0


def test_head_dims_without_fused_kernels_warn() -> None:
    with pytest.warns(UserWarning, match="head_dim = 96"):
        from_table({"preset": "mini", "head_dim": 96})


def test_config_and_accounting_need_no_torch() -> None:
    program = "import sys, model.config, model.accounting, model.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
