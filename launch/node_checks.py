"""Are the nodes machines of their own, alike, and large enough? Each function is one row of the report.

`facts` is what probe.py said, by the names of the nodes. Most are right; of two that disagree the first is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launch.rows import Asked, Facts, Row, agreement, expected, size

OPEN_FILES = 4096
SHARED_MEMORY_BYTES = 2**29  # NCCL takes some 10 MB a channel and peer; Docker gives a container 64 MB
BUSY_FRACTION = 0.05  # of a GPU's memory that someone else holds


def machines(facts: Facts) -> Row:
    """Each name a machine of its own."""
    row = Row("machine")
    seen: dict[str, str] = {}
    for node, fact in facts.items():
        twin = seen.setdefault(fact["machine"], node)
        if twin == node:
            row.ok(node, fact["hostname"])
        else:
            row.fail(
                node,
                fact["hostname"],
                f"{node} is the same machine as {twin} ({fact['hostname']}): name it once, with all its slots",
            )
    return row


def code(facts: Facts) -> Row:
    """The same files of ours everywhere. Without git they are compared all the same."""

    def reason(node: str, its: Any, other: str, right: Any) -> str:
        mine, theirs = dict(its), dict(right)
        differ = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        named = ", ".join(differ[:3]) + (", …" if len(differ) > 3 else "")
        commits = [f"{one} {(facts[one]['commit'] or 'no commit')[:9]}" for one in (node, other)]
        return (
            f"{node} has other code than {other}: {named} ({len(differ)} of {len(mine.keys() | theirs.keys())} files; "
            f"{', '.join(commits)}): bring both to one commit, or copy the folder"
        )

    have = {node: tuple(sorted(fact["files"].items())) for node, fact in facts.items() if fact["files"]}
    row = agreement("code", have, reason)
    for node, fact in facts.items():
        if node not in have:
            row.fail(node, "none", f"{node} has no code of ours in the folder of this command: copy it there")
            continue
        changed = f" + {len(fact['changed'])} changed" if fact["changed"] else ""
        row.cells[node] = (row.cells[node][0], (fact["commit"] or "no commit")[:9] + changed)
    return row


def versions(facts: Facts) -> list[Row]:
    """Python, torch, deepspeed and the driver must be equal; other libraries are told of."""

    def upgrade(what: str) -> Callable[[str, Any, str, Any], str]:
        return lambda node, its, other, right: (
            f"{node} has {what} {its or 'not at all'}, {other} {right or 'not at all'}: install the same on both"
        )

    rows = [
        agreement("python", {node: fact["python"] for node, fact in facts.items()}, upgrade("Python")),
        *(
            agreement(
                name,
                {node: fact["libraries"][name] for node, fact in facts.items()},
                upgrade(name),
                lambda version: version or "none",
            )
            for name in ("torch", "deepspeed")
        ),
    ]
    for row in rows[1:]:
        for node, fact in facts.items():
            if fact["libraries"][row.name] is None and row.cells[node][0] == "ok":
                row.fail(node, "none", f"{node} has no {row.name}: install it there (make setup)")
    others = {
        node: tuple(
            (name, version) for name, version in fact["libraries"].items() if name not in ("torch", "deepspeed")
        )
        for node, fact in facts.items()
    }
    row = Row("other libraries")
    right = expected(list(others.values()))
    for node, libraries in others.items():
        differ = [
            f"{name} {its or 'none'}, not {known or 'none'}"
            for (name, its), (_, known) in zip(libraries, right, strict=True)
            if its != known
        ]
        if differ:
            row.warn(node, f"{len(differ)} differ", f"{node} has {'; '.join(differ)}: install from constraints.txt")
        else:
            row.ok(node, "the same")
    drivers = agreement(
        "driver",
        {node: fact["driver"] for node, fact in facts.items()},
        upgrade("the NVIDIA driver"),
        lambda driver: driver or "none",
    )
    return [*rows, row, drivers]


def devices(asked: Asked, facts: Facts) -> Row:
    """A GPU a rank with nobody else on it, or cores where CPUs train."""
    row = Row("devices")
    kinds = {
        node: expected([gpu["name"] for gpu in fact["gpus"]]) if fact["gpus"] else None for node, fact in facts.items()
    }
    usual = expected(list(kinds.values())) if kinds else None
    for node, slots, fact in asked.answers(facts):
        if asked.device == "cpu":
            if fact["cores"] < slots:
                row.warn(
                    node,
                    f"{fact['cores']} cores",
                    f"{node} has {fact['cores']} cores for {slots} ranks: they take turns",
                )
            else:
                row.ok(node, f"{fact['cores']} cores")
            continue
        gpus, shown = fact["gpus"], f"{len(fact['gpus'])} × {kinds[node]}"
        taken = [gpu for gpu in gpus[:slots] if (gpu["used_bytes"] or 0) > BUSY_FRACTION * (gpu["total_bytes"] or 1)]
        if "gpus_error" in fact:
            row.fail(node, "no answer", f"{node}: {fact['gpus_error']}: see to its driver")
        elif len(gpus) < slots:
            row.fail(
                node,
                f"{len(gpus)} GPUs",
                f"{node} has {len(gpus)} GPUs for {slots} ranks: lower its "
                "slots, or set DS_ACCELERATOR=cpu to train on CPUs",
            )
        elif kinds[node] != usual:
            row.warn(
                node,
                shown,
                f"{node} has {kinds[node]}, most nodes have {usual}: all wait for the "
                "slowest, and the one with the least memory decides",
            )
        elif taken:
            held = ", ".join(f"GPU {gpu['index']} {size(gpu['used_bytes'])}" for gpu in taken)
            row.warn(
                node,
                f"{shown}, {len(taken)} in use",
                f"{node}: someone else holds memory of {held}: see nvidia-smi there",
            )
        else:
            row.ok(node, shown)
    return row


def memory(asked: Asked, facts: Facts, need: int | None) -> Row:
    """What is free for a rank now, against the bytes that the plan says a rank needs."""
    row = Row("free memory")
    for node, slots, fact in asked.answers(facts):
        share = fact["available_bytes"] // slots
        text, what = f"{size(share)} a rank", "main memory"
        if asked.device == "cuda":
            free = [
                gpu["total_bytes"] - gpu["used_bytes"]
                for gpu in fact["gpus"][:slots]
                if gpu["total_bytes"] is not None and gpu["used_bytes"] is not None
            ]
            if not free:
                row.skip(node, "not told")
                continue
            share, what = min(free), "GPU memory"
            text = f"{size(share)} a GPU"
        row.numbers[node] = {"free_bytes": share}
        if need is not None and need > share:
            row.fail(
                node,
                text,
                f"{node} has {size(share)} of {what} free for a rank, the recipe needs "
                f"{size(need)}: free it, or see `python -m pretrain plan RECIPE --device-memory {share // 10**6}MB "
                "--fit` for what would fit",
            )
        else:
            row.ok(node, text + (f", needs {size(need)}" if need is not None else ""))
    return row


def limits(asked: Asked, facts: Facts) -> Row:
    """Open files, and the shared memory that ranks of one node talk through."""
    row = Row("limits")
    for node, slots, fact in asked.answers(facts):
        files, shared = fact["open_files"], fact["shared_memory_bytes"]
        files_text = "no limit of files" if files < 0 else f"{files:,} files"
        text = files_text + ("" if shared is None else f", /dev/shm {size(shared)}")
        if 0 <= files < OPEN_FILES:
            row.warn(node, text, f"{node} allows {files:,} open files: `ulimit -n 65536` before the start there")
        elif shared is not None and shared < SHARED_MEMORY_BYTES and slots > 1:
            row.warn(
                node,
                text,
                f"{node} has a /dev/shm of {size(shared)}, through which its ranks talk: start the "
                "container with --shm-size 1g or --ipc=host",
            )
        else:
            row.ok(node, text)
    return row
