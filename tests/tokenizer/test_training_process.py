from __future__ import annotations

import io
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece

from tokenizer.codec import TokenizerError
from tokenizer.training_process import Progress, TrainerRefusal, _Log, train_apart

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "model_type": "bpe",
    "vocab_size": 400,
    "byte_fallback": True,
    "normalization_rule_name": "identity",  # else line breaks become spaces
    "num_threads": 1,
    "minloglevel": 0,
}


def words(count: int) -> list[bytes]:
    chance = random.Random(0)
    return [" ".join("".join(chance.choices("etaoinsh", k=6)) for _ in range(50)).encode() for _ in range(count)]


def children(process_id: int) -> set[int]:
    tasks = Path(f"/proc/{process_id}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def is_alive(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(condition: Callable[[], object]) -> None:
    """The test's own time limit ends a wait for what never comes."""
    while not condition():
        time.sleep(0.01)


def test_the_model_is_the_one_that_sentencepiece_makes_here() -> None:
    texts = words(300)
    here = io.BytesIO()
    quiet = OPTIONS | {"minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=here, **quiet)
    trained = train_apart(texts, OPTIONS, split_lines=False)
    assert trained.model == here.getvalue()
    assert trained.seconds > 0
    assert 5e6 < trained.peak_bytes < 1e9


def test_lines_reach_the_trainer_as_sentences_of_their_own() -> None:
    texts = words(300)
    joined = [b"\n".join(texts[start : start + 10]) + b"\n\n" for start in range(0, 300, 10)]
    whole, lines = (train_apart(joined, OPTIONS, split_lines=split).model for split in (False, True))
    assert lines == train_apart(texts, OPTIONS, split_lines=False).model
    assert whole != lines


def test_a_large_input_passes_through_a_pipe_that_is_small() -> None:
    texts = [b"x" * 3_000_000, b"abc " * 700_000, b"z"]
    options = OPTIONS | {"max_sentence_length": 10_000_000, "vocab_size": 264}
    assert train_apart(iter(texts), options, split_lines=False).model


def test_a_refusal_comes_with_sentencepieces_words() -> None:
    with pytest.raises(TrainerRefusal, match="Vocabulary size too high"):
        train_apart([b"few words"], OPTIONS | {"vocab_size": 5000}, split_lines=False)


def test_a_fault_in_the_process_is_one_line_with_its_last_words() -> None:
    with pytest.raises(
        TokenizerError, match=r"^the training process failed with code 1 while starting: TypeError[^\n]*$"
    ):
        train_apart([b"few words"], OPTIONS | {"model_writer": 1}, split_lines=False)


@pytest.mark.parametrize(
    "number, words",
    [(signal.SIGKILL, "for want of memory: lower --sample-bytes"), (signal.SIGTERM, "ended by signal 15")],
)
def test_a_killed_process_is_one_line(number: signal.Signals, words: str) -> None:
    before = children(os.getpid())

    def kill(progress: Progress) -> None:
        for child in children(os.getpid()) - before:
            os.kill(child, number)

    with pytest.raises(TokenizerError, match=f"^[^\n]*{words}[^\n]*$"):
        train_apart(itertools.repeat(b"some words"), OPTIONS, split_lines=False, on_progress=kill)
    assert children(os.getpid()) == before


def test_an_error_of_the_caller_ends_the_process() -> None:
    before = children(os.getpid())

    def texts() -> object:
        yield b"a" * 2_000_000
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train_apart(texts(), OPTIONS, split_lines=False)  # type: ignore[arg-type]
    assert children(os.getpid()) == before


# Trains for minutes, if nobody ends it.
ENDLESS = """
import random
from tokenizer.training_process import train_apart
letters = bytes(97 + number % 26 for number in range(256))
texts = [random.Random(number).randbytes(10_000).translate(letters) for number in range(1000)]
options = {"model_type": "unigram", "vocab_size": 5000, "num_threads": 1, "max_sentence_length": 20000}
train_apart(texts, options, split_lines=False, on_progress=lambda progress: print(progress.stage, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_the_one_that_started_it(number: signal.Signals) -> None:
    """Ended while SentencePiece works, which looks at nothing itself."""
    command = [sys.executable, "-c", ENDLESS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        wait_for(lambda: parent.stdout and parent.stdout.readline() == "collecting pieces to choose from\n")
        (child,) = children(parent.pid)
        os.kill(parent.pid, number)
        parent.wait()
        wait_for(lambda: not is_alive(child))


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_progress_goes_up_to_the_end(model_type: str, texts: list[str]) -> None:
    options = OPTIONS | {"model_type": model_type, "vocab_size": 600, "max_sentence_length": 10**6}
    heard: list[Progress] = []
    take = _Log.take

    def listen(log: _Log, data: bytes) -> None:
        take(log, data)
        heard.append(log.progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Log, "take", listen)  # hears every change, however fast the machine is
        train_apart([text.encode() for text in texts[:3]], options, split_lines=False, on_progress=lambda _: None)
    shares = [progress.share for progress in heard]
    assert shares == sorted(shares)
    assert 0.9 < shares[-1] <= 1
    assert heard[-1].stage == "finishing"


def test_progress_is_heard_in_the_callers_thread() -> None:
    heard: list[tuple[Progress, int]] = []
    on_progress = lambda progress: heard.append((progress, threading.get_ident()))  # noqa: E731
    train_apart(words(300), OPTIONS, split_lines=False, on_progress=on_progress)
    assert heard[-1][0].stage == "finishing"
    assert {thread for _, thread in heard} == {threading.get_ident()}


BPE_LOG = b"""I0000 00:00:1.5 1 trainer_interface.cc:466] Normalizing sentences...
I0000 00:00:1.5 1 trainer_interface.cc:601] Alphabet size=1000
I0000 00:00:1.5 1 trainer_interface.cc:692] Done! 461490
I0000 00:00:1.5 1 bpe_model_trainer.cc:421] Merged: freq=1 merges=100 piece=
//
I0000 00:00:1.5 1 bpe_model_trainer.cc:421] Merged: freq=1 merges=1000 piece=ab
"""


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_the_log_is_read_however_it_is_cut(step: int) -> None:
    log = _Log(11_000, "bpe")
    for start in range(0, len(BPE_LOG), step):
        log.take(BPE_LOG[start : start + step])
    assert log.progress.stage == "1,000 of 10,000 merges"
    assert log.progress.share == pytest.approx(0.55 + 0.45 / 2)  # half the way from 100 to 10,000 by logarithm
    assert log.last_lines[-1].endswith("merges=1000 piece=ab")


def test_rounds_of_unigram_are_foreseen() -> None:
    log = _Log(10_000, "unigram")
    line = b"I0000 00:00:1.5 1 unigram_model_trainer.cc:903] EM sub_iter=%d size=%d obj=1 num_tokens=1 bytes/tok=1\n"
    stages = []
    for half, size in ((0, 30_000), (1, 25_000), (0, 18_750), (1, 18_000), (0, 13_500), (1, 13_400)):
        log.take(line % (half, size))
        stages.append(log.progress.stage)
    assert stages[1] == "round 1 of 3"
    assert stages[-1] == "round 3 of 3"
    assert 0.85 < log.progress.share < 0.95
