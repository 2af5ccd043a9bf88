"""Every fault of a collection is found: 600 flipped bits and lost bytes, wrong ids, sources that changed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import orjson
import pytest

from data_pipeline.durable import file_sha256
from data_pipeline.inspection import choose_codec
from data_pipeline.prepare import Options, prepare
from data_pipeline.shards import (
    HEADER_BYTES,
    Collection,
    DataFormatError,
    ShardWriter,
    open_collection,
    render_manifest,
)
from data_pipeline.stream import TokenStream
from data_pipeline.verification import SampleReport, verify_collection, verify_sample
from tests.data_pipeline.conftest import SmallCollection
from tokenizer.codec import Codec

PLACES = 600


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, texts: list[str], tokenizer_folder: Path) -> Path:
    """A collection of two sources and few files, so that no check takes long."""
    folder = tmp_path_factory.mktemp("few")
    for name, lot in (("a", texts[60:75]), ("b", texts[70:79])):
        (folder / name).mkdir()
        for number, text in enumerate(["", *lot]):
            (folder / name / f"{number:02}.txt").write_text(text, encoding="utf-8", newline="")
    inputs = {name: [folder / name] for name in ("a", "b")}
    prepare(inputs, tokenizer_folder, folder / "out", Options(validation_fraction=0.3))
    return folder / "out"


def damages(raw: bytes, rng: random.Random) -> tuple[str, int, bytes]:
    """(what was done, at which place, the damaged content): one bit turned, or one byte gone."""
    place = rng.randrange(len(raw))
    if rng.random() < 0.5:
        return "bit", place, raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(8))]) + raw[place + 1 :]
    return "cut", place, raw[:place] + raw[place + 1 :]


def test_a_flipped_bit_or_a_lost_byte_anywhere_is_found(few: Path) -> None:
    """`full` finds every one, and names the file. `quick` finds all but those in tokens, indexes and ledgers."""
    files = [path for path in sorted(few.rglob("*")) if path.is_file() and path.stat().st_size]
    kinds = {path.suffix if path.suffix in (".bin", ".idx") else path.name for path in files}
    assert kinds >= {".bin", ".idx", "manifest.json", "ledger.jsonl", "plan.json", "tokenizer.model"}
    verify_collection(few, full=True)
    rng = random.Random(4)
    quickly = 0
    for number in range(PLACES):
        path = files[number % len(files)]
        raw = path.read_bytes()
        done, place, damaged = damages(raw, rng)
        path.write_bytes(damaged)
        try:
            with pytest.raises(DataFormatError, match=path.name) as caught:
                verify_collection(few, full=True)
            assert "\n" not in str(caught.value)
            in_content = path.suffix in (".bin", ".idx") and place >= HEADER_BYTES
            if done == "cut" or not (in_content or path.name == "ledger.jsonl"):
                quickly += 1
                with pytest.raises(DataFormatError, match=path.name):
                    verify_collection(few, full=False)
            else:
                verify_collection(few, full=False)
        finally:
            path.write_bytes(raw)
    assert PLACES / 2 < quickly < PLACES
    verify_collection(few, full=True)


def test_every_file_that_is_gone_or_empty_is_named(few: Path) -> None:
    for path in sorted(few.rglob("*")):
        if not path.is_file() or not path.stat().st_size or path.name == "plan.json":
            continue
        raw = path.read_bytes()
        for damage in (path.unlink, lambda path=path: path.write_bytes(b"")):
            damage()
            with pytest.raises(DataFormatError, match=path.name):
                verify_collection(few, full=False)
            path.write_bytes(raw)


# ---------------------------------------------------------------- against the sources


def test_a_sample_gives_the_stored_ids(small: SmallCollection, codec: Codec) -> None:
    total = sum(split.documents for source in small.collection.sources.values() for split in source.splits.values())
    assert verify_sample(small.collection, codec, 7) == SampleReport(7, {})
    assert verify_sample(small.collection, codec, 10**6) == SampleReport(total, {})


def test_samples_are_drawn_by_the_seed(small: SmallCollection, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, int]] = []
    monkeypatch.setattr(
        "data_pipeline.verification._compare_ids", lambda stream, number, origin, *rest: drawn.append((origin, number))
    )
    runs = []
    for seed in (1, 1, 2):
        drawn.clear()
        verify_sample(small.collection, codec, 10, seed=seed)
        runs.append(list(drawn))
    assert runs[0] == runs[1] != runs[2]
    assert len(set(runs[0])) == 10


def forged(collection: Collection, place: Path, change: dict[int, int]) -> Collection:
    """A copy of a collection whole in every byte, but with other ids in its first shard, as a faulty encoder gives."""
    shutil.copytree(collection.path, place)
    source = open_collection(place).sources["lines"]
    shard = source.splits["train"].shards[0]
    stream = TokenStream(source.splits["train"])
    writer = ShardWriter(
        shard.folder, shard.stem, vocab_size=collection.vocab_size, eos_id=collection.eos_id,
        fingerprint=collection.fingerprint,
    )  # fmt: skip
    for number in range(shard.documents):
        ids = stream.read(*stream.document(number))[:-1].astype(int)
        if number == 1:
            for where, token in change.items():
                ids[where] = token
        writer.add(ids, 1)
    fresh = {**writer.publish().to_json(), "text_bytes": shard.text_bytes}
    content = dict(source.manifest)
    content["splits"]["train"]["shards"][0] = {**fresh, "text_bytes": shard.documents}
    content["splits"]["train"]["text_bytes"] += shard.documents - shard.text_bytes
    (source.path / "manifest.json").write_bytes(render_manifest(content))
    whole = orjson.loads((place / "manifest.json").read_bytes())
    whole["sources"]["lines"]["manifest_sha256"] = file_sha256(source.path / "manifest.json")
    (place / "manifest.json").write_bytes(render_manifest(whole))
    return open_collection(place)


def test_ids_of_a_faulty_encoder_are_found_where_every_checksum_is_right(
    small: SmallCollection, codec: Codec, tmp_path: Path
) -> None:
    stream = TokenStream(small.collection.sources["lines"].splits["train"])
    first = stream.read(*stream.document(1))[:3].tolist()
    other = 5 if first[2] != 5 else 6
    wrong = forged(small.collection, tmp_path / "wrong", {2: other})
    verify_collection(tmp_path / "wrong", full=True)
    origin = small.documents["lines"]["train"][1]
    with pytest.raises(DataFormatError) as caught:
        verify_sample(wrong, codec, 10**6)
    said = str(caught.value)
    assert f"{wrong.path / 'lines'}, train document 1 is not what {origin.path}:{origin.position} gives" in said
    assert f"id 2 is {other}, its text gives {first[2]}" in said


def test_what_cannot_be_compared_is_counted_by_its_reason(small: SmallCollection, codec: Codec, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    path = small.inputs / "b.jsonl"
    shutil.move(path, kept)
    try:
        report = verify_sample(small.collection, codec, 10**6)
    finally:
        shutil.move(kept, path)
    of_file = [one for lot in small.documents["lines"].values() for one in lot if one.path == str(path)]
    ((reason, count),) = report.lost.items()
    assert count == len(of_file)
    assert reason.startswith(str(path))
    assert "No such file or directory" in reason
    assert report.describe_lost() == (
        f"{report.equal} documents equal their source, but {count} cannot be compared: {reason} ({count})"
    )


def test_the_tokenizer_of_a_collection_is_proven(few: Path, other_tokenizer_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "c"
    shutil.copytree(few, copy)
    shutil.rmtree(copy / "tokenizer")
    shutil.copytree(other_tokenizer_folder, copy / "tokenizer")
    with pytest.raises(DataFormatError, match="damaged or changed"):
        verify_collection(copy, full=False)
    whole = orjson.loads((copy / "manifest.json").read_bytes())
    whole["tokenizer"]["files"] = {path.name: file_sha256(path) for path in (copy / "tokenizer").iterdir()}
    (copy / "manifest.json").write_bytes(render_manifest(whole))
    with pytest.raises(DataFormatError, match="but the tokens are of"):
        choose_codec(verify_collection(copy, full=False))
