"""The scores of a model on texts, for each source and each language, with their uncertainty; and of two models, which
is better.

Documents are what is sampled; their tokens are not independent of each other. A score is a ratio of sums over
documents, R = Σ y_d / Σ x_d (nats over tokens, bits over bytes), and its standard error that of a ratio estimator over
D documents (Cochran 1977, Sampling Techniques, section 6.4, without the correction for a finite population):

    SE² = D / (D − 1) · Σ (y_d − R x_d)² / (Σ x_d)²

For two models y_d is the difference of their bits for document d: what both find hard cancels, so the standard error of
the difference is much smaller than of either score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.corpus import TxtDocuments
from pretrain.config import RecipeError, from_root
from pretrain.evaluate import isolates_documents
from pretrain.run_directory import CheckpointError
from pretrain.runtime import Ranks
from pretrain.scoring import DocumentsMode, Rule, Sums, score
from pretrain.subject import Subject
from pretrain.texts import Facts, Source, Texts, is_collection, of_collection, of_files

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ratio:
    """Σ y / Σ x over documents, and its standard error; None where one document cannot tell."""

    value: float
    standard_error: float | None

    @classmethod
    def of(cls, y_d: Floats, x_d: Floats) -> Ratio:
        value = float(y_d.sum() / x_d.sum())
        count = int((x_d > 0).sum())
        if count < 2:
            return cls(value, None)
        square = float(np.square(y_d - value * x_d).sum()) * count / (count - 1)
        return cls(value, math.sqrt(square) / float(x_d.sum()))


@dataclass(frozen=True)
class Score:
    """How well some documents were predicted. Losses in nats per token."""

    documents: int
    tokens: int  # scored, an EOS a document included
    text_bytes: float  # of their source text, in UTF-8
    characters: float  # Unicode code points
    bytes_exact: bool  # else estimates: documents were scored in part, or the tokenizer changes some text
    loss: float
    standard_error: float | None
    bits_per_byte: float
    bits_per_byte_standard_error: float | None
    bits_per_character: float
    uniform: float | None  # ln(vocab_size), and the entropy of these tokens' frequencies; None for a language
    unigram: float | None

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "perplexity": self.perplexity}


@dataclass(frozen=True)
class Evaluated:
    """The documents of one source, with all that is known of those that were scored (d: one a document)."""

    name: str
    nats_d: Floats
    tokens_d: Floats
    bytes_d: Floats
    characters_d: Floats
    languages: tuple[str, ...]
    exact: bool  # the sums of bytes and characters are the source text's
    each_exact: bool  # so is every document's
    numbers_d: NDArray[np.int64]  # which documents of the source these are
    whole: bool  # no document was scored in part
    sums: Sums


@dataclass(frozen=True)
class Evaluation:
    """One subject's scores: by source ("all" last), by language, and by place in the window."""

    subject: str
    step: int | None
    rule: Rule
    vocab_size: int
    sources: tuple[Evaluated, ...]

    @property
    def scores(self) -> dict[str, Score]:
        found = {one.name: self._score([one]) for one in self.sources}
        return {**found, "all": self._score(self.sources)}

    @property
    def languages(self) -> dict[str, Score]:
        names = sorted({name for one in self.sources for name in one.languages})
        found = {
            name: self._score([_in_language(one, name) for one in self.sources], baselines=False) for name in names
        }
        return dict(sorted(found.items(), key=lambda item: -item[1].tokens))

    @property
    def by_place(self) -> list[tuple[int, int, float]]:
        """(tokens of context, tokens scored there, mean loss), where any were."""
        nats, tokens = (
            np.sum([getattr(one.sums, name) for one in self.sources], axis=0) for name in ("place_nats", "place_tokens")
        )
        return [(int(at) + 1, int(tokens[at]), float(nats[at] / tokens[at])) for at in np.nonzero(tokens)[0]]

    def _score(self, parts: Sequence[Evaluated], *, baselines: bool = True) -> Score:
        nats_d, tokens_d, bytes_d, characters_d = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("nats_d", "tokens_d", "bytes_d", "characters_d")
        )
        loss, bits = Ratio.of(nats_d, tokens_d), Ratio.of(nats_d / math.log(2), bytes_d)
        counts = np.sum([part.sums.counts for part in parts], axis=0)
        shares = counts[counts > 0] / counts.sum()
        return Score(
            documents=len(nats_d),
            tokens=int(tokens_d.sum()),
            text_bytes=float(bytes_d.sum()),
            characters=float(characters_d.sum()),
            bytes_exact=all(part.exact for part in parts),
            loss=loss.value,
            standard_error=loss.standard_error,
            bits_per_byte=bits.value,
            bits_per_byte_standard_error=bits.standard_error,
            bits_per_character=float(nats_d.sum() / math.log(2) / characters_d.sum()),
            uniform=math.log(self.vocab_size) if baselines else None,
            unigram=float(-(shares * np.log(shares)).sum()) if baselines else None,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "step": self.step,
            "rule": asdict(self.rule),
            "scores": {name: score.to_dict() for name, score in self.scores.items()},
            "languages": {name: score.to_dict() for name, score in self.languages.items()},
            "by_context": [
                {"context_tokens": context, "tokens": tokens, "loss": loss} for context, tokens, loss in self.by_place
            ],
        }


def _in_language(one: Evaluated, language: str) -> Evaluated:
    here = np.array([name == language for name in one.languages], bool)
    return replace(
        one, nats_d=one.nats_d[here], tokens_d=one.tokens_d[here], bytes_d=one.bytes_d[here],
        characters_d=one.characters_d[here], languages=(language,) * int(here.sum()), exact=one.each_exact,
        numbers_d=one.numbers_d[here],
    )  # fmt: skip


def own_data(subject: Subject) -> Path:
    """The collection that a run learns from. Raises RecipeError for a model without a run."""
    if subject.recipe is None:
        raise RecipeError(f"{subject.name} is a model without a run, which has no data of its own: give --data")
    return from_root(subject.recipe.data.path)


def texts_for(
    subject: Subject,
    data: Sequence[str],
    *,
    text_field: str = "text",
    txt_documents: TxtDocuments = "file",
    max_tokens: int | None = None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Texts:
    """What `data` names: one collection's held-out text, or files; of nothing, the run's own collection.

    Raises RecipeError where there is nothing to take or too much, else as `of_collection` and `of_files`.
    """
    collections = [Path(place) for place in data if is_collection(place)]
    if not data:
        collections = [own_data(subject)]
    if collections and len(data) > 1:
        raise RecipeError(f"--data {collections[0]} is a collection, and stands alone: leave out the others")
    if collections:
        return of_collection(collections[0], subject.codec, subject.name)
    return of_files(
        data, subject.codec, text_field=text_field, txt_documents=txt_documents, max_tokens=max_tokens,
        on_tokens=on_tokens,
    )  # fmt: skip


def evaluate_subject(
    subject: Subject,
    texts: Texts,
    *,
    documents: DocumentsMode | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    max_tokens: int | None = None,
    ranks: Ranks = Ranks(0, 0, 1),
    on_tokens: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Score every source, the work shared by all ranks; each rank gets the whole result.

    documents: None is "alone" for texts by themselves, "packed" for a collection, and then with the masks that the
    model was trained with. stride: None is the model's window. max_tokens: at most so many of each of a collection's
    sources, evenly spread; files were read so far alone. `on_tokens` hears how many tokens are scored, and how many
    there are. Raises RecipeError for a stride or a bound that cannot be, CheckpointError where a loss is not finite.
    """
    config = subject.config
    if texts.alone:
        max_tokens = None
    isolated = subject.recipe is not None and isolates_documents(subject.recipe.data.packing)
    mode = documents or ("alone" if texts.alone else "packed")
    rule = Rule(config.seq_len, stride or config.seq_len, mode, isolated and mode == "packed")
    total = sum(min(source.stream.tokens, max_tokens or source.stream.tokens) for source in texts.sources)
    done = 0

    def heard(tokens: int) -> None:
        nonlocal done
        done = min(done + tokens, total)
        on_tokens(done, total)

    evaluated = []
    for source in texts.sources:
        sums = score(
            subject.model, source, rule, eos_id=subject.codec.eos_id, batch_size=batch_size, ranks=ranks,
            device=subject.device, max_tokens=max_tokens, on_tokens=heard,
        )  # fmt: skip
        if not np.isfinite(sums.document_nats).all():
            raise CheckpointError(f"{subject.name}: its loss on {source.name} is not finite: use an earlier checkpoint")
        evaluated.append(_with_facts(source, sums))
    return Evaluation(subject.name, subject.step, rule, config.vocab_size, tuple(evaluated))


def _with_facts(source: Source, sums: Sums) -> Evaluated:
    """The documents that were scored. Of one scored in part, bytes and characters in proportion to its tokens."""
    lengths = np.diff(source.ends, prepend=0)
    chosen = np.nonzero(sums.document_tokens)[0]
    facts: Facts = source.facts_of(chosen.tolist())
    shares = sums.document_tokens[chosen] / lengths[chosen]
    whole = bool((shares == 1).all())
    bytes_d = facts.text_bytes * shares
    summed = whole and len(chosen) == len(source.ends)  # the collection's manifest knows the sum, whatever was changed
    if summed and not facts.exact:
        bytes_d *= source.text_bytes / bytes_d.sum()
    nats_d, tokens_d = sums.document_nats[chosen], sums.document_tokens[chosen]
    return Evaluated(
        source.name, nats_d, tokens_d, bytes_d, facts.characters * shares, facts.languages,
        exact=summed or (whole and facts.exact), each_exact=whole and facts.exact, numbers_d=chosen, whole=whole,
        sums=sums,
    )  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A's bits per byte less B's on the same documents: negative where A is better."""

    documents: int
    bits_per_byte: float
    standard_error: float | None

    @property
    def errors(self) -> float | None:
        """How many standard errors it is from nothing."""
        if not self.standard_error:
            return None
        return self.bits_per_byte / self.standard_error

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "standard_errors": self.errors}


def differences(one: Evaluation, other: Evaluation) -> dict[str, Difference]:
    """By source, and "all": one's bits less the other's, document by document; tokenizers may differ, texts not."""
    pairs = list(zip(one.sources, other.sources, strict=True))
    for ours, theirs in pairs:
        same = np.array_equal(ours.numbers_d, theirs.numbers_d)
        if ours.name != theirs.name or not same or (one.rule != other.rule and not (ours.whole and theirs.whole)):
            raise RecipeError(
                f"{one.subject} and {other.subject} were not scored on the same text of {ours.name}: leave out "
                "--max-tokens"
            )
    found = {ours.name: _difference([(ours, theirs)]) for ours, theirs in pairs}
    return {**found, "all": _difference(pairs)}


def _difference(pairs: Iterable[tuple[Evaluated, Evaluated]]) -> Difference:
    pairs = list(pairs)
    bits_d = np.concatenate([(ours.nats_d - theirs.nats_d) / math.log(2) for ours, theirs in pairs])
    bytes_d = np.concatenate([ours.bytes_d for ours, _ in pairs])
    ratio = Ratio.of(bits_d, bytes_d)
    return Difference(len(bits_d), ratio.value, ratio.standard_error)
