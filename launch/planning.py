"""What `pretrain plan` says of a recipe, asked as a command of its own: this room imports nothing of the trainer."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.errors import LaunchError


def as_argument(recipe: Path) -> str:
    """The recipe on a command line: never an option, also where its name begins with a dash."""
    return f"./{recipe}" if str(recipe).startswith("-") else str(recipe)


def plan_recipe(
    recipe: Path,
    world_size: int,
    overrides: Sequence[str],
    *,
    check_data: bool,
    force: bool = False,
    memory: Sequence[str] = ("--device-memory", "auto"),
    ranks_here: int | None = None,
    run: Path | None = None,
    resume: str = "auto",
    changes: Sequence[str] = (),
) -> dict[str, Any]:
    """The JSON of `pretrain plan`, run as a command of its own. LaunchError with its error line when it refuses.

    `memory` are its options that say what a rank has; this machine's, if nothing is said, shared by `ranks_here` ranks
    (all of them, if that is not given). With a `run` directory it tells which checkpoint there would be gone on from,
    and refuses what would be refused there, but for `changes`.
    """
    command = [sys.executable, "-m", "pretrain", "plan", as_argument(recipe), "--json", "--world-size", str(world_size)]
    command += [*memory, *(["--force"] if force else [])]
    command += [word for override in overrides for word in ("--set", override)]
    command += ["--check-data"] if check_data else []
    command += [] if run is None else ["--run", str(run), "--resume", resume]
    command += [] if run is None else [word for name in changes for word in ("--change", name)]
    # It is no rank: a RANK that something else left in the environment would silence it.
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    if ranks_here is not None:
        environment["LOCAL_WORLD_SIZE"] = str(ranks_here)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"`{shlex.join(command)}` ended with code {done.returncode}"]
        raise LaunchError(lines[-1].removeprefix("error: "))
    sys.stderr.write(done.stderr)
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def described(plan: dict[str, Any], ranks: int) -> list[tuple[str, str]]:
    """What a plan says that a person wants to read before a start: label and text."""
    steps = plan["gradient_accumulation_steps"]
    batch = f"{plan['micro_batch_size']} × {counted(steps, 'micro-step')} × {counted(ranks, 'rank')}"
    tokens = f"{plan['tokens_per_step']:,} tokens a step"
    lines = [("effective batch", f"{plan['global_batch_size']} sequences = {batch}, {tokens}")]
    verdict = plan.get("verdict")
    if verdict is not None:
        need, has = verdict["needed_bytes"] / 1e9, verdict["device_memory_bytes"] / 1e9
        fits = "fits" if verdict["fits"] else "does not fit"
        source = verdict["device_memory_is"]
        lines.append(("memory", f"{fits}: a rank needs {need:.2f} GB and has {has:.2f} GB ({source})"))
    else:
        lines.append(("memory", "no verdict, the ranks are not on this machine: each looks for itself at its start"))
    if "data" in plan:
        lines.append(("data", f"{plan['data']['path']}, tokenizer {plan['data']['tokenizer']}"))
    if "resume" in plan:
        lines.append(("checkpoint", _resumed(plan["resume"])))
        lines += [("", line) for line in (plan["resume"] or {}).get("told", ())]
    return lines


def counted(number: int, what: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _resumed(found: Mapping[str, Any] | None) -> str:
    """What `plan` says of the checkpoint that the run would go on from."""
    if found is None:
        return "none: it begins at step 0"
    words = [f"{found['checkpoint']}, step {found['global_step']:,}"]
    if found.get("converted"):
        earlier = found["written_by"]
        words.append(f"converted from {counted(earlier['world_size'], 'rank')} under ZeRO-{earlier['zero_stage']}")
    words += [f"part {found['part']}, the machines must hold the rest between them"] if "part" in found else []
    return "; ".join(words)
