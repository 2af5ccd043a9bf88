"""What is compiled of the project: the encoder and a hash. All else of the build stands in pyproject.toml.

Both extensions are optional: without a C++ compiler the installation says so in a warning and succeeds; SentencePiece
encodes then, and hashlib hashes.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("tokenizer", "fastbpe")
build = runpy.run_path(str(Path(__file__).parent / FOLDER / "build.py"))

setup(
    ext_modules=[
        Extension(
            "tokenizer.fastbpe._core",
            sources=[str(FOLDER / name) for name in build["UNITS"]],
            depends=[str(FOLDER / name) for name in ("build.py", *build["HEADERS"])],
            define_macros=[("FASTBPE_BUILD_ID", f'"{build["build_id"](Path(__file__).parent / FOLDER)}"')],
            extra_compile_args=list(build["COMPILE_ARGS"]),
            language="c++",
            optional=True,
        ),
        Extension(
            "data_pipeline._blake2b",
            sources=[str(Path("data_pipeline", "blake2b.cpp"))],
            extra_compile_args=[*build["COMPILE_ARGS"], "-Wno-psabi"],
            language="c++",
            optional=True,
        ),
    ]
)
