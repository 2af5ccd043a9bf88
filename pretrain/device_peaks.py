"""What common devices compute at most, dense, in bf16 or fp16 with sums in fp32: what an MFU is a share of.

The vendors' datasheets often print twice as much, which holds for weights of which every second is zero.
"""

from __future__ import annotations

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
