"""What is to be done: all units in order, and the record of everything that the output depends on.

The record is written before the first unit is done, and every later run of the same work is held against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.corpus import Found, Place, find_files, plan_units
from data_pipeline.durable import write_file
from data_pipeline.shards import FORMAT_VERSION, PLAN_FORMAT, PLAN_PATH, read_manifest, render_manifest
from data_pipeline.unit import Options, PrepareError, Unit, Workplace
from tokenizer.codec import Codec


def make_plan(
    inputs: Mapping[str, Sequence[Place]], options: Options, codec: Codec, stdin: Found
) -> tuple[list[Unit], dict[str, Any]]:
    """All units in order, and the record of everything the output depends on."""
    units: list[Unit] = []
    sources: dict[str, Any] = {}
    for name in sorted(inputs):
        listing = find_files(inputs[name], txt_documents=options.txt_documents, stdin=stdin)
        facts = {piece.path: one for piece, one in listing.files}
        units += [
            Unit(name, number, pieces, tuple(facts[piece.path] for piece in pieces))
            for number, pieces in enumerate(plan_units(listing.files, options.unit_bytes))
        ]
        sources[name] = {"files": [one.record() for one in facts.values()], "ignored": listing.ignored}
    plan = {
        "format": PLAN_FORMAT,
        "version": FORMAT_VERSION,
        "tokenizer": {"fingerprint": codec.fingerprint, "vocab_size": codec.vocab_size, "eos_id": codec.eos_id},
        "options": options.record(),
        "sources": sources,
    }
    return units, plan


def refuse_output_among_inputs(inputs: Mapping[str, Sequence[Place]], out: Path) -> None:
    """A folder is read to its bottom: the next run would read what this one wrote."""
    places = (str(place).removeprefix("file://") for places in inputs.values() for place in places)
    for folder in (Path(place) for place in places if Path(place).is_dir()):
        if out.resolve().is_relative_to(folder.resolve()):
            raise PrepareError(f"{out}: lies inside the input {folder}; choose an --out outside of it")


def refuse_foreign_folder(place: Workplace) -> None:
    out = place.out
    if out.exists() and not out.is_dir():
        raise PrepareError(f"{out}: not a folder; choose another --out")
    # Looked for in this order: another `prepare` that begins meanwhile writes its plan before anything else.
    if out.exists() and {entry.name for entry in out.iterdir()} - {".prepare"} and not (out / PLAN_PATH).exists():
        raise PrepareError(f"{out}: holds files that `prepare` did not make; choose another --out")


def settle_plan(place: Workplace, plan: dict[str, Any]) -> dict[str, Any]:
    """Write the plan down, or compare it with the one that this folder was begun with; returns the one on disk."""
    path = place.out / PLAN_PATH
    if not path.exists():
        write_file(path, render_manifest(plan))
        return plan
    old, _ = read_manifest(path, PLAN_FORMAT)
    if difference := _difference(old, plan):
        raise PrepareError(f"{place.out}: {difference}; delete that folder to start anew, or choose another --out")
    return old


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """What sets a new plan apart from the one on disk, in words."""
    if old["tokenizer"] != new["tokenizer"]:
        was, now = (plan["tokenizer"]["fingerprint"][:12] for plan in (old, new))
        return f"it was begun with tokenizer {was}, not {now}"
    for option, default in asdict(Options()).items():
        was, now = (plan["options"].get(option, default) for plan in (old, new))
        if was != now:
            return f"it was begun with {option} = {was}, not {now}"
    if old["sources"].keys() != new["sources"].keys():
        return f"it was begun with the sources {', '.join(old['sources'])}, not {', '.join(new['sources'])}"
    for name, source in new["sources"].items():
        before = {facts["path"]: facts for facts in old["sources"][name]["files"]}
        after = {facts["path"]: facts for facts in source["files"]}
        if gone := before.keys() - after.keys():
            return f"{min(gone)} belonged to source {name} when it was begun, and does not now"
        if fresh := after.keys() - before.keys():
            return f"{min(fresh)} did not belong to source {name} when it was begun"
        for path, facts in after.items():
            if facts["size"] != before[path]["size"]:
                return f"{path} changed since it was begun (then {before[path]['size']} bytes, now {facts['size']})"
            if facts != before[path]:
                return f"{path} changed since it was begun (it was written to)"
        if list(before) != list(after):
            return f"the files of source {name} were given in another order when it was begun"
    return None
