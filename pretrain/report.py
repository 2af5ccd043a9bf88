"""One run as a page: how it learnt, how fast, on what, and what it writes."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import numpy as np

from pretrain.chronicle import LAST_STEPS, Chronicle
from pretrain.device_memory import GB, MB, show_size
from pretrain.figures import (
    alarms_table,
    attempts_table,
    changes_table,
    count,
    counted,
    duration,
    heldout_table,
    loss,
    memory_of,
    mfu_line,
    step_table,
    time_table,
)
from pretrain.inside import inside
from pretrain.page import Page, Section, Table, Tile
from pretrain.plots import COLOURS, Array, Curve, Look, Plot, plot, smooth
from pretrain.samples import Samples

STATES = {
    "finished": "finished",
    "stopped": "stopped before its last step; it can be resumed",
    "failed": "failed; it can be resumed from its last checkpoint",
    "running": "still being written: all figures are as of its last whole record",
    "silent": "its last word was that it runs, but no rank gives a sign of life: it was killed, or its file system "
    "is behind",
}


def notes(run: Chronicle) -> list[str]:
    """What a reader must know before the figures."""
    said = [] if run.state == "finished" else [STATES.get(run.state, run.state)]
    missing, bad = missing_places(run), int((~np.isfinite(run.series.loss)).sum())
    first = int(run.series.step[0])
    if first > 1:
        said.append(f"the records begin with step {first:,}: steps before it are another directory's, or were lost")
    if missing:
        said.append(f"records of steps are missing in {counted(missing, 'place')}; lines are interrupted there")
    if bad:
        said.append(f"the loss of {counted(bad, 'step')} is not finite")
    if run.alarms:
        by_condition = Counter(str(one.get("condition")) for one in run.alarms)
        told = ", ".join(f"{name} {times}" for name, times in by_condition.most_common())
        said.append(f"{counted(len(run.alarms), 'alarm')}: {told}; the last in step {run.alarms[-1]['step']:,}")
    for one in run.roll_backs:
        alarm = one.get("alarm_step")
        said.append(f"the run went back to step {one['step']:,} for an alarm in step {alarm}, which is left out since")
    if run.damaged_lines:
        said.append(f"{counted(run.damaged_lines, 'damaged line')} of metrics.jsonl passed over")
    if run.last() is None:
        said.append("nothing has been evaluated yet")
    return said


def missing_places(run: Chronicle) -> int:
    """Where steps have no record, but for those that were left out."""
    steps, left_out = run.series.step, {*run.left_out}
    gaps = [(int(steps[at - 1]) + 1, int(steps[at])) for at in np.flatnonzero(run.series.breaks)]
    return sum(not left_out.issuperset(range(begin, end)) for begin, end in gaps)


def page(run: Chronicle, samples: Samples | None) -> Page:
    begun = str(run.attempts[0].facts.get("started_at", "not recorded")).replace("T", " ")[:16]
    facts = run.environment
    versions = facts.get("versions") or {}
    table = [[name, str(version)] for name, version in versions.items()]
    table.append(["commit", str(facts.get("git_commit") or "not recorded")])
    table.append(["host", str(facts.get("hostname") or "not recorded")])
    sections = [Section("How it learnt", plots=plots(run))]
    if run.evaluations:
        text = "Loss and unigram (the entropy of the tokens' own frequencies) in nats per token."
        sections.append(Section("Held-out text", text, tables=[heldout_table(run)]))
    split = step_table(run)
    tables = [time_table(run), *([] if split is None else [split])]
    sections.append(Section("Speed", mfu_line(run), plots=speed(run), tables=tables))
    sections.append(memory_section(run))
    looks = inside(run)
    if looks:
        sections.append(Section("Inside the model", "What it found when it looked at itself: docs/health.md.", looks))
    alarms = alarms_table(run)
    if alarms is not None:
        sections.append(Section("Alarms", "What was watched and met; docs/health.md explains each.", tables=[alarms]))
    if samples is not None:
        if samples.missing is not None:
            sections.append(Section("Samples", f"None: {samples.missing}"))
        else:
            sections.append(Section("Samples", f"{samples.checkpoint}: {samples.settings}", samples=samples.texts))
    changed = changes_table(run)
    text = "" if changed is not None else "Nothing differs from one start to the next."
    both = [attempts_table(run)] + ([] if changed is None else [changed])
    sections.append(Section("Attempts, and what changed between them", text, tables=both))
    sections.append(
        Section(
            "Configuration",
            tables=[Table(["of the last start", ""], table)],
            folded=("the whole recipe, recipe.toml", run.recipe),
        )
    )
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    subtitle = f"{run.path} · {run.state} · begun {begun} · this page was made {made}"
    return Page(run.name, subtitle, notes(run), tiles(run), sections)


def tiles(run: Chronicle) -> list[Tile]:
    series, last, best = run.series, run.last(), run.best()
    averaged = counted(min(LAST_STEPS, len(series)), "step")
    found = [
        Tile("step", f"{int(series.step[-1]):,}", f"of {run.config.schedule.max_steps:,}"),
        Tile("tokens", count(series.tokens[-1]), f"{series.tokens[-1] / run.parameters:.2g} per parameter"),
        Tile("parameters", count(run.parameters), f"{run.parameters:,}"),
        Tile("training FLOPs", count(series.flops[-1]), "causal attention"),
        Tile(
            "training loss",
            loss(series.final_loss),
            f"mean of the last {averaged}",
        ),
    ]
    if last is not None:
        bits = f"{last['bits_per_byte']:.4f} bits per byte" if last.get("bits_per_byte") is not None else ""
        found.append(Tile("held-out loss", loss(last.get("loss")), f"step {last['step']:,}; {bits}"))
    if best is not None and last is not None and best["step"] != last["step"]:
        found.append(Tile("best held-out loss", loss(best["loss"]), f"step {best['step']:,}"))
    found.append(Tile("throughput", count(series.steady_rate), "tokens a second in training steps"))
    mfu = series.steady_share(series.mfu)
    if np.isfinite(mfu):
        found.append(Tile("MFU", f"{mfu:.1%}", "of the devices' dense peak"))
    found.append(Tile("time in training", duration(series.seconds[-1]), "without evaluation, saving and pauses"))
    return found


# ---------------------------------------------------------------- plots


def plots(run: Chronicle) -> list[Plot]:
    """How the run learnt: loss over tokens, FLOPs and time, held-out loss by source, learning rate, norms."""
    series = run.series
    drawn = [
        _loss(run, series.tokens, "Loss against tokens", "tokens learnt from", replaced=run.replaced.tokens),
        _loss(run, series.flops, "Loss against FLOPs", "training FLOPs"),
        _loss(run, series.seconds, "Loss against time in training", "time in training steps", time=True),
    ]
    if any(source != "all" for source in run.evaluations):
        drawn.append(_heldout(run))
    marks = _marks(run, series.step)
    rate = Curve("", series.step, series.lr, 0, breaks=series.breaks)
    drawn.append(plot("Learning rate", [*marks, rate], x_label="step", y_label="learning rate"))
    norm = Curve("of the whole gradient, before clipping", series.step, series.grad_norm, 0, breaks=series.breaks)
    clip = run.config.optimizer.clipping_norm
    clipped = [] if not clip else [Curve(f"clipped at {clip:g}", series.step[:1], np.array([clip]), 1, "level")]
    drawn.append(plot("Gradient norm", [*marks, norm, *clipped], x_label="step", y_label="norm", log_y=True))
    if np.isfinite(series.loss_scale).any():
        scale = Curve("", series.step, series.loss_scale, 0, breaks=series.breaks)
        drawn.append(plot("Loss scale (fp16)", [*marks, scale], x_label="step", y_label="scale", log_y=True))
    return drawn


def _loss(
    run: Chronicle, x: Array, title: str, x_label: str, *, time: bool = False, replaced: Array | None = None
) -> Plot:
    series = run.series
    window = max(1, len(series) // 50) | 1
    every = Curve("each step", x, series.loss, 0, "faint" if window > 1 else "line", series.breaks)
    curves = [*_marks(run, x), every]
    if replaced is not None and len(replaced):
        again = np.argsort(replaced, kind="stable")
        label = f"made again later ({counted(len(replaced), 'step')})"
        curves.append(Curve(label, replaced[again], run.replaced.loss[again], 7, "faint"))
    if window > 1:
        curves.append(Curve(f"mean of {window} steps", x, smooth(series.loss, window), 0, "line", series.breaks))
    places, losses = _places(run, "all", x)
    if len(places):
        curves.append(Curve("held-out, all sources", places, losses, 1, "points"))
    return plot(title, curves, x_label=x_label, y_label="nats per token", unit="time" if time else "")


def _places(run: Chronicle, source: str, x: Array) -> tuple[Array, Array]:
    """Where a source's evaluations lie on an axis that has a value a step, and their losses."""
    found = [(run.at(one["step"]), one.get("loss")) for one in run.evaluations.get(source, ())]
    known = [(x[at], np.nan if value is None else value) for at, value in found if at is not None]
    return np.array([at for at, _ in known]), np.array([value for _, value in known], dtype=float)


def _heldout(run: Chronicle) -> Plot:
    curves = []
    for number, source in enumerate(sorted(run.evaluations, key=lambda one: (one == "all", one))):
        x, y = _places(run, source, run.series.tokens)
        colour = None if source == "all" else number
        look: Look = "line" if number < COLOURS or source == "all" else "dashed"
        curves.append(Curve("all sources" if source == "all" else source, x, y, colour, look))
    return plot("Held-out loss by source", curves, x_label="tokens learnt from", y_label="nats per token")


def _marks(run: Chronicle, x: Array) -> list[Curve]:
    """Where a later attempt begins, and where something was changed by name."""
    series = run.series
    begins = np.flatnonzero(series.opens)
    resumed = x[begins[begins > 0]]
    changed = np.array([x[at] for one in run.changes if (at := run.at(one["step"] + 1)) is not None])
    nothing = np.zeros(0)
    marks = []
    if len(resumed):
        marks.append(Curve("resumed", resumed, nothing, None, "upright"))
    if len(changed):
        marks.append(Curve("changed by name", changed, nothing, 3, "upright"))
    return marks


def speed(run: Chronicle) -> list[Plot]:
    """Throughput, and tokens a step where they vary."""
    series = run.series
    steady = ~series.warm_up
    marks = _marks(run, series.step)
    steady_line = Curve("each step", series.step, np.where(steady, series.tokens_per_second, np.nan), 0, "faint")
    curves = [*marks]
    if steady.any():
        at = np.flatnonzero(steady)
        rates = series.tokens_per_second[at]
        breaks = np.diff(series.step[at], prepend=series.step[at][:1]) > 1
        window = max(1, len(at) // 50) | 1
        steady_line = Curve("each step", series.step[at], rates, 0, "faint" if window > 1 else "line", breaks)
        curves.append(steady_line)
        if window > 1:
            curves.append(Curve(f"mean of {window} steps", series.step[at], smooth(rates, window), 0, "line", breaks))
    first = np.flatnonzero(series.warm_up)
    label = "warm-up of an attempt, not counted" if steady.any() else "the only steps there are"
    curves.append(Curve(label, series.step[first], series.tokens_per_second[first], 1, "hollow"))
    overall = f"{count(series.steady_rate)} tokens/s over all steps that count"
    curves.append(Curve(overall, series.step[:1], np.array([series.steady_rate]), None, "level"))
    drawn = [plot("Throughput", curves, x_label="step", y_label="tokens per second")]
    if len(np.unique(series.step_tokens)) > 1 and (run.changes or run.config.batch.ramp):
        sizes = Curve("", series.step, series.step_tokens, 0, breaks=series.breaks)
        drawn.append(plot("Tokens learnt from in a step", [*marks, sizes], x_label="step", y_label="tokens"))
    return drawn


def memory_section(run: Chronicle) -> Section:
    memory = memory_of(run)
    if isinstance(memory, str):
        return Section("Memory", f"Nothing can be predicted: {memory}")
    figures, comparable = memory
    kind = "GPU" if figures["device"] == "cuda" else "CPU"
    known = "" if figures["device_is_known"] else " (assumed: the run did not say what it ran on)"
    meaning = (
        "bytes allocated by torch, without the device's context"
        if kind == "GPU"
        else "resident bytes of the process, in which Python, libraries and file pages count too"
    )
    measured = figures["measured_bytes"]
    rows = [
        ["predicted: tensors at the peak", show_size(figures["predicted_bytes"]), f"in {figures['moment']}"],
        ["predicted with the process", show_size(figures["predicted_with_process_bytes"]), "tensors and an allowance"],
    ]
    if measured is not None:
        share = f"{measured / comparable:.0%} of what was predicted for the same"
        rows.append(["measured", show_size(measured), f"by the first rank; {share}"])
    series, drawn = run.series, []
    unit = GB if max(comparable, measured or 0) >= GB else MB
    if np.isfinite(series.memory).any():
        curves = [
            *_marks(run, series.step),
            Curve("measured, first rank: the most so far", series.step, series.memory / unit, 0, breaks=series.breaks),
            Curve("predicted for the same", series.step[:1], np.array([comparable / unit]), 1, "level"),
        ]
        drawn = [plot("Memory of a rank", curves, x_label="step", y_label="GB" if unit == GB else "MB")]
    text = f"One rank of the last attempt on a {kind}{known}. Measured are {meaning}."
    return Section("Memory", text, drawn, [Table(["", "bytes", ""], rows, [1])])
