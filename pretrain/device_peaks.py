"""What common devices compute at most, dense, in bf16 or fp16 with sums in fp32: what an MFU is a share of.

The vendors' datasheets often print twice as much, which holds for weights of which every second is zero.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """`flops` a second; `source` says which sheet, and how its number was read."""

    flops: float
    source: str


_HALVED = "with sparsity, halved"

PEAKS: dict[str, Peak] = {
    "a10": Peak(125e12, "NVIDIA A10 datasheet"),
    "a100": Peak(312e12, "NVIDIA A100 datasheet"),
    "b200": Peak(2250e12, f"NVIDIA HGX B200 datasheet, 36 PFLOP/s of 8 {_HALVED}"),
    "h100": Peak(989.5e12, f"NVIDIA H100 datasheet, SXM, 1,979 TFLOP/s {_HALVED}"),
    "h100-pcie": Peak(756.5e12, f"NVIDIA H100 datasheet, PCIe, 1,513 TFLOP/s {_HALVED}"),
    "h200": Peak(989.5e12, f"NVIDIA H200 datasheet, SXM, 1,979 TFLOP/s {_HALVED}"),
    "l4": Peak(121e12, f"NVIDIA L4 datasheet, 242 TFLOP/s {_HALVED}"),
    "l40s": Peak(362e12, "NVIDIA L40S datasheet"),
    "mi300x": Peak(1307.4e12, "AMD Instinct MI300X data sheet"),
    "rtx3090": Peak(71e12, "NVIDIA Ampere GA102 whitepaper"),
    "rtx4090": Peak(165.2e12, "NVIDIA Ada GPU architecture whitepaper"),
    "t4": Peak(65e12, "NVIDIA T4 datasheet, fp16: it has no bf16"),
    "v100": Peak(125e12, "NVIDIA V100 datasheet, SXM2, fp16: it has no bf16"),
}

# What torch calls them, whole: not a share of a GPU ("MIG 1g.10gb"), a laptop's, another board of the same name.
_NAMES: dict[str, str] = {
    r"A10": "a10",
    r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe": "a100",
    r"B200": "b200",
    r"H100 80GB HBM3": "h100",
    r"H100 PCIe": "h100-pcie",
    r"H200": "h200",
    r"L4": "l4",
    r"L40S": "l40s",
    r"MI300X": "mi300x",
    r"RTX 3090": "rtx3090",
    r"RTX 4090": "rtx4090",
    r"T4": "t4",
    r"V100-SXM2-(16|32)GB": "v100",
}


def peak_of(device_name: str, compute: str) -> Peak | None:
    """The peak of a device by the name that torch gives it; None where it is not known, as of any in fp32."""
    name = re.sub(r"^(NVIDIA |AMD )?(Tesla |GeForce |Instinct )?", "", device_name.strip())
    found = next((PEAKS[key] for pattern, key in _NAMES.items() if re.fullmatch(pattern, name)), None)
    return None if compute == "fp32" else found
