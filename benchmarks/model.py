"""Forward and backward of the model, beside transformers' LlamaForCausalLM and litgpt's GPT.

    python benchmarks/model.py [--preset mini] [--compile]

All in one process, with the same weights and the same ids, in turn: each pair is ours and another's, one step of
forward and backward each, to the mean next-token loss and the gradients of all weights; medians of the pairs' ratios.
Before that the losses and the norms of the gradients must agree, or nothing is printed. Memory that is freed is kept by
the process, as training does on CPUs, for all of them alike (`keep_freed_memory`).

litgpt wants other versions of what this project locks: `pip install --no-deps --target DIR litgpt lightning
lightning-utilities torchmetrics jsonargparse pytorch-lightning` and PYTHONPATH=DIR do. What is not installed is named.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # or `import tokenizer` would find the script of that name beside this one
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT / "benchmarks"]

from model.config import PRESETS  # noqa: E402
from model.transformer import Transformer  # noqa: E402
from pretrain.runtime import keep_freed_memory  # noqa: E402

LOSS_TOLERANCE = 0.01  # relative, of losses in bf16
NORM_TOLERANCE = 0.02
SHAPES = {"mini": (4, 512), "0.5b": (1, 512)}  # sequences and tokens of a step


@dataclass(frozen=True)
class Contestant:
    """A model, and how it makes the loss of one step: mean over all targets, () fp32."""

    name: str
    module: nn.Module
    loss: Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(SHAPES), action="append", help="default: both")
    parser.add_argument("--batch-size", type=int, help="sequences (default: 4 of mini, 1 of 0.5b)")
    parser.add_argument("--tokens", type=int, help="of a sequence (default 512)")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--compile", action="store_true", help="ours with compiled blocks as well")
    parser.add_argument("--json", action="store_true", help="report as JSON")
    options = parser.parse_args()
    reports = []
    for preset in options.preset or SHAPES:
        reports.append(measure(preset, options))
        if not options.json:
            print(to_text(reports[-1]), flush=True)
    if options.json:
        print(json.dumps(reports, indent=2))


def measure(preset: str, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one preset."""
    keep_freed_memory()
    config = PRESETS[preset]
    batch_size, tokens = options.batch_size or SHAPES[preset][0], options.tokens or SHAPES[preset][1]
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    generator = torch.Generator().manual_seed(1)
    ids_bt = torch.randint(config.vocab_size, (batch_size, tokens + 1), generator=generator)
    model = Transformer(config, generator).to(dtype)
    ours, compiled, others, absent = contestants(model, ids_bt, options.compile)
    expected = results(ours)
    for other in (*compiled, *others):
        loss, norm = results(other)
        if relative(loss, expected[0]) > LOSS_TOLERANCE or relative(norm, expected[1]) > NORM_TOLERANCE:
            sys.exit(f"error: {other.name} gives loss and gradient norm {loss}, {norm} and not {expected}")
    report: dict[str, Any] = {
        "preset": preset,
        "dtype": options.dtype,
        "batch_size": batch_size,
        "tokens": tokens,
        "pairs": options.pairs,
        "not_installed": absent,
        "ratios": [],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "load": os.getloadavg()[0],
    }
    for subject in (ours, *compiled):
        for other in others:
            pairs = [(seconds_of(subject), seconds_of(other)) for _ in range(options.pairs)]
            speeds = [theirs / mine for mine, theirs in pairs]
            report["ratios"].append(
                {
                    "of": subject.name,
                    "to": other.name,
                    "median": statistics.median(speeds),
                    "low": min(speeds),
                    "high": max(speeds),
                    "seconds_of": statistics.median(mine for mine, _ in pairs),
                    "seconds_to": statistics.median(theirs for _, theirs in pairs),
                }
            )
    return report


def contestants(
    model: Transformer, ids_bt: Tensor, with_compiled: bool
) -> tuple[Contestant, list[Contestant], list[Contestant], list[str]]:
    """Ours, ours compiled where that is wanted, the others that are installed, and the names of those that are not."""
    inputs_bt, targets_bt = ids_bt[:, :-1].contiguous(), ids_bt[:, 1:].contiguous()

    def our_loss(called: Callable[..., Any]) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            total = called(inputs_bt, targets_bt)
            mean: Tensor = total.loss_sum / total.token_count
            return mean

        return loss

    others, absent = [], []
    for build in (transformers_model, litgpt_model):
        try:
            others.append(build(model, inputs_bt, targets_bt))
        except ModuleNotFoundError as error:
            absent.append(str(error.name))
    compiled = []
    if with_compiled:
        copied = copy.deepcopy(model)
        copied.compile_blocks()
        compiled.append(Contestant("zerohalf, compiled,", copied, our_loss(copied)))
    return Contestant("zerohalf", model, our_loss(model)), compiled, others, absent


def transformers_model(model: Transformer, inputs_bt: Tensor, targets_bt: Tensor) -> Contestant:
    """LlamaForCausalLM with scaled_dot_product_attention, not compiled. ModuleNotFoundError without transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.seq_len,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_base,
            tie_word_embeddings=config.tied,
            attn_implementation="sdpa",
        )
    ).to(dtype_of(model))
    weights = {f"model.{name}": weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    theirs.load_state_dict(weights | {"lm_head.weight": model.lm_head.weight})

    def loss() -> Tensor:
        out: Tensor = theirs(input_ids=inputs_bt, labels=inputs_bt, shift_labels=targets_bt, use_cache=False).loss
        return out

    return Contestant("transformers", theirs, loss)


def litgpt_model(model: Transformer, inputs_bt: Tensor, targets_bt: Tensor) -> Contestant:
    """litgpt's GPT and the loss of its own pretraining. ModuleNotFoundError without litgpt."""
    with contextlib.redirect_stdout(sys.stderr):
        from litgpt.config import Config
        from litgpt.model import GPT
        from litgpt.utils import chunked_cross_entropy

    config = model.config
    theirs = GPT(
        Config(
            block_size=config.seq_len,
            n_layer=config.n_layers,
            n_embd=config.d_model,
            vocab_size=config.vocab_size,
            padded_vocab_size=config.vocab_size,
            norm_class_name="RMSNorm",
            norm_eps=config.norm_eps,
            parallel_residual=False,
            n_head=config.n_heads,
            head_size=config.head_dim,
            n_query_groups=config.n_kv_heads,
            rotary_percentage=1.0,
            rope_base=int(config.rope_base),
            bias=False,
            mlp_class_name="LLaMAMLP",
            intermediate_size=config.d_ff,
        )
    ).to(dtype_of(model))
    theirs.load_state_dict(dict(litgpt_weights(model)))
    if config.tied:
        theirs.lm_head.weight = theirs.transformer.wte.weight

    def loss() -> Tensor:
        out: Tensor = chunked_cross_entropy(theirs(inputs_bt), targets_bt)
        return out

    return Contestant("litgpt", theirs, loss)


def litgpt_weights(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Our weights under litgpt's names, the three projections of attention as one matrix."""
    yield "lm_head.weight", model.lm_head.weight
    yield "transformer.wte.weight", model.embed_tokens.weight
    yield "transformer.ln_f.weight", model.norm.weight
    for number, block in enumerate(model.layers):
        prefix, weights = f"transformer.h.{number}", block.state_dict()
        qkv = [weights[f"self_attn.{part}_proj.weight"] for part in "qkv"]
        yield f"{prefix}.norm_1.weight", weights["input_layernorm.weight"]
        yield f"{prefix}.attn.qkv.weight", torch.cat(qkv)
        yield f"{prefix}.attn.proj.weight", weights["self_attn.o_proj.weight"]
        yield f"{prefix}.norm_2.weight", weights["post_attention_layernorm.weight"]
        yield f"{prefix}.mlp.fc_1.weight", weights["mlp.gate_proj.weight"]
        yield f"{prefix}.mlp.fc_2.weight", weights["mlp.up_proj.weight"]
        yield f"{prefix}.mlp.proj.weight", weights["mlp.down_proj.weight"]


def dtype_of(model: Transformer) -> torch.dtype:
    dtype: torch.dtype = model.embed_tokens.weight.dtype
    return dtype


def step(contestant: Contestant) -> float:
    """Forward and backward; the loss. Gradients of a step before are given up first, as training does."""
    contestant.module.zero_grad(set_to_none=True)
    loss = contestant.loss()
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def results(contestant: Contestant) -> tuple[float, float]:
    """The loss of a step and the norm of its gradients. Warms up, too."""
    step(contestant)
    loss = step(contestant)
    gradients = [weight.grad for weight in contestant.module.parameters() if weight.grad is not None]
    return loss, float(torch.nn.utils.get_total_norm([gradient.float() for gradient in gradients]))


def relative(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


def seconds_of(contestant: Contestant) -> float:
    started = time.perf_counter()
    step(contestant)
    return time.perf_counter() - started


def to_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['preset']}, {report['dtype']}, {report['batch_size']} × {report['tokens']} tokens, forward and"
        f" backward; {report['pairs']} pairs in turn, {report['threads']} threads, load {report['load']:.1f}"
    ]
    lines += [
        f"  {one['of']} has {one['median']:.3f} × the speed of {one['to']} (pairs {one['low']:.2f} to"
        f" {one['high']:.2f}; {one['seconds_of']:.3f} and {one['seconds_to']:.3f} s a step)"
        for one in report["ratios"]
    ]
    lines += [f"  not installed: {name}" for name in report["not_installed"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
