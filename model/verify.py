"""The acceptance checks of a freshly initialised model. They run on a CPU in seconds and need no data.

Each check says what it expected and by which formula, what it measured, and, when it fails, the likely causes.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.accounting import FP32_BYTES, kv_cache_bytes_per_token, parameter_count
from model.cache import KVCache
from model.config import PRESETS, ModelConfig
from model.transformer import Transformer

PUBLISHED_PARAMETERS = {"0.5b": 502_193_664, "mini": 35_926_528, "classic": 16_803_840, "gpt2": 124_439_808}

LOSS_TOLERANCE = 0.15
LOSS_TOKENS = 1024
PAST_TOLERANCE = 1e-5
LATER_CHANGE = 1e-3
CACHE_TOLERANCE = 1e-4

CAUSES = {
    "head's weight too many": "embedding and output are not tied",
    "a surplus": "a bias in some linear layer",
    "a deficit": "a layer is missing or too narrow",
    "attention fails": "query and key/value heads swapped, or key/value heads not expanded to the query heads",
    "loss too low": "targets not shifted: the model is asked to predict its own input",
    "loss too high": "initial standard deviation too large, or norm statistics not in fp32",
    "the past changes": "the causal mask is missing or off by one",
    "later tokens do not change": "attention does not look back, or its output is lost",
    "tokens beyond the window change": "the sliding window is not applied, or is too wide",
    "cache differs": "a prefill with a cache is not causal, positions restart in each chunk, or the cache is misplaced",
    "cache too large": "key/value heads are stored once for every query head",
}


@dataclass(frozen=True)
class Check:
    """The outcome of one check; `likely_causes` is empty when it passed."""

    name: str
    passed: bool
    expected: str
    formula: str
    measured: str
    likely_causes: tuple[str, ...] = ()
    seconds: float = 0.0


CHECK_NAMES = ("parameters", "shapes", "initial loss", "causality", "cache")


def verify(
    config: ModelConfig, *, seed: int = 0, build: Callable[[ModelConfig, torch.Generator], Transformer] = Transformer
) -> Iterator[Check]:
    """Build the model in fp32 on the CPU and yield the checks of CHECK_NAMES, each as soon as it is done.

    The first one's seconds include the building. A model whose forward pass fails is not checked further.
    """
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    model = build(config, generator).eval()
    for check in (check_parameters, check_shapes, _check_loss_on_random_targets, check_causality, check_cache):
        with torch.no_grad():
            outcome = check(model, generator)
        now = time.perf_counter()
        yield replace(outcome, seconds=now - started)
        if check is check_shapes and not outcome.passed:
            return
        started = now


def check_parameters(model: Transformer, generator: torch.Generator | None = None) -> Check:
    """Arithmetic, the built module and, for a preset, the published table all give one number."""
    config = model.config
    by_arithmetic = parameter_count(config)
    published = {PUBLISHED_PARAMETERS[name] for name, preset in PRESETS.items() if preset == config}
    built = sum(parameter.numel() for parameter in model.parameters())
    surplus = built - by_arithmetic
    causes = []
    if surplus == config.vocab_size * config.d_model:
        causes.append("head's weight too many")
    elif surplus:
        causes.append("a surplus" if surplus > 0 else "a deficit")
    return Check(
        "parameters",
        passed=not surplus and published <= {by_arithmetic},
        expected=f"{by_arithmetic:,}" + "".join(f", published {count:,}" for count in published),
        formula="embedding + n_layers · (attention + feed-forward + two norms) + last norm [+ output if untied]"
        if config.norm_place == "pre"
        else "embedding + n_layers · (attention + feed-forward + two norms) [+ output if untied]",
        measured=f"{built:,} in the built module" + (f" ({surplus:+,})" if surplus else ""),
        likely_causes=_causes(causes),
    )


def check_shapes(model: Transformer, generator: torch.Generator) -> Check:
    """(2, 128) ids in, (2, 128, vocab_size) logits out."""
    tokens = min(128, model.config.seq_len)
    expected = (2, tokens, model.config.vocab_size)
    try:
        measured = str(tuple(model(_random_ids(model.config, (2, tokens), generator)).shape))
    except RuntimeError as error:
        measured = f"the forward pass failed: {str(error).splitlines()[0]}"
    passed = measured == str(expected)
    return Check(
        "shapes",
        passed=passed,
        expected=str(expected),
        formula="(batch, tokens, vocab_size)",
        measured=measured,
        likely_causes=_causes([] if passed else ["attention fails"]),
    )


def check_initial_loss(model: Transformer, ids_bt: Tensor, targets_bt: Tensor) -> Check:
    """The mean loss before training is that of a model that knows nothing, within 0.15.

    The last norm, of either kind, makes each hidden dimension unit-variance, so logits have variance init_std² ·
    d_model, and the expected log of a sum of exponentials of normals adds half of that to ln(vocab_size). One logit is
    no such normal where embedding and output are tied: that of the token which was read, see `_own_logits`.
    """
    config = model.config
    extra = config.init_std**2 * config.d_model / 2
    formula = f"ln({config.vocab_size}) + init_std² · d_model / 2 = {math.log(config.vocab_size):.4f} + {extra:.4f}"
    expected = math.log(config.vocab_size) + extra
    if config.tied and (config.norm_place != "pre" or config.positions == "sinusoidal"):
        others = torch.tensor(math.log(max(1, config.vocab_size - 1)) + extra)
        own = float(torch.logaddexp(others, _own_logits(model, ids_bt)).mean()) - expected
        formula += (
            f", and {own:.4f} by the logit of the token that was read, init_std · d_model · cos(hidden, embedding)"
        )
        expected += own
    loss = model(ids_bt, targets_bt)
    measured = float(loss.cross_entropy_sum / loss.token_count)
    passed = abs(measured - expected) <= LOSS_TOLERANCE
    return Check(
        "initial loss",
        passed=passed,
        expected=f"{expected:.4f} ± {LOSS_TOLERANCE}",
        formula=formula,
        measured=f"{measured:.4f} ({measured - expected:+.4f}) over {int(loss.token_count):,} tokens",
        likely_causes=_causes([] if passed else ["loss too low" if measured < expected else "loss too high"]),
    )


def _own_logits(model: Transformer, ids_bt: Tensor) -> Tensor:
    """(b, t): init_std · d_model · cos(hidden state, embedding), the logit of each token's own id in a tied model.

    Between pre-norms the outputs of many sublayers drown the embedding. Behind post-norms, and where it enters as large
    as the waves of its position, it is still most of what the head reads. Of the model only the angle is taken, so
    neither a wrong deviation nor wrong statistics of a norm are excused.
    """
    cosine_bt = torch.cosine_similarity(model.hidden(ids_bt), model.embed_tokens(ids_bt), dim=-1)
    return model.config.init_std * model.config.d_model * cosine_bt


def check_causality(model: Transformer, generator: torch.Generator) -> Check:
    """Changing every token after t leaves outputs 0..t; changing token t + 1 alone moves every output from it on.

    The second half guards the first, which a model that ignores its context passes too. With a sliding window the
    outputs that must move are those whose window holds the token, and what is farther than all layers' windows together
    must not.
    """
    config, tokens = model.config, min(64, model.config.seq_len)
    t = tokens // 2 - 1
    ids_t = _random_ids(config, (tokens,), generator)
    other_t = (ids_t + 1) % config.vocab_size
    all_later_t, one_later_t = ids_t.clone(), ids_t.clone()
    all_later_t[t + 1 :], one_later_t[t + 1] = other_t[t + 1 :], other_t[t + 1]
    base_tv, all_tv, one_tv = model(torch.stack((ids_t, all_later_t, one_later_t)))
    past = float((all_tv - base_tv)[: t + 1].abs().max())
    moved_t = (one_tv - base_tv)[t + 1 :].abs().amax(dim=-1)
    window = tokens if config.sliding_window is None else config.sliding_window
    later, beyond_t = float(moved_t[:window].min()), moved_t[config.n_layers * (window - 1) + 1 :]
    beyond = float(beyond_t.max()) if len(beyond_t) else 0.0
    causes = []
    if not past <= PAST_TOLERANCE:
        causes.append("the past changes")
    if not later > LATER_CHANGE:
        causes.append("later tokens do not change")
    if not beyond <= PAST_TOLERANCE:
        causes.append("tokens beyond the window change")
    first = "each later output" if window >= tokens else f"each of the next {min(window, len(moved_t))}"
    return Check(
        "causality",
        passed=not causes,
        expected=f"outputs 0..{t} within {PAST_TOLERANCE:g}, {first} changed by more than {LATER_CHANGE:g}"
        + (f", the last {len(beyond_t)} within {PAST_TOLERANCE:g}" if len(beyond_t) else ""),
        formula=f"max |Δ logits| when all tokens after {t} change; min over outputs after {t} when token {t + 1} does",
        measured=f"past {past:.2e}, later {later:.2e}" + (f", beyond {beyond:.2e}" if len(beyond_t) else ""),
        likely_causes=_causes(causes),
    )


def check_cache(model: Transformer, generator: torch.Generator) -> Check:
    """Logits with a cache equal the full pass, read in chunks of any size, in rows of any lengths; kv heads only."""
    config = model.config
    tokens = min(20, config.seq_len)
    prompt = tokens - tokens // 5
    ids_bt = _random_ids(config, (2, tokens), generator)
    full_btv = model(ids_bt)
    differences, measured_bytes = [_ragged_difference(model, ids_bt, full_btv, min(prompt, tokens - 1))], 0
    for chunks in ([prompt], [prompt // 3, 1, prompt - prompt // 3 - 1]):
        cache = KVCache(config, batch_size=2, max_tokens=tokens)
        logits_btv = _read_in_chunks(model, ids_bt, [*chunks, *[1] * (tokens - prompt)], cache)
        differences.append((logits_btv - full_btv).abs().max())
        measured_bytes = cache.nbytes
    worst = float(torch.stack(differences).max())  # NaN if any is
    expected_bytes = kv_cache_bytes_per_token(config, FP32_BYTES) * tokens * 2
    is_mla = config.attention == "mla"
    held = "n_layers · (mla_latent + mla_rope_dim)" if is_mla else "2 · n_layers · n_kv_heads · head_dim"
    causes = []
    if not worst <= CACHE_TOLERANCE:
        causes.append("cache differs")
    if measured_bytes != expected_bytes:
        causes.append("cache too large")
    return Check(
        "cache",
        passed=not causes,
        expected=f"logits of the full pass within {CACHE_TOLERANCE:g}; {expected_bytes:,} bytes",
        formula=f"max |Δ logits|, {prompt} of {tokens} tokens in 1 and in 3 chunks, the rest one by one, and with"
        " a prompt a third as long beside it;"
        f" {held} · 4 B (fp32) · tokens · sequences",
        measured=f"{worst:.2e}; {measured_bytes:,} bytes",
        likely_causes=_causes(causes),
    )


def _check_loss_on_random_targets(model: Transformer, generator: torch.Generator) -> Check:
    tokens = min(256, model.config.seq_len)
    shape = (math.ceil(LOSS_TOKENS / tokens), tokens)
    return check_initial_loss(
        model, _random_ids(model.config, shape, generator), _random_ids(model.config, shape, generator)
    )


def _read_in_chunks(model: Transformer, ids_bt: Tensor, chunks: Sequence[int], cache: KVCache) -> Tensor:
    parts = torch.split(ids_bt, [size for size in chunks if size], dim=1)
    return torch.cat([model(part_bt, cache=cache) for part_bt in parts], dim=1)


def _ragged_difference(model: Transformer, ids_bt: Tensor, full_btv: Tensor, prompt: int) -> Tensor:
    """Of the logits, when the first row goes on from `prompt` tokens and the second from a third of them."""
    tokens, lengths, differences = ids_bt.shape[1], [prompt, prompt // 3], []
    cache = KVCache(model.config, batch_size=2, max_tokens=tokens)
    model(ids_bt[:, :prompt], cache=cache)  # to the second row, what stands past its length is padding
    cache.cut(lengths)
    one_by_one = (tokens - prompt) // 2
    for chunk in [tokens - prompt - one_by_one, *[1] * one_by_one]:
        columns = [slice(length, length + chunk) for length in lengths]
        ids, expected = (torch.stack([x[row, columns[row]] for row in (0, 1)]) for x in (ids_bt, full_btv))
        differences.append((model(ids, cache=cache) - expected).abs().max())
        lengths = [length + chunk for length in lengths]
    return torch.stack(differences).max()


def _random_ids(config: ModelConfig, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(config.vocab_size, shape, generator=generator)


def _causes(symptoms: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{symptom}: {CAUSES[symptom]}" for symptom in symptoms)
