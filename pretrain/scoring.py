"""How likely a model finds texts, token by token: which window scores which token, and sums over documents.

The context rule. Tokens are scored in their order, each exactly once; an EOS stands before the first as its context. A
window holds `seq_len` inputs. The first window scores its `seq_len` targets; each later one moves on by `stride` and
scores the `stride` new ones, so a token has at least seq_len − stride + 1 tokens of context where the text has so many.
stride = seq_len is the quickest rule: windows side by side, the first token of each with one token of context. What is
scored in a row is either all documents of a source one behind the other, as in training ("packed"), or each document on
its own ("alone").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.packing import number_documents
from model.loss import IGNORED
from model.transformer import Transformer
from pretrain.config import RecipeError
from pretrain.runtime import Ranks
from pretrain.texts import Int64Array, Source

DocumentsMode = Literal["packed", "alone"]
MODES: tuple[str, ...] = get_args(DocumentsMode)


@dataclass(frozen=True)
class Rule:
    """How tokens get their context. `isolated`: packed documents do not see each other, for models trained so."""

    seq_len: int
    stride: int
    documents: DocumentsMode
    isolated: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.seq_len:
            raise RecipeError(f"--stride {self.stride}: must be 1 to {self.seq_len}, the model's window")


@dataclass(frozen=True)
class Windows:
    """Row w predicts the tokens scored[w] to stops[w] − 1 from the tokens begins[w] to stops[w] − 2; where
    begins[w] = heads[w] − 1 the first input is an EOS instead. int64 (windows,)."""

    begins: Int64Array
    scored: Int64Array
    stops: Int64Array
    heads: Int64Array

    def chosen(self, rows: Int64Array) -> Windows:
        return Windows(self.begins[rows], self.scored[rows], self.stops[rows], self.heads[rows])

    @property
    def inputs(self) -> Int64Array:
        """How many inputs each row has."""
        lengths: Int64Array = self.stops - 1 - self.begins
        return lengths

    @property
    def tokens(self) -> int:
        """How many tokens are scored."""
        return int((self.stops - self.scored).sum())


def windows_of(source: Source, rule: Rule, max_tokens: int | None = None) -> Windows:
    """Every window of a source, or of them max_tokens // stride, evenly spread."""
    texts = [(0, source.stream.tokens)]
    if rule.documents == "alone":
        starts = np.concatenate([[0], source.ends[:-1]])
        texts = list(zip(starts.tolist(), source.ends.tolist(), strict=True))
    columns: list[Int64Array] = []
    for head, end in texts:
        later = np.arange(head + rule.seq_len, end, rule.stride, dtype=np.int64)
        scored = np.concatenate([np.array([head], np.int64), later])
        stops = np.minimum(np.append(later, end) if len(later) else np.array([end]), end)
        begins = np.maximum(head - 1, scored + rule.stride - 1 - rule.seq_len)  # also where the text ends sooner
        columns.append(np.stack([begins, scored, stops, np.full_like(scored, head)]))
    windows = Windows(*np.concatenate(columns, axis=1))
    if max_tokens is None or max_tokens >= source.stream.tokens:
        return windows
    count = max_tokens // rule.stride
    if count < 1:
        raise RecipeError(f"--max-tokens {max_tokens} is less than one window of {rule.stride} tokens: raise it")
    total = len(windows.stops)
    return windows.chosen(np.arange(min(count, total), dtype=np.int64) * total // min(count, total))


@dataclass
class Sums:
    """What was scored of a source: of each document, at each place in the window, and how often which token."""

    document_nats: NDArray[np.float64]
    document_tokens: NDArray[np.float64]
    place_nats: NDArray[np.float64]  # (seq_len,): of the tokens predicted from so many inputs, less one
    place_tokens: NDArray[np.float64]
    counts: NDArray[np.float64]  # (vocab_size,)

    @classmethod
    def zero(cls, documents: int, seq_len: int, vocab_size: int) -> Sums:
        return cls(*(np.zeros(size) for size in (documents, documents, seq_len, seq_len, vocab_size)))

    def over(self, ranks: Ranks, device: torch.device) -> Sums:
        """The sums of all ranks, on each of them."""
        parts = vars(self).values()
        flat = torch.from_numpy(np.concatenate(list(parts))).to(device)
        summed = ranks.sum(flat).cpu().numpy()
        return Sums(*np.split(summed, np.cumsum([len(part) for part in parts])[:-1]))


def score(
    model: Transformer,
    source: Source,
    rule: Rule,
    *,
    eos_id: int,
    batch_size: int,
    ranks: Ranks,
    device: torch.device,
    max_tokens: int | None = None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Sums:
    """The sums of one source, the work shared by all ranks; `on_tokens` hears how many more all have scored."""
    windows = windows_of(source, rule, max_tokens)
    sums = Sums.zero(len(source.ends), rule.seq_len, model.config.vocab_size)
    batches = list(_batches(windows.inputs, batch_size * rule.seq_len))
    for rows in batches[ranks.rank :: ranks.world_size]:
        chosen = windows.chosen(rows)
        inputs, targets, where = _arrays(source, chosen, eos_id)
        isolated = number_documents(inputs, eos_id) if rule.isolated else None
        losses, _ = token_scores(model, inputs, targets, isolated, device)
        kept = targets != IGNORED
        nats, tokens, places = losses[kept].astype(np.float64), targets[kept], _places(inputs, isolated)[kept]
        documents = np.searchsorted(source.ends, where[kept], side="right")
        for sum_, indices in ((sums.document_nats, documents), (sums.place_nats, places)):
            sum_ += np.bincount(indices, weights=nats, minlength=len(sum_))
        for sum_, indices in ((sums.document_tokens, documents), (sums.place_tokens, places), (sums.counts, tokens)):
            sum_ += np.bincount(indices, minlength=len(sum_))
        on_tokens(chosen.tokens * ranks.world_size)
    summed = sums.over(ranks, device)
    assert summed.document_tokens.sum() == windows.tokens, "a token was scored twice, or not at all"
    return summed


def _places(inputs: Int64Array, isolated: Int64Array | None) -> Int64Array:
    """How many inputs each one has before it that it sees, (rows, longest): in its row, or in its document there."""
    columns = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    if isolated is None:
        return columns
    begins = np.ones(inputs.shape, bool)
    begins[:, 1:] = isolated[:, 1:] != isolated[:, :-1]
    places: Int64Array = columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return places


def _batches(lengths: Int64Array, budget: int) -> Iterator[Int64Array]:
    """Rows of about one length together, as many as hold `budget` inputs with their padding. Long ones first."""
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        rows = max(1, budget // int(lengths[order[first]]))
        yield order[first : first + rows]
        first += rows


def _arrays(source: Source, windows: Windows, eos_id: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Inputs, targets and where each target stands in the stream, (rows, longest); padded on the right, which no
    earlier token sees."""
    shape = (len(windows.stops), int(windows.inputs.max()))
    inputs = np.full(shape, eos_id, np.int64)
    targets = np.full(shape, IGNORED, np.int64)
    where = np.zeros(shape, np.int64)
    for row, (begin, scored, stop, head) in enumerate(
        zip(*(column.tolist() for column in vars(windows).values()), strict=True)
    ):
        tokens = source.stream.read(max(begin, head), stop)
        length, skipped = stop - 1 - begin, scored - 1 - begin
        inputs[row, length - len(tokens) + 1 : length] = tokens[:-1]
        targets[row, skipped:length] = tokens[len(tokens) - (stop - scored) :]
        where[row, skipped:length] = np.arange(scored, stop)
    return inputs, targets, where


@torch.no_grad()
def token_scores(
    model: Transformer,
    inputs: Int64Array,
    targets: Int64Array,
    documents: Int64Array | None,
    device: torch.device,
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Of each target that counts −log p(target) in nats, and whether it is the likeliest id: (rows, tokens) fp32, bool.

    0 and False where a target is IGNORED. Logits are lifted to fp32 before their softmax, and never exist for more than
    loss_chunk_tokens at a time.
    """
    ids_bt, targets_bt = (torch.from_numpy(array).to(device) for array in (inputs, targets))
    documents_bt = None if documents is None else torch.from_numpy(documents).to(device)
    hidden_btd = model.hidden(ids_bt, documents_bt=documents_bt)
    kept_bt, chunk = targets_bt != IGNORED, model.loss_chunk_tokens
    losses_bt = torch.zeros(targets_bt.shape, dtype=torch.float32, device=device)
    likeliest_bt = torch.zeros_like(kept_bt)
    losses, likeliest = [], []
    for hidden_kd, targets_k in zip(
        torch.split(hidden_btd[kept_bt], chunk), torch.split(targets_bt[kept_bt], chunk), strict=True
    ):
        logits_kv = model.lm_head(hidden_kd).float()
        losses.append(torch.nn.functional.cross_entropy(logits_kv, targets_k, reduction="none"))
        likeliest.append(logits_kv.argmax(-1) == targets_k)
    if losses:
        losses_bt[kept_bt], likeliest_bt[kept_bt] = torch.cat(losses), torch.cat(likeliest)
    return losses_bt.cpu().numpy(), likeliest_bt.cpu().numpy()
