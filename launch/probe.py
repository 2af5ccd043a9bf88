"""What one node says of itself, as one JSON object: `python -c SOURCE-OF-THIS-FILE REQUEST`.

The source travels with the question, so that all nodes are asked the same, also one that has other code of ours or
none: standard library only, nothing of ours. Nothing here judges; the *_checks.py do. A question is a JSON object:

    {"ask": "facts", ...}    versions, code, devices, memory, paths, speed of the disk; leaves a mark
    {"ask": "meet", ...}     the clock; whose marks are seen; all open a connection to the first node, which listens
    {"ask": "sweep", ...}    removes the mark

What a node cannot say is None; what went wrong on the way is a text under `…_error`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import ipaddress
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGES = ("tokenizer", "data_pipeline", "model", "pretrain", "launch")
LIBRARIES = (
    "torch", "deepspeed", "numpy", "pydantic", "orjson", "safetensors", "sentencepiece", "tokenizers", "pyarrow",
    "zstandard", "typer", "rich", "liger-kernel",
)  # fmt: skip
CODE = ("*.py", "*.cpp", "*.toml", "*.json")
SMI_SECONDS = 30.0
WRITE_BLOCK = 16 * 2**20
WRITE_SECONDS = 3.0
GPU_FIELDS = "index,name,memory.total,memory.used,driver_version,uuid"


def facts(ask: dict[str, Any]) -> dict[str, Any]:
    """Everything about this node that needs no other one. `root`: of our code; `run`, `data`, `tokenizer`, `recipe`:
    paths or None; `mark`: the name of the file to leave; `write_bytes`: at most so much is written, and removed."""
    root = Path(ask["root"])
    return {
        "hostname": socket.gethostname(),
        "machine": _machine(),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        **_git(root),
        "files": _digests(root, ask["recipe"]),
        **_gpus(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **_memory(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shared_memory_bytes": _total(Path("/dev/shm")),
        **_run_directory(Path(ask["run"]), ask["mark"], ask["write_bytes"]),
        **_collection(ask["data"]),
        **_tokenizer(ask["tokenizer"]),
        "own_addresses": _resolve(socket.gethostname()),
        "addresses": dict(_interfaces()),
        "default_route": _route("192.0.2.1"),  # TEST-NET-1 of RFC 5737: no packet is sent
    }


def meet(ask: dict[str, Any]) -> dict[str, Any]:
    """The clock, the marks of others, and a connection from every node to the first.

    `listens`: this is the first node; `address`, `port` of the first; `seconds` until nobody waits any more; `nodes`
    that will come; `number` of this one; `marks`: their names, node by node.
    """
    said: dict[str, Any] = {"began_at": time.time(), "route": _route(ask["address"])}
    said.update(_listen(ask) if ask["listens"] else _connect(ask))
    run = Path(ask["run"])
    places = (run, *run.parents)
    said["marks"] = [mark for mark in ask["marks"] if any((place / mark).exists() for place in places)]
    return {**said, "ended_at": time.time()}


def sweep(ask: dict[str, Any]) -> dict[str, Any]:
    """Remove this node's mark."""
    with suppress(OSError):
        (_existing(Path(ask["run"])) / ask["mark"]).unlink()
    return {}


# ---------------------------------------------------------------- code and versions


def _machine() -> str:
    """The same for two names of one machine: its boot, and the network it has (containers of one machine differ)."""
    boot = _text(Path("/proc/sys/kernel/random/boot_id")).strip() or socket.gethostname()
    with suppress(OSError):
        boot += f" {os.readlink('/proc/self/ns/net')}"  # noqa: PTH115 - its text is no path
    return boot


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(root: Path) -> dict[str, Any]:
    commit, changed = _git_says(root, "rev-parse", "HEAD"), _git_says(root, "status", "--porcelain", "-uno")
    return {
        "commit": commit.strip() if commit else None,
        "changed": [line[3:] for line in changed.splitlines()] if changed is not None else [],
    }


def _git_says(root: Path, *words: str) -> str | None:
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=False)
        return done.stdout if done.returncode == 0 else None
    return None


def _digests(root: Path, recipe: str | None) -> dict[str, str]:
    """Path → the beginning of the hash of every file that a run depends on, where git is not needed."""
    paths = {path for package in PACKAGES for form in CODE for path in (root / package).rglob(form)}
    paths |= set((root / "ds_configs").glob("*.json"))
    named = {str(path.relative_to(root)): path for path in paths if "__pycache__" not in path.parts}
    if recipe is not None:
        named[recipe] = Path(recipe)
    found = {}
    for name, path in sorted(named.items()):
        with suppress(OSError):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


# ---------------------------------------------------------------- devices and memory


def _gpus() -> dict[str, Any]:
    """`gpus`: index, name, total_bytes, used_bytes; `driver`. Without nvidia-smi there are none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return {"gpus": [], "driver": None}
    command = [smi, f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"gpus": [], "driver": None, "gpus_error": f"nvidia-smi: {error}"}
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"code {done.returncode}").splitlines()[0]
        return {"gpus": [], "driver": None, "gpus_error": f"nvidia-smi: {said}"}
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    gpus = [
        {"index": int(row[0]), "name": row[1], "total_bytes": _mib(row[2]), "used_bytes": _mib(row[3]), "uuid": row[5]}
        for row in rows
    ]
    return {"gpus": gpus, "driver": rows[0][4] if rows else None}


def _mib(word: str) -> int | None:
    return int(word) * 2**20 if word.isdigit() else None  # "[N/A]", where memory is the machine's own


def _memory() -> dict[str, Any]:
    """Main memory: all, and free for use now, within the control groups that this process is in."""
    meminfo = _words(Path("/proc/meminfo"))
    if "MemTotal" not in meminfo:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"memory_bytes": physical, "available_bytes": physical}
    total = meminfo["MemTotal"] * 1024
    available = meminfo.get("MemAvailable", meminfo["MemTotal"]) * 1024
    for limit, used in _control_groups():
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return {"memory_bytes": total, "available_bytes": available}


def _control_groups() -> Iterator[tuple[int, int]]:
    """(limit, used) of each memory control group, v1 and v2, at every level. Page cache that no one used lately is not
    counted as used: the kernel would reclaim it first."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            tree, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            tree = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        place = Path(path.lstrip("/"))
        for level in (place, *place.parents):
            limit, used = (_text(tree / level / name).strip() for name in names[:2])
            if limit.isdigit():  # "max" is none
                idle = _words(tree / level / "memory.stat").get(names[2], 0)
                yield int(limit), max(int(used or 0) - idle, 0)


# ---------------------------------------------------------------- paths


def _run_directory(run: Path, mark: str, write_bytes: int) -> dict[str, Any]:
    """Can it be written, what is free there, how fast does it write. One that is not there yet: its nearest parent."""
    place = _existing(run)
    said: dict[str, Any] = {"run_place": str(place), "free_bytes": None, "written_bytes": 0, "write_seconds": None}
    try:
        said["free_bytes"] = shutil.disk_usage(place).free
        (place / mark).write_text(socket.gethostname())
    except OSError as error:
        return {**said, "run_error": error.strerror or str(error)}
    try:
        said.update(_write(place, min(write_bytes, said["free_bytes"] // 10)))
    except OSError as error:
        said["write_error"] = error.strerror or str(error)
    return said


def _write(place: Path, most_bytes: int) -> dict[str, Any]:
    """Bytes written and flushed to the disk, and in what time: in blocks, for some seconds at most.

    The file has no name while it is written, so that a kill leaves nothing behind.
    """
    path = place / f".zerohalf-speed-{os.getpid()}-{time.time_ns()}"
    block = os.urandom(min(WRITE_BLOCK, max(most_bytes, 1)))
    with path.open("xb", buffering=0) as file:
        path.unlink()
        written, began = 0, time.perf_counter()
        while written < most_bytes and time.perf_counter() - began < WRITE_SECONDS:
            written += file.write(block)
            os.fsync(file.fileno())
        return {"written_bytes": written, "write_seconds": time.perf_counter() - began}


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())


def _collection(data: str | None) -> dict[str, Any]:
    """`data_sha256`: of the manifest and its sources' manifests, in which every shard's hash stands; `data_missing`: a
    shard that is not there. None where no data was asked for."""
    if data is None:
        return {"data_sha256": None}
    root, missing = Path(data), None
    whole = hashlib.sha256()
    try:
        raw = (root / "manifest.json").read_bytes()
        whole.update(raw)
        for name in sorted(json.loads(raw)["sources"]):
            raw = (root / name / "manifest.json").read_bytes()
            whole.update(raw)
            for split in json.loads(raw)["splits"].values():
                for shard in split["shards"]:
                    for ending in ("bin", "idx"):
                        path = root / name / f"{shard['name']}.{ending}"
                        missing = missing or (None if path.is_file() else str(path))
    except OSError as error:
        return {"data_sha256": None, "data_error": f"{error.filename}: {error.strerror}"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"data_sha256": None, "data_error": f"{data} holds a manifest that is none"}
    return {"data_sha256": whole.hexdigest(), "data_missing": missing}


def _tokenizer(folder: str | None) -> dict[str, Any]:
    """`tokenizer_sha256`: of the names and contents of the folder's files."""
    if folder is None:
        return {"tokenizer_sha256": None}
    whole = hashlib.sha256()
    try:
        for path in sorted(path for path in Path(folder).iterdir() if path.is_file()):
            whole.update(f"{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    except OSError as error:
        return {"tokenizer_sha256": None, "tokenizer_error": f"{error.filename}: {error.strerror}"}
    return {"tokenizer_sha256": whole.hexdigest()}


def _total(place: Path) -> int | None:
    try:
        return shutil.disk_usage(place).total
    except OSError:
        return None


# ---------------------------------------------------------------- network


def _resolve(name: str) -> list[str]:
    """The addresses a name has on this node; [] where it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _route(name: str) -> str | None:
    """The own address from which packets to `name` would leave, as the kernel's routes say; nothing is sent."""
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def _interfaces() -> Iterator[tuple[str, str]]:
    """(address, interface) of this node's IPv4 addresses, from `ip`, and of its IPv6 ones; nothing without `ip`."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, timeout=10, check=False)
        for line in done.stdout.splitlines():
            words = line.split()
            if len(words) > 3 and words[2] in ("inet", "inet6"):
                yield words[3].partition("/")[0], words[1]


def _listen(ask: dict[str, Any]) -> dict[str, Any]:
    """Wait at the port until all others have come, and say who: by the numbers they send."""
    came: list[int] = []
    deadline = time.monotonic() + ask["seconds"]
    try:
        # Both families where there are both; no SO_REUSEPORT, so a port that others listen at is told.
        server = socket.create_server(("", ask["port"]), backlog=128)
    except OSError as error:
        return {"listen_error": error.strerror or str(error)}
    with server:
        while len(came) < ask["nodes"] - 1 and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(2)
                    came.append(int(connection.recv(16) or b"-1"))
                    connection.sendall(b"seen")
    return {"came": came}


def _connect(ask: dict[str, Any]) -> dict[str, Any]:
    """Open a connection to the first node, as ranks do that meet there; it may begin to listen later than we come."""
    deadline = time.monotonic() + ask["seconds"]
    reason = "no time was left"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((ask["address"], ask["port"]), timeout=left) as connection:
                connection.sendall(str(ask["number"]).encode())
                if connection.recv(16) == b"seen":
                    return {"connected_from": str(connection.getsockname()[0])}
                reason = "something else answers there"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(0.2)
    return {"connect_error": reason}


# ---------------------------------------------------------------- small things


def is_loopback(address: str) -> bool:
    """Whether an address is one that no other machine can reach."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _words(path: Path) -> dict[str, int]:
    """`name number` or `name: number kB` a line."""
    pairs = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}


def main() -> None:
    ask = json.loads(sys.argv[1])
    answers = {"facts": facts, "meet": meet, "sweep": sweep}
    print(json.dumps(answers[ask["ask"]](ask)))


if __name__ == "__main__":
    main()
