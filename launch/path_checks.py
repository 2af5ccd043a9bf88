"""Can the nodes read and write what a run reads and writes? Each function is one row of the report, or several.

`facts` is what probe.py said, by the names of the nodes; `met` what it said when all nodes had left their marks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.rows import Asked, Facts, Row, agreement, size

GRACE_SECONDS = 30.0  # what schedulers and launchers leave between a signal and the kill, if nothing else is agreed


def run_directory(asked: Asked, facts: Facts) -> Row:
    """Writable, with room for one checkpoint more than stays."""
    row = Row("run directory")
    need = None
    if asked.plan is not None:
        checkpoint = asked.plan["checkpoint"]
        need = checkpoint["bytes"] * (checkpoint["keep_last"] + 1)
    for node, fact in facts.items():
        place, free = fact["run_place"], fact["free_bytes"]
        row.numbers[node] = {"free_bytes": free}
        error = fact.get("run_error") or fact.get("write_error")
        if error:
            row.fail(
                node,
                "not writable",
                f"{node} cannot write {place} ({error}): choose another --run, or see to its rights and its room",
            )
        elif need is not None and free < need:
            row.fail(
                node,
                f"{size(free)} free",
                f"{node} has {size(free)} free at {place}, and "
                f"{asked.plan['checkpoint']['keep_last'] + 1} checkpoints take {size(need)}: make room, lower "  # type: ignore[index]
                "checkpoint.keep_last, or choose another --run",
            )
        else:
            row.ok(node, f"writable, {size(free)} free")
    return row


def sharing(asked: Asked, marks: Mapping[str, str], met: Facts) -> Row:
    """One run directory for all, or what the recipe says where there is none. `marks`: each node's file there."""
    row = Row("shared")
    placement = (asked.plan or {}).get("checkpoint", {}).get("placement", "shared")
    written = {node: mark for node, mark in marks.items() if node in met}
    for node, said in met.items():
        unseen = [other for other, mark in written.items() if mark not in said["marks"]]
        if not unseen:
            row.ok(node, "one folder" if len(met) > 1 else "one node")
        elif placement != "shared":
            row.ok(node, f"its own, {placement}")
        else:
            row.fail(
                node,
                "its own",
                f"{node} does not see what {unseen[0]} writes in {asked.run}: put it on a "
                'file system that all nodes share, or set checkpoint.placement = "per_node" in the recipe',
            )
    return row


def inputs(asked: Asked, facts: Facts) -> list[Row]:
    """The data and the tokenizer: the same, whether from one disk or copied. Nothing without a recipe."""
    if asked.plan is None:
        return []
    rows = []
    for name, path in (("data", asked.plan["data"]["path"]), ("tokenizer", asked.plan["data"]["tokenizer"])):

        def reason(node: str, its: Any, other: str, right: Any, name: str = name, path: str = path) -> str:
            return f"{node} has another {name} than {other} at {path}: copy it from there, whole"

        there = {node: fact[f"{name}_sha256"] for node, fact in facts.items() if fact[f"{name}_sha256"]}
        row = agreement(name, there, reason, lambda digest: digest[:9])
        for node, fact in facts.items():
            if f"{name}_error" in fact:
                row.fail(
                    node,
                    "missing",
                    f"{node} cannot read the {name}: {fact[f'{name}_error']}: copy it there, or correct the recipe",
                )
            elif fact.get(f"{name}_missing"):
                row.fail(
                    node,
                    "not whole",
                    f"{node} lacks {fact[f'{name}_missing']}, which the manifest names: "
                    "copy it there, then `python -m data_pipeline verify` it",
                )
        row.cells = {node: row.cells[node] for node in facts if node in row.cells}
        rows.append(row)
    return rows


def disk(asked: Asked, facts: Facts) -> Row:
    """How fast it writes, and how long a checkpoint takes so: against the grace that is left for the last one."""
    row = Row("disk")
    whole = None if asked.plan is None else asked.plan["checkpoint"]["bytes"]
    grace = GRACE_SECONDS if asked.grace_seconds is None else asked.grace_seconds
    for node, slots, fact in asked.answers(facts):
        if not fact["written_bytes"] or not fact["write_seconds"]:
            row.skip(node, "not written")
            continue
        speed = fact["written_bytes"] / fact["write_seconds"]
        text = f"{size(speed)}/s"
        row.numbers[node] = {"bytes_per_second": speed}
        if whole is None:
            row.ok(node, text)
            continue
        seconds = whole * slots / asked.ranks / speed
        text += f", {seconds:.1f} s a save" if seconds < 100 else f", {seconds / 60:.0f} min a save"
        slow = f"{node} writes {size(speed)}/s, its part of a checkpoint of {size(whole)} takes {seconds:.3g} s"
        if seconds <= grace:
            row.ok(node, text)
        elif asked.grace_seconds is None:
            row.warn(
                node,
                text,
                f"{slow}, and schedulers leave {grace:g} s after a signal: have it "
                "signal earlier, and say so with --grace-seconds",
            )
        else:
            row.fail(
                node,
                text,
                f"{slow}, and --grace-seconds leaves {grace:g}: take a faster disk for --run, or have a longer grace",
            )
    return row
