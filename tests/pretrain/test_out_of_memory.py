"""Runs that really meet the end of their memory: ranks whose data segment the kernel limits (RLIMIT_DATA)."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pretrain.subject
from pretrain.__main__ import main
from pretrain.checkpoint import list_checkpoints, load_model
from pretrain.config import parse_recipe, to_toml
from pretrain.engine import TrainingEngine
from pretrain.out_of_memory import RAISE_LIMIT, asked_bytes, explain_reading, is_out_of_memory
from pretrain.runtime import Ranks
from pretrain.saving import Checkpoints
from tests.ranks import run_ranks

MB = 10**6


def data_bytes() -> int:
    """What RLIMIT_DATA counts of this process."""
    (kilobytes,) = re.findall(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kilobytes) * 1024


def command_case(ranks: Ranks, arguments: list[str], room_bytes: int | None) -> tuple[int, str]:
    """`python -m pretrain ARGUMENTS` on this rank: exit code and stderr.

    Once the first checkpoint is saved, it may take only so much more memory than it has by then.
    """
    save = Checkpoints.save
    with mock.patch.object(Checkpoints, "save", save if room_bytes is None else limited(save, room_bytes)):
        return ended_with(arguments)


def ended_with(arguments: list[str]) -> tuple[int, str]:
    """`python -m pretrain ARGUMENTS` in this process: exit code and stderr."""
    said, (_, hard) = io.StringIO(), resource.getrlimit(resource.RLIMIT_DATA)
    with (
        mock.patch.object(sys, "argv", ["pretrain", *arguments]),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    return int(ended.value.code or 0), said.getvalue()


def limited(function: Callable[..., Any], room_bytes: int, *, before: bool = False) -> Callable[..., Any]:
    """`function`, from the end of which, or from `before` it, the process may take only so much more memory."""

    def limit() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + room_bytes, hard))

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if before:
            limit()
        result = function(*arguments, **keywords)
        if not before:
            limit()
        return result

    return wrapped


def reading_case(ranks: Ranks, run: str) -> dict[str, tuple[int, str]]:
    """evaluate and generate with room for the model and little more."""
    said = {}
    for verb, arguments in (
        ("evaluate", ["--batch-size", "16"]),
        ("generate", [word for _ in range(16) for word in ("--prompt", "a b " * 40)]),
    ):
        with mock.patch.object(pretrain.subject, "load_model", limited(load_model, MB)):
            said[verb] = ended_with([verb, run, *arguments])
    return said


def engine_case(ranks: Ranks, arguments: list[str]) -> tuple[int, str]:
    """A run whose memory ends where the engine begins."""
    begin = limited(TrainingEngine.__init__, 2 * MB, before=True)
    with mock.patch.object(TrainingEngine, "__init__", begin):
        return ended_with(arguments)


def test_a_run_out_of_memory_says_so_and_goes_on_after_the_change_it_names(
    tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The activations of a feed-forward are of 40 MB each, so malloc gives them back to the system behind a step."""
    tables = tiny_recipe(
        model={"n_layers": 1, "seq_len": 256, "d_ff": 5120},
        batch={"global_batch_size": 16, "micro_batch_size": 8},
        precision={"compute": "fp32"},
        memory={"activation_checkpointing": "none"},
        schedule={"max_steps": 2, "warmup_steps": 0},
        evaluation={"every_steps": 2, "max_tokens": 256},
        checkpoint={"every_steps": 1},
    )
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(to_toml(parse_recipe(tables)))
    arguments = ["run", str(recipe), "--run", str(run)]
    failed = run_ranks(2, command_case, arguments, 20 * MB)
    changes = set()
    for rank, (code, said) in enumerate(failed):
        (line,) = [one for one in said.splitlines() if one.startswith("error: ")]
        assert (code, "Traceback" in said) == (2, False), said
        assert line.startswith("error: out of memory when " if rank == 0 else "error: rank 1: out of memory when ")
        told = re.search(
            r"when \d+ MB more was asked for; held were \d+ MB in live tensors of \d+ MB resident, predicted were "
            r"[\d.]+ [MG]B at most, in (?:forward|backward): set (\S+) = (\S+) \(predicted [\d.]+ [MG]B\); "
            r"the same command then resumes from step-00000001$",
            line,
        )
        assert told is not None, line
        changes.add("=".join(told.groups()))
    (change,) = changes
    for code, said in run_ranks(2, command_case, [*arguments, "--set", change], None):
        assert code == 0, said
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000001", "step-00000002"]
    said_by = run_ranks(1, reading_case, str(run))[0]
    for verb, remedy in (
        ("evaluate", "set --batch-size below 16"),
        ("generate", "give fewer or shorter prompts, or set --max-new-tokens lower"),
    ):
        code, line = said_by[verb]
        assert code == 2, line
        held = r"held were (?:\d+ MB in live tensors of )?\d+ MB resident"
        assert re.fullmatch(rf"error: out of memory when \d+ MB more was asked for; {held}: {remedy}\n", line), line


def test_a_thread_that_cannot_start_is_the_end_of_memory(
    tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Its stack is memory: the process groups that the engine opens have threads."""
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(to_toml(parse_recipe(tiny_recipe())))
    ((code, said),) = run_ranks(1, engine_case, ["run", str(recipe), "--run", str(run)])
    assert code == 2, said
    (line,) = [one for one in said.splitlines() if one.startswith("error: ")]
    assert "Traceback" not in said
    assert line.startswith("error: out of memory for one more thread; held were ")
    assert line.endswith(f": {RAISE_LIMIT}; the same command then begins anew, no checkpoint had been written")


def test_what_does_not_fit_is_refused_before_the_ranks_meet(
    tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Terabytes on any machine; both ranks come to it by themselves, and one line is said."""
    tables = tiny_recipe(
        model={"d_model": 65536, "d_ff": 2**20}, data={"path": "nowhere"}, memory={"activation_checkpointing": "none"}
    )
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(to_toml(parse_recipe(tables)))
    arguments = ["run", str(recipe), "--run", str(run)]
    (first, said), second = run_ranks(2, command_case, arguments, None)
    assert first == 2
    assert second == (2, "")
    assert re.fullmatch(
        rf"error: {recipe} does not fit: a rank needs [\d.,]+ TB \(the predicted peak .*\) and has [\d.]+ GB "
        r"\(2 ranks share [\d.]+ GB .*\): even with .* it needs [\d.,]+ TB: use a machine with more memory, or go on "
        r"with --force\n",
        said,
    ), said
    ((code, said),) = run_ranks(1, command_case, [*arguments, "--force"], None)
    warning, error = said.splitlines()
    assert warning.startswith(f"warning: {recipe} does not fit: ")
    assert "nowhere" in error  # it went on to the data
    assert code == 2
    assert not run.exists()


def test_the_line_needs_no_memory_to_count_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing them takes some megabytes itself."""

    def list_them(device: torch.device) -> int:
        raise MemoryError

    monkeypatch.setattr("pretrain.out_of_memory.live_bytes", list_them)
    line = explain_reading(MemoryError(), "read less", torch.device("cpu"))
    assert re.fullmatch(r"out of memory; held were [\d.]+ [MG]B resident: read less", line)


@pytest.mark.parametrize(
    "error, asked",
    [
        (MemoryError(), None),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total of"), 5 * 2**29),
        (RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), 4096),
        (RuntimeError("unable to mmap 123 bytes from file <x>: Cannot allocate memory (12)"), 123),
        (RuntimeError("CUDA error: out of memory"), None),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), None),
        (RuntimeError("Resource temporarily unavailable"), None),
        (RuntimeError("can't start new thread"), None),
    ],
)
def test_what_says_that_memory_ran_out(error: Exception, asked: int | None) -> None:
    later = ValueError("a step failed")
    later.__cause__ = error
    for one in (error, later):
        assert is_out_of_memory(one)
        assert asked_bytes(one) == asked


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes differ"),
        RuntimeError("[gloo/transport] connect to 10.0.0.2: Resource temporarily unavailable"),
        OSError(errno.ENOSPC, "No space left"),
        BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
        KeyError("x"),
    ],
)
def test_what_does_not(error: Exception) -> None:
    assert not is_out_of_memory(error)
