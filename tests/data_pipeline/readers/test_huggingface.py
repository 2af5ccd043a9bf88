"""Data sets of Hugging Face's library: saved folders, and names resolved by the library, from local folders."""

import bz2
import gzip
import io
import json
import logging
import lzma
from pathlib import Path

import datasets
import pytest

from data_pipeline.corpus import CorpusError, Document, FileFacts, find_files, plan_units, read_documents, read_piece
from data_pipeline.readers import huggingface

TEXTS = [f"text {number}" for number in range(50)]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def texts(source: Path | str, text_field: str = "text") -> list[str]:
    return [item.text for item in read_documents(source, text_field=text_field) if isinstance(item, Document)]


# ---------------------------------------------------------------- folders that were saved


def test_a_saved_folder_is_read_in_the_order_of_its_shards(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"text": TEXTS, "meta": [{"id": text} for text in TEXTS]})
    data.save_to_disk(tmp_path / "saved", num_shards=3)
    state_file = tmp_path / "saved" / "state.json"
    (tmp_path / "saved" / "cache-1234.arrow").write_bytes(b"of an old map")
    assert texts(tmp_path / "saved") == texts(tmp_path / "saved", "meta.id") == TEXTS
    assert [Path(name).name for name in find_files(tmp_path / "saved").ignored] == [
        "cache-1234.arrow", "dataset_info.json", "state.json",
    ]  # fmt: skip
    assert texts(f"file://{tmp_path}/saved") == TEXTS
    assert sorted(texts(str(tmp_path))) == sorted(TEXTS)

    state = json.loads(state_file.read_text())
    state["_data_files"].reverse()
    state_file.write_text(json.dumps(state))
    assert texts(tmp_path / "saved") == TEXTS[34:] + TEXTS[17:34] + TEXTS[:17]
    (tmp_path / "saved" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(CorpusError, match=r"data-00001-of-00003\.arrow: named in state\.json"):
        texts(tmp_path / "saved")
    state_file.write_text(json.dumps({**state, "_indices_files": [{"filename": "x"}]}))
    with pytest.raises(CorpusError, match="flatten_indices"):
        texts(tmp_path / "saved")
    state_file.write_text('{"of": "another program"}')
    with pytest.raises(CorpusError, match=r"cache-1234\.arrow: damaged"):
        texts(tmp_path / "saved")


def test_several_saved_splits_are_not_read_as_one(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "both")
    with pytest.raises(CorpusError, match="several splits"):
        texts(tmp_path / "both")
    assert texts(tmp_path / "both" / "train") == TEXTS
    with pytest.raises(CorpusError, match="give the folder itself"):
        texts(f"hf:{tmp_path}/both")


# ---------------------------------------------------------------- names


@pytest.fixture
def configs(tmp_path: Path) -> str:
    """A data set of two configs, as the hub has them: Parquet of three files, and jsonl with a test split."""
    folder = tmp_path / "both"
    (folder / "en").mkdir(parents=True)
    for number in range(3):
        part = datasets.Dataset.from_dict({"text": TEXTS[number * 20 : number * 20 + 20]})
        part.to_parquet(folder / "en" / f"train-{number:05d}-of-00003.parquet")
    (folder / "zh.jsonl").write_text('{"text": "一"}\n{"text": null}\n', encoding="utf-8")
    (folder / "zh-test.jsonl").write_text('{"text": "二"}\n', encoding="utf-8")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  default: true\n  data_files: en/*.parquet\n- config_name: zh\n"
        "  data_files:\n  - split: train\n    path: zh.jsonl\n  - split: test\n    path: zh-test.jsonl\n---\n"
    )
    return f"hf:{folder}"


def test_a_name_gives_the_files_of_its_config_and_split(configs: str) -> None:
    assert texts(configs) == texts(f"{configs}:en") == texts(f"{configs}::train") == TEXTS
    assert texts(f"{configs}:zh") == ["一"]
    assert texts(f"{configs}:zh:test") == ["二"]
    listing = find_files(configs)
    assert [piece.kind for piece, _ in listing.files] == ["parquet"] * 3
    assert len(plan_units(listing.files, 1)) == 3
    for piece, facts in listing.files:
        assert FileFacts.of(piece) == facts


def test_a_name_that_leads_nowhere_is_one_clear_line(configs: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for address, words in (
        (f"{configs}:fr", "'fr' not found"),
        (f"{configs}:zh:validation", r"no split 'validation'; it has train, test"),
        (f"{configs}:a:b:c", "not of the form"),
        ("hf:", "not of the form"),
        (f"hf:{tmp_path}/nowhere", "cannot read it"),
        (f"hf:{tmp_path}/empty", "cannot read it"),
        ("hf:no-such/data-set@main:en", "cannot read it"),
    ):
        with pytest.raises(CorpusError, match=words) as caught:
            texts(address)
        assert "\n" not in str(caught.value)


def test_a_hub_out_of_reach_is_one_line_without_the_librarys_remarks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attempt that fails is a warning of huggingface_hub's logger."""
    library, said = logging.getLogger("huggingface_hub"), io.StringIO()
    monkeypatch.setattr(library, "handlers", [logging.StreamHandler(said)])
    monkeypatch.setattr(library, "level", logging.WARNING)

    def fail(*_: object, **__: object) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        raise ConnectionError("the hub is far")

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    with pytest.raises(CorpusError, match=r"hf:user/set: `datasets` cannot read it: the hub is far$"):
        find_files("hf:user/set")
    assert said.getvalue() == ""


def test_the_revision_of_a_name_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, config: str | None, *, revision: str | None) -> None:
        asked.append((name, config, revision))
        raise ConnectionError("the hub is far")

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    for address in ("hf:user/set@v1.0:en", "hf:user/set"):
        with pytest.raises(CorpusError, match="the hub is far"):
            find_files(address)
    assert asked == [("user/set", "en", "v1.0"), ("user/set", None, None)]


# ---------------------------------------------------------------- files that the library reads


def test_files_of_other_kinds_are_streamed_one_by_one(tmp_path: Path) -> None:
    for number in range(3):
        rows = "".join(f'"row {number}, {row}",{row}\n' for row in range(4))
        (tmp_path / f"train-{number}.csv").write_text(f"text,n\n{rows}" + (",5\n" if number == 1 else ""))
    units = plan_units(find_files(f"hf:{tmp_path}").files, 1)
    assert [len(unit) for unit in units] == [1, 1, 1]
    for number, (piece,) in enumerate(units):
        raw: list[bytes] = []
        heard: list[int] = []
        items = list(read_piece(piece, on_bytes=heard.append, on_raw=raw.append))
        assert b"".join(raw) == Path(piece.path).read_bytes()
        assert sum(heard) == len(b"".join(raw))
        assert [item.position for item in items] == list(range(1, len(items) + 1))
        assert [item.text for item in items if isinstance(item, Document)] == [f"row {number}, {n}" for n in range(4)]
        assert len(items) == (5 if number == 1 else 4)
    assert texts(f"hf:{tmp_path}", "n") == []


def test_json_that_is_no_jsonl_is_streamed(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(json.dumps([{"a": {"b": text}} for text in TEXTS]))
    assert texts(f"hf:{tmp_path}", "a.b") == TEXTS


def test_what_the_library_cannot_read_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_bytes(b'text,n\n"a",1\n"b\xff",2\n')
    with pytest.raises(CorpusError, match=r"`datasets` cannot read it") as caught:
        texts(f"hf:{tmp_path}")
    assert "\n" not in str(caught.value)
    (tmp_path / "train.csv").rename(tmp_path / "train.csv.zst")
    with pytest.raises(CorpusError, match="would not be noticed"):
        texts(f"hf:{tmp_path}")


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_a_cut_is_noticed_where_the_library_unpacks(tmp_path: Path, kind: str) -> None:
    compress = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[kind]
    whole = compress(b"text\n" + b"".join(b"row %d\n" % row for row in range(500)))
    for length in (len(whole), len(whole) // 2, len(whole) - 4):
        (tmp_path / f"train.csv.{kind}").write_bytes(whole[:length])
        if length == len(whole):
            assert len(texts(f"hf:{tmp_path}")) == 500
            continue
        with pytest.raises(CorpusError, match="ended before"):
            texts(f"hf:{tmp_path}")


def test_a_data_set_that_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    for name in ("train-1.csv", "train-2.csv"):
        (tmp_path / name).write_text("text\nx\n")
    (_, (second,)) = plan_units(find_files(f"hf:{tmp_path}").files, 1)
    (tmp_path / "train-1.csv").unlink()
    with pytest.raises(CorpusError, match="have changed"):
        list(read_piece(second))
    assert second.kind == huggingface.ROWS
