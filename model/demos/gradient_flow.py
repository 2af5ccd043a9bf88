"""How much gradient each layer gets before training, by where the norm stands."""

import math
from typing import TYPE_CHECKING, Any

import torch

from model.config import PRESETS, ModelConfig
from model.demos.demo import Demo
from model.transformer import Transformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACES = ("pre", "post", "deepnorm")
LAYERS, WIDTH, TOKENS = 18, 64, 64


def demo() -> Demo:
    """The norm of the gradient of each layer's second feed-forward matrix (Xiong et al. 2020, section 3)."""
    norms = {place: _gradients(place) for place in PLACES}
    ratios = {place: found[-1] / found[0] for place, found in norms.items()}
    shown = range(0, LAYERS, 4)
    lines = [f"gradient norm of down_proj, {LAYERS} layers of width {WIDTH}, the first batch"]
    lines.append("layer      " + "".join(f"{layer + 1:>10}" for layer in (*shown, LAYERS - 1)) + "   last / first")
    lines += [
        f"{place:<11}" + "".join(f"{found[layer]:10.2e}" for layer in (*shown, LAYERS - 1)) + f"{ratios[place]:15.2f}"
        for place, found in norms.items()
    ]
    lines += [
        "pre: the residual path meets no norm, so every layer hears of the loss.",
        "post: each norm on the path takes a part, so the last layers hear more, and learning wants a warm-up.",
        "deepnorm: the path weighs more, by (2L)^¼, and branches begin smaller: all layers hear alike",
    ]
    numbers: dict[str, Any] = {"norms": norms, "last_over_first": ratios}
    return Demo("Gradient by layer: where the norm stands", tuple(lines), numbers, _draw(norms))


def _gradients(place: str) -> list[float]:
    sizes = {"vocab_size": 256, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": 1, "n_kv_heads": 1, "seq_len": TOKENS}
    # LayerNorm and ReLU, as the papers have them; σ · √width as of 0.02 in a model of width 1536.
    choices = {"norm": "layer", "ffn": "relu", "norm_place": place, "init_std": 0.02 * math.sqrt(1536 / WIDTH)}
    table = {**PRESETS["mini"].to_dict(), **sizes, "d_ff": 4 * WIDTH, **choices}
    model = Transformer(ModelConfig(**table), generator=torch.Generator().manual_seed(1))
    draw = torch.Generator().manual_seed(2)
    ids_bt, targets_bt = (torch.randint(256, (4, TOKENS), generator=draw) for _ in range(2))
    loss = model(ids_bt, targets_bt)
    (loss.loss_sum / loss.token_count).backward()
    found = []
    for layer in range(LAYERS):
        gradient = model.get_parameter(f"layers.{layer}.mlp.down_proj.weight").grad
        assert gradient is not None
        found.append(float(gradient.norm()))
    return found


def _draw(norms: dict[str, list[float]]) -> Any:
    def draw(figure: "Figure") -> None:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes = figure.subplots()
        for place, found in norms.items():
            axes.plot(range(1, LAYERS + 1), found, marker="o", linewidth=2.5, label=place)
        axes.set(xlabel="layer", ylabel="gradient norm of down_proj", yscale="log")
        axes.set_xticks(range(1, LAYERS + 1))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.legend()

    return draw
