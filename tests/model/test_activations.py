"""The sums against what is held: exactly where tensors are counted, and against the allocator where kernels join in."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model import activations, attention_cpu, loss
from model.accounting import parameter_count
from model.activations import Held, Moment, Pass
from model.config import PRESETS, ModelConfig
from model.generate import Sampling, generate
from model.transformer import Transformer
from pretrain.held import PeakTracker
from tests.model.conftest import random_ids
from tests.model.dispatched import LiveBytes

CPU = torch.device("cpu")
DTYPES = {2: torch.bfloat16, 4: torch.float32}
SMALL = ModelConfig(
    vocab_size=500,
    d_model=128,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    d_ff=352,
    seq_len=1100,
    norm_eps=1e-5,
    tied=True,
)
LONG = replace(SMALL, n_layers=2, n_heads=2, n_kv_heads=1)
WIDE = replace(SMALL, vocab_size=6000)
UNTIED = replace(WIDE, tied=False, n_kv_heads=4)


def test_by_hand(tiny_config: ModelConfig) -> None:
    """2 rows of 10 tokens in bf16; d 32, f 80, 4 query and 2 key/value heads of 64, 3 blocks, 97 ids."""
    work = Pass(2, 10, 2, loss_chunk_tokens=1024)
    kept = 20 * 2 * (4 * 32 + 2 * 256 + 2 * 128 + 3 * 80) + 4 * 20 * (4 + 2)
    assert kept == 45_920
    held = {one.name: one.bytes for one in moment(activations.forward(tiny_config, work), "loss").held}
    assert held == {
        "ids and targets": 320,
        "blocks that keep all": 3 * kept,
        "hidden states, their gradient, the last norm": 3 * 1280 + 80,
        "logits of a chunk, gradient of the head": 20 * 97 * 10,
    }
    last = moment(activations.backward(tiny_config, work), "block 2, feed-forward")
    first = moment(activations.backward(tiny_config, work), "block 0, feed-forward")
    gated = 20 * 2 * (32 + 2 * 80)
    assert first.bytes == 320 + 2 * 97 * 32 + kept + gated
    assert last.bytes == first.bytes + 2 * kept
    block = 2 * 32 * (4 + 2) * 64 + 3 * 32 * 80 + 2 * 32
    assert (last.gradients, first.gradients) == (32 + 80 * 32, 32 + 80 * 32 + 2 * block)
    assert activations.buffers(tiny_config) == (Held("RoPE tables", 4 * 48 * 64, "4·T·k"),)


def test_what_is_not_counted_is_said(tiny_config: ModelConfig) -> None:
    assert activations.unmodelled(tiny_config) is None
    assert all(activations.unmodelled(PRESETS[name]) is None for name in ("mini", "0.5b"))
    assert activations.unmodelled(PRESETS["gpt2"]) == (
        "activations are counted as those of Llama's block; not modelled: "
        'norm = "layer", bias = true, ffn = "gelu", positions = "learned"'
    )


def test_formulas_are_made_of_the_legend(tiny_config: ModelConfig) -> None:
    works = [Pass(2, 10, 2, "every-2", device="cuda", documents=True, fused_loss=True), Pass(2, 2000, 4, "full")]
    moments = [
        one
        for work in works
        for passes in (activations.forward, activations.backward, activations.evaluation)
        for one in passes(tiny_config, work)
    ]
    moments += activations.generation(tiny_config, rows=2, prompt_tokens=20, new_tokens=5, compute_bytes=2)
    symbols = set(re.findall("[a-zA-Z]+", " ".join(held.formula for one in moments for held in one.held)))
    assert symbols | {"T", "c", "e", "q", "s", "u"} == set(activations.LEGEND)


def test_constants_are_those_of_the_code() -> None:
    ours = (activations.MOST_TOKENS, activations.CHUNK, activations.SCORES_PER_THREAD, activations.CAST_ROWS)
    assert ours == (attention_cpu.MOST_TOKENS, attention_cpu._CHUNK, attention_cpu._SCORES_PER_THREAD, loss.ROWS)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", ["none", "every-2", "full"])
def test_gradients_grow_to_all_but_the_embedding(tiny_config: ModelConfig, mode: str, tied: bool) -> None:
    config = replace(tiny_config, tied=tied)
    grown = [one.gradients for one in activations.backward(config, Pass(1, 20, 4, mode))]
    assert grown == sorted(grown)
    assert grown[-1] == parameter_count(config) - config.vocab_size * config.d_model


@pytest.mark.parametrize("compute_bytes", [2, 4])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("mode", ["none", "every-2", "selective", "full"])
def test_what_blocks_keep_is_exact(mode: str, documents: bool, compute_bytes: int) -> None:
    """Between the blocks and the loss, by the storages that live then."""
    work = Pass(3, 37, compute_bytes, mode, documents=documents)
    model = built(SMALL, work)
    ids_bt, numbers_bt = random_ids(SMALL, 3, 37), numbers(work)
    batch = [ids_bt] if numbers_bt is None else [ids_bt, numbers_bt]
    with LiveBytes().outside(*batch, *model.parameters(), *model.buffers()) as live:
        hidden_btd = model.hidden(ids_bt, documents_bt=numbers_bt)
        kept = live.live
    comes_with_the_batch = (24 if documents else 16) * work.tokens
    before_the_head = [
        held.bytes
        for held in moment(activations.backward(SMALL, work), "head").held
        if held.name != "gradients of hidden states and head"
    ]
    assert kept == sum(before_the_head) - comes_with_the_batch + hidden_btd.nbytes


CASES = {
    "fp32": (SMALL, Pass(2, 200, 4)),
    "bf16": (SMALL, Pass(2, 200, 2)),
    "one row": (SMALL, Pass(1, 255, 2)),
    "selective": (SMALL, Pass(2, 130, 2, "selective")),
    "every-2": (SMALL, Pass(3, 100, 4, "every-2")),
    "full": (SMALL, Pass(2, 200, 4, "full")),
    "full bf16": (SMALL, Pass(4, 101, 2, "full")),
    "many chunks": (WIDE, Pass(1, 250, 2, "every-3", loss_chunk_tokens=64)),
    "many chunks fp32": (WIDE, Pass(1, 250, 4, "full", loss_chunk_tokens=64)),
    "two chunks, untied": (UNTIED, Pass(2, 200, 2, "full", loss_chunk_tokens=250)),
    "a chunk as large": (UNTIED, Pass(2, 100, 4, loss_chunk_tokens=200)),
    "little but attention": (replace(SMALL, d_ff=128), Pass(2, 200, 4, "full", loss_chunk_tokens=32)),
    "little but the embedding": (WIDE, Pass(1, 16, 2)),
    "torch's kernel": (LONG, Pass(1, 1025, 2)),
    "torch's kernel, full": (LONG, Pass(1, 1025, 4, "full")),
    "documents": (SMALL, Pass(2, 200, 2, documents=True)),
    "documents, full": (SMALL, Pass(2, 250, 4, "full", documents=True)),
}


@pytest.mark.parametrize("config, work", CASES.values(), ids=CASES)
def test_peaks_are_as_measured(config: ModelConfig, work: Pass) -> None:
    check_peaks(config, work)


@pytest.mark.parametrize(
    "config, work, prompt_tokens",
    [
        (SMALL, Pass(2, 200, 2), 200),
        (SMALL, Pass(3, 100, 2), 250),
        (WIDE, Pass(4, 30, 4), 30),
        (WIDE, Pass(2, 30, 2), 30),
    ],
    ids=["one chunk", "several chunks", "the choice of a token", "the choice of a token in bf16"],
)
def test_generation_is_as_measured(config: ModelConfig, work: Pass, prompt_tokens: int) -> None:
    rows, chunk_tokens = work.micro_batch_size, work.tokens
    model = built(config, work)
    with PeakTracker(CPU) as tracker:
        generate(
            model, random_ids(config, rows, prompt_tokens).tolist(), 6, Sampling(top_p=0.9), chunk_tokens=chunk_tokens
        )
    moments = activations.generation(
        config,
        rows=rows,
        prompt_tokens=prompt_tokens,
        new_tokens=6,
        compute_bytes=work.compute_bytes,
        chunk_tokens=chunk_tokens,
    )
    assert most(moments, 0) == pytest.approx(tracker.peak_bytes, rel=0.04)


@pytest.mark.soak
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("mode", ["none", "every-4", "selective", "full"])
@pytest.mark.parametrize("compute_bytes", [2, 4])
def test_peaks_of_mini_are_as_measured(compute_bytes: int, mode: str, documents: bool) -> None:
    torch.set_num_threads(2)
    check_peaks(PRESETS["mini"], Pass(2, 1024, compute_bytes, mode, 2048, documents=documents, threads=2))


@pytest.mark.soak
@pytest.mark.parametrize("tokens, mode", [(256, "none"), (512, "full"), (1025, "every-6")])
def test_peaks_of_the_large_preset_are_as_measured(tokens: int, mode: str) -> None:
    """About 5 GB."""
    torch.set_num_threads(2)
    check_peaks(PRESETS["0.5b"], Pass(1, tokens, 2, mode, 1024, threads=2))


def check_peaks(config: ModelConfig, work: Pass) -> None:
    """Each within 4 %."""
    model = built(config, work)
    ids_bt = random_ids(config, work.micro_batch_size, work.seq_len)

    def arrive() -> tuple[Tensor, Tensor, Tensor | None]:
        return ids_bt.clone(), ids_bt.clone(), numbers(work)

    with PeakTracker(CPU) as tracker:
        with torch.no_grad(), tracker.phase("evaluation"):
            ids, targets, documents = arrive()
            model(ids, targets, documents_bt=documents)
            del ids, targets, documents
        with tracker.phase("forward"):
            ids, targets, documents = arrive()
            loss_sum = model(ids, targets, documents_bt=documents).loss_sum
        with tracker.phase("backward"):
            loss_sum.backward()
    sums = {
        "evaluation": most(activations.evaluation(config, work), 0),
        "forward": most(activations.forward(config, work), 0),
        "backward": most(activations.backward(config, work), work.compute_bytes),
    }
    assert sums == pytest.approx(tracker.phases, rel=0.04)


def most(moments: Sequence[Moment], bytes_of_a_gradient: int) -> int:
    return max(one.bytes + bytes_of_a_gradient * one.gradients for one in moments)


def moment(moments: Sequence[Moment], name: str) -> Moment:
    (found,) = (one for one in moments if one.name == name)
    return found


def built(config: ModelConfig, work: Pass) -> Transformer:
    model = Transformer(config).to(DTYPES[work.compute_bytes])
    model.activation_checkpointing, model.loss_chunk_tokens = work.checkpointing, work.loss_chunk_tokens
    return model


def numbers(work: Pass) -> Tensor | None:
    """Documents of 60 tokens."""
    if not work.documents:
        return None
    return torch.arange(work.seq_len).div(60, rounding_mode="floor").repeat(work.micro_batch_size, 1)
