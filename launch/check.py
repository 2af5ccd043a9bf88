"""Will a run start on these nodes? Asked before it costs GPU hours: `python -m launch check`.

Three rounds, each on all nodes at once: what every node says of itself (facts); whether they find each other (meet);
all-reduces over all ranks. The next round is left out where the one before has shown that it cannot succeed.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch import all_reduce, network_checks, node_checks, path_checks, probe
from launch.addresses import LOOPBACK, free_port, meeting_address, refuse_no_address, refuse_no_port
from launch.devices import visible_gpus
from launch.environment import asked_for, passed_on
from launch.errors import LaunchError
from launch.hosts import Host, read_hostfile
from launch.planning import plan_recipe
from launch.remote import Answer, run_on
from launch.rows import CHECKS, Asked, Facts, Report, Row

FACTS_SECONDS = 120.0
MEET_SECONDS = 30.0  # a busy node is slow to come; only who never comes costs so much
SWEEP_SECONDS = 20.0
WRITE_BYTES = 256 * 2**20
SUM_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
LOOKED_AT = ("DS_ACCELERATOR", "GLOO_SOCKET_IFNAME")  # of this machine's environment, by the checks themselves
ROOT = Path(__file__).resolve().parents[1]
# What ssh says → what to do.
REMEDIES = {
    "permission denied": "let this machine's key in (ssh-copy-id {node})",
    "host key verification failed": "`ssh {node}` once by hand, and see whose key it is",
    "could not resolve": "correct its name in the host file",
    "connection refused": "start its sshd, or say its port in ssh's configuration",
    "timed out": "is it up, is a firewall between?",
    "no route": "is it up, is its network?",
}


def of_options(
    recipe: Path | None,
    *,
    environ: Mapping[str, str],
    run_directory: Path | None = None,
    hostfile: Path | None = None,
    ranks: int | None = None,
    env: Sequence[str] = (),
    master_addr: str | None = None,
    master_port: int | None = None,
    grace_seconds: float | None = None,
) -> Asked:
    """What is to be checked: the nodes of a host file, or this machine. LaunchError where the options cannot be."""
    wanted = asked_for(env, environ)
    if master_port is not None:
        refuse_no_port(master_port)
    if master_addr is not None:
        refuse_no_address(master_addr)
    if grace_seconds is not None and not 0 < grace_seconds < math.inf:
        raise LaunchError(f"--grace-seconds {grace_seconds:g}: must be more than 0")
    if hostfile is not None:
        if ranks is not None:
            raise LaunchError("--ranks and --hostfile: the host file says how many ranks each host has (slots=N)")
        hosts, environment = read_hostfile(hostfile), passed_on(environ, {}, wanted)
        address = master_addr
        if address is None:
            try:
                address = meeting_address([host.name for host in hosts])
            except LaunchError:  # of a host that has no address here; the report says which
                address = hosts[0].machine
    else:
        if master_addr is not None:
            raise LaunchError("--master-addr is for several machines: add --hostfile FILE")
        count = ranks if ranks is not None else max(len(visible_gpus({**environ, **wanted})), 1)
        if count < 1:
            raise LaunchError(f"--ranks {count}: must be at least 1")
        hosts, address = (Host("localhost", count),), LOOPBACK
        environment = {name: environ[name] for name in LOOKED_AT if name in environ} | wanted
    return Asked(
        hosts=hosts,
        run=run_directory or Path("runs") / (recipe.stem if recipe is not None else ""),
        address=address,
        port=master_port if master_port is not None else free_port(),
        environment=environment,
        recipe=recipe,
        grace_seconds=grace_seconds,
    )


def check(
    asked: Asked,
    overrides: Sequence[str] = (),
    skip: Sequence[str] = (),
    seconds: float = 60.0,
    say: Callable[[str], None] = lambda round: None,
) -> Report:
    """Ask all nodes and judge what they say. `seconds`: how long ranks wait for each other; `say` hears of each round.

    What is in `skip` (names out of CHECKS) is not looked at. LaunchError where the recipe itself is refused.
    """
    unknown = next((name for name in skip if name not in CHECKS), None)
    if unknown is not None:
        raise LaunchError(f"--skip {unknown}: no check has this name; they are: {', '.join(CHECKS)}")
    if not 0 < seconds < math.inf:
        raise LaunchError(f"--wait-seconds {seconds:g}: must be more than 0")
    if asked.recipe is not None:
        plan = plan_recipe(asked.recipe, asked.ranks, overrides, check_data=False, memory=())  # of no device yet
        asked = replace(asked, plan=plan)
    return _Check(asked, overrides, skip, seconds, say).report()


class _Check:
    """One check under way."""

    def __init__(
        self,
        asked: Asked,
        overrides: Sequence[str],
        skip: Sequence[str],
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self.asked, self.overrides, self.skip, self.seconds, self.say = asked, overrides, skip, seconds, say
        token = secrets.token_hex(4)
        self.marks = {name: f".zerohalf-check-{token}-{number}" for number, name in enumerate(asked.names)}
        self.reached = Row("reachable")
        self.rows = [self.reached]

    def report(self) -> Report:
        nodes = f"{len(self.asked.hosts)} node{'s' * (len(self.asked.hosts) > 1)}"
        left = self.asked.names
        try:
            self.say(f"asking {nodes}")
            facts = self._facts()
            left = tuple(facts)
            self._judge_facts(facts)
            if self.asked.first in facts:
                self.say(f"{nodes}: does each find the first?")
                self._meet(facts)
        finally:  # the marks go, whatever happened
            self._ask(left, {name: {"ask": "sweep", **self._place(name)} for name in left}, SWEEP_SECONDS)
        if "all-reduce" not in self.skip:
            self.say(f"all-reduces over {self.asked.ranks} ranks")
            self.rows.append(self._all_reduce(facts))
        rows = sorted((row for row in self.rows if row.name not in self.skip), key=lambda row: CHECKS.index(row.name))
        return Report(self.asked, tuple(rows))

    def _facts(self) -> Facts:
        """By node, of those that answer; the row that says which do."""
        data = {} if self.asked.plan is None else self.asked.plan["data"]
        question = {
            "ask": "facts",
            "root": str(ROOT),
            "recipe": None if self.asked.recipe is None else str(self.asked.recipe),
            "data": data.get("path"),
            "tokenizer": data.get("tokenizer"),
            "write_bytes": 0 if "disk" in self.skip else WRITE_BYTES,
        }
        names = self.asked.names
        answers = self._ask(names, {name: {**question, **self._place(name)} for name in names}, FACTS_SECONDS)
        row, facts = self.reached, {}
        for name, answer in answers.items():
            if answer.unreachable is not None:
                said = answer.unreachable
                remedy = next(
                    (what for word, what in REMEDIES.items() if word in said.lower()), "try `ssh {node} true`"
                )
                row.fail(name, "no", f"{name} is not reached ({said}): {remedy.format(node=name)}")
            elif not answer.ok:
                reason = f"{name} answers, but cannot run {sys.executable} in {Path.cwd()} ({answer.reason()}): "
                row.fail(name, "cannot run", reason + "have the code and its virtualenv at the same place on all nodes")
            else:
                row.ok(name, "yes")
                facts[name] = _said(answer)
        return facts

    def _judge_facts(self, facts: Facts) -> None:
        has_gpus = any(fact["gpus"] or "gpus_error" in fact for fact in facts.values())
        on_gpus = has_gpus and self.asked.environment.get("DS_ACCELERATOR") != "cpu"
        self.asked = asked = replace(self.asked, device="cuda" if on_gpus else "cpu")
        self.rows += [node_checks.machines(facts), node_checks.code(facts)]
        self.rows += node_checks.versions(facts)
        self.rows += [node_checks.devices(asked, facts), node_checks.memory(asked, facts, self._needed_bytes())]
        self.rows += [node_checks.limits(asked, facts), path_checks.run_directory(asked, facts)]
        self.rows += [*path_checks.inputs(asked, facts), path_checks.disk(asked, facts)]
        self.rows += [network_checks.own_name(asked, facts)]

    def _needed_bytes(self) -> int | None:
        """Of one rank on such devices, by the plan; None without a recipe, or where it cannot be said from here."""
        asked = self.asked
        if asked.recipe is None or "free memory" in self.skip:
            return None
        device = "auto" if asked.device == "cpu" else "1TB"  # the need does not depend on what there is
        with contextlib.redirect_stderr(io.StringIO()):  # whether it fits this machine is not the question
            plan = plan_recipe(
                asked.recipe, asked.ranks, self.overrides, check_data=False, force=True,
                memory=("--device-memory", device),
            )  # fmt: skip
        return plan["verdict"]["needed_bytes"] if plan["memory"]["device"] == asked.device else None

    def _meet(self, facts: Facts) -> None:
        asked = self.asked
        question = {"ask": "meet", "address": asked.address, "port": asked.port, "seconds": MEET_SECONDS,
                    "nodes": len(facts), "marks": [self.marks[name] for name in facts]}  # fmt: skip
        questions = {
            name: {**question, **self._place(name), "listens": name == asked.first, "number": number}
            for number, name in enumerate(facts)
        }
        answers = self._ask(facts, questions, 2 * MEET_SECONDS)
        met = {name: _said(answer) for name, answer in answers.items() if answer.ok}
        for name, answer in answers.items():
            if not answer.ok:
                self.reached.fail(name, "lost", f"{name} was reached, and then it was not: {answer.reason()}")
        self.rows += [
            path_checks.sharing(asked, self.marks, met),
            network_checks.routes(asked, facts, met),
            network_checks.port(asked, met),
            network_checks.clock(met, answers),
        ]

    def _all_reduce(self, facts: Facts) -> Row:
        asked, row = self.asked, Row("all-reduce")
        first = next(
            (row.name for row in self.rows if row.failed and row.name in NEEDED and row.name not in self.skip), None
        )
        if first is not None or len(facts) < len(asked.hosts):
            for name in asked.names:
                row.skip(name, f"not tried: {first or 'reachable'}")
            return row
        questions, before = {}, 0
        for host in asked.hosts:
            questions[host.name] = {
                "address": asked.address, "port": asked.port, "seconds": self.seconds, "device": asked.device,
                "world_size": asked.ranks, "first_rank": before, "ranks_here": host.slots,
                "bytes": SUM_BYTES[asked.device],
            }  # fmt: skip
            before += host.slots
        source = Path(all_reduce.__file__).read_text(encoding="utf-8")
        answers = self._run(source, questions, 2 * self.seconds + 3 * all_reduce.END_SECONDS)
        ranks = {name: _said(answer) if answer.ok else answer.reason() for name, answer in answers.items()}
        return network_checks.all_reduce(asked, ranks, SUM_BYTES[asked.device])

    def _place(self, name: str) -> dict[str, Any]:
        return {"run": str(self.asked.run), "mark": self.marks[name]}

    def _ask(self, names: Sequence[str] | Facts, questions: Mapping[str, Any], timeout: float) -> dict[str, Answer]:
        source = Path(probe.__file__).read_text(encoding="utf-8")
        return self._run(source, {name: questions[name] for name in names}, timeout)

    def _run(self, source: str, questions: Mapping[str, Any], timeout: float) -> dict[str, Answer]:
        commands = {name: [sys.executable, "-c", source, json.dumps(ask)] for name, ask in questions.items()}
        return run_on(commands, directory=Path.cwd(), environment=self.asked.environment, timeout=timeout)


# Without these the ranks cannot come together, or would only say so later and in worse words.
NEEDED = ("reachable", "machine", "python", "torch", "devices", "own name", "interface", "port")


def _said(answer: Answer) -> Any:
    """What a node printed last: its libraries may have printed something before."""
    return json.loads(answer.stdout.strip().splitlines()[-1])
