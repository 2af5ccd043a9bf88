"""The GPUs of this machine that a run may use, found without torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from launch.errors import LaunchError

SMI_SECONDS = 60.0


def visible_gpus(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Numbers of the NVIDIA GPUs a run may use, without importing torch: what nvidia-smi lists, narrowed by
    CUDA_VISIBLE_DEVICES. LaunchError: nvidia-smi hangs, or that names GPUs by anything but a number listed there."""
    smi = shutil.which("nvidia-smi")
    if smi is None or environ.get("DS_ACCELERATOR") == "cpu":
        return ()
    listing = subprocess.Popen([smi, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        listed, _ = listing.communicate(timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        listing.kill()
        with suppress(subprocess.TimeoutExpired):  # nothing ends a process that hangs within the driver
            listing.wait(1)
        raise LaunchError(
            f"{smi} -L gave no answer in {SMI_SECONDS:g} s, the GPU driver hangs: "
            "set DS_ACCELERATOR=cpu to train on the CPU, or restart the machine"
        ) from None
    present = sum(line.startswith("GPU ") for line in listed.splitlines()) if listing.returncode == 0 else 0
    return narrow(present, environ.get("CUDA_VISIBLE_DEVICES"))


def narrow(present: int, visible: str | None) -> tuple[int, ...]:
    """The GPUs out of 0 … present − 1 that CUDA_VISIBLE_DEVICES leaves; "" and "-1" leave none."""
    if visible is None:
        return tuple(range(present))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if names == ["-1"]:
        return ()
    if not all(name.isdecimal() and int(name) < present for name in names):
        raise LaunchError(f"CUDA_VISIBLE_DEVICES={visible}: name GPUs by number, 0 to {present - 1}")
    return tuple(int(name) for name in names)
