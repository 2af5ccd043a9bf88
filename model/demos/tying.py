"""Embedding and head as one matrix: what it saves, and that its gradient is the sum of both uses."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from model.accounting import parameter_count
from model.config import PRESETS, ModelConfig
from model.demos.demo import Demo
from model.transformer import Transformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("mini", "0.5b")


def demo() -> Demo:
    """Counts of the presets, tied and not; then one backward through a small model of each kind."""
    counts: dict[str, Any] = {}
    lines = [f"{'':8}{'tied':>16}{'untied':>16}{'saved':>14}{'of the untied':>16}"]
    for name in SHOWN:
        tied, untied = (parameter_count(replace(PRESETS[name], tied=tied)) for tied in (True, False))
        counts[name] = {"tied": tied, "untied": untied, "saved": untied - tied}
        lines.append(f"{name:8}{tied:16,}{untied:16,}{untied - tied:14,}{100 * (untied - tied) / untied:14.1f} %")
    error = _gradient_error()
    lines += [
        "one Parameter, not two that are kept equal: its gradient is the embedding's plus the head's,",
        f"within {error:.0e} of an untied model that holds the same weights twice",
    ]
    numbers = {"counts": counts, "gradient_error": error}
    return Demo("Tied weights: one matrix, two uses", tuple(lines), numbers, _draw(counts))


def _gradient_error() -> float:
    sizes = {"vocab_size": 97, "d_model": 64, "n_layers": 2, "d_ff": 128, "n_heads": 1, "n_kv_heads": 1, "seq_len": 32}
    tied_config = ModelConfig(**{**PRESETS["mini"].to_dict(), **sizes})
    tied = Transformer(tied_config, generator=torch.Generator().manual_seed(1)).double()
    untied = Transformer(replace(tied_config, tied=False)).double()
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.embed_tokens.weight.detach().clone()})
    ids_bt = torch.randint(97, (2, 32), generator=torch.Generator().manual_seed(2))
    for model in (tied, untied):
        model(ids_bt, ids_bt.roll(-1, 1)).loss_sum.backward()
    whole, uses = tied.embed_tokens.weight.grad, (untied.embed_tokens.weight.grad, untied.lm_head.weight.grad)
    assert whole is not None
    assert uses[0] is not None
    assert uses[1] is not None
    return float((whole - uses[0] - uses[1]).abs().max() / whole.abs().max())


def _draw(counts: dict[str, Any]) -> Any:
    def draw(figure: "Figure") -> None:
        for axes, (name, found) in zip(figure.subplots(1, len(SHOWN)), counts.items(), strict=True):
            matrix = found["saved"] / 1e6
            body = found["tied"] / 1e6 - matrix
            axes.bar(["tied", "untied"], [body, body], label="blocks")
            axes.bar(["tied", "untied"], [matrix, matrix], bottom=[body, body], label="embedding (tied: and head)")
            axes.bar(["untied"], [matrix], bottom=[body + matrix], label="head")
            axes.set(
                title=f"{name}: {found['saved']:,} saved",
                ylabel="million parameters",
                ylim=(0, 1.3 * (body + 2 * matrix)),
            )
            axes.legend(loc="upper left")

    return draw
