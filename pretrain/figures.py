"""What a run's records come to: figures for programs, and the same in words and tables for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pretrain.chronicle import Chronicle, Record
from pretrain.config import RecipeError
from pretrain.page import Table


def figures(run: Chronicle) -> dict[str, Any]:
    """All that is shown as a number, JSON-able; null where it is not known or not finite."""
    series = run.series
    memory = memory_of(run)
    return {
        "run": str(run.path),
        "state": run.state,
        "step": int(series.step[-1]),
        "max_steps": run.config.schedule.max_steps,
        "tokens": finite(series.tokens[-1]),
        "flops": finite(series.flops[-1]),
        "parameters": run.parameters,
        "training_seconds": finite(series.seconds[-1]),
        "tokens_per_second": finite(series.steady_rate),
        "warm_up_steps": int(series.warm_up.sum()),
        "mfu": finite(series.steady_share(series.mfu)),
        "hfu": finite(series.steady_share(series.hfu)),
        "step_seconds": run.step_parts(),
        "loss": finite(series.loss[-1]),
        "final_loss": finite(series.final_loss),
        "steps_not_finite": int((~np.isfinite(series.loss)).sum()),
        "steps_missing": int(series.breaks.sum()),
        "steps_left_out": [*run.left_out],
        "alarms": [dict(one) for one in run.alarms],
        "roll_backs": [dict(one) for one in run.roll_backs],
        "heldout": {source: {"last": run.last(source), "best": run.best(source)} for source in sorted(run.evaluations)},
        "memory": None if isinstance(memory, str) else {**memory[0], "comparable_bytes": memory[1]},
        "attempts": [
            {
                "attempt": one.number,
                "first_step": one.first_step,
                "last_step": one.last_step,
                "replaced_steps": one.replaced,
                "step_seconds": one.step_seconds,
                "world_size": one.facts.get("world_size"),
                "started_at": one.facts.get("started_at"),
                "resumed_from": one.facts.get("resumed_from"),
                "git_commit": one.facts.get("git_commit"),
            }
            for one in run.attempts
        ],
        "seconds": run.time_spent(),
        "damaged_lines": run.damaged_lines,
    }


def finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def memory_of(run: Chronicle) -> tuple[dict[str, Any], int] | str:
    """Predicted and measured, or why nothing was predicted."""
    try:
        memory = run.memory
    except RecipeError as error:
        return str(error)
    figures = {
        "device": memory.kind,
        "device_is_known": memory.kind_known,
        "predicted_bytes": memory.predicted,
        "predicted_with_process_bytes": memory.predicted_with_process,
        "moment": memory.moment,
        "measured_bytes": finite(memory.measured),
    }
    return figures, memory.comparable


# ---------------------------------------------------------------- words


def count(value: float | None) -> str:
    """983,040, from a million on 1.23 M."""
    if value is None or not np.isfinite(value):
        return "not finite"
    for scale, name in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {name}" if value < 999.5 * scale else f"{value / scale:,.0f} {name}"
    return f"{value:,.0f}"


def counted(number: int, what: str) -> str:
    """1 step, 2,000 steps."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def loss(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) and np.isfinite(value) else "not finite"


def duration(seconds: float) -> str:
    """12.3 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


# ---------------------------------------------------------------- tables


def heldout_table(run: Chronicle) -> Table:
    """Each source's last and best evaluation."""
    rows = []
    for source in sorted(run.evaluations, key=lambda one: (one == "all", one)):
        last, best = run.last(source), run.best(source)
        assert last is not None
        exact = "" if last.get("bytes_exact", True) else "about "
        bits = last.get("bits_per_byte")
        rows.append(
            [
                source,
                f"{last['step']:,}",
                f"{last.get('tokens') or 0:,}",
                loss(last.get("loss")),
                "" if last.get("perplexity") is None else f"{last['perplexity']:,.2f}",
                "" if bits is None else f"{exact}{bits:.4f}",
                loss(last.get("unigram")),
                "" if best is None else f"{loss(best['loss'])} at step {best['step']:,}",
            ]
        )
    head = ["source", "step", "tokens", "loss", "perplexity", "bits per byte", "unigram", "best loss"]
    return Table(head, rows, range(1, 8))


def attempts_table(run: Chronicle) -> Table:
    rows = []
    for one in run.attempts:
        steps = "none" if one.first_step is None else f"{one.first_step:,} to {one.last_step:,}"
        resumed = one.facts.get("resumed_from")
        rows.append(
            [
                str(one.number),
                str(one.facts.get("started_at", "not recorded")).replace("T", " ")[:19],
                str(one.facts.get("world_size", "")),
                "" if resumed is None else Path(str(resumed)).name,
                steps,
                f"{one.replaced:,}" if one.replaced else "",
                duration(one.step_seconds),
                str(one.facts.get("git_commit") or "")[:12],
            ]
        )
    head = ["attempt", "started (UTC)", "ranks", "resumed from", "steps", "replaced later", "in steps", "commit"]
    return Table(head, rows, [0, 2, 4, 5, 6])


def time_table(run: Chronicle) -> Table:
    spent = run.time_spent()
    whole = sum(spent.values())
    rows = [[what, duration(seconds), f"{seconds / whole:.1%}" if whole else ""] for what, seconds in spent.items()]
    return Table(["where the time went", "", "share"], rows, [1, 2])


def step_table(run: Chronicle) -> Table | None:
    """What the steps that count were made of; None where their records do not tell."""
    parts = run.step_parts()
    whole, steps = sum(parts.values()), len(run.series)
    if not whole:
        return None
    rows = [
        [part, duration(seconds), f"{1000 * seconds / steps:,.1f} ms", f"{seconds / whole:.1%}"]
        for part, seconds in parts.items()
    ]
    return Table(["what a step is made of", "in all", "a step", "share"], rows, [1, 2, 3])


def mfu_line(run: Chronicle) -> str:
    """The share of the device's peak that went into the model, and into all arithmetic; or why it is not known."""
    series = run.series
    mfu, hfu = series.steady_share(series.mfu), series.steady_share(series.hfu)
    if not np.isfinite(mfu):
        return "MFU: not known (no peak is known of the device; logging.peak_flops gives it)."
    return (
        f"MFU {mfu:.1%}: the model's FLOPs, attention causal, as a share of the devices' dense peak. "
        f"HFU {hfu:.1%}: the same with what activation checkpointing computes again. Warm-up is left out of both."
    )


MOST_ALARMS = 50


def alarms_table(run: Chronicle) -> Table | None:
    """The last alarms, and what was done about each."""
    rows = [
        [
            f"{one['step']:,}", str(one["attempt"]), str(one.get("condition", "")), _short(one.get("value")),
            _short(one.get("threshold")), str(one.get("action", "")), str(one.get("detail", "")),
        ]
        for one in run.alarms[-MOST_ALARMS:]
    ]  # fmt: skip
    names = ["step", "attempt", "condition", "value", "may be", "action", "where"]
    return Table(names, rows, [0, 3, 4]) if rows else None


def _short(value: object) -> str:
    try:
        return f"{value:.4g}" if isinstance(value, int | float) else "–"
    except OverflowError:  # a whole number beyond all floats
        return "–"


def changes_table(run: Chronicle) -> Table | None:
    """What differs between the starts of this run: values of the recipe, changes by name, versions, commit."""
    rows: list[list[str]] = []
    for change in run.changes:
        for one in change.get("changed", []):
            what = f"{one.get('name', '')}: {one['from']} → {one['to']}" if "to" in one else str(one.get("name", ""))
            rows.append([str(change["attempt"]), f"changed by name behind step {change['step']:,}", what])
    before: Record = {}
    for attempt in run.attempts:
        number = str(attempt.number)
        rows += [[number, "recipe", str(value)] for value in attempt.facts.get("recipe_changes") or []]
        if before:
            for name in ("world_size", "compute", "git_commit", "hostname"):
                old, new = before.get(name), attempt.facts.get(name)
                if old != new:
                    rows.append([number, name, f"{old} → {new}"])
            old_versions, new_versions = before.get("versions") or {}, attempt.facts.get("versions") or {}
            for name in sorted({*old_versions, *new_versions}):
                if old_versions.get(name) != new_versions.get(name):
                    rows.append([number, f"version of {name}", f"{old_versions.get(name)} → {new_versions.get(name)}"])
        before = attempt.facts or before
    return Table(["attempt", "what", "value"], rows) if rows else None
