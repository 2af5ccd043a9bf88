"""What a training run says of the data it reads: its own files, and the order of data rebuilt from them.

Read as plain TOML and JSON, since this package knows nothing of the trainer: recipe.toml (seed, windows, batch,
stages, where the collection lies), the newest checkpoint's state.json (the order and the tokens' hash as they were),
metrics.jsonl (how far the run is). A resume refuses another batch size, window or seed, so one recipe holds for all
steps of a run; stages and parts of the batch ramp that have not begun may change, and recipe.toml is that of the last
start.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.order import PACKING_MODES, SampleOrder, Stage, difference
from data_pipeline.packing_plan import PackingPlan, read_order
from data_pipeline.shards import Collection, DataFormatError, open_collection
from data_pipeline.steps import Steps

_ROOT = Path(__file__).resolve().parents[1]
_TAIL_BYTES = 1 << 16
_SIZES = range(1, 2**31)
_COUNTS = range(2**62 + 1)


@dataclass(frozen=True)
class RecordedRun:
    """A run's data: step s, from 1 as in metrics.jsonl, read the samples `steps.samples(s - 1)`.

    `step` is how far the run is, `checked_against` the checkpoint whose order and hash agreed; None if there is none
    yet, and only the recipe says what the run reads.
    """

    path: Path
    collection: Collection
    order: SampleOrder
    plan: PackingPlan | None
    steps: Steps
    micro_batch_size: int
    step: int
    max_steps: int
    checked_against: Path | None


def read_run(path: Path, data: Path | None = None) -> RecordedRun:
    """Read a run directory, open its collection (or `data`, where that has moved) and prove that they belong together.

    DataFormatError: no run, a file of it damaged, or a collection whose order or tokens are not the run's.
    """
    if not path.is_dir():
        raise DataFormatError(f"{path}: no such run directory")
    recipe_path = path / "recipe.toml"
    try:
        recipe = tomllib.loads(recipe_path.read_bytes().decode())
    except FileNotFoundError:
        raise DataFormatError(f"{path}: not a run directory; it has no recipe.toml") from None
    except (ValueError, RecursionError) as error:
        raise DataFormatError(f"{recipe_path}: damaged: {error}") from None
    state_path, state = _newest_state(path / "checkpoints")
    try:
        where = data or _ROOT / recipe["data"]["path"]
        batch, schedule, planned = recipe["batch"], recipe["schedule"], recipe["data"].get("stages", [])
        seq_len = _whole(recipe["model"]["seq_len"], _SIZES, f"{recipe_path}: model.seq_len")
        global_batch_size = _whole(batch["global_batch_size"], _SIZES, f"{recipe_path}: batch.global_batch_size")
        steps = _steps(global_batch_size, batch.get("ramp", []), f"{recipe_path}: batch.ramp")
        micro_batch_size = _whole(batch["micro_batch_size"], _SIZES, f"{recipe_path}: batch.micro_batch_size")
        max_steps = _whole(schedule["max_steps"], _COUNTS[1:], f"{recipe_path}: schedule.max_steps")
        seed = _whole(recipe["seed"], range(2**64), f"{recipe_path}: seed")
        stages = [_stage(one, seq_len, f"{recipe_path}: data.stages") for one in planned]
        wanted = recipe["data"].get("packing", "concat")
        if not isinstance(wanted, str):
            raise TypeError
    except (KeyError, TypeError):
        raise DataFormatError(
            f"{recipe_path}: a key of the data, batch or schedule is missing or of the wrong kind"
        ) from None
    packing = next((one for one in PACKING_MODES if one == wanted), None)
    if packing is None:
        raise DataFormatError(f"{recipe_path}: data.packing is {wanted!r}, none of {', '.join(PACKING_MODES)}")
    if "\0" in str(where):
        raise DataFormatError(f"{recipe_path}: data.path holds a zero byte")
    collection = open_collection(where)
    try:
        order, plan = read_order(collection, packing=packing, seed=seed, seq_len=seq_len, stages=stages)
    except DataFormatError:  # it names the plan and what to do
        raise
    except (ValueError, OverflowError) as error:
        raise DataFormatError(f"{recipe_path} does not fit {where}: {error}") from None
    if state is not None:
        _refuse_other_data(state, order, collection, steps, state_path)
    step = max(_last_step(path / "metrics.jsonl"), 0 if state is None else state["global_step"])
    return RecordedRun(
        path, collection, order, plan, steps, micro_batch_size, step=step, max_steps=max_steps,
        checked_against=None if state is None else state_path.parent,
    )  # fmt: skip


def _whole(value: object, allowed: range, what: str) -> int:
    """The number, if it is a whole one of those allowed; DataFormatError if not."""
    if type(value) is not int or value not in allowed:  # True is no number here
        raise DataFormatError(f"{what} must be a whole number from {allowed[0]:,} to {allowed[-1]:,}")
    return value


def _stage(table: dict[str, Any], seq_len: int, what: str) -> Stage:
    if not isinstance(table["weights"], Mapping):
        raise TypeError
    return Stage(_whole(table["from_tokens"], _COUNTS, f"{what}: from_tokens") // seq_len, table["weights"])


def _steps(global_batch_size: int, ramp: list[dict[str, Any]], what: str) -> Steps:
    """DataFormatError: a ramp that is not made of whole steps. KeyError, TypeError: one of another kind."""
    parts = [
        (
            _whole(part["until_samples"], _COUNTS[1:], f"{what}: until_samples"),
            _whole(part["global_batch_size"], _SIZES, f"{what}: global_batch_size"),
        )
        for part in ramp
    ]
    try:
        return Steps(global_batch_size, tuple(parts))
    except ValueError as error:
        raise DataFormatError(f"{what}: {error}") from None


def _newest_state(checkpoints: Path) -> tuple[Path, dict[str, Any] | None]:
    """The state.json that `latest` leads to, and its content; None where no checkpoint has been saved."""
    latest = checkpoints / "latest"
    if not latest.exists():
        return latest, None
    path = checkpoints / latest.read_text(errors="replace").strip() / "state.json"
    try:
        state = json.loads(path.read_bytes())
        if not isinstance(state["order"], Mapping):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise DataFormatError(f"{path}: missing or damaged, and {latest} names it as the newest checkpoint") from None
    for key in ("global_step", "consumed_samples"):
        _whole(state.get(key), _COUNTS, f"{path}: damaged: {key}")
    return path, state


def _refuse_other_data(
    state: dict[str, Any], order: SampleOrder, collection: Collection, steps: Steps, where: Path
) -> None:
    stored = {key: value for key, value in state["order"].items() if key != "content_sha256"}
    try:
        found = difference(stored, order.describe(), consumed_samples=state["consumed_samples"])
    except (KeyError, TypeError, RecursionError):
        raise DataFormatError(f"{where}: damaged: it has no order of data") from None
    if found:
        raise DataFormatError(f"{collection.path} is not what this run reads, says {where}: {found}")
    if state["order"].get("content_sha256") != collection.content_sha256:
        raise DataFormatError(
            f"{collection.path} holds other tokens than this run reads: content_sha256 is "
            f"{collection.content_sha256[:12]}, {where} says {str(state['order'].get('content_sha256'))[:12]}"
        )
    read = state["consumed_samples"]
    try:
        recorded = Steps.from_json(state["global_batch_size"], state.get("batch_ramp", []))
    except (KeyError, TypeError, ValueError):
        raise DataFormatError(f"{where}: damaged: it has no global batch") from None
    if recorded.parts(read) != steps.parts(read):
        raise DataFormatError(f"{where} says a global batch of {recorded.told(read)}, recipe.toml {steps.told(read)}")


def _last_step(metrics: Path) -> int:
    """The step of the last training record; 0 where there is none. DataFormatError: a record that is damaged."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:  # half a line, at the start of what was read or where a kill left it
            continue
        except RecursionError:
            raise DataFormatError(f"{metrics}: damaged: a line of brackets within brackets") from None
        if isinstance(record, dict) and record.get("kind") == "train":
            return _whole(record.get("step"), _COUNTS, f"{metrics}: damaged: step")
    return 0
