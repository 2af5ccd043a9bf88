"""The corpus shipped with the repository: small, clean, of the languages it names, and in the public domain."""

import json
import re
import unicodedata
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "data_pipeline" / "sample_corpus"
NAMES = ("english", "chinese", "code")
CJK = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")


def documents(name: str) -> list[dict[str, str]]:
    raw = (FOLDER / f"{name}.jsonl").read_bytes()
    assert raw.endswith(b"\n")
    return [json.loads(line) for line in raw.decode("utf-8").split("\n")[:-1]]


def sources() -> dict[str, list[list[str]]]:
    """The tables of SOURCES.md: file name to the rows of its section."""
    sections: dict[str, list[list[str]]] = {}
    for section in re.split(r"(?m)^## ", (FOLDER / "SOURCES.md").read_text("utf-8"))[1:]:
        name = section.split("\n", 1)[0].removesuffix(".jsonl")
        rows = [line.strip("| ").split(" | ") for line in section.split("\n") if line.startswith("| ")]
        sections[name] = rows[1:]
    return sections


def test_total_size_is_two_to_five_megabytes() -> None:
    assert 2_000_000 <= sum((FOLDER / f"{name}.jsonl").stat().st_size for name in NAMES) <= 5_000_000


def test_nothing_else_is_in_the_folder() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.jsonl" for name in NAMES} | {"SOURCES.md"}


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_a_document_of_natural_size(name: str) -> None:
    for document in documents(name):
        assert set(document) == {"text", "title"}
        assert document["title"].strip()
        assert document["text"].strip()
        assert len(document["text"].encode("utf-8")) <= 102_400, document["title"]


@pytest.mark.parametrize("name", NAMES)
def test_text_is_clean(name: str) -> None:
    for document in documents(name):
        text = document["text"]
        odd = {
            char
            for char in set(text) - {"\n", "\t"}
            if unicodedata.category(char) in {"Cc", "Cs", "Co", "Zl", "Zp"} or char in "\u2581\ufeff\ufffd"
        }
        assert not odd, (document["title"], odd)
        assert "project gutenberg" not in text.lower(), document["title"]


def test_no_text_comes_twice() -> None:
    texts = [document["text"] for name in NAMES for document in documents(name)]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("name, least, most", [("english", 0.0, 0.001), ("chinese", 0.6, 1.0), ("code", 0.0, 0.01)])
def test_languages_are_as_named(name: str, least: float, most: float) -> None:
    for document in documents(name):
        assert least <= len(CJK.findall(document["text"])) / len(document["text"]) <= most, document["title"]


def test_english_is_prose_and_code_is_in_several_languages() -> None:
    english = " ".join(document["text"] for document in documents("english")).lower().split()
    assert sum(english.count(word) for word in ("the", "of", "and", "to")) > 0.1 * len(english)
    suffixes = {Path(document["title"]).suffix for document in documents("code")}
    assert {".c", ".h", ".cpp", ".cs", ".java", ".py", ".js", ".sh", ".awk", ".test"} <= suffixes


@pytest.mark.parametrize("name", NAMES)
def test_sources_names_every_part_and_its_public_domain_status(name: str) -> None:
    rows = sources()[name]
    count = size = 0
    for part, what, origin, status in rows:
        numbers = re.fullmatch(r"[\w-]+ \((\d+); ([\d,]+)\)", part)
        assert numbers, part
        count += int(numbers[1])
        size += int(numbers[2].replace(",", ""))
        assert what.strip()
        assert origin.strip()
        assert re.match(r"public domain|dedicated", status), part
    texts = [document["text"] for document in documents(name)]
    assert count == len(texts)
    assert size == sum(len(text.encode("utf-8")) for text in texts)


@pytest.mark.parametrize("name", NAMES)
def test_sources_gives_each_file_its_true_size(name: str) -> None:
    size = (FOLDER / f"{name}.jsonl").stat().st_size
    assert f"| `{name}.jsonl` | {len(documents(name))} | {size:,} |" in (FOLDER / "SOURCES.md").read_text("utf-8")
