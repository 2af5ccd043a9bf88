"""Text from a run's own checkpoint: a batch of prompts, each continued as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.__main__ import main
from pretrain.config import RecipeError
from pretrain.generate import BATCH_SIZE, continue_prompts
from tests.pretrain.test_resume import train_case
from tests.ranks import run_ranks

PROMPTS = ["a", "", "It is a truth universally acknowledged"]
SETTINGS: dict[str, Any] = {"max_new_tokens": 40, "top_k": None, "top_p": None, "seed": 1}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a model this small, threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run(tiny_recipe: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with three times the tokenizer's ids, three steps old; in fp32, where a batch changes no draw."""
    path = tmp_path_factory.mktemp("generate") / "run"
    changes: dict[str, dict[str, Any]] = {
        "model": {"vocab_size": 3000},
        "precision": {"compute": "fp32"},
        "schedule": {"max_steps": 3},
        "evaluation": {"every_steps": 9},
    }
    assert run_ranks(1, train_case, tiny_recipe(**changes), path) == ["finished"]
    return path


def test_ids_that_the_tokenizer_lacks_are_never_drawn(run: Path) -> None:
    """However little the model has learnt."""
    texts = [text for _, text in continue_prompts(run, PROMPTS, temperature=5.0, **SETTINGS)]
    assert all(texts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_does_not_depend_on_the_other_prompts(run: Path, temperature: float) -> None:
    prompts = PROMPTS * (BATCH_SIZE // len(PROMPTS) + 1)
    alone = dict(pair for one in PROMPTS for pair in continue_prompts(run, [one], temperature=temperature, **SETTINGS))
    together = list(continue_prompts(run, prompts, temperature=temperature, **SETTINGS))
    assert together == [(prompt, alone[prompt]) for prompt in prompts]


def test_the_text_says_which_prompt_it_continues(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["pretrain", "generate", str(run), "--max-new-tokens", "4", *arguments])
        with pytest.raises(SystemExit, match=r"^(0|None)$"):
            main()
        return capsys.readouterr().out

    one, other = said("--prompt", "a"), said("--prompt", "It is")
    assert one.startswith("a")
    both = ("--prompt", "a", "--prompt", "It is")
    assert said(*both) == f"──── prompt 1 of 2 ────\n{one}──── prompt 2 of 2 ────\n{other}"
    assert "────" not in said(*both, "--json")


@pytest.mark.parametrize(
    "prompts, changes, words",
    [
        (["a b " * 40], {}, r"^the prompt's \d+ tokens and 40 new ones exceed the model's seq_len 64: shorten"),
        (["a", "a b " * 40], {}, r"^prompt 2's \d+ tokens and 40 new ones exceed"),
        (["a"], {"top_p": 0.0}, r"cannot generate from .*: top_p = 0.0 must be"),
    ],
)
def test_what_cannot_be_continued(run: Path, prompts: list[str], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        list(continue_prompts(run, prompts, temperature=1.0, **{**SETTINGS, **changes}))
