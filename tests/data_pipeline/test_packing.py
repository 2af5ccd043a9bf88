"""Packing: the rows of best fit against the plain algorithm, every token a target once, the plan on disk."""

from __future__ import annotations

import fcntl
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.card import make_card, render_card
from data_pipeline.coverage import prove_coverage, samples_of_an_epoch
from data_pipeline.loader import IGNORED_TARGET, Loader
from data_pipeline.order import PlannedRows, SampleOrder, Stage, difference
from data_pipeline.packing import PackingFigures, best_fit_moves, measure_packing, number_documents, pack_best_fit
from data_pipeline.packing_plan import PackingPlan, make_plan, open_plan, packing_figures, plan_folder, read_order
from data_pipeline.shards import Collection, DataFormatError, ShardWriter, Source, Split, open_collection
from data_pipeline.stream import TokenStream
from data_pipeline.trace import documents_read, reads_of_document
from data_pipeline.verification import verify_collection
from tests.data_pipeline.conftest import SmallCollection
from tokenizer.codec import Codec

EOS = 2


def split_of(folder: Path, shards: list[list[int]]) -> Split:
    """Shards of documents of these lengths, EOS included; apart from EOS no token comes twice."""
    folder.mkdir(parents=True, exist_ok=True)
    infos, next_id = [], 3
    for number, lengths in enumerate(shards):
        writer = ShardWriter(folder, f"train-{number:05}", vocab_size=2**20, eos_id=EOS, fingerprint="ab" * 32)
        for length in lengths:
            writer.add(np.arange(next_id, next_id + length - 1), length)
            next_id += length - 1
        infos.append(writer.publish())
    return Split(infos)


def collection_of(folder: Path, sources: dict[str, list[list[int]]]) -> Collection:
    collection = Collection(folder, "ab" * 32, 2**20, EOS, "", {})
    for name, shards in sorted(sources.items()):
        splits = {"train": split_of(folder / name, shards), "validation": Split([])}
        collection.sources[name] = Source(name, folder / name, splits, {})
    return collection


def random_shards(seed: int, seq_len: int, shards: int = 3, documents: int = 40) -> list[list[int]]:
    """Many short documents, some around a row's length and its double, some much longer, some of EOS alone."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(shards):
        lengths = rng.geometric(min(1.0, 2.5 / seq_len), documents)
        odd = [1, seq_len - 1, seq_len, seq_len + 1, 2 * seq_len, 2 * seq_len + 1, 5 * seq_len - 1]
        lengths[rng.integers(0, documents, 5)] = rng.choice(odd, 5)
        found.append(np.maximum(lengths, 1).tolist())
    return found


def streams_of(collection: Collection) -> dict[str, TokenStream]:
    return {name: TokenStream(source.splits["train"]) for name, source in collection.sources.items()}


# ---------------------------------------------------------------- by hand


def test_the_example_of_the_paper_and_of_the_formats(tmp_path: Path) -> None:
    """Documents of 14, 7, 5, 2 and 3 tokens in rows of 8: figure 1 of Ding et al., four rows, one slot left over."""
    collection = collection_of(tmp_path, {"en": [[14, 7], [5, 2, 3]]})
    plan, is_new = make_plan(collection, 8)
    assert is_new
    rows = [plan.row("en", number) for number in range(4)]
    assert rows == [[(-1, 8)], [(7, 14), (25, 28)], [(13, 21)], [(20, 26), (27, 31)]]
    assert plan.figures("en") == PackingFigures(4, 8, 5, 31, 1, 1, 1, 0)
    ranges = ((0, 14), (7, 8), (8, 9), (13, 15), (20, 27), (0, 31))
    assert [plan.rows_with("en", *one) for one in ranges] == [[0, 1], [0], [1], [1, 2], [1, 2, 3], [0, 1, 2, 3]]
    folder = tmp_path / "_packing" / "best_fit-8"
    assert np.fromfile(folder / "en.rows", "<u8").tolist() == [0, 1, 3, 4, 6]
    pieces = np.fromfile(folder / "en.pieces", np.dtype([("start", "<u8"), ("targets", "<u4")]))
    assert pieces["start"].tolist() == [0, 8, 26, 14, 21, 28]
    assert pieces["targets"].tolist() == [8, 6, 2, 7, 5, 3]

    order, plan = read_order(collection, packing="best_fit", seed=1, seq_len=8)
    assert (order.windows, order.describe()["sources"]["en"]["tokens_left_over"]) == ({"en": 4}, 0)
    streams = streams_of(collection)
    stream = streams["en"].read(0, 31).tolist()
    assert stream[13] == stream[20] == stream[25] == stream[27] == stream[30] == EOS
    with Loader(
        order, streams, rank=0, world_size=1, micro_batch_size=4, gradient_accumulation_steps=1, first_sample=0,
        eos_id=EOS, plan=plan,
    ) as loader:  # fmt: skip
        batch = next(loader)
    by_row = {order.locate(sample).window: number for number, sample in enumerate(batch.samples.tolist())}
    inputs, targets, documents = (
        [array[by_row[row]].tolist() for row in range(4)] for array in (batch.inputs, batch.targets, batch.documents)
    )
    assert inputs[0] == [EOS, *stream[:7]]
    assert targets[0] == stream[:8]
    assert inputs[1] == [*stream[7:13], EOS, stream[26]]  # the second piece has the token before it as context
    assert targets[1] == [*stream[8:14], *stream[26:28]]
    assert inputs[2] == [EOS, *stream[14:20], EOS]
    assert targets[2] == [*stream[14:21], IGNORED_TARGET]
    assert inputs[3] == [EOS, *stream[21:25], EOS, *stream[28:30]]
    assert targets[3] == stream[21:26] + stream[28:31]
    assert documents == [[0] * 8, [0] * 6 + [1] * 2, [0] * 7 + [1], [0] * 5 + [1] * 3]


def test_documents_are_numbered_from_their_eos_on() -> None:
    inputs = np.array([[7, 8, EOS, 9, EOS, EOS, 5], [EOS, 7, 8, 9, 9, 9, EOS]])
    assert number_documents(inputs, EOS).tolist() == [[0, 0, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1, 2]]


# ---------------------------------------------------------------- the algorithm


def one_by_one(sizes: list[int], seq_len: int) -> list[int]:
    """How full each row is, ascending, by best fit decreasing as a textbook has it."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - size)
        else:
            rooms.append(seq_len - size)
    return sorted(seq_len - room for room in rooms)


@pytest.mark.parametrize("seed", range(60))
def test_many_at_a_time_is_best_fit_decreasing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seq_len = int(rng.integers(1, 60))
    sizes = rng.integers(1, rng.integers(1, seq_len + 1) + 1, rng.integers(0, 300)).tolist()
    rooms: Counter[int] = Counter()
    placed: Counter[int] = Counter()
    for move in best_fit_moves(Counter(sizes), seq_len):
        placed[move.size] += move.rows * move.each
        rooms[move.room] -= move.rows
        rooms[move.room - move.each * move.size] += move.rows
        assert rooms[move.room] >= 0 or move.room == seq_len
    assert placed == Counter(sizes)
    rooms[seq_len] = 0
    assert sorted(seq_len - room for room in rooms.elements()) == one_by_one(sizes, seq_len)


def test_many_documents_take_few_moves() -> None:
    counts = Counter({size: 10**9 + 7919 * size for size in range(1, 2049)})
    assert sum(1 for _ in best_fit_moves(counts, 2048)) < 20_000


# ---------------------------------------------------------------- every token once


@pytest.mark.parametrize("seq_len", [1, 2, 16, 33])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_token_is_a_target_once_and_what_fits_is_whole(tmp_path: Path, seed: int, seq_len: int) -> None:
    """Read by the real loaders of one to three ranks over an epoch, and on into the next."""
    collection = collection_of(tmp_path, {"a": random_shards(seed, seq_len), "b": random_shards(seed + 9, seq_len, 1)})
    make_plan(collection, seq_len)
    order, plan = read_order(collection, packing="best_fit", seed=seed, seq_len=seq_len)
    assert plan is not None
    streams = streams_of(collection)
    everything = {name: stream.read(0, stream.tokens) for name, stream in streams.items()}
    own = {name: np.unique(tokens) for name, tokens in everything.items()}
    before = {}  # (source, token) -> the token that is to be its context
    for name, tokens in everything.items():
        keys = [(name, token) for token in tokens.tolist()]
        before |= dict(zip(keys, [EOS, *tokens[:-1].tolist()], strict=True))
    for ranks in (1, 3):
        seen = {name: Counter() for name in streams}
        rows: Counter[tuple[str, int]] = Counter()
        epoch = samples_of_an_epoch(order)
        for rank in range(ranks):
            with Loader(
                order, streams, rank=rank, world_size=ranks, micro_batch_size=2, gradient_accumulation_steps=1,
                first_sample=0, eos_id=EOS, plan=plan,
            ) as loader:  # fmt: skip
                for _ in range(-(-epoch // (2 * ranks))):
                    batch = next(loader)
                    for row, sample in enumerate(batch.samples.tolist()):
                        address = order.locate(sample)
                        if address.epoch:
                            continue
                        rows[address.source, address.window] += 1
                        kept = batch.targets[row] != IGNORED_TARGET
                        filled = int(kept.sum())
                        assert kept[:filled].all(), "padding stands behind everything"
                        assert (batch.inputs[row, filled:] == EOS).all()
                        seen[address.source].update(batch.targets[row, :filled].tolist())
                        for given, wanted in zip(batch.inputs[row].tolist(), batch.targets[row].tolist(), strict=True):
                            assert wanted in (EOS, IGNORED_TARGET) or given == before[address.source, wanted]
                        pieces = [stop - start - 1 for start, stop in plan.row(address.source, address.window)]
                        numbers = np.repeat(np.arange(len(pieces) + 1), [*pieces, seq_len - filled])
                        assert (batch.documents[row] == numbers).all()
        for name, tokens in everything.items():
            assert seen[name] == Counter(tokens.tolist()), name
            assert len(own[name]) == len(tokens) - streams[name].documents + 1
        assert set(rows.values()) == {1}
        assert Counter(name for name, _ in rows) == order.windows
    for name, source in collection.sources.items():
        stream, cut, padded = streams[name], 0, 0
        for document in range(stream.documents):
            start, stop = stream.document(document)
            holding = plan.rows_with(name, start, stop)
            assert len(holding) == -(-(stop - start) // seq_len)
            cut += len(holding) > 1
        for row in range(order.windows[name]):
            used = sum(stop - start - 1 for start, stop in plan.row(name, row))
            assert 0 < used <= seq_len
            padded += seq_len - used
        figures = plan.figures(name)
        assert (figures.documents_cut, figures.tokens_padded, figures.tokens_dropped) == (cut, padded, 0)
        assert figures.padded_share == padded / (order.windows[name] * seq_len)
        assert figures == measure_packing(source.splits["train"], seq_len, "best_fit")


def test_windows_keep_their_order_and_tell_documents_apart(tmp_path: Path) -> None:
    collection = collection_of(tmp_path, {"a": random_shards(3, 16)})
    streams = streams_of(collection)
    batches = {}
    for packing in ("concat", "concat_masked"):
        order, plan = read_order(collection, packing=packing, seed=4, seq_len=16)
        assert plan is None
        with Loader(
            order, streams, rank=0, world_size=1, micro_batch_size=8, gradient_accumulation_steps=1, first_sample=0,
            eos_id=EOS,
        ) as loader:  # fmt: skip
            batches[packing] = next(loader)
    plain, masked = batches.values()
    assert plain.documents is None
    assert (plain.inputs == masked.inputs).all()
    assert (plain.targets == masked.targets).all()
    assert (masked.documents == np.cumsum(plain.inputs == EOS, axis=1)).all()


def test_a_loader_needs_what_its_packing_needs(tmp_path: Path) -> None:
    collection = collection_of(tmp_path, {"a": [[5, 6, 7]]})
    make_plan(collection, 8)
    shape = {"rank": 0, "world_size": 1, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "first_sample": 0}
    packed, plan = read_order(collection, packing="best_fit", seed=1, seq_len=8)
    for given in ({}, {"plan": plan}, {"eos_id": EOS}):
        with pytest.raises(ValueError, match=r"needs the EOS id|rows of a packing plan"):
            Loader(packed, streams_of(collection), **shape, **given)
    masked, _ = read_order(collection, packing="concat_masked", seed=1, seq_len=8)
    with pytest.raises(ValueError, match="'concat_masked' needs the EOS id"):
        Loader(masked, streams_of(collection), **shape)


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("seq_len", [1, 7, 16, 10**6])
def test_what_windows_cut_is_counted_token_by_token(tmp_path: Path, seq_len: int) -> None:
    split = split_of(tmp_path, random_shards(5, 16))
    stream = TokenStream(split)
    windows = (stream.tokens - 1) // seq_len
    cut = 0
    for document in range(stream.documents):
        places = {
            (position - 1) // seq_len if (position - 1) // seq_len < windows else "none"
            for position in range(*stream.document(document))
            if position > 0
        }
        cut += len(places) > 1 or places == {"none"}
    too_long = sum(stop - start > seq_len for start, stop in map(stream.document, range(stream.documents)))
    figures = measure_packing(split, seq_len, "concat")
    assert figures == measure_packing(split, seq_len, "concat_masked")
    assert figures == PackingFigures(
        windows, seq_len, stream.documents, stream.tokens, cut, too_long, 0, stream.tokens - windows * seq_len
    )
    assert (figures.cut_share, figures.padded_share) == (cut / stream.documents, 0.0)


def test_figures_stand_in_the_card(small: SmallCollection, codec: Codec) -> None:
    text = render_card(make_card(small.collection, codec, seq_len=4096))
    for name in small.collection.sources:
        best = packing_figures(small.collection, "best_fit", 4096, None)[name]
        windows = packing_figures(small.collection, "concat", 4096, None)[name]
        assert 0 < best.documents_cut < windows.documents_cut
        for one, shown in ((best, "best_fit"), (windows, "concat, concat_masked")):
            cells = f"{one.rows:,} | {one.documents_cut:,} ({one.cut_share:.2%}) | {one.documents_too_long:,}"
            assert f"| {name} | {shown} | {cells} | {one.tokens_padded:,} (" in text


def test_nothing_to_pack_is_no_row(tmp_path: Path) -> None:
    collection = collection_of(tmp_path, {"a": [], "b": [[1]]})
    plan, _ = make_plan(collection, 8)
    assert plan.planned.rows == {"a": 0, "b": 1}
    assert plan.row("b", 0) == [(-1, 1)]
    assert plan.figures("a").to_dict()["padded_share"] == 0.0
    assert pack_best_fit(Split([]), 8).firsts.tolist() == [0]


# ---------------------------------------------------------------- the order


def test_the_order_of_windows_is_told_as_before() -> None:
    plain = SampleOrder(seed=1, seq_len=8, tokens={"a": 100}).describe()
    assert sorted(plain) == ["order_version", "seed", "seq_len", "sources", "stages"]
    masked = SampleOrder(seed=1, seq_len=8, tokens={"a": 100}, packing="concat_masked").describe()
    assert {**plain, "packing": "concat_masked", "plan_sha256": None} == masked
    line = difference(plain, masked)
    assert line == "the order of data differs: packing was 'concat' and is now 'concat_masked'"
    assert difference(masked, dict(masked)) is None

    def packed(sha256: str) -> dict:
        planned = PlannedRows({"a": 12}, sha256)
        return SampleOrder(seed=1, seq_len=8, tokens={"a": 100}, packing="best_fit", planned=planned).describe()

    assert "packing was 'best_fit' and is now 'concat'" in (difference(packed("1"), plain) or "")
    assert "plan_sha256 was '1' and is now '2'" in (difference(packed("1"), packed("2")) or "")


def test_a_plan_of_other_sources_is_refused() -> None:
    for settings in (
        {"packing": "best_fit"},
        {"planned": PlannedRows({"a": 3}, "")},
        {"packing": "best_fit", "planned": PlannedRows({"b": 3}, "")},
    ):
        with pytest.raises(ValueError, match=r"do not go together|plan is of sources \['b'\]"):
            SampleOrder(seed=1, seq_len=8, tokens={"a": 100}, **settings)


def test_rows_are_mixed_and_counted_like_windows(tmp_path: Path) -> None:
    collection = collection_of(tmp_path, {"a": random_shards(1, 16), "b": random_shards(2, 16)})
    plan, _ = make_plan(collection, 16)
    stages = [Stage(0, {"a": 3, "b": 1}), Stage(40, {"a": 1, "b": 2})]
    order, _ = read_order(collection, packing="best_fit", seed=3, seq_len=16, stages=stages)
    found = prove_coverage(order, 500, micro_batch_size=2, ranks=[1, 2, 3])
    assert {one.source: one.windows for one in found} == plan.planned.rows
    assert all(one.epochs >= 2 for one in found if one.source == "a")


# ---------------------------------------------------------------- trace


def test_traced_both_ways(tmp_path: Path) -> None:
    """Each read by its targets alone, found by looking at every token of every batch."""
    collection = collection_of(tmp_path, {"a": random_shards(6, 16), "b": random_shards(7, 16, 1)})
    make_plan(collection, 16)
    order, plan = read_order(collection, packing="best_fit", seed=3, seq_len=16)
    streams = streams_of(collection)
    samples = 2 * samples_of_an_epoch(order)
    forwards = list(documents_read(order, streams, range(samples), plan))
    with Loader(
        order, streams, rank=0, world_size=1, micro_batch_size=1, gradient_accumulation_steps=1, first_sample=0,
        eos_id=EOS, plan=plan,
    ) as loader:  # fmt: skip
        for sample in range(samples):
            batch = next(loader)
            told = [read for read in forwards if read.sample == sample]
            tokens = []
            for read in told:
                start, stop = streams[read.source].document(read.document)
                assert read.document_tokens == stop - start
                tokens += streams[read.source].read(start + read.start, start + read.stop).tolist()
            assert tokens == batch.targets[batch.targets != IGNORED_TARGET].tolist()
    backwards = [
        read
        for name, stream in streams.items()
        for document in range(stream.documents)
        for read in reads_of_document(order, streams, name, document, samples=samples, plan=plan)
    ]
    assert set(backwards) == set(forwards)
    assert len(backwards) == len(forwards)


# ---------------------------------------------------------------- the plan on disk


@pytest.fixture
def copied(small: SmallCollection, tmp_path: Path) -> Collection:
    """A real collection that a test may write into."""
    return open_collection(shutil.copytree(small.collection.path, tmp_path / "data"))


def files_of(plan: PackingPlan) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(plan.folder.iterdir())}


def test_a_plan_is_the_same_bytes_and_made_once(copied: Collection) -> None:
    plan, is_new = make_plan(copied, 64)
    first = files_of(plan)
    assert is_new
    assert sorted(first) == ["files.pieces", "files.rows", "lines.pieces", "lines.rows", "manifest.json"]
    assert not make_plan(copied, 64)[1]
    shutil.rmtree(plan.folder)
    assert make_plan(copied, 64)[1]
    assert files_of(plan) == first
    verify_collection(copied.path, full=True)


def test_every_flipped_bit_is_found_and_pack_mends_it(copied: Collection) -> None:
    plan, _ = make_plan(copied, 64)
    whole = files_of(plan)
    rng = np.random.default_rng(1)
    for name, content in whole.items():
        for place in {0, len(content) - 1, *rng.integers(0, len(content), 4).tolist()}:
            damaged = bytearray(content)
            damaged[place] ^= 1 << int(rng.integers(8))
            for broken in (bytes(damaged), content[:place]):
                (plan.folder / name).write_bytes(broken)
                for check in (lambda: open_plan(copied, 64), lambda: verify_collection(copied.path, full=True)):
                    with pytest.raises(DataFormatError) as caught:
                        check()
                    assert name in str(caught.value)
        (plan.folder / name).write_bytes(whole[name][:-1])
        assert make_plan(copied, 64)[1]
        assert files_of(plan) == whole


def test_a_plan_that_leaves_a_token_out_is_found(tmp_path: Path) -> None:
    """Its hashes may be right: a fault of whoever planned."""
    plan, _ = make_plan(collection_of(tmp_path, {"en": [[14, 7], [5, 2, 3]]}), 8)
    plan.check_rows("en")
    pieces = np.fromfile(plan.folder / "en.pieces", np.dtype([("start", "<u8"), ("targets", "<u4")]))
    for piece, start, targets in ((3, 15, 6), (3, 13, 8), (1, 8, 7)):
        wrong = pieces.copy()
        wrong[piece] = start, targets
        wrong.tofile(plan.folder / "en.pieces")
        plan.close()
        with pytest.raises(DataFormatError, match="not each of 31 tokens once"):
            plan.check_rows("en")
    pieces.tofile(plan.folder / "en.pieces")
    np.array([0, 2, 3, 4, 6], "<u8").tofile(plan.folder / "en.rows")
    plan.close()
    with pytest.raises(DataFormatError, match="not each of 31 tokens once"):
        plan.check_rows("en")


def test_a_plan_cut_while_in_use_surfaces(copied: Collection) -> None:
    plan, _ = make_plan(copied, 64)
    rows = plan.planned.rows["lines"]
    plan.row("lines", rows - 1)
    (plan.folder / "lines.pieces").write_bytes(b"")
    with pytest.raises(DataFormatError, match=r"lines.pieces: cut since it was opened: 0 of \d+ bytes"):
        plan.row("lines", rows - 1)


def test_a_plan_of_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {f"s{number}": random_shards(number, 16, shards=1, documents=9) for number in range(7)}
    plan, _ = make_plan(collection_of(tmp_path, sources), 16)
    places = [(name, row) for row in range(5) for name in plan.sources]

    def files_open() -> int:
        opened = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return sum(path.is_relative_to(plan.folder) for path in opened)

    whole = [plan.row(*place) for place in places]
    assert files_open() == 14
    plan.close()
    assert files_open() == 0
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))
    for place, pieces in zip(places, whole, strict=True):
        assert plan.row(*place) == pieces
        assert 1 <= files_open() <= 3


def test_the_wrong_plan_is_refused_with_the_command(copied: Collection) -> None:
    command = f"make it with `python -m data_pipeline pack {copied.path} --seq-len 64`"
    with pytest.raises(DataFormatError, match="no best_fit plan for rows of 64 tokens") as caught:
        open_plan(copied, 64)
    assert command in str(caught.value)
    plan, _ = make_plan(copied, 32)
    shutil.copytree(plan.folder, plan_folder(copied, 64))
    with pytest.raises(DataFormatError, match=r"packing, seq_len, split = \('best_fit', 32, 'train'\)") as caught:
        open_plan(copied, 64)
    assert command in str(caught.value)
    other = Collection(copied.path, "cd" * 32, copied.vocab_size, copied.eos_id, "", copied.sources)
    with pytest.raises(DataFormatError, match="planned for other tokens"):
        open_plan(other, 32)
    assert make_plan(other, 32)[1], "a plan for other tokens is replaced"
    with pytest.raises(DataFormatError, match="planned for other tokens"):
        open_plan(copied, 32)


def test_one_writer_at_a_time(copied: Collection) -> None:
    make_plan(copied, 64)
    with (copied.path / "_packing" / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataFormatError, match="another `pack` is writing there"):
            make_plan(copied, 32)


def test_the_command(copied: Collection, run_command: Callable) -> None:
    import json

    code, out, err = run_command("pack", copied.path, "--seq-len", 64, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["made_now"], told["plan"]) == (True, str(plan_folder(copied, 64)))
    for name, one in told["sources"].items():
        for packing in ("best_fit", "concat"):
            assert one[packing] == packing_figures(copied, packing, 64, None)[name].to_dict()
    code, out, err = run_command("pack", copied.path, "--seq-len", 64)
    assert (code, err) == (0, "")
    best = packing_figures(copied, "best_fit", 64, None)["lines"]
    assert f"lines, best_fit: {best.to_text()}\n" in out
    assert "was complete already; checked" in out
    for arguments, words in (
        ((copied.path, "--seq-len", 0), "--seq-len"),
        (("none", "--seq-len", 8), "no such folder"),
    ):
        code, out, err = run_command("pack", *arguments)
        assert (code, out, err.count("\n"), words in err) == (2, "", 1, True), err
