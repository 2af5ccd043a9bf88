"""Facts about this process, gathered once and passed on: its rank, its device, its seeds.

Only this file reads the launcher's environment variables, and only pretrain/verbs/ calls it for that.
"""

from __future__ import annotations

import ctypes
import platform
import random
import socket
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from pretrain.config import Compute, PrecisionTable, RecipeError

T = TypeVar("T")

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# mallopt(3)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


@dataclass(frozen=True)
class Ranks:
    """Which of the run's processes this one is."""

    rank: int
    local_rank: int
    world_size: int
    accelerator: str | None = None  # what DS_ACCELERATOR asks for

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> Ranks:
        """Read what the launcher set: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

        Without any of them this is one process, and they are filled in, with a free port, so that
        `python -m pretrain run` works on its own. RecipeError where only some are set.
        """
        missing = [name for name in LAUNCHER_VARIABLES if name not in environ]
        if missing and len(missing) < len(LAUNCHER_VARIABLES):
            present = sorted(set(LAUNCHER_VARIABLES) - set(missing))
            raise RecipeError(
                f"the environment has {', '.join(present)} but not {', '.join(missing)}: set all of them or none"
            )
        if missing:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            values = ("0", "0", "1", "127.0.0.1", str(port))
            environ.update(zip(LAUNCHER_VARIABLES, values, strict=True))
        numbers = {}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
            if not environ[name].isascii() or not environ[name].isdigit():
                raise RecipeError(f"{name}={environ[name]} in the environment is not a whole number")
            numbers[name] = int(environ[name])
        if not max(numbers["RANK"], numbers["LOCAL_RANK"]) < numbers["WORLD_SIZE"]:
            raise RecipeError(
                f"RANK={environ['RANK']} and LOCAL_RANK={environ['LOCAL_RANK']} must be below WORLD_SIZE="
                f"{environ['WORLD_SIZE']}"
            )
        if not 0 < numbers["MASTER_PORT"] < 65536:
            raise RecipeError(f"MASTER_PORT={environ['MASTER_PORT']} is no TCP port: 1 to 65535")
        accelerator = environ.get("DS_ACCELERATOR")
        if accelerator not in (None, "cpu", "cuda"):
            raise RecipeError(f"DS_ACCELERATOR={accelerator}: set it to cpu or cuda, or leave it out")
        return cls(numbers["RANK"], numbers["LOCAL_RANK"], numbers["WORLD_SIZE"], accelerator)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """The first rank's `value` on every rank (any picklable object; for decisions, not for tensors)."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        values: list[Any] = [value]
        if self.world_size > 1:
            values = [None] * self.world_size
            dist.all_gather_object(values, value)
        return values

    def on_first(self, function: Callable[[], T]) -> T:
        """Call `function` on the first rank only; its result, or its ValueError or OSError, reaches every rank."""
        outcome: tuple[T | None, ValueError | OSError | None] = (None, None)
        if self.is_first:
            try:
                outcome = (function(), None)
            except (ValueError, OSError) as error:
                outcome = (None, error)
        result, failure = self.broadcast(outcome)
        if failure is not None:
            raise failure
        return cast(T, result)

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """Each element summed over all ranks, in place; on the device the ranks communicate by."""
        if self.world_size > 1:
            dist.all_reduce(vector)
        return vector

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone: that rank knows why, this one only that."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def is_timeout(error: RuntimeError) -> bool:
    """Whether it failed because another rank gave no answer for too long: a machine or a line is down, or it hangs."""
    return "timed out" in str(error).lower()


@contextmanager
def one_ranks_fault() -> Iterator[None]:
    """Mark what is raised inside, once the ranks have begun: the others do not know of it, so this one must speak."""
    try:
        yield
    except Exception as error:
        error.add_note("met by this rank alone")
        raise


def pick_device(local_rank: int, accelerator: str | None = None) -> torch.device:
    """The GPU with this process's local rank where there is one, else the CPU; `accelerator` "cpu" means the CPU.

    RecipeError where "cuda" is asked for and torch sees too few GPUs.
    """
    gpus = torch.cuda.device_count() if accelerator != "cpu" and torch.cuda.is_available() else 0
    if accelerator == "cuda" or gpus:
        if local_rank >= gpus:
            raise RecipeError(f"rank {local_rank} of this machine has no GPU, torch sees {gpus}: start fewer ranks")
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    keep_freed_memory()
    return torch.device("cpu")


def auto_compute(device: torch.device) -> Compute:
    """What precision.compute = "auto" stands for on this process's device: bf16, or fp16 on a GPU that has none.

    bf16 came with compute capability 8.0: a V100 or T4 has fp16 alone, and torch only imitates bf16 there.
    """
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp16"
    return "bf16"


def precision_note(precision: PrecisionTable, device: torch.device) -> str | None:
    """What a person should know of the dtype that a run computes in; None where the recipe says it all."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    auto = auto_compute(device)
    if precision.compute == "auto":
        return f'precision.compute = "auto": {auto}' + (f", {name} has no bf16" if auto == "fp16" else f" on {name}")
    if precision.compute == "bf16" and auto == "fp16":
        return f'warning: {name} has no bf16, torch imitates it, slowly: precision.compute = "auto" would take fp16'
    return None


def keep_freed_memory() -> None:
    """Let glibc keep the memory that tensors free, instead of returning it to the system and faulting it in anew.

    Activations come and go in blocks of megabytes, which malloc by default maps and unmaps again and again. Kept, a
    small model trains a tenth to a fifth faster (benchmarks/freed_memory.py). Blocks above 32 MiB, the most that glibc
    allows here, still go back at once.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for parameter, mebibytes in ((_M_MMAP_THRESHOLD, 32), (_M_TRIM_THRESHOLD, 512), (_M_TOP_PAD, 64)):
            libc.mallopt(parameter, mebibytes * 2**20)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch alike on every rank.

    Nothing in training draws from these streams (initial weights have a generator of their own, the order of data
    is arithmetic); they are seeded so that a component that does draw would be repeatable.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
