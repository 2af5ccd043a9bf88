"""What is known of a failure from what was said last: the cause in plain words, and what to change."""

from __future__ import annotations

import re

RESUMES = "the same command resumes from the last checkpoint"

# The first that is found, in this order: the words of programs, what they mean.
HINTS: tuple[tuple[str, str], ...] = (
    (
        r"error: .*does not fit: a rank needs",
        "",  # it says itself what to set
    ),
    (
        r"error: .*out of memory",
        "main memory or a GPU's ran out: set what the words before this say; `python -m pretrain plan RECIPE "
        "--world-size N --device-memory auto --fit` says what else would fit",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError|MemoryError|std::bad_alloc|[Cc]annot allocate memory",
        "memory ran out: `python -m pretrain plan RECIPE --world-size N --device-memory auto --fit` says what fits",
    ),
    (
        r"[Aa]ddress already in use|EADDRINUSE",
        "another program has the port at which the ranks meet: start again, which takes another, or leave out "
        "--master-port or give another",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        f"the disk is full: make room, and {RESUMES}",
    ),
    (
        r"has another [\w ]+ than rank 0|[Oo]ther code|different code",
        "the nodes differ: `python -m launch check` compares all of them",
    ),
    (
        r"No route to host|[Nn]etwork is unreachable|EHOSTUNREACH|ENETUNREACH",
        "no way leads from one node to another: give an address that all nodes reach with --master-addr, and the "
        "interface with --env NCCL_SOCKET_IFNAME=NAME and --env GLOO_SOCKET_IFNAME=NAME; see `python -m launch check`",
    ),
    (
        r"[Nn]ame or service not known|[Tt]emporary failure in name resolution|nodename nor servname",
        "a node's name has no address there: give --master-addr as a number, or write the name into /etc/hosts",
    ),
    (
        r"[Cc]onnection refused|ECONNREFUSED",
        "nobody listened where the ranks were to meet, or a rank had told 127.0.0.1 as its address: is the first node "
        "running, does --master-addr name it, does a firewall stand between? --env GLOO_SOCKET_IFNAME=NAME and --env "
        "NCCL_SOCKET_IFNAME=NAME name the interface; see `python -m launch check`",
    ),
    (
        r"client socket has timed out|[Tt]imed out (?:after|waiting)|[Tt]imeout waiting|gave no answer for|"
        r"[Cc]onnection timed out|cannot meet at .*(?:timed out|[Tt]imeout)",
        "not all ranks came, or one fell silent: look in the logs for a rank that failed or never started, and for a "
        "firewall between the nodes; --timeout-minutes says how long they wait",
    ),
    (
        r"NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|ncclRemoteError|NCCL WARN",
        "NCCL failed: start again with --env NCCL_DEBUG=INFO, which says where; most often it took a wrong interface: "
        "--env NCCL_SOCKET_IFNAME=NAME, and --env NCCL_IB_DISABLE=1 without InfiniBand",
    ),
    (
        r"CUDA error|cudaError|device-side assert|uncorrectable ECC|Xid",
        "a GPU or its driver failed: see `nvidia-smi` and `dmesg` of that node, and `python -m launch check`",
    ),
    (
        r"No module named|ModuleNotFoundError|ImportError",
        "a package is missing on that node: the virtualenv must be the same on every node (make setup)",
    ),
)
# Said by ranks that only lost another one: its failure is the one to tell of.
LOST = re.compile(r"another rank (?:is gone|gave no answer)|Connection closed by peer|[Cc]onnection reset by peer")
TRACEBACK, ERROR = "Traceback (most recent call last)", "error: "
# Ours, and those of torch's own log: no rank ends of one.
WARNING = re.compile(r"warning: |\[W[01]\d[0-3]\d \d\d:\d\d:\d\d")


def hint(said: str, code: int) -> str | None:
    """What to do about a rank that ended with this code (less than 0: by that signal) and said this last."""
    told = "\n".join(line for line in said.split("\n") if not WARNING.match(line))
    for words, advice in HINTS:
        if re.search(words, told):
            return advice or None
    if code == -9:
        return (
            "SIGKILL came from outside: most often from Linux when main memory ran out (`dmesg` of that node says so; "
            "`python -m pretrain plan RECIPE --device-memory auto --fit` says what would fit), else from a person or a "
            "scheduler"
        )
    return None


def only_lost(said: str) -> bool:
    """Whether a rank says nothing but that another one is gone."""
    return LOST.search(said) is not None


def tells_why(said: str) -> bool:
    """Whether there is an `error:` line or a traceback in what a rank said: with others, it may have been silent."""
    return any(line.lstrip().startswith((TRACEBACK, ERROR)) for line in said.split("\n"))


def last_words(said: str, rank: int, lines: int = 40) -> tuple[str, str]:
    """The last traceback of what a rank said, "" without one, and the one line that tells most of how it ended.

    Of a traceback its last line; else the last line that begins with `error:`; else the last that is no warning. It
    names another rank where that one's fault is told of.
    """
    text = said.rstrip("\n").split("\n")
    starts = [number for number, line in enumerate(text) if line.startswith(TRACEBACK)]
    errors = [line for line in text if line.lstrip().startswith(ERROR)]
    traceback = text[starts[-1] :] if starts else []
    ends = [number for number, line in enumerate(traceback[1:], 1) if line and not line[0].isspace()]
    if ends and not errors:
        kept = traceback[: ends[0] + 1]
        shown = kept if len(kept) <= lines else [kept[0], "  …", *kept[-lines:]]
        return "\n".join(shown), kept[-1]
    filled = [line for line in text if line.strip() and not WARNING.match(line)]
    line = errors[-1] if errors else filled[-1] if filled else ""
    return "", re.sub(rf"^error: (?:rank {rank}: )?", "", line.strip())
