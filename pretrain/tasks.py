"""Questions with known answers, out of local files, and how many of them a model gets right.

A task is a .jsonl file of one kind. Multiple choice: {"context": …, "choices": [… , …], "answer": 0}, the index of the
right one. Cloze: {"context": …, "answer": …}, what has to follow. A choice or an answer follows its context as it
stands, spaces included. The context begins a document: an EOS stands before it, as in training and in `generate`.

The likeliest choice is taken, by three measures, named as in lm-evaluation-harness: its log p ("acc"); that over its
UTF-8 bytes, since longer texts are less likely ("acc_bytes"); and by how much the context makes it likelier,
log p(choice | context) − log p(choice) ("acc_mutual_info"; Brown et al. 2020, section 2.4).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pretrain.config import RecipeError
from pretrain.likelihood import Likelihood, encode_pair, likelihoods
from pretrain.subject import Subject

FOLDER = Path(__file__).parent / "questions"
Kind = Literal["choice", "cloze"]


@dataclass(frozen=True)
class Item:
    """One question: the texts that may follow the context, and which of them does. Cloze: there is one."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Task:
    """A file of questions of one kind."""

    name: str
    kind: Kind
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Share:
    """How many of the questions, as a share, and its standard error; None where one question cannot tell."""

    value: float
    standard_error: float | None

    @classmethod
    def of(cls, hits: Sequence[bool]) -> Share:
        value = sum(hits) / len(hits)
        return cls(value, math.sqrt(value * (1 - value) / (len(hits) - 1)) if len(hits) > 1 else None)


@dataclass(frozen=True)
class Result:
    """One subject's answers to one task. `hits`: by measure, which questions it got right."""

    task: str
    subject: str
    hits: dict[str, tuple[bool, ...]]
    baselines: dict[str, float]
    bits_per_byte: float  # of the right answers

    @property
    def shares(self) -> dict[str, Share]:
        return {measure: Share.of(hits) for measure, hits in self.hits.items()}

    def above(self, measure: str, baseline: str) -> float:
        """How many standard errors of the baseline's own share a share is above it."""
        share, chance = self.shares[measure].value, self.baselines[baseline]
        return (share - chance) / math.sqrt(chance * (1 - chance) / len(self.hits[measure]))

    def to_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "subject": self.subject,
            "questions": len(next(iter(self.hits.values()))),
            "shares": {measure: asdict(share) for measure, share in self.shares.items()},
            "baselines": self.baselines,
            "bits_per_byte": self.bits_per_byte,
        }


def own_tasks() -> list[str]:
    """The names of the tasks that come with this program."""
    return sorted(path.stem for path in FOLDER.glob("*.jsonl"))


def read_task(place: str) -> Task:
    """A task by its file, or one of our own by its name. Raises RecipeError, with the line, for what is no question."""
    path = FOLDER / f"{place}.jsonl" if place in own_tasks() else Path(place)
    if not path.is_file():
        raise RecipeError(f"{place} is no file and no task of ours: {', '.join(own_tasks())}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is no UTF-8: byte {error.start}") from None
    items = [_item(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise RecipeError(f"{path} holds no question")
    kinds = {kind for kind, _ in items}
    if len(kinds) > 1:
        raise RecipeError(f"{path} mixes questions with choices and without: make two files of it")
    return Task(path.stem, items[0][0], tuple(item for _, item in items))


def _item(line: str, where: str) -> tuple[Kind, Item]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise RecipeError(f"{where} is no JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("context"), str):
        raise RecipeError(f'{where} has no text "context"')
    choices, answer = found.get("choices"), found.get("answer")
    if choices is None:
        if not isinstance(answer, str) or not answer:
            raise RecipeError(f'{where}: "answer" must be the text that follows, or "choices" a list of texts')
        return "cloze", Item(found["context"], (answer,), 0)
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        raise RecipeError(f'{where}: "choices" must be a list of two texts or more, none of them empty')
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise RecipeError(f'{where}: "answer" is {json.dumps(answer)}, must be 0 to {len(choices) - 1}')
    return "choice", Item(found["context"], tuple(choices), answer)


def answer(
    subject: Subject,
    task: Task,
    *,
    batch_size: int = 8,
    on_texts: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """What a subject makes of a task. Raises RecipeError where a question does not fit the model's window."""
    eos, pairs, alone = subject.codec.eos_id, [], []
    for number, item in enumerate(task.items, 1):
        for choice in item.choices:
            context, continuation = encode_pair(subject.codec, item.context, choice)
            if not continuation:
                raise RecipeError(f"{task.name}, question {number}: {choice!r} has no tokens of its own there")
            if len(context) + len(continuation) > subject.config.seq_len:
                raise RecipeError(
                    f"{task.name}, question {number} has {len(context) + len(continuation)} tokens, more than the "
                    f"window of {subject.config.seq_len} of {subject.name}: shorten it"
                )
            pairs.append(([eos, *context], continuation))
            alone.append(([eos], continuation))
    asked = pairs if task.kind == "cloze" else pairs + alone
    done = 0

    def heard(texts: int) -> None:
        nonlocal done
        done += texts
        on_texts(done, len(asked))

    found = likelihoods(subject, asked, batch_size=batch_size, on_pairs=heard)
    behind, without = found[: len(pairs)], found[len(pairs) :]
    if not all(math.isfinite(one.log_p) for one in found):
        raise RecipeError(f"{subject.name} gives likelihoods that are not finite: use an earlier checkpoint")
    counts = Counter(token for context, continuation in pairs for token in (*context, *continuation))
    total = counts.total() + subject.config.vocab_size
    unigram = [sum(math.log((counts[token] + 1) / total) for token in continuation) for _, continuation in pairs]
    return _judged(subject, task, behind, without, unigram)


def _judged(
    subject: Subject, task: Task, behind: Sequence[Likelihood], without: Sequence[Likelihood], unigram: Sequence[float]
) -> Result:
    choices = [choice for item in task.items for choice in item.choices]
    starts = [0]
    for item in task.items:
        starts.append(starts[-1] + len(item.choices))
    right = [start + item.answer for start, item in zip(starts, task.items, strict=False)]
    size = sum(len(choices[at].encode()) for at in right)
    bits = -sum(behind[at].log_p for at in right) / math.log(2) / size
    if task.kind == "cloze":
        answers = Counter(choices)
        return Result(
            task.name, subject.name, {"exact_match": tuple(one.greedy for one in behind)},
            {"commonest answer": answers.most_common(1)[0][1] / len(choices)}, bits,
        )  # fmt: skip

    def hits(scores: Sequence[float]) -> tuple[bool, ...]:
        """The first of the best is taken."""
        return tuple(
            max(range(start, stop), key=lambda at: scores[at]) == at_right
            for start, stop, at_right in zip(starts, starts[1:], right, strict=False)
        )

    measures = {
        "acc": [one.log_p for one in behind],
        "acc_bytes": [one.log_p / len(choice.encode()) for one, choice in zip(behind, choices, strict=True)],
        "acc_mutual_info": [one.log_p - alone.log_p for one, alone in zip(behind, without, strict=True)],
    }
    chance = sum(1 / len(item.choices) for item in task.items) / len(task.items)
    return Result(
        task.name, subject.name, {name: hits(scores) for name, scores in measures.items()},
        {"chance": chance, "unigram": Share.of(hits(unigram)).value}, bits,
    )  # fmt: skip


@dataclass(frozen=True)
class Paired:
    """How much larger one's share is than another's on the same questions, with the standard error of that."""

    difference: float
    standard_error: float | None

    @classmethod
    def of(cls, ours: Sequence[bool], theirs: Sequence[bool]) -> Paired:
        differences = [int(one) - int(other) for one, other in zip(ours, theirs, strict=True)]
        mean = sum(differences) / len(differences)
        if len(differences) < 2:
            return cls(mean, None)
        variance = sum((one - mean) ** 2 for one in differences) / (len(differences) - 1)
        return cls(mean, math.sqrt(variance / len(differences)))
