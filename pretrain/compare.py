"""Several runs beside each other: how far each came, at what cost, and in what they differ.

A loss in nats per token says how hard the next token of one tokenizer is to guess. Where tokenizers differ, or are not
known to be the same, only bits per byte of the same held-out text compare.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pretrain.chronicle import Chronicle
from pretrain.config import RecipeError
from pretrain.device_memory import show_size
from pretrain.figures import count, duration, figures, finite, loss, memory_of
from pretrain.page import Page, Section, Table
from pretrain.plots import COLOURS, Curve, Look, Plot, plot, smooth
from tokenizer.codec import Codec, TokenizerError

MOST = 16  # runs: more lines than that nobody tells apart


def names(runs: Sequence[Chronicle]) -> list[str]:
    """What each is called: its folder's name, or its path where two have the same."""
    short = [run.name for run in runs]
    return [str(run.path) if short.count(name) > 1 else name for run, name in zip(runs, short, strict=True)]


def fingerprint(run: Chronicle) -> str | None:
    """The tokenizer's; None where the run has none that can be opened."""
    try:
        return Codec.load(run.path / "tokenizer").fingerprint
    except (TokenizerError, OSError):
        return None


def comparability(runs: Sequence[Chronicle], fingerprints: Sequence[str | None]) -> tuple[bool, list[str]]:
    """Whether losses in nats per token compare, and what must be said of that."""
    said = []
    same_tokens = None not in fingerprints and len(set(fingerprints)) == 1
    if None in fingerprints:
        said.append("the tokenizer of some runs cannot be opened: losses per token may not compare, bits per byte do")
    elif not same_tokens:
        said.append("these runs have different tokenizers: losses per token do not compare, bits per byte do")
    last = [one for run in runs if (one := run.last()) is not None]
    sizes = {(one.get("tokens"), one.get("text_bytes")) if same_tokens else one.get("text_bytes") for one in last}
    if len(sizes) > 1 and (same_tokens or all(one.get("bytes_exact") for one in last)):
        said.append("held-out text is not the same in all runs (other sizes): held-out figures may not compare")
    if any(not one.get("bytes_exact", True) for one in last):
        said.append("bits per byte are estimates where evaluation.max_tokens left text out")
    return same_tokens, said


# ---------------------------------------------------------------- differences


def settings(run: Chronicle) -> dict[str, str]:
    """Everything a run was told, by nested names, and what it ran on."""
    facts = run.environment
    flat = dict(_flat(run.config.model_dump(mode="json"), ""))
    flat |= dict(_flat(run.deepspeed, "deepspeed.json: "))
    flat |= {f"version of {name}": str(version) for name, version in (facts.get("versions") or {}).items()}
    flat |= {name: str(facts.get(name)) for name in ("world_size", "compute", "git_commit", "hostname")}
    return flat


def _flat(table: Mapping[str, Any], before: str) -> Sequence[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{before}{key}.")
        else:
            found.append((f"{before}{key}", value if isinstance(value, str) else json.dumps(value)))
    return found


def differences(runs: Sequence[Chronicle]) -> dict[str, list[str | None]]:
    """Only what differs: name → its value in each run, None where a run has no such setting."""
    told = [settings(run) for run in runs]
    keys = dict.fromkeys(key for one in told for key in one)
    rows = {key: [one.get(key) for one in told] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


# ---------------------------------------------------------------- figures and tables


def compare(runs: Sequence[Chronicle]) -> dict[str, Any]:
    """All figures, JSON-able."""
    fingerprints = [fingerprint(run) for run in runs]
    same, said = comparability(runs, fingerprints)
    return {
        "runs": [
            {"name": name, "tokenizer": one, **figures(run)}
            for name, one, run in zip(names(runs), fingerprints, runs, strict=True)
        ],
        "loss_per_token_compares": same,
        "notes": said,
        "differences": differences(runs),
    }


def table(runs: Sequence[Chronicle], same_tokens: bool) -> Table:
    """A run a row. Losses per token are marked where they don't compare."""
    rows = []
    for name, run in zip(names(runs), runs, strict=True):
        series, last, best = run.series, run.last(), run.best()
        memory = memory_of(run)
        measured = None if isinstance(memory, str) else memory[0]["measured_bytes"]
        rows.append(
            [
                name,
                run.state,
                f"{int(series.step[-1]):,} of {run.config.schedule.max_steps:,}",
                count(run.parameters),
                count(series.tokens[-1]),
                count(series.flops[-1]),
                duration(series.seconds[-1]),
                count(series.steady_rate),
                loss(series.final_loss),
                "" if last is None else loss(last.get("loss")),
                "" if best is None else f"{loss(best['loss'])} at {best['step']:,}",
                "" if last is None else loss(last.get("bits_per_byte")),
                "" if best is None else loss(best.get("bits_per_byte")),
                "" if measured is None else show_size(measured),
            ]
        )
    mark = "" if same_tokens else " (per own token)"
    head = ["run", "state", "step", "parameters", "tokens", "FLOPs", "in training", "tokens/s"]
    head += [f"training loss{mark}", f"held-out{mark}", f"best{mark}", "bits/byte", "best bits/byte", "memory"]
    return Table(head, rows, range(2, 14))


def differences_table(runs: Sequence[Chronicle]) -> Table:
    rows = [[key, *("not set" if one is None else one for one in found)] for key, found in differences(runs).items()]
    return Table(["what", *names(runs)], rows)


# ---------------------------------------------------------------- the page


def plots(runs: Sequence[Chronicle], same_tokens: bool) -> list[Plot]:
    """Losses over tokens, FLOPs and time, held-out loss or bits per byte, learning rate, norm, throughput."""
    drawn = []
    warning = "" if same_tokens else "Tokenizers differ or are not known: these lines do not compare."
    axes = (("tokens", "tokens learnt from"), ("flops", "training FLOPs"), ("seconds", "time in training steps"))
    for field, label in axes:
        curves = []
        for number, (name, run) in enumerate(zip(names(runs), runs, strict=True)):
            y = smooth(run.series.loss, max(1, len(run.series) // 50) | 1)
            curves.append(Curve(name, getattr(run.series, field), y, number, _look(number), run.series.breaks))
        title = {"tokens": "tokens", "flops": "FLOPs", "seconds": "time in training"}[field]
        caption = "Each point is the mean of a fiftieth of its run's steps. " + warning
        drawn.append(
            plot(
                f"Training loss against {title}",
                curves,
                x_label=label,
                y_label="nats per token",
                caption=caption.strip(),
                unit="time" if field == "seconds" else "",
            )
        )
    evaluated = [run for run in runs if run.evaluations.get("all")]
    if evaluated:
        field, label = ("loss", "nats per token") if same_tokens else ("bits_per_byte", "bits per byte")
        curves = [_heldout(name, run, number, field) for number, (name, run) in _numbered(runs)]
        title = "Held-out loss, all sources" if same_tokens else "Held-out bits per byte, all sources"
        drawn.append(plot(title, curves, x_label="tokens learnt from", y_label=label))
    for title, field, label, log in (
        ("Learning rate", "lr", "learning rate", False),
        ("Gradient norm", "grad_norm", "norm before clipping", True),
        ("Throughput", "tokens_per_second", "tokens per second", False),
    ):
        curves = []
        for number, (name, run) in _numbered(runs):
            y = getattr(run.series, field)
            if field == "tokens_per_second":
                y = np.where(run.series.warm_up & (len(run.series) > 1), np.nan, y)
            y = y if field == "lr" else smooth(y, max(1, len(y) // 50) | 1)
            known = np.isfinite(y) if field == "tokens_per_second" else np.ones(len(y), bool)
            breaks = np.diff(run.series.step[known], prepend=run.series.step[known][:1]) > 1
            curves.append(Curve(name, run.series.tokens[known], y[known], number, _look(number), breaks))
        drawn.append(plot(title, curves, x_label="tokens learnt from", y_label=label, log_y=log))
    return drawn


def _numbered(runs: Sequence[Chronicle]) -> list[tuple[int, tuple[str, Chronicle]]]:
    return list(enumerate(zip(names(runs), runs, strict=True)))


def _heldout(name: str, run: Chronicle, number: int, field: str) -> Curve:
    found = [(run.at(one["step"]), one.get(field)) for one in run.evaluations.get("all", ())]
    known = [(run.series.tokens[at], np.nan if value is None else value) for at, value in found if at is not None]
    x, y = (np.array([pair[side] for pair in known], dtype=float) for side in (0, 1))
    return Curve(name, x, y, number, _look(number))


def _look(number: int) -> Look:
    """Colours come again behind the last; lines are then dashed."""
    return "line" if number < COLOURS else "dashed"


def heldout_by_source(runs: Sequence[Chronicle], same_tokens: bool) -> Table:
    """The last evaluation of each source: loss where it compares, else bits per byte."""
    field = "loss" if same_tokens else "bits_per_byte"
    sources = sorted({source for run in runs for source in run.evaluations}, key=lambda one: (one == "all", one))
    rows = []
    for source in sources:
        values = [None if (last := run.last(source)) is None else last.get(field) for run in runs]
        shown = [finite(one) if isinstance(one, int | float) else None for one in values]
        rows.append([source, *("" if one is None else f"{one:.4f}" for one in shown)])
    unit = "nats per token" if same_tokens else "bits per byte"
    return Table(["source", *names(runs)], rows, range(1, len(runs) + 1), f"last evaluation, {unit}")


def page(runs: Sequence[Chronicle], same_tokens: bool, said: Sequence[str]) -> Page:
    called = names(runs)
    notes = list(said)
    notes += [f"{name}: {run.state}" for name, run in zip(called, runs, strict=True) if run.state != "finished"]
    results = table(runs, same_tokens)
    tables = [results.turned() if len(runs) <= 6 else results]  # what a screen is wide enough for
    if any(run.evaluations for run in runs):
        tables.append(heldout_by_source(runs, same_tokens))
    sections = [
        Section("Results", "Tokens a second in training steps, without the first of each attempt.", tables=tables),
        Section("How they learnt", plots=plots(runs, same_tokens)),
        Section("In what they differ", "What is the same in all is left out.", tables=[differences_table(runs)]),
    ]
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Page(" · ".join(called), f"{len(runs)} runs compared · this page was made {made}", notes, [], sections)


def refuse_numbers(count: int) -> None:
    """RecipeError where there is nothing to compare, or too much for one picture."""
    if not 2 <= count <= MOST:
        raise RecipeError(f"{count} run{'' if count == 1 else 's'} to compare: name 2 to {MOST}")
