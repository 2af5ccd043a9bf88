"""What the compiled core is built from, and the mark that a build carries of it.

setup.py runs this file by its path, before anything is installed: only the standard library here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

UNITS = ("core.cpp", "model.cpp")
HEADERS = ("cache.h", "core.h", "encoder.h", "merge.h", "model.h", "segments.h", "text.h")
COMPILE_ARGS = ("-std=c++17", "-O3", "-fvisibility=hidden")


def build_id(folder: Path) -> str:
    """Hash of the sources in `folder`: a core of another build is stale. Raises OSError when one can't be read."""
    digest = hashlib.sha256()
    for name in (*UNITS, *HEADERS):
        content = (folder / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
