from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenizer.codec import Codec, TokenizerError
from tokenizer.sample import Weighted
from tokenizer.train import train
from tokenizer.training_report import duration, estimate, measure


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "1 s"),
        (42.4, "42 s"),
        (99, "99 s"),
        (150, "2.5 min"),
        (2400, "40 min"),
        (9000, "2.5 h"),
        (360_000, "100.0 h"),
    ],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_an_estimate_follows_the_speed_of_this_machine() -> None:
    assert estimate("bpe", 100_000_000, 0.2) == "training on 100.0 MB: about 12 s to 80 s, 1.3 GB to 2.7 GB of memory"
    assert (
        estimate("unigram", 20_000_000, 0.06)
        == "training on 20.0 MB: about 30 s to 3.5 min, 290 MB to 570 MB of memory"
    )


def test_a_measurement_counts_tokens_and_bytes(codec: Codec, texts: list[str]) -> None:
    pieces = [texts[0].encode(), "\U0010ffff\u2581".encode()]
    found = measure(codec, pieces, None, unseen=True)
    assert found.text_bytes == len(pieces[0]) + 7
    assert found.tokens == len(codec.encode(texts[0])) + 5  # four bytes and a space
    assert found.byte_tokens == 4 + sum(map(codec.is_byte, codec.encode(texts[0])))


def test_a_measurement_stops_at_text_that_does_not_come_back(codec: Codec) -> None:
    with pytest.raises(TokenizerError, match=r"^the new tokenizer loses text: 'A' does not come back$"):
        measure(codec, [b"A"], str.lower, unseen=True)


def test_the_report_tells_all_a_reader_asks(texts: list[str], tmp_path: Path) -> None:
    inputs = [
        {"name": "a|b.jsonl", "weight": 2.0, "documents": 1200, "dropped": {"null_text": 3, "bad_json": 1}},
        {"name": "c.txt", "weight": 0.5, "documents": 1, "dropped": {}},
    ]
    names = ["<|a|>", "``"]
    report = train(texts, tmp_path / "t", vocab_size=700, control_symbols=names, provenance={"inputs": inputs})
    text = (tmp_path / "t" / "training.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    for line in (
        "| name | weight | documents | dropped | of the text trained on | bytes per token | measured on |",
        f"| a\\|b.jsonl | 2.0 | 1,200 | 3 null_text, 1 bad_json | {report.sampled_bytes:,} bytes (100.0%) | "
        f"{report.measurement.bytes_per_token:.3f} | {report.measurement.text_bytes:,} bytes trained on |",
        "| c.txt | 0.5 | 1 | none | 0 bytes (0.0%) | - | too little text |",
        f"- read: {len(texts)} documents, {report.text_bytes:,} bytes",
        "- split: whole documents; pieces may hold line breaks",
        "- normalisation: none; text comes back as it was, but U+2581 as a space",
        "| 4 | `'<\\|a\\|>'` |",
        "| 5 | ``` '``' ``` |",
        "| 6 to 261 | the 256 bytes |",
        "| 262 to 699 | learned |",
        f"- bytes per token: {report.measurement.bytes_per_token:.3f}",
        f"- most memory of the training process: {report.peak_bytes / 1e6:,.0f} MB",
        "- `seed`: `0`",
    ):
        assert line in lines
    longest = next(line for line in lines if line.startswith("- longest: "))
    assert "`'" + "\u2423" * 16 + "'`" in longest
    codec = Codec.load(tmp_path / "t")
    assert f"`'{codec.piece(262).replace(chr(0x2581), chr(0x2423))}'`" in text
    assert report.summary().splitlines()[0].endswith(", 2 symbols from id 4 on")


def test_a_source_has_its_share_and_its_own_measurement(texts: list[str], tmp_path: Path) -> None:
    code, chinese = texts[0], texts[-1]
    weighted = [Weighted(code, 1, 0), Weighted(chinese * 40, 3, 1), Weighted("a few words", 1, 2)]
    report = train(weighted, tmp_path / "t", vocab_size=700, provenance={"inputs": [{"name": name} for name in "abc"]})
    sizes = [len(text.encode()) for text in (code, chinese * 40 * 3, "a few words")]
    assert [found.sampled_bytes for found in report.sources.values()] == sizes
    assert report.sampled_bytes == sum(sizes)
    codec = Codec.load(tmp_path / "t")
    for number, text in enumerate((code, chinese * 40)):
        found = report.sources[number].measurement
        assert found is not None
        assert found.bytes_per_token == pytest.approx(len(text.encode()) / len(codec.encode(text)), rel=0.02)
    assert report.sources[2].measurement is None
    lines = (tmp_path / "t" / "training.md").read_text(encoding="utf-8").splitlines()
    assert f"| c | 11 bytes ({11 / sum(sizes):.1%}) | - | too little text |" in lines
    share = f"{sizes[1] / sum(sizes):.1%} of the text trained on"
    assert report.source_summary(1) == f"{share}, {report.sources[1].measurement.bytes_per_token:.2f} bytes per token"
    assert report.source_summary(7) == "0.0% of the text trained on"
    assert " MB, weights applied, trained by documents" in report.summary()
    assert json.loads(json.dumps(report.as_data()))["sources"]["2"] == {"sampled_bytes": 11, "measurement": None}


def test_a_source_is_measured_on_what_the_trainer_has_not_seen(texts: list[str], tmp_path: Path) -> None:
    weighted = [
        Weighted(text[start : start + 4000], 1, number)
        for number, text in enumerate(("".join(texts[:4]), texts[-1] * 60))
        for start in range(0, len(text), 4000)
    ]
    report = train(weighted, tmp_path / "t", vocab_size=700, sample_bytes=200_000)
    assert report.measurement.unseen
    found = [report.sources[number].measurement for number in (0, 1)]
    assert all(one is not None and one.unseen for one in found)
    assert sum(one.tokens for one in found if one) == report.measurement.tokens
    assert "weights applied" not in report.summary()


def test_a_report_without_sources_has_no_table_of_them(texts: list[str], tmp_path: Path) -> None:
    train(texts[:1], tmp_path / "t", vocab_size=500)
    assert "| name |" not in (tmp_path / "t" / "training.md").read_text(encoding="utf-8")
