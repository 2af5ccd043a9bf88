"""The data card: lengths against a plain count, scripts of known text, the same bytes for the same data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_pipeline.card import (
    kind_of_character,
    language_shares,
    make_card,
    measure_lengths,
    plot_lengths,
    render_card,
    sample_texts,
    script_shares,
)
from data_pipeline.shards import DataFormatError, ShardWriter, Split
from data_pipeline.stream import TokenStream
from tests.data_pipeline.conftest import SmallCollection
from tokenizer.codec import Codec


def test_lengths_are_those_of_the_documents(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    lots = [rng.integers(0, 200, 93).tolist(), [0, 6, 7, 8, 63, 1000], [1]]  # 100 together
    infos = []
    for number, lot in enumerate(lots):
        writer = ShardWriter(tmp_path, f"train-{number:05d}", vocab_size=300, eos_id=2, fingerprint="5a" * 32)
        for length in lot:
            writer.add(np.full(length, 7), 1)
        infos.append(writer.publish())
    found = measure_lengths(Split(infos))
    sizes = sorted(length + 1 for lot in lots for length in lot)
    assert found is not None
    assert (found.documents, found.shortest, found.longest) == (len(sizes), 1, 1001)
    assert found.mean == sum(sizes) / len(sizes)
    for share, quantile in ((0.5, found.median), (0.9, found.p90), (0.99, found.p99)):
        below, upto = sum(size < quantile for size in sizes), sum(size <= quantile for size in sizes)
        assert below < share * len(sizes) <= upto
    assert found.bins == [sum(2**k <= size < 2 ** (k + 1) for size in sizes) for k in range(10)]
    assert measure_lengths(Split([])) is None


@pytest.mark.parametrize(
    "characters, kind",
    [
        ("azéßƏ", "Latin"), ("学𠀀々", "Han"), ("あアｱ", "Kana"), ("한", "Hangul"), ("яЙ", "Cyrillic"), ("λ", "Greek"),
        ("19٣Ⅷ", "digits"), (" \n\t\u3000\u2028", "spaces and line breaks"), (".,。{$+😀", "punctuation and symbols"),
        ("\0\x7f\u200d", "control and unassigned"), ("ש", "Hebrew"), ("Ａ", "Latin"), ("\u0301", "other letters"),
    ],
)  # fmt: skip
def test_characters_are_told_apart_by_script(characters: str, kind: str) -> None:
    assert {kind_of_character(one) for one in characters} == {kind}


def test_shares_are_of_the_sampled_text(small: SmallCollection, codec: Codec) -> None:
    """All documents are fewer than the sample takes, and the longest is not much longer than what it takes of each."""
    source = small.collection.sources["files"]
    sample = sample_texts(source, codec)
    shares = script_shares(sample)
    assert sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    streams = [TokenStream(split) for split in source.splits.values()]
    assert sample == [
        codec.decode(stream.read(start, min(stop - 1, start + 2048)))
        for stream in streams for start, stop in map(stream.document, range(stream.documents))
    ]  # fmt: skip
    text = "".join(sample)
    latin = sum(one.isascii() and one.isalpha() for one in text) / len(text)
    assert shares["Latin"] == pytest.approx(latin, abs=0.001)
    assert sample_texts(source, codec, seed=1) == sample


def test_shares_of_languages_count_documents() -> None:
    english = "It is a truth that the sample of this text was made for the card and not for a reader."
    shares = language_shares([english, english, english, "学而时习之", "for (i = 0; i < n; i++) { a[i] = b[i]; }"])
    assert shares == {"English": 0.6, "Chinese": 0.2, "code or markup": 0.2}
    assert language_shares([]) == script_shares([]) == {}


def test_the_card_says_what_the_collection_holds(small: SmallCollection, codec: Codec, tmp_path: Path) -> None:
    card = make_card(small.collection, codec, seq_len=256)
    text = render_card(card, "lengths.png")
    assert text == render_card(make_card(small.collection, codec, seq_len=256), "lengths.png")
    assert text.startswith("# Data card: out\n")
    for name, source in small.collection.sources.items():
        for split, part in source.splits.items():
            assert f"| {name} | {split} | {part.documents:,} | {part.tokens:,} | {part.text_bytes:,} |" in text
        tokens = source.splits["train"].tokens
        assert f"| {name} | {(tokens - 1) // 256:,} | {(tokens - 1) % 256:,} |" in text
        for reason, count in source.manifest["dropped"].items():
            assert f"- {name}, dropped: {count} {reason}\n" in text
        assert f"| {len({one['path'] for one in source.manifest['provenance']['files']})} |" in text
    assert "\n## Languages\n" in text
    assert "Latin" in text
    assert "![lengths of documents](lengths.png)" in text
    assert "![" not in render_card(card)
    assert str(small.collection.path.parent) not in text
    for name, magic in (("l.png", b"\x89PNG"), ("l.svg", b"<?xml"), ("l.pdf", b"%PDF")):
        plot_lengths(card, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)
    with pytest.raises(DataFormatError, match=r"l.gif: a picture is drawn as .png, .svg, .pdf"):
        plot_lengths(card, tmp_path / "l.gif")
