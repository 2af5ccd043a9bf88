"""The plan of best-fit packing on disk: made once, beside the collection, and read row by row while training.

    DIR/_packing/best_fit-2048/manifest.json    written last; hashes of all other files, and of the tokens planned for
    DIR/_packing/best_fit-2048/NAME.rows        u64, one more than there are rows: the first piece of each row
    DIR/_packing/best_fit-2048/NAME.pieces      12 bytes a piece: u64 the place of its first target, u32 how many
    DIR/_packing/lock                           held while a plan is written

`_packing` is no name that a source can have. All numbers are little-endian. A plan depends on the lengths of the
documents of the training split alone, so it is the same wherever and whenever it is made.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from data_pipeline.durable import sync_folder, telling_full_disk, write_file
from data_pipeline.open_files import OpenFiles
from data_pipeline.order import PackingMode, PlannedRows, SampleOrder, Stage
from data_pipeline.packing import PackedRows, PackingFigures, measure_packing, pack_best_fit
from data_pipeline.shards import (
    MANIFEST_NAME,
    Collection,
    DataFormatError,
    check_sha256,
    read_manifest,
    render_manifest,
)

PACKING_FORMAT = "zerohalf-packing"
PACKING_FOLDER = "_packing"
_PIECE = np.dtype([("start", "<u8"), ("size", "<u4")])
_ROW_BYTES = 8
_SCANNED_AT_ONCE = 1 << 20

Int64Array = npt.NDArray[np.int64]


class PackingPlan:
    """An open plan. Files are read where a row is asked for, so memory does not grow with the data."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.seq_len: int = manifest["seq_len"]
        self.sources: dict[str, dict[str, Any]] = dict(sorted(manifest["sources"].items()))
        self._files = OpenFiles()

    @property
    def planned(self) -> PlannedRows:
        """What the order of data must know of it."""
        hashes = {name: [one["rows_sha256"], one["pieces_sha256"]] for name, one in self.sources.items()}
        digest = hashlib.sha256(orjson.dumps(hashes, option=orjson.OPT_SORT_KEYS)).hexdigest()
        return PlannedRows({name: one["rows"] for name, one in self.sources.items()}, digest)

    def figures(self, name: str) -> PackingFigures:
        """What the plan does to a source's documents."""
        one = self.sources[name]
        keys = ("documents", "tokens", "documents_cut", "tokens_padded")
        documents, tokens, cut, padded = (one[key] for key in keys)
        return PackingFigures(one["rows"], self.seq_len, documents, tokens, cut, cut, padded, 0)

    def row(self, name: str, number: int) -> list[tuple[int, int]]:
        """The pieces of a row: each the first and the end of the stream's tokens that it reads, its context included.

        A piece of n targets reads n + 1 tokens; that of the first document begins at -1, where EOS is to be thought.
        DataFormatError when a file has been cut meanwhile.
        """
        first, stop = np.frombuffer(self._read(f"{name}.rows", number * _ROW_BYTES, 2 * _ROW_BYTES), "<u8").tolist()
        size = _PIECE.itemsize
        pieces = np.frombuffer(self._read(f"{name}.pieces", first * size, (stop - first) * size), _PIECE)
        return [(start - 1, start + targets) for start, targets in pieces.tolist()]

    def rows_with(self, name: str, start: int, stop: int) -> list[int]:
        """The rows that hold a target of the stream's tokens `start` to `stop` (exclusive), ascending.

        Cost: all pieces of the source are looked at, some ten million a second.
        """
        found: list[int] = []
        for first, pieces in self._scan(name):
            begins = pieces["start"].astype(np.int64)
            found += (np.flatnonzero((begins < stop) & (begins + pieces["size"] > start)) + first).tolist()
        firsts = np.frombuffer(self._read(f"{name}.rows", 0, (self.sources[name]["rows"] + 1) * _ROW_BYTES), "<u8")
        rows: list[int] = np.unique(np.searchsorted(firsts, np.array(found, np.uint64), side="right") - 1).tolist()
        return rows

    def check_rows(self, name: str) -> None:
        """Whether every token stands in exactly one piece and no row holds more than seq_len. DataFormatError if not.

        Memory: 20 bytes a piece.
        """
        starts, sizes = (np.concatenate(parts) for parts in zip(*self._columns(name), strict=True))
        firsts = np.frombuffer(self._read(f"{name}.rows", 0, (self.sources[name]["rows"] + 1) * _ROW_BYTES), "<u8")
        filled = np.diff(np.concatenate([[0], np.cumsum(sizes)])[firsts.astype(np.int64)])
        in_order = np.argsort(starts)
        ends = np.concatenate([[0], np.cumsum(sizes[in_order])])
        tokens = self.sources[name]["tokens"]
        if (
            not np.array_equal(ends[:-1], starts[in_order])
            or ends[-1] != tokens
            or filled.max(initial=0) > self.seq_len
        ):
            raise DataFormatError(
                f"{self.folder / f'{name}.pieces'}: its pieces are not each of {tokens:,} tokens once"
            )

    def close(self) -> None:
        """Close all files; they are opened again when a row is asked for."""
        self._files.close()

    def __del__(self) -> None:
        self.close()

    def _columns(self, name: str) -> Iterator[tuple[Int64Array, Int64Array]]:
        yield np.empty(0, np.int64), np.empty(0, np.int64)
        for _, pieces in self._scan(name):
            yield pieces["start"].astype(np.int64), pieces["size"].astype(np.int64)

    def _scan(self, name: str) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """All pieces in blocks, each with the number of its first."""
        count, size = self.sources[name]["pieces"], _PIECE.itemsize
        for first in range(0, count, _SCANNED_AT_ONCE):
            raw = self._read(f"{name}.pieces", first * size, min(_SCANNED_AT_ONCE, count - first) * size)
            yield first, np.frombuffer(raw, _PIECE)

    def _read(self, file: str, offset: int, size: int) -> bytes:
        raw = self._files.get(str(self.folder / file)).read(size, offset)
        if len(raw) != size:
            raise DataFormatError(f"{self.folder / file}: cut since it was opened: {len(raw)} of {size} bytes read")
        return raw


# ---------------------------------------------------------------- open, make


def read_order(
    collection: Collection,
    *,
    packing: PackingMode,
    seed: int,
    seq_len: int,
    stages: Sequence[Stage] = (),
) -> tuple[SampleOrder, PackingPlan | None]:
    """The order in which the training splits of a collection are read, and the plan that it needs for "best_fit".

    DataFormatError: see `open_plan`. ValueError: see `SampleOrder`.
    """
    plan = open_plan(collection, seq_len) if packing == "best_fit" else None
    tokens = {name: source.splits["train"].tokens for name, source in collection.sources.items()}
    planned = plan.planned if plan is not None else None
    order = SampleOrder(seed=seed, seq_len=seq_len, tokens=tokens, stages=stages, packing=packing, planned=planned)
    return order, plan


def packing_figures(
    collection: Collection, packing: PackingMode, seq_len: int, plan: PackingPlan | None
) -> dict[str, PackingFigures]:
    """What a packing does to the training documents of every source. Without a plan every .idx is read."""
    return {
        name: measure_packing(source.splits["train"], seq_len, packing) if plan is None else plan.figures(name)
        for name, source in collection.sources.items()
    }


def plan_folder(collection: Collection, seq_len: int) -> Path:
    return collection.path / PACKING_FOLDER / f"best_fit-{seq_len}"


def open_plan(collection: Collection, seq_len: int) -> PackingPlan:
    """The plan of a collection for rows of seq_len slots, every byte of it checked. DataFormatError: one line.

    Cost: 12 bytes a document and 8 a row are hashed.
    """
    folder = plan_folder(collection, seq_len)
    again = f"make it with `python -m data_pipeline pack {collection.path} --seq-len {seq_len}`"
    if not (folder / MANIFEST_NAME).exists():
        raise DataFormatError(f"{collection.path}: there is no best_fit plan for rows of {seq_len:,} tokens: {again}")
    manifest, _ = read_manifest(folder / MANIFEST_NAME, PACKING_FORMAT)
    try:
        facts = (manifest["packing"], manifest["seq_len"], manifest["split"])
        plan, planned_for = PackingPlan(folder, manifest), manifest["content_sha256"]
        if planned_for != collection.content_sha256 or sorted(plan.sources) != sorted(collection.sources):
            raise DataFormatError(
                f"{folder}: planned for other tokens ({planned_for[:12]}) than {collection.path} holds "
                f"({collection.content_sha256[:12]}): {again}"
            )
        if facts != ("best_fit", seq_len, "train"):
            raise DataFormatError(f"{folder}: a plan of packing, seq_len, split = {facts}: {again}")
        for name, one in plan.sources.items():
            for kind in ("rows", "pieces"):
                check_sha256(folder / f"{name}.{kind}", one[f"{kind}_sha256"])
    except (KeyError, TypeError, AttributeError):
        raise DataFormatError(f"{folder / MANIFEST_NAME}: a field is missing or of the wrong kind: {again}") from None
    return plan


def make_plan(collection: Collection, seq_len: int) -> tuple[PackingPlan, bool]:
    """Make the plan, or find it made; whether it was made now. One source at a time; memory: see `pack_best_fit`.

    A plan for other tokens, or a damaged one, is replaced. DataFormatError: another process is writing one.
    """
    folder = plan_folder(collection, seq_len)
    folder.parent.mkdir(exist_ok=True)
    with telling_full_disk(folder), _only_writer(folder.parent):
        if (folder / MANIFEST_NAME).exists():
            try:
                return open_plan(collection, seq_len), False
            except DataFormatError:
                (folder / MANIFEST_NAME).unlink()
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        sync_folder(folder.parent)
        try:
            _write_plan(collection, seq_len, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return open_plan(collection, seq_len), True


def _write_plan(collection: Collection, seq_len: int, folder: Path) -> None:
    sources = {}
    for name, source in collection.sources.items():
        packed = pack_best_fit(source.splits["train"], seq_len)
        figures = measure_packing(source.splits["train"], seq_len, "best_fit")
        sources[name] = {
            "tokens": figures.tokens, "documents": figures.documents, "rows": figures.rows,
            "pieces": len(packed.starts), "documents_cut": figures.documents_cut,
            "tokens_padded": figures.tokens_padded, **_write_rows(folder, name, packed),
        }  # fmt: skip
    manifest = {
        "format": PACKING_FORMAT, "version": 1, "packing": "best_fit", "seq_len": seq_len, "split": "train",
        "content_sha256": collection.content_sha256, "sources": sources,
    }  # fmt: skip
    write_file(folder / MANIFEST_NAME, render_manifest(manifest))


def check_plans(collection: Collection) -> None:
    """Check every plan beside a collection: its bytes, and that each token stands in one piece. DataFormatError."""
    for folder in sorted((collection.path / PACKING_FOLDER).glob("best_fit-*")):
        size = folder.name.removeprefix("best_fit-")
        if size.isdecimal():
            plan = open_plan(collection, int(size))
            for name in plan.sources:
                plan.check_rows(name)


def _write_rows(folder: Path, name: str, packed: PackedRows) -> dict[str, str]:
    pieces = np.empty(len(packed.starts), _PIECE)
    pieces["start"], pieces["size"] = packed.starts, packed.sizes
    hashes = {}
    for kind, content in (("rows", packed.firsts.astype("<u8").tobytes()), ("pieces", pieces.tobytes())):
        write_file(folder / f"{name}.{kind}", content)
        hashes[f"{kind}_sha256"] = hashlib.sha256(content).hexdigest()
    return hashes


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataFormatError(f"{folder}: another `pack` is writing there; wait for it to end") from None
        yield
