"""The loss before training: a uniform guess, what the first weights add, and what forgetting the shift looks like."""

import math
from typing import TYPE_CHECKING

import torch

from model.config import PRESETS, ModelConfig
from model.demos.demo import Demo
from model.loss import next_token_loss
from model.transformer import Transformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOCAB, WIDTH = 32_000, 768


@torch.no_grad()
def demo() -> Demo:
    """ln(vocab) for equal logits; + σ² · d_model / 2 for logits of variance σ² · d_model, as first weights give."""
    sizes = {"vocab_size": VOCAB, "d_model": WIDTH, "n_layers": 2, "n_heads": 12, "n_kv_heads": 4, "d_ff": 2048}
    config = ModelConfig(**{**PRESETS["mini"].to_dict(), **sizes, "seq_len": 512})
    model = Transformer(config, generator=torch.Generator().manual_seed(1))
    draw_ids = torch.Generator().manual_seed(2)
    ids_bt = torch.randint(VOCAB, (4, 512), generator=draw_ids)
    following_bt = torch.randint(VOCAB, (4, 512), generator=draw_ids)
    flat = next_token_loss(torch.zeros(1, 64, WIDTH), model.lm_head.weight, following_bt[:1, :64], 64)
    spread = config.init_std**2 * WIDTH / 2
    found = {
        "uniform": math.log(VOCAB),
        "equal_logits": _mean(flat.loss_sum, flat.token_count),
        "expected": math.log(VOCAB) + spread,
        "initial": _mean(*model(ids_bt, following_bt)[:2]),
        "unshifted": _mean(*model(ids_bt, ids_bt)[:2]),
        "expected_0.5b": math.log(VOCAB) + 0.02**2 * 1536 / 2,
    }
    lines = (
        f"vocabulary {VOCAB:,}, width {WIDTH}, untrained",
        f"  a uniform guess: ln {VOCAB:,}                   {found['uniform']:8.4f}",
        f"  the loss of equal logits                     {found['equal_logits']:8.4f}",
        f"  first weights: + σ² · d_model / 2 = {spread:.4f}    {found['expected']:8.4f}",
        f"  (the same of 0.5b                            {found['expected_0.5b']:8.4f})",
        f"  measured, targets unknown to the model       {found['initial']:8.4f}",
        f"  measured, targets NOT shifted                {found['unshifted']:8.4f}",
        "an untrained model that beats ln(vocab) is asked for its own input: through the residual stream and the tied",
        "head it knows that at once. A missing causal mask does not show here at all: see `python -m model verify`",
    )
    return Demo("The first loss: ln(vocab), a little more, never less", lines, found, _draw)


def _mean(loss_sum: torch.Tensor, tokens: torch.Tensor) -> float:
    return float(loss_sum) / int(tokens)


def _draw(figure: "Figure") -> None:
    found = demo().numbers
    axes = figure.subplots()
    names = {
        "uniform": "uniform:\nln(vocab)", "expected": "expected:\n+ σ²·d/2", "initial": "measured",
        "unshifted": "targets\nnot shifted",
    }  # fmt: skip
    axes.axhline(found["uniform"], color="grey", linestyle="--")
    for place, (name, color) in enumerate(zip(names, ("grey", "grey", "tab:blue", "tab:red"), strict=True)):
        axes.plot(place, found[name], "o", markersize=16, color=color)
        axes.annotate(f"{found[name]:.3f}", (place, found[name]), (0, 16), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(names)), list(names.values()))
    axes.margins(x=0.15, y=0.2)
    axes.set(ylabel="nats per token", title=f"vocabulary {VOCAB:,}, width {WIDTH}")
