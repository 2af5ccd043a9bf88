"""The benchmarks' own parts: packages read, text taken out of them, a corpus written; no network, no measurement."""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib.util
import io
import json
import lzma
import mmap
import random
import sys
import tarfile
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zstandard

from benchmarks import (
    data,
    data_loader,
    data_pages,
    data_peers,
    data_prepare,
    data_startup,
    precision_study,
    saving,
    short,
)
from model.config import PRESETS
from pretrain.runtime import Ranks
from tests.conftest import VOCAB_SIZE
from tests.pretrain.test_resume import train_case
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "benchmarks").glob("*.py"))
SCRIPTS = [path for path in MODULES if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
PACKAGES = {"tokenizer", "data_pipeline", "model", "pretrain", "launch"}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


corpus: Any = script("corpus")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_finds_the_package_and_not_its_neighbour(path: Path) -> None:
    """`python benchmarks/x.py` puts benchmarks/ first on the path, where `import tokenizer` finds tokenizer.py."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    lines = [ast.unparse(node) for node in body]
    ours = [
        place
        for place, node in enumerate(body)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES
    ]
    repaired = [place for place, line in enumerate(lines) if line.startswith("sys.path.insert(0, ")]
    assert not ours or (repaired and repaired[0] < ours[0])


# ---------------------------------------------------------------- packages


def tar(files: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return buffer.getvalue()


def deb(data: bytes, suffix: str = ".xz") -> bytes:
    compress = {".xz": lzma.compress, ".zst": zstandard.compress, ".gz": gzip.compress, "": bytes}[suffix]
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", f"data.tar{suffix}": compress(data)}
    whole = b"!<arch>\n"
    for name, content in members.items():
        whole += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        whole += content + b"\n" * (len(content) % 2)
    return whole


def source(**changes: Any) -> Any:
    plain = corpus.Source("notes", "english", "notes", "1.0", "MIT", r"\.txt(\.gz)?$", corpus.plain)
    return replace(plain, **changes)


def read(tmp_path: Path, content: bytes, **changes: Any) -> list[bytes]:
    path = tmp_path / "package.deb"
    path.write_bytes(content)
    return list(corpus.read_files(path, source(**changes)))


@pytest.mark.parametrize("suffix", [".xz", ".zst", ".gz", ""])
def test_files_of_a_package(suffix: str, tmp_path: Path) -> None:
    files = {"./usr/a.txt": b"one", "./usr/b.txt.gz": gzip.compress(b"two"), "./usr/c.png": b"three"}
    content = deb(tar(files, links={"./usr/d.txt": "a.txt"}), suffix)
    assert read(tmp_path, content) == [b"one", b"two"]


def test_archives_within_a_package(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("java/a.txt", "one")
        archive.writestr("java/a.class", "two")
    content = deb(tar({"./src.zip": buffer.getvalue(), "./src.tar.xz": lzma.compress(tar({"c/b.txt": b"three"}))}))
    assert read(tmp_path, content, within=r"/src\.zip$") == [b"one"]
    assert read(tmp_path, content, within=r"/src\.tar\.xz$") == [b"three"]
    with pytest.raises(corpus.CorpusBuildError, match="no file in it matches"):
        read(tmp_path, content, within="absent")


def test_hostile_names_write_nothing(tmp_path: Path) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    hostile = {"../../../escaped.txt": b"one", "/escaped.txt": b"two", str(tmp_path / "absolute.txt"): b"three"}
    assert read(inside, deb(tar(hostile, links={"./link.txt": "../../secret"}))) == [b"one", b"two", b"three"]
    assert {path.name for path in tmp_path.rglob("*")} == {"a", "b", "package.deb"}


WHOLE = deb(tar({"./usr/a.txt": b"one" * 5000}))


@pytest.mark.parametrize(
    "content",
    [b"", b"!<arch>\n", b"no package at all", WHOLE[:100], WHOLE[: len(WHOLE) - 40], WHOLE.replace(b"`\n", b"  ", 1)],
)
def test_a_damaged_package_is_one_line(content: bytes, tmp_path: Path) -> None:
    assert read(tmp_path, WHOLE) == [b"one" * 5000]
    with pytest.raises(corpus.CorpusBuildError, match="remove the file and run again") as caught:
        read(tmp_path, content)
    assert len(str(caught.value).splitlines()) == 1


# ---------------------------------------------------------------- text


def test_a_page() -> None:
    html = (
        "<html><head><title>no</title><style>p {}</style></head><body><nav>menu</nav>"
        "<h1>Head  &amp;\n line</h1><p>a <b>bold</b> word<script>x()</script></p>"
        "<pre>  if x:\n\treturn   1\n</pre><ul><li>one</li><li>二</li></ul></body></html>"
    )
    (text,) = corpus.page(html)
    assert text == "Head & line\n\na bold word\n\n  if x:\n\treturn   1\n\none\n\n二\n"


def test_a_mallard_page_without_its_credits() -> None:
    (text,) = corpus.page("<page><info><credit><name>A. U. Thor</name></credit></info><title>T</title><p>p</p></page>")
    assert text == "T\n\np\n"


def test_a_man_page() -> None:
    roff = (
        '.\\" a comment\n.TH LS 1 2020\n.SH "NAME"\nls \\- list\n.PP\nSee\n.BR stat (2),\n.B "two words"\n'
        "and \\fIitalics\\fP, \\(aqquoted\\(aq, back\\eslash.\n.nf\n  kept\n.fi\n"
    )
    (text,) = corpus.manual(roff)
    assert text == ("NAME\nls - list\n\nSee\nstat(2),\ntwo words\nand italics, 'quoted', back\\slash.\n  kept\n")


def test_a_book_is_parted_at_empty_lines_and_nothing_is_lost() -> None:
    paragraphs = [f"paragraph {number} " * 20 for number in range(200)]
    parts = list(corpus.passages("\n\n".join(paragraphs)))
    assert len(parts) > 5
    assert [one for part in parts for one in part.removesuffix("\n").split("\n\n")] == paragraphs
    assert max(map(len, parts)) < corpus.PASSAGE_CHARACTERS + 400


# ---------------------------------------------------------------- the corpus


def written(out: Path, side: str) -> list[str]:
    with zstandard.open(out / side / "english-notes.jsonl.zst", "rt", encoding="utf-8", newline="\n") as lines:
        return [json.loads(line)["text"] for line in lines]


def write(out: Path, texts: dict[str, bytes], budget: float = float("inf"), **changes: Any) -> Any:
    path = out / "package.deb"
    path.write_bytes(deb(tar(texts)))
    return corpus.write_source(source(**changes), (path, "1.0", "00"), out, set(), budget)


TEXTS = {f"./{number}.txt": f"text {number}: ".encode() + b"word " * 100 for number in range(400)}


def test_every_document_is_on_one_side_or_counted_as_dropped(tmp_path: Path) -> None:
    odd = {
        "./twin.txt": TEXTS["./7.txt"], "./short.txt": b"short", "./latin.txt": b"caf\xe9 " * 100,
        "./nul.txt": b"\0" * 300, "./long.txt": b"x" * (corpus.LONGEST_BYTES + 1),
    }  # fmt: skip
    outcome = write(tmp_path, TEXTS | odd)
    train, heldout = written(tmp_path, "train"), written(tmp_path, "heldout")
    assert sorted(train + heldout) == sorted(text.decode() for text in TEXTS.values())
    assert 5 < len(heldout) < 40
    assert (outcome.documents["train"], outcome.documents["heldout"]) == (len(train), len(heldout))
    assert outcome.text_bytes["train"] == sum(map(len, train))
    assert sorted(outcome.dropped.values()) == [1] * 5


def test_the_same_packages_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    write(tmp_path / "one", TEXTS)
    write(tmp_path / "two", dict(reversed(TEXTS.items())))
    for side in ("train", "heldout"):
        one, two = (tmp_path / name / side / "english-notes.jsonl.zst" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_a_part_is_the_first_part_of_all(tmp_path: Path) -> None:
    assert not write(tmp_path, TEXTS).is_cut
    whole, heldout = written(tmp_path, "train"), written(tmp_path, "heldout")
    outcome = write(tmp_path, TEXTS, budget=80_000)
    part = written(tmp_path, "train")
    assert part == whole[: len(part)]
    assert 0 < len(written(tmp_path, "heldout")) < len(heldout)  # they are not the first ones
    assert 70_000 < outcome.text_bytes.total() <= 80_000
    assert outcome.is_cut


def test_chinese_that_was_not_translated_is_dropped(tmp_path: Path) -> None:
    texts = {"./a.txt": ("天地玄黃" * 60).encode(), "./b.txt": ("not translated 天 " * 60).encode()}
    path = tmp_path / "package.deb"
    path.write_bytes(deb(tar(texts)))
    outcome = corpus.write_source(source(language="chinese"), (path, "1.0", "00"), tmp_path, set(), 1e9)
    assert outcome.dropped == {"not translated": 1}
    assert outcome.documents.total() == 1


def test_sources_are_named_once_with_their_licence() -> None:
    names = [(one.language, one.name) for one in corpus.SOURCES]
    assert len(set(names)) == len(names)
    assert all(one.licence and one.version and one.language in corpus.LANGUAGES for one in corpus.SOURCES)
    outcomes = [corpus.Outcome(one, one.version, "ab" * 32) for one in corpus.SOURCES]
    page = corpus.sources_page(outcomes, "https://example.org")
    assert all(f"| {one.package} {one.version} | {one.licence} |" in page for one in corpus.SOURCES)


def test_a_corpus_of_the_benchmark_keeps_its_sides_apart(tmp_path: Path) -> None:
    benchmark: Any = script("tokenizer")
    write(tmp_path, TEXTS)
    training, unseen = benchmark.read_corpus(tmp_path, 1e9, 1e9)
    assert training == {"english": written(tmp_path, "train")}
    assert unseen == {"english": written(tmp_path, "heldout")}

    training, unseen = benchmark.read_corpus(ROOT / "data_pipeline" / "sample_corpus", 1e9, 1e9)
    assert set(training) == set(unseen) == {"english", "chinese", "code"}
    for language in training:
        assert not set(training[language]) & set(unseen[language])
        assert benchmark.size_of(training[language]) > benchmark.size_of(unseen[language]) > 100_000


# ---------------------------------------------------------------- data


def options_of(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(data.parse([])), "repetitions": 1, "seq_len": 64, "batch_size": 4, **changes})


def test_the_benchmark_of_prepare_compares_what_gives_the_same_ids(tmp_path: Path) -> None:
    """In its smallest form, and what it says when an id differs."""
    report = data_prepare.measure(options_of(megabytes=0.06, vocab_size=2500, workers=1, files=3), tmp_path)
    assert report["text_bytes"] > 170_000
    assert report["files"] == 3
    assert report["ratio_to_usual_script"] > 0
    assert "× as fast" in data_prepare.to_text(report)
    assert next(short.prepare(report)).ratio == report["ratio_to_usual_script"]
    texts = list(data_prepare.corpus_texts(None, random.Random(2), 12e6))
    assert 12e6 < sum(len(text.encode()) for text in texts) < 12.2e6
    assert len(set(texts)) > 0.98 * len(texts)
    bench = data_prepare.PrepareBench(tmp_path, [*texts[:3], "another"], [tmp_path / "00.jsonl"], [], 1)
    with pytest.raises(SystemExit, match="differ"):
        bench.assert_same_ids()
    with pytest.raises(SystemExit, match="take more than 2"):
        data_prepare.measure(options_of(files=2), tmp_path)


def test_the_benchmark_of_the_loader_compares_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 500, "d_model": 64, "n_layers": 1, "d_ff": 64, "seq_len": 48}  # shorter than the windows
    monkeypatch.setitem(PRESETS, "tiny", replace(PRESETS["mini"], **sizes))
    monkeypatch.setattr(data_loader, "LOCATED", 1000)
    small = options_of(loader_megabytes=1, batches=5, cold_batches=3, steps=1, preset="tiny")
    report = data_loader.measure(small, tmp_path)
    assert sum(report["sources"].values()) == 500_000
    assert 0 < report["step"]["share"] < 1
    assert report["step"]["tokens"] == 48
    text = data_loader.to_text(report)
    assert "× numpy memmap" in text
    waiting = list(short.loader(report))[-1]
    assert (waiting.ratio, waiting.reference) == (report["step"]["share"], "a step of `tiny`")
    for held, ratio in ((0.0, "2.00 × numpy memmap"), (1.0, "cannot be cold here")):
        cold = {**report["cold"], "pages_held": held, "ratio": 2.0 if held == 0 else None}
        assert ratio in data_loader.to_text({**report, "cold": cold})
    one, other = np.zeros((2, 3), np.int64), np.ones((2, 3), np.int64)
    data_loader.assert_same(iter([(one, one)]), iter([(one, one)]))
    with pytest.raises(SystemExit, match="different batches"):
        data_loader.assert_same(iter([(one, one)]), iter([(one, other)]))


def test_pages_are_in_memory_until_they_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1_000_000))
    held, pages = data_pages._pages(path)
    assert held == pages == -(-1_000_000 // mmap.PAGESIZE)
    assert data_pages.drop_pages([path]) in (0.0, 1.0)  # 1: the file system is in memory
    (tmp_path / "empty").touch()
    assert data_pages.drop_pages([tmp_path / "empty"]) == 0.0


def test_the_benchmark_of_starts_refuses_a_wrong_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = options_of(startup_tokens=[1e6])
    (entry,) = data_startup.measure(small, tmp_path)["data_sets"]
    slower = {"tokens": 2e9, "first": {"seconds": 3 * entry["first"]["seconds"]}}
    (row,) = short.startup({"data_sets": [entry, slower]})
    assert (row.what, row.ratio) == ("first batch of 2 G tokens, time", pytest.approx(3))
    assert entry["tokens"] == 1_000_000
    assert entry["far"]["sample"] > entry["first"]["sample"] == 0
    monkeypatch.setattr(data_startup, "mark", lambda *arguments: "0" * 64)
    with pytest.raises(SystemExit, match="not what its windows hold"):
        data_startup.measure(small, tmp_path)


def test_the_benchmark_of_peers_counts_what_they_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_peers, "WORKERS", dict.fromkeys(data_peers.WORKERS, (0,)))
    report = data_peers.measure(options_of(peers_megabytes=0.05, peers=["datasets", "litdata"]), tmp_path)
    assert report["windows"] == 97 * 4 + 3  # the tail included
    measured = report["loaders"]
    assert measured["zerohalf"]["ratio"] == 1
    for name in ("zerohalf", "datasets, 0 workers"):
        assert measured[name]["windows"] == {"missing": 0, "again": 0, "foreign": 0}, name
        assert measured[name]["resumes_exactly"]
        assert 0.7 < measured[name]["shuffled"] < 1.3
    is_absent = importlib.util.find_spec("litdata") is None
    assert ("litdata, 0 workers" in report["absent"]) == is_absent
    text = data_peers.to_text(report)
    assert "every window once" in text
    assert next(short.peers(report)).reference == "datasets, 0 workers"
    assert ("not measured: No module named 'litdata'" in text) == is_absent
    with pytest.raises(SystemExit, match="no such file"):
        data_peers.measure(options_of(peers_python=tmp_path / "none"), tmp_path)


def test_windows_lost_and_repeated_are_counted() -> None:
    expected = np.arange(10, dtype=np.uint64)
    given = np.array([9, 1, 1, 1, 3, 4, 5, 6, 7, 77], np.uint64)
    assert data_peers.compare(expected, given) == {"missing": 3, "again": 2, "foreign": 1}


def test_how_well_windows_are_shuffled() -> None:
    rng = np.random.default_rng(1)
    expected = rng.permutation(3000).astype(np.uint64)
    assert data_peers.shuffled(expected, expected) == 0
    assert data_peers.shuffled(expected, np.append(rng.permutation(expected), np.uint64(9999))) == pytest.approx(
        1, abs=0.1
    )
    in_chunks = np.concatenate([rng.permutation(part) for part in np.split(expected, 10)])
    assert data_peers.shuffled(expected, in_chunks) == pytest.approx(0.1, abs=0.03)


# ---------------------------------------------------------------- saving


def test_the_benchmark_of_saving_compares_the_same_checkpoints() -> None:
    """In its smallest form, on one rank."""
    (found,) = saving.measure(saving.parse(["--quick", "--ranks", "1"]))
    assert found.bytes > 10e6
    assert found.held_ratio > 0
    assert f"held {found.held_ratio:.3f} of that" in found.to_text()
    assert next(short.saving([asdict(found)])) == short.Row(
        "asynchronous save, time held, 1 rank", found.held_ratio, "a save at once"
    )


# ---------------------------------------------------------------- precision


def study_case(ranks: Ranks, options: argparse.Namespace) -> tuple[precision_study.Study, list[str]]:
    found, runs = precision_study.measure(options, options.work / "first")
    precision_study.plot(found, runs, options.work / "study.png")
    return found, precision_study.to_text(found).splitlines()


def test_the_study_of_precision_sees_what_is_lost_and_what_is_kept(
    tmp_path: Path, collection: Path, tokenizer: Path
) -> None:
    """In its smallest form. Compensation brings the updates to where they belong, rounding to the nearest does not."""
    sizes = ["--width=64", "--layers=1", "--seq-len=32", f"--vocab-size={VOCAB_SIZE}", "--evaluation-tokens=64"]
    options = precision_study.parse([*sizes, "--first-steps=3", "--steps=4"])
    options.work = tmp_path
    (tmp_path / "data").symlink_to(collection)
    (tmp_path / "tokenizer").symlink_to(tokenizer)
    assert run_ranks(1, train_case, precision_study.tables(options), tmp_path / "first") == ["finished"]
    ((found, lines),) = run_ranks(1, study_case, options)
    assert len({tuple(kind.heldout_before) for kind in found.kinds.values()}) == 1
    assert 0.1 < found.rounding < found.seeds_apart
    exact, plain, kahan, stochastic = found.kinds.values()
    assert [row.reference for row in short.precision_study(asdict(found))] == ["fp32 masters"] * 3
    assert exact.distance == [0.0, 0.0]
    assert max(exact.still) < 1e-3
    assert exact.arrived == pytest.approx([1.0, 1.0], abs=1e-3)
    for seed in range(2):
        assert plain.still[seed] > 0.5
        assert plain.arrived[seed] == plain.arrived_with_rest[seed] < 0.6
        assert kahan.arrived[seed] < kahan.arrived_with_rest[seed] == pytest.approx(1.0, abs=0.01)
        assert kahan.distance[seed] < plain.distance[seed]
        assert stochastic.arrived[seed] == pytest.approx(1.0, abs=0.05)
    assert [line.split(" | ")[0] for line in lines[-4:]] == [f"| {kind}" for kind in precision_study.KINDS]
    assert (tmp_path / "study.png").stat().st_size > 10_000
