"""What a run that resumes may have changed, if it is asked for by name (`--change`), and how that is recorded.

    global_batch_size   batch.global_batch_size and batch.ramp: the next step has the new size, samples count on
    seq_len             model.seq_len: the next sample is a window of the new length
    data                data.path, data.packing, data.stages: the next sample is one of the new data
    model               model.norm_eps, model.init_std, model.rope_base and RoPE's scaling (rope_scaling,
                        rope_scaling_factor, rope_original_seq_len): what leaves every tensor its shape and meaning

A checkpoint's `changes` tell where each was made and what had been before (data_pipeline/history.py), so what stands in
the recipe needs to be true only from the last of them on. Weights and the optimizer's state are not touched by any.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.history import Change, History, Mixture, Read
from data_pipeline.order import SampleOrder, difference, integer_weights
from data_pipeline.reading import Reading
from data_pipeline.shards import DataFormatError, open_collection
from data_pipeline.steps import Steps
from model.config import COMPONENTS, ModelConfig, from_table
from pretrain.checkpoint import run_of, tokenizer_of
from pretrain.config import RecipeError, apply_override, from_root
from pretrain.run_directory import CheckpointError
from tokenizer.codec import Codec

NAMES = ("global_batch_size", "seq_len", "data", "model")
FREE_FIELDS = (  # of the model: no tensor has another shape or meaning by them
    *("norm_eps", "init_std", "rope_base"),
    *("rope_scaling", "rope_scaling_factor", "rope_original_seq_len"),
)


@dataclass(frozen=True)
class Difference:
    """One thing in which a checkpoint is not this run's."""

    name: str | None  # by which it can be asked for
    line: str  # what differs, to be put behind the checkpoint's path
    remedy: str
    entry: Mapping[str, Any]  # as it is recorded


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each once. RecipeError for one that is none."""
    for name in names:
        if name not in NAMES:
            like = difflib.get_close_matches(name, NAMES, 1)
            meant = f"did you mean {like[0]}? There" if like else "there"
            raise RecipeError(
                f"--change {name}: {meant} are {', '.join(NAMES)}; all else is as it was, or another --run"
            )
    return tuple(dict.fromkeys(names))


def options(names: Collection[str]) -> str:
    return " ".join(f"--change {name}" for name in NAMES if name in names)


def read_otherwise(config: ModelConfig, overrides: Sequence[str]) -> ModelConfig:
    """A config whose weights are to be read with other fields, texts `model.FIELD=VALUE`: those that a run may change,
    and seq_len. RecipeError: another field, or a model that cannot be.
    """
    free = [field for field in ("seq_len", *FREE_FIELDS) if config.positions != "learned" or field != "seq_len"]
    values: dict[str, Any] = {}
    for override in overrides:
        table: dict[str, Any] = {}
        apply_override(table, override)
        if list(table) != ["model"] or not set(table["model"]) <= set(free):
            raise RecipeError(f"--set {override}: weights are read with another {', '.join(free)} of [model], no more")
        values |= table["model"]
    try:
        return from_table({**config.to_dict(), **values})
    except ValueError as error:
        raise RecipeError(f"--set {' --set '.join(overrides)}: {error}") from None


# ---------------------------------------------------------------- a run's identity behind its changes


def history_of(path: Path, stored: Mapping[str, Any]) -> History:
    """The changes in a checkpoint's state, which those of earlier versions lack. CheckpointError: damaged."""
    try:
        return History.of(stored.get("changes", []))
    except ValueError as error:
        raise CheckpointError(f"{path}/state.json is damaged: {error}") from None


def mixture_of(identity: Mapping[str, Any]) -> Mixture:
    return [(stage["from_tokens"], stage["weights"]) for stage in identity["data"]["stages"]]


def steps_of_identity(identity: Mapping[str, Any]) -> Steps:
    return Steps.from_json(identity["global_batch_size"], identity.get("batch_ramp", []))


def reading_of(identity: Mapping[str, Any]) -> Reading:
    """What the steps of a run read whose identity this is, its past included."""
    return Reading(steps_of_identity(identity), History.of(identity.get("changes", [])), identity["order"])


def after(identity: Mapping[str, Any], history: History) -> dict[str, Any]:
    """The identity of a run that has this past, where one without any would have `identity`.

    ValueError: a part of its ramp or a stage of its mixture does not fit behind that past.
    """
    if not history.changes:
        return dict(identity)
    steps = history.steps(steps_of_identity(identity))
    return {
        **identity,
        "order": _placed(identity, history),
        "batch_ramp": [list(part) for part in steps.ramp],
        "changes": history.to_json(),
    }


def _placed(identity: Mapping[str, Any], history: History) -> dict[str, Any]:
    """The description of the order of a run that has this past. ValueError: a stage does not fit behind it."""
    plain: dict[str, Any] = identity["order"]
    if not history.changes:
        return plain
    order = history.order(SampleOrder.of(plain), mixture_of(identity), identity["data"]["streams"])
    return {**order.describe(), "content_sha256": plain["content_sha256"]}


# ---------------------------------------------------------------- what differs


def differences(stored: Mapping[str, Any], ours: Mapping[str, Any], history: History) -> Iterator[Difference]:
    """In what a checkpoint's identity is not this run's, as far as `--change` has a name for it or refuses it.

    `ours` has no past; it is compared as it would be behind the checkpoint's own changes, `history`.
    """
    old, new = stored["order"], _placed(ours, history)
    line = difference(_fixed(old), _fixed(new))
    if line is not None:
        yield Difference(None, f": {line}", "resume with the same", {})
    if old["seq_len"] != new["seq_len"]:
        lengths = {"from": old["seq_len"], "to": new["seq_len"]}
        line = f": seq_len was {old['seq_len']} and is now {new['seq_len']}"
        name: str | None = "seq_len"
        if "learned" in (stored.get("model", {}).get("positions"), ours.get("model", {}).get("positions")):
            line, name = f"{line}, and each learned position is a weight", None
        yield Difference(name, line, "resume with the same model.seq_len", {"name": "seq_len", **lengths})
    line = _other_data(stored, ours, new, history)
    if line is not None:
        yield Difference("data", f": {line}", "resume with the data it was trained on", {"name": "data"})
    consumed, was, now = stored["consumed_samples"], steps_of_identity(stored), steps_of_identity(ours)
    with suppress(ValueError):  # a ramp that does not go on behind an earlier change: another one, then
        now = history.steps(now)
    if was.parts(consumed) != now.parts(consumed):
        line = f" was written with global_batch_size = {was.told(consumed)}, this run has {now.told(consumed)}"
        entry = {"name": "global_batch_size", "from": was.size(stored["global_step"] - 1)}
        yield Difference("global_batch_size", line, "resume with the same", entry)
    model, wanted = stored.get("model", {}), ours.get("model", {})
    for key in {**model, **wanted}:
        one, other = (fields.get(key, COMPONENTS.get(key)) for fields in (model, wanted))
        if key != "seq_len" and one != other:
            line = f" was written with model.{key} = {one}, this run has {other}"
            entry = {"name": f"model.{key}", "from": one, "to": other}
            name = "model" if key in FREE_FIELDS else None
            yield Difference(name, line, f"resume with the same model.{key}", entry)


def _fixed(order: Mapping[str, Any]) -> dict[str, Any]:
    """What no name changes: another seed would begin every epoch of every source anew."""
    return {key: value for key, value in order.items() if key in ("order_version", "seed")}


def _other_data(
    stored: Mapping[str, Any], ours: Mapping[str, Any], new: Mapping[str, Any], history: History
) -> str | None:
    """In what the data are others, in one line, windows of another length apart. Stages to come may differ.

    `new`: the order of `ours` behind `history`.
    """
    old, consumed = stored["order"], stored["consumed_samples"]
    if old["seq_len"] == new["seq_len"]:
        kept = [{k: v for k, v in order.items() if k not in _fixed(order)} for order in (old, new)]
        return difference(*kept, consumed_samples=consumed)
    if old["content_sha256"] != new["content_sha256"]:
        return difference({"content_sha256": old["content_sha256"]}, {"content_sha256": new["content_sha256"]})
    # The stages as they would be in windows of the old length.
    stages = history.stages(mixture_of(ours), old["seq_len"])
    by_windows = {name: one["windows"] for name, one in old["sources"].items()}
    slots = [(stage.first_sample, integer_weights(stage.weights)) for stage in stages]
    slots = slots or [(history.position()[0], integer_weights(by_windows))]
    told = [
        {"packing": order.get("packing", "concat"), "stages": [{"first_sample": f, "slots": s} for f, s in mixed]}
        for order, mixed in ((old, [(one["first_sample"], one["slots"]) for one in old["stages"]]), (new, slots))
    ]
    return difference(*told, consumed_samples=consumed)


# ---------------------------------------------------------------- refusing and recording


def refuse_other(path: Path, stored: Mapping[str, Any], ours: Mapping[str, Any], names: Collection[str]) -> History:
    """The changes of a run that goes on from a checkpoint, those that are made by it included.

    `ours`: the identity of its recipe, without a past. CheckpointError, in one line, where what differs has no name or
    was not named, or does not fit behind what was read.
    """
    history = history_of(path, stored)
    try:
        found = list(differences(stored, ours, history))
        if not found:
            after(ours, history)
    except ValueError as error:
        raise CheckpointError(f"{path}: this recipe does not fit behind it: {error}") from None
    missing = [one for one in found if one.name is None or one.name not in names]
    if missing:
        raise CheckpointError(_refusal(path, missing, names, stored["global_step"]))
    if not found:
        return history
    changed = {one.name for one in found}
    if "data" in changed:
        _refuse_other_tokenizer(path, stored, ours)
    try:
        change = _change(path, stored, ours, found, history)
        made = History((*history.changes, change))
        after(ours, made)
    except ValueError as error:
        raise CheckpointError(f"{path}: {options(names)}: {error}") from None
    return made


def _refusal(path: Path, missing: Sequence[Difference], names: Collection[str], step: int) -> str:
    """All differences that were not asked for, in one line: their values, and for each how to keep or to change it."""
    free = {one.name for one in missing if one.name is not None}
    if len(missing) == 1:
        (one,) = missing
        wanted = "" if one.name is None else f", or have it changed from step {step} on: {options({*names, one.name})}"
        return f"{path}{one.line}: {one.remedy}, or choose another --run{wanted}{_hopeless(one, names)}"
    told = []
    for number, one in enumerate(missing, 1):
        named = "" if one.name is None else f", or --change {one.name}"
        told.append(f"({number}) {one.line.removeprefix(':').strip()}: {one.remedy}{named}{_hopeless(one, names)}")
    changed = f"; each --change is one from step {step} on" if free else ""
    given = options(names)
    kept = f", beside {given}" if given and free else ""
    return (
        f"{path} is another run's in {len(missing)} things: {'; '.join(told)}; or choose another --run{changed}{kept}"
    )


def _hopeless(one: Difference, names: Collection[str]) -> str:
    """Why a field of the model cannot be changed, where that was asked for."""
    field = str(one.entry.get("name", "")).removeprefix("model.")
    if "model" not in names or not one.entry or one.name is not None:
        return ""
    if field == "rope_layout":
        return (
            "; --change model turns no weights around: export them, import them again with "
            f"--rope-layout {one.entry['to']}, and start a new run from them by initial_weights"
        )
    free = ", ".join(FREE_FIELDS)
    return f"; --change model is for {free}: with another {field} no run can go on from it, nor start from its weights"


def _refuse_other_tokenizer(path: Path, stored: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    fingerprint = stored.get("data", {}).get("tokenizer") or Codec.load(tokenizer_of(path)).fingerprint
    if fingerprint != ours["data"]["tokenizer"]:
        raise CheckpointError(
            f"{path} was trained with the tokenizer {fingerprint[:12]}, {ours['data']['path']} was written with "
            f"{ours['data']['tokenizer'][:12]}: prepare that data with --tokenizer {tokenizer_of(path)}"
        )


def _change(
    path: Path, stored: Mapping[str, Any], ours: Mapping[str, Any], found: Sequence[Difference], history: History
) -> Change:
    names = {one.name for one in found}
    consumed, read, entries = stored["consumed_samples"], None, [dict(one.entry) for one in found]
    if names & {"seq_len", "data"}:
        data = stored.get("data") or _recorded_data(path, stored)
        read = Read(stored["order"], data.get("path"), data.get("streams", {}))
    parts = None
    if "global_batch_size" in names:
        parts = tuple(steps_of_identity(stored).parts(consumed))
    change = Change(stored["global_step"], consumed, stored["tokens_seen"], entries, parts, read)
    made = after(ours, History((*history.changes, change)))
    for entry in entries:
        if entry["name"] == "data":
            old = {"path": read.path if read else None, "order": stored["order"]}
            new = {"path": ours["data"]["path"], "order": made["order"]}
            entry |= {"from": _data_told(old, consumed), "to": _data_told(new, consumed + 1)}
        if entry["name"] == "global_batch_size":
            entry["to"] = steps_of_identity(made).size(stored["global_step"])
    return change


def _data_told(data: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """What the last of the first `samples` samples was read from."""
    order = data["order"]
    stage = [stage for stage in order["stages"] if stage["first_sample"] < samples][-1]
    return {
        "path": data["path"],
        "content_sha256": order["content_sha256"],
        "packing": order.get("packing", "concat"),
        "slots": stage["slots"],
    }


def _recorded_data(path: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Where a run of an earlier version read its data, and what each source held: its checkpoints do not say it.

    By its recipe.toml and the collection there, if that is still the one; what they do not tell is left out, and
    sources of which nothing is known begin anew.
    """
    try:
        where = str(tomllib.loads(run_of(path).recipe.read_text(encoding="utf-8"))["data"]["path"])
        collection = open_collection(from_root(where))
    except (CheckpointError, DataFormatError, OSError, ValueError, KeyError, TypeError):
        return {}
    if collection.content_sha256 != stored["order"]["content_sha256"]:
        return {}
    return {"path": where, "streams": collection.streams}


# ---------------------------------------------------------------- telling


def told(change: Change | None, order: SampleOrder) -> Iterator[str]:
    """A line for each thing changed, if anything is; `order` is the one that it begins."""
    if change is None:
        return
    names = [one["name"] for one in change.changed]
    for one in change.changed:
        name, before, now = one["name"], one["from"], one["to"]
        if name == "data":
            before, now = (_data_words(one, other) for one, other in ((before, now), (now, before)))
        line = f"step {change.global_step}: {name} is changed from {before} to {now}"
        if name == "data" or (name == "seq_len" and "data" not in names):
            line += f"; {_goes_on(order)}"
        yield line


def _data_words(data: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The collection's path, and what else two data do not share."""
    words = [str(data["path"] or data["content_sha256"][:12])]
    if data["path"] == other["path"] and data["content_sha256"] != other["content_sha256"]:
        words.append(f"tokens {data['content_sha256'][:12]}")
    if data["packing"] != other["packing"]:
        words.append(f"packing {data['packing']}")
    if data["slots"] != other["slots"]:
        words.append("mixed " + ", ".join(f"{name} {count}" for name, count in data["slots"].items()))
    return words[0] if len(words) == 1 else f"{words[0]} ({'; '.join(words[1:])})"


def _goes_on(order: SampleOrder) -> str:
    """Which sources go on where they were, and which begin."""
    given = {} if order.begin is None else order.begin.given
    going = [f"{name} goes on behind {count:,} windows" for name, count in given.items() if count]
    fresh = [name for name, count in given.items() if not count]
    return ", ".join([*going, *([f"from their first window: {', '.join(fresh)}"] if fresh else [])])


def unchanged(names: Collection[str], history: History, made: Change | None) -> Iterator[str]:
    """A line for each name that was asked for and is as the checkpoint has it already."""
    for name in names:
        if made is not None and any(str(one["name"]).split(".")[0] == name for one in made.changed):
            continue
        steps = [
            change.global_step
            for change in history.changes
            if any(str(one["name"]).split(".")[0] == name for one in change.changed)
        ]
        since = f", since step {steps[-1]}" if steps else ""
        yield f"--change {name}: nothing is changed, the checkpoint has it as the recipe does{since}"
