"""What share of a device's arithmetic goes into the model: MFU, its terms, and the FLOPs of the hardware apart from it.

    MFU = FLOPs a token of the model (causal attention, backward twice forward) · tokens/s / (devices · dense peak)

HFU has the FLOPs that the hardware really does in place of the model's: with activation checkpointing, forward passes
are done twice (Chowdhery et al. 2022, PaLM, appendix B, for both). What a kernel computes again within itself, as
attention does in backward, is in neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.accounting import flops_per_token, recomputed_flops_per_token
from pretrain.config import Compute, RunConfig
from pretrain.device_peaks import Peak, peak_of


@dataclass(frozen=True)
class Efficiency:
    """The terms of a run's MFU. `peak` of one device; None where none is known."""

    model_flops: int  # a token, causal attention
    recomputed_flops: int  # a token, done once more in backward
    peak: Peak | None
    devices: int
    device_name: str

    @classmethod
    def of(
        cls,
        config: RunConfig,
        device: torch.device | None = None,
        compute: Compute = "bf16",
        devices: int = 1,
    ) -> Efficiency:
        """Of a recipe that runs on so many devices of the kind of `device`, a rank each."""
        name = torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else "this CPU"
        given = config.logging.peak_flops
        return cls(
            model_flops=flops_per_token(config.model).causal,
            recomputed_flops=recomputed_flops_per_token(config.model, config.memory.activation_checkpointing),
            peak=Peak(given, "logging.peak_flops") if given is not None else peak_of(name, compute),
            devices=devices,
            device_name=name,
        )

    @property
    def hardware_flops(self) -> int:
        return self.model_flops + self.recomputed_flops

    def mfu(self, tokens_per_second: float) -> float | None:
        """A share of 1; None where no peak is known."""
        if self.peak is None:
            return None
        return self.model_flops * tokens_per_second / (self.devices * self.peak.flops)

    def of_rate(self, tokens_per_second: float) -> dict[str, float | None]:
        """What a record of metrics.jsonl says of a step at this rate."""
        return {
            "model_flops_per_second": self.model_flops * tokens_per_second,
            "hardware_flops_per_second": self.hardware_flops * tokens_per_second,
            "mfu": self.mfu(tokens_per_second),
        }

    def lines(self) -> list[str]:
        """The terms, for people."""
        again = f" ({self.recomputed_flops:,} of them checkpointed blocks run again)" if self.recomputed_flops else ""
        flops = f"FLOPs a token: model {self.model_flops:,}, attention causal; hardware {self.hardware_flops:,}{again}"
        if self.peak is None:
            return [flops, f"MFU: none, no peak is known of {self.device_name}: give it as logging.peak_flops"]
        count = f"{self.devices} {'device' if self.devices == 1 else 'devices'}"
        return [
            flops,
            f"MFU = {self.model_flops:,} · tokens/s / ({count} · {self.peak.flops:.4g} FLOP/s: {self.peak.source})",
        ]
