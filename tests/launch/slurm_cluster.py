"""A SLURM of one's own for a test: munged, slurmctld and two slurmd as processes with their own folder and ports.

Nothing is installed, nothing of the machine's own SLURM is touched. Whoever runs the tests is the cluster's owner.
"""

from __future__ import annotations

import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
# Both are this machine. Ranks meet at the first in the order of names: it must have an address. Not "localhost", which
# SLURM takes for another name.
NODES = (HOST := socket.gethostname().partition(".")[0], f"{HOST}-second")
# A requeued job waits for as long as the credential of its last start could be valid: 2 minutes if nothing is said.
CREDENTIAL_SECONDS = 5
# Of a job; others come and go, as SIGNALING does.
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "GONE")
KILL_WAIT_SECONDS = 60  # between SIGTERM and SIGKILL, for saving on a busy machine; 30 if nothing is said

CONFIGURATION = """
ClusterName=test
SlurmctldHost={nodes[0]}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential_seconds}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
ReturnToService=1
KillWait={kill_wait_seconds}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes[0]} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName={nodes[1]} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=main Nodes={nodes[0]} Default=YES PriorityTier=1
PartitionName=graceful Nodes={nodes[0]} PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes={nodes[0]} PriorityTier=10 PreemptMode=OFF
PartitionName=both Nodes={nodes[0]},{nodes[1]} PriorityTier=1
"""


def missing() -> list[str]:
    """The programs that a test needs and this machine lacks; what only root's PATH has is found too."""
    return [program for program in PROGRAMS if find(program) is None]


def find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin{os.pathsep}/sbin")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class Cluster:
    """Two nodes of two CPUs. Partitions of the first: main, graceful (time to save before one is preempted), urgent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration)}
        (folder / "state").mkdir()
        self.configuration.write_text(
            CONFIGURATION.format(
                nodes=NODES,
                ports=free_ports(1 + len(NODES)),
                folder=folder,
                user=getpass.getuser(),
                credential_seconds=CREDENTIAL_SECONDS,
                kill_wait_seconds=KILL_WAIT_SECONDS,
            )
        )

    @contextmanager
    def running(self) -> Iterator[Cluster]:
        """Start the daemons, in the foreground and so as children of ours; end them behind."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        daemons = (
            [
                *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket"),
                *(f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munged.seed"),
                f"--log-file={self.folder}/munged.log",
            ],
            ["slurmctld", "-D"],
            *(["slurmd", "-D", "-N", node] for node in NODES),
        )
        started: list[subprocess.Popen[bytes]] = []
        try:
            for daemon, *options in daemons:
                output = (self.folder / f"{daemon}-{len(started)}.out").open("wb")
                program = find(daemon)
                assert program is not None
                with output:
                    started.append(
                        subprocess.Popen(
                            [program, *options],
                            env=self.environment,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=output,
                            cwd=self.folder,
                            preexec_fn=_end_with_parent,
                        )
                    )
                if daemon == "munged":
                    self.wait_until((self.folder / "munge.socket").exists, started)
            self.wait_until(lambda: self.ask("scontrol", "show", "nodes").count("State=IDLE") == len(NODES), started)
            yield self
        finally:
            if len(started) == len(daemons):
                subprocess.run(
                    ["scancel", "--full", "--signal=KILL", "--state=RUNNING"],
                    env=self.environment,
                    capture_output=True,
                    check=False,
                )
                self.ask("scancel", "--me")
                self.wait_until(lambda: not self.ask("squeue", "--noheader", "--states=R,CG,S"), [])
            for process in reversed(started):
                process.send_signal(signal.SIGTERM)
                process.wait()

    def wait_until(self, condition: Callable[[], bool], daemons: list[subprocess.Popen[bytes]]) -> None:
        while not condition():
            ended = [process.args[0] for process in daemons if process.poll() is not None]  # type: ignore[index]
            assert not ended, f"{ended} ended: {self.logs()}"
            time.sleep(0.1)

    def ask(self, *command: str) -> str:
        """What a command of SLURM's says, errors included."""
        done = subprocess.run(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return done.stdout.strip()

    def submit(self, script: Path, *options: str, environment: Mapping[str, str] | None = None) -> Job:
        """sbatch, as whoever got the script would."""
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script)],
            env={**self.environment, **(environment or {})}, cwd=script.parent,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return Job(self, int(done.stdout))

    def urgent(self) -> Job:
        """A job that needs the whole node at once, and for a moment."""
        done = subprocess.run(
            ["sbatch", "--parsable", "--partition=urgent", "--ntasks=2", "--output=/dev/null", "--wrap=true"],
            env=self.environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return Job(self, int(done.stdout))

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.log")))


def _end_with_parent() -> None:
    """In a daemon, on Linux: SIGTERM when the tests die (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Job:
    """A job that was submitted."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number

    def facts(self) -> dict[str, str]:
        """What scontrol tells of it, by name."""
        told = self.cluster.ask("scontrol", "--oneliner", "show", "job", str(self.number))
        return dict(word.split("=", 1) for word in told.split() if "=" in word)

    @property
    def state(self) -> str:
        return self.facts().get("JobState", "GONE")

    @property
    def restarts(self) -> int:
        return int(self.facts()["Restarts"])

    def wait_for(self, *states: str) -> str:
        """Until it is in one of these states; AssertionError where it ends in another."""
        while (state := self.state) not in {*ENDS, *states}:
            time.sleep(0.1)
        assert state in states, f"job {self.number} is {state}: {self.facts()}"
        return state
