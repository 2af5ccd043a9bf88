"""Where a stored document stood: found by reading its unit again, for every document, and refused when that changed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.origins import Lost, Origin, find_origins
from data_pipeline.shards import SPLITS, DataFormatError, open_collection
from tests.data_pipeline.conftest import SmallCollection


@pytest.fixture
def file_of_lines(small: SmallCollection) -> Iterator[Path]:
    """One of the inputs, to be damaged; as it was again afterwards."""
    path, keep = small.inputs / "a.jsonl", small.inputs / "kept"
    shutil.copy2(path, keep)
    yield path
    keep.replace(path)


@pytest.mark.parametrize("name", ["lines", "files"])
def test_every_document_is_found_with_file_line_and_text(small: SmallCollection, name: str) -> None:
    source = small.collection.sources[name]
    assert len(source.splits["train"].shards) > 4
    wanted = {split: range(source.splits[split].documents) for split in SPLITS}
    found: dict[str, dict[int, Origin | Lost]] = {split: {} for split in SPLITS}
    for split, number, origin in find_origins(source, wanted):
        assert number not in found[split]
        found[split][number] = origin
    for split in SPLITS:
        expected = [Origin(one.path, one.position, one.text) for one in small.documents[name][split]]
        assert expected
        assert [found[split][number] for number in wanted[split]] == expected


def test_one_document_is_found_as_well_as_all(small: SmallCollection) -> None:
    source = small.collection.sources["lines"]
    for split in SPLITS:
        for number, one in enumerate(small.documents["lines"][split]):
            found = list(find_origins(source, {split: [number]}))
            assert found == [(split, number, Origin(one.path, one.position, one.text))]


def test_a_document_that_does_not_exist_is_refused(small: SmallCollection) -> None:
    with pytest.raises(ValueError, match="document 100000 does not exist"):
        list(find_origins(small.collection.sources["lines"], {"train": [100_000]}))


@pytest.mark.parametrize("damage", ["gone", "one letter", "cut"])
def test_a_file_that_changed_is_named_and_others_are_still_found(
    small: SmallCollection, file_of_lines: Path, damage: str
) -> None:
    raw = file_of_lines.read_bytes()
    file_of_lines.unlink()
    if damage != "gone":
        file_of_lines.write_bytes(raw[:-9] if damage == "cut" else raw[:10] + b"X" + raw[11:])
    source = small.collection.sources["lines"]
    documents = small.documents["lines"]["train"]
    found = {number: one for _, number, one in find_origins(source, {"train": range(len(documents))})}
    lost = [number for number, one in found.items() if isinstance(one, Lost)]
    for number, one in found.items():
        if isinstance(one, Lost):
            assert str(file_of_lines) in one.reason
            assert ("cannot be read" if damage == "gone" else "has changed") in one.reason
        else:
            assert one.text == documents[number].text
    of_file = [number for number, one in enumerate(documents) if one.path == str(file_of_lines)]
    if damage == "gone":
        assert lost == of_file
    else:  # only the piece with the fault
        assert lost
        assert len(lost) < len(of_file) / 2
        assert (lost[0] == 0) == (damage == "one letter")


def test_manifest_and_ledger_that_do_not_fit_the_shards_are_a_fault(small: SmallCollection, tmp_path: Path) -> None:
    copy = tmp_path / "c"
    shutil.copytree(small.collection.path, copy)
    source = open_collection(copy).sources["lines"]
    ledger = source.path / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes() * 2)
    with pytest.raises(DataFormatError, match="do not add up"):
        list(find_origins(source, {"train": [0]}))
