"""Names of files that stay within a folder, whoever wrote them and on whatever machine they are used."""

from __future__ import annotations

from pathlib import Path


def strays(name: str, folder: Path) -> bool:
    """Whether a file's name leads, or may lead, out of a folder.

    A name is good only if it is on every disk: it has no "..", "." or empty part, by which a link would make it one
    place here and another one there, and nothing on its way in `folder` is a link.
    """
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        return True
    place = folder
    for part in parts:
        place /= part
        if place.is_symlink():
            return True
    return False
