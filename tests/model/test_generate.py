from collections.abc import Sequence

import pytest
import torch

from model.generate import generate, probabilities
from model.transformer import Transformer

PROMPT = [5, 17, 3, 90]


def without_cache(model: Transformer, ids: Sequence[int], count: int, seed: int, **settings: object) -> list[int]:
    generator, ids = torch.Generator().manual_seed(seed), list(ids)
    for _ in range(count):
        with torch.no_grad():
            logits_v = model(torch.tensor([ids]))[0, -1]
        ids.append(int(torch.multinomial(probabilities(logits_v, **settings), 1, generator=generator)))
    return ids[-count:]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0, "top_k": None, "top_p": None},
        {"temperature": 1.0, "top_k": None, "top_p": None},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    ],
)
def test_the_cache_changes_nothing(tiny: Transformer, settings: dict[str, object]) -> None:
    cached = generate(tiny, PROMPT, 30, seed=3, **settings)
    assert cached == without_cache(tiny, PROMPT, 30, 3, **settings)


def test_the_seed_decides(tiny: Transformer) -> None:
    runs = [generate(tiny, PROMPT, 20, seed=seed, temperature=2.0) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_it_stops_before_the_stop_id(tiny: Transformer) -> None:
    free = generate(tiny, PROMPT, 20, temperature=0.0)
    stop_id = free[5]
    assert generate(tiny, PROMPT, 20, temperature=0.0, stop_id=stop_id) == free[: free.index(stop_id)]


def test_it_fills_the_window_exactly(tiny: Transformer) -> None:
    assert len(generate(tiny, PROMPT, 44)) == 44
    with pytest.raises(ValueError, match=r"4 prompt tokens \+ 45 new ones exceed seq_len = 48: ask for at most 44"):
        generate(tiny, PROMPT, 45)


def test_it_runs_in_bf16(tiny: Transformer) -> None:
    assert len(generate(tiny.bfloat16(), PROMPT, 5, temperature=0.0)) == 5


def test_probabilities_by_hand() -> None:
    logits_v = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()

    def chances(temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> list[float]:
        return probabilities(logits_v, temperature=temperature, top_k=top_k, top_p=top_p).tolist()

    assert chances() == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert chances(temperature=0.0) == [0, 1, 0, 0]
    assert chances(temperature=1e-6) == [0, 1, 0, 0]
    assert chances(temperature=0.5) == pytest.approx([1 / 30, 16 / 30, 4 / 30, 9 / 30])
    assert chances(top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert chances(top_k=99) == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert chances(top_p=0.6) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert chances(top_p=0.75) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9])
    assert chances(top_p=1.0) == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert chances(top_p=1e-6) == [0, 1, 0, 0]
    assert chances(top_k=3, top_p=0.5) == pytest.approx([0, 4 / 7, 0, 3 / 7])


def test_logits_of_a_diverged_model_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        probabilities(torch.tensor([0.0, float("nan")]), temperature=0.0, top_k=None, top_p=None)


def test_equal_logits_keep_exactly_k() -> None:
    assert int(probabilities(torch.zeros(50), temperature=1.0, top_k=7, top_p=None).count_nonzero()) == 7


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"ids": []}, "the prompt has no tokens"),
        ({"ids": [97]}, "id 97, outside the vocabulary of 97"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
    ],
)
def test_bad_requests_are_refused(tiny: Transformer, settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate(tiny, **{"ids": PROMPT, "max_new_tokens": 3, **settings})
