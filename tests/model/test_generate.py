from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model import generate as sampler
from model.cache import KVCache
from model.config import ModelConfig
from model.generate import Sampling
from model.transformer import Transformer
from tests.model.conftest import seeded

PROMPT = [5, 17, 3, 90]
RAGGED = [PROMPT, [8], [*range(40, 60)], [33, 2]]


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    **rest: Any,
) -> list[list[int]]:
    return sampler.generate(model, prompts, max_new_tokens, Sampling(temperature, top_k, top_p), **rest)


def probabilities(
    logits_bv: Tensor, *, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    return sampler.probabilities(logits_bv, Sampling(temperature, top_k, top_p))


def without_cache(
    model: Transformer, ids: Sequence[int], count: int, *, seed: int = 0, temperature: float, **narrowing: object
) -> list[int]:
    """The definition: one prompt, all of it read anew for each token, torch's own draw."""
    generator, ids = seeded(seed), list(ids)
    for _ in range(count):
        with torch.no_grad():
            logits_v = model(torch.tensor([ids]))[0, -1]
        if temperature == 0:
            ids.append(int(logits_v.argmax()))
        else:
            chances_v = probabilities(logits_v, temperature=temperature, **narrowing)
            ids.append(int(torch.multinomial(chances_v, 1, generator=generator)))
    return ids[-count:]


SETTINGS = [
    {"temperature": 0.0, "top_k": None, "top_p": None},
    {"temperature": 1.0, "top_k": None, "top_p": None},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_cache_changes_nothing(tiny: Transformer, settings: dict[str, object]) -> None:
    expected = without_cache(tiny, PROMPT, 30, seed=3, **settings)
    assert generate(tiny, [PROMPT], 30, seed=3, **settings) == [expected]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("chunk_tokens", [1, 12, 28, 2048])
def test_rows_of_a_batch_are_what_they_are_alone(
    tiny: Transformer, settings: dict[str, object], chunk_tokens: int
) -> None:
    """Prompts of 1 to 20 tokens, read 1, 3, 7 or all tokens a row at a time."""
    expected = [without_cache(tiny, ids, 12, seed=3, **settings) for ids in RAGGED]
    assert generate(tiny, RAGGED, 12, seed=3, chunk_tokens=chunk_tokens, **settings) == expected
    assert generate(tiny, RAGGED[::-1][:2], 12, seed=3, chunk_tokens=chunk_tokens, **settings) == expected[::-1][:2]


def test_rows_that_stop_leave_the_others_alone(tiny: Transformer) -> None:
    free = generate(tiny, RAGGED, 20, temperature=1.0, seed=5)
    stop_id = free[1][4]
    cut = [ids[: ids.index(stop_id)] if stop_id in ids else ids for ids in free]
    assert len(cut[1]) <= 4
    assert max(map(len, cut)) == 20
    assert generate(tiny, RAGGED, 20, temperature=1.0, seed=5, stop_id=stop_id) == cut


def test_it_goes_on_until_the_last_row_has_stopped(tiny: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(seed: int) -> dict[int, list[int]]:
        """Ids that every row draws, and when, but never all rows at once."""
        free = generate(tiny, RAGGED, 20, temperature=1.0, seed=seed)
        at_once = {one for one, *others in zip(*free, strict=True) if set(others) == {one}}
        return {one: [ids.index(one) for ids in free] for one in set.intersection(*map(set, free)) - at_once}

    seed = next(seed for seed in range(1000) if stops(seed))
    stop_id, lengths = stops(seed).popitem()
    passes, original = [], Transformer.hidden
    monkeypatch.setattr(Transformer, "hidden", lambda *args: passes.append(1) or original(*args))
    produced = generate(tiny, RAGGED, 20, temperature=1.0, seed=seed, stop_id=stop_id)
    assert [len(ids) for ids in produced] == lengths
    assert len(passes) == 1 + max(lengths)


def test_ids_that_are_not_known_are_never_drawn(tiny: Transformer) -> None:
    for temperature in (0.0, 3.0):
        assert max(map(max, generate(tiny, RAGGED, 28, temperature=temperature, known_ids=60))) < 60


def test_the_seed_decides(tiny: Transformer) -> None:
    runs = [generate(tiny, [PROMPT], 20, seed=seed, temperature=2.0) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_more_tokens_begin_with_fewer(tiny: Transformer) -> None:
    few, many = (generate(tiny, RAGGED, count, seed=4, temperature=2.0) for count in (5, 25))
    assert [ids[:5] for ids in many] == few


def test_draws_follow_the_probabilities(tiny_config: ModelConfig) -> None:
    """One token after one prompt, 400 seeds: every id about as often as its probability says."""
    model = Transformer(tiny_config, seeded(0))
    with torch.no_grad():
        chances_v = probabilities(model(torch.tensor([PROMPT]))[0, -1], temperature=0.2, top_k=5, top_p=None)
    drawn = [generate(model, [PROMPT], 1, seed=seed, temperature=0.2, top_k=5)[0][0] for seed in range(400)]
    counts_v = torch.bincount(torch.tensor(drawn), minlength=97)
    assert set(counts_v.nonzero().flatten().tolist()) == set(chances_v.nonzero().flatten().tolist())
    assert float((counts_v / 400 - chances_v).abs().max()) < 0.1


def test_it_fills_the_window_exactly(tiny: Transformer) -> None:
    assert [len(ids) for ids in generate(tiny, [PROMPT, [1]], 44)] == [44, 44]
    with pytest.raises(ValueError, match=r"4 prompt tokens \+ 45 new ones exceed seq_len = 48: ask for at most 44"):
        generate(tiny, [PROMPT], 45)


def test_it_runs_in_bf16(tiny: Transformer) -> None:
    tiny.bfloat16()
    alone = generate(tiny, [PROMPT], 5, temperature=0.0)[0]
    assert len(alone) == 5
    assert generate(tiny, RAGGED, 5, temperature=0.0)[0] == alone


def test_a_long_prompt_is_never_read_whole(tiny: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    widths, heads = [], []
    original, head = Transformer.hidden, tiny.lm_head.forward
    monkeypatch.setattr(
        Transformer, "hidden", lambda self, ids_bt, cache: widths.append(ids_bt.shape) or original(self, ids_bt, cache)
    )
    monkeypatch.setattr(tiny.lm_head, "forward", lambda x: heads.append(x.shape) or head(x))
    generate(tiny, RAGGED, 3, chunk_tokens=32)
    assert widths == [(4, 8), (4, 8), (4, 4), (4, 1), (4, 1)]
    assert heads == [(4, 32)] * 3


def test_the_cache_is_allocated_once(tiny: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer appends into the same memory from the first token to the last."""
    places, original = set(), KVCache.append

    def append(self: KVCache, layer: int, k_bhtk: Tensor, v_bhtk: Tensor) -> tuple[Tensor, Tensor]:
        views = original(self, layer, k_bhtk, v_bhtk)
        places.add((layer, views[0].data_ptr(), views[1].data_ptr()))
        return views

    monkeypatch.setattr(KVCache, "append", append)
    generate(tiny, RAGGED, 20)
    assert len(places) == tiny.config.n_layers


Sdpa = Callable[..., Tensor]


def ragged_rows_see_all_slots(original: Sdpa) -> Sdpa:
    return lambda q, k, v, *, attn_mask, **rest: original(q, k, v, attn_mask=None, **rest)


def prefill_not_causal(original: Sdpa) -> Sdpa:
    return lambda q, k, v, *, attn_mask, is_causal, **rest: original(
        q, k, v, attn_mask=None if attn_mask is None else torch.ones_like(attn_mask), is_causal=False, **rest
    )


@pytest.mark.parametrize("mutant", [ragged_rows_see_all_slots, prefill_not_causal])
def test_a_batch_catches(tiny: Transformer, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[Sdpa], Sdpa]) -> None:
    expected = [without_cache(tiny, ids, 12, temperature=0.0) for ids in RAGGED]
    monkeypatch.setattr(F, "scaled_dot_product_attention", mutant(F.scaled_dot_product_attention))
    assert generate(tiny, RAGGED, 12, temperature=0.0) != expected


def test_greedy_ids_are_those_of_transformers(tiny: Transformer) -> None:
    """The same weights in LlamaForCausalLM, whose batch is padded on the left where ours has rows of their own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=80,
        max_position_embeddings=48,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    theirs = LlamaForCausalLM(config).eval()
    weights = tiny.state_dict()
    theirs.load_state_dict({n if n.startswith("lm_head") else f"model.{n}": weight for n, weight in weights.items()})
    longest = max(map(len, RAGGED))
    padded_bt = torch.tensor([[0] * (longest - len(ids)) + ids for ids in RAGGED])
    mask_bt = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in RAGGED])
    expected_bt = theirs.generate(padded_bt, attention_mask=mask_bt, max_new_tokens=24, do_sample=False)
    assert generate(tiny, RAGGED, 24, temperature=0.0) == expected_bt[:, longest:].tolist()


def test_probabilities_by_hand() -> None:
    logits_v = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()

    def chances(temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> list[float]:
        rows_bv = torch.stack((torch.zeros(4), logits_v))
        alone_v = probabilities(logits_v, temperature=temperature, top_k=top_k, top_p=top_p)
        assert torch.equal(probabilities(rows_bv, temperature=temperature, top_k=top_k, top_p=top_p)[1], alone_v)
        return alone_v.tolist()

    assert chances() == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert chances(temperature=1e-6) == [0, 1, 0, 0]
    assert chances(temperature=0.5) == pytest.approx([1 / 30, 16 / 30, 4 / 30, 9 / 30])
    assert chances(top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert chances(top_k=99) == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert chances(top_p=0.6) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert chances(top_p=0.75) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9])
    assert chances(top_p=1.0) == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert chances(top_p=1e-6) == [0, 1, 0, 0]
    assert chances(top_k=3, top_p=0.5) == pytest.approx([0, 4 / 7, 0, 3 / 7])


def test_equal_logits_keep_exactly_k() -> None:
    assert int(probabilities(torch.zeros(50), temperature=1.0, top_k=7, top_p=None).count_nonzero()) == 7


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_a_diverged_model_are_refused(tiny: Transformer, damage: float, temperature: float) -> None:
    with torch.no_grad():
        tiny.norm.weight[3] = damage
    with pytest.raises(ValueError, match="not finite"):
        generate(tiny, RAGGED, 3, temperature=temperature)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"prompts": []}, "no prompt"),
        ({"prompts": [[]]}, "the prompt has no tokens"),
        ({"prompts": [PROMPT, []]}, "prompt 2 has no tokens"),
        ({"prompts": [[97]]}, "id 97, outside the vocabulary of 97"),
        ({"prompts": [[1], [-1]]}, "prompt 2 holds id -1, outside the vocabulary of 97"),
        ({"prompts": [[1], [2] * 46]}, "prompt 2: 46 prompt tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"chunk_tokens": 0}, "chunk_tokens = 0"),
    ],
)
def test_bad_requests_are_refused(tiny: Transformer, settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate(tiny, **{"prompts": [PROMPT], "max_new_tokens": 3, **settings})


# ---------------------------------------------------------------- against transformers' own


def kept_and_chances(scores_bv: Tensor) -> tuple[Tensor, Tensor]:
    return scores_bv > -torch.inf, scores_bv.softmax(-1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
@pytest.mark.parametrize("top_k, top_p, min_p", [
    (None, None, None), (5, None, None), (None, 0.6, None), (None, None, 0.2), (7, 0.8, None), (9, None, 0.1),
    (None, 0.9, 0.3), (12, 0.95, 0.05), (1, 0.01, 1.0),
])  # fmt: skip
def test_warpers_are_those_of_transformers(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    """Each of theirs, in the order in which their generate applies them."""
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits_bv = 3 * torch.randn(40, 30, generator=seeded(int(10 * temperature)))
    scores_bv = TemperatureLogitsWarper(temperature)(None, logits_bv)
    for warper, setting in ((TopKLogitsWarper, top_k), (TopPLogitsWarper, top_p), (MinPLogitsWarper, min_p)):
        scores_bv = scores_bv if setting is None else warper(setting)(None, scores_bv)
    kept_bv, chances_bv = kept_and_chances(scores_bv)
    ours_bv = sampler.probabilities(logits_bv, Sampling(temperature, top_k, top_p, min_p))
    assert torch.equal(ours_bv > 0, kept_bv)
    assert torch.allclose(ours_bv, chances_bv, atol=1e-6)


def test_repetition_is_penalized_as_in_transformers(tiny: Transformer) -> None:
    """On any logits; and of a whole text, greedily, by their generate."""
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits_bv = torch.randn(4, 30, generator=seeded(1))
    ids_bt = torch.randint(30, (4, 12), generator=seeded(2))
    seen_bv = torch.zeros(4, 30, dtype=torch.bool).scatter_(1, ids_bt, True)
    for penalty in (0.5, 1.3, 4.0):
        theirs_bv = RepetitionPenaltyLogitsProcessor(penalty)(ids_bt, logits_bv)
        assert torch.equal(sampler.penalized(logits_bv, seen_bv, penalty), theirs_bv)

    processor = RepetitionPenaltyLogitsProcessor(1.7)
    ids = list(PROMPT)
    for _ in range(25):
        with torch.no_grad():
            logits_bv = tiny(torch.tensor([ids]))[:, -1]
        ids.append(int(processor(torch.tensor([ids]), logits_bv).argmax()))
    ours = sampler.generate(tiny, RAGGED, 25, Sampling(temperature=0.0, repetition_penalty=1.7))
    assert ours[0] == ids[len(PROMPT) :]
    assert ours[0] != sampler.generate(tiny, RAGGED, 25, Sampling(temperature=0.0))[0]


def test_steps_are_what_generate_gives(tiny: Transformer) -> None:
    steps = list(sampler.generate_steps(tiny, RAGGED, 9, Sampling(), seed=2))
    assert torch.stack(steps, 1).tolist() == generate(tiny, RAGGED, 9, seed=2)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"min_p": -0.1}, "min_p = -0.1"),
        ({"min_p": 1.1}, "min_p = 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty = nan"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sampling(**settings)
