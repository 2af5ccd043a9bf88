"""A tokenizer's folder: which files it holds, and how it is written whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tokenizer.model_file import TokenizerError

MODEL_FILE = "tokenizer.model"
DESCRIPTION_FILE = "description.json"
TRAINING_FILE = "training.md"
FORMAT = "zerohalf-tokenizer"
VERSION = 1

TOKENIZER_FILES = frozenset({MODEL_FILE, DESCRIPTION_FILE, TRAINING_FILE})

_LOCK_SECONDS = 10.0
_FRESH, _RETIRED = "fresh", "retired"  # within a working folder: the new files, and for a moment the old ones


def read_folder(folder: Path) -> dict[str, bytes]:
    """The contents of the tokenizer's files by name. TokenizerError: no such folder, or a file that it needs is
    missing. The training report may be.
    """
    if not folder.is_dir():
        raise TokenizerError(f"{folder}: no such tokenizer folder; make one with `tokenizer train --out {folder}`")
    names = [DESCRIPTION_FILE, MODEL_FILE, *([TRAINING_FILE] if (folder / TRAINING_FILE).exists() else [])]
    return {
        name: read_file(folder / name, f"a tokenizer folder holds {MODEL_FILE} and {DESCRIPTION_FILE}")
        for name in names
    }


def read_file(path: Path, advice: str) -> bytes:
    """The content of a file. TokenizerError, with the advice: it can't be read, or what stands there is no file; a pipe
    would be waited for.
    """
    try:
        if path.exists() and not path.is_file():
            raise TokenizerError(f"{path}: not a file; {advice}")
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror}; {advice}") from error


def parse_description(path: Path, content: bytes) -> dict[str, Any]:
    """The description that stands at `path`. TokenizerError: not JSON, of another format, of a later version."""
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not JSON ({error}); restore or retrain the tokenizer") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise TokenizerError(f"{path}: not the description of a tokenizer (no format {FORMAT!r})")
    if description.get("version") != VERSION:
        raise TokenizerError(
            f"{path}: format version {description.get('version')!r}, this program reads {VERSION!r}; retrain"
        )
    return description


def publish(
    files: Mapping[str, bytes], folder: Path, *, overwrite: bool, replaceable: frozenset[str] = TOKENIZER_FILES
) -> None:
    """Make `folder` hold exactly these files: whole or not at all, whenever the process is killed.

    A folder that exists is replaced only with `overwrite`, and only if it is a tokenizer (see `refuse_occupied`).
    Raises TokenizerError, also when it can't be written.
    """
    with published(folder, overwrite=overwrite, replaceable=replaceable) as fresh:
        for name, content in files.items():
            with (fresh / name).open("xb") as file:
                file.write(content)


@contextmanager
def published(
    folder: Path, *, overwrite: bool, replaceable: frozenset[str] = TOKENIZER_FILES, kind: str = "tokenizer"
) -> Iterator[Path]:
    """`publish` for what is too large to be held in memory: gives an empty folder to write into, which becomes `folder`
    once all in it is on the disk, or goes when anything is raised. A writing that fails with OSError is told as
    TokenizerError.
    """
    with _named_failures(folder):
        final = folder.absolute()
        final.parent.mkdir(parents=True, exist_ok=True)
        with _working_folder(final.parent, final.name) as work:
            refuse_occupied(folder, overwrite=overwrite, replaceable=replaceable, kind=kind)
            fresh = work / _FRESH
            fresh.mkdir()
            yield fresh
            for path in [*fresh.rglob("*"), fresh]:
                _sync(path)
            if not final.exists():
                fresh.rename(final)
            elif not _exchange(fresh, final):
                final.rename(work / _RETIRED)
                try:
                    fresh.rename(final)
                except OSError:
                    (work / _RETIRED).rename(final)
                    raise
            _sync(final.parent)


def refuse_unwritable(folder: Path) -> None:
    """Raise TokenizerError unless `folder` could be published now: what that makes first is made and removed."""
    with _named_failures(folder):
        final = folder.absolute()
        place = next((parent for parent in final.parents if parent.exists()), final)
        with _working_folder(place, final.name) as work:
            (work / _FRESH / final.relative_to(place)).mkdir(parents=True, exist_ok=True)


def refuse_occupied(
    folder: Path, *, overwrite: bool, replaceable: frozenset[str] = TOKENIZER_FILES, kind: str = "tokenizer"
) -> None:
    """Raise TokenizerError unless `folder` is free: absent, empty, or one of its kind (no file but `replaceable` ones)
    that may be overwritten.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise TokenizerError(f"{folder}: exists and is not a folder; choose another --out")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if {entry.name for entry in folder.iterdir()} - replaceable:
        raise TokenizerError(f"{folder}: holds files that are no {kind}'s; choose another --out")
    if not overwrite:
        raise TokenizerError(f"{folder}: holds a {kind} already; choose another --out or pass --overwrite")


@contextmanager
def _named_failures(folder: Path) -> Iterator[None]:
    """What fails within is said of the folder that the user named, not of those that only we know."""
    try:
        yield
    except OSError as error:
        raise TokenizerError(f"{folder}: can't be written ({error.strerror}); choose another --out") from error


@contextmanager
def _working_folder(place: Path, name: str) -> Iterator[Path]:
    """A hidden folder in `place` where `name` is made. While it is there, others wait who want one in that place; so
    whatever is left of other makings of `name` is left by processes that were killed, and removed.
    """
    handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _locked(handle):
            with suppress(OSError):  # what can't be removed does no harm
                _remove_leftovers(place, name)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".partial", dir=place) as work:
            yield Path(work)
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    """Lock a folder. False where the file system has no locks, or something else keeps it locked for longer than any
    tokenizer takes: then leftovers stay.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        except OSError:
            return False


def _remove_leftovers(place: Path, name: str) -> None:
    for left in place.iterdir():
        if not re.fullmatch(rf"\.{re.escape(name)}\.[a-z0-9_]{{8}}\.partial", left.name):
            continue
        if left.is_symlink() or not left.is_dir():
            continue
        if {entry.name for entry in left.iterdir()} <= {_FRESH, _RETIRED}:
            if (left / _RETIRED).exists() and not (place / name).exists():  # killed between two renames
                (left / _RETIRED).rename(place / name)
            shutil.rmtree(left)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders trade places in one step (Linux's renameat2), so that neither name is ever without one. False:
    the system or the file system can't.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code))


def _sync(path: Path) -> None:
    """Of a file its content, of a folder its names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
