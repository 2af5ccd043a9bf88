"""Where ranks meet: addresses that other machines reach, ports that nobody has."""

from __future__ import annotations

import errno
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launch.errors import LaunchError

GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux: the first and the last it hands out by itself
LOOPBACK = "127.0.0.1"
ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._:-]{,254}", re.ASCII)


def free_port() -> int:
    """A TCP port nobody listens on now, and that the system gives to nobody by itself before the ranks take it, many
    seconds later: below those it hands out for port 0 and for every outgoing connection, where there is room."""
    for port in [*quiet_ports(), 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise LaunchError("no TCP port is free on this machine for the ranks to meet at")


def quiet_ports() -> list[int]:
    """Some ports that the system hands out to nobody, in any order; none where it does not tell or has no room."""
    first_given = int(GIVEN_PORTS.read_text().split()[0]) if GIVEN_PORTS.exists() else 0
    below = range(max(first_given - 16_384, 1_024), first_given)
    return random.SystemRandom().sample(below, min(20, len(below)))


def refuse_taken(port: int) -> None:
    """LaunchError where another program of this machine listens on the port."""
    refuse_no_port(port)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what an earlier run left behind is no program
        try:
            probe.bind(("", port))
        except OSError as error:
            why = "is taken by another program" if error.errno == errno.EADDRINUSE else f"cannot be had: {error}"
            raise LaunchError(
                f"--master-port {port}: the port {why}: give another (or none, where one command starts all ranks)"
            ) from None


def refuse_no_port(port: int) -> None:
    """LaunchError for a number that no port has."""
    if not 0 < port < 65_536:
        raise LaunchError(f"--master-port {port}: a TCP port is 1 to 65535")


def refuse_no_address(address: str) -> None:
    """LaunchError for what is no host's name and no address: shells and launchers would take it for something else."""
    if not ADDRESS.fullmatch(address):
        raise LaunchError(f"--master-addr {address!r}: give a host's name or its IP address")


def meeting_address(names: Sequence[str]) -> str:
    """The address at which the hosts of these names find the first of them. LaunchError where it is not to be found.

    A name that means this machine often resolves to 127.0.0.1, where no other host finds it: then it is the address
    from which this machine reaches the next host. All on this machine: 127.0.0.1.
    """
    first, *others = [resolve(name) for name in names]
    if not first.startswith("127."):
        return first
    return address_towards([other for other in others if not other.startswith("127.")])


def address_towards(others: Sequence[str]) -> str:
    """This machine's address on the way to the first of other machines' addresses; 127.0.0.1 without any."""
    if not others:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((others[0], 9))  # sends nothing
        except OSError as error:
            raise LaunchError(f"no way leads from this machine to {others[0]}: {error}") from None
        return str(probe.getsockname()[0])


def resolve(name: str) -> str:
    """The IPv4 address of a host, also where its name is one that only ssh's configuration knows."""
    host = name.rpartition("@")[2]
    for find in (str, _ssh_name):
        with suppress(OSError, UnicodeError):
            return str(socket.getaddrinfo(find(host), None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    raise LaunchError(f"{host} has no address here: correct its name in the host file, or give --master-addr")


def _ssh_name(name: str) -> str:
    """What ssh takes a name for; OSError without ssh."""
    if shutil.which("ssh") is None:
        raise OSError("no ssh")
    done = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, check=False, timeout=10)
    return next((line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")), name)
