"""One loader of windows in a process of its own, which data_peers.py drives by lines of JSON.

A process a loader: what one does to a process (threads, shared memory, imports) does not reach the next, and a peer
whose dependencies don't go together with ours runs under a Python of its own. So nothing of this project is imported
here, but for its own loader. Each peer is set up as its documentation does it for tokens: windows of seq_len + 1 tokens
are stored, shuffled windows come out in batches of int64.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Job:
    """`tokens_file` holds uint16 tokens and nothing else, the same ones as the collection in `collection`.

    Window j of `windows` is tokens j x seq_len to (j + 1) x seq_len inclusive. `out` is the loader's own folder.
    """

    name: str
    workers: int
    tokens_file: str
    collection: str
    out: str
    windows: int
    seq_len: int
    batch_size: int
    seed: int

    @property
    def batches(self) -> int:
        """Of an epoch, the last one perhaps not whole."""
        return -(-self.windows // self.batch_size)

    def rows(self, start: int, stop: int) -> npt.NDArray[np.uint16]:
        """These windows, (stop - start, seq_len + 1)."""
        tokens = np.memmap(self.tokens_file, "<u2", "r")
        return np.lib.stride_tricks.sliding_window_view(tokens, self.seq_len + 1)[:: self.seq_len][start:stop]


def digests(rows: npt.NDArray[Any]) -> Digests:
    """A hash of each row of ids, (rows,)."""
    hashes = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows.astype("<i8")]
    return np.frombuffer(b"".join(hashes), "<u8")


class Contender(Protocol):
    """A loader, set up for a job."""

    package: str

    def write(self) -> None:
        """Store the windows in the loader's own way."""

    def state(self, batches: int) -> Any:
        """What a checkpoint holds after so many batches."""

    def batches(self, state: Any = None) -> Iterator[Any]:
        """The batches of one epoch, from the start or where a state was taken. Everything is set up anew."""

    def rows(self, batch: Any) -> npt.NDArray[np.int64]:
        """The windows of a batch, (batch, seq_len + 1)."""


class Zerohalf:
    package = "numpy"

    def __init__(self, job: Job) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        import data_pipeline.loader
        import data_pipeline.shards
        import data_pipeline.stream  # noqa: F401

        self.job = job

    def write(self) -> None:
        pass  # `prepare` has

    def state(self, batches: int) -> int:
        return batches * self.job.batch_size

    def batches(self, state: int = 0) -> Iterator[Any]:
        from data_pipeline.loader import Loader
        from data_pipeline.order import SampleOrder
        from data_pipeline.shards import open_collection
        from data_pipeline.stream import TokenStream

        splits = {name: one.splits["train"] for name, one in open_collection(self.job.collection).sources.items()}
        order = SampleOrder(
            seed=self.job.seed, seq_len=self.job.seq_len, tokens={name: split.tokens for name, split in splits.items()}
        )
        with Loader(
            order, {name: TokenStream(split) for name, split in splits.items()}, rank=0, world_size=1,
            micro_batch_size=self.job.batch_size, gradient_accumulation_steps=1, first_sample=state or 0,
        ) as loader:  # fmt: skip
            yield from itertools.islice(loader, self.job.batches - (state or 0) // self.job.batch_size)

    def rows(self, batch: Any) -> npt.NDArray[np.int64]:
        """Those of this epoch: the last batch runs on into the next one."""
        whole = np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)
        rows: npt.NDArray[np.int64] = whole[batch.samples < self.job.windows]
        return rows


class HuggingFace:
    """A map-style data set in torch's format, torch's DataLoader. A resume skips the sampler's first batches."""

    package = "datasets"

    def __init__(self, job: Job) -> None:
        import datasets
        import torch.utils.data

        datasets.disable_progress_bars()
        self.job, self.datasets, self.data, self.generator = job, datasets, torch.utils.data, torch.Generator

    def write(self) -> None:
        features = self.datasets.Features({"tokens": self.datasets.Sequence(self.datasets.Value("uint16"))})
        rows = self.job.rows(0, self.job.windows)
        self.datasets.Dataset.from_dict({"tokens": list(rows)}, features=features).save_to_disk(self.job.out)

    def state(self, batches: int) -> int:
        return batches

    def batches(self, state: int = 0) -> Iterator[Any]:
        windows = self.datasets.load_from_disk(self.job.out).with_format("torch")
        sampler = self.data.RandomSampler(windows, generator=self.generator().manual_seed(self.job.seed))
        batches = self.data.BatchSampler(sampler, self.job.batch_size, drop_last=False)
        rest = list(itertools.islice(batches, state, None)) if state else batches
        for batch in self.data.DataLoader(windows, batch_sampler=rest, num_workers=self.job.workers):
            yield batch["tokens"]

    def rows(self, batch: Any) -> npt.NDArray[np.int64]:
        return _int64(batch)


class Streaming:
    """MosaicML's MDS shards of windows, not compressed."""

    package = "mosaicml-streaming"

    def __init__(self, job: Job) -> None:
        import torch

        streaming = import_module("streaming")

        class Windows(streaming.StreamingDataset):  # type: ignore[misc,name-defined]
            def __getitem__(self, index: int) -> Any:
                return torch.from_numpy(super().__getitem__(index)["tokens"].astype(np.int64))

        self.job, self.streaming, self.data_set = job, streaming, Windows

    def write(self) -> None:
        columns = {"tokens": f"ndarray:uint16:{self.job.seq_len + 1}"}
        with self.streaming.MDSWriter(out=self.job.out, columns=columns) as writer:
            for row in self.job.rows(0, self.job.windows):
                writer.write({"tokens": row})

    def loader(self) -> Any:
        self.streaming.base.util.clean_stale_shared_memory()
        windows = self.data_set(
            local=self.job.out, shuffle=True, shuffle_seed=self.job.seed, batch_size=self.job.batch_size
        )
        return self.streaming.StreamingDataLoader(windows, batch_size=self.job.batch_size, num_workers=self.job.workers)

    def state(self, batches: int) -> Any:
        return _state_after(self.loader(), batches)

    def batches(self, state: Any = None) -> Iterator[Any]:
        loader = self.loader()
        if state is not None:
            loader.load_state_dict(state)
        yield from loader

    def rows(self, batch: Any) -> npt.NDArray[np.int64]:
        return _int64(batch)


class LitData:
    """Chunks of tokens, read in blocks. The windows are stored end to end, so that a block is a window."""

    package = "litdata"
    chunk_windows = 8192

    def __init__(self, job: Job) -> None:
        self.job, self.litdata = job, import_module("litdata")

    def write(self) -> None:
        starts = range(0, self.job.windows, self.chunk_windows)
        self.litdata.optimize(
            fn=partial(litdata_windows, self.job), inputs=list(starts), output_dir=self.job.out, num_workers=1,
            chunk_size=self.chunk_windows * (self.job.seq_len + 1), item_loader=self.blocks(),
        )  # fmt: skip

    def blocks(self) -> Any:
        return self.litdata.TokensLoader(block_size=self.job.seq_len + 1)

    def loader(self) -> Any:
        windows = self.litdata.StreamingDataset(
            self.job.out, item_loader=self.blocks(), shuffle=True, drop_last=False, seed=self.job.seed
        )
        return self.litdata.StreamingDataLoader(windows, batch_size=self.job.batch_size, num_workers=self.job.workers)

    def state(self, batches: int) -> Any:
        return _state_after(self.loader(), batches)

    def batches(self, state: Any = None) -> Iterator[Any]:
        loader = self.loader()
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            yield batch.long()

    def rows(self, batch: Any) -> npt.NDArray[np.int64]:
        return _int64(batch)


def litdata_windows(job: Job, start: int) -> Iterator[Any]:
    """Windows end to end, for `optimize`, which wants a function that it can send to its workers."""
    import torch

    for row in job.rows(start, min(start + LitData.chunk_windows, job.windows)):
        yield torch.from_numpy(row.copy())


def _state_after(loader: Any, batches: int) -> Any:
    """The loader's own state when so many batches have been taken."""
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return loader.state_dict()


def _int64(batch: Any) -> npt.NDArray[np.int64]:
    rows: npt.NDArray[np.int64] = batch.numpy()
    if rows.dtype != np.int64:
        raise TypeError(f"batches of {rows.dtype}, not int64")
    return rows


CONTENDERS: dict[str, Callable[[Job], Contender]] = {
    "zerohalf": Zerohalf, "datasets": HuggingFace, "streaming": Streaming, "litdata": LitData,
}  # fmt: skip


# ---------------------------------------------------------------- what is asked


def write(contender: Contender, job: Job) -> dict[str, Any]:
    started = time.perf_counter()
    contender.write()
    return {"seconds": time.perf_counter() - started, "version": importlib.metadata.version(contender.package)}


def check(contender: Contender, job: Job, to: str) -> dict[str, Any]:
    """Every window of an epoch as a hash, in the order they came, into a .npy file."""
    found = [digests(contender.rows(batch)) for batch in contender.batches()]
    np.save(to, np.concatenate(found))
    return {"batches": len(found)}


def epoch(contender: Contender, job: Job) -> dict[str, Any]:
    """Seconds from the first batch to the last one, and the batches that came in them."""
    batches = contender.batches()
    next(batches)
    started, count = time.perf_counter(), 0
    for _ in batches:
        count += 1
    return {"seconds": time.perf_counter() - started, "batches": count}


def first(contender: Contender, job: Job) -> dict[str, Any]:
    """Seconds until the first batch, imports aside."""
    return _first(contender, None)


def resume(contender: Contender, job: Job, batches: int) -> dict[str, Any]:
    """Seconds until the first batch behind so many others, from what a checkpoint holds; and that batch's hashes."""
    return _first(contender, contender.state(batches))


def _first(contender: Contender, state: Any) -> dict[str, Any]:
    started = time.perf_counter()
    batches = contender.batches() if state is None else contender.batches(state)
    batch = next(batches)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "digests": digests(contender.rows(batch)).tolist()}


REQUESTS: dict[str, Callable[..., dict[str, Any]]] = {
    "write": write, "check": check, "epoch": epoch, "first": first, "resume": resume,
}  # fmt: skip


def main() -> None:
    """The job is the only argument. A line is {"do": NAME, ...}; what libraries print does not reach the answers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = Job(**json.loads(sys.argv[1]))

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    try:
        contender = CONTENDERS[job.name](job)
    except ImportError as error:
        say({"absent": str(error)})
        return
    say({})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            say(REQUESTS[request.pop("do")](contender, job, **request))
        except Exception as error:  # a peer's, of any kind: told, and the benchmark goes on without it
            say({"failed": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    main()
