"""A run in Weights & Biases: sent to its server, or kept as files that `wandb sync` sends later."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pretrain.config import RecipeError
from pretrain.sinks import Histogram

STEP = "step"  # on whose axis all is drawn: theirs counts calls, and drops what is behind the newest


def refuse_without_wandb(mode: str) -> None:
    """RecipeError where a recipe wants it and it is not installed."""
    if mode != "off" and find_spec("wandb") is None:
        raise RecipeError(
            f'logging.wandb = "{mode}", but wandb is not installed: pip install -e \'.[wandb]\', or set it to "off"'
        )


class WandbSink:
    """One attempt's part of a run, which all attempts in one run directory share. Its files lie in RUN/wandb/."""

    name = "Weights & Biases"

    def __init__(
        self,
        run: Path,
        mode: Literal["offline", "online"],
        *,
        project: str,
        recipe: Mapping[str, bool | float | str],
    ) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its own faults are not sent to its makers
        import wandb

        if mode == "online" and not wandb.api.api_key:
            raise RuntimeError("no API key: wandb login, or set WANDB_API_KEY")  # else it would ask for one here
        settings = wandb.Settings(
            mode=mode,
            silent=True,
            console="off",  # what is printed stays where it is
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
        )
        place = str(run.resolve())
        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            name=run.resolve().name,
            id=hashlib.sha256(place.encode()).hexdigest()[:16],
            dir=place,
            config=dict(recipe),
            resume="allow",
            settings=settings,
        )
        self._run.define_metric("*", step_metric=STEP)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        table = self._wandb.Table(columns=["step", "prompt", "text"])
        for name, text in texts.items():
            table.add_data(step, name.partition("/")[2], text)
        self._run.log({"samples": table, STEP: step})

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        drawn = {
            name: self._wandb.Histogram(np_histogram=(list(one.counts), list(one.edges)))
            for name, one in histograms.items()
        }
        self._run.log({**drawn, STEP: step})

    def goes_back(self, step: int) -> None:
        """Nothing: curves are over `step`, of which the server keeps every number that it was told."""

    def close(self) -> None:
        self._run.finish()
