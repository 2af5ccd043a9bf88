"""Which optimizer a recipe means, and which of a model's parameters it decays."""

from __future__ import annotations

import torch
from torch import nn

from pretrain.adamw import PiecewiseAdamW
from pretrain.config import OptimizerTable, RunConfig
from pretrain.engine import is_torchs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parameter_groups(model: nn.Module, config: OptimizerTable) -> list[dict[str, object]]:
    """Split parameters into a decayed and an undecayed group.

    Matrices are decayed: the projections, an output head of its own, and, if decay_embeddings says so, the embedding,
    which is the head too where the two are tied. A tied weight is one parameter and appears once. Norm gains and biases
    are not: they are scales, and pulling a gain towards 0 fights the norm it belongs to.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}

    def decays(parameter: nn.Parameter) -> bool:
        # `ds_shape`: under ZeRO-3 a partitioned parameter's own shape is (0,).
        is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
        return is_matrix and (config.decay_embeddings or id(parameter) not in embeddings)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in trained if decays(p)], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if not decays(p)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: RunConfig, initial_lr: float, rank: int = 0) -> torch.optim.Optimizer:
    """The recipe's optimizer over `model`; the engine puts its flat partitions in the place of the parameters.

    AdamW is torch's, in its fused kernel, which needs no temporary memory (on a CPU seven times as fast as its plain
    one), wherever weights and moments have one dtype and are rounded to the nearest; else PiecewiseAdamW.
    """
    table, precision = config.optimizer, config.precision
    betas = (table.beta1, table.beta2)
    groups = parameter_groups(model, table)
    if is_torchs(config):
        return torch.optim.AdamW(groups, lr=initial_lr, betas=betas, eps=table.eps, fused=True)
    return PiecewiseAdamW(
        groups, lr=initial_lr, betas=betas, eps=table.eps, moments=DTYPES[precision.moments_dtype],
        compensation=precision.compensation, seed=config.seed, rank=rank,
    )  # fmt: skip
