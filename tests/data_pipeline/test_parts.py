"""The work in parts, on one machine or several: the same bytes, nobody in another's way, no end before all are done."""

import json
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from data_pipeline.locks import Span
from data_pipeline.prepare import Options, Part, PrepareError, prepare, prepare_part
from data_pipeline.shards import DataFormatError, open_collection
from tests.data_pipeline.conftest import real_texts, units_held_elsewhere
from tests.data_pipeline.test_prepare import tree, write_jsonl

OPTIONS = Options(validation_fraction=0.2, unit_bytes=20_000)
TWICE = Options(validation_fraction=0.2, unit_bytes=20_000, deduplicate=True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Two sources; documents come again in the same unit, in another unit, in another file, and in another source."""
    folder = tmp_path_factory.mktemp("input")
    texts = real_texts(40)
    first = write_jsonl(folder / "a.jsonl", [*texts[:20], texts[19], *texts[3:5]], bad_lines=True)
    second = write_jsonl(folder / "b.jsonl.gz", [texts[0], "only here", texts[0]])
    other = write_jsonl(folder / "c.jsonl", texts[15:])
    return {"one": [first, second], "two": [other]}


@pytest.fixture(scope="module", params=[OPTIONS, TWICE], ids=["all", "deduplicated"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, inputs: dict[str, list[Path]],
    tokenizer_folder: Path,
) -> tuple[Options, dict[str, bytes]]:  # fmt: skip
    """A whole collection, made at once by one worker."""
    out = tmp_path_factory.mktemp("made") / "out"
    prepare(inputs, tokenizer_folder, out, request.param)
    return request.param, data(out)


def data(out: Path) -> dict[str, bytes]:
    """What belongs to a collection, and the plan; not the locks and logs of how it was made."""
    return {
        name: content
        for name, content in tree(out).items()
        if not name.startswith(".prepare/") or name == ".prepare/plan.json"
    }


def test_parts_are_all_units_once() -> None:
    for units in (0, 1, 7, 8, 100):
        for of in (1, 2, 3, 8, 13):
            spans = [Part(number, of).span(units) for number in range(1, of + 1)]
            assert [n for span in spans for n in range(span.first, span.first + (span.count or 0))] == list(
                range(units)
            )
            assert max(span.count or 0 for span in spans) - min(span.count or 0 for span in spans) <= 1
    assert Part.parse("3/8") == Part(3, 8)
    for wrong in ("0/8", "9/8", "3", "3/8/2", "-1/8", "a/b", "3/0", "", "1/9999999999", "³/8"):
        with pytest.raises(PrepareError, match="K/N"):
            Part.parse(wrong)


def test_parts_in_any_order_make_the_same_bytes(
    tmp_path: Path, made: tuple[Options, dict[str, bytes]], inputs: dict[str, list[Path]], tokenizer_folder: Path
) -> None:
    """Of one division and another, some more than once; nothing is a collection before the last call."""
    options, whole = made
    out = tmp_path / "out"
    parts = [Part(number, 5) for number in range(1, 6)] + [Part(1, 2), Part(200, 200)]
    random.Random(1).shuffle(parts)
    rounds = []
    for _ in range(2 if options.deduplicate else 1):
        rounds.append([prepare_part(inputs, tokenizer_folder, out, options, part=part) for part in parts])
        with pytest.raises(DataFormatError):
            open_collection(out)
    assert (rounds[0][0].units_unhashed > 0) == options.deduplicate
    assert rounds[0][-1].units_unhashed == rounds[-1][-1].units_left == 0
    last = prepare(inputs, tokenizer_folder, out, options)
    assert last.units_done_before == last.units > 20
    assert not last.found_whole
    assert data(out) == whole
    after = prepare_part(inputs, tokenizer_folder, out, options, part=Part(2, 3))
    assert (after.units_left, after.tokens, after.units_done_before) == (0, 0, after.units)


def run_part(arguments: tuple[dict[str, list[Path]], Path, Path, Options, Part, int]) -> int:
    inputs, tokenizer, out, options, part, workers = arguments
    return prepare_part(inputs, tokenizer, out, options, part=part, workers=workers).units_left


def test_parts_at_once_make_the_same_bytes(
    tmp_path: Path, made: tuple[Options, dict[str, bytes]], inputs: dict[str, list[Path]], tokenizer_folder: Path
) -> None:
    """As several machines would: processes that begin together, on an empty folder."""
    options, whole = made
    out = tmp_path / "out"
    calls = [(inputs, tokenizer_folder, out, options, Part(number, 3), 1 + number % 2) for number in (1, 2, 3)]
    with ProcessPoolExecutor(3, mp_context=get_context("fork")) as pool:
        for _ in range(2 if options.deduplicate else 1):
            list(pool.map(run_part, calls))
    assert prepare(inputs, tokenizer_folder, out, options).tokens == 0
    assert data(out) == whole


def test_the_last_call_does_what_parts_left(
    tmp_path: Path, inputs: dict[str, list[Path]], tokenizer_folder: Path
) -> None:
    out = tmp_path / "out"
    report = prepare_part(inputs, tokenizer_folder, out, OPTIONS, part=Part(2, 3), workers=2)
    last = prepare(inputs, tokenizer_folder, out, OPTIONS, workers=2)
    assert last.units_done_before == report.units
    assert last.units == report.units + report.units_left


def test_units_that_another_process_does_are_refused(
    tmp_path: Path, inputs: dict[str, list[Path]], tokenizer_folder: Path
) -> None:
    out = tmp_path / "out"
    units = prepare_part(inputs, tokenizer_folder, out, OPTIONS, part=Part(1, 200)).units_left
    with units_held_elsewhere(out / ".prepare" / "lock", first=units // 2, count=1):
        for call in (
            lambda: prepare_part(inputs, tokenizer_folder, out, OPTIONS, part=Part(1, 1)),
            lambda: prepare_part(inputs, tokenizer_folder, out, OPTIONS, part=Part(5, 9)),
            lambda: prepare(inputs, tokenizer_folder, out, OPTIONS),
        ):
            with pytest.raises(PrepareError, match="another `prepare` is writing"):
                call()
        assert prepare_part(inputs, tokenizer_folder, out, OPTIONS, part=Part(1, 4)).units_left < units
    prepare(inputs, tokenizer_folder, out, OPTIONS)


def test_workers_of_a_killed_part_are_waited_for_by_its_units_alone(
    tmp_path: Path, inputs: dict[str, list[Path]], tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.locks._ORPHANS_SECONDS", 0.1)
    out = tmp_path / "out"
    prepare_part(inputs, tokenizer_folder, out, OPTIONS, part=Part(1, 200))
    with units_held_elsewhere(out / ".prepare" / "workers.lock", first=0, count=2):
        with pytest.raises(PrepareError, match="workers of a run that ended"):
            prepare_part(inputs, tokenizer_folder, out, OPTIONS, part=Part(1, 2))
        prepare_part(inputs, tokenizer_folder, out, OPTIONS, part=Part(2, 2))


def test_standard_input_is_not_for_parts(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(PrepareError, match="standard input"):
        prepare_part({"s": ["-"]}, tokenizer_folder, tmp_path / "out", part=Part(1, 2))
    assert not (tmp_path / "out").exists()


def test_a_part_with_other_options_is_refused(
    tmp_path: Path, inputs: dict[str, list[Path]], tokenizer_folder: Path
) -> None:
    out = tmp_path / "out"
    prepare_part(inputs, tokenizer_folder, out, OPTIONS, part=Part(1, 9))
    with pytest.raises(PrepareError, match="deduplicate = False, not True"):
        prepare_part(inputs, tokenizer_folder, out, TWICE, part=Part(2, 9))


def test_one_range_of_bytes_a_span() -> None:
    assert Span(3, 0).lock(-1, 0)  # no units, nothing to lock


def test_the_command_says_what_is_left(
    tmp_path: Path,
    inputs: dict[str, list[Path]],
    tokenizer_folder: Path,
    run_command: Callable[..., tuple[int, str, str]],
) -> None:
    command = ["prepare", f"a={inputs['two'][0]}", "--tokenizer", tokenizer_folder, "--out", tmp_path / "out",
               "--unit-bytes", 20_000, "--workers", 1]  # fmt: skip
    code, out, _ = run_command(*command, "--units", "1/2")
    assert code == 0
    assert "units of other parts are left" in out
    code, out, _ = run_command(*command, "--units", "2/2", "--json")
    assert json.loads(out)["units_left"] == 0
    code, out, _ = run_command(*command)
    assert "documents read = " in out
    code, _, err = run_command(*command, "--units", "3/2")
    assert (code, err.count("\n")) == (2, 1)
