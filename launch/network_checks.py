"""Do the nodes find each other, at one time, and do their sums come out right? Each function is one row of the report.

`facts` and `met` are what probe.py said, by the names of the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launch.all_reduce import bus_bandwidth
from launch.probe import is_loopback
from launch.remote import Answer
from launch.rows import Asked, Facts, Row, size

SKEW_WARNS, SKEW_FAILS = 1.0, 10.0  # seconds
STAGES = {
    "process": "as a process",
    "store": "on its way to the first rank",
    "group": "as the ranks connected with each other",
    "sums": "in the sums",
    "speed": "in the timed sums",
    "end": "at the end",
}
INTERFACES = "name the interface with GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, and open all ports between the nodes"
REMEDIES = {"store": f": {INTERFACES}", "group": f": {INTERFACES}"}


def clock(met: Facts, answers: Mapping[str, Answer]) -> Row:
    """How far a node's clock is from this machine's, at the least.

    The node read it when it began and when it ended, all between our two readings: those it may differ by.
    """
    row = Row("clock")
    for node, said in met.items():
        most = said["began_at"] - answers[node].asked_at  # ahead of ours
        least = said["ended_at"] - answers[node].ended_at
        skew = max(least, -most, 0.0)
        text = f"{skew:.1f} s {'ahead' if least > 0 else 'behind'}" if skew else f"within {max(most, -least):.1f} s"
        row.numbers[node] = {"least_seconds": least, "most_seconds": most}
        reason = f"the clock of {node} is {text} of this machine's: set it, and keep it so (chrony, systemd-timesyncd)"
        if skew > SKEW_FAILS:
            row.fail(node, text, reason)
        elif skew > SKEW_WARNS:
            row.warn(node, text, reason)
        else:
            row.ok(node, text)
    return row


def own_name(asked: Asked, facts: Facts) -> Row:
    """gloo finds its interface by the host's own name, unless it is told one."""
    row = Row("own name")
    told = asked.environment.get("GLOO_SOCKET_IFNAME")
    for node, fact in facts.items():
        addresses, interfaces = fact["own_addresses"], set(fact["addresses"].values())
        name = fact["hostname"]
        if len(asked.hosts) == 1:
            row.ok(node, addresses[0] if addresses else "no address")
        elif told is not None and interfaces and told not in interfaces:
            row.fail(
                node,
                f"no {told}",
                f"{node} has no interface {told}, which GLOO_SOCKET_IFNAME names; it has "
                f"{', '.join(sorted(interfaces))}",
            )
        elif told is not None:
            row.ok(node, told)
        elif addresses and not is_loopback(addresses[0]):
            row.ok(node, addresses[0])
        else:
            reaches = fact["default_route"] or next((one for one in fact["addresses"] if not is_loopback(one)), None)
            interface = fact["addresses"].get(reaches, "eth0")
            has = (
                f"resolves to {addresses[0]} there, where no other node reaches it"
                if addresses
                else "has no address there"
            )
            reason = (
                f"the name of {node}, {name}, {has}: give it {reaches or 'its own address'} in its /etc/hosts, or set "
                f"GLOO_SOCKET_IFNAME={interface} on all nodes"
            )
            text = addresses[0] if addresses else "no address"
            if asked.device == "cpu":
                row.fail(node, text, reason)
            else:
                row.warn(node, text, reason + " (NCCL looks for itself)")
    return row


def routes(asked: Asked, facts: Facts, met: Facts) -> Row:
    """The interface from which a node reaches the first one: not the one that leads to itself."""
    row = Row("interface")
    for node, said in met.items():
        source = said["route"]
        if source is None:
            row.fail(
                node,
                "no route",
                f"no route leads from {node} to {asked.address}: give an address it reaches with --master-addr",
            )
        elif is_loopback(source) and node != asked.first:
            row.fail(
                node,
                source,
                f"for {node} the address of {asked.first}, {asked.address}, is its own: give one "
                "that other machines reach with --master-addr, or correct /etc/hosts",
            )
        else:
            interface = facts[node]["addresses"].get(source)
            row.ok(node, f"{interface} {source}" if interface else source)
    return row


def port(asked: Asked, met: Facts) -> Row:
    """The first node listens, all others come."""
    row = Row("port")
    listens = met.get(asked.first)
    if listens is None:
        return row
    if "listen_error" in listens:
        reason = (
            f"{asked.first} cannot listen at port {asked.port}: {listens['listen_error']}: give another --master-port"
        )
        row.fail(asked.first, f"{asked.port} taken", reason)
    else:
        row.ok(asked.first, f"{asked.port} free")
    taken = row.failed
    for node, said in met.items():
        if node == asked.first:
            continue
        if taken:
            row.skip(node, "not tried")
        elif "connect_error" in said:
            reason = (
                f"{node} gets no connection to {asked.first} at {asked.address}, port {asked.port} "
                f"({said['connect_error']}): open ports between the nodes (firewall), or give another --master-addr"
            )
            row.fail(node, said["connect_error"], reason)
        else:
            row.ok(node, "connected")
    return row


def all_reduce(asked: Asked, ranks: Mapping[str, Sequence[Mapping[str, Any]] | str], sum_bytes: int) -> Row:
    """`ranks`: by node what its ranks said, or why none of them said anything."""
    row = Row("all-reduce")
    missing = sorted(
        {rank for said in ranks.values() if not isinstance(said, str) for one in said for rank in one.get("absent", ())}
    )
    owners = [host.name for host in asked.hosts for _ in range(host.slots)]
    for node, said in ranks.items():
        absent = [rank for rank in missing if owners[rank] == node]
        if isinstance(said, str):
            never = f"rank {absent[0]} of {node} never came to {asked.address}:{asked.port}" if absent else ""
            row.fail(node, "failed", f"{never or f'the ranks of {node} did not start'}: {said}")
            continue
        faulty = [one for one in said if one["fault"] is not None]
        wrong = [f"rank {one['rank']}: {what}" for one in said for what in one.get("wrong", ())]
        if wrong:
            row.fail(
                node,
                "wrong sums",
                f"sums are wrong on {node} ({'; '.join(wrong[:3])}): the memory, network or driver of some node "
                "changes data: check half of the hosts at a time to find which",
            )
        elif faulty:
            number, stage, fault = (faulty[0][key] for key in ("rank", "stage", "fault"))
            reason = f"rank {number} on {node} failed {STAGES[stage]} ({fault}){REMEDIES.get(stage, '')}"
            row.fail(node, f"rank {number} failed", reason)
        elif absent:
            row.fail(node, "never came", f"rank {absent[0]} of {node} never came to {asked.address}:{asked.port}")
        elif missing:
            row.skip(node, f"waited for rank {', '.join(map(str, missing))}")
        else:
            seconds = max(one["seconds"] for one in said)
            speed = bus_bandwidth(sum_bytes, seconds, asked.ranks)
            row.numbers[node] = {"bytes_per_second": speed}
            row.ok(node, f"{len(said)} right" + (f", {size(speed)}/s" if asked.ranks > 1 else ""))
    return row
