"""What each rank leaves behind in RUN/receipts: how it ended, and how to go on.

A launcher's exit code says little (DeepSpeed's loses those of signals, and kills what takes long): a run has ended well
where every rank of its last attempt says so here. A rank that was killed leaves nothing.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pretrain.run_directory import RunDirectory, now, write_text

if TYPE_CHECKING:
    from pretrain.sharing import Sharing
    from pretrain.state import TrainState

MET_WHILE_IT_RAN = "met when the attempt had begun"  # a note on an OSError: nothing that was given is to blame


def command_that_goes_on(
    recipe: Path,
    run: Path,
    local_ranks: int | None,
    overrides: Sequence[str],
    resume: str,
    changes: Sequence[str],
    limits: Mapping[str, float | None],
    *,
    force: bool,
) -> str:
    """The command line that resumes a run. `local_ranks`: how many a launcher has started, all on this machine."""
    starter = ["pretrain", "run", recipe] if local_ranks is None else ["launch", "run", recipe, "--ranks", local_ranks]
    words = [*starter, "--run", run]
    words += [word for override in overrides for word in ("--set", override)]
    words += ["--resume", resume] if resume not in ("auto", "never") else []  # never would refuse what it has saved
    words += [word for name in changes for word in ("--change", name)]
    words += ["--force"] if force else []
    words += [word for option, given in limits.items() if given is not None for word in (option, f"{given:g}")]
    return shlex.join(["python", "-m", *map(str, words)])


@dataclass
class Receipt:
    """The receipt of one rank of one attempt."""

    directory: RunDirectory
    attempt: int
    rank: int
    world_size: int
    resume: str  # the command that goes on
    state: TrainState | None = None  # what the run counts; the loop changes it
    save_seconds: float | None = None  # of the last checkpoint

    def write(self, state: Literal["stopped", "finished", "failed"], reason: str | None) -> None:
        """`reason`: what it was stopped by, or what failed. OSError where it cannot be written."""
        record = {
            "attempt": self.attempt,
            "rank": self.rank,
            "world_size": self.world_size,
            "state": state,
            "global_step": None if self.state is None else self.state.global_step,
            "reason": reason,
            "resume": None if state == "finished" else self.resume,
            "save_seconds": self.save_seconds,
            "at": now(),
        }
        self.directory.receipts.mkdir(exist_ok=True)
        write_text(self.directory.receipt(self.rank), json.dumps(record) + "\n")

    def bring(self, sharing: Sharing) -> None:
        """Have the first rank's run directory hold the receipts of all ranks too. All ranks together, behind `write`.

        OSError where one cannot be read or written.
        """
        if sharing.is_one:
            return
        own = self.directory.receipt(self.rank).read_text()
        for rank, text in enumerate(sharing.ranks.gather(own)):
            if self.rank == 0 and rank not in sharing.members:
                write_text(self.directory.receipt(rank), text)

    @contextmanager
    def of_failure(self) -> Iterator[None]:
        """Leave a receipt of what is raised inside."""
        try:
            yield
        except BaseException as error:
            with suppress(OSError):  # a full disk, most likely: then what is raised has said so
                self.write("failed", " ".join(f"{type(error).__name__}: {error}".split()))
            if isinstance(error, OSError):
                error.add_note(MET_WHILE_IT_RAN)
            raise
