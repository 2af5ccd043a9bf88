"""One machine: check the recipe, build one DeepSpeed command, run it in a process group of its own, tell the truth.

The launcher's own exit code is not the truth: DeepSpeed's runner passes on positive codes only, so a run whose child
was killed by a signal can end as 0. What counts are the receipts that every rank leaves in the run directory.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from launch.errors import LaunchError

FAILED = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
# DeepSpeed's launch.py kills its children 30 s after a signal; what is still there a little later is ended here.
GRACE_SECONDS = 45.0
_PR_SET_PDEATHSIG = 1
SMI_SECONDS = 60.0
GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux: the first and the last it hands out by itself


@dataclass(frozen=True)
class Launch:
    """Everything that will run: one command line, what is added to the environment, and the plan behind it."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    run_directory: Path
    ranks: int
    plan: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {
            "argv": list(self.argv),
            "environment": self.environment,
            "run_directory": str(self.run_directory),
            "world_size": self.ranks,
            "global_batch_size": self.plan["global_batch_size"],
            "micro_batch_size": self.plan["micro_batch_size"],
            "gradient_accumulation_steps": self.plan["gradient_accumulation_steps"],
            "tokens_per_step": self.plan["tokens_per_step"],
        }

    def to_text(self) -> str:
        plan = self.plan
        added = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return "\n".join(
            [
                f"command          {shlex.join(self.argv)}",
                f"environment      {added or 'nothing added'}",
                f"run directory    {self.run_directory}",
                f"world size       {self.ranks}",
                f"effective batch  {plan['global_batch_size']} sequences = {plan['micro_batch_size']} × "
                f"{plan['gradient_accumulation_steps']} micro-steps × {self.ranks} ranks, "
                f"{plan['tokens_per_step']:,} tokens a step",
            ]
        )


def prepare(
    recipe: Path,
    *,
    run_directory: Path | None,
    ranks: int | None,
    overrides: Sequence[str],
    resume: str,
    environ: Mapping[str, str],
    check_data: bool = False,
    force: bool = False,
    max_minutes: float | None = None,
    grace_seconds: float | None = None,
) -> Launch:
    """Plan the recipe and build the command. LaunchError: the recipe's own error line, or what is missing here.

    `ranks` defaults to the number of GPUs, or 1 without any. What does not fit this machine's devices is refused, with
    `force` it is a warning. The port is free when this is called. `max_minutes` and `grace_seconds` are the run's.
    """
    limits = {"--max-minutes": max_minutes, "--grace-seconds": grace_seconds}
    for option, given in limits.items():
        if given is not None and not 0 < given < math.inf:
            raise LaunchError(f"{option} {given:g}: must be more than 0")
    gpus = visible_gpus(environ)
    world_size = ranks if ranks is not None else max(len(gpus), 1)
    if world_size < 1:
        raise LaunchError(f"--ranks {world_size}: must be at least 1")
    if gpus and len(gpus) < world_size:
        raise LaunchError(f"--ranks {world_size}: only {len(gpus)} GPUs are visible and each rank needs its own")
    plan = plan_recipe(recipe, world_size, overrides, check_data=check_data, force=force)
    directory = run_directory if run_directory is not None else Path("runs") / recipe.stem
    argv = [str(deepspeed_script()), *devices(gpus, world_size), "--master_port", str(free_port())]
    argv += ["--log_level", "warning"]  # what DeepSpeed's two launchers say of themselves would drown what the run says
    argv += ["--module", "pretrain", "run", str(recipe), "--run", str(directory), "--resume", resume]
    argv += [word for override in overrides for word in ("--set", override)]
    argv += ["--force"] if force else []
    argv += [word for option, given in limits.items() if given is not None for word in (option, f"{given:g}")]
    return Launch(tuple(argv), added_environment(bool(gpus), world_size, environ), directory, world_size, plan)


def plan_recipe(
    recipe: Path,
    world_size: int,
    overrides: Sequence[str],
    *,
    check_data: bool,
    force: bool = False,
    memory: Sequence[str] = ("--device-memory", "auto"),
) -> dict[str, Any]:
    """The JSON of `pretrain plan`, run as a command of its own. LaunchError with its error line when it refuses.

    `memory` are its options that say what a rank has; this machine's, if nothing is said.
    """
    command = [sys.executable, "-m", "pretrain", "plan", str(recipe), "--json", "--world-size", str(world_size)]
    command += [*memory, *(["--force"] if force else [])]
    command += [word for override in overrides for word in ("--set", override)]
    command += ["--check-data"] if check_data else []
    # It is no rank: a RANK that something else left in the environment would silence it.
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"`{shlex.join(command)}` ended with code {done.returncode}"]
        raise LaunchError(lines[-1].removeprefix("error: "))
    sys.stderr.write(done.stderr)
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def deepspeed_script() -> Path:
    """The `deepspeed` command of the Python that runs this, never another one on PATH."""
    script = Path(sys.executable).parent / "deepspeed"
    if not script.is_file():
        raise LaunchError(f"{script} is missing: install deepspeed into this virtualenv (make setup)")
    return script


def visible_gpus(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Numbers of the NVIDIA GPUs a run may use, without importing torch: what nvidia-smi lists, narrowed by
    CUDA_VISIBLE_DEVICES. LaunchError: nvidia-smi hangs, or that names GPUs by anything but a number listed there."""
    smi = shutil.which("nvidia-smi")
    if smi is None or environ.get("DS_ACCELERATOR") == "cpu":
        return ()
    listing = subprocess.Popen([smi, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        listed, _ = listing.communicate(timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        listing.kill()
        with suppress(subprocess.TimeoutExpired):  # nothing ends a process that hangs within the driver
            listing.wait(1)
        raise LaunchError(
            f"{smi} -L gave no answer in {SMI_SECONDS:g} s, the GPU driver hangs: "
            "set DS_ACCELERATOR=cpu to train on the CPU, or restart the machine"
        ) from None
    present = sum(line.startswith("GPU ") for line in listed.splitlines()) if listing.returncode == 0 else 0
    return narrow(present, environ.get("CUDA_VISIBLE_DEVICES"))


def narrow(present: int, visible: str | None) -> tuple[int, ...]:
    """The GPUs out of 0 … present − 1 that CUDA_VISIBLE_DEVICES leaves; "" and "-1" leave none."""
    if visible is None:
        return tuple(range(present))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if names == ["-1"]:
        return ()
    if not all(name.isdecimal() and int(name) < present for name in names):
        raise LaunchError(f"CUDA_VISIBLE_DEVICES={visible}: name GPUs by number, 0 to {present - 1}")
    return tuple(int(name) for name in names)


def devices(gpus: Sequence[int], ranks: int) -> list[str]:
    """DeepSpeed's choice of devices. `--num_gpus N` takes the first N whatever CUDA_VISIBLE_DEVICES says, so a
    narrowed set is named one by one."""
    chosen = list(gpus[:ranks])
    if chosen == list(range(len(chosen))):
        return ["--num_gpus", str(ranks)]
    return ["--include", "localhost:" + ",".join(str(gpu) for gpu in chosen)]


def added_environment(on_gpu: bool, ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What a run needs on top of `environ`: on a CPU, DeepSpeed's CPU accelerator and a fair share of cores a rank."""
    if on_gpu:
        return {}
    added = {"DS_ACCELERATOR": "cpu"} if environ.get("DS_ACCELERATOR") != "cpu" else {}
    if "OMP_NUM_THREADS" not in environ:
        added["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return added


def free_port() -> int:
    """A TCP port nobody listens on now, and that the system gives to nobody by itself before the ranks take it, many
    seconds later: below those it hands out for port 0 and for every outgoing connection, where there is room."""
    first_given = int(GIVEN_PORTS.read_text().split()[0]) if GIVEN_PORTS.exists() else 0
    below = range(max(first_given - 16_384, 1_024), first_given)
    for port in [*random.SystemRandom().sample(below, min(20, len(below))), 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise LaunchError("no TCP port is free on this machine for the ranks to meet at")


def run(launch: Launch, environ: Mapping[str, str], started_at: float | None = None) -> int:
    """Run the command to its end and return the exit code: 0 only if every rank says so for this attempt.

    Signals ask the run to save its last whole step and stop, by the stop file: DeepSpeed's launcher would answer them
    by killing the ranks 30 seconds later, and a save can take longer. Before the attempt has begun they are passed on
    as SIGTERM. A second one ends the group at once. Whatever happens, no process of it is left behind.

    `started_at`, in seconds since the epoch, is when the minutes of --max-minutes began.
    """
    before = newest_attempt(launch.run_directory)
    killed_before = oom_kills()
    clock = ["--started-at", f"{started_at:.3f}"] if started_at is not None and "--max-minutes" in launch.argv else []
    group: int | None = None
    asked = 0

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if group is None:  # it starts just now, and is asked behind that
            return
        if asked > 1:
            _signal_group(group, signal.SIGKILL)
        elif newest_attempt(launch.run_directory) > before:
            (launch.run_directory / "stop").touch()
            print("saving and stopping; once more ends it at once", file=sys.stderr, flush=True)
        else:
            _signal_group(group, signal.SIGTERM)

    previous = {number: signal.signal(number, ask_to_stop) for number in STOP_SIGNALS}
    try:
        process = subprocess.Popen(
            [*launch.argv, *clock],
            env={**environ, **launch.environment},
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=_end_with_parent,
        )
        group = process.pid
        if asked:
            _signal_group(group, signal.SIGTERM)
        code = process.wait()
        _end_group(group)
    finally:
        if group is not None:
            _signal_group(group, signal.SIGKILL)
        for number, handler in previous.items():
            signal.signal(number, handler)
    status = read_status(launch.run_directory)
    if attempt(status) > before and status.get("state") == "running":  # whoever should have said so was killed
        (launch.run_directory / "status.json").write_text(json.dumps({**status, "state": "failed"}) + "\n")
    ended = End(
        code=code,
        began=newest_attempt(launch.run_directory) > before,
        asked=asked,
        receipts=read_receipts(launch.run_directory, newer_than=before),
        killer=None if asked > 1 else oom_killer(killed_before, oom_kills()),
    )
    return ended.verdict(launch, status)


@dataclass(frozen=True)
class End:
    """What is known of a run's end."""

    code: int  # of DeepSpeed's launcher
    began: bool  # a new attempt stands in the run directory
    asked: int  # how often it was asked to stop
    receipts: Mapping[int, Mapping[str, Any]]  # of the new attempt, by rank
    killer: str | None = None  # the kernel ended a process for want of memory meanwhile

    def verdict(self, launch: Launch, status: Mapping[str, Any]) -> int:
        """The exit code: 0 if every rank says that it stopped or finished, else the launcher's own or 1, with a line.

        A run that was asked to stop before it began, and did not begin, is 0 as well: there is nothing to resume.
        """
        states = {rank: receipt.get("state") for rank, receipt in self.receipts.items()}
        well = [rank for rank, state in states.items() if state in ("stopped", "finished")]
        if well == list(range(launch.ranks)):
            return 0
        if not self.began and self.asked == 1:
            print(f"run {launch.run_directory} stopped before it began: nothing was changed", file=sys.stderr)
            return 0
        if not self.began:
            where = "it ended before its first step; what it said stands above"
        else:
            silent = [str(rank) for rank in range(launch.ranks) if rank not in states]
            failed = [str(rank) for rank in states if rank not in well]
            who = f"rank {' and '.join(failed)} failed"
            if silent:
                who = f"a rank died: nothing was left by rank {' and '.join(silent)}"
            steps = "it had come to no step"
            if "global_step" in status:
                steps = f"the last status was step {status['global_step']} of {status.get('max_steps')}"
            where = f"{who}; {steps}; what it said stands above; the same command resumes from the last checkpoint"
        where += "" if self.killer is None else f". {self.killer}"
        print(f"error: run {launch.run_directory} failed (launcher code {self.code}): {where}", file=sys.stderr)
        return self.code if self.code > 0 else FAILED


def read_receipts(run_directory: Path, newer_than: int) -> dict[int, dict[str, Any]]:
    """The receipts of the newest attempt, by rank, if it is newer than the one of this number; what is none is left
    out."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted((run_directory / "receipts").glob("rank-*.json")):
        with suppress(ValueError, KeyError, TypeError):
            receipt = json.loads(path.read_bytes())
            if receipt["attempt"] > newer_than:
                found[receipt["rank"]] = receipt
    newest = max((receipt["attempt"] for receipt in found.values()), default=None)
    return {rank: receipt for rank, receipt in sorted(found.items()) if receipt["attempt"] == newest}


def newest_attempt(run_directory: Path) -> int:
    """The number of the attempt that began last, 0 for none: the ranks have met and hear of a stop file from then on.

    What cannot be read begins no attempt either: the run itself says what is wrong with it.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        return len(json.loads((run_directory / "environment.json").read_bytes())["attempts"])
    return 0


def oom_kills(root: Path = Path("/")) -> dict[str, int]:
    """How many processes Linux has ended so far for want of memory: in this process's control group, on this machine.

    A count that the system does not tell is left out.
    """
    counts: dict[str, int] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        tree, name = root / "sys/fs/cgroup", "memory.events"  # version 2
        if "memory" in controllers.split(","):
            tree, name = tree / "memory", "memory.oom_control"
        elif controllers:
            continue
        # A container often sees its own group as the root of the tree.
        for place in (tree / path.lstrip("/") / name, tree / name):
            for word, _, count in (entry.partition(" ") for entry in _lines(place)):
                if word == "oom_kill":
                    counts.setdefault("group", int(count))
    for word, _, count in (entry.partition(" ") for entry in _lines(root / "proc/vmstat")):
        if word == "oom_kill":
            counts["machine"] = int(count)
    return counts


def oom_killer(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """A sentence where a count of `oom_kills` grew; None where none did."""
    for where, name in (("group", "this control group"), ("machine", "this machine")):
        more = after.get(where, 0) - before.get(where, after.get(where, 0))
        if more > 0:
            processes = "a process" if more == 1 else f"{more} processes"
            return (
                f"Meanwhile the kernel ended {processes} of {name} because main memory ran out (OOM killer), most "
                "likely a rank: `python -m pretrain plan RECIPE --device-memory auto --fit` says what would fit"
            )
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def read_status(run_directory: Path) -> dict[str, Any]:
    """`status.json` of a run, {} where there is none. LaunchError if it is not JSON."""
    path = run_directory / "status.json"
    if not path.exists():
        return {}
    try:
        status = json.loads(path.read_bytes())
    except ValueError:
        raise LaunchError(f"{path} is not valid JSON: remove it or choose another --run") from None
    if not isinstance(status, dict):
        raise LaunchError(f"{path} must hold one JSON object: remove it or choose another --run")
    return status


def attempt(status: Mapping[str, Any]) -> int:
    """The attempt a status speaks of, 0 for none yet."""
    number = status.get("attempt", 0)
    return number if isinstance(number, int) else 0


def _end_with_parent() -> None:
    """In the child, on Linux: SIGTERM when this command dies, so that no run goes on unwatched (prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_group(group: int) -> None:
    """Wait for what is left of the group, at most the grace period. The runner can end before the ranks have saved."""
    deadline = time.monotonic() + GRACE_SECONDS
    while _group_lives(group) and time.monotonic() < deadline:
        time.sleep(0.1)


def _group_lives(group: int) -> bool:
    """Whether a process of the group still runs. Zombies, which no one may ever reap in a container, do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # it ended while we looked
        if int(its_group) == group and state not in ("Z", "X"):
            return True
    return False


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # all of it has ended
