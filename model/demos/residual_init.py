"""Why what writes to the residual stream begins smaller: variance over depth, with and without 1/sqrt(2 · n_layers)."""

import math
from typing import TYPE_CHECKING, Any

import torch

from model.config import PRESETS
from model.demos.demo import Demo
from model.transformer import Transformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEPTHS = (6, 24, 96)
WIDTH, TOKENS = 128, 128


@torch.no_grad()
def demo() -> Demo:
    """Models as they are drawn; then the same with o_proj and down_proj as large as all other matrices."""
    curves: dict[str, Any] = {}
    lines = ["variance of the residual stream, as a multiple of the embedding's"]
    lines.append(f"{'layers':>8}{'scaled, at the end':>22}{'unscaled, at the end':>24}")
    for depth in DEPTHS:
        scaled, unscaled = _variances(depth, scaled=True), _variances(depth, scaled=False)
        curves[str(depth)] = {"scaled": scaled, "unscaled": unscaled}
        lines.append(f"{depth:8d}{scaled[-1]:22.2f}{unscaled[-1]:24.2f}")
    lines.append("2 · n_layers outputs add up: scaled by 1/√(2 · n_layers), their sum does not grow with depth (GPT-2)")
    return Demo("The residual stream over depth: outputs that add up", tuple(lines), curves, _draw(curves))


def _variances(depth: int, *, scaled: bool) -> list[float]:
    mini = PRESETS["mini"].to_dict()
    sizes = {"d_model": WIDTH, "n_layers": depth, "n_heads": 2, "n_kv_heads": 2, "d_ff": 4 * WIDTH, "seq_len": TOKENS}
    # At this width N(0, 0.02) would hide the effect; σ · √width is as in a model of width 1536.
    config = type(PRESETS["mini"])(**{**mini, **sizes, "init_std": 0.02 * math.sqrt(1536 / WIDTH)})
    model = Transformer(config, generator=torch.Generator().manual_seed(1))
    for layer in range(depth) if not scaled else ():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.get_parameter(f"layers.{layer}.{name}.weight").mul_(math.sqrt(2 * depth))
    found: list[float] = []
    for block in model.layers:
        block.register_forward_hook(lambda module, inputs, out: found.append(float(out.var())))
    ids_bt = torch.randint(config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    embedded = float(model.embed_tokens(ids_bt).var())
    model.hidden(ids_bt)
    return [1.0, *(variance / embedded for variance in found)]


def _draw(curves: dict[str, Any]) -> Any:
    def draw(figure: "Figure") -> None:
        panels = figure.subplots(1, len(DEPTHS), sharey=True)
        for axes, (depth, found) in zip(panels, curves.items(), strict=True):
            for name, curve in found.items():
                axes.plot(range(len(curve)), curve, linewidth=2.5, label=name)
            axes.set(title=f"{depth} layers", xlabel="behind layer", yscale="log")
        panels[0].set_ylabel("variance / the embedding's")
        panels[0].legend(loc="upper left")

    return draw
