"""What benchmarks/gpu.py makes of its measurements: whether losses agree, shares of the peak, tables."""

from __future__ import annotations

import math
from typing import Any

from pretrain.device_peaks import peak_of

# Relative, of each of four updates' losses: in fp32 two devices add up the same numbers in other orders; what bf16 may
# differ by is measured beside it, as the CPU's own distance between bf16 and fp32.
FP32_WITHIN = 1e-3
BF16_WITHIN = 2e-3  # and twice that distance
STATIC_WITHIN, PEAK_WITHIN = 0.02, 0.10  # as docs/memory.md promises
GOAL = 0.5  # of the peak

Entry = dict[str, Any]


def judged_losses(entries: list[Entry], accelerator: str) -> dict[str, Any]:
    """How far the losses of `accelerator` are from the CPU's, the largest relative difference of all updates."""
    found = {(one["case"]["accelerator"], one["case"]["compute"]): one["losses"] for one in entries if "losses" in one}
    wanted = [(where, compute) for where in (accelerator, "cpu") for compute in ("fp32", "bf16")]
    if any(key not in found for key in wanted):
        return {"within": False, "missing": [f"{compute} on {where}" for where, compute in wanted
                                             if (where, compute) not in found]}  # fmt: skip
    fp32, bf16 = (apart(found[accelerator, compute], found["cpu", compute]) for compute in ("fp32", "bf16"))
    rounding = apart(found["cpu", "bf16"], found["cpu", "fp32"])
    allowed = BF16_WITHIN + 2 * rounding
    fell = min(losses[-1] / losses[0] for losses in found.values())
    return {
        "fp32_apart": fp32,
        "fp32_allowed": FP32_WITHIN,
        "bf16_apart": bf16,
        "bf16_allowed": allowed,
        "bf16_from_fp32_on_cpu": rounding,
        "fell_to": fell,
        "within": fp32 <= FP32_WITHIN and bf16 <= allowed and fell < 1,
    }


def apart(ones: list[float], others: list[float]) -> float:
    """The largest relative difference; infinite where a number is not finite, which no comparison would find."""
    if not all(map(math.isfinite, (*ones, *others))):
        return math.inf
    return max(abs(one - other) / abs(other) for one, other in zip(ones, others, strict=True))


def mfu(entry: Entry, machine: dict[str, Any]) -> float | None:
    """Model FLOPs, attention counted causally and nothing that is recomputed, over the device's dense peak."""
    peak = peak_of(machine["device"], "bf16")
    return None if peak is None else entry["tokens_per_second"] * entry["flops_per_token"] / peak.flops


def to_text(report: dict[str, Any]) -> str:
    """The report for people."""
    machine, entries = report["machine"], report["cases"]
    if not machine:
        return "\n".join(["nothing was measured", *(f"  {one['name']}: {one.get('failed')}" for one in entries)])
    speeds = [one for one in entries if "tokens_per_second" in one]
    lines = [*machine_lines(report), *losses_lines(report["losses"])]
    if speeds:
        lines += ["", *speed_lines(speeds, machine), "", *goal_lines(speeds, machine)]
    for one in entries:
        if "held_seconds" in one:
            lines.append(saving_line(one))
    profiled = next((one for one in entries if "kernels" in one), None)
    if profiled is not None:
        lines += ["", f"where a step of {profiled['name']} goes:"]
        lines += [f"  {k['share']:6.1%} {k['seconds'] * 1e3:9.1f} ms {k['calls']:6} × {k['name']}"
                  for k in profiled["kernels"][:12]]  # fmt: skip
    missing = [one for one in entries if "failed" in one or "left_out" in one]
    lines += ["", *(f"not measured: {one['case']['kind']} {one['name']}: {one.get('failed') or one['left_out']}"
                    for one in missing)] if missing else []  # fmt: skip
    return "\n".join(lines)


def machine_lines(report: dict[str, Any]) -> list[str]:
    machine = report["machine"]
    peak = peak_of(machine["device"], "bf16")
    of_peak = "" if peak is None else f" of the datasheet's {peak.flops / 1e12:,.1f}"
    model = "a tiny model" if report["tiny"] else "0.5b"
    return [
        f"{machine['device']}, {machine['memory_bytes'] / 1e9:,.1f} GB, {machine['cpus']} CPUs; "
        f"torch {machine['torch']}, CUDA {machine['cuda']}, DeepSpeed {machine['deepspeed']}, "
        f"Python {machine['python']}; {report['began_at']}",
        f"a product of matrices in bf16 {machine['matrix_flops_per_second'] / 1e12:,.2f} TFLOP/s{of_peak}; "
        f"a copy {machine['copy_bytes_per_second'] / 1e12:.3f} TB/s, read and written",
        f"{model}, ZeRO-{report['stage']}, one rank",
    ]


def losses_lines(judged: dict[str, Any] | None) -> list[str]:
    if judged is None:
        return []
    if "missing" in judged:
        return [f"losses: not compared, missing: {', '.join(judged['missing'])}"]
    return [
        f"losses against the CPU's: {'equal' if judged['within'] else 'DIFFERENT'}: fp32 {judged['fp32_apart']:.1e} "
        f"apart (allowed {judged['fp32_allowed']:.1e}), bf16 {judged['bf16_apart']:.1e} (allowed "
        f"{judged['bf16_allowed']:.1e}; on the CPU it is {judged['bf16_from_fp32_on_cpu']:.1e} from fp32), "
        f"over updates that bring them to {judged['fell_to']:.2f} of the first",
    ]


COLUMNS = (
    f"{'sequences, checkpointing':<28}{'tokens/s':>10}{'MFU':>7}{'step s':>8}{'forward':>9}{'backward':>9}{'update':>8}"
    f"{'first s':>9}  {'static GB':>10}{'pred.':>8}{'ratio':>7}  {'peak GB':>9}{'pred.':>8}{'ratio':>7}"
)


def speed_lines(speeds: list[Entry], machine: dict[str, Any]) -> list[str]:
    lines = [COLUMNS]
    for one in speeds:
        share, parts = mfu(one, machine), one["parts_seconds"]
        whole = sum(parts.values())
        static, peak = memory_ratios(one)
        most, predicted = (max(one[name].values()) / 1e9 for name in ("moments_bytes", "moments_predicted_bytes"))
        outside = abs(static - 1) > STATIC_WITHIN or abs(peak - 1) > PEAK_WITHIN
        lines.append(
            f"{one['name']:<28}{one['tokens_per_second']:>10,.0f}{'-' if share is None else f'{share:.1%}':>7}"
            f"{one['step_seconds']:>8.3f}{parts['forward'] / whole:>9.0%}{parts['backward'] / whole:>9.0%}"
            f"{parts['optimizer'] / whole:>8.0%}{one['first_step_seconds']:>9.1f}  {one['static_bytes'] / 1e9:>10.3f}"
            f"{one['static_predicted_bytes'] / 1e9:>8.3f}{static:>7.3f}  {most:>9.3f}{predicted:>8.3f}{peak:>7.3f}"
            f"{'  OUTSIDE' if outside else ''}"
        )
    return lines


def memory_ratios(entry: Entry) -> tuple[float, float]:
    """Predicted over measured: between the engine's calls, and at most."""
    predicted, measured = (max(entry[name].values()) for name in ("moments_predicted_bytes", "moments_bytes"))
    return entry["static_predicted_bytes"] / entry["static_bytes"], predicted / measured


def goal_lines(speeds: list[Entry], machine: dict[str, Any]) -> list[str]:
    best = max(speeds, key=lambda one: one["tokens_per_second"])
    peak = peak_of(machine["device"], "bf16")
    line = f"fastest: {best['name']}, {best['tokens_per_second']:,.0f} tokens/s"
    if peak is None:
        return [line + "; no peak is known of this device, so no MFU"]
    goal = GOAL * peak.flops / best["flops_per_token"]
    reached = (
        "reached" if best["tokens_per_second"] >= goal else f"missed, {best['tokens_per_second'] / goal:.2f} of it"
    )
    return [
        f"{line}; {GOAL:.0%} of {peak.flops / 1e12:,.1f} TFLOP/s ({peak.source}) at "
        f"{best['flops_per_token'] / 1e9:.3f} GFLOP a token would be {goal:,.0f}: {reached}"
    ]


def saving_line(one: Entry) -> str:
    return (
        f"a checkpoint of {one['bytes'] / 1e9:.2f} GB: asynchronously training stands still for "
        f"{one['held_seconds']:.2f} s (the first time {one['first_held_seconds']:.2f} s), "
        f"{one['held_seconds'] / one['at_once_seconds']:.3f} of the {one['at_once_seconds']:.2f} s of one at once; "
        f"durable behind {one['durable_seconds']:.1f} s, steps meanwhile "
        f"{one['step_beside_seconds'] / one['step_seconds']:.2f} times as long"
    )
