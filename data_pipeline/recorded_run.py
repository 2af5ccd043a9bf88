"""What a training run says of the data it reads: its own files, and the orders of data rebuilt from them.

Read as plain TOML and JSON, since this package knows nothing of the trainer: recipe.toml (seed, windows, batch,
stages, where the collection lies), environment.json (what was changed by name on the way, and what had been before:
history.py), the newest checkpoint's state.json (the order and the tokens' hash as they were), metrics.jsonl (how far
the run is). recipe.toml is that of the last start: it holds for all steps behind the last change, but for stages and
parts of the batch ramp that have not begun.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data_pipeline.history import History, Read
from data_pipeline.order import PACKING_MODES, SampleOrder, difference
from data_pipeline.packing_plan import PackingPlan, open_plan, read_order
from data_pipeline.reading import Reading
from data_pipeline.shards import Collection, DataFormatError, open_collection
from data_pipeline.steps import Steps
from data_pipeline.stream import TokenStream
from data_pipeline.trace import DocumentRead, documents_read, reads_of_document

NO_CHANGES = History()
_ROOT = Path(__file__).resolve().parents[1]
_TAIL_BYTES = 1 << 16
_SIZES = range(1, 2**31)
_COUNTS = range(2**62 + 1)


@dataclass(frozen=True)
class Part:
    """Samples of a run, from `first_sample` on and before `end`, that were read from one collection in one order."""

    first_sample: int
    end: int | None  # None: it goes on
    collection: Collection
    order: SampleOrder
    plan: PackingPlan | None

    @cached_property
    def streams(self) -> dict[str, TokenStream]:
        return {name: TokenStream(source.splits["train"]) for name, source in self.collection.sources.items()}

    @property
    def contents(self) -> Mapping[str, str]:
        """Of each source a hash of its tokens."""
        return self.collection.streams

    def open(self) -> Part:
        return self


@dataclass(frozen=True)
class Earlier:
    """A part of a run before its data or windows were changed. `collection` where it was named, else as recorded."""

    first_sample: int
    end: int
    read: Read
    collection: Collection | None

    @cached_property
    def order(self) -> SampleOrder:
        return SampleOrder.of(self.read.order)

    @property
    def contents(self) -> Mapping[str, str]:
        return self.read.streams

    def open(self) -> Part:
        """DataFormatError: its collection is gone, or holds other tokens by now."""
        collection, sha256 = self.collection, str(self.read.order["content_sha256"])
        if collection is None:
            where = f"samples {self.first_sample:,} to {self.end - 1:,} were read from tokens {sha256[:12]}"
            if self.read.path is None:
                raise DataFormatError(f"{where}, and where those lay is not recorded: name them with --data")
            try:
                collection = open_collection(_ROOT / self.read.path)
            except DataFormatError as error:
                raise DataFormatError(f"{error}; {where}: name them with --data, where they moved") from None
            if collection.content_sha256 != sha256:
                raise DataFormatError(
                    f"{where}, {collection.path} holds {collection.content_sha256[:12]} by now: name them with --data"
                )
        plan = open_plan(collection, self.order.seq_len) if self.order.packing == "best_fit" else None
        if plan is not None and plan.planned.sha256 != self.read.order["plan_sha256"]:
            raise DataFormatError(f"{plan.folder} has other rows than the samples before {self.end:,} were read from")
        return Part(self.first_sample, self.end, collection, self.order, plan)


@dataclass(frozen=True)
class RecordedRun:
    """A run's data: step s, from 1 as in metrics.jsonl, read the samples `steps.samples(s - 1)`.

    `collection`, `order` and `plan` are those of the newest samples, from `order.first_sample` on; `earlier` the parts
    before, for most runs none. `step` is how far the run is, `checked_against` the checkpoint whose order and hash
    agreed; None if there is none yet, and only the recipe says what the run reads. `named` is the collection that was
    named by who asks: of this part or of an earlier one.
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
    history: History = NO_CHANGES
    earlier: tuple[Earlier, ...] = ()
    left_out: frozenset[int] = frozenset()  # steps, from 1, that were not run for an alarm: nothing is learnt from them
    named: Collection | None = None

    @cached_property
    def newest(self) -> Part:
        return Part(self.order.first_sample, None, self.collection, self.order, self.plan)

    def part_of(self, sample: int) -> Part:
        """The part that a sample belongs to. DataFormatError: see `Earlier.open`."""
        found = next((part for part in self.earlier if sample < part.end), None)
        return self.newest if found is None else found.open()

    def documents_of(self, step: int) -> tuple[Part, list[DocumentRead]]:
        """What a step, from 1, reads: a change falls between steps, so it is all of one part."""
        samples = self.steps.samples(step - 1)
        part = self.part_of(samples.start)
        return part, list(documents_read(part.order, part.streams, samples, part.plan))

    def asked_of(self) -> Part:
        """The part whose documents are meant by their numbers: the newest, or an earlier one of the named data."""
        named = self.named
        if named is not None and named.content_sha256 != self.collection.content_sha256:
            return next(part for part in reversed(self.earlier) if part.collection is named).open()
        return self.newest

    def reads_of(self, source: str, document: int, steps: int) -> tuple[Part, list[DocumentRead], list[range]]:
        """Every time one of the first `steps` steps read part of a document of `asked_of()`, in order.

        Last, the samples in whose part the source held other text: a document of this number was another one there.
        ValueError: there is no such source or document.
        """
        asked, until = self.asked_of(), self.steps.samples_before(steps)
        content = asked.collection.streams.get(source)
        found: list[DocumentRead] = []
        others: list[range] = []
        # With no sample it only looks whether there is such a document.
        reads_of_document(asked.order, asked.streams, source, document, samples=asked.first_sample, plan=asked.plan)
        parts: tuple[Earlier | Part, ...] = (*self.earlier, self.newest)
        for part in parts:
            if part.first_sample >= until:
                break
            end = until if part.end is None else min(part.end, until)
            if part.contents.get(source) != content:
                others.append(range(part.first_sample, end))
                continue
            plan = part.open().plan if part.order.packing == "best_fit" else None
            found += reads_of_document(part.order, asked.streams, source, document, samples=end, plan=plan)
        return asked, found, others


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
        where = _ROOT / recipe["data"]["path"]
        batch, schedule, planned = recipe["batch"], recipe["schedule"], recipe["data"].get("stages", [])
        seq_len = _whole(recipe["model"]["seq_len"], _SIZES, f"{recipe_path}: model.seq_len")
        global_batch_size = _whole(batch["global_batch_size"], _SIZES, f"{recipe_path}: batch.global_batch_size")
        steps = _steps(global_batch_size, batch.get("ramp", []), f"{recipe_path}: batch.ramp")
        micro_batch_size = _whole(batch["micro_batch_size"], _SIZES, f"{recipe_path}: batch.micro_batch_size")
        max_steps = _whole(schedule["max_steps"], _COUNTS[1:], f"{recipe_path}: schedule.max_steps")
        seed = _whole(recipe["seed"], range(2**64), f"{recipe_path}: seed")
        mixture = [_stage(one, f"{recipe_path}: data.stages") for one in planned]
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
    history = _history(path, state, state_path)
    named = None if data is None else open_collection(data)
    earlier, own = _earlier(history, named, state)
    collection = open_collection(where) if own is None else own
    try:
        stages = History().stages(mixture, seq_len)
        order, plan = read_order(collection, packing=packing, seed=seed, seq_len=seq_len, stages=stages)
        order = history.order(order, mixture, collection.streams)
        steps = history.steps(steps)
    except DataFormatError:  # it names the plan and what to do
        raise
    except (ValueError, OverflowError) as error:
        raise DataFormatError(f"{recipe_path} does not fit {collection.path}: {error}") from None
    if state is not None:
        _refuse_other_data(state, order, collection, steps, history, state_path)
    step = max(_last_step(path / "metrics.jsonl"), 0 if state is None else state["global_step"])
    reading = Reading(steps, history, {**order.describe(), "content_sha256": collection.content_sha256})
    return RecordedRun(
        path, collection, order, plan, steps, micro_batch_size, step=step, max_steps=max_steps,
        checked_against=None if state is None else state_path.parent, history=history, earlier=earlier, named=named,
        left_out=_left_out(path / "roll_backs.json", reading),
    )  # fmt: skip


def _left_out(path: Path, reading: Reading) -> frozenset[int]:
    """The steps that the run leaves out since it went back for an alarm, as long as they read the same samples."""
    try:
        records = json.loads(path.read_bytes())["roll_backs"]
        recorded = [tuple(one[key] for key in ("step", "first_sample", "samples", "reads_sha256")) for one in records]
        return frozenset(one[0] for one in recorded if reading.reads(*one))
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise DataFormatError(f"{path}: damaged: it does not tell which steps the run leaves out") from None


def _history(path: Path, state: dict[str, Any] | None, state_path: Path) -> History:
    """What was changed on the way: what the last start found and made, or the newest checkpoint where none says it."""
    environment = path / "environment.json"
    where, found = state_path, [] if state is None else state.get("changes", [])
    try:
        if environment.exists():
            last = json.loads(environment.read_bytes())["attempts"][-1]
            where, found = (environment, last["changes"]) if "changes" in last else (where, found)
        return History.of(found)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise DataFormatError(f"{where}: damaged: it does not tell what was changed in the run") from None


def _earlier(
    history: History, named: Collection | None, state: dict[str, Any] | None
) -> tuple[tuple[Earlier, ...], Collection | None]:
    """The parts before the newest; and the named collection, unless it is that of an earlier part alone."""
    parts, first = [], 0
    for end, read in history.reads():
        is_named = named is not None and named.content_sha256 == read.order.get("content_sha256")
        parts.append(Earlier(first, end, read, named if is_named else None))
        first = end
    newest = None if state is None else state["order"].get("content_sha256")
    if named is None or named.content_sha256 == newest or not any(part.collection is named for part in parts):
        return tuple(parts), named
    return tuple(parts), None


def _whole(value: object, allowed: range, what: str) -> int:
    """The number, if it is a whole one of those allowed; DataFormatError if not."""
    if type(value) is not int or value not in allowed:  # True is no number here
        raise DataFormatError(f"{what} must be a whole number from {allowed[0]:,} to {allowed[-1]:,}")
    return value


def _stage(table: dict[str, Any], what: str) -> tuple[int, Mapping[str, float]]:
    if not isinstance(table["weights"], Mapping):
        raise TypeError
    return _whole(table["from_tokens"], _COUNTS, f"{what}: from_tokens"), table["weights"]


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
    """The state.json that `latest` leads to, and its content; None where no checkpoint has been saved.

    Where that one is gone or damaged, as a resume would find it, those of the checkpoints that are left, newest first.
    """
    latest = checkpoints / "latest"
    if not latest.exists():
        return latest, None
    named = checkpoints / latest.read_text(errors="replace").strip()
    left = [path.parent for path in checkpoints.glob("step-*/manifest.json") if path.parent.name[5:].isdecimal()]
    faults = []
    for checkpoint in [named, *sorted(left, key=lambda path: int(path.name[5:]), reverse=True)]:
        path = checkpoint / "state.json"
        try:
            return path, _state(path)
        except DataFormatError as error:
            faults.append(error)
    raise DataFormatError(f"{faults[0]}; {latest} names it as the newest checkpoint, and no other can be read")


def _state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
        if not isinstance(state["order"], Mapping):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise DataFormatError(f"{path}: missing or damaged") from None
    for key in ("global_step", "consumed_samples"):
        _whole(state.get(key), _COUNTS, f"{path}: damaged: {key}")
    return state


def _refuse_other_data(
    state: dict[str, Any], order: SampleOrder, collection: Collection, steps: Steps, history: History, where: Path
) -> None:
    """DataFormatError where the newest checkpoint's order is not the one in which its last sample would be read now."""
    made = history.to_json()
    known = state.get("changes", [])
    if made[: len(known)] != known:
        raise DataFormatError(f"{where} knows of other changes of the run than its environment.json")
    # One whose first steps are not saved yet tells of the order that it ended.
    ended = next((change.read for change in history.changes[len(known) :] if change.read is not None), None)
    now = {**order.describe(), "content_sha256": collection.content_sha256} if ended is None else dict(ended.order)
    stored = {key: value for key, value in state["order"].items() if key != "content_sha256"}
    sha256 = now.pop("content_sha256")
    try:
        found = difference(stored, now, consumed_samples=state["consumed_samples"])
    except (KeyError, TypeError, RecursionError):
        raise DataFormatError(f"{where}: damaged: it has no order of data") from None
    if found:
        raise DataFormatError(f"{collection.path} is not what this run reads, says {where}: {found}")
    if state["order"].get("content_sha256") != sha256:
        raise DataFormatError(
            f"{collection.path} holds other tokens than this run reads: content_sha256 is "
            f"{sha256[:12]}, {where} says {str(state['order'].get('content_sha256'))[:12]}"
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
