"""Two hosts on this machine, as far as Linux can play them: what runs over several nodes is tested for real.

    with two_hosts() as (first, second):
        first.run(["pdsh", "-w", "node-1,node-2", "hostname"])

Each host has its own network, processes, host name, /dev/shm and /etc/hosts (namespaces), an interface of the same name
(`INTERFACE`), joined to the other's by a cable (a veth pair), and an sshd on port 22 that lets the other in. Files are
shared, but for the directories named `apart`. ssh's keys and configuration are the pair's own.

Nothing of the machine is changed: all of it lives in the namespaces of each host's first process and in one temporary
folder. When that process ends, and it ends with the test's however that ends, the kernel ends all others of the host.
Needs root and `apt-get install pdsh openssh-server iproute2`.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

INTERFACE = "net0"
NAMES, ADDRESSES = ("node-1", "node-2"), ("10.77.0.1", "10.77.0.2")
PROGRAMS = ("unshare", "nsenter", "ip", "ssh", "ssh-keygen", "sshd", "pdsh")
_PR_SET_PDEATHSIG = 1


def missing() -> str | None:
    """In one line what this machine lacks to play two hosts; None where it has all."""
    lacking = ["root's rights"] if os.geteuid() != 0 else []
    lacking += [program for program in PROGRAMS if shutil.which(program) is None]
    if not lacking:
        return None
    return f"two hosts need {', '.join(lacking)}: be root, and apt-get install pdsh openssh-server iproute2"


@dataclass(frozen=True)
class Host:
    """One of the two. Its numbers of processes are those that this test's process sees."""

    name: str
    address: str
    init: subprocess.Popen[str]  # `unshare`; its child is the host's first process
    first_pid: int
    folder: Path  # its /etc/hosts, the log of its sshd, and its own side of what is apart

    @property
    def hosts_file(self) -> Path:
        """What it sees as /etc/hosts: to be changed in place."""
        return self.folder / "hosts"

    def start(self, argv: Sequence[object], **options: Any) -> subprocess.Popen[str]:
        """A command on this host, with Popen's options. What it leaves behind ends with the host."""
        return subprocess.Popen(self._entering(argv, options.pop("cwd", Path.cwd())), text=True, **options)

    def run(
        self, argv: Sequence[object], *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """A command on this host to its end; its output is kept."""
        options = {"capture_output": True, "check": False, "env": environment, **options}
        command = self._entering(argv, options.pop("cwd", Path.cwd()))
        return subprocess.run(command, text=True, stdin=subprocess.DEVNULL, **options)

    def _entering(self, argv: Sequence[object], directory: Path) -> list[str]:
        here = ["nsenter", "--target", str(self.first_pid), "--net", "--mount", "--uts", "--ipc", "--pid"]
        return [*here, f"--wdns={directory}", "--", *map(str, argv)]

    def processes(self) -> dict[int, str]:
        """The command line of each process that lives on this host, but for its first one, its sshd and sleep."""
        found = {}
        namespace = _namespace(self.first_pid)
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue  # it ended while we looked
            if line and _namespace(pid) == namespace is not None and not _is_furniture(pid, line, self.first_pid):
                found[pid] = line
        return found

    def kill(self, words: str, number: signal.Signals = signal.SIGKILL) -> list[int]:
        """Signal each of its processes whose command line holds `words`; their numbers."""
        pids = [pid for pid, line in self.processes().items() if words in line]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def end_ssh(self) -> None:
        """Nobody gets in any more, and who is in loses the connection."""
        namespace = _namespace(self.first_pid)
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (folder / "cmdline").read_bytes().startswith(b"sshd") and _namespace(int(folder.name)) == namespace:
                    os.kill(int(folder.name), signal.SIGKILL)

    def cut(self) -> None:
        """Pull the cable on this side: nothing arrives on either, and no program is told."""
        self._ip("link", "set", INTERFACE, "down")

    def heal(self) -> None:
        self._ip("link", "set", INTERFACE, "up")

    def end(self) -> None:
        """All of its processes are gone at once; its network stays, with nobody behind it."""
        with suppress(ProcessLookupError):
            os.kill(self.first_pid, signal.SIGKILL)
        self.init.kill()
        self.init.wait()

    def _ip(self, *words: str) -> None:
        _command(["nsenter", f"--net=/proc/{self.first_pid}/ns/net", "ip", *words])

    def side_of(self, path: Path) -> Path:
        """Where what this host has at `path`, which is apart, lies for all others."""
        return self.folder / "apart" / path.resolve().relative_to("/")


@contextmanager
def two_hosts(apart: Sequence[Path] = ()) -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other. What is in the existing directories `apart`, empty at first, each has alone.

    Fails the test, in one line, where this machine lacks something for it.
    """
    lacks = missing()
    if lacks is not None:
        pytest.fail(lacks, pytrace=False)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="two-hosts-")))
        _write_keys(folder)
        hosts = []
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            host = _start(name, address, folder, apart)
            stack.callback(host.end)
            # Without a process a network would go, and the other's interface with it.
            stack.enter_context(Path(f"/proc/{host.first_pid}/ns/net").open("rb"))
            hosts.append(host)
        first, second = hosts
        ends = [["name", INTERFACE, "netns", str(host.first_pid)] for host in hosts]
        _command(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
        for host in hosts:
            host._ip("address", "add", f"{host.address}/24", "dev", INTERFACE)
            host.heal()
        for host, other in ((first, second), (second, first)):
            _wait_for_ssh(host, other)
        yield first, second


def _write_keys(folder: Path) -> None:
    for name in ("host_key", "user_key"):
        _command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)])
    public = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"{','.join((*NAMES, *ADDRESSES, 'localhost'))} {public}")
    (folder / "ssh_config").write_text(
        f"Host *\n  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
        "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n  BatchMode yes\n"
    )
    (folder / "sshd_config").write_text(
        f"Port 22\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nPidFile none\nUsePAM no\n"
        "StrictModes no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\nUseDNS no\nMaxStartups 100\n"
    )


def _start(name: str, address: str, folder: Path, apart: Sequence[Path]) -> Host:
    """The host's first process in namespaces of its own, its /etc/hosts and directories mounted, its sshd started."""
    own = folder / name
    own.mkdir()
    lines = ["127.0.0.1 localhost", *(f"{one} {its_name}" for its_name, one in zip(NAMES, ADDRESSES, strict=True))]
    (own / "hosts").write_text("\n".join(lines) + "\n")
    mounts = [(own / "hosts", Path("/etc/hosts")), (folder / "ssh_config", Path("/etc/ssh/ssh_config"))]
    for path in apart:
        side = own / "apart" / path.resolve().relative_to("/")
        side.mkdir(parents=True)
        mounts.append((side, path.resolve()))
    sshd = shutil.which("sshd")
    script = [
        "set -e",
        *(f"mount --bind {shlex.quote(str(source))} {shlex.quote(str(target))}" for source, target in mounts),
        "mount -t tmpfs run /run; mkdir /run/sshd; mount -t tmpfs shm /dev/shm",
        f"hostname {name}; ip link set lo up",
        f"{sshd} -D -e -f {folder}/sshd_config 2>{own}/sshd.log </dev/null >/dev/null &",
        "sleep infinity </dev/null >/dev/null 2>&1 &",
        "echo up; exec >/dev/null 2>&1; wait",  # and bury the orphans, as the first process of a machine does
    ]
    separate = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    init = subprocess.Popen(
        [*separate, "bash", "-c", "\n".join(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_end_with_parent,
        process_group=0,  # Ctrl-C is the test's, which then ends this
    )
    assert init.stdout is not None
    said = init.stdout.readline()
    if said != "up\n":
        rest = init.stdout.read()
        init.wait()
        raise AssertionError(f"{name} does not start: {said}{rest}")
    children = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()
    return Host(name, address, init, int(children[0]), own)


def _wait_for_ssh(host: Host, other: Host) -> None:
    while True:
        done = host.run(["ssh", "-o", "ConnectTimeout=5", other.name, "hostname"])
        if done.stdout.strip() == other.name:
            return
        log = (other.folder / "sshd.log").read_text()
        assert "refused" in done.stderr or "timed out" in done.stderr, f"{done.stderr}\n{log}"
        time.sleep(0.05)


def _is_furniture(pid: int, line: str, first_pid: int) -> bool:
    return pid == first_pid or line.startswith("sshd") or "/sshd -D" in line or line == "sleep infinity"


def _namespace(pid: int) -> str | None:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return None


def _command(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(argv)}: {done.stderr}"


def _end_with_parent() -> None:
    """In the child: SIGKILL when the test's process ends (prctl(2)); `unshare --kill-child` passes it on."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
