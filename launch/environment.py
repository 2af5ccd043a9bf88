"""What of the environment reaches the ranks: here all of it, on other nodes an explicit list.

A secret is never shown, and never passed on to another node: launchers put what they pass on into a command line, which
everybody on the node can read. DeepSpeed takes its list from a file; ours is one in memory that has no name on a disk.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence

from launch.errors import LaunchError

# Passed on to other nodes where they are set; a name that ends with _ stands for all that begin so.
PASSED = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "DEEPSPEED_TIMEOUT", "DS_ACCELERATOR", "FI_", "GLOO_", "HF_HOME", "HF_HUB_OFFLINE",
    "LD_LIBRARY_PATH", "MKL_NUM_THREADS", "NCCL_", "OMP_NUM_THREADS", "PYTHON", "PYTORCH_", "TORCHINDUCTOR_", "TORCH_",
    "TRITON_CACHE_DIR", "UCX_",
)  # fmt: skip
# What DeepSpeed 0.19 passes on by itself and nobody asked for (EXPORT_ENVS in its launcher/runner.py).
UNASKED = ("MLFLOW", "MV2")
# All that it passes on by itself, with what its CUDA accelerator adds.
EXPORTED = (*UNASKED, "NCCL", "PYTHON", "UCX")
# Set for each rank by whoever starts it.
RESERVED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ENV_FILE")
# Anywhere in a name, for many are written without an underscore (PGPASSWORD); short ones as a word or at its end.
SECRET = re.compile(
    r"AUTH|BEARER|COOKIE|CREDENTIAL|JWT|KEY|PASSCODE|PASSPHRASE|PASSW|PRIVATE|SECRET|TOKEN"
    r"|(?:PASS|PWD|CREDS)[0-9]*(?![A-Z0-9])|(?<![A-Z])PAT[0-9]*(?![A-Z0-9])"
)
# What has such letters and is none; each as a whole word, so that COMMONKEY is none of them.
HARMLESS = re.compile(
    r"(?<![A-Z0-9])(?:AUTHORS?|BYPASS|COMPASS|KEYBOARDS?|KEYMAPS?|MONKEYS?|PKEY"
    r"|TOKENI[SZ](?:ATION|ED?|ERS?|ING))(?![A-Z0-9])|\A(?:OLD)?PWD\Z"
)
MASK = "***"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# DeepSpeed's launcher writes `export NAME="VALUE"` and strips it; these would not arrive as they are.
UNSAFE = re.compile(r'["$`\\\n\r]|^\s|\s$')


def looks_secret(name: str) -> bool:
    """Whether a variable's name says that its value is nobody's business: it has TOKEN, KEY, PASSWORD, … in it."""
    return SECRET.search(HARMLESS.sub("", name.upper())) is not None


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """The same with secrets masked: for people's eyes and for files."""
    return {name: MASK if looks_secret(name) else value for name, value in environment.items()}


def to_text(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in shown(environment).items())


def asked_for(wishes: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What `--env NAME` and `--env NAME=VALUE` add. LaunchError: no name, not set here, or a launcher's own."""
    asked = {}
    for wish in wishes:
        name, equals, value = wish.partition("=")
        told = name if equals else "NAME"  # what stands there may be a secret's value
        if not NAME.fullmatch(name):
            raise LaunchError(f"--env {told}: give NAME or NAME=VALUE, a name of letters, digits and _")
        if name in RESERVED:
            raise LaunchError(f"--env {name}: whoever starts a rank sets that for it: leave it out")
        if not equals and name not in environ:
            raise LaunchError(f"--env {name}: it is not set here: give {name}=VALUE, or leave it out")
        asked[name] = value if equals else environ[name]
    return asked


def passed_on(environ: Mapping[str, str], added: Mapping[str, str], asked: Mapping[str, str]) -> dict[str, str]:
    """What other nodes are given: the list's names that are set, without secrets, what a run adds, what was asked for.

    LaunchError where what was asked for is a secret, or has letters that a remote shell would not leave alone.
    """
    secret = next(filter(looks_secret, asked), None)
    if secret is not None:
        raise LaunchError(
            f"--env {secret}: looks like a secret, and what is passed on to other nodes stands in command lines that "
            "everybody there can read: set it on the nodes themselves, or start with --node-rank on each of them"
        )
    listed = {name: value for name, value in environ.items() if is_listed(name) and not looks_secret(name)}
    passed = {**listed, **added, **asked}
    for name, value in sorted(passed.items()):
        if UNSAFE.search(value):
            raise LaunchError(
                f"{name} cannot be passed on to other nodes: its value has a quote, $, `, \\, a line end, or space "
                "around it: change it, or unset it here and set it on the nodes"
            )
    return dict(sorted(passed.items()))


def is_listed(name: str) -> bool:
    return any(name == one or ((one.endswith("_") or one == "PYTHON") and name.startswith(one)) for one in PASSED)


def of_runner(environ: Mapping[str, str], launcher: str) -> dict[str, str]:
    """What DeepSpeed's launcher itself gets here: without what it would pass on by itself although nobody asked, and
    without any secret where that is MPICH's mpirun, which passes on all that it has."""

    def reaches_all(name: str) -> bool:
        return launcher == "mpich" or name.startswith(EXPORTED)

    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(UNASKED) and not (looks_secret(name) and reaches_all(name))
    }


def file_in_memory(passed: Mapping[str, str], *, escape_percent: bool) -> int:
    """The descriptor of a file as DeepSpeed reads it (DS_ENV_FILE), which lives as long as somebody has it open.

    `escape_percent`: pdsh writes host names and numbers for %h and %n, in values too, and % for %%.
    """
    descriptor = os.memfd_create("environment")
    lines = (f"{name}={value.replace('%', '%%') if escape_percent else value}\n" for name, value in passed.items())
    os.write(descriptor, "".join(lines).encode())
    return descriptor
