"""Documents of megabytes, made without a `str`: what they are is what they would be as short ones."""

import json
import random
from pathlib import Path

import pytest

from data_pipeline.corpus import Document, Dropped, LongDocument, TxtDocuments, read_documents
from data_pipeline.readers import items, jsonl
from tests.data_pipeline.conftest import CHINESE, ODD_TEXTS
from tests.data_pipeline.readers.test_fuzz import broken

TEXTS = [*ODD_TEXTS, CHINESE, "a" * 300, 'say "so"\\' * 30, "\\" * 61, "😀" * 40, "words of one line and é", ""]


def facts(item: Document | Dropped) -> tuple[object, ...]:
    if isinstance(item, Dropped):
        return item.position, item.reason, item.detail
    assert item.utf8 == item.text.encode()
    assert item.characters == len(item.text)
    return item.position, item.text


def read_both(
    path: Path, monkeypatch: pytest.MonkeyPatch, mode: TxtDocuments = "file"
) -> tuple[list[Document | Dropped], list[Document | Dropped]]:
    """As they are read, and as if every line and document were long, read in parts of a few bytes."""
    short = list(read_documents(path, txt_documents=mode))
    with monkeypatch.context() as patch:
        patch.setattr(items, "LONG_BYTES", 0)
        patch.setattr(items, "_PART_BYTES", 7)
        patch.setattr(jsonl, "_PART_BYTES", 13)
        long = list(read_documents(path, txt_documents=mode))
    return short, long


def test_broken_lines_are_what_they_are_when_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    path, text = tmp_path / "a.jsonl", tmp_path / "a.txt"
    found = 0
    for trial in range(300):
        records = [
            {"n": number, "text": one, "notes": [one * 2, {"of": one}]} if rng.random() < 0.5 else {"text": one}
            for number, one in enumerate(TEXTS)
        ]
        plain = b"".join(json.dumps(one, ensure_ascii=rng.random() < 0.5).encode() + b"\n" for one in records)
        content = broken(rng, plain) if trial % 3 else b"\xef\xbb\xbf" + plain
        path.write_bytes(content)
        text.write_bytes(content)
        for place, mode in ((path, "file"), (text, "file"), (text, "line"), (text, "block")):
            short, long = read_both(place, monkeypatch, mode)  # type: ignore[arg-type]
            assert list(map(facts, long)) == list(map(facts, short))
            found += sum(isinstance(item, LongDocument) for item in long)
    assert found > 5000


@pytest.mark.parametrize("length", range(14, 60))
def test_no_cut_falls_into_an_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["x" * (length % 13) + part * length for part in ("\ud83d\ude00", "\\", '"', "é", "文", "\n", "a")]
    texts = [text.encode("utf-16", "surrogatepass").decode("utf-16") for text in texts]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    _, long = read_both(path, monkeypatch)
    assert [item.text for item in long if isinstance(item, LongDocument)] == texts


def test_a_name_is_not_taken_for_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long key, a long string elsewhere, the field twice: as JSON has it."""
    path = tmp_path / "a.jsonl"
    long, other = "long " * 20, "other " * 20
    lines = [f'{{"{long}": 1, "text": "ok"}}', f'{{"a": "{long}", "text": "ok"}}',
             f'{{"text": "{long}", "text": "ok"}}', f'{{"text": "ok", "text": "{long}"}}',
             f'{{"text": "{other}", "text": "{long}"}}', f'{{"text": ["{long}"]}}', f'"{long}"',
             f'{{"text": "{long}", "b": "{other}\\ud800"}}']  # fmt: skip
    path.write_text("\n".join(lines))
    both = read_both(path, monkeypatch)
    short, read = (list(map(facts, one)) for one in both)
    assert read == short
    assert [one[1] for one in read] == ["ok", "ok", "ok", long, long, "non_string_text", "not_an_object", long]
    assert [isinstance(item, LongDocument) for item in both[1]] == [False] * 3 + [True] * 2 + [False] * 3


def test_a_huge_line_that_is_no_sound_json_is_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    lines = ['{"text": "kept %s"}' % ("x" * 90), '{"text": "bad %s"' % ("y" * 90), '{"text": "kept too"}']
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setattr(items, "LONG_BYTES", 50)
    monkeypatch.setattr(jsonl, "_LOOKED_AT_BYTES", 80)
    monkeypatch.setattr(jsonl, "_parse_line", lambda *_: pytest.fail("looked into"))
    first, second, third = read_documents(path)
    assert isinstance(first, Document)
    assert isinstance(third, Document)
    assert isinstance(second, Dropped)
    assert (second.position, second.reason) == (2, "bad_json")
    assert second.detail == f"{len(lines[1])} bytes that are no sound JSON object"


def test_a_long_key_is_none_of_the_long_strings_however_far_its_colon_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"' + b"k" * 90 + b'"' + b" \t" * 2000 + b': 1}\n{"text": "t", "' + b"k" * 90 + b'"  : 2}\n')
    short, long = read_both(path, monkeypatch)
    assert list(map(facts, long)) == list(map(facts, short))
    assert isinstance(short[0], Dropped)
    assert "kkk" in short[0].detail
