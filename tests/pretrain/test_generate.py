"""Text from a run's own checkpoint: prompts continued as if alone, whole or as they come, until something ends them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model.generate import Sampling
from pretrain.__main__ import main
from pretrain.config import RecipeError
from pretrain.export import export_hf
from pretrain.generate import BATCH_SIZE, Continuation, continue_prompts, read_prompts, stream
from pretrain.subject import Subject, open_subject
from tests.command_line import run_command
from tests.pretrain.test_resume import train_case
from tests.ranks import run_ranks
from tokenizer.codec import Codec

PROMPTS = ["a", "", "It is a truth universally acknowledged"]
SETTINGS: dict[str, Any] = {"max_new_tokens": 40, "seed": 1}
BYTES_TEXT = "é 鿿 😀👩‍🚀 ok 道\u200b\ufffd."


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a model this small, threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run(tiny_recipe: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with three times the tokenizer's ids, three steps old; in fp32, where a batch changes no draw."""
    path = tmp_path_factory.mktemp("generate") / "run"
    changes: dict[str, dict[str, Any]] = {
        "model": {"vocab_size": 3000},
        "precision": {"compute": "fp32"},
        "schedule": {"max_steps": 3},
        "evaluation": {"every_steps": 9},
    }
    assert run_ranks(1, train_case, tiny_recipe(**changes), path) == ["finished"]
    return path


@pytest.fixture(scope="module")
def subject(run: Path) -> Subject:
    return open_subject(run)


def test_ids_that_the_tokenizer_lacks_are_never_drawn(subject: Subject) -> None:
    """However little the model has learnt."""
    texts = [text for _, text in continue_prompts(subject, PROMPTS, Sampling(5.0), **SETTINGS)]
    assert all(texts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_does_not_depend_on_the_other_prompts(subject: Subject, temperature: float) -> None:
    prompts = PROMPTS * (BATCH_SIZE // len(PROMPTS) + 1)
    sampling = Sampling(temperature)
    alone = dict(pair for one in PROMPTS for pair in continue_prompts(subject, [one], sampling, **SETTINGS))
    together = list(continue_prompts(subject, prompts, sampling, **SETTINGS))
    assert together == [(prompt, alone[prompt]) for prompt in prompts]


def test_the_text_says_which_prompt_it_continues(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["pretrain", "generate", str(run), "--max-new-tokens", "4", *arguments])
        with pytest.raises(SystemExit, match=r"^(0|None)$"):
            main()
        return capsys.readouterr().out

    one, other = said("--prompt", "a"), said("--prompt", "It is")
    assert one.startswith("a")
    both = ("--prompt", "a", "--prompt", "It is")
    assert said(*both) == f"──── prompt 1 of 2 ────\n{one}──── prompt 2 of 2 ────\n{other}"
    assert "────" not in said(*both, "--json")


# ---------------------------------------------------------------- as it comes


@pytest.mark.parametrize("seed", range(6))
def test_what_comes_is_what_there_is_in_the_end(subject: Subject, seed: int) -> None:
    """At a high temperature many ids are single bytes, most of which make no character."""
    for sampling in (Sampling(0.0), Sampling(5.0), Sampling(1.0, top_k=30)):
        pieces = list(stream(subject, "a", sampling, max_new_tokens=50, seed=seed))
        ((_, text),) = continue_prompts(subject, ["a"], sampling, max_new_tokens=50, seed=seed)
        assert "".join(pieces) == text
        assert all(pieces)


def test_no_piece_holds_half_a_character(tokenizer: Path) -> None:
    """Ids of bytes, one by one: a piece comes when its last byte is there, and never ends in what only lacks bytes."""
    codec = Codec.load(tokenizer)
    one = Continuation(codec)
    told = []
    ids = codec.encode(BYTES_TEXT)
    assert sum(codec.is_byte(token) for token in ids) > 20
    for token in ids:
        before = len(one.settled)
        one.add(token)
        told.append(one.settled[before:])
    assert all(not piece.endswith("\ufffd") for piece in told)
    one.end()
    assert one.text == one.settled == codec.decode(ids) == BYTES_TEXT
    assert {"😀", "👩", "道"} <= set(told)


def test_every_chinese_character_and_emoji_comes_whole_out_of_bytes(tokenizer: Path) -> None:
    """As if the tokenizer had none of them: each of the CJK ideographs and the emoji blocks, byte by byte."""
    codec = Codec.load(tokenizer)
    of_byte = {int(codec.piece(one)[3:5], 16): one for one in range(codec.vocab_size) if codec.is_byte(one)}
    characters = [
        chr(code) for first, last in ((0x4E00, 0x9FFF), (0x1F300, 0x1FAFF)) for code in range(first, last + 1)
    ]
    for start in range(0, len(characters), 16):
        text = "".join(characters[start : start + 16])
        one, pieces = Continuation(codec), []
        for byte in text.encode():
            before = len(one.settled)
            one.add(of_byte[byte])
            pieces.append(one.settled[before:])
        assert [piece for piece in pieces if piece] == [*text]
        assert one.text == codec.decode(one.ids) == text


def test_a_text_cut_within_a_character_ends_as_decode_ends_it(tokenizer: Path) -> None:
    codec = Codec.load(tokenizer)
    ids = codec.encode("a😀")
    for length in range(1, len(ids) + 1):
        one = Continuation(codec)
        for token in ids[:length]:
            one.add(token)
        assert one.settled in ("a", "a😀")
        one.end()
        assert one.settled == one.text == codec.decode(ids[:length])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_stop_string_ends_the_text_before_it(subject: Subject, seed: int, length: int) -> None:
    """Wherever it lies in the text, across the borders of ids; what was streamed has nothing of it."""
    sampling = Sampling(1.0)
    ((_, whole),) = continue_prompts(subject, ["a"], sampling, max_new_tokens=50, seed=seed)
    candidates = (whole[start : start + length] for start in range(len(whole) // 3, len(whole) - length))
    stop = next(stop for stop in candidates if "\ufffd" not in stop)
    stops = [stop, "not in any text of this model"]
    ((_, text),) = continue_prompts(subject, ["a"], sampling, max_new_tokens=50, seed=seed, stop_strings=stops)
    assert text == whole[: whole.find(stop)]
    pieces = stream(subject, "a", sampling, max_new_tokens=50, seed=seed, stop_strings=stops)
    assert "".join(pieces) == text


def test_what_may_begin_a_stop_is_held_back_until_it_is_none(tokenizer: Path) -> None:
    codec = Codec.load(tokenizer)
    one = Continuation(codec, ("\n\nQ", "END"))
    for text, settled in (
        ("x\n", "x"),
        ("x\n\n", "x"),
        ("x\n\nE", "x\n\n"),
        ("x\n\nEN", "x\n\n"),
        ("x\n\nENT", "x\n\nENT"),
    ):
        one.ids = codec.encode(text)[:-1]
        one.add(codec.encode(text)[-1])
        assert (one.text, one.settled, one.ended) == (text, settled, False)
    one.ids = codec.encode("x\n\nEN")
    one.add(codec.encode("D")[0])
    assert (one.text, one.settled, one.ended) == ("x\n\n", "x\n\n", True)


def test_the_eos_ends_a_text_and_is_no_part_of_it(tokenizer: Path) -> None:
    codec = Codec.load(tokenizer)
    one = Continuation(codec)
    for token in (*codec.encode("ab"), codec.eos_id, *codec.encode("never")):
        one.add(token)
    assert (one.text, one.ended) == ("ab", True)


# ---------------------------------------------------------------- the command


def test_samples_and_models_side_by_side(run: Path, subject: Subject, tmp_path: Path) -> None:
    export_hf(run, tmp_path / "hf", dtype=None, max_shard_bytes=10**9)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"q": "a"}\n\n{"q": "It is"}\n')
    command = (
        "pretrain",
        "generate",
        run,
        "--file",
        file,
        "--field",
        "q",
        "--max-new-tokens",
        "5",
        "--num-samples",
        "2",
    )
    done = run_command(*command, "--compare", tmp_path / "hf", "--json", "--top-k", "0")
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["prompt"], one["seed"], one["subject"]) for one in told] == [
        (prompt, seed, name)
        for prompt in ("a", "It is")
        for seed in (1, 2)
        for name in (subject.name, str(tmp_path / "hf"))
    ]
    expected = [
        text for seed in (1, 2)
        for _, text in continue_prompts(subject, ["a", "It is"], Sampling(0.8), max_new_tokens=5, seed=seed)
    ]  # fmt: skip
    assert [one["continuation"] for one in told[::2]] == [expected[0], expected[2], expected[1], expected[3]]
    assert [one["continuation"] for one in told[::2]] == [one["continuation"] for one in told[1::2]]
    said = run_command(*command[:-2], "--compare", tmp_path / "hf").stdout
    assert said.count(f"── {subject.name} ──") == 2


def test_streamed_on_the_command_line(run: Path, subject: Subject) -> None:
    ((_, text),) = continue_prompts(subject, ["a"], Sampling(0.8, 50), max_new_tokens=9, seed=1)
    done = run_command("pretrain", "generate", run, "--prompt", "a", "--stream", "--max-new-tokens", "9")
    assert (done.stdout, done.returncode) == (f"a{text}\n", 0)


def test_typed_prompts(run: Path, subject: Subject, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A line too long is told and the next one is taken; the end of input ends it."""
    lines = iter(["a", "", "a b " * 80, "It is"])

    def typed(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.argv", ["pretrain", "generate", str(run), "--interactive", "--max-new-tokens", "5"])
    with pytest.raises(SystemExit, match=r"^(0|None)$"):
        main()
    said = capsys.readouterr()
    texts = [
        text for prompt in ("a", "It is")
        for _, text in continue_prompts(subject, [prompt], Sampling(0.8, 50), max_new_tokens=5, seed=1)
    ]  # fmt: skip
    assert said.out == f"{texts[0]}\n\n{texts[1]}\n"
    assert said.err.startswith("error: the prompt's ")


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "prompts, changes, words",
    [
        (["a b " * 40], {}, r"^the prompt's \d+ tokens and 40 new ones exceed the model's seq_len 64: shorten"),
        (["a", "a b " * 40], {}, r"^prompt 2's \d+ tokens and 40 new ones exceed"),
        (["a"], {"stop_strings": ["x", ""]}, "an empty stop string"),
    ],
)
def test_what_cannot_be_continued(subject: Subject, prompts: list[str], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        list(continue_prompts(subject, prompts, Sampling(), **{**SETTINGS, **changes}))


def test_prompts_out_of_files(tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_bytes("\ufeffone\r\n\n  two \u2028three\n".encode())
    assert read_prompts(plain) == ["one", "  two \u2028three"]
    for name, content, words in (
        ("empty.txt", b"\n \n", "holds no prompt"),
        ("bad.txt", b"a\xff", "is no UTF-8: byte 1 is 0xff"),
        ("bad.jsonl", b'{"prompt": "a"}\n{', "line 2 is no JSON"),
        ("other.jsonl", b'{"text": "a"}', 'line 1 has no text "prompt"'),
        ("list.jsonl", b"[1]", 'line 1 has no text "prompt"'),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecipeError, match=words):
            read_prompts(tmp_path / name)


def test_bad_options_are_one_line(run: Path, tmp_path: Path) -> None:
    for options, words in (
        ((), "say what to continue"),
        (("--prompt", "a", "--interactive"), "say what to continue"),
        (("--prompt", "a", "--stream", "--json"), "leave out --stream"),
        (("--prompt", "a", "--stream", "--compare", run), "--compare needs whole texts"),
        (("--prompt", "a", "--top-p", "0"), "top_p = 0.0 must be"),
        (("--prompt", "a", "--repetition-penalty", "-1"), "repetition_penalty = -1.0"),
        (("--file", tmp_path / "nowhere"), "nowhere"),
    ):
        done = run_command("pretrain", "generate", run, *options)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert words in done.stderr
