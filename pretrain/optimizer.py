"""Which optimizer a recipe means, and which of a model's parameters it decays."""

from __future__ import annotations

from typing import Any

import torch

from model.accounting import EMBEDDINGS, is_matrix
from model.transformer import Transformer
from pretrain.adamw import PiecewiseAdamW
from pretrain.config import OptimizerTable, RunConfig
from pretrain.eight_bit import EightBitAdamW
from pretrain.muon import OrthogonalizingAdamW
from pretrain.resolve import is_torchs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parameter_groups(model: Transformer, config: OptimizerTable) -> list[dict[str, object]]:
    """Split parameters into a decayed and an undecayed group; Muon and 8-bit AdamW have hidden matrices in a third.

    Matrices are decayed: the projections, an output head of its own, and, if decay_embeddings says so, learned
    positions and the embedding, which is the head too where the two are tied. A tied weight is one parameter and
    appears once. Norm gains and biases are not: they are scales, and pulling a gain towards 0 fights the norm it
    belongs to. Nor is what residual streams are read, written and mixed by. Hidden matrices are those of the blocks:
    neither the embedding nor a head.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # `ds_shape`: under ZeRO-3 a partitioned parameter's own shape is (0,).
    matrices = {name for name, p in trained.items() if is_matrix(name, tuple(getattr(p, "ds_shape", p.shape)))}
    special = config.name in ("muon", "adamw8bit")
    hidden = {name for name in matrices if name.startswith("layers.")} if special else set()
    decayed = matrices if config.decay_embeddings else matrices - {*EMBEDDINGS}
    groups: list[dict[str, object]] = [
        {"params": [trained[n] for n in trained if n in hidden], "weight_decay": config.weight_decay, "hidden": True},
        {"params": [trained[n] for n in trained if n in decayed - hidden], "weight_decay": config.weight_decay},
        {"params": [trained[n] for n in trained if n not in decayed | hidden], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: Transformer, config: RunConfig, initial_lr: float, rank: int = 0, world_size: int = 1
) -> torch.optim.Optimizer:
    """The recipe's optimizer over `model`; the engine puts its flat partitions in the place of the parameters.

    AdamW is torch's, in its fused kernel, which needs no temporary memory (on a CPU seven times as fast as its plain
    one), wherever weights and moments have one dtype and are rounded to the nearest.
    """
    table, precision = config.optimizer, config.precision
    betas = (table.beta1, table.beta2)
    groups = parameter_groups(model, table)
    if is_torchs(config):
        return torch.optim.AdamW(groups, lr=initial_lr, betas=betas, eps=table.eps, fused=True)
    settings: dict[str, Any] = {
        "lr": initial_lr, "betas": betas, "eps": table.eps, "moments": DTYPES[precision.moments_dtype],
        "compensation": precision.compensation, "seed": config.seed, "rank": rank,
    }  # fmt: skip
    if table.name == "muon":
        return OrthogonalizingAdamW(
            groups, momentum=table.muon_momentum, update_rms=table.muon_update_rms, world_size=world_size, **settings
        )
    return (EightBitAdamW if table.name == "adamw8bit" else PiecewiseAdamW)(groups, **settings)
