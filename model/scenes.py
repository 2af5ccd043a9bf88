"""What a pass through a model is, and how the memory of a moment in it is written down: as formulas. No torch.

Symbols are those of `activations.LEGEND`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from model.config import ModelConfig, checkpointing_period

# As attention_cpu.py has them.
MOST_TOKENS = 1024


@dataclass(frozen=True)
class Pass:
    """One micro-batch of one rank, and how it is computed.

    `compute_bytes`: 2 for bf16 and fp16, 4 for fp32. `checkpointing` as `Transformer.activation_checkpointing`.
    `documents`: each attends to itself only. `fused_loss`: Liger's kernel, which loss.py takes on GPUs that have it.
    `threads`: torch's on a CPU, since attention there takes room for each. The z-loss takes no room.

    Compiled blocks hold the same, since to the compiler our autograd Functions are single steps (seen on a CPU
    of Llama's block and of GPT-2's; of streams and latents, which are torch's own steps, not seen).
    """

    micro_batch_size: int
    seq_len: int
    compute_bytes: int
    checkpointing: str = "none"
    loss_chunk_tokens: int = 1024
    device: Literal["cpu", "cuda"] = "cpu"
    documents: bool = False
    fused_loss: bool = False
    threads: int = 1

    @property
    def tokens(self) -> int:
        return self.micro_batch_size * self.seq_len

    @property
    def attends_by_products(self) -> bool:
        """Whether attention's backward is that of attention_cpu.py."""
        return self.device == "cpu" and not self.documents and self.seq_len <= MOST_TOKENS

    @property
    def is_half(self) -> bool:
        return self.compute_bytes == 2

    @functools.cached_property
    def _period(self) -> int:
        return checkpointing_period(self.checkpointing)

    def is_run_again(self, layer: int) -> bool:
        return self._period > 0 and layer % self._period == 0

    def hides(self, config: ModelConfig) -> bool:
        """Whether a sliding window is shorter than the rows."""
        return config.sliding_window is not None and self.seq_len > config.sliding_window


@dataclass(frozen=True)
class Kept:
    """Tensors with so many numbers a token, each named by its formula: of the compute dtype, and of fp32."""

    numbers: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.numbers + other.numbers, self.exact + other.exact)

    def __str__(self) -> str:
        """`b·t·w·(4·d + 2·h·k) + 4·b·t·(h + 2)`."""
        return _text(self)


@functools.lru_cache(maxsize=1024)
def _text(kept: Kept) -> str:
    kinds = (("b·t·w", kept.numbers), ("4·b·t", kept.exact))
    return " + ".join(f"{each}·({_counted(names)})" for each, names in kinds if names) or "0"


def _counted(names: Iterable[str]) -> str:
    """Equal ones put together, those that are plain numbers added up."""
    counts = Counter(names)
    ones = counts.pop("1", 0)
    texts = [name if count == 1 else f"{count}·{name}" for name, count in counts.items()]
    return " + ".join([*texts, *([str(ones)] if ones else [])])


@dataclass(frozen=True)
class Scene:
    """A moment within a block: what it keeps by then, and the largest of some formulas of what is beside that.

    `formed`: beginnings of the names of those of its parameters that have their gradient by then.
    """

    name: str
    own: Kept
    beside: tuple[str, ...]
    formed: tuple[str, ...] = ()


How = Literal["keeps", "drops", "evaluates"]  # training, with what backward wants or without; or no gradients at all

NOTHING = Kept()
STREAM = Kept(("d",))
