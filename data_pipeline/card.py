"""A data card: what a collection holds and what it was made of, as Markdown and a picture of the document lengths.

Lengths come from the document ends alone. Languages and scripts come from a seeded sample of documents, decoded: shares
of documents by the language that each is mostly in, and shares of characters by their script.
"""

from __future__ import annotations

import io
import os
import random
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.durable import write_file
from data_pipeline.languages import language_of
from data_pipeline.order import PackingMode
from data_pipeline.packing import PackingFigures, measure_packing
from data_pipeline.shards import SPLITS, Collection, DataFormatError, Source, Split, SplitName
from data_pipeline.stream import TokenStream
from tokenizer.codec import Codec

SAMPLED_DOCUMENTS = 200
PICTURES = (".png", ".svg", ".pdf")
SAMPLED_TOKENS = 2048  # of each document sampled, from its start

_COMPARED: dict[PackingMode, str] = {"concat": "concat, concat_masked", "best_fit": "best_fit"}

# The first word of a letter's Unicode name, where it is not itself the name to show.
_SCRIPTS = {
    "CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana", "HALFWIDTH": "Kana", "FULLWIDTH": "Latin",
    "MODIFIER": "other letters", "MATHEMATICAL": "other letters", "DOUBLE-STRUCK": "other letters",
    "FEMININE": "Latin", "MASCULINE": "Latin", "MICRO": "Greek", "BOPOMOFO": "Bopomofo", "IDEOGRAPHIC": "Han",
}  # fmt: skip


@dataclass(frozen=True)
class Lengths:
    """How long the documents of a split are, in tokens, EOS included.

    `bins[k]` counts those of 2^k to 2^(k+1) - 1 tokens; quantiles are exact: the smallest length that so many reach.
    """

    documents: int
    shortest: int
    median: int
    p90: int
    p99: int
    longest: int
    mean: float
    bins: list[int]


@dataclass(frozen=True)
class Card:
    """All that a card says, ready to be written. By source, of the sample: `languages` shares of its documents,
    `scripts` shares of its characters, largest first."""

    collection: Collection
    lengths: dict[str, dict[SplitName, Lengths]]
    languages: dict[str, dict[str, float]]
    scripts: dict[str, dict[str, float]]
    packing: dict[str, dict[PackingMode, PackingFigures]]
    seq_len: int


def make_card(collection: Collection, codec: Codec, *, seq_len: int, seed: int = 0) -> Card:
    """Count lengths, sample texts. Cost: reads every .idx, and at most 200 documents a source of the .bin."""
    lengths = {
        name: {split: measured for split in SPLITS if (measured := measure_lengths(source.splits[split]))}
        for name, source in collection.sources.items()
    }
    texts = {name: sample_texts(source, codec, seed=seed) for name, source in collection.sources.items()}
    languages = {name: language_shares(sample) for name, sample in texts.items()}
    scripts = {name: script_shares(sample) for name, sample in texts.items()}
    packing = {
        name: {mode: measure_packing(source.splits["train"], seq_len, mode) for mode in _COMPARED}
        for name, source in collection.sources.items()
    }
    return Card(collection, lengths, languages, scripts, packing, seq_len)


def measure_lengths(split: Split) -> Lengths | None:
    """The lengths of all documents; None for a split without any. Memory: a shard's ends, and a number per length."""
    counts: Counter[int] = Counter()
    stream, start = TokenStream(split), 0
    for shard in split.shards:
        ends = stream.document_ends(start, start + shard.tokens)
        values, times = np.unique(np.diff(ends, prepend=start), return_counts=True)
        counts.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
        start += shard.tokens
    if not counts:
        return None
    documents, sizes = counts.total(), sorted(counts)
    reached = np.cumsum([counts[size] for size in sizes])

    def quantile(share: float) -> int:
        return sizes[int(np.searchsorted(reached, share * documents))]

    bins = [0] * sizes[-1].bit_length()
    for size in sizes:
        bins[size.bit_length() - 1] += counts[size]
    mean = sum(size * count for size, count in counts.items()) / documents
    return Lengths(documents, sizes[0], quantile(0.5), quantile(0.9), quantile(0.99), sizes[-1], mean, bins)


def sample_texts(source: Source, codec: Codec, *, seed: int = 0) -> list[str]:
    """Up to 200 documents of both splits, drawn by the seed, in their order; of each the first 2,048 tokens."""
    texts = []
    rng = random.Random(f"{seed} {source.name}")
    total = sum(source.splits[split].documents for split in SPLITS)
    drawn = sorted(rng.sample(range(total), min(SAMPLED_DOCUMENTS, total)))
    first = 0
    for split in SPLITS:
        stream = TokenStream(source.splits[split])
        for number in drawn:
            if first <= number < first + stream.documents:
                start, stop = stream.document(number - first)
                ids = stream.read(start, min(stop - 1, start + SAMPLED_TOKENS))
                texts.append(codec.decode(ids))
        first += stream.documents
    return texts


def language_shares(texts: Iterable[str]) -> dict[str, float]:
    """Shares of texts by the language that each is mostly in, largest first."""
    return _shares(Counter(language_of(text, Counter(map(kind_of_character, text))) for text in texts))


def script_shares(texts: Iterable[str]) -> dict[str, float]:
    """Shares of characters by their kind, largest first."""
    return _shares(Counter(kind_of_character(character) for text in texts for character in text))


def _shares(counts: Counter[str]) -> dict[str, float]:
    return {kind: count / counts.total() for kind, count in counts.most_common()}


@lru_cache(maxsize=1 << 16)
def kind_of_character(character: str) -> str:
    """Its script by its Unicode name if it is a letter or a mark, else digits, spaces, punctuation and symbols."""
    category = unicodedata.category(character)
    if category[0] in "LM":
        word = unicodedata.name(character, "OTHER").split()[0]
        return _SCRIPTS.get(word, word.capitalize() if word != "COMBINING" else "other letters")
    if category[0] == "N":
        return "digits"
    if character.isspace() or category[0] == "Z":
        return "spaces and line breaks"
    return "punctuation and symbols" if category[0] in "PS" else "control and unassigned"


# ---------------------------------------------------------------- writing


def render_card(card: Card, picture: str | None = None) -> str:
    """The card as Markdown, with a picture of that file name if there is one. The same data give the same bytes."""
    collection = card.collection
    lines = [
        f"# Data card: {collection.path.resolve().name}",
        "",
        f"Vocabulary {collection.vocab_size:,}, tokenizer `{collection.fingerprint[:12]}`, tokens"
        f" `{collection.content_sha256[:12]}`.",
        "",
        "## Sources",
        "",
        "| source | split | documents | tokens | text bytes | bytes/token | shards |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, source in collection.sources.items():
        for side, split in source.splits.items():
            ratio = f"{split.text_bytes / split.tokens:.3f}" if split.tokens else ""
            lines.append(
                f"| {name} | {side} | {split.documents:,} | {split.tokens:,} | {split.text_bytes:,} | {ratio}"
                f" | {len(split.shards)} |"
            )
    lines += ["", *_made_of(collection), *_windows(card), *_packing(card), *_lengths(card, picture)]
    lines += [*_languages(card), *_scripts(card)]
    return "\n".join(lines) + "\n"


def _made_of(collection: Collection) -> list[str]:
    lines = [
        "## Made of",
        "",
        "| source | files | bytes read | documents read | dropped | noted |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    reasons = []
    for name, source in collection.sources.items():
        manifest: dict[str, Any] = source.manifest
        files = manifest["provenance"]["files"]
        dropped, notes = sum(manifest["dropped"].values()), sum(manifest["notes"].values())
        lines.append(
            f"| {name} | {len({one['path'] for one in files}):,} | {sum(one['bytes'] for one in files):,}"
            f" | {manifest['documents_read']:,} | {dropped:,} | {notes:,} |"
        )
        for kind, word in (("dropped", "dropped"), ("notes", "noted")):
            reasons += [f"- {name}, {word}: {count:,} {reason}" for reason, count in sorted(manifest[kind].items())]
        options = ", ".join(f"{key} {value}" for key, value in sorted(manifest["options"].items()) if value is not None)
        reasons.append(f"- {name}, options: {options}")
    return [*lines, "", *reasons, "", "Each drop stands in its source's `ledger.jsonl` with file and line.", ""]


def _windows(card: Card) -> list[str]:
    lines = [
        f"## Training windows of {card.seq_len:,} tokens", "",
        "| source | windows | tokens behind the last one |", "|---|--:|--:|",
    ]  # fmt: skip
    for name, source in card.collection.sources.items():
        tokens = source.splits["train"].tokens
        windows = max(0, (tokens - 1) // card.seq_len)
        left = tokens - (windows * card.seq_len + 1) if windows else tokens
        lines.append(f"| {name} | {windows:,} | {left:,} |")
    return [*lines, "", "Windows run over the ends of documents; nothing is padded.", ""]


def _packing(card: Card) -> list[str]:
    lines = [
        f"## What packing into rows of {card.seq_len:,} does", "",
        "| source | packing | rows | documents cut | longer than a row | tokens padded | tokens never a target |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for name, modes in card.packing.items():
        for mode, one in modes.items():
            lines.append(
                f"| {name} | {_COMPARED[mode]} | {one.rows:,} | {one.documents_cut:,} ({one.cut_share:.2%})"
                f" | {one.documents_too_long:,} | {one.tokens_padded:,} ({one.padded_share:.3%})"
                f" | {one.tokens_dropped:,} ({one.dropped_share:.3%}) |"
            )
    return [*lines, "", "In an epoch of the training split.", ""]


def _lengths(card: Card, picture: str | None) -> list[str]:
    lines = [
        "## Lengths of documents", "", "In tokens, EOS included.", "",
        "| source | split | shortest | median | 90 % | 99 % | longest | mean |", "|---|---|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for name, splits in card.lengths.items():
        for split, one in splits.items():
            lines.append(
                f"| {name} | {split} | {one.shortest:,} | {one.median:,} | {one.p90:,} | {one.p99:,} | {one.longest:,}"
                f" | {one.mean:,.1f} |"
            )
    trained = {name: splits["train"] for name, splits in card.lengths.items() if "train" in splits}
    if trained:
        lines += ["", f"| tokens | {' | '.join(trained)} |", f"|---|{'--:|' * len(trained)}"]
        for place in range(max(len(one.bins) for one in trained.values())):
            counts = [one.bins[place] if place < len(one.bins) else 0 for one in trained.values()]
            if any(counts):
                cells = " | ".join(f"{count:,}" for count in counts)
                lines.append(f"| {2**place:,} to {2 ** (place + 1) - 1:,} | {cells} |")
        lines += ["", "Documents of the training split."]
    if picture:
        lines += ["", f"![lengths of documents]({picture})"]
    return [*lines, ""]


def _languages(card: Card) -> list[str]:
    return [
        "## Languages", "",
        f"Shares of documents by the language that each is mostly in, of up to {SAMPLED_DOCUMENTS} documents a source,"
        f" drawn at random, {SAMPLED_TOKENS:,} tokens of each. Told by letters and small words; some twenty languages"
        " are known, the rest is \"other\".", "",
        *_table_of_shares("documents", card.languages), "",
    ]  # fmt: skip


def _scripts(card: Card) -> list[str]:
    return [
        "## Scripts", "", "Shares of characters in the same documents.", "",
        *_table_of_shares("characters", card.scripts),
    ]  # fmt: skip


def _table_of_shares(of: str, by_source: dict[str, dict[str, float]]) -> list[str]:
    lines = [f"| source | {of} |", "|---|---|"]
    for name, shares in by_source.items():
        shown = [f"{kind} {share:.1%}" for kind, share in shares.items() if share >= 0.001]
        rest = ["others below 0.1%"] if len(shown) < len(shares) else []
        lines.append(f"| {name} | {', '.join(shown + rest)} |")
    return lines


def check_target(path: Path) -> None:
    """DataFormatError unless a card or picture can be written to this name; a plain file of this name is replaced."""
    if not path.name:
        raise DataFormatError(f"{path}: is no name of a file to write; choose one, such as card.md")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise DataFormatError(f"{path}: exists already and is no plain file; choose another name")
    if not path.parent.is_dir():
        raise DataFormatError(f"{path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise DataFormatError(f"{path}: the folder {path.parent} cannot be written to")


def check_picture(path: Path) -> None:
    """DataFormatError unless the name says what kind of picture `plot_lengths` is to make."""
    if path.suffix.lower() not in PICTURES:
        raise DataFormatError(f"{path}: a picture is drawn as {', '.join(PICTURES)}; choose a name that ends so")


def plot_lengths(card: Card, path: Path) -> None:
    """Draw the lengths of the training documents, one line a source, in bins of powers of two. PNG, SVG or PDF."""
    from matplotlib.figure import Figure

    check_picture(path)

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, splits in card.lengths.items():
        if "train" in splits:
            bins = splits["train"].bins
            shares = np.array(bins) / splits["train"].documents
            axes.stairs(shares, [2**place for place in range(len(bins) + 1)], label=name, linewidth=1.5)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of a document, EOS included")
    axes.set_ylabel("share of documents")
    axes.axvline(card.seq_len, color="grey", linestyle=":", label=f"window of {card.seq_len}")
    axes.legend()
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix.lower()[1:])
    write_file(path, drawn.getvalue())
