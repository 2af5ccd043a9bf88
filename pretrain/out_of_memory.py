"""A run that met the end of its memory: how to know it, and the one line to say."""

from __future__ import annotations

import errno
import gc
import re
from pathlib import Path
from typing import Literal

import torch

from pretrain.checkpoint import list_checkpoints
from pretrain.config import Compute, RunConfig
from pretrain.device_memory import resident_bytes, show_size
from pretrain.fit import relief
from pretrain.fit_found import Need
from pretrain.held import live_bytes

# Said by torch's allocators, by C++'s, by the driver and by the system; all but the first kind as RuntimeErrors.
_SAID = re.compile(r"can't allocate memory|not enough memory|out of memory|std::bad_alloc|cannot allocate memory", re.I)
# Said where no thread could be started, by C++ and by Python: no memory for its stack, or a limit of their number.
_NO_THREAD = re.compile(r"^resource temporarily unavailable$|can't start new thread", re.I)
RAISE_LIMIT = "most likely a limit of threads or of memory (ulimit -a, pids.max of its control group): raise it"
_BYTES = re.compile(r"(?:tried to allocate|unable to mmap) (\d+) bytes", re.I)
_UNITS = re.compile(r"tried to allocate ([\d.]+) (KiB|MiB|GiB|TiB)", re.I)
_POWERS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that memory, or a thread's own, could not be had."""
    return _origin(error) is not None


def asked_bytes(error: BaseException) -> int | None:
    """How much was asked for when there was no more; None where the error does not tell."""
    text = str(_origin(error) or "")
    exact, rounded = _BYTES.search(text), _UNITS.search(text)
    if exact is not None:
        return int(exact[1])
    return round(float(rounded[1]) * _POWERS[rounded[2].lower()]) if rounded is not None else None


def explain(
    error: BaseException, config: RunConfig, world_size: int, need: Need, compute: Compute, device: torch.device,
    checkpoints: Path,
) -> str:  # fmt: skip
    """One line: what was asked for, held and predicted, the first change that needs less, and what is not lost.

    Lets go of all that the error's frames hold, once that is measured: there may be no memory left to think with.
    """
    begin, asked, no_thread = _beginning(error, device), asked_bytes(error), _no_thread(error)
    _let_go(error)
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    change, resumes = (None, True) if no_thread else relief(config, world_size, kind, compute, asked or 0)
    predicted = f"predicted were {show_size(need.peak_bytes)} at most, in {need.moment}"
    if no_thread:
        remedy = RAISE_LIMIT
    elif change is None:
        larger = "use more ranks or a larger device" if kind == "cuda" else "use a machine with more memory"
        remedy, resumes = f"no change saves enough: {larger}", True
    else:
        remedy = f"set {change.to_text()} (predicted {show_size(change.need.peak_bytes)})"
    saved = list_checkpoints(checkpoints)
    if not resumes:
        after = "as a run of its own, with another --run: a checkpoint of this one does not go on under that"
    elif saved:
        after = f"the same command then resumes from {saved[-1].name}"
    else:
        after = "the same command then begins anew, no checkpoint had been written"
    return f"{begin}, {predicted}: {remedy}; {after}"


def explain_reading(error: BaseException, remedy: str, device: torch.device) -> str:
    """The same of work that only reads a checkpoint: what was asked for and held, and `remedy`."""
    begin, no_thread = _beginning(error, device), _no_thread(error)
    _let_go(error)
    return f"{begin}: {RAISE_LIMIT if no_thread else remedy}"


def _beginning(error: BaseException, device: torch.device) -> str:
    asked = asked_bytes(error)
    wanted = "" if asked is None else f" when {show_size(asked)} more was asked for"
    if _no_thread(error):
        wanted = " for one more thread"
    return f"out of memory{wanted}; held were {_held(device)}"


def _held(device: torch.device) -> str:
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        most = torch.cuda.max_memory_allocated(device)
        return f"{show_size(allocated)} in tensors of {show_size(reserved)} reserved ({show_size(most)} at most)"
    resident = f"{show_size(resident_bytes())} resident"
    try:
        return f"{show_size(live_bytes(device))} in live tensors of {resident}"
    except MemoryError:  # not even to list them
        return resident


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or following.__context__
    return chain


def _origin(error: BaseException) -> BaseException | None:
    for one in _chain(error):
        by_system = isinstance(one, OSError) and one.errno == errno.ENOMEM
        if isinstance(one, MemoryError) or by_system or (isinstance(one, RuntimeError) and _is_said(str(one))):
            return one
    return None


def _no_thread(error: BaseException) -> bool:
    return _NO_THREAD.search(str(_origin(error))) is not None


def _is_said(text: str) -> bool:
    return _SAID.search(text) is not None or _NO_THREAD.search(text) is not None


def _let_go(error: BaseException) -> None:
    for one in _chain(error):
        one.__traceback__ = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
