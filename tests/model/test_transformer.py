import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model.blocks import Block
from model.config import PRESETS, ModelConfig, ModelConfigError
from model.transformer import Transformer
from tests.model import reference
from tests.model.conftest import lively, random_ids, seeded
from tests.model.dispatched import LiveBytes, Products


def distance_from_numpy(config: ModelConfig) -> float:
    model = lively(Transformer(config))
    ids_t = random_ids(config, 13)
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    expected = reference.logits(ids_t.numpy(), weights, config)
    with torch.no_grad():
        logits_tv = model(ids_t[None])[0].double().numpy()
    return float(np.abs(logits_tv - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("tied", [True, False])
def test_against_numpy(tiny_config: ModelConfig, tied: bool) -> None:
    assert distance_from_numpy(replace(tiny_config, tied=tied)) < 1e-5


def without_attention_residual(self: Block, x_btd: Tensor, rotation: object, cache: object, mask: object) -> Tensor:
    x_btd = self.self_attn(self.input_layernorm(x_btd), rotation, cache)
    return x_btd + self.mlp(self.post_attention_layernorm(x_btd))


def without_feedforward_residual(self: Block, x_btd: Tensor, rotation: object, cache: object, mask: object) -> Tensor:
    x_btd = x_btd + self.self_attn(self.input_layernorm(x_btd), rotation, cache)
    return self.mlp(self.post_attention_layernorm(x_btd))


@pytest.mark.parametrize("mutant", [without_attention_residual, without_feedforward_residual])
def test_the_numpy_comparison_catches_a_missing_residual(
    tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., Tensor]
) -> None:
    monkeypatch.setattr(Block, "forward", mutant)
    assert distance_from_numpy(tiny_config) > 0.01


def test_parameter_names_are_hugging_faces(tiny: Transformer) -> None:
    names = {re.sub(r"\.\d+\.", ".N.", name) for name, _ in tiny.named_parameters()}
    block = "layers.N."
    assert names == {
        "embed_tokens.weight",
        "norm.weight",
        f"{block}input_layernorm.weight",
        f"{block}post_attention_layernorm.weight",
        *(f"{block}self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{block}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }
    assert set(tiny.state_dict()) == {name for name, _ in tiny.named_parameters()} | {"lm_head.weight"}


@pytest.mark.parametrize("cast", [lambda model: model, torch.nn.Module.bfloat16])
def test_tied_is_one_parameter(tiny_config: ModelConfig, cast: Callable[[Transformer], Transformer]) -> None:
    tied, untied = Transformer(tiny_config), Transformer(replace(tiny_config, tied=False))
    assert cast(tied).lm_head.weight is tied.embed_tokens.weight
    assert untied.lm_head.weight is not untied.embed_tokens.weight
    assert not torch.equal(untied.lm_head.weight, untied.embed_tokens.weight)


def wrong_deviations(model: Transformer) -> list[str]:
    """Parameters whose standard deviation is not the one the initialisation promises, within 5 standard errors."""
    std, wrong = model.config.init_std, []
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            if not torch.equal(parameter, torch.ones_like(parameter)):
                wrong.append(name)
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = std / math.sqrt(2 * model.config.n_layers) if residual else std
        if abs(float(parameter.detach().std()) / expected - 1) > 5 / math.sqrt(2 * parameter.numel()):
            wrong.append(name)
    return wrong


def test_initial_deviations_and_the_unscaled_residual_is_caught(
    tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrong_deviations(Transformer(tiny_config, seeded(0))) == []
    monkeypatch.setattr("model.initial.math.sqrt", lambda _: 1.0)
    unscaled = Transformer(tiny_config, seeded(0))
    monkeypatch.undo()
    assert set(wrong_deviations(unscaled)) == {
        name for name, _ in unscaled.named_parameters() if "o_proj" in name or "down_proj" in name
    }


def test_the_generator_decides_the_weights(tiny_config: ModelConfig) -> None:
    one, same, other = (Transformer(tiny_config, seeded(seed)).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embed_tokens.weight"], other["embed_tokens.weight"])


def test_a_model_of_the_meta_device_becomes_the_same_model(tiny_config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Transformer(tiny_config)
    model.to_empty(device="cpu")
    model.init_weights(seeded(5))
    expected = Transformer(tiny_config, seeded(5))
    ids_bt = random_ids(tiny_config, 2, 9)
    assert torch.equal(model(ids_bt), expected(ids_bt))
    assert model.lm_head.weight is model.embed_tokens.weight


def test_partitioned_weights_are_not_drawn_silently(tiny: Transformer) -> None:
    tiny.norm.weight.data = torch.empty(0)
    with pytest.raises(RuntimeError, match=r"norm\.weight is empty"):
        tiny.init_weights()


def gradients(model: Transformer, ids_bt: Tensor, targets_bt: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(ids_bt, targets_bt).loss_sum, list(model.parameters())))


MODES = ["none", "selective", "every-2", "full"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", MODES[1:])
def test_checkpointed_gradients_are_equal_bit_for_bit(tiny_config: ModelConfig, tied: bool, mode: str) -> None:
    model = lively(Transformer(replace(tiny_config, tied=tied)))
    ids_bt, targets_bt = random_ids(tiny_config, 2, 20), random_ids(tiny_config, 2, 20, seed=8)
    plain = gradients(model, ids_bt, targets_bt)
    loss = model(ids_bt, targets_bt).loss_sum
    model.activation_checkpointing = mode
    assert torch.equal(model(ids_bt, targets_bt).loss_sum, loss)
    assert all(map(torch.equal, gradients(model, ids_bt, targets_bt), plain))


def kept_bytes(model: Transformer, mode: str) -> int:
    """What lives between forward and backward of the blocks, the parameters aside."""
    model.activation_checkpointing = mode
    ids_bt = random_ids(model.config, 2, 20)
    model.hidden(ids_bt)  # what is made once, is
    with LiveBytes().outside(*model.parameters(), *model.buffers()) as live:
        alive = model.hidden(ids_bt)
        kept = live.live
    assert alive.requires_grad
    return kept


def test_each_kind_of_checkpointing_keeps_less_than_the_one_before(tiny_config: ModelConfig) -> None:
    """With 16 blocks; "full" keeps one (b, t, d) a block, and beside them the ids, the last norm and the outputs."""
    model = lively(Transformer(replace(tiny_config, n_layers=16)))
    sizes = [kept_bytes(model, mode) for mode in MODES]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] < 0.95 * sizes[0]
    assert all(less < 0.8 * more for more, less in itertools.pairwise(sizes[1:]))
    one = 2 * 20 * model.config.d_model * 4
    assert sizes[-1] < (16 + 4) * one


def products_again(model: Transformer, mode: str) -> int:
    """Matrix products and attentions that backward computes a second time, from the counts of both passes."""
    model.activation_checkpointing = mode
    with Products() as products:
        loss = model.hidden(random_ids(model.config, 2, 20)).sum()
        forward = products.costly
        loss.backward()
    return products.costly - 3 * forward


def test_selective_computes_no_product_again(tiny: Transformer) -> None:
    again = {mode: products_again(tiny, mode) for mode in MODES}
    assert again["selective"] == again["none"]
    assert again["none"] < again["every-2"] < again["full"]


@pytest.mark.parametrize("mode", ["every-1", "every-0", "every-", "every-02", "some", "every-9999999"])
def test_an_unknown_checkpointing_is_refused(tiny: Transformer, mode: str) -> None:
    tiny.activation_checkpointing = mode
    with pytest.raises(ModelConfigError, match='should be "none", "selective", "every-N"'):
        tiny(random_ids(tiny.config, 1, 5))


def test_bf16_stays_close_and_finite(tiny_config: ModelConfig) -> None:
    """A whole training pass in bf16: RoPE in fp32 must not leak its dtype into the matrices."""
    model = Transformer(tiny_config, seeded(0))
    ids_bt, targets_bt = random_ids(tiny_config, 2, 40), random_ids(tiny_config, 2, 40, seed=8)
    exact = model(ids_bt, targets_bt).loss_sum.item()
    model.bfloat16()
    assert model(ids_bt).dtype == torch.bfloat16
    loss_sum = model(ids_bt, targets_bt).loss_sum
    loss_sum.backward()
    assert loss_sum.item() == pytest.approx(exact, rel=1e-3)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_too_long_an_input_is_refused(tiny: Transformer) -> None:
    with pytest.raises(ValueError, match="position 48 is past the model's seq_len = 48"):
        tiny(random_ids(tiny.config, 1, 49))


def test_the_mini_preset_has_its_parameters() -> None:
    assert sum(parameter.numel() for parameter in Transformer(PRESETS["mini"]).parameters()) == 35_926_528


def test_the_large_preset_has_its_parameters() -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS["0.5b"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 502_193_664


def test_compiled_blocks_give_the_same_loss_and_gradients(tiny_config: ModelConfig) -> None:
    """What stands before attention and behind it, compiled once for all blocks, under checkpointing too."""
    torch._dynamo.reset()
    model = lively(Transformer(replace(tiny_config, n_layers=3)))
    ids_bt, targets_bt = random_ids(tiny_config, 2, 20), random_ids(tiny_config, 2, 20, seed=8)
    plain, names = gradients(model, ids_bt, targets_bt), set(model.state_dict())
    counters = torch._dynamo.utils.counters
    counters.clear()
    model.compile_blocks()
    for mode in ("none", "full"):
        model.activation_checkpointing = mode
        for one, other in zip(gradients(model, ids_bt, targets_bt), plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] < 2 * len(model.layers)
    (left_whole,) = counters["graph_break"]
    assert "torch.compiler.disable" in left_whole, "attention's own gradients, whose loop would be unrolled"
    assert set(model.state_dict()) == names
