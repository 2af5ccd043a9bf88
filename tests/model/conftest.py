"""A model small enough to compute by hand, with every ratio that matters different from 1."""

from collections.abc import Iterator

import pytest
import torch

from model.config import ModelConfig
from model.transformer import Transformer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On tensors this small, threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=97,
        d_model=32,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        head_dim=64,
        d_ff=80,
        seq_len=48,
        norm_eps=1e-5,
        tied=True,
    )


@pytest.fixture
def tiny(tiny_config: ModelConfig) -> Transformer:
    return lively(Transformer(tiny_config, seeded(0)))


def lively(model: Transformer) -> Transformer:
    """Weights large enough that attention has opinions and every part shows in the logits; norms away from 1."""
    generator = seeded(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 0.2, generator=generator)
    return model


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_ids(config: ModelConfig, *shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randint(config.vocab_size, shape, generator=seeded(seed))
