"""What a plan finds where it opens more than the recipe: the data of a run, and the checkpoint it would go on from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.packing_plan import packing_figures
from data_pipeline.shards import DataFormatError
from pretrain.changes import check_names
from pretrain.config import RecipeError, RunConfig, refuse_split_windows
from pretrain.device_memory import ranks_here
from pretrain.inputs import Inputs, initial_weights
from pretrain.plan import Reading
from pretrain.resuming import preview, preview_text
from pretrain.run_directory import CheckpointError, RunDirectory, RunDirectoryError, refuse_unusable
from tokenizer.codec import TokenizerError


@dataclass(frozen=True)
class Found:
    """For `--json` and for people; `refused`: why a run would not begin."""

    report: dict[str, Any]
    lines: list[str]
    refused: str | None = None


def of_data(config: RunConfig, world_size: int) -> Found:
    """Mixture, epochs and what packing cuts; data, tokenizer and initial weights are opened as a run would.

    Raises what `Inputs.check` and `initial_weights` do.
    """
    inputs = Inputs.check(config, world_size)
    initial = initial_weights(inputs)
    packing, seq_len = config.data.packing, config.model.seq_len
    figures = packing_figures(inputs.collection, packing, seq_len, inputs.packed)
    reading = Reading.of(config, inputs.order)
    return Found(
        {
            "initial_weights": None if initial is None else str(initial),
            "packing": {name: one.to_dict() for name, one in figures.items()},
            "reading": reading.to_dict(),
        },
        [
            *([] if initial is None else ["", f"initial weights from {initial}, checked"]),
            "",
            *reading.lines(),
            "",
            f"packing {packing}, an epoch of each source:",
            *(f"  {name}: {one.to_text()}" for name, one in figures.items()),
        ],
    )


def of_run(
    config: RunConfig, world_size: int, zero_stage: int, directory: Path, resume: str, changes: Sequence[str]
) -> Found:
    """What a run in `directory` would resume from, in the words of the run, or why it would refuse to."""
    launched = "LOCAL_WORLD_SIZE" in os.environ or world_size == 1
    try:
        refuse_unusable(directory)
        found = preview(
            RunDirectory(directory).checkpoints,
            resume,
            lambda computed: Inputs.check(config, world_size, computed).identity,
            check_names(changes),
            alone=launched and ranks_here(os.environ, world_size) == world_size,
        )
        if found is None:
            refuse_split_windows([stage.from_tokens for stage in config.data.stages], config.model.seq_len)
    except (CheckpointError, DataFormatError, TokenizerError, RecipeError, RunDirectoryError) as error:
        return Found({"resume": {"refused": str(error)}}, [], str(error))
    told = preview_text(found, world_size, zero_stage).replace("\n", "\n" + 18 * " ")
    return Found({"resume": found}, [f"resume            {told}", ""])
