"""What a training run says of the data it reads: its own files, and the order of data rebuilt from them.

Read as plain TOML and JSON, since this package knows nothing of the trainer: recipe.toml (seed, windows, batch,
stages, where the collection lies), the newest checkpoint's state.json (the order and the tokens' hash as they were),
metrics.jsonl (how far the run is). A resume refuses another batch size, window or seed, so one recipe holds for all
steps of a run; stages that have not begun may change, and recipe.toml is that of the last start.
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

_ROOT = Path(__file__).resolve().parents[1]
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class RecordedRun:
    """A run's data: step s, from 1 as in metrics.jsonl, read samples (s-1) x global_batch_size up to the next's.

    `step` is how far the run is, `checked_against` the checkpoint whose order and hash agreed; None if there is none
    yet, and only the recipe says what the run reads.
    """

    path: Path
    collection: Collection
    order: SampleOrder
    plan: PackingPlan | None
    global_batch_size: int
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
    except ValueError as error:
        raise DataFormatError(f"{recipe_path}: damaged: {error}") from None
    state_path, state = _newest_state(path / "checkpoints")
    try:
        where = data or _ROOT / recipe["data"]["path"]
        seq_len, batch = recipe["model"]["seq_len"], recipe["batch"]
        stages = [Stage(one["from_tokens"] // seq_len, one["weights"]) for one in recipe["data"].get("stages", [])]
        sizes = (batch["global_batch_size"], batch["micro_batch_size"])
        seed, max_steps = recipe["seed"], recipe["schedule"]["max_steps"]
        wanted = recipe["data"].get("packing", "concat")
    except (KeyError, TypeError):
        raise DataFormatError(f"{recipe_path}: a key of the data, batch or schedule is missing") from None
    packing = next((one for one in PACKING_MODES if one == wanted), None)
    if packing is None:
        raise DataFormatError(f"{recipe_path}: data.packing is {wanted!r}, none of {', '.join(PACKING_MODES)}")
    collection = open_collection(where)
    try:
        order, plan = read_order(collection, packing=packing, seed=seed, seq_len=seq_len, stages=stages)
    except DataFormatError:  # it names the plan and what to do
        raise
    except ValueError as error:
        raise DataFormatError(f"{recipe_path} does not fit {where}: {error}") from None
    if state is not None:
        _refuse_other_data(state, order, collection, sizes[0], state_path)
    step = max(_last_step(path / "metrics.jsonl"), 0 if state is None else state["global_step"])
    return RecordedRun(
        path, collection, order, plan, *sizes, step=step, max_steps=max_steps,
        checked_against=None if state is None else state_path.parent,
    )  # fmt: skip


def _newest_state(checkpoints: Path) -> tuple[Path, dict[str, Any] | None]:
    """The state.json that `latest` leads to, and its content; None where no checkpoint has been saved."""
    latest = checkpoints / "latest"
    if not latest.exists():
        return latest, None
    path = checkpoints / latest.read_text(errors="replace").strip() / "state.json"
    try:
        state = json.loads(path.read_bytes())
        if not isinstance(state["order"], Mapping) or not isinstance(state["global_step"], int):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise DataFormatError(f"{path}: missing or damaged, and {latest} names it as the newest checkpoint") from None
    return path, state


def _refuse_other_data(
    state: dict[str, Any], order: SampleOrder, collection: Collection, global_batch_size: int, where: Path
) -> None:
    stored = {key: value for key, value in state["order"].items() if key != "content_sha256"}
    try:
        found = difference(stored, order.describe(), consumed_samples=state["consumed_samples"])
    except (KeyError, TypeError):
        raise DataFormatError(f"{where}: damaged: it has no order of data") from None
    if found:
        raise DataFormatError(f"{collection.path} is not what this run reads, says {where}: {found}")
    if state["order"].get("content_sha256") != collection.content_sha256:
        raise DataFormatError(
            f"{collection.path} holds other tokens than this run reads: content_sha256 is "
            f"{collection.content_sha256[:12]}, {where} says {str(state['order'].get('content_sha256'))[:12]}"
        )
    if state.get("global_batch_size") != global_batch_size:
        raise DataFormatError(
            f"{where} says a global batch of {state.get('global_batch_size')}, recipe.toml {global_batch_size}"
        )


def _last_step(metrics: Path) -> int:
    """The step of the last training record; 0 where there is none."""
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
        if isinstance(record, dict) and record.get("kind") == "train" and isinstance(record.get("step"), int):
            return int(record["step"])
    return 0
