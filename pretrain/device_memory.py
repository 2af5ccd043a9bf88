"""How much memory one rank may use: what a GPU says of itself, or this rank's share of the machine where CPUs train.

A CPU's ranks share one memory: what the machine has, what is available of it now, and what its control groups allow,
whichever is least, is divided by the ranks of the machine. What is available changes from moment to moment, so ranks
that ask each for itself would not agree; they leave it aside (`alone` = False), and whoever starts them asks instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pretrain.config import RecipeError

GB = 10**9
MB = 10**6

# Their presence says that a driver is loaded, without importing torch: NVIDIA's, the one of WSL, AMD's.
DRIVER_FILES = ("dev/nvidiactl", "dev/dxg", "dev/kfd")

# What a process holds beside its tensors, set aside in every verdict: on a GPU the CUDA context with its kernels, the
# workspaces of cuBLAS and NCCL's channels (0.5 to 1 GB on current GPUs); on a CPU the interpreter with torch,
# DeepSpeed and gloo (0.4 GB resident behind the first step of a run).
PROCESS_BYTES = {"cuda": GB, "cpu": 4 * 10**8}


@dataclass(frozen=True)
class DeviceMemory:
    """What one rank may use of its device and of main memory, in bytes, and where the figures come from."""

    kind: Literal["cpu", "cuda"]
    total_bytes: int
    source: str
    host_bytes: int | None = None  # None: not known, of a device that was only described
    occupied: bool = False  # others hold some of it now, so that an equal device need not say the same


@dataclass(frozen=True)
class HostMemory:
    """The main memory of this machine in bytes: all that may ever be used, and what of it is free for use now."""

    total_bytes: int
    available_bytes: int
    source: str  # of the total


def this_device(ranks_here: int, accelerator: str | None, root: Path = Path("/")) -> DeviceMemory:
    """What one of `ranks_here` ranks would have on this machine, asked before any is started.

    `accelerator` is what DS_ACCELERATOR says: "cpu" asks no GPU. torch is imported only where there is a GPU's driver.
    """
    if accelerator != "cpu" and any((root / name).exists() for name in DRIVER_FILES):
        import torch

        if torch.cuda.is_available():
            return gpu_memory(0, min(ranks_here, torch.cuda.device_count()))
    return host_share(ranks_here, alone=True, root=root)


def of_rank(device_type: str, local_rank: int, ranks_here: int, *, alone: bool) -> DeviceMemory:
    """What the running rank `local_rank` of this machine's `ranks_here` has. `alone`: no other rank asks meanwhile."""
    return gpu_memory(local_rank, ranks_here) if device_type == "cuda" else host_share(ranks_here, alone=alone)


def gpu_memory(index: int, ranks_here: int) -> DeviceMemory:
    """What this process may use of GPU `index`, and its share of main memory. RecipeError where the GPU cannot say."""
    import torch

    host_bytes = host_share(ranks_here, alone=False).total_bytes
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # not even a context has room there, or the driver is out of order
        reason = str(error).strip().partition("\n")[0]
        raise RecipeError(f"GPU {index} does not say what memory it has ({reason}): see nvidia-smi") from None
    # Asking made this process's own context, which a run does not need a second time.
    usable = free + PROCESS_BYTES["cuda"]
    name = torch.cuda.get_device_name(index)
    if usable < total:
        return DeviceMemory("cuda", usable, f"free of the {show_size(total)} of {name}", host_bytes, True)
    return DeviceMemory("cuda", total, name, host_bytes)


def described(total_bytes: int, kind: Literal["cpu", "cuda"] = "cuda") -> DeviceMemory:
    """A device that is only described, by a person."""
    return DeviceMemory(kind, total_bytes, "as given")


def host_share(ranks_here: int, *, alone: bool, root: Path = Path("/")) -> DeviceMemory:
    """One rank's share of main memory where `ranks_here` ranks share it. `alone`: no other rank asks meanwhile."""
    host = host_memory(root)
    now = host.available_bytes + resident_bytes(root)  # what this process holds need not be found a second time
    whole, source, scarce = host.total_bytes, host.source, alone and now < host.total_bytes
    if scarce:
        whole, source = now, f"available now of {show_size(host.total_bytes)}"
    share = whole // max(ranks_here, 1)
    shared = f"{ranks_here} ranks share " if ranks_here > 1 else ""
    return DeviceMemory("cpu", share, f"{shared}{show_size(whole)} {source}", share, scarce)


def ranks_here(environ: Mapping[str, str], world_size: int) -> int:
    """How many of the ranks are on this machine: what the launcher says (torchrun, DeepSpeed), else all of them."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        said = environ.get(name, "")
        if said.isascii() and said.isdigit() and 0 < int(said) <= world_size:
            return int(said)
    return world_size


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Of Linux: /proc/meminfo and the control groups of this process, v1 and v2, at every level above it.

    Elsewhere physical memory, all of it taken for available.
    """
    meminfo = _words(root / "proc/meminfo")
    if "MemTotal" not in meminfo:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return HostMemory(physical, physical, "of this machine")
    total, source = meminfo["MemTotal"] * 1024, "of this machine"
    available = meminfo.get("MemAvailable", meminfo["MemTotal"]) * 1024
    for limit, room in _control_groups(root):
        if limit < total:
            total, source = limit, "that its control group allows"
        available = min(available, room)
    return HostMemory(total, min(available, total), source)


def show_size(size_bytes: float) -> str:
    """A size for people, in decimal units."""
    if size_bytes >= 995 * GB:
        return f"{size_bytes / (1000 * GB):,.2f} TB"
    return f"{size_bytes / GB:.2f} GB" if size_bytes >= 0.995 * GB else f"{size_bytes / MB:.0f} MB"


def _control_groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, room left now) in bytes of each memory control group that this process is in, nearest first.

    Room counts what the kernel would reclaim first: page cache that no one used lately. A container often sees its own
    group as the root of the tree, so folders that are not there are passed over, as are lines of another form.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        fields = line.split(":", 2)  # number, controllers, path
        if len(fields) != 3:
            continue
        controllers, path = fields[1:]
        if not controllers:  # v2
            tree, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            tree = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        place = Path(path.lstrip("/"))
        for level in (place, *place.parents):
            limit, used = _number(tree / level / names[0]), _number(tree / level / names[1])
            if limit is not None:
                reclaimable = _words(tree / level / "memory.stat").get(names[2], 0)
                yield limit, max(limit - max((used or 0) - reclaimable, 0), 0)


def _number(path: Path) -> int | None:
    """The whole number in a file; None where there is no such file, or "max" in it."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _words(path: Path) -> dict[str, int]:
    """`name number` or `name: number kB` a line; {} where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.replace(":", " ").split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}


def resident_bytes(root: Path = Path("/")) -> int:
    """What this process holds of main memory; 0 where the system does not tell."""
    return _words(root / "proc/self/status").get("VmRSS", 0) * 1024
