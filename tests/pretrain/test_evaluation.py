"""Scores of checkpoints, exports and files: against formulas, against transformers, over ranks, strides and batches."""

from __future__ import annotations

import json
import math
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from data_pipeline.corpus import Document, read_documents
from data_pipeline.shards import open_collection
from model.config import from_table
from model.loss import IGNORED, LossSum
from model.transformer import Transformer
from pretrain.checkpoint import write_imported
from pretrain.config import RecipeError
from pretrain.context_plot import binned
from pretrain.evaluate import evaluate
from pretrain.evaluation import Ratio, differences, evaluate_subject, texts_for
from pretrain.export import export_hf
from pretrain.run_directory import CheckpointError
from pretrain.runtime import Ranks
from pretrain.scoring import Rule, _places, token_scores, windows_of
from pretrain.subject import Subject, open_subject
from pretrain.texts import Source, TokensInMemory
from pretrain.verbs.evaluate import evaluate as evaluate_verb
from tests.command_line import run_command
from tests.ranks import run_ranks
from tokenizer.codec import Codec
from tokenizer.train import train as train_tokenizer

logging.disable_progress_bar()

CPU = torch.device("cpu")
SIZES = {"preset": "mini", "d_model": 64, "n_layers": 2, "n_heads": 1, "n_kv_heads": 1, "d_ff": 96, "seq_len": 32}


def write_model(folder: Path, tokenizer: Path, *, seed: int = 5, scale: float = 4.0) -> Path:
    """A checkpoint of weights so large that each token's loss is its own; scale 0: all tokens as likely."""
    codec = Codec.load(tokenizer)
    config = from_table({**SIZES, "vocab_size": codec.vocab_size})
    model = Transformer(config, generator=torch.Generator().manual_seed(seed))
    folder.mkdir()
    write_imported(folder, config, {name: scale * weight.detach() for name, weight in model.named_parameters()}, codec)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("evaluation") / "model", tokenizer)


@pytest.fixture(scope="module")
def subject(checkpoint: Path) -> Subject:
    return open_subject(checkpoint)


@pytest.fixture
def files(tmp_path: Path, corpus: Path) -> list[str]:
    """Three documents of English and two of Chinese, of 1 to 700 characters."""
    english = [line["text"] for line in map(json.loads, (corpus / "english.jsonl").open(encoding="utf-8"))][:2]
    chinese = [line["text"] for line in map(json.loads, (corpus / "chinese.jsonl").open(encoding="utf-8"))][:2]
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text("".join(json.dumps({"text": text}) + "\n" for text in (english[0][:700], "x", english[1][:300])))
    two.write_text("".join(json.dumps({"text": text}) + "\n" for text in (chinese[0][:150], chinese[1][:200])))
    return [f"en={one}", f"zh={two}"]


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("documents", ["packed", "alone"])
@pytest.mark.parametrize("seed", range(12))
def test_every_token_is_scored_once_with_the_context_that_is_promised(documents: Any, seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 40, size=int(draw.integers(1, 9)))
    ends = np.cumsum(lengths)
    source = Source("x", TokensInMemory(np.arange(ends[-1])), ends, lambda numbers: pytest.fail("not asked"), 0)
    seq_len = int(draw.integers(1, 20))
    rule = Rule(seq_len, int(draw.integers(1, seq_len + 1)), documents)
    windows = windows_of(source, rule)
    scored = [token for low, high in zip(windows.scored, windows.stops, strict=True) for token in range(low, high)]
    assert scored == list(range(ends[-1]))
    for begin, low, stop, head in zip(windows.begins, windows.scored, windows.stops, windows.heads, strict=True):
        text = (
            0
            if documents == "packed"
            else int(ends[np.searchsorted(ends, low, side="right") - 1])
            if low >= ends[0]
            else 0
        )
        assert head == text
        for token in range(low, stop):
            context = token - begin  # inputs before it, the EOS at the head among them
            assert context >= min(token - text + 1, rule.seq_len - rule.stride + 1)
            assert context <= seq_len
        assert stop - low <= (seq_len if low == head else rule.stride)


def test_a_bound_takes_windows_evenly_spread() -> None:
    source = Source("x", TokensInMemory(np.arange(100)), np.array([100]), lambda numbers: pytest.fail("not asked"), 0)
    windows = windows_of(source, Rule(10, 10, "packed"), max_tokens=39)
    assert windows.scored.tolist() == [0, 30, 60]
    with pytest.raises(RecipeError, match="--max-tokens 9 is less than one window of 10"):
        windows_of(source, Rule(10, 10, "packed"), max_tokens=9)
    with pytest.raises(RecipeError, match="--stride 11: must be 1 to 10"):
        Rule(10, 11, "packed")


# ---------------------------------------------------------------- losses


def test_losses_are_those_of_the_whole_logits_whatever_the_batch(subject: Subject) -> None:
    draw = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(subject.config.vocab_size, (3, 20), generator=draw) for _ in range(2))
    targets[0, 12:] = IGNORED
    targets[2] = IGNORED
    with torch.no_grad():
        log_p = subject.model(ids).double().log_softmax(-1)
    kept = targets != IGNORED
    expected = torch.where(kept, -log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0], 0.0)
    for chunk in (1, 7, 1024):
        subject.model.loss_chunk_tokens = chunk
        found, likeliest = token_scores(subject.model, ids.numpy(), targets.numpy(), None, CPU)
        assert np.allclose(found, expected, atol=1e-5)
        assert np.array_equal(likeliest, (log_p.argmax(-1) == targets) & kept)


@pytest.mark.parametrize("stride", [None, 8, 1])
@pytest.mark.parametrize("documents", ["packed", "alone"])
def test_the_batch_changes_nothing(subject: Subject, files: list[str], documents: Any, stride: int | None) -> None:
    found = [
        evaluate_subject(subject, texts_for(subject, files), documents=documents, stride=stride, batch_size=size)
        for size in (1, 3, 64)
    ]
    for other in found[1:]:
        assert [one.sums.document_tokens.tolist() for one in other.sources] == [
            one.sums.document_tokens.tolist() for one in found[0].sources
        ]
        for ours, theirs in zip(found[0].sources, other.sources, strict=True):
            assert np.allclose(ours.nats_d, theirs.nats_d, rtol=1e-5)


def test_more_context_is_what_a_smaller_stride_gives(subject: Subject, files: list[str]) -> None:
    """With stride 1 and a document alone: token i is predicted from all before it, as many as the window holds."""
    texts = texts_for(subject, files[:1])
    whole = evaluate_subject(subject, texts, stride=1)
    ids = texts.sources[0].stream.read(0, int(texts.sources[0].ends[0]))
    with_eos = np.concatenate([[subject.codec.eos_id], ids])
    nats = 0.0
    for place in range(1, len(with_eos)):
        context = torch.from_numpy(with_eos[max(0, place - subject.config.seq_len) : place])[None]
        with torch.no_grad():
            nats -= float(subject.model(context)[0, -1].log_softmax(-1)[with_eos[place]])
    assert whole.sources[0].nats_d[0] == pytest.approx(nats, rel=1e-5)


def test_a_collection_scores_as_training_scores_it(subject: Subject, collection: Path) -> None:
    def forward(inputs: Any, targets: Any, documents: Any) -> LossSum:
        with torch.no_grad():
            found: LossSum = subject.model(torch.from_numpy(inputs), torch.from_numpy(targets))
        return found

    opened = open_collection(collection)
    for max_tokens in (None, 1000):
        in_training = evaluate(
            forward, {name: source.splits["validation"] for name, source in opened.sources.items()},
            seq_len=subject.config.seq_len, batch_size=4, eos_id=opened.eos_id, vocab_size=subject.config.vocab_size,
            max_tokens=max_tokens, isolated=False, ranks=Ranks(0, 0, 1), device=CPU,
        )  # fmt: skip
        scores = evaluate_subject(subject, texts_for(subject, [str(collection)]), max_tokens=max_tokens).scores
        assert list(scores) == list(in_training)
        for name, score in scores.items():
            expected = in_training[name]
            assert (score.tokens, score.bytes_exact) == (expected.tokens, expected.bytes_exact)
            assert score.loss == pytest.approx(expected.loss, rel=1e-6)
            assert score.unigram == pytest.approx(expected.unigram)
            if max_tokens is None:
                assert score.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-6)


def evaluated_on_ranks(ranks: Ranks, checkpoint: Path, other: Path, inputs: list[str]) -> str:
    """What this rank prints."""
    with redirect_stdout(StringIO()) as printed:
        evaluate_verb(checkpoint, inputs, other, stride=8, batch_size=2, as_json=True)
    return printed.getvalue()


def test_any_number_of_ranks_gives_the_same_result(
    checkpoint: Path, files: list[str], tokenizer: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", tokenizer, scale=3.0)
    (alone,) = run_ranks(1, evaluated_on_ranks, checkpoint, other, files)
    first, second = run_ranks(2, evaluated_on_ranks, checkpoint, other, files)
    assert second == ""
    expected, found = json.loads(alone), json.loads(first)
    assert found["by_context"] == [pytest.approx(row, rel=1e-6) for row in expected["by_context"]]
    of_both = [(kind, name) for kind in ("scores", "languages", "difference") for name in expected[kind]]
    assert len(of_both) > 8
    for kind, name in of_both:
        for key, value in expected[kind][name].items():
            assert found[kind][name][key] == (value if value is None else pytest.approx(value, rel=1e-5)), (kind, name)


# ---------------------------------------------------------------- what others find


def test_an_export_scored_by_transformers_gives_the_same_number(
    checkpoint: Path, files: list[str], tmp_path: Path
) -> None:
    """Their model, their loss, windows cut here by hand."""
    export_hf(checkpoint, tmp_path / "hf", dtype=None, max_shard_bytes=10**9)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    codec = Codec.load(checkpoint / "tokenizer")
    nats, tokens = 0.0, 0
    paths = [Path(word.partition("=")[2]) for word in files]
    for document in read_documents(paths):
        assert isinstance(document, Document)
        ids = [codec.eos_id, *codec.encode(document.text), codec.eos_id]
        for start in range(0, len(ids) - 1, SIZES["seq_len"]):
            window = torch.tensor(ids[start : start + SIZES["seq_len"] + 1])[None]
            with torch.no_grad():
                logits = theirs(window[:, :-1]).logits
            nats += float(torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="sum"))
            tokens += window.shape[1] - 1
    for path in (checkpoint, tmp_path / "hf"):
        subject = open_subject(path)
        score = evaluate_subject(subject, texts_for(subject, files)).scores["all"]
        assert score.tokens == tokens
        assert score.loss == pytest.approx(nats / tokens, abs=1e-4)


def test_bits_per_byte_of_a_uniform_model_are_the_tokens_it_needs(
    tokenizer: Path, corpus: Path, files: list[str], tmp_path: Path
) -> None:
    """tokens · log2 V / bytes, by hand, for two tokenizers on the same text: the second needs other tokens."""
    texts = [line["text"] for line in map(json.loads, (corpus / "english.jsonl").open(encoding="utf-8"))]
    train_tokenizer(texts, tmp_path / "other", vocab_size=400)
    paths = [Path(word.partition("=")[2]) for word in files]
    documents = [document.text for document in read_documents(paths) if isinstance(document, Document)]
    found = []
    for number, folder in enumerate((tokenizer, tmp_path / "other")):
        subject = open_subject(write_model(tmp_path / f"model-{number}", folder, scale=0.0))
        score = evaluate_subject(subject, texts_for(subject, files)).scores["all"]
        vocab_size, codec = subject.config.vocab_size, subject.codec
        tokens = sum(len(codec.encode(text)) + 1 for text in documents)
        size = sum(len(text.encode()) for text in documents)
        assert (score.tokens, score.text_bytes, score.characters) == (tokens, size, sum(map(len, documents)))
        assert score.bits_per_byte == pytest.approx(tokens * math.log2(vocab_size) / size, rel=1e-6)
        assert score.bits_per_character == pytest.approx(tokens * math.log2(vocab_size) / score.characters, rel=1e-6)
        found.append(score)
    assert found[0].tokens != found[1].tokens
    assert found[0].bits_per_byte != pytest.approx(found[1].bits_per_byte, rel=0.01)


def test_languages_are_told_apart_and_add_up(subject: Subject, files: list[str]) -> None:
    evaluation = evaluate_subject(subject, texts_for(subject, files))
    languages, scores = evaluation.languages, evaluation.scores
    assert {"English", "Chinese"} <= set(languages)
    assert sum(score.tokens for score in languages.values()) == scores["all"].tokens
    assert sum(score.text_bytes for score in languages.values()) == scores["all"].text_bytes
    assert languages["Chinese"].loss == pytest.approx(scores["zh"].loss)
    assert sum(tokens for _, tokens, _ in evaluation.by_place) == scores["all"].tokens
    assert max(context for context, _ in binned(evaluation)) <= subject.config.seq_len


# ---------------------------------------------------------------- how sure


def test_the_standard_error_is_that_of_repeated_sampling() -> None:
    """Against the spread of the same ratio over 4,000 samples of documents drawn anew."""
    draw = np.random.default_rng(3)

    def sample() -> tuple[np.ndarray, np.ndarray]:
        tokens = draw.integers(5, 200, size=60).astype(float)
        return tokens * draw.normal(3.0, 0.4, size=60) + draw.normal(0, 4, size=60), tokens

    spread = np.std([y.sum() / x.sum() for y, x in (sample() for _ in range(4000))])
    errors = [Ratio.of(*sample()).standard_error for _ in range(200)]
    assert np.mean(errors) == pytest.approx(spread, rel=0.08)
    assert Ratio.of(np.array([6.0]), np.array([2.0])) == Ratio(3.0, None)
    # By hand: R = 10/4; residuals 1 − 2.5, 9 − 7.5; SE² = 2 · (1.5² + 1.5²) / 4²
    assert Ratio.of(np.array([1.0, 9.0]), np.array([1.0, 3.0])) == Ratio(2.5, pytest.approx(0.75))


def test_a_difference_is_known_better_than_either_score(
    checkpoint: Path, subject: Subject, files: list[str], tokenizer: Path, tmp_path: Path
) -> None:
    other = open_subject(write_model(tmp_path / "other", tokenizer, scale=3.9))
    one, two = (evaluate_subject(which, texts_for(which, files)) for which in (subject, other))
    found = differences(one, two)
    assert found["all"].bits_per_byte == pytest.approx(
        one.scores["all"].bits_per_byte - two.scores["all"].bits_per_byte
    )
    error, alone = found["all"].standard_error, one.scores["all"].bits_per_byte_standard_error
    assert error is not None
    assert alone is not None
    assert error < alone
    same = differences(one, one)["all"]
    assert (same.bits_per_byte, same.errors) == (0, None)


# ---------------------------------------------------------------- the command


def test_the_command_says_which_is_better(checkpoint: Path, files: list[str], tokenizer: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "uniform", tokenizer, scale=0.0)
    data = [word for file in files for word in ("--data", file)]
    command = ("pretrain", "evaluate", checkpoint, "--against", other, *data)
    done = run_command(*command, "--plot", tmp_path / "x.png", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rule"] == {"seq_len": 32, "stride": 32, "documents": "alone", "isolated": False}
    assert report["difference"]["all"]["bits_per_byte"] > 0
    assert report["difference"]["all"]["documents"] == 5
    assert (tmp_path / "x.png").stat().st_size > 5000
    said = run_command(*command)
    assert f"{other} is better" in said.stdout
    assert "Chinese" in said.stdout


def test_bad_input_is_one_line(
    checkpoint: Path, files: list[str], corpus: Path, tmp_path: Path, collection: Path, tokenizer: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    texts = [line["text"] for line in map(json.loads, (corpus / "english.jsonl").open(encoding="utf-8"))]
    train_tokenizer(texts, tmp_path / "other-tokenizer", vocab_size=400)
    other = write_model(tmp_path / "other", tmp_path / "other-tokenizer")
    shape = tmp_path / "shape"
    subject = open_subject(checkpoint)
    shape.mkdir()
    weights = {name: weight.detach() for name, weight in subject.model.named_parameters()}
    write_imported(shape, replace(subject.config, d_ff=64), weights, subject.codec)
    for arguments, words in (
        ((checkpoint,), ["give --data"]),
        ((checkpoint, "--data", empty), ["empty.jsonl", "no document to score"]),
        ((checkpoint, "--data", broken), ["broken.jsonl", "no document to score: 1 were not readable"]),
        ((checkpoint, "--data", tmp_path / "nowhere.jsonl"), ["nowhere.jsonl"]),
        ((checkpoint, "--data", collection, "--data", files[0]), ["is a collection, and stands alone"]),
        ((other, "--data", collection), ["was written with the tokenizer", "prepare the text again"]),
        ((shape, "--data", files[0]), ["shape", "mlp.gate_proj.weight is (96, 64)", "not of one model"]),
        ((tmp_path / "nothing", "--data", files[0]), ["nothing does not exist"]),
        ((checkpoint, "--data", files[0], "--stride", "33"), ["--stride 33: must be 1 to 32"]),
        ((checkpoint, "--data", files[0], "--plot", tmp_path / "x.doc"), ["must end in .png"]),
        ((checkpoint, "--data", collection, "--max-tokens", "31"), ["--max-tokens 31 is less than one window of 32"]),
    ):
        done = run_command("pretrain", "evaluate", *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith("error: ")
        for word in words:
            assert word in done.stderr, done.stderr


def test_a_model_that_is_not_finite_is_refused(tokenizer: Path, files: list[str], tmp_path: Path) -> None:
    subject = open_subject(write_model(tmp_path / "nan", tokenizer, scale=math.nan))
    with pytest.raises(CheckpointError, match="is not finite"):
        evaluate_subject(subject, texts_for(subject, files))


def test_parts_of_documents_are_compared_only_where_they_are_the_same(subject: Subject, files: list[str]) -> None:
    """By another window a bound takes other parts of long documents."""
    texts = texts_for(subject, files)
    texts.alone = False
    one, other = (evaluate_subject(subject, texts, stride=stride, max_tokens=200) for stride in (None, 8))
    with pytest.raises(RecipeError, match="not scored on the same text of en: leave out --max-tokens"):
        differences(one, other)
    whole, again = (evaluate_subject(subject, texts, stride=stride) for stride in (None, 8))
    assert differences(whole, again)["all"].documents == 5


def test_what_is_isolated_has_the_context_of_its_document() -> None:
    inputs = np.array([[2, 5, 2, 7, 8], [5, 6, 7, 2, 9]])
    documents = np.cumsum(inputs == 2, axis=1)
    assert _places(inputs, None).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert _places(inputs, documents).tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 0, 1]]


def test_a_run_is_a_run_whatever_else_lies_there(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_subject(tmp_path)
