"""A tokenizer's folder: which files it holds, and how it is written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizer.model_file import TokenizerError

MODEL_FILE = "tokenizer.model"
DESCRIPTION_FILE = "description.json"
TRAINING_FILE = "training.md"
FORMAT = "zerohalf-tokenizer"
VERSION = 1

TOKENIZER_FILES = frozenset({MODEL_FILE, DESCRIPTION_FILE, TRAINING_FILE})


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
    """
    refuse_occupied(folder, overwrite=overwrite, replaceable=replaceable)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # One hidden working folder beside the target holds the new files, and for a moment the old ones.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent) as work:
        fresh, retired = Path(work, "fresh"), Path(work, "retired")
        fresh.mkdir()
        for name, content in files.items():
            with (fresh / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        _sync_folder(fresh)
        if folder.exists():
            folder.rename(retired)
        try:
            fresh.rename(folder)
        except OSError:
            if retired.exists():
                retired.rename(folder)
            raise
        _sync_folder(folder.parent)


def refuse_occupied(folder: Path, *, overwrite: bool, replaceable: frozenset[str] = TOKENIZER_FILES) -> None:
    """Raise TokenizerError unless `folder` is free: absent, empty, or a tokenizer (no file but `replaceable` ones) that
    may be overwritten.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise TokenizerError(f"{folder}: exists and is not a folder; choose another --out")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if {entry.name for entry in folder.iterdir()} - replaceable:
        raise TokenizerError(f"{folder}: holds files that are no tokenizer's; choose another --out")
    if not overwrite:
        raise TokenizerError(f"{folder}: holds a tokenizer already; choose another --out or pass --overwrite")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
