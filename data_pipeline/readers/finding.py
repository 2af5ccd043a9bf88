"""The corpus files behind paths, folders, patterns, addresses and names of data sets, in one fixed order."""

from __future__ import annotations

import glob
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.readers.huggingface import find_dataset, is_dataset
from data_pipeline.readers.items import CorpusError
from data_pipeline.readers.places import (
    KNOWN,
    STDIN,
    FileFacts,
    Found,
    Piece,
    Place,
    TxtDocuments,
    file_kind,
    is_address,
    remote,
    shown,
)


@dataclass(frozen=True)
class Listing:
    """The files found for an input, in reading order, and the names of those passed over because of their kind."""

    files: list[Found]
    ignored: list[str]


def find_files(
    inputs: Place | Iterable[Place], *, txt_documents: TxtDocuments = "file", stdin: Found | None = None
) -> Listing:
    """The corpus files behind files, folders (searched to the bottom, hidden files left out), glob patterns, addresses
    that fsspec opens (files, folders and patterns there too) and `hf:` names of data sets; `-` stands for `stdin`.

    Inputs keep their order; the files of one folder or pattern are sorted by name, byte by byte; a file named twice
    counts once. CorpusError: what matches nothing, a file of unknown kind, a folder without any.
    """
    files: dict[Place, Found] = {}
    ignored: list[str] = []
    for place in [inputs] if isinstance(inputs, Path | str) else inputs:
        if place == STDIN:
            if stdin is None:
                raise CorpusError("standard input cannot be read here; name a file")
            files.setdefault(place, stdin)
            continue
        pieces, others = _expand(place)
        for piece in pieces:
            same = piece.path.resolve() if isinstance(piece.path, Path) else piece.path
            if same not in files:
                facts = FileFacts.of(piece, listed=True)
                files[same] = Found(replace(piece, txt_documents=txt_documents), facts)
        ignored += others
    if not files:
        raise CorpusError("no input was given")
    return Listing(list(files.values()), ignored)


def _expand(place: Place) -> tuple[list[Piece], list[str]]:
    if is_dataset(place):
        return find_dataset(str(place)), []
    if isinstance(place, str) and is_address(place):
        return _find_remote(place)
    paths, others = _find_local(Path(place))
    pieces = [Piece(path, kind) for path in paths if (kind := file_kind(path))]
    return pieces, [shown(path) for path in others if path.exists()]


# ---------------------------------------------------------------- this machine


def _find_local(path: Path) -> tuple[list[Path], list[Path]]:
    """Corpus files and others."""
    if path.is_dir():
        inside = [
            str(Path(folder, name))
            for folder, folders, names in os.walk(path, onerror=_refuse_unreadable)
            if not _drop_hidden(folders)
            for name in names
            if not name.startswith(".")
        ]
        known, others = _sort_folder(inside, lambda name: Path(name).read_bytes())
        files = [file for file in map(Path, known) if file.is_file()]
        if not files:
            raise CorpusError(f"{shown(path)}: the folder holds no file of a known kind ({KNOWN})")
        return files, [Path(name) for name in others]
    if path.exists():
        if not path.is_file():
            raise CorpusError(f"{shown(path)}: not a regular file")
        if file_kind(path) is None:
            raise CorpusError(f"{shown(path)}: unknown kind of file; known are {KNOWN}")
        return [path], []
    if any(character in str(path) for character in "*?["):
        matches = sorted((Path(name) for name in glob.glob(str(path), recursive=True)), key=os.fsencode)  # noqa: PTH207
        files = [match for match in matches if match.is_file() and file_kind(match)]
        if not files:
            raise CorpusError(f"{shown(path)}: the pattern matches no file of a known kind ({KNOWN})")
        return files, [match for match in matches if match.is_file() and not file_kind(match)]
    raise CorpusError(f"{shown(path)}: no such file or folder")


def _drop_hidden(folders: list[str]) -> bool:
    """Keep os.walk out of hidden folders, by changing its list in place; always False."""
    folders[:] = [name for name in folders if not name.startswith(".")]
    return False


def _refuse_unreadable(error: OSError) -> None:
    raise CorpusError(f"{shown(str(error.filename))}: {error.strerror}")


# ---------------------------------------------------------------- other places


def _find_remote(address: str) -> tuple[list[Piece], list[str]]:
    """Corpus files and others behind an address; a `?` is no pattern there, since queries have one."""
    if "::" in address:
        raise CorpusError(f"{shown(address)}: addresses within addresses are not read; unpack it first")
    with remote(address) as (filesystem, name):
        filesystem.invalidate_cache()
        if any(character in name for character in "*["):
            fixed = re.split(r"[*[]", name, maxsplit=1)[0].rpartition("/")[0]
            visible = _visible(filesystem.glob(name), fixed)
            matches = sorted((one for one in visible if filesystem.isfile(one)), key=os.fsencode)
            known, others = [one for one in matches if file_kind(one)], [one for one in matches if not file_kind(one)]
            if not known:
                raise CorpusError(f"{shown(address)}: the pattern matches no file of a known kind ({KNOWN})")
        elif kind := file_kind(address):
            if not filesystem.exists(name):
                raise CorpusError(f"{shown(address)}: no such file or folder")
            return [Piece(address, kind)], []
        elif filesystem.isdir(name):
            known, others = _sort_folder(list(_visible(filesystem.find(name), name)), filesystem.cat_file)
            if not known:
                raise CorpusError(f"{shown(address)}: the folder holds no file of a known kind ({KNOWN})")
        elif filesystem.exists(name):
            raise CorpusError(f"{shown(address)}: unknown kind of file; known are {KNOWN}")
        else:
            raise CorpusError(f"{shown(address)}: no such file or folder")
        pieces = [Piece(str(filesystem.unstrip_protocol(one)), kind) for one in known if (kind := file_kind(one))]
        return pieces, [shown(str(filesystem.unstrip_protocol(one))) for one in others]


def _visible(names: Iterable[str], folder: str) -> Iterator[str]:
    return (name for name in names if not any(part.startswith(".") for part in name.removeprefix(folder).split("/")))


# ---------------------------------------------------------------- folders that `datasets` saved


def _sort_folder(names: Iterable[str], read: Callable[[str], bytes]) -> tuple[list[str], list[str]]:
    """The corpus files among all names below a folder, in order, and the others.

    Where `Dataset.save_to_disk` wrote a state.json, it says which .arrow files of its folder are the data and in which
    order; others there are caches of what was once computed from them.
    """
    ordered = sorted(names, key=os.fsencode)
    by_folder: dict[str, list[str]] = defaultdict(list)
    for name in ordered:
        folder, _, base = name.rpartition("/")
        if base == "dataset_dict.json":
            raise CorpusError(
                f"{shown(folder)}: several splits, saved by `datasets`; name one, as {shown(folder)}/train"
            )
        if base == "state.json":
            by_folder[folder] = _saved_shards(name, read(name))
    known, others, done = [], [], set()
    for name in ordered:
        folder = name.rpartition("/")[0]
        if name.endswith(".arrow") and by_folder.get(folder):
            if folder not in done:
                known += by_folder[folder]
                done.add(folder)
            if name not in by_folder[folder]:
                others.append(name)
        else:
            (known if file_kind(name) else others).append(name)
    if missing := [name for shards in by_folder.values() for name in shards if name not in set(ordered)]:
        raise CorpusError(f"{shown(missing[0])}: named in state.json beside it, but not there; fetch the folder again")
    return known, others


def _saved_shards(state_file: str, content: bytes) -> list[str]:
    """The data files that a state.json names; none if it is some other program's."""
    try:
        state: Any = json.loads(content)
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (ValueError, KeyError, TypeError):
        return []
    if any(state.get(key) for key in ("_indices_files", "_indices_data_files")):
        raise CorpusError(f"{shown(state_file)}: the rows are in another order; flatten_indices() and save it again")
    folder = state_file.rpartition("/")[0]
    return [f"{folder}/{name}" for name in names]
