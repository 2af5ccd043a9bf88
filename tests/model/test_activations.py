"""The sums against what is held: exactly where tensors are counted, and against the allocator where kernels join in."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model import activations, attention_cpu, loss, scenes
from model.accounting import parameter_count
from model.activations import Held, Moment
from model.config import PRESETS, ModelConfig
from model.generate import Sampling, generate
from model.residual import ITERATIONS
from model.scenes import Pass
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
COMPONENTS: dict[str, dict[str, Any]] = {
    "layer": {"norm": "layer"},
    "post": {"norm_place": "post"},
    "deepnorm": {"norm_place": "deepnorm", "norm": "layer"},
    "bias": {"bias": True},
    "relu": {"ffn": "relu", "d_ff": 512},
    "gelu": {"ffn": "gelu", "d_ff": 512},
    "no positions": {"positions": "none"},
    "sinusoidal": {"positions": "sinusoidal"},
    "learned": {"positions": "learned"},
    "mha": {"n_kv_heads": 4},
    "mqa": {"n_kv_heads": 1},
    "mla": {"attention": "mla", "n_kv_heads": 4, "mla_latent": 128, "mla_rope_dim": 32},
    "qk_norm": {"qk_norm": True},
    "window": {"sliding_window": 48},
    "hyper": {"residual": "hyper", "n_streams": 4},
    "one stream": {"residual": "hyper"},
    "untied": {"tied": False},
    "linear": {"rope_scaling": "linear", "rope_scaling_factor": 2.0, "rope_original_seq_len": 50},
    "dynamic": {"rope_scaling": "dynamic", "rope_scaling_factor": 2.0, "rope_original_seq_len": 50},
    "yarn": {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_seq_len": 50},
}
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
        "hidden states, their gradient": 2 * 1280,
        "the last norm": 1280 + 80,
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


def test_components_by_hand(tiny_config: ModelConfig) -> None:
    """What a block keeps of 2 rows of 10 tokens in bf16; d 32, f 80, 4 query and 2 key/value heads of 64."""
    work = Pass(2, 10, 2)

    def kept(**changes: Any) -> int:
        config = replace(tiny_config, **changes)
        (held,) = (one for one in activations._kept(config, work, activations._symbols(config, work), 1))
        return held.bytes

    llama = 20 * 2 * (4 * 32 + 2 * 256 + 2 * 128 + 3 * 80) + 4 * 20 * (4 + 2)
    assert kept() == kept(norm_place="post") == kept(positions="learned") == kept(bias=True) == llama
    assert kept(norm="layer") == llama - 2 * 4 * 20 + 2 * 2 * 2 * 20  # two means and deviations in bf16
    assert (kept(ffn="gelu"), kept(ffn="relu")) == (llama - 20 * 2 * 80, llama - 20 * 2 * 2 * 80)
    assert kept(n_kv_heads=4) == llama + 20 * 2 * 2 * 128
    assert kept(qk_norm=True) == llama + 20 * 2 * (256 + 128) + 4 * 20 * (4 + 2)
    mla = kept(attention="mla", n_kv_heads=4, mla_latent=48, mla_rope_dim=16)
    assert mla == 20 * 2 * (4 * 32 + 2 * (48 + 16) + 4 * 4 * 80 + 256 + 3 * 80) + 4 * 20 * (4 + 2 + 1)
    assert kept(residual="hyper", n_streams=3) == llama + 2 * (4 * 20 * 3 * 32 + 20 * 2 * 32)


def test_tables_are_those_of_the_choice(tiny_config: ModelConfig) -> None:
    def tables(**changes: Any) -> int:
        config = replace(tiny_config, **changes)
        return sum(held.bytes for held in (*activations.buffers(config), *activations.later_buffers(config)))

    assert tables(positions="none") == tables(positions="learned") == 0
    assert tables(positions="sinusoidal") == 4 * 48 * 32
    assert tables(attention="mla", n_kv_heads=4, mla_latent=48, mla_rope_dim=16) == 4 * 48 * 16
    grown = {"rope_scaling": "dynamic", "rope_scaling_factor": 2.0}
    assert tables(**grown, rope_original_seq_len=48) == tables() == 4 * 48 * 64
    assert tables(**grown, rope_original_seq_len=24) == 2 * tables()


def test_formulas_are_made_of_the_legend(tiny_config: ModelConfig) -> None:
    works = [Pass(2, 10, 2, "every-2", device="cuda", documents=True, fused_loss=True), Pass(2, 2000, 4, "full")]
    moments = [
        one
        for config in (tiny_config, *(replace(tiny_config, **COMPONENTS[name]) for name in ("mla", "hyper")))
        for work in works
        for passes in (activations.forward, activations.backward, activations.evaluation)
        for one in passes(config, work)
    ]
    moments += activations.generation(tiny_config, rows=2, prompt_tokens=20, new_tokens=5, compute_bytes=2)
    symbols = set(re.findall("[a-zA-Z]+", " ".join(held.formula for one in moments for held in one.held)))
    assert symbols | {"T", "c", "e", "p", "q", "s", "u"} == set(activations.LEGEND)


def test_constants_are_those_of_the_code() -> None:
    ours = (scenes.MOST_TOKENS, activations.CHUNK, activations.SCORES_PER_THREAD, activations.CAST_ROWS)
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
    check_kept(SMALL, Pass(3, 37, compute_bytes, mode, documents=documents))


@pytest.mark.parametrize("name", COMPONENTS)
def test_what_components_keep_is_exact(name: str) -> None:
    config = replace(SMALL, **COMPONENTS[name])
    for compute_bytes, mode in ((2, "none"), (4, "none"), (2, "selective"), (4, "every-2")):
        check_kept(config, Pass(2, 70, compute_bytes, mode, documents=mode == "every-2"))


def check_kept(config: ModelConfig, work: Pass) -> None:
    """Between the blocks and the loss, by the storages that live then."""
    model = built(config, work)
    ids_bt, numbers_bt = random_ids(config, work.micro_batch_size, work.seq_len), numbers(work)
    batch = [ids_bt] if numbers_bt is None else [ids_bt, numbers_bt]
    with LiveBytes().outside(*batch, *model.parameters(), *model.buffers()) as live:
        hidden_btd = model.hidden(ids_bt, documents_bt=numbers_bt)
        kept = live.live
    comes_with_the_batch = (24 if work.documents else 16) * work.tokens
    before_the_head = [
        held.bytes
        for held in moment(activations.backward(config, work), "head").held
        if held.name != "gradients of hidden states and head"
    ]
    counted = sum(before_the_head) - comes_with_the_batch + hidden_btd.nbytes + grown_tables(config, work)
    assert 0 <= kept - counted <= small_matrices(config)


def small_matrices(config: ModelConfig) -> int:
    """Those of some streams by as many that every iteration of Sinkhorn keeps, which no micro-batch makes larger."""
    if config.residual == "plain":
        return 0
    return 2 * config.n_layers * 4 * (2 * ITERATIONS + 3) * config.n_streams * (config.n_streams + 1)


def grown_tables(config: ModelConfig, work: Pass) -> int:
    """Tables that stay behind the first pass over texts longer than those before."""
    return 0 if work.documents else sum(held.bytes for held in activations.later_buffers(config))


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
    **{
        f"{name} {compute_bytes}": (replace(SMALL, n_layers=2, **choice), Pass(2, 150, compute_bytes))
        for name, choice in COMPONENTS.items()
        for compute_bytes in (2, 4)
    },
    "mla, full": (replace(SMALL, **COMPONENTS["mla"]), Pass(1, 130, 2, "full", loss_chunk_tokens=32)),
    "hyper, full": (replace(SMALL, **COMPONENTS["hyper"]), Pass(1, 130, 2, "full", loss_chunk_tokens=32)),
    "window, full": (replace(SMALL, **COMPONENTS["window"]), Pass(1, 250, 4, "full", loss_chunk_tokens=32)),
    "mla, documents": (replace(SMALL, **COMPONENTS["mla"]), Pass(2, 100, 4, "full", documents=True)),
    "qk_norm, every-2": (replace(SMALL, **COMPONENTS["qk_norm"]), Pass(2, 100, 2, "every-2")),
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
    grown = grown_tables(config, work)
    sums = {
        "evaluation": grown + most(activations.evaluation(config, work), 0),
        "forward": grown + most(activations.forward(config, work), 0),
        "backward": grown + most(activations.backward(config, work), work.compute_bytes),
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
