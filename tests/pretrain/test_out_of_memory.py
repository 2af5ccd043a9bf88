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

from pretrain.__main__ import main
from pretrain.checkpoint import Checkpoints, list_checkpoints
from pretrain.config import parse_recipe, to_toml
from pretrain.out_of_memory import asked_bytes, is_out_of_memory
from pretrain.runtime import Ranks
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
    save, (_, hard) = Checkpoints.save, resource.getrlimit(resource.RLIMIT_DATA)

    def save_and_limit(*saved: Any) -> Any:
        path = save(*saved)
        if room_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + room_bytes, hard))
        return path

    said = io.StringIO()
    with (
        mock.patch.object(Checkpoints, "save", save_and_limit),
        mock.patch.object(sys, "argv", ["pretrain", *arguments]),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    return (2 if ended.value.code == 2 else int(ended.value.code or 0)), said.getvalue()


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


@pytest.mark.parametrize(
    "error, asked",
    [
        (MemoryError(), None),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total of"), 5 * 2**29),
        (RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), 4096),
        (RuntimeError("unable to mmap 123 bytes from file <x>: Cannot allocate memory (12)"), 123),
        (RuntimeError("CUDA error: out of memory"), None),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), None),
    ],
)
def test_what_says_that_memory_ran_out(error: Exception, asked: int | None) -> None:
    later = ValueError("a step failed")
    later.__cause__ = error
    for one in (error, later):
        assert is_out_of_memory(one)
        assert asked_bytes(one) == asked


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), OSError(errno.ENOSPC, "No space left"), KeyError("x")]
)
def test_what_does_not(error: Exception) -> None:
    assert not is_out_of_memory(error)
