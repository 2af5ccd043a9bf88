"""A checkpoint whose files lie in several homes (see sharing.py): its manifests, and how a run finds it again.

A part is a folder like any checkpoint's, with the files of one home's ranks; state.json is in each of them, weights and
model.json in the first home's. Its manifest also tells of the rest, under `part`:

    number      which home it was written in
    hosts       the first machine of each home
    elsewhere   the files in other homes' parts, with sizes and hashes

So a part can tell whether others are of the same save, and whether all of them together are the whole of it. Whatever
homes a run has when it goes on, each looks at its own disk, and a checkpoint counts if they hold every file of it
between them: some home may hold all and the others nothing. What a home lacks of what its ranks read is sent to it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from pretrain.checkpoint import (
    JOIN,
    digest,
    list_checkpoints,
    manifest_of,
    read_manifest,
    refuse_unhealthy,
    verify,
)
from pretrain.elastic import is_read_by
from pretrain.resuming import PART, UNHEALTHY, not_fresh, not_newest, passed_over, set_aside, without_state
from pretrain.run_directory import CheckpointError
from pretrain.sharing import Sharing
from pretrain.transfer import PATIENCE, Carried, Courier

Files = Mapping[str, Any]  # path in a checkpoint's folder → bytes and sha256

FETCHED = ".fetched.partial"  # ends the name of a folder with what other homes hold; the next start removes it


def part_manifest(own: Files, every: Files, number: int, hosts: Sequence[str]) -> dict[str, Any]:
    """The manifest of one home's part: `own` files of `every` file of the checkpoint."""
    elsewhere = {name: record for name, record in every.items() if name not in own}
    return manifest_of(own, {"number": number, "hosts": list(hosts), "elsewhere": elsewhere})


def every_file(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """All files of the checkpoint that a manifest is of, or of a part of."""
    return {**manifest["files"], **manifest.get("part", {}).get("elsewhere", {})}


def named(path: Path) -> Path:
    """The checkpoint of which `path` is, or holds what was fetched of it."""
    return path.with_name(path.name.removesuffix(FETCHED))


# ---------------------------------------------------------------- finding one


@dataclass(frozen=True)
class _Held:
    """What one home holds of a checkpoint: files that are whole, or what is wrong with them."""

    files: Files = field(default_factory=dict)
    every: Files = field(default_factory=dict)
    homes: int = 1  # so many it was written in
    fault: str | None = None
    healthy: bool = True


def _look(path: Path) -> _Held:
    if not path.is_dir():
        return _Held()
    try:
        verify(path)
        manifest = read_manifest(path)
    except CheckpointError as error:
        return _Held(fault=str(error))
    homes = len(manifest["part"]["hosts"]) if "part" in manifest else 1
    try:
        refuse_unhealthy(path)
    except CheckpointError as error:
        return _Held(manifest["files"], every_file(manifest), homes, str(error), healthy=False)
    return _Held(manifest["files"], every_file(manifest), homes)


class Shelf:
    """The checkpoints of a run with several homes. Its methods are called on all ranks together."""

    def __init__(self, folder: Path, sharing: Sharing, *, gathers: bool, patience: timedelta = PATIENCE) -> None:
        """`folder`: that of this rank's home. `gathers`: checkpoints lie whole in the first home, not in parts.

        `patience`: how long a rank waits for others while files are carried.
        """
        self.folder = folder
        self.sharing = sharing
        self.gathers = gathers
        self.courier = Courier(sharing.ranks, patience)
        self._examined = folder  # the checkpoint looked at last, at this home
        self._found: list[_Held] = []  # what each home holds of it
        self._fetched: list[set[str]] = [set() for _ in sharing.homes]

    def choose(self, resume: str, say: Callable[[str], None]) -> Path | None:
        """What `resuming.choose` does, for all homes: the checkpoint to go on from, at this home; None: start anew.

        What this home lacks of it has been fetched: the folder may be one that `clear` removes. CheckpointError where
        no checkpoint is whole in all homes together. Whether it is this run's is left to the caller.
        """
        by_home = self.sharing.on_leaders(lambda: [path.name for path in list_checkpoints(self.folder)])
        names = sorted({*chain(*by_home)}, key=lambda name: (len(name), name))
        if resume == "never":
            if names:
                raise not_fresh(self.folder)
            return None
        newest = self._newest_whole(names, say)
        if resume == "auto":
            return None if newest is None else self._take()
        wanted = Path(resume)
        fault = self._examine(wanted)
        if not any(held.every or held.fault for held in self._found):
            raise CheckpointError(f"--resume {resume}: no machine of this run has a checkpoint there")
        if fault is not None:
            raise CheckpointError(fault)
        if not any(name.startswith("engine/") for held in self._found for name in held.every):
            raise without_state(wanted)
        own = self.sharing.ranks.on_first(lambda: wanted.resolve().parent == self.folder.resolve())
        if own and newest is not None and newest != wanted.name:
            raise not_newest(self.folder, wanted.name, newest)
        if newest is not None:
            self._examine(self.folder / newest)
        return self._take()

    def _newest_whole(self, names: Sequence[str], say: Callable[[str], None]) -> str | None:
        aside: list[tuple[str, str]] = []
        parts: list[CheckpointError] = []
        for name in reversed(names):
            try:
                fault = self._examine(self.folder / name)
            except CheckpointError as error:
                parts.append(error)
                aside.append((name, PART))
                continue
            if fault is None:
                for part in parts:
                    say(passed_over(part, name))
                for line in chain(*self.sharing.on_leaders(partial(set_aside, self.folder, aside, name))):
                    say(line)
                return name
            say(f"{fault}; trying the one before it")
            unhealthy = any(held.files and not held.healthy for held in self._found)
            aside.append((name, UNHEALTHY if unhealthy else ".damaged"))
        if parts:
            raise parts[0]
        if names:
            raise CheckpointError(
                f"none of the {len(names)} checkpoints in {self.folder} is whole and healthy on the machines of this "
                "run together: start it on those that wrote one, restore one from a copy, or start over with another "
                "--run"
            )
        return None

    def _examine(self, path: Path) -> str | None:
        """What keeps a run from going on from a checkpoint, all homes together; None: nothing.

        CheckpointError where machines are missing that hold parts of it: the others cannot tell whether it is whole.
        """
        self._found = self.sharing.on_leaders(lambda: _look(path))
        self._examined = path
        saves = {digest(held.every): held for held in self._found if held.every}
        reason, absent = None, 0
        for save, held in saves.items():
            there = set(chain(*(one.files for one in self._found if digest(one.every) == save)))
            lacking = sorted(held.every.keys() - there)
            if not lacking:
                self._found = [one if digest(one.every) == save else _Held() for one in self._found]
                return held.fault
            absent = max(absent, held.homes - len(self.sharing.homes))
            count = f"{len(lacking)} of {len(held.every)} files"
            reason = f"{path}: all machines together lack {count}, {lacking[0]} among them"
        for home, held in enumerate(self._found):
            if held.fault is not None:
                return f"on {self.sharing.host(home)}: {held.fault}"
        if absent > 0:
            raise CheckpointError(f"{reason}; {absent} more had parts of it: {JOIN}")
        return reason

    # ---------------------------------------------------------------- fetching it

    def _take(self) -> Path:
        return self._fetch([_read_by(ranks, self._every) for ranks in self.sharing.homes])

    def take(self, name: str) -> tuple[Path | None, str | None]:
        """One of these checkpoints by its name, at this home, or what keeps a run from going on from it."""
        self._fetched = [set() for _ in self.sharing.homes]
        try:
            fault = self._examine(self.folder / name)
        except CheckpointError as error:
            fault = str(error)
        return (self._take(), None) if fault is None else (None, fault)

    def take_all(self) -> Path:
        """The chosen checkpoint at this home, now with the engine's files of all ranks: they are to be spread anew."""
        return self._fetch([[name for name in self._every if name.startswith("engine/")]] * len(self.sharing.homes))

    @property
    def _every(self) -> Files:
        return next(held.every for held in self._found if held.every)

    def _fetch(self, wanted: Sequence[Iterable[str]]) -> Path:
        """Bring to each home what it lacks of the files it wants; the folder to read at this one.

        OSError, on all ranks, where that fails.
        """
        homes, files = self.sharing.homes, []
        for home, names in enumerate(wanted):
            for name in sorted(set(names) - self._found[home].files.keys() - self._fetched[home]):
                source = next(number for number, held in enumerate(self._found) if name in held.files)
                record = self._found[source].files[name]
                files.append(Carried(name, record["bytes"], record["sha256"], homes[source][0], homes[home][0]))
                self._fetched[home].add(name)
        fetches, own = bool(self._fetched[self.sharing.home]), self._found[self.sharing.home].files
        self.sharing.on_leaders(lambda: _link(own, self._examined, self._scratch) if fetches else None)
        self.courier.carry(files, self._examined, self._scratch)
        return self._scratch if fetches else self._examined

    @property
    def _scratch(self) -> Path:
        return self.folder / f"{self._examined.name}{FETCHED}"

    def clear(self) -> None:
        """Remove what was fetched, when all ranks have read it."""
        self.sharing.ranks.barrier()
        self.sharing.on_leaders(lambda: shutil.rmtree(self._scratch, ignore_errors=True))

    # ---------------------------------------------------------------- saving one

    def settle(self, folder: Path, written: Sequence[Files]) -> dict[str, Any] | None:
        """The manifest of what stays at this home of a checkpoint in `folder`; None where nothing does.

        `written`: the files that each rank wrote to its disk and hashed. Where all is to be gathered, it has been when
        this returns. OSError, on all ranks, where that failed. Waits for other ranks in a group of its own alone, so a
        thread can call it.
        """
        by_home = [dict(chain(*(written[rank].items() for rank in ranks))) for ranks in self.sharing.homes]
        every: dict[str, Any] = {}
        for home, files in enumerate(by_home):
            for name, record in files.items():
                if every.setdefault(name, record) != record:
                    raise OSError(f"{folder / name} is another one on {self.sharing.host(home)}: the ranks differ")
        every = dict(sorted(every.items()))
        if not self.gathers:
            hosts = [self.sharing.host(home) for home in range(len(by_home))]
            return part_manifest(by_home[self.sharing.home], every, self.sharing.home, hosts)
        first, *others = (ranks[0] for ranks in self.sharing.homes)
        carried = [
            Carried(name, record["bytes"], record["sha256"], sender, first)
            for sender, own in zip(others, by_home[1:], strict=True)
            for name, record in sorted(own.items())
            if name not in by_home[0]
        ]
        self.courier.carry(carried, folder, folder)
        return manifest_of(every) if self.sharing.home == 0 else None


def _read_by(ranks: Sequence[int], names: Iterable[str]) -> list[str]:
    """Of a checkpoint's files those that these ranks read of any: what they wrote themselves, and what tells of it."""
    own = {"state.json", *(f"rng-{rank:05d}.pt" for rank in ranks)}
    return [name for name in names if name in own or (name.startswith("engine/") and is_read_by(ranks, name[7:]))]


def _link(names: Iterable[str], path: Path, scratch: Path) -> None:
    """Have the files of a part stand in another folder too."""
    for name in names:
        link = scratch / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to((path / name).resolve())
