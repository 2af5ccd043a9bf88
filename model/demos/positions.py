"""Where attention looks when all tokens say the same: without positions, with sinusoids, with RoPE."""

from typing import TYPE_CHECKING, Any

import torch

from model.demos.demo import Demo
from model.positions import Positions, RotaryEmbedding, Sinusoidal, one_text, rotate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS, HEAD_DIM = 96, 64
NAMES = ("none", "sinusoidal", "rope")


@torch.no_grad()
def demo() -> Demo:
    """One head whose q and k are the token itself, all tokens alike: whatever pattern appears comes of positions."""
    maps = {name: _attention(name) for name in NAMES}
    by_distance = {name: _by_distance(weights) for name, weights in maps.items()}
    shown = (0, 1, 2, 4, 8, 16, 32)
    lines = ["mean weight by distance, over the last third of the queries"]
    lines.append("distance   " + "".join(f"{distance:>9}" for distance in shown))
    lines += [
        f"{name:<11}" + "".join(f"{found[distance]:9.4f}" for distance in shown) for name, found in by_distance.items()
    ]
    lines.append(
        "none: all alike. sinusoidal and RoPE: near tokens weigh more, far ones less, by waves of many lengths"
    )
    lines.append(
        "(sinusoids are added to what tokens say and share its dimensions; RoPE turns q and k and adds nothing)"
    )
    numbers: dict[str, Any] = {"by_distance": by_distance}
    return Demo(
        "Positions: where attention looks when all tokens are alike", tuple(lines), numbers, _draw(maps, by_distance)
    )


def _attention(name: str) -> torch.Tensor:
    """(queries, keys) weights of causal attention, whose scores are q·k / √head_dim."""
    kinds: dict[str, Positions] = {
        "none": Positions(TOKENS),
        "sinusoidal": Sinusoidal(HEAD_DIM, TOKENS),
        "rope": RotaryEmbedding(HEAD_DIM, TOKENS, 10000.0),
    }
    # Sinusoidal multiplies by √d: the token is as large as the waves then, and as unit-variance q and k for RoPE.
    token = torch.full((1, TOKENS, HEAD_DIM), HEAD_DIM**-0.5 if name == "sinusoidal" else 1.0)
    placed, rotation = kinds[name](token, one_text(TOKENS))
    heads = placed[:, None]
    heads = rotate(heads, *rotation) if rotation else heads
    scores = (heads @ heads.transpose(-1, -2))[0, 0] / HEAD_DIM**0.5
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    weights: torch.Tensor = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    return weights


def _by_distance(weights_qj: torch.Tensor) -> list[float]:
    """The mean of the weights that the last third of the queries give at each distance that all of them have."""
    first = 2 * TOKENS // 3
    return [
        float(torch.stack([weights_qj[query, query - distance] for query in range(first, TOKENS)]).mean())
        for distance in range(first)
    ]


def _draw(maps: dict[str, torch.Tensor], by_distance: dict[str, list[float]]) -> Any:
    def draw(figure: "Figure") -> None:
        panels = figure.subplot_mosaic([list(maps), ["by distance"] * len(maps)], height_ratios=[1.1, 1])
        for name, weights in maps.items():
            image = panels[name].imshow(weights[:48, :48].numpy(), cmap="viridis", vmin=0, vmax=0.15)
            panels[name].set(title=name, xlabel="key", ylabel="query")
        figure.colorbar(image, ax=[panels[name] for name in maps], extend="max", label="weight")
        for name, found in by_distance.items():
            panels["by distance"].plot(found, linewidth=2.5, label=name)
        panels["by distance"].set(xlabel="tokens back", ylabel="mean weight", yscale="log")
        panels["by distance"].legend()

    return draw
