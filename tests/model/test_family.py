"""Norms, their places, biases, feed-forwards and residuals against formulas in float64, and each fault seen by them."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model import blocks, feedforward, residual
from model.accounting import parameter_count, parameter_parts
from model.blocks import HyperBlock, PostNormBlock
from model.config import PRESETS, ModelConfig
from model.feedforward import ACTIVATIONS, FeedForward, SwiGLU
from model.norms import LayerNorm
from model.positions import one_text
from model.residual import HyperConnection, doubly_stochastic, gather, spread
from model.transformer import Transformer
from tests.model import reference
from tests.model.conftest import lively, random_ids, seeded

# ---------------------------------------------------------------- whole models

CHANGES: dict[str, dict[str, object]] = {
    "layer norm": {"norm": "layer"},
    "post": {"norm_place": "post"},
    "deepnorm": {"norm_place": "deepnorm", "norm": "layer"},
    "bias": {"bias": True},
    "relu": {"ffn": "relu", "bias": True},
    "gelu": {"ffn": "gelu"},
    "one stream": {"residual": "hyper"},
    "streams": {"residual": "hyper", "n_streams": 3, "norm": "layer", "bias": True},
    "classic": {"norm": "layer", "norm_place": "post", "bias": True, "ffn": "relu", "positions": "sinusoidal"},
    "gpt2": {"norm": "layer", "bias": True, "ffn": "gelu", "positions": "learned", "n_kv_heads": 4},
}


def distance_from_numpy(config: ModelConfig) -> float:
    """Of the logits in float64 of a model whose every parameter shows, as a part of the largest."""
    model = lively(Transformer(config)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mixing_logits"):
                parameter.normal_(0.0, 1.5, generator=seeded(3))
    ids_t = random_ids(config, 11)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    expected = reference.family_logits(ids_t.numpy(), weights, config)
    with torch.no_grad():
        logits_tv = model(ids_t[None])[0].numpy()
    return float(np.abs(logits_tv - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_is_its_formula(tiny_config: ModelConfig, name: str) -> None:
    assert distance_from_numpy(replace(tiny_config, **CHANGES[name])) < 2e-6  # RoPE's tables and waves are fp32


@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
@pytest.mark.parametrize("attention", [{}, {"attention": "mla", "n_kv_heads": 4, "mla_latent": 24, "mla_rope_dim": 16}])
def test_biases_stand_in_every_matrix_but_the_embedding_and_the_head(
    tiny_config: ModelConfig, ffn: str, attention: dict[str, Any]
) -> None:
    for bias in (True, False):
        model = Transformer(replace(tiny_config, bias=bias, ffn=ffn, **attention))
        names = dict(model.named_parameters())
        matrices = {name for name, weight in names.items() if weight.dim() == 2} - {"embed_tokens.weight"}
        biases = {name for name in names if name.endswith(".bias")}
        assert biases == ({name.replace(".weight", ".bias") for name in matrices} if bias else set())


def no_alpha(self: PostNormBlock, x: Tensor, *rest: Any) -> Tensor:
    x = self.post_attention_layernorm(self.self_attn(x, *rest) + x)
    return self.post_feedforward_layernorm(self.mlp(x) + x)


def normed_before(self: PostNormBlock, x: Tensor, *rest: Any) -> Tensor:
    x = self.alpha * x + self.self_attn(self.post_attention_layernorm(x), *rest)
    return self.alpha * x + self.mlp(self.post_feedforward_layernorm(x))


def no_mean(self: LayerNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, self.weight.shape, self.weight, self.eps) + self.bias


def no_write_gate(self: HyperConnection, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    out = sublayer(torch.tensordot(self.read_gates, x, dims=1))
    return torch.tensordot(doubly_stochastic(self.mixing_logits), x, dims=1) + out


def mixing_turned(self: HyperConnection, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    out = sublayer(torch.tensordot(self.read_gates, x, dims=1))
    mixed = torch.tensordot(doubly_stochastic(self.mixing_logits).T, x, dims=1)
    return mixed + self.write_gates[:, None, None, None] * out


MUTANTS: list[tuple[str, Any, str, Any]] = [
    ("deepnorm", PostNormBlock, "forward", no_alpha),
    ("post", PostNormBlock, "forward", normed_before),
    ("layer norm", LayerNorm, "forward", no_mean),
    ("gelu", ACTIVATIONS, "gelu", F.gelu),
    ("relu", ACTIVATIONS, "relu", F.silu),
    ("streams", HyperConnection, "forward", no_write_gate),
    ("streams", HyperConnection, "forward", mixing_turned),
    ("streams", residual, "ITERATIONS", 1),
    ("streams", blocks, "gather", lambda x: x.sum(dim=0)),
    ("streams", blocks, "gather", lambda x: x[0]),
]


@pytest.mark.parametrize("name, owner, part, mutant", MUTANTS)
def test_a_fault_shows(
    tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch, name: str, owner: Any, part: str, mutant: Any
) -> None:
    if part == "ITERATIONS":
        original = doubly_stochastic
        monkeypatch.setattr(residual, "doubly_stochastic", lambda logits: original(logits, mutant))
    elif isinstance(owner, dict):
        monkeypatch.setitem(owner, part, mutant)
    else:
        monkeypatch.setattr(owner, part, mutant)
    assert distance_from_numpy(replace(tiny_config, **CHANGES[name])) > 1e-5


# ---------------------------------------------------------------- LayerNorm


def test_layer_norm_by_hand() -> None:
    x = torch.tensor([1.0, 3.0, 5.0, 7.0])
    assert (x.mean().item(), x.var(correction=0).item()) == (4.0, 5.0)
    assert LayerNorm(4, 1e-12)(x).tolist() == pytest.approx([v / 2.2361 for v in (-3, -1, 1, 3)], abs=1e-4)


def test_layer_norm_does_not_see_what_is_added_or_multiplied() -> None:
    x = torch.randn(4, 32, generator=seeded(0))
    norm = LayerNorm(32, eps=1e-12)
    torch.testing.assert_close(norm(250 * x + 30), norm(x), rtol=1e-4, atol=1e-4)


def test_layer_norm_is_its_formula() -> None:
    norm = lively_norm(48, 1e-3).double()
    x = torch.randn(5, 48, dtype=torch.float64, generator=seeded(0)) * 0.03 + 2
    weight, bias = (parameter.detach().numpy() for parameter in norm.parameters())
    np.testing.assert_allclose(
        norm(x).detach().numpy(), reference.layer_norm(x.numpy(), weight, bias, 1e-3), rtol=1e-10
    )
    assert torch.autograd.gradcheck(lambda x, *_: norm(x), (x[:2].requires_grad_(), *norm.parameters()))


def lively_norm(width: int, eps: float) -> LayerNorm:
    norm = LayerNorm(width, eps)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=seeded(1))
        norm.bias.normal_(generator=seeded(2))
    return norm


def rounding_errors(forward: Callable[[LayerNorm, Tensor], Tensor]) -> float:
    """The largest error of a bf16 norm in units of the last place, its weights and inputs being exact in bf16."""
    norm = LayerNorm(1536, eps=1e-5).bfloat16()
    x = (torch.randn(16, 1536, generator=seeded(0)) * 50 + 200).bfloat16()
    exact = reference.layer_norm(x.double().numpy(), np.ones(1536), np.zeros(1536), 1e-5)
    error = np.abs(forward(norm, x).detach().double().numpy() - exact)
    return float((error / np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), 1e-2))) - 7)).max())


def statistics_in_bf16(norm: LayerNorm, x: Tensor) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + norm.eps)


def test_layer_norms_statistics_are_fp32_also_after_a_cast_to_bf16() -> None:
    assert rounding_errors(LayerNorm.forward) <= 0.51
    assert rounding_errors(statistics_in_bf16) > 2


# ---------------------------------------------------------------- feed-forward


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_two_matrices_are_their_formula(name: str) -> None:
    layer = FeedForward(24, 56, True, name).double()
    x = torch.randn(9, 24, dtype=torch.float64, generator=seeded(0))
    up_w, up_b, down_w, down_b = (parameter.detach().numpy() for parameter in layer.parameters())
    inner = {"relu": reference.relu, "gelu": reference.gelu}[name](x.numpy() @ up_w.T + up_b)
    np.testing.assert_allclose(layer(x).detach().numpy(), inner @ down_w.T + down_b, atol=1e-13)
    small = FeedForward(3, 5, True, name).double()
    assert torch.autograd.gradcheck(lambda x, *_: small(x), (x[:2, :3].clone().requires_grad_(), *small.parameters()))


def test_gelu_is_the_exact_one_but_for_what_gpt2_left_out() -> None:
    x = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    exact = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    difference = (ACTIVATIONS["gelu"](x) - exact).abs().max().item()
    assert 1e-4 < difference < 5e-4


def test_swiglu_with_biases_is_its_formula() -> None:
    swiglu = SwiGLU(24, 56, bias=True).double()
    x = torch.randn(9, 24, dtype=torch.float64, generator=seeded(0))
    gate_w, gate_b, up_w, up_b, down_w, down_b = (parameter.detach().numpy() for parameter in swiglu.parameters())
    inner = reference.silu(x.numpy() @ gate_w.T + gate_b) * (x.numpy() @ up_w.T + up_b)
    np.testing.assert_allclose(swiglu(x).detach().numpy(), inner @ down_w.T + down_b, atol=1e-13)


def test_silus_slope_by_hand() -> None:
    x = torch.linspace(-8, 8, 401, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(ACTIVATIONS["silu"](x).sum(), x)
    sigma = x.detach().sigmoid()
    torch.testing.assert_close(slope, sigma * (1 + x.detach() * (1 - sigma)), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- norm places and first weights


def deviations(config: ModelConfig) -> dict[str, float]:
    """What the matrices of the blocks were drawn with, as multiples of init_std; biases must be 0, norms 1."""
    found: dict[str, list[Tensor]] = {}
    for name, parameter in Transformer(config, seeded(0)).named_parameters():
        if name.endswith(".bias"):
            assert not parameter.any()
        elif name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.startswith("layers."):
            found.setdefault(name.split(".")[3], []).append(parameter.detach().flatten())
    return {name: torch.cat(parts).std().item() / config.init_std for name, parts in found.items()}


@pytest.mark.parametrize(
    "place, expected",
    [
        ("pre", dict.fromkeys(("o_proj", "down_proj"), 1 / math.sqrt(2 * 5))),
        ("post", {}),
        ("deepnorm", dict.fromkeys(("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), (8 * 5) ** -0.25)),
    ],
)
def test_first_weights_by_norm_place(tiny_config: ModelConfig, place: str, expected: dict[str, float]) -> None:
    found = deviations(replace(tiny_config, n_layers=5, norm_place=place, bias=True, norm="layer"))
    assert found == {name: pytest.approx(expected.get(name, 1.0), rel=0.03) for name in found}
    assert set(expected) <= set(found)


def test_deepnorms_gain_is_on_the_values_of_mla_alone(tiny_config: ModelConfig) -> None:
    config = replace(
        tiny_config, norm_place="deepnorm", attention="mla", n_kv_heads=4, mla_latent=64, mla_rope_dim=16, n_layers=5
    )
    weight = Transformer(config, seeded(0)).layers[0].self_attn.kv_b_proj.weight.detach().view(4, 2, 64, 64)
    keys, values = weight[:, 0].std().item(), weight[:, 1].std().item()
    assert keys == pytest.approx(0.02, rel=0.03)
    assert values == pytest.approx(0.02 * 40**-0.25, rel=0.03)


def test_the_pre_norm_path_meets_no_norm(tiny_config: ModelConfig) -> None:
    """With sublayers that give 0 a block passes its input on as it is; behind post-norms it comes out normed."""
    x = torch.randn(1, 6, 32, generator=seeded(0))
    for place, is_passed in (("pre", True), ("post", False), ("deepnorm", False)):
        model = Transformer(replace(tiny_config, norm_place=place))
        block = model.layers[0]
        with torch.no_grad():
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        out = block(x, model.positions(x, one_text(6))[1])
        assert torch.equal(out, x) == is_passed


def test_the_gradient_by_layer_tells_norm_places_apart() -> None:
    """Xiong et al. 2020: at the beginning the last layers of a post-norm model have more gradient than the first; with
    pre-norm it is the other way round; deepnorm's have the same."""
    ratios = {}
    for place in ("pre", "post", "deepnorm"):
        config = replace(
            PRESETS["mini"], vocab_size=97, d_model=64, n_layers=18, n_heads=2, n_kv_heads=2, d_ff=256, seq_len=32,
            norm_place=place, init_std=0.1, tied=False, norm="layer", ffn="relu",
        )  # fmt: skip
        model = Transformer(config, seeded(1))
        model(random_ids(config, 4, 32), random_ids(config, 4, 32, seed=8)).loss_sum.backward()
        norms = [block.mlp.down_proj.weight.grad.norm().item() for block in model.layers]
        ratios[place] = norms[-1] / norms[0]
    assert ratios["pre"] < 0.5
    assert ratios["post"] > 2
    assert ratios["deepnorm"] == pytest.approx(1, abs=0.1)


# ---------------------------------------------------------------- residual streams


def test_mixing_is_doubly_stochastic_by_sinkhorn_and_knopp() -> None:
    logits = torch.randn(5, 5, dtype=torch.float64, generator=seeded(0)) * 2
    matrix = doubly_stochastic(logits, iterations=200)
    np.testing.assert_allclose(matrix.numpy(), reference.sinkhorn(logits.numpy()), atol=1e-12)
    matrix = doubly_stochastic(logits)
    assert (matrix > 0).all()
    torch.testing.assert_close(matrix.sum(1), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close(matrix.sum(0), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-3)
    small = torch.randn(3, 3, dtype=torch.float64, generator=seeded(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: doubly_stochastic(x), small)


def test_large_logits_do_not_overflow() -> None:
    assert doubly_stochastic(torch.full((3, 3), 1e4)).allclose(torch.full((3, 3), 1 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_stream_is_the_plain_residual_to_the_bit(tiny_config: ModelConfig, dtype: torch.dtype) -> None:
    plain = lively(Transformer(tiny_config)).to(dtype)
    one = Transformer(replace(tiny_config, residual="hyper", n_streams=1)).to(dtype)
    missing = one.load_state_dict(plain.state_dict(), strict=False)
    assert missing.unexpected_keys == []
    assert all("_streams." in name for name in missing.missing_keys)
    ids_bt, targets_bt = random_ids(tiny_config, 2, 20), random_ids(tiny_config, 2, 20, seed=8)
    assert torch.equal(one(ids_bt), plain(ids_bt))
    losses = [model(ids_bt, targets_bt).loss_sum for model in (plain, one)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    theirs = dict(one.named_parameters())
    assert all(torch.equal(theirs[name].grad, parameter.grad) for name, parameter in plain.named_parameters())


@pytest.mark.parametrize("n_streams", [2, 4, 5])
def test_streams_begin_as_the_plain_residual(tiny_config: ModelConfig, n_streams: int) -> None:
    plain = Transformer(tiny_config, seeded(0))
    several = Transformer(replace(tiny_config, residual="hyper", n_streams=n_streams), seeded(0))
    ids_bt = random_ids(tiny_config, 2, 20)
    torch.testing.assert_close(several(ids_bt), plain(ids_bt), rtol=0, atol=1e-6)
    for block in several.layers:
        matrix = doubly_stochastic(block.attention_streams.mixing_logits.detach())
        assert 0 < (matrix - torch.eye(n_streams)).abs().max() < 2e-3
        assert (matrix - torch.eye(n_streams)).fill_diagonal_(0).max() < 1e-3


def test_streams_part_when_they_are_trained(tiny_config: ModelConfig) -> None:
    model = Transformer(replace(tiny_config, residual="hyper", n_streams=3), seeded(0))
    model(random_ids(tiny_config, 2, 20), random_ids(tiny_config, 2, 20, seed=8)).loss_sum.backward()
    gradient = model.layers[0].mlp_streams.write_gates.grad  # the last block's are equal: the mean reads all alike
    assert len({f"{x:.3e}" for x in gradient.tolist()}) == 3


def test_mixing_keeps_the_mean_of_the_streams_also_in_bf16() -> None:
    connection = HyperConnection(4, 0)
    with torch.no_grad():
        connection.mixing_logits.normal_(0.0, 1.0, generator=seeded(0))
        connection.write_gates.zero_()
    x = torch.randn(4, 2, 3, 8, generator=seeded(1))
    mixed = connection(x, lambda read: read)
    torch.testing.assert_close(gather(mixed), gather(x), rtol=1e-3, atol=1e-3)
    same = spread(x[0], 4).bfloat16()
    for _ in range(50):
        same = connection.bfloat16()(same, lambda read: read)
    torch.testing.assert_close(same, spread(x[0], 4).bfloat16(), rtol=0, atol=0)


def test_sums_over_streams_are_rounded_once() -> None:
    """In bf16 the streams behind a sublayer are those of fp32, rounded: no matrix or product is rounded before."""
    connection = HyperConnection(4, 0)
    with torch.no_grad():
        for parameter in connection.parameters():
            parameter.normal_(0.0, 1.0, generator=seeded(0))
    connection.bfloat16()
    x = torch.randn(4, 2, 30, 8, generator=seeded(1)).bfloat16()
    written = torch.randn(2, 30, 8, generator=seeded(2)).bfloat16()
    found = connection(x, lambda read: written)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, connection.float()(x.float(), lambda read: written.float()).bfloat16())


def test_a_block_takes_and_gives_streams_between_the_first_and_the_last(tiny_config: ModelConfig) -> None:
    model = Transformer(replace(tiny_config, residual="hyper", n_streams=3))
    shapes: list[tuple[int, ...]] = []
    for block in model.layers:
        assert isinstance(block, HyperBlock)
        block.register_forward_hook(lambda module, inputs, out: shapes.append(tuple(out.shape)))
    model(random_ids(tiny_config, 2, 20))
    assert shapes == [(3, 2, 20, 32), (3, 2, 20, 32), (2, 20, 32)]


# ---------------------------------------------------------------- counts by hand


def test_counts_by_hand() -> None:
    parts = {part.name: part.parameters for part in parameter_parts(PRESETS["classic"])}
    assert parts["ReLU feed-forward"] == 2_099_712
    swiglu = replace(PRESETS["mini"], d_ff=1536)
    assert {part.name: part.parameters for part in parameter_parts(swiglu)}["SwiGLU"] == 2_359_296
    sizes = {"d_model": 256, "head_dim": 32, "n_heads": 8, "n_kv_heads": 2}
    with pytest.warns(UserWarning, match="head_dim = 32"):
        grouped = replace(PRESETS["mini"], **sizes)
    with pytest.warns(UserWarning, match="head_dim = 32"):
        whole = replace(grouped, n_kv_heads=8, bias=True)
    assert {part.name: part.parameters for part in parameter_parts(grouped)}["attention"] == 163_840
    assert {part.name: part.parameters for part in parameter_parts(whole)}["attention"] == 263_168
    assert (parameter_count(PRESETS["classic"]), parameter_count(PRESETS["gpt2"])) == (16_803_840, 124_439_808)


def test_activations_are_looked_up_when_a_layer_is_made() -> None:
    assert feedforward.build_feedforward(PRESETS["gpt2"]).activation is ACTIVATIONS["gelu"]
