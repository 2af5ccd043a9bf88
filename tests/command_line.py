"""A command line of ours as a user runs it, in a process of its own, without the seconds that its imports take.

The process is one of the server's in tests/ranks.py, which has torch and deepspeed in memory: what `python -m PACKAGE`
runs is run there under the same name, with its own arguments, environment, working directory and descriptors. What
importing itself does or says is not seen so; the tests of that start Python anew.
"""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.ranks import root, server


def run_command(
    package: str, *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python -m package arguments`, stdin empty, as subprocess.run tells of it; `environment` replaces this one's."""
    argv = [package, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder, "stdout"), Path(folder, "stderr")
        process = server.Process(
            target=_command_main,
            args=(argv, cwd or root(), dict(os.environ if environment is None else environment), outputs),
        )
        process.start()
        process.join()
        assert process.exitcode is not None
        said = [output.read_text(encoding="utf-8") for output in outputs]
    return subprocess.CompletedProcess(argv, process.exitcode, *said)


def _command_main(argv: list[str], cwd: Path, environment: Mapping[str, str], outputs: tuple[Path, Path]) -> None:
    descriptors = [os.open(os.devnull, os.O_RDONLY)]
    descriptors += [os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for output in outputs]
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(io.FileIO(number, "wb", closefd=False)), encoding="utf-8")
        for number in (1, 2)
    )
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
