"""RoPE beyond the length it was trained at: which angle a position turns each pair of dimensions by.

Pair i turns by position · f_i with f_i = base^(-2i/head_dim): fast pairs tell neighbours apart, slow ones tell where in
the text a token stands. Past the trained length the slow ones meet angles that no weight has seen. All three remedies
make them slower, by a `factor` of how many times the length has grown:

- "linear" slows all pairs alike (Chen et al. 2023), fast ones included, which blurs neighbours;
- "dynamic" raises the base with the length of the text at hand (NTK-aware, from the length on that was trained at, so
  short texts are read as before): the slowest pair slows as much as needed, the fastest keeps its angle;
- "yarn" leaves pairs that turn often within the trained length as they are, slows those that never come round, blends
  between (Peng et al. 2023, section 3.2), and makes scores larger by attention_factor² (section 3.3).

All of it equals transformers' functions of these names. Frequencies are (head_dim/2,) float64, on the CPU.
"""

import math
from typing import TypeVar

import torch
from torch import Tensor

from model.config import ModelConfig

Number = TypeVar("Number", float, Tensor)

TURNS_KEPT = 32  # within the trained length: YaRN's beta, above which a pair stays as it is
TURNS_SLOWED = 1  # and alpha, below which it is slowed by the whole factor


def plain(head_dim: int, base: float) -> Tensor:
    """base^(-2i/head_dim) for pair i."""
    exponent_d = torch.arange(0, head_dim, 2, device="cpu").to(torch.float64) / head_dim
    return base**-exponent_d


def linear(head_dim: int, base: float, factor: float) -> Tensor:
    """Every frequency divided by the factor, as if positions were."""
    return plain(head_dim, base) / factor


def dynamic_base(head_dim: int, base: float, factor: float, grown: Number) -> Number:
    """base · (factor · grown - (factor - 1))^(head_dim / (head_dim - 2)) for a text that is `grown` times as long as
    those trained at, `grown` from 1.

    The exponent is the one with which the slowest pair slows by just what stands in the brackets.
    """
    raised: Number = base * (factor * grown - (factor - 1)) ** (head_dim / (head_dim - 2))
    return raised


def yarn(head_dim: int, base: float, factor: float, trained: int) -> Tensor:
    """Each pair's own frequency where it turns often within `trained` positions, that over the factor where seldom."""

    def pair_that_turns(times: int) -> float:
        return head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair_that_turns(TURNS_KEPT)), 0)
    last = min(math.ceil(pair_that_turns(TURNS_SLOWED)), head_dim - 1)
    width = last - first if last != first else 0.001
    pair_d = torch.arange(head_dim // 2, device="cpu").to(torch.float64)
    slowed_d = ((pair_d - first) / width).clamp(0, 1)
    kept = plain(head_dim, base)
    return kept * (1 - slowed_d) + kept / factor * slowed_d


def frequencies(config: ModelConfig, head_dim: int) -> Tensor:
    """What the config's rope_scaling makes of the frequencies; for "dynamic", those of a text that has not grown."""
    if config.rope_scaling == "linear":
        return linear(head_dim, config.rope_base, config.rope_scaling_factor)
    if config.rope_scaling == "yarn":
        return yarn(head_dim, config.rope_base, config.rope_scaling_factor, trained_length(config))
    return plain(head_dim, config.rope_base)


def trained_length(config: ModelConfig) -> int:
    """The length that the weights were trained at before the scaling: seq_len where nothing else is said."""
    return config.seq_len if config.rope_original_seq_len is None else config.rope_original_seq_len


def attention_factor(config: ModelConfig) -> float:
    """What cos and sin are multiplied by, so that scores are by its square: YaRN's 0.1 · ln(factor) + 1, else 1."""
    if config.rope_scaling != "yarn" or config.positions != "rope" or config.rope_scaling_factor <= 1:
        return 1.0
    return 0.1 * math.log(config.rope_scaling_factor) + 1.0
