"""Every pair of choices builds, trains, passes `verify` and continues a text, or is refused in a line that says why.

A model takes one value of every axis at once, so some dozens of models hold all pairs; which, is found greedily.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch

from model.config import PRESETS, ModelConfig, ModelConfigError
from model.generate import Sampling, generate
from model.transformer import Transformer
from model.verify import verify
from tests.model.conftest import random_ids, seeded

Choice = tuple[str, str]  # axis, value

# At this width N(0, 0.057) gives a matrix product the share of its input's scale that N(0, 0.02) gives at width 512.
BASE = replace(
    PRESETS["mini"], vocab_size=61, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, seq_len=24, init_std=0.057
)

AXES: dict[str, dict[str, dict[str, object]]] = {
    "norm": {"rms": {}, "layer": {"norm": "layer"}},
    "norm_place": {"pre": {}, "post": {"norm_place": "post"}, "deepnorm": {"norm_place": "deepnorm"}},
    "bias": {"off": {}, "on": {"bias": True}},
    "ffn": {"swiglu": {}, "relu": {"ffn": "relu"}, "gelu": {"ffn": "gelu"}},
    "positions": {name: {"positions": name} for name in ("rope", "none", "sinusoidal", "learned")},
    "attention": {
        "gqa": {},
        "mha": {"n_kv_heads": 4},
        "mqa": {"n_kv_heads": 1},
        "mla": {"attention": "mla", "n_kv_heads": 4, "mla_latent": 24, "mla_rope_dim": 16},
    },
    "qk_norm": {"off": {}, "on": {"qk_norm": True}},
    "window": {"all": {}, "7": {"sliding_window": 7}},
    "residual": {
        "plain": {},
        "one stream": {"residual": "hyper", "n_streams": 1},
        "streams": {"residual": "hyper", "n_streams": 3},
    },
    "output": {"tied": {}, "untied": {"tied": False}},
    "rope_scaling": {
        "none": {},
        "linear": {"rope_scaling": "linear", "rope_scaling_factor": 4.0, "rope_original_seq_len": 8},
        "dynamic": {"rope_scaling": "dynamic", "rope_scaling_factor": 4.0, "rope_original_seq_len": 8},
        "yarn": {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_seq_len": 8},
    },
    "layout": {"rotate_half": {}, "interleaved": {"rope_layout": "interleaved"}},
}  # fmt: skip
CHOICES: list[Choice] = [(axis, value) for axis, values in AXES.items() for value in values]
PAIRS = [(one, other) for one, other in itertools.combinations(CHOICES, 2) if one[0] != other[0]]

STREAMS = 'residual = "hyper" needs norm_place = "pre"'
REFUSED = {
    (("attention", "mla"), ("qk_norm", "on")): 'qk_norm is not for attention = "mla"',
    **{
        (("norm_place", place), ("residual", residual)): STREAMS
        for place in ("post", "deepnorm")
        for residual in ("one stream", "streams")
    },
    **{
        (("positions", name), ("attention", "mla")): f'positions = "{name}" must be "rope"'
        for name in ("none", "sinusoidal", "learned")
    },
    **{
        (("positions", name), ("rope_scaling", scaling)): f'rope_scaling = "{scaling}" needs positions = "rope"'
        for name in ("none", "sinusoidal", "learned")
        for scaling in ("linear", "dynamic", "yarn")
    },
}


def built(choices: Mapping[str, str]) -> ModelConfig:
    """BASE with a value for some axes. ModelConfigError where they contradict each other."""
    settings: dict[str, object] = {}
    for axis, value in choices.items():
        settings |= AXES[axis][value]
    return replace(BASE, **settings)


def is_possible(choices: Mapping[str, str]) -> bool:
    try:
        built(choices)
    except ModelConfigError:
        return False
    return True


def pairs_of(choices: Mapping[str, str]) -> set[tuple[Choice, Choice]]:
    return set(itertools.combinations([(axis, choices[axis]) for axis in AXES if axis in choices], 2))


def covering() -> Iterator[dict[str, str]]:
    """Models whose pairs of choices together are all that are possible."""
    missing = [pair for pair in PAIRS if pair not in REFUSED]
    while missing:
        choices = dict(missing[0])
        for axis in AXES:
            if axis not in choices:
                candidates = [one for value in AXES[axis] if is_possible(one := {**choices, axis: value})]
                choices = max(candidates, key=lambda one: len(pairs_of(one) & set(missing)))
        held = pairs_of(choices)
        missing = [pair for pair in missing if pair not in held]
        yield choices


def faults(config: ModelConfig) -> list[str]:
    """What a model of this config does not pass: a check, a training step, a continuation."""
    found = [f"{check.name}: {check.measured}, not {check.expected}" for check in verify(config) if not check.passed]
    model = Transformer(config, seeded(0))
    ids_bt, targets_bt = random_ids(config, 2, 24), random_ids(config, 2, 24, seed=8)
    losses = []
    for mode in ("none", "full"):
        model.activation_checkpointing = mode
        loss = model(ids_bt, targets_bt)
        losses.append(loss.loss_sum / loss.token_count)
    gradients = torch.autograd.grad(losses[0], list(model.parameters()), allow_unused=True)
    again = torch.autograd.grad(losses[1], list(model.parameters()), allow_unused=True)
    for (name, parameter), one, other in zip(model.named_parameters(), gradients, again, strict=True):
        if one is None or not torch.isfinite(one).all() or not torch.equal(one, other):
            found.append(f"gradient of {name}")
        else:
            parameter.data.sub_(one, alpha=0.02)
    with torch.no_grad():
        after = model(ids_bt, targets_bt)
    if not after.loss_sum / after.token_count < losses[0]:
        found.append("a step against the gradient did not lower the loss")
    several = generate(model, [[1, 2, 3, 4, 5, 6, 7, 8, 9], [5]], 6, Sampling(temperature=0))
    alone = generate(model, [[5]], 14, Sampling(temperature=0))[0]  # in as long a text, on which "dynamic" depends
    if several[1] != alone[:6]:
        found.append("a row of a batch is continued otherwise than alone")
    return found


def test_every_pair_of_choices_works() -> None:
    models = list(covering())
    held = set().union(*map(pairs_of, models))
    assert held == set(PAIRS) - set(REFUSED)
    found = {str(choices): wrong for choices in models if (wrong := faults(built(choices)))}
    assert not found


def test_every_other_pair_is_refused_in_a_line_of_its_own() -> None:
    assert {pair for pair in PAIRS if not is_possible(dict(pair))} == set(REFUSED)
    for pair, words in REFUSED.items():
        with pytest.raises(ModelConfigError) as caught:
            built(dict(pair))
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.soak
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in REFUSED], ids=str)
def test_a_pair_of_choices_alone_works(pair: tuple[Choice, Choice]) -> None:
    assert faults(built(dict(pair))) == []
