"""Run a command to its end, in a process group of its own, and leave nothing of it behind: here or on other nodes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stderr, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from launch.addresses import LOOPBACK, address_towards, resolve
from launch.command import Launch
from launch.ending import End, attempt_of, newest_attempt, read_receipts, read_status
from launch.environment import file_in_memory, of_runner
from launch.errors import LaunchError
from launch.lifelines import Lifelines
from launch.oom_killer import oom_killer, oom_kills
from launch.remote import is_here
from launch.run_id import handed_out
from launch.saying import unfailing

STOP_SIGNALS = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
# DeepSpeed's launch.py kills its children 30 s after a signal; what is still there a little later is ended here.
GRACE_SECONDS = 45.0
PEERS_SECONDS = 30.0  # behind the first failure: the other ranks notice it and say so, or wait for ever, as NCCL's do
# Ranks that still run when what started them has ended: to end by themselves, and then to save and stop.
NOTICE_SECONDS, SAVE_SECONDS = 3.0, 600.0
END_SECONDS = 10.0  # between telling the keepers to end and ending what is here
LOOK_SECONDS = 0.2
# Of pdsh's ssh: it asks for nothing, and ends where the other side gives no sign for a minute.
SSH_OPTIONS = "-oBatchMode=yes -oServerAliveInterval=15 -oServerAliveCountMax=4"
_PR_SET_PDEATHSIG = 1


def run_once(launch: Launch, environ: Mapping[str, str], started_at: float | None = None) -> tuple[int, bool]:
    """Run the command to its end: the exit code, and whether somebody asked it to stop by a signal.

    The code is 0 only if every rank says so for this attempt.

    Signals ask the ranks, through their keepers, to save their last whole step and stop: DeepSpeed's launcher would
    answer them by killing the ranks 30 seconds later, and a save can take longer. A second one ends all of it at once.
    When a rank fails, those that do not end by themselves are ended.

    `started_at`, in seconds since the epoch, is when the minutes of --max-minutes began.
    """
    with redirect_stderr(unfailing(sys.stderr)):  # a run does not end for want of a place to print
        return _run_once(launch, environ, started_at)


def _run_once(launch: Launch, environ: Mapping[str, str], started_at: float | None) -> tuple[int, bool]:
    before = newest_attempt(launch.run_directory)
    killed_before = oom_kills()
    lifelines = Lifelines(own_address(launch), launch.own_ranks)
    watch = Watch(launch, lifelines, before)
    with handed_out(launch, lifelines) as variable:
        code = _watched(launch, environ, variable, watch, started_at)
    status = _last_status(launch.run_directory, before)
    known = lifelines.known
    ended = End(
        code=code,
        began=newest_attempt(launch.run_directory) > before or any(one.attempt for one in known.values()),
        asked=watch.asked,
        receipts=read_receipts(launch.run_directory, newer_than=before),
        killer=None if watch.asked > 1 else oom_killer(killed_before, oom_kills()),
        known=known,
        launcher_lost=watch.launcher_lost,
    )
    return ended.verdict(launch, status), watch.asked > 0


def _watched(
    launch: Launch, environ: Mapping[str, str], variable: Mapping[str, str], watch: Watch, started_at: float | None
) -> int:
    """The launcher's exit code, when it and all ranks have ended."""
    previous = {number: signal.signal(number, watch.note) for number in STOP_SIGNALS}
    process: subprocess.Popen[bytes] | None = None
    try:
        process = start(launch, environ, variable, started_at)
        watch.group = process.pid
        while process.poll() is None:
            watch.lifelines.serve(LOOK_SECONDS)
            watch.look()
        watch.wait_for_the_rest()
        return process.returncode
    except Exception:  # a fault of ours: no reason to lose what ranks have computed
        watch.let_save()
        raise
    finally:
        if process is not None:
            signal_group(process.pid, signal.SIGKILL)
        watch.lifelines.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _last_status(run_directory: Path, before: int) -> dict[str, Any]:
    """The status, {} where it can't be read; "failed" where the new attempt's ranks were killed and none could say so.

    `before`: the newest attempt before this one.
    """
    try:
        status = read_status(run_directory)
        if attempt_of(status) > before and status.get("state") == "running":
            status = {**status, "state": "failed"}
            (run_directory / "status.json").write_text(json.dumps(status) + "\n")
        return status
    except (LaunchError, OSError) as error:
        print(f"warning: {run_directory} does not say how far it came: {error}", file=sys.stderr)
        return {}


def start(
    launch: Launch, environ: Mapping[str, str], variable: Mapping[str, str], started_at: float | None
) -> subprocess.Popen[bytes]:
    """The launcher, in a process group of its own, on a leash: it is ended when this command dies.

    `variable`: by which ranks find this command.
    """
    clock = ["--started-at", f"{started_at:.3f}"] if started_at is not None and "--max-minutes" in launch.argv else []
    environment = {**environ, **launch.environment, **variable}
    files: list[int] = []
    if launch.is_remote:
        passed = {**launch.passed, **variable}
        files = [file_in_memory(passed, escape_percent=launch.launcher == "pdsh")]
        environment = {**of_runner(environ, launch.launcher), **passed, "DS_ENV_FILE": f"/proc/self/fd/{files[0]}"}
        environment["PDSH_SSH_ARGS_APPEND"] = f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} {SSH_OPTIONS}".strip()
    # DeepSpeed's pdsh runner answers a SIGTERM by ending every launcher of this Python on all nodes, other runs' too.
    leash = signal.SIGKILL if launch.is_remote else signal.SIGTERM
    try:
        return subprocess.Popen(
            [*launch.argv, *clock],
            env=environment,
            stdin=subprocess.DEVNULL,
            # Keepers write on stderr. What DeepSpeed's launchers say of themselves on other nodes can't be turned off.
            stdout=subprocess.DEVNULL if launch.is_remote else None,
            process_group=0,
            pass_fds=files,
            preexec_fn=lambda: _end_with_parent(leash),
        )
    finally:
        for descriptor in files:
            os.close(descriptor)


def own_address(launch: Launch) -> str:
    """Where this command's ranks find it: on the way from here to the first host that is another machine."""
    if not launch.is_remote:
        return LOOPBACK
    others = [host.name for host in launch.hosts if not is_here(host.machine)]
    return address_towards([resolve(name) for name in others[:1]])


class Watch:
    """What a run's group of processes and its ranks are told while it runs."""

    def __init__(self, launch: Launch, lifelines: Lifelines, before: int) -> None:
        """`before`: the run's newest attempt, before this one."""
        self.launch = launch
        self.lifelines = lifelines
        self.before = before
        self.group: int | None = None
        self.asked = 0
        self.launcher_lost = False  # it ended and left ranks behind
        self._signal = signal.SIGTERM  # the first
        self._heeded = 0
        self._end_at: float | None = None
        self._kill_at: float | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """A handler of signals."""
        if self.asked == 0:
            self._signal = signal.Signals(number)
        self.asked += 1

    def let_save(self) -> None:
        """Have the ranks save and stop, and wait for that, with nothing that could fail again."""
        with suppress(Exception):
            self.lifelines.stop("a fault of `launch run`")
            self.lifelines.take_no_more()
        until = time.monotonic() + GRACE_SECONDS
        while self.group is not None and self.asked < 2 and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
            with suppress(OSError):
                if not group_lives(self.group):
                    return

    def look(self) -> None:
        """Act on what has come in meanwhile."""
        assert self.group is not None
        now = time.monotonic()
        if self._heeded == 0 and self.asked > 0:
            self._heeded = 1
            self._ask()
        if self._heeded == 1 and self.asked > 1:
            self._heeded = 2
            self.lifelines.end()
            signal_group(self.group, signal.SIGKILL)
        failure = self.lifelines.first_failure()
        if failure is not None and self._end_at is None:
            self._end_at = now + (0.0 if failure.silent else PEERS_SECONDS)
        if self._end_at is not None and self._kill_at is None and now >= self._end_at:
            self.lifelines.end()
            self._kill_at = now + END_SECONDS
        if self._kill_at is not None and now >= self._kill_at:
            signal_group(self.group, signal.SIGKILL)

    def _ask(self) -> None:
        assert self.group is not None
        name = "Ctrl-C" if self._signal == signal.SIGINT else self._signal.name
        connected = self.lifelines.connected
        self.lifelines.stop(f"{name} to `launch run`")
        if connected:
            print("saving and stopping; once more ends it at once", file=sys.stderr, flush=True)
        elif newest_attempt(self.launch.run_directory) > self.before:  # ranks that do not reach this machine
            try:
                (self.launch.run_directory / "stop").touch()
                print("saving and stopping; once more ends it at once", file=sys.stderr, flush=True)
            except OSError as error:
                print(f"warning: ranks can't be asked to stop by a file: {error}", file=sys.stderr, flush=True)
        elif not self.launch.is_remote:
            signal_group(self.group, signal.SIGTERM)

    def wait_for_the_rest(self) -> None:
        """Of the group and of the ranks, at most the grace period; longer while ranks that were asked to stop save.

        The runner can end before them. Where it ended unasked and they go on without it, they are asked.
        """
        assert self.group is not None
        began = time.monotonic()
        deadline = began + GRACE_SECONDS
        while (self.lifelines.connected or group_lives(self.group)) and time.monotonic() < deadline:
            self.lifelines.serve(LOOK_SECONDS / 2)
            self.look()
            now = time.monotonic()
            if not self.lifelines.connected or self._end_at is not None:
                continue
            if self.asked == 0 and not self.launcher_lost and now - began > NOTICE_SECONDS:
                self.launcher_lost = True
                self.lifelines.stop("the end of what had started this rank")
                print("what started the ranks has ended without them: saving and stopping", file=sys.stderr, flush=True)
            if self.asked or self.launcher_lost:
                deadline = min(now + GRACE_SECONDS, began + SAVE_SECONDS)
        if self.lifelines.connected:
            self.lifelines.end()
            self.lifelines.serve(LOOK_SECONDS)


def _end_with_parent(number: signal.Signals) -> None:
    """In the child, on Linux: this signal when the command dies, so that no run goes on unwatched (prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def group_lives(group: int) -> bool:
    """Whether a process of the group still runs. Zombies, which no one may ever reap in a container, do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # it ended while we looked
        if int(its_group) == group and state not in ("Z", "X"):
            return True
    return False


def signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # all of it has ended
