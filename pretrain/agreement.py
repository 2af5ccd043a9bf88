"""Whether all machines run the same: the same program on the same libraries, recipe and data, wherever these lie.

Every machine reads its own files. Where one has an older checkout, another override or other shards, nothing fails: the
run trains something else than was asked for. So the first rank of each tells what it has, by hashes, and before
anything begins all are compared with rank 0's. Ranks of one machine read the same files: there is nothing to compare.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data_pipeline.durable import file_sha256
from data_pipeline.shards import Collection
from pretrain.config import PROJECT_ROOT, RecipeError
from pretrain.runtime import Ranks

PACKAGES = ("tokenizer", "data_pipeline", "model", "pretrain")  # of ours, that a rank runs
LIBRARIES = ("torch", "deepspeed", "numpy", "sentencepiece", "safetensors")

Facts = dict[str, dict[str, str]]  # kind → name → what must be the same, as it is shown

REMEDY = {
    "program": "have the same checkout on all machines",
    "library": "install the same versions on all machines (constraints.txt)",
    "recipe": "start all ranks with the same recipe and options",
    "DeepSpeed JSON": "have the same file on all machines",
    "data": "copy the collection from one machine to the others, or put it on a file system that all share",
    "initial weights": "copy them from one machine to the others, or put them on a file system that all share",
}


def facts(
    recipe: str,
    options: Mapping[str, str],
    deepspeed: Mapping[str, Any],
    collection: Collection,
    plan_sha256: str | None,
) -> Facts:
    """What a run on this machine is: its `recipe` resolved, as TOML, and what DeepSpeed is told."""
    files = sorted(path for package in PACKAGES for path in (PROJECT_ROOT / package).rglob("*.py"))
    data = {"tokenizer": collection.fingerprint}
    for name, source in collection.sources.items():
        for split, part in source.splits.items():
            digest = hashlib.sha256("".join(shard.bin_sha256 for shard in part.shards).encode()).hexdigest()
            data[f"{split} split of {name}"] = f"{part.tokens:,} tokens, sha256 {digest}"
    if plan_sha256 is not None:
        data["packing plan"] = plan_sha256
    return {
        "program": {str(path.relative_to(PROJECT_ROOT)): file_sha256(path) for path in files},
        "library": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "recipe": {**dict(_flat(tomllib.loads(recipe))), **options},
        "DeepSpeed JSON": dict(_flat(deepspeed)),
        "data": data,
    }


def facts_of_weights(checkpoint: Path | None) -> Facts:
    """The weights that a run begins with on this machine; None: they are not there."""
    found = {} if checkpoint is None else {"its manifest": file_sha256(checkpoint / "manifest.json")}
    return {"initial weights": found}


def refuse_differences(ranks: Ranks, own: Callable[[], Facts]) -> None:
    """Raise RecipeError, on all ranks, naming rank, host and what differs, where a machine's facts are not rank 0's.

    `own` is called on the first rank of each machine. Called on all ranks together.
    """
    if sum(ranks.gather(ranks.local_rank == 0)) < 2:
        return
    mine = own() if ranks.local_rank == 0 else None
    digests = None if mine is None else {kind: _digest(values) for kind, values in mine.items()}
    told = ranks.gather((platform.node(), digests))
    for rank, (host, theirs) in enumerate(told):
        kind = None if theirs is None else next((one for one in theirs if theirs[one] != told[0][1][one]), None)
        if kind is None:
            continue
        everyones = ranks.gather(mine[kind] if mine is not None and ranks.rank in (0, rank) else None)
        here, there = everyones[0], everyones[rank]
        name = next(name for name in {**here, **there} if here.get(name) != there.get(name))
        raise RecipeError(
            f"rank {rank} ({host}) has another {kind} than rank 0 ({told[0][0]}): {name} is {_shown(there.get(name))} "
            f"there, {_shown(here.get(name))} here: {REMEDY[kind]}"
        )


def _digest(values: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, json.dumps(value)


def _shown(value: str | None) -> str:
    """A hash by its first 12 digits."""
    return "absent" if value is None else re.sub(r"([0-9a-f]{12})[0-9a-f]{52}", r"\1", value)
