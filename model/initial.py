"""The weights that a model begins with.

Matrices are N(0, init_std), norms 1, biases 0. What adds to the residual stream begins smaller, in the way that suits
where the norms stand:

- "pre": the outputs of 2 · n_layers sublayers add up in the stream; each scaled by 1/sqrt(2 · n_layers), the variance
  of the sum does not grow with depth (GPT-2, section 2.3).
- "post": each sum is normed at once, and nothing grows.
- "deepnorm": a gain of (8 · n_layers)^-¼ on the feed-forward matrices, values and o_proj, none on queries and keys,
  bounds how far the first updates move the model (Wang et al. 2022, arXiv 2203.00555, section 4.2 and figure 2, for a
  decoder alone). The paper's gain is on Xavier's deviation, here it is on init_std.
"""

import math

import torch
from torch import nn

from model.config import ModelConfig
from model.residual import HyperConnection

WRITES = ("o_proj.weight", "down_proj.weight")  # to the residual stream
GAINED = (*WRITES, "v_proj.weight", "up_proj.weight", "gate_proj.weight")


def deviation(config: ModelConfig, name: str) -> float:
    """The standard deviation that a matrix, by its parameter's name, is drawn with."""
    if config.norm_place == "deepnorm" and name.endswith(GAINED):
        return config.init_std / math.sqrt(math.sqrt(8 * config.n_layers))
    if config.norm_place == "pre" and name.endswith(WRITES):
        return config.init_std / math.sqrt(2 * config.n_layers)
    return config.init_std


@torch.no_grad()
def draw(model: nn.Module, config: ModelConfig, generator: torch.Generator | None = None) -> None:
    """Fill every parameter. RuntimeError where an engine has split them."""
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            raise RuntimeError(f"{name} is empty (partitioned?): draw the weights before an engine splits them")
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        elif not name.endswith(("_gates", "mixing_logits")):
            parameter.normal_(0.0, deviation(config, name), generator=generator)
        if name.endswith("kv_b_proj.weight") and config.norm_place == "deepnorm":
            rows = parameter.view(config.n_heads, 2, -1)  # MLA: of each head the keys, then the values
            rows[:, 1].div_(math.sqrt(math.sqrt(8 * config.n_layers)))
    for module in model.modules():
        if isinstance(module, HyperConnection):
            module.reset()
