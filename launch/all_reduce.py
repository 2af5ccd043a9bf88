"""All-reduces over every rank of every node: do they come together, are the sums right, how fast are they?

    python -c SOURCE-OF-THIS-FILE REQUEST        on each node, for all ranks of it; one JSON object a rank comes out

The ranks meet as those of a run do, at a store on the first node, and then as a process group: NCCL on GPUs, gloo on
CPUs. Each stage has its own end: a rank that never comes is named by all that did, well before torch's own timeout
would say that something took too long. The source travels with the question, see probe.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

# Nothing, one element, odd counts, more than one packet, and what no block size divides.
SIZES = (1, 7, 1021, 65_537)
TIMED_SECONDS = 1.0
MOST_ROUNDS = 20
END_SECONDS = 10.0  # behind two waits: for all to come, and for a sum


def run_rank(ask: dict[str, Any], local_rank: int) -> dict[str, Any]:
    """One rank from its first connection to its last sum. `fault` is None, or what went wrong; never raises for it.

    `ask`: address, port, seconds (for all to come, and for any one collective), first_rank, world_size, device ("cpu"
    or "cuda"), bytes (of the buffer that is timed).
    """
    rank = ask["first_rank"] + local_rank
    said: dict[str, Any] = {"rank": rank, "device": "cpu", "stage": "store", "fault": None, "absent": []}
    try:
        _work(ask, rank, local_rank, said)
    except (RuntimeError, ValueError, OSError) as error:  # torch's own for networks and timeouts are RuntimeErrors
        said["fault"] = (str(error).strip() or type(error).__name__).splitlines()[0]
    return said


def _work(ask: dict[str, Any], rank: int, local_rank: int, said: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    device = torch.device("cpu")
    if ask["device"] == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        said["device"] = f"cuda:{local_rank} {torch.cuda.get_device_name(device)}"
    world_size, patience = ask["world_size"], timedelta(seconds=ask["seconds"])
    store = TCPStore(ask["address"], ask["port"], is_master=rank == 0, wait_for_workers=False, timeout=patience)
    store.set(f"came/{rank}", "")
    if rank == 0:
        store.set("absent", json.dumps(_absent(store, world_size, ask["seconds"])))
    store.wait(["absent"], patience * 2)
    said["absent"] = json.loads(store.get("absent"))
    if said["absent"]:
        _leave(store, rank, set(range(world_size)) - set(said["absent"]), patience)
        return
    said["stage"] = "group"
    dist.init_process_group(
        "nccl" if ask["device"] == "cuda" else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=patience,
    )
    said["stage"] = "sums"
    said["wrong"] = [
        f"{dtype} × {size:,}: {wrong:,} wrong"
        for dtype in (torch.float32, torch.bfloat16)
        for size in SIZES
        if (wrong := wrong_elements(summed(rank, size, dtype, device), world_size))
    ]
    said["stage"] = "speed"
    said["bytes"] = ask["bytes"]
    said["seconds"] = _timed(ask["bytes"], device)
    said["stage"] = "end"
    _leave(store, rank, set(range(world_size)), patience)
    dist.destroy_process_group()


def _leave(store: Any, rank: int, present: set[int], patience: timedelta) -> None:
    """The store is rank 0's process: it goes last, when all who came have read what they need."""
    store.set(f"done/{rank}", "")
    if rank == 0:
        store.wait([f"done/{other}" for other in present], patience)


def _absent(store: Any, world_size: int, seconds: float) -> list[int]:
    """The ranks that have not come within `seconds`."""
    deadline = time.monotonic() + seconds
    absent = list(range(world_size))
    while absent and time.monotonic() < deadline:
        absent = [rank for rank in absent if not store.check([f"came/{rank}"])]
        time.sleep(0.05)
    return absent


def contribution(rank: int, size: int) -> torch.Tensor:
    """What a rank puts in: ones at every third place, (size,) in int64. A sum is a count of ranks, so it is exact in
    bf16 too, up to 768 ranks."""
    import torch

    return (torch.arange(size) % 3 == rank % 3).to(torch.int64)


def wrong_elements(total: torch.Tensor, world_size: int) -> int:
    """At how many places `total` is not the sum of all ranks' contributions."""
    expected = sum(contribution(rank, total.numel()) * count for rank, count in _residues(world_size))
    return int((total.cpu().double() != expected).sum())


def _residues(world_size: int) -> list[tuple[int, int]]:
    """(rank, how many ranks contribute the same) of the three kinds."""
    return [(kind, len(range(kind, world_size, 3))) for kind in range(3)]


def summed(rank: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The contributions of all ranks, summed by them all."""
    import torch.distributed as dist

    total = contribution(rank, size).to(device=device, dtype=dtype)
    dist.all_reduce(total)
    return total


def _timed(size_bytes: int, device: torch.device) -> float:
    """Seconds of one all-reduce of so many bytes in fp32, of the slowest rank, by the mean of several."""
    import torch
    import torch.distributed as dist

    buffer = torch.zeros(size_bytes // 4, device=device)

    def seconds(rounds: int) -> float:
        dist.all_reduce(torch.zeros(1, device=device))  # all begin together
        _wait_for(device)
        began = time.perf_counter()
        for _ in range(rounds):
            dist.all_reduce(buffer)
        _wait_for(device)
        slowest = torch.tensor((time.perf_counter() - began) / rounds, device=device, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    warm = seconds(1)
    return seconds(max(1, min(MOST_ROUNDS, int(TIMED_SECONDS / warm))))


def _wait_for(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bus_bandwidth(size_bytes: int, seconds: float, world_size: int) -> float:
    """Bytes a second that each link carries: 2·(n − 1)/n · size / time, which does not depend on the number of ranks.

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return 2 * (world_size - 1) / world_size * size_bytes / seconds


def main() -> None:
    """Fork this node's ranks, and print what each says; what one that died or hangs leaves unsaid is said here."""
    import torch  # noqa: F401 - once for all ranks of the node: they are forks

    ask = json.loads(sys.argv[1])
    forks = multiprocessing.get_context("fork")
    ranks: dict[Any, tuple[int, Any]] = {}  # by their pipes
    for local_rank in range(ask["ranks_here"]):
        receiver, sender = forks.Pipe(duplex=False)
        process = forks.Process(target=_rank_main, args=(ask, local_rank, sender), daemon=True)
        process.start()
        sender.close()
        ranks[receiver] = (local_rank, process)
    limit = 2 * ask["seconds"] + END_SECONDS
    deadline = time.monotonic() + limit
    results = []
    while ranks and (ready := wait(list(ranks), max(deadline - time.monotonic(), 0))):
        for pipe in cast(list[Connection], ready):
            local_rank, process = ranks.pop(pipe)
            try:
                results.append(pipe.recv())
            except EOFError:
                process.join()
                fault = f"it ended with code {process.exitcode}"
                results.append({"rank": ask["first_rank"] + local_rank, "stage": "process", "fault": fault})
    for local_rank, process in ranks.values():
        process.kill()
        fault = f"it gave no answer in {limit:g} s"
        results.append({"rank": ask["first_rank"] + local_rank, "stage": "process", "fault": fault})
    print(json.dumps(sorted(results, key=lambda one: one["rank"])))


def _rank_main(ask: dict[str, Any], local_rank: int, sender: Connection) -> None:
    os.dup2(2, 1)  # stdout is for the answer alone
    sender.send(run_rank(ask, local_rank))


if __name__ == "__main__":
    main()
