"""EleutherAI's lm-evaluation-harness asks our models: its tasks, its prompts, its metrics.

The one file that imports it (`pip install -e '.[eval]'`). Ids are made as its own `hf` model makes them: a context as
it stands, with nothing before it; of an empty one, an EOS. So an export, run by `lm_eval --model hf` with
`prefix_token_id` the EOS, gives the same log-likelihoods.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from model.generate import Sampling
from pretrain.config import RecipeError
from pretrain.generate import continue_ids
from pretrain.likelihood import encode_pair, likelihoods
from pretrain.subject import Subject

DEFAULT_NEW_TOKENS = 256


class Harness(LM):  # type: ignore[misc]  # it has no types
    """A subject as the harness asks models."""

    def __init__(self, subject: Subject, batch_size: int = 8) -> None:
        super().__init__()
        self.subject, self.batch_size = subject, batch_size

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """(log p in nats, greedy) of each continuation behind its context."""
        codec, pairs = self.subject.codec, []
        for context, continuation in (request.args for request in requests):
            if context == "":
                pairs.append(([codec.eos_id], codec.encode(continuation)))
            else:
                pairs.append(encode_pair(codec, context, continuation))
        return [(one.log_p, one.greedy) for one in likelihoods(self.subject, pairs, batch_size=self.batch_size)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """log p of each text, in the harness' windows: each token once, the last window with its whole context."""
        pairs: list[tuple[list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.subject.codec.encode(text), prefix_token=self.subject.codec.eos_id,
                max_seq_len=self.subject.config.seq_len, context_len=1,
            )  # fmt: skip
            before = len(pairs)
            pairs += map(make_disjoint_window, windows)
            counts.append(len(pairs) - before)
        found = iter(likelihoods(self.subject, pairs, batch_size=self.batch_size))
        return [sum(next(found).log_p for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """What the model writes behind each context, up to a stop string, an EOS, or as many tokens as asked for."""
        return [self._continue(*request.args) for request in requests]

    def _continue(self, context: str, asked: dict[str, Any]) -> str:
        settings = normalize_gen_kwargs(asked, DEFAULT_NEW_TOKENS)
        stops = [stop for stop in handle_stop_sequences(settings.get("until"), eos=None) if stop]
        count = int(settings["max_gen_toks"])
        room = self.subject.config.seq_len - count
        if room < 1:
            raise RecipeError(
                f"a task asks for {count} new tokens, the window of {self.subject.name} has "
                f"{self.subject.config.seq_len}"
            )
        ids = self.subject.codec.encode(context)[-room:] or [self.subject.codec.eos_id]
        sampling = Sampling(float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0)
        *_, (last,) = continue_ids(self.subject, [ids], sampling, count, 0, stops)
        return last.text

    @property
    def tokenizer_name(self) -> str:
        return self.subject.codec.fingerprint


def run_harness(
    subject: Subject,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> dict[str, dict[str, Any]]:
    """The harness' results of each task, by metric, its standard errors too.

    include: a folder of tasks of one's own, as YAML; then these alone are known. Raises RecipeError for a task that is
    not known or cannot be loaded.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if include is not None and not include.is_dir():
        raise RecipeError(f"--include {include}: is no folder")
    manager = TaskManager(include_path=None if include is None else str(include), include_defaults=include is None)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        where = "lm-evaluation-harness" if include is None else include
        raise RecipeError(f"{where} has no task {unknown[0]}; tasks of your own: --include DIR")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = simple_evaluate(
                model=Harness(subject, batch_size), tasks=list(tasks), task_manager=manager, num_fewshot=num_fewshot,
                limit=limit, log_samples=False, bootstrap_iters=1000,
            )  # fmt: skip
    except (OSError, ConnectionError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"the data of {', '.join(tasks)} cannot be loaded: {reason}") from None
    assert found is not None, "this is rank 0"
    return {task: dict(result) for task, result in found["results"].items()}
