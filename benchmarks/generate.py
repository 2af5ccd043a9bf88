"""How fast text is generated, as a ratio to transformers' `generate` with the same weights; what a late token costs.

Both continue the same prompts greedily, in turn, in one process. In fp32 their ids must be equal; in bf16 two correct
programs may part where logits tie, so there the logits of the prompts' last tokens are compared.

The cost of a late token: one step at 64 and one at 960 tokens, in turn, on caches of one size that are cut back each
time. Attention's own share is the time spent in its kernels during that step; what is left should be equal.

    python benchmarks/generate.py
    python benchmarks/generate.py --preset 0.5b --new-tokens 16 --repetitions 3 --dtypes bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, whose tokenizer.py is no package

from model.accounting import kv_cache_bytes_per_token
from model.cache import KVCache
from model.config import PRESETS
from model.generate import Sampling, generate
from model.kernels import Kernel
from model.transformer import Transformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EARLY, LATE = 64, 960  # tokens in the cache when a step is timed
WARM_UP = 3
BF16_TOLERANCE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="mini", choices=PRESETS)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60, help="timed steps at each length of the cache")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = measure(options)
    print(json.dumps(report, indent=2) if options.json else to_text(report))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = PRESETS[options.preset]
    speeds, costs = [], []
    for name in options.dtypes:
        ours = Transformer(config, torch.Generator().manual_seed(0)).to(DTYPES[name]).eval()
        theirs = same_in_transformers(ours)
        for batch_size in options.batch_sizes:
            speeds.append({"dtype": name, "batch_size": batch_size, **compare(ours, theirs, batch_size, options)})
            costs.append({"dtype": name, "batch_size": batch_size, **late_cost(ours, batch_size, options.steps)})
    return {
        "preset": options.preset,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "repetitions": options.repetitions,
        "steps": options.steps,
        "speed": speeds,
        "late_cost": costs,
        "threads": options.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def same_in_transformers(ours: Transformer) -> transformers.LlamaForCausalLM:
    """LlamaForCausalLM of the same sizes, holding the same weights."""
    config = ours.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.d_ff,
            max_position_embeddings=config.seq_len,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    weights = ours.state_dict()
    theirs.load_state_dict({n if n.startswith("lm_head") else f"model.{n}": weight for n, weight in weights.items()})
    return theirs.to(ours.embed_tokens.weight.dtype).eval()


def compare(
    ours: Transformer, theirs: transformers.LlamaForCausalLM, batch_size: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Tokens a second of both; the program ends where they do not give the same."""
    shape = batch_size, options.prompt_tokens
    prompts_bt = torch.randint(ours.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    prompts, seen_bt = prompts_bt.tolist(), torch.ones_like(prompts_bt)

    def our_ids() -> list[list[int]]:
        return generate(ours, prompts, options.new_tokens, Sampling(temperature=0.0))

    def their_ids() -> list[list[int]]:
        out_bt = theirs.generate(prompts_bt, attention_mask=seen_bt, max_new_tokens=options.new_tokens, do_sample=False)
        return out_bt[:, options.prompt_tokens :].tolist()

    mine, other = our_ids(), their_ids()  # which warms both up
    same = sum(a == b for row, twin in zip(mine, other, strict=True) for a, b in zip(row, twin, strict=True))
    with torch.inference_mode():
        our_btv, their_btv = ours(prompts_bt)[:, -1], theirs(prompts_bt).logits[:, -1]
    difference = float((our_btv - their_btv).abs().max() / their_btv.abs().max())
    if ours.embed_tokens.weight.dtype == torch.float32 and mine != other:
        sys.exit("the two generated different ids: nothing to compare")
    if not difference < BF16_TOLERANCE:
        sys.exit(f"the logits of the two differ by {difference:.2g} of the largest: nothing to compare")
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(options.repetitions):
        seconds["ours"].append(seconds_of(our_ids))
        seconds["theirs"].append(seconds_of(their_ids))
    tokens = batch_size * options.new_tokens
    ours_rate, theirs_rate = (tokens / statistics.median(times) for times in seconds.values())
    return {
        "ratio": statistics.median(b / a for a, b in zip(*seconds.values(), strict=True)),
        "ratios_of_repetitions": [b / a for a, b in zip(*seconds.values(), strict=True)],
        "tokens_per_second": ours_rate,
        "transformers_tokens_per_second": theirs_rate,
        "equal_ids": same / tokens,
        "relative_difference_of_logits": difference,
    }


@torch.inference_mode()
def late_cost(model: Transformer, batch_size: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step at EARLY and at LATE tokens, attention's share of each, the ratio of what is left."""
    config, dtype = model.config, model.embed_tokens.weight.dtype
    caches = {n: KVCache(config, batch_size=batch_size, max_tokens=LATE + 1, dtype=dtype) for n in (EARLY, LATE)}
    for length, cache in caches.items():
        for held in cache.held:
            held.normal_()
        cache.advance(length)
    ids_b1 = torch.ones(batch_size, 1, dtype=torch.int64)
    attending: list[float] = []  # seconds of each call

    def begins(kernel: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        attending.append(-time.perf_counter())

    def ends(kernel: torch.nn.Module, inputs: tuple[Any, ...], out: Tensor) -> None:
        attending[-1] += time.perf_counter()

    def step(length: int) -> None:
        model.lm_head(model.hidden(ids_b1, caches[length])[:, 0]).argmax(dim=-1)

    whole: dict[int, list[float]] = {EARLY: [], LATE: []}
    share: dict[int, list[float]] = {EARLY: [], LATE: []}
    kernels = [module for module in model.modules() if isinstance(module, Kernel)]
    hooks = [kernel.register_forward_pre_hook(begins) for kernel in kernels]
    hooks += [kernel.register_forward_hook(ends) for kernel in kernels]
    try:
        for _ in range(WARM_UP + steps):
            for length in (LATE, EARLY):
                attending.clear()
                started = time.perf_counter()
                step(length)
                whole[length].append(time.perf_counter() - started)
                share[length].append(sum(attending))
                caches[length].cut([length] * batch_size)
    finally:
        for hook in hooks:
            hook.remove()
    step_ms, attention_ms = (
        {n: 1e3 * statistics.median(series[WARM_UP:]) for n, series in times.items()} for times in (whole, share)
    )
    return {
        "step_milliseconds": step_ms,
        "attention_milliseconds": attention_ms,
        "ratio": step_ms[LATE] / step_ms[EARLY],
        "ratio_beyond_attention": (step_ms[LATE] - attention_ms[LATE]) / (step_ms[EARLY] - attention_ms[EARLY]),
        "cache_bytes": caches[LATE].nbytes,
        "formula_bytes": batch_size * (LATE + 1) * kv_cache_bytes_per_token(config, dtype.itemsize),
    }


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def to_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['preset']}, {report['prompt_tokens']} prompt tokens and {report['new_tokens']} new ones a row,"
        f" greedy; medians of {report['repetitions']} repetitions of both, in turn; {report['threads']} threads",
        f"{'dtype':10} {'rows':>4} {'tokens/s':>9} {'transformers':>12} {'ratio':>6}   repetitions   equal ids",
    ]
    for one in report["speed"]:
        low, high = min(one["ratios_of_repetitions"]), max(one["ratios_of_repetitions"])
        lines.append(
            f"{one['dtype']:10} {one['batch_size']:4} {one['tokens_per_second']:9.1f}"
            f" {one['transformers_tokens_per_second']:12.1f} {one['ratio']:6.2f}   {low:.2f} to {high:.2f}"
            f"  {one['equal_ids']:8.1%}"
        )
    lines += [
        "",
        f"one step at {EARLY} and at {LATE} tokens in the cache, ms (of it attention); ratio of the rest, of the whole;"
        f" medians of {report['steps']}",
    ]
    for one in report["late_cost"]:
        parts = (f"{one['step_milliseconds'][n]:7.2f} ({one['attention_milliseconds'][n]:.2f})" for n in (EARLY, LATE))
        lines.append(
            f"{one['dtype']:10} {one['batch_size']:4} {' '.join(parts)}  {one['ratio_beyond_attention']:.2f}"
            f" {one['ratio']:.2f}   cache {one['cache_bytes']:,} B, by the formula {one['formula_bytes']:,} B"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
