"""MFU: the peak of the device that is there, the model's FLOPs and the hardware's apart, the terms said."""

from __future__ import annotations

import dataclasses

import pytest

from model.accounting import flops_per_token, recomputed_flops_per_token
from model.config import PRESETS
from pretrain.device_peaks import PEAKS, peak_of
from pretrain.efficiency import Efficiency
from tests.pretrain.recipe import recipe


@pytest.mark.parametrize(
    "name, key",
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A100 80GB PCIe", "a100"), ("A100-PCIE-40GB", "a100"),
        ("NVIDIA B200", "b200"), ("NVIDIA A10", "a10"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100"), ("AMD Instinct MI300X", "mi300x"),
        # Others than those, by a word or a letter, with another peak or none that is known here.
        ("NVIDIA A10G", None), ("NVIDIA H100 NVL", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA L40", None),
        ("Tesla V100-PCIE-16GB", None), ("this CPU", None), ("", None),
    ],
)  # fmt: skip
def test_a_device_is_known_by_its_whole_name(name: str, key: str | None) -> None:
    assert peak_of(name, "bf16") == (None if key is None else PEAKS[key])
    assert peak_of(name, "fp32") is None


def test_every_peak_has_a_name() -> None:
    from pretrain.device_peaks import _NAMES

    assert set(_NAMES.values()) == set(PEAKS)


def test_what_checkpointing_computes_again_is_a_forward_pass_of_the_blocks() -> None:
    """Of `0.5b` by hand, per token: a block's matrices have 25,165,824 weights, its causal attention 12 · 1536 / 2
    FLOPs a key of 2,049."""
    config = PRESETS["0.5b"]
    block = 6 * 25_165_824 + 12 * 1536 * 2049 // 2
    assert flops_per_token(config).causal == 18 * block + 6 * 32000 * 1536
    assert recomputed_flops_per_token(config, "full") == 18 * block // 3
    assert recomputed_flops_per_token(config, "every-4") == 5 * block // 3  # blocks 0, 4, 8, 12, 16
    assert recomputed_flops_per_token(config, "selective") == recomputed_flops_per_token(config, "none") == 0


def test_mfu_is_a_share_of_all_devices() -> None:
    """3.35 GFLOP a token, 147,000 tokens/s on an H200: half of its 989.5 TFLOP/s."""
    config = recipe(model={"preset": "0.5b"}, memory={"activation_checkpointing": "full"})
    found = dataclasses.replace(Efficiency.of(config), peak=PEAKS["h200"])
    assert found.mfu(147_000) == pytest.approx(0.50, abs=0.005)
    assert dataclasses.replace(found, devices=8).mfu(8 * 147_000) == found.mfu(147_000)
    assert 1.25 < found.hardware_flops / found.model_flops < 4 / 3
    rates = found.of_rate(1000.0)
    assert rates["hardware_flops_per_second"] == 1000 * found.hardware_flops


def test_the_terms_are_said() -> None:
    unknown = Efficiency.of(recipe())
    assert unknown.mfu(1.0) is None
    assert unknown.lines()[1] == "MFU: none, no peak is known of this CPU: give it as logging.peak_flops"
    given = Efficiency.of(recipe(logging={"peak_flops": 2e12}), devices=2)
    first, second = given.lines()
    assert first == (f"FLOPs a token: model {given.model_flops:,}, attention causal; hardware {given.hardware_flops:,}")
    assert second == (f"MFU = {given.model_flops:,} · tokens/s / (2 devices · 2e+12 FLOP/s: logging.peak_flops)")
