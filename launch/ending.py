"""How a run has ended: what its ranks left behind, what their keepers saw, and the one line that tells of it.

The launcher's own exit code is not the truth: DeepSpeed's runner passes on positive codes only, so a run whose child
was killed by a signal can end as 0. What counts are the receipts that every rank leaves in the run directory, and the
codes that the ranks' keepers tell. A keeper tells what its rank's receipt says, too: that counts where the rank is on
another machine and its receipt is not to be seen from here. An exit code of 0 alone never counts as a success.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import records
from launch.command import Launch
from launch.errors import LaunchError
from launch.hints import RESUMES, hint, last_words, only_lost, tells_why
from launch.lifelines import WELL, Known
from launch.remote import is_here

FAILED = 1
BAD_INPUT = 2


@dataclass(frozen=True)
class End:
    """What is known of a run's end."""

    code: int  # of the launcher
    began: bool  # a new attempt stands in the run directory
    asked: int  # how often it was asked to stop
    receipts: Mapping[int, Mapping[str, Any]]  # of the new attempt, by rank
    killer: str | None = None  # the kernel ended a process for want of memory meanwhile
    known: Mapping[int, Known] = field(default_factory=dict)  # what keepers told, by rank
    launcher_lost: bool = False  # it ended and left ranks behind, which were then asked to stop

    def verdict(self, launch: Launch, status: Mapping[str, Any]) -> int:
        """The exit code: 0 if every rank says that it stopped or finished, else the first failure's, with a line.

        A run that was asked to stop before it began, and did not begin, is 0 as well: there is nothing to resume.
        """
        states = {rank: receipt.get("state") for rank, receipt in self.receipts.items()}
        states |= {
            rank: one.state
            for rank, one in self.known.items()
            if rank not in states and one.code == 0 and one.attempt is not None and out_of_sight(launch, rank)
        }
        well = {rank for rank, state in states.items() if state in WELL}
        if (
            self.began
            and well >= set(launch.own_ranks)
            and (not self.launcher_lost or all(states[rank] == "finished" for rank in well))
        ):
            return 0
        if not self.began and self.asked == 1:
            print(f"run {launch.run_directory} stopped before it began: nothing was changed", file=sys.stderr)
            return 0
        if self.launcher_lost:
            return self._tell_of_launcher(launch, status, saved=well >= set(launch.own_ranks))
        first = first_failure(self.known)
        if first is not None:
            return self._tell(first, launch, status)
        if not self.began:
            where = "it ended before its first step; what it said stands above"
        else:
            silent = [str(rank) for rank in launch.own_ranks if rank not in states]
            failed = [str(rank) for rank in states if rank not in well]
            who = f"rank {' and '.join(failed)} failed"
            if silent:
                who = f"a rank died: nothing was left by rank {' and '.join(silent)}"
            where = f"{who}; {steps(status)}; what it said stands above; {RESUMES}"
        where += "" if self.killer is None else f". {self.killer}"
        print(f"error: run {launch.run_directory} failed (launcher code {self.code}): {where}", file=sys.stderr)
        return self.code if self.code > 0 else FAILED

    def _tell_of_launcher(self, launch: Launch, status: Mapping[str, Any], *, saved: bool) -> int:
        """Of what started the ranks, and ended before them."""
        code = exit_code_of(self.code)
        how = f"was killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with code {self.code}"
        ranks = "saved and stopped" if saved else "were asked to save and stop, and not all did"
        print(
            f"error: run {launch.run_directory} failed (code {code}): what had started the ranks ({launch.launcher}) "
            f"{how} while they ran, so they {ranks}; {steps(status)}; {RESUMES}",
            file=sys.stderr,
        )
        return code

    def _tell(self, first: Known, launch: Launch, status: Mapping[str, Any]) -> int:
        """Of the rank that failed first: its traceback, and a line of what happened and what to do."""
        code = exit_code(first)
        traceback, words = last_words(first.said, first.rank)
        advice = self.killer or hint(first.said, first.code or 0)
        if not self.began and first.code == BAD_INPUT and "error: " in first.said and advice is None:
            return BAD_INPUT  # a line on its input stands above, and there is nothing to add
        if traceback:
            prefix = f"[rank {first.rank}] " if launch.ranks > 1 else ""
            print("\n".join(prefix + line for line in traceback.split("\n")), file=sys.stderr)
        parts = [f"{named(first.rank, launch)} {how(first)}"]
        parts[0] += f": {words}" if words and first.code not in (None, -signal.SIGKILL) else ""
        parts += [advice] if advice is not None else []
        if self.began:
            attempt = next((one.attempt for one in self.known.values() if one.attempt is not None), None)
            logs = launch.run_directory / "logs" / f"attempt-{attempt}"
            parts += [steps(status), *([] if attempt is None else [f"logs in {logs}"])]
            parts += [RESUMES] if "global_step" in status and RESUMES not in (advice or "") else []
        else:
            absent = [rank for rank in launch.own_ranks if rank not in self.known]
            if absent and "cannot meet" in words:
                parts.append(f"nothing was heard of {' and '.join(named(rank, launch) for rank in absent)}")
            parts.append("it ended before its first step")
        print(f"error: run {launch.run_directory} failed (code {code}): {'; '.join(parts)}", file=sys.stderr)
        return code


def first_failure(known: Mapping[int, Known]) -> Known | None:
    """The rank whose failure explains the others': not one that only lost another, rather one that said why."""
    failed = [one for one in known.values() if one.failed]
    if not failed:
        return None

    def says_little(one: Known) -> bool:
        return one.code is not None and one.code > 0 and not tells_why(one.said)

    return min(failed, key=lambda one: (only_lost(one.said), says_little(one), one.ended_at or 0.0))


def named(rank: int, launch: Launch) -> str:
    host = launch.host_of(rank)
    return f"rank {rank}" if host is None else f"rank {rank} on {host}"


def how(one: Known) -> str:
    """How a rank has ended, behind its name."""
    if one.code is None:
        if one.silent:
            return "gave no sign for a minute: its machine, or the network to it, is gone"
        return "vanished without a word: its machine or all of its processes were ended"
    if one.code < 0:
        return f"was killed by {signal_name(-one.code)}"
    if one.code == 0:
        return "left in the middle of the run, with code 0"
    return f"failed with code {one.code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_code(one: Known) -> int:
    """As a shell would have it: 128 and the number of a signal."""
    return exit_code_of(one.code or 0)


def exit_code_of(failure: int) -> int:
    """The same of a failure's code, which may be 0: it says nothing then."""
    return FAILED if failure == 0 else failure if failure > 0 else 128 - failure


def out_of_sight(launch: Launch, rank: int) -> bool:
    """Whether a rank's receipt may lie where this machine does not see it: on another node, with nothing shared."""
    name = launch.host_of(rank)
    return launch.is_remote and name is not None and not is_here(name.rpartition("@")[2])


def steps(status: Mapping[str, Any]) -> str:
    if "global_step" not in status:
        return "it had come to no step"
    return f"the last status was step {status['global_step']} of {status.get('max_steps')}"


def read_receipts(run_directory: Path, newer_than: int) -> dict[int, dict[str, Any]]:
    """The receipts of the newest attempt, by rank, if it is newer than the one of this number; what is none is left
    out."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted((run_directory / "receipts").glob("rank-*.json")):
        receipt = records.parsed(path)
        if records.checked(receipt, records.WHOSE) is not None and receipt["attempt"] > newer_than:
            found[receipt["rank"]] = receipt
    newest = max((receipt["attempt"] for receipt in found.values()), default=None)
    return {rank: receipt for rank, receipt in sorted(found.items()) if receipt["attempt"] == newest}


def newest_attempt(run_directory: Path) -> int:
    """The number of the attempt that began last, 0 for none: the ranks have met and hear of a stop file from then on.

    What cannot be read begins no attempt either: the run itself says what is wrong with it.
    """
    said = records.parsed(run_directory / "environment.json")
    attempts = said.get("attempts") if isinstance(said, dict) else None
    return len(attempts) if isinstance(attempts, list) else 0


def read_status(run_directory: Path) -> dict[str, Any]:
    """`status.json` of a run, {} where there is none. LaunchError if it is not JSON."""
    path = run_directory / "status.json"
    if not path.exists():
        return {}
    try:
        status = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise LaunchError(f"{path} is not valid JSON: remove it or choose another --run") from None
    if not isinstance(status, dict):
        raise LaunchError(f"{path} must hold one JSON object: remove it or choose another --run")
    return status


def attempt_of(status: Mapping[str, Any]) -> int:
    """The attempt a status speaks of, 0 for none yet."""
    number = status.get("attempt", 0)
    return number if isinstance(number, int) else 0
