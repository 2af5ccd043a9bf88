"""Questions: likelihoods and measures by hand, files with faults, lm-evaluation-harness against its own model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.continuations import questions
from pretrain.config import RecipeError
from pretrain.export import export_hf
from pretrain.likelihood import encode_pair, likelihoods
from pretrain.subject import Subject, open_subject
from pretrain.tasks import FOLDER, Paired, Share, Task, answer, own_tasks, read_task
from tests.command_line import run_command
from tests.pretrain.test_evaluation import write_model
from tests.ranks import root

SENTENCE = "it is a truth universally acknowledged that a single man in possession of a fortune must be in want"
WORDS = SENTENCE.split()


@pytest.fixture(scope="module")
def checkpoint(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tasks") / "model", tokenizer)


@pytest.fixture(scope="module")
def subject(checkpoint: Path) -> Subject:
    return open_subject(checkpoint)


def log_p(subject: Subject, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Token by token, each from all before it that the window holds."""
    total, greedy, ids = 0.0, True, list(context)
    for token in continuation:
        with torch.no_grad():
            scores = subject.model(torch.tensor([ids[-subject.config.seq_len :]]))[0, -1].double().log_softmax(-1)
        total += float(scores[token])
        greedy &= int(scores.argmax()) == token
        ids.append(token)
    return total, greedy


# ---------------------------------------------------------------- likelihoods


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_likelihoods_are_those_of_token_after_token(subject: Subject, batch_size: int) -> None:
    draw = torch.Generator().manual_seed(4)
    lengths = ((1, 1), (9, 4), (3, 12), (20, 12), (1, 31), (16, 2))
    pairs = [tuple(torch.randint(3, 900, (size,), generator=draw).tolist() for size in both) for both in lengths]
    with torch.no_grad():  # one that is the likeliest
        best = int(subject.model(torch.tensor([pairs[0][0]]))[0, -1].argmax())
    pairs.append((pairs[0][0], [best]))
    found = likelihoods(subject, pairs, batch_size=batch_size)
    for (context, continuation), one in zip(pairs, found, strict=True):
        expected, greedy = log_p(subject, context, continuation)
        assert one.log_p == pytest.approx(expected, rel=1e-5)
        assert (one.greedy, one.tokens) == (greedy, len(continuation))
    assert found[-1].greedy


def test_a_context_too_long_loses_its_beginning(subject: Subject) -> None:
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 900, (50,), generator=draw).tolist()
    window = subject.config.seq_len
    (cut,) = likelihoods(subject, [(ids[:45], ids[45:])])
    (by_hand,) = likelihoods(subject, [(ids[-(window + 1) : 45], ids[45:])])
    assert cut == by_hand
    (whole,) = likelihoods(subject, [(ids[:2], ids[2:])])
    assert whole.tokens == window


def test_spaces_at_the_end_of_a_context_belong_to_what_follows(subject: Subject) -> None:
    codec = subject.codec
    for context, continuation in (("It is ", "a truth"), ("It is", " a truth"), ("x", "y"), ("", "a")):
        before, behind = encode_pair(codec, context, continuation)
        assert before == codec.encode(context.rstrip())
        assert before + behind == codec.encode(context + continuation)


# ---------------------------------------------------------------- answers


def test_measures_by_hand(subject: Subject, tmp_path: Path) -> None:
    items = [
        {"context": "It is a truth", "choices": [" universally", " acknowledged that", " x"], "answer": 1},
        {"context": "a single man", "choices": [" in", " possession of a good fortune"], "answer": 0},
        {"context": "want of a wife", "choices": ["must", "be"], "answer": 1},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, items)) + "\n\n", encoding="utf-8")
    task = read_task(str(path))
    result = answer(subject, task, batch_size=2)
    eos, codec = subject.codec.eos_id, subject.codec
    hits: dict[str, list[bool]] = {"acc": [], "acc_bytes": [], "acc_mutual_info": []}
    nats = size = 0.0
    for item in items:
        scores = []
        for choice in item["choices"]:
            before, behind = encode_pair(codec, str(item["context"]), choice)
            given, alone = log_p(subject, [eos, *before], behind)[0], log_p(subject, [eos], behind)[0]
            scores.append((given, given / len(choice.encode()), given - alone))
        for number, kind in enumerate(hits):
            best = max(range(len(scores)), key=lambda at: scores[at][number])
            hits[kind].append(best == item["answer"])
        nats -= scores[int(str(item["answer"]))][0]
        size += len(item["choices"][int(str(item["answer"]))].encode())
    assert {kind: list(found) for kind, found in result.hits.items()} == hits
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert result.baselines["chance"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3)
    assert set(result.baselines) == {"chance", "unigram"}


def test_a_cloze_is_right_where_greedy_text_is(subject: Subject, tmp_path: Path) -> None:
    """What the model writes itself it answers; another text not."""
    from model.generate import Sampling
    from pretrain.generate import continue_prompts

    def greedy(context: str, text: str) -> bool:  # whose ids are the same when it is read as when it was written
        before, behind = encode_pair(subject.codec, context, text)
        return log_p(subject, [subject.codec.eos_id, *before], behind)[1]

    written = continue_prompts(subject, WORDS, Sampling(0.0), max_new_tokens=2, seed=1)
    context, text = next((context, text) for context, text in written if text and greedy(context, text))
    path = tmp_path / "gaps.jsonl"
    lines = [{"context": context, "answer": text}, {"context": context, "answer": " never so"}] * 2
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    result = answer(subject, read_task(str(path)))
    assert result.hits == {"exact_match": (True, False, True, False)}
    assert result.baselines == {"commonest answer": 0.5}


def test_shares_and_their_errors() -> None:
    assert Share.of([True, False, False, False]) == Share(0.25, pytest.approx(math.sqrt(0.25 * 0.75 / 3)))
    paired = Paired.of([True, True, False, True], [True, False, False, False])
    assert paired == Paired(0.5, pytest.approx(math.sqrt((4 * 0.25) / 3 / 4)))


def test_our_own_questions_are_made_of_held_out_text() -> None:
    """Made anew they are the same; chance is a quarter, and a guess by position gains nothing."""
    assert own_tasks() == ["continuations-chinese", "continuations-english"]
    for language in ("chinese", "english"):
        made = [json.dumps(one, ensure_ascii=False) for one in questions(language)]
        path = FOLDER / f"continuations-{language}.jsonl"
        assert path.read_text(encoding="utf-8").split("\n") == [*made, ""]
        task = read_task(f"continuations-{language}")
        places = [sum(item.answer == place for item in task.items) / len(task.items) for place in range(4)]
        assert all(0.15 < share < 0.35 for share in places)
        assert all(len(set(item.choices)) == 4 for item in task.items)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_model_trained_here_is_above_chance(seed: int, tmp_path: Path) -> None:
    """By three standard errors or more, in both languages; needs what `make demo` prepares."""
    from tests.command_line import run_command as command

    run = tmp_path / "run"
    arguments = ("run", root() / "pretrain/recipes/demo.toml", "--run", run, "--set", f"seed={seed}")
    done = command("pretrain", *arguments)
    assert done.returncode == 0, done.stderr
    subject = open_subject(run)
    for name in own_tasks():
        assert answer(subject, read_task(name)).above("acc_mutual_info", "chance") >= 3


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "holds no question"),
        (b"{", "line 1 is no JSON"),
        (b'{"choices": ["a", "b"], "answer": 0}', 'line 1 has no text "context"'),
        (b'{"context": "a", "choices": ["a"], "answer": 0}', "a list of two texts or more"),
        (b'{"context": "a", "choices": ["a", ""], "answer": 0}', "none of them empty"),
        (b'{"context": "a", "choices": ["a", "b"], "answer": 2}', '"answer" is 2, must be 0 to 1'),
        (b'{"context": "a", "choices": ["a", "b"], "answer": true}', '"answer" is true, must be 0 to 1'),
        (b'{"context": "a", "answer": ""}', '"answer" must be the text'),
        (b'{"context": "a", "answer": "b"}\n{"context": "a", "choices": ["a", "b"], "answer": 1}', "mixes questions"),
        (b'{"context": "\xff", "answer": "b"}', "is no UTF-8"),
    ],
)
def test_files_with_faults(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=words):
        read_task(str(path))


def test_a_question_longer_than_the_window(subject: Subject) -> None:
    from pretrain.tasks import Item

    task = Task("long", "choice", (Item("a " * 40, ("b", "c"), 0),))
    with pytest.raises(RecipeError, match=r"long, question 1 has \d+ tokens, more than the window of 32"):
        answer(subject, task)


def test_the_command(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"context": "It is", "choices": [" a", " b"], "answer": 0}\n' * 3)
    done = run_command("pretrain", "tasks", checkpoint, "--task", path, "--against", checkpoint, "--json")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    assert [one["questions"] for one in report["results"]] == [3, 3]
    assert report["differences"]["acc"] == {"difference": 0.0, "standard_error": 0.0}
    for options, words in (
        (("--task", tmp_path / "nowhere.jsonl"), "no task of ours: continuations-chinese, continuations-english"),
        (("--limit", "3"), "are for --harness"),
        (("--harness", "x", "--task", path), "leave out --task"),
    ):
        done = run_command("pretrain", "tasks", checkpoint, *options)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert words in done.stderr


# ---------------------------------------------------------------- lm-evaluation-harness


CHOICE = """task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: choices
target_delimiter: ""
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """task: tiny_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{context}}}}, {{{{sentence}}}}"
metric_list: [{{metric: bits_per_byte}}, {{metric: byte_perplexity}}]
"""
UNTIL = """task: tiny_until
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["e"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    lines = [
        {"context": " ".join(WORDS[at : at + 5]), "choices": [f" {WORDS[at + 5]}", " x y"], "answer": at % 2}
        for at in range(10)
    ]
    lines += [  # ids over the border; a space before it
        {"context": "of a sing", "choices": ["le man", "ular"], "answer": 0},
        {"context": "in possession ", "choices": ["of", "x y"], "answer": 1},
    ]
    lines = [{**line, "sentence": f"{SENTENCE}, {SENTENCE}"} for line in lines]  # more than a window
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    for name, text in (("choice", CHOICE), ("rolling", ROLLING), ("until", UNTIL)):
        (folder / f"{name}.yaml").write_text(text.format(data=folder / "data.jsonl"))
    return folder


def numbers(answers: list[Any]) -> list[float]:
    """Log-likelihoods and whether they are greedy, one behind the other."""
    return [float(x) for one in answers for x in (one if isinstance(one, list | tuple) else [one])]


def test_the_harness_finds_the_same_through_us_and_through_transformers(
    checkpoint: Path, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own `hf` model on the export, ours on checkpoint and export: every log-likelihood, every metric."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pretrain.harness import Harness

    export_hf(checkpoint, tmp_path / "hf", dtype=None, max_shard_bytes=10**9)
    subject = open_subject(checkpoint)
    # With its cache of logits a text among similar ones has another sum than alone; without it, the same.
    theirs = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(tmp_path / "hf"), prefix_token_id=subject.codec.eos_id,
        max_length=subject.config.seq_len, batch_size=4, logits_cache=False,
    )  # fmt: skip
    found = [
        simple_evaluate(
            model=model, tasks=["tiny_choice", "tiny_rolling", "tiny_until"], bootstrap_iters=0,
            task_manager=TaskManager(include_path=str(asked), include_defaults=False),
        )
        for model in (theirs, Harness(subject), Harness(open_subject(tmp_path / "hf")))
    ]  # fmt: skip
    samples = [
        {(task, one["doc_id"]): one["filtered_resps"] for task, rows in one_found["samples"].items() for one in rows}
        for one_found in found
    ]
    assert len(samples[0]) == 36
    for ours in samples[1:]:
        for key, expected in samples[0].items():
            if key[0] == "tiny_until":  # of bytes that are no character, theirs makes U+FFFD each, their whole run
                whole, _, broken = expected[0].partition("\ufffd")
                assert ours[key] == expected or (broken and ours[key][0].startswith(whole))
            else:
                assert numbers(ours[key]) == pytest.approx(numbers(expected), abs=1e-4)
        assert sum(ours[key] == expected for key, expected in samples[0].items() if key[0] == "tiny_until") >= 7
    for task, metrics in found[0]["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float) and not math.isnan(value):
                for other in found[1:]:
                    assert other["results"][task][metric] == pytest.approx(value, abs=1e-4)


def test_the_command_runs_the_harness(
    checkpoint: Path, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    command = ("pretrain", "tasks", checkpoint, "--include", asked)
    done = run_command(*command, "--harness", "tiny_choice", "--limit", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert 0 <= json.loads(done.stdout)["results"]["tiny_choice"]["acc,none"] <= 1
    done = run_command(*command, "--harness", "no_such_task")
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no task no_such_task" in done.stderr.splitlines()[-1]


def test_one_question_and_names_with_brackets(tokenizer: Path, tmp_path: Path) -> None:
    """What cannot be known is null, and a name is text."""
    (tmp_path / "x[/b]").mkdir(parents=True)
    model = write_model(tmp_path / "x[/b]" / "[bold]m", tokenizer)
    path = tmp_path / "one.jsonl"
    path.write_text('{"context": "It is", "choices": [" a", " b"], "answer": 0}\n')
    done = run_command("pretrain", "tasks", model, "--task", path, "--json")
    (report,) = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(word))
    assert report["results"][0]["shares"]["acc"]["standard_error"] is None
    said = run_command("pretrain", "tasks", model, "--task", path)
    assert said.returncode == 0, said.stderr
    assert "1 questions" in said.stdout
