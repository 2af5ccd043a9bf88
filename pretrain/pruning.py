"""What follows a save, well or not: `latest`, `best`, and removing the checkpoints that nothing keeps.

In all homes of a run alike (see sharing.py); mostly there is one.

Which stay is decided over what all homes hold: retention (see retention.py) is asked about those that are whole in all
homes together, whichever of them has what. So no home removes what another needs for a whole one, and a home that has
something which the others have not, or have no more, does not have it for ever. Nothing is hashed here: whole is what
its manifests say.

A checkpoint that cannot be read stays: it may be the disk alone, and if it is not, a person has to look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

from pretrain.checkpoint import (
    BEST,
    LATEST,
    digest,
    have_named,
    list_checkpoints,
    measured_at,
    read_json,
    read_manifest,
    remove,
    saved,
    step_of,
)
from pretrain.parts import every_file
from pretrain.retention import Retention, Saved, best_first
from pretrain.run_directory import CheckpointError
from pretrain.sharing import Sharing
from pretrain.writing import why

T = TypeVar("T")


def tidy(
    folder: Path, retention: Retention, sharing: Sharing | None, named: str | None, taken_back: str | None = None
) -> list[str]:
    """Have `latest` name a checkpoint and `best` the best of those that stay, and remove what nothing keeps; says what
    of it could not be done.

    All ranks together where there are several homes, each of which then does it (`latest` where a home has any of that
    checkpoint). With one (`sharing` None), one rank alone, in a thread maybe. `taken_back`: removed first, since
    another home could not commit it.
    """

    def on_leaders(function: Callable[[], T]) -> list[T]:
        return [function()] if sharing is None else sharing.on_leaders(function)

    def look() -> tuple[list[str], dict[str, Holding | None]]:
        return prune(folder, [] if taken_back is None else [taken_back]), held(folder)

    by_home: list[tuple[int, list[str]]] = []
    going: list[str] = []
    best: str | None = None
    try:
        looks = on_leaders(look)
        by_home += enumerate(faults for faults, _ in looks)
        homes = [holdings for _, holdings in looks]
        going = superfluous(homes, retention)
        best = best_of_homes(homes, going)
    except OSError as error:
        by_home.append((0, [f"older checkpoints were not looked at: {error}"]))
    by_home += enumerate(on_leaders(lambda: _follow(folder, {LATEST: named, BEST: best}, going)))
    return [
        fault if sharing is None or home == 0 else f"on {sharing.host(home)}: {fault}"
        for home, faults in by_home
        for fault in faults
    ]


def _follow(folder: Path, marks: Mapping[str, str | None], going: Sequence[str]) -> list[str]:
    """In one home: `latest` and `best`, then what is to be removed, however the first went."""
    unnamed = _name(folder, marks)
    faults = prune(folder, going)
    if unnamed or going:  # there may be room for it now; or what it named is gone, and no other is here
        unnamed = _name(folder, marks)
    return [*unnamed, *faults]


def _name(folder: Path, marks: Mapping[str, str | None]) -> list[str]:
    """Have each mark name its checkpoint if this home has any of it; in any case none that is gone. Why not, if not."""
    faults = []
    for mark, named in marks.items():
        file = folder / mark
        try:
            told = file.read_text(errors="replace").strip() if file.exists() else None
            if named is not None and (folder / named).exists():
                have_named(folder, mark, named)
            elif told and not (folder / told).exists():
                have_named(folder, mark, None)
        except OSError as error:
            faults.append(why(error, file))
    return faults


@dataclass(frozen=True)
class Holding:
    """What a home holds of a checkpoint."""

    saved: Saved
    save: str  # equal in all parts of one save
    number: int = 0  # of the part, of so many
    parts: int = 1


def held(folder: Path) -> dict[str, Holding | None]:
    """What lies in a home's folder, by name; None: it cannot be read. OSError where the folder cannot be."""
    return {path.name: _look(path) for path in list_checkpoints(folder)}


def _look(path: Path) -> Holding | None:
    try:
        manifest = read_manifest(path)
        read_json(path / "state.json")
        measured_at(path)
    except CheckpointError:
        return None
    save, part = digest(every_file(manifest)), manifest.get("part")
    if part is None:
        return Holding(saved(path), save)
    return Holding(saved(path), save, part["number"], len(part["hosts"]))


def superfluous(homes: Sequence[Mapping[str, Holding | None]], retention: Retention) -> list[str]:
    """The names of checkpoints that nothing keeps, oldest first, of what each home holds.

    Those that all homes together lack files of count for nothing: they keep no whole one out.
    """
    whole, others = _known(homes)
    reasons = retention.reasons([*whole.values()])
    reasons_with_others = retention.reasons([*whole.values(), *others.values()])
    going = [
        (one.step, name)
        for name, one in {**whole, **others}.items()
        if not reasons.get(one.step) and not reasons_with_others[one.step]
    ]
    return [name for _, name in sorted(going)]


def best_of_homes(homes: Sequence[Mapping[str, Holding | None]], going: Sequence[str]) -> str | None:
    """The name of the checkpoint with the lowest held-out loss, of those whole in all homes together that stay."""
    whole, _ = _known(homes)
    names = {one.step: name for name, one in whole.items() if name not in going}
    ranked = best_first([whole[name] for name in names.values()])
    return names[ranked[0].step] if ranked else None


def _known(homes: Sequence[Mapping[str, Holding | None]]) -> tuple[dict[str, Saved], dict[str, Saved]]:
    """Of what all homes can read, what is whole in all together, and the rest."""
    whole: dict[str, Saved] = {}
    others: dict[str, Saved] = {}
    for name in {*chain(*homes)}:
        holdings = [home[name] for home in homes if name in home]
        known = [one for one in holdings if one is not None]
        if len(known) < len(holdings):
            continue
        one_save = next(filter(_is_whole, _by_save(known)), None)
        if one_save is None:
            others[name] = Saved(step_of(Path(name)), healthy=False)
        else:
            score = next((one.saved.score for one in one_save if one.saved.score is not None), None)
            whole[name] = Saved(step_of(Path(name)), score, all(one.saved.healthy for one in one_save))
    return whole, others


def _by_save(holdings: Iterable[Holding]) -> list[list[Holding]]:
    saves: dict[str, list[Holding]] = {}
    for one in holdings:
        saves.setdefault(one.save, []).append(one)
    return list(saves.values())


def _is_whole(one_save: Sequence[Holding]) -> bool:
    """Whether parts of one save are all of it. A joined one and parts of it may lie side by side."""
    return any(
        {one.number for one in one_save if one.parts == parts} == {*range(parts)}
        for parts in {one.parts for one in one_save}
    )


def prune(folder: Path, names: Iterable[str]) -> list[str]:
    """Remove these of a home's checkpoints, as far as it has them; says what could not be removed, and why."""
    faults = []
    for name in names:
        try:
            if (folder / name).exists():
                remove(folder / name)
        except OSError as error:
            faults.append(f"{folder / name} could not be removed: {error.strerror or error}")
    return faults
