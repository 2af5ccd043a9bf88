"""The optimizer: AdamW, decaying matrices and leaving vectors alone."""

from __future__ import annotations

import torch
from torch import nn

from pretrain.config import OptimizerTable


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Split parameters into a decayed and an undecayed group.

    Matrices (projections, the embedding) are decayed. Norm gains and biases are not: they are scales, and pulling
    a gain towards 0 fights the norm it belongs to. A tied weight is one parameter and appears once.
    """
    # `ds_shape`: under ZeRO-3 a partitioned parameter's own shape is (0,).
    dimensions = {name: len(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
    decayed = [p for name, p in model.named_parameters() if p.requires_grad and dimensions[name] >= 2]
    undecayed = [p for name, p in model.named_parameters() if p.requires_grad and dimensions[name] < 2]
    groups: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerTable, initial_lr: float) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019, decoupled weight decay), torch's fused kernel where the weights are on a GPU."""
    on_gpu = all(p.device.type == "cuda" for p in model.parameters())
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=initial_lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=on_gpu,
    )
