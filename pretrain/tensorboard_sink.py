"""A run in TensorBoard: curves, texts, histograms, and the recipe among the hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.sinks import Histogram


class TensorBoardSink:
    """Writes event files into a folder; an attempt's go on behind the attempt's before."""

    name = "TensorBoard"

    def __init__(self, folder: Path, *, global_step: int, recipe: Mapping[str, bool | float | str]) -> None:
        """`global_step`: the last that still counts; `recipe`: its values by their names, as `schedule.peak_lr`."""
        from torch.utils.tensorboard.summary import hparams

        self._folder = folder
        self._writer = _writer(folder, global_step)
        # As the writer's own add_hparams, which would make a folder of its own for them.
        goals = {"train/loss": 0.0, "evaluation/all/loss": 0.0}
        make: Any = hparams
        file_writer: Any = self._writer.file_writer
        for summary in make(dict(recipe), goals):
            file_writer.add_summary(summary)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            # TensorBoard shows Markdown: as code a text stands as it is, whatever it holds.
            self._writer.add_text(name, "\n".join(f"    {line}" for line in text.split("\n")), step)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        for name, one in histograms.items():
            self._writer.add_histogram_raw(
                name,
                min=one.edges[0],
                max=one.edges[-1],
                num=one.number,
                sum=one.sum,
                sum_squares=one.sum_of_squares,
                bucket_limits=list(one.edges[1:]),
                bucket_counts=list(one.counts),
                global_step=step,
            )

    def goes_back(self, step: int) -> None:
        self._writer.close()
        self._writer = _writer(self._folder, step)

    def close(self) -> None:
        self._writer.close()


def _writer(folder: Path, global_step: int) -> Any:
    """purge_step hides from the plots what was written before of steps beyond `global_step`."""
    from torch.utils.tensorboard import SummaryWriter

    make: Any = SummaryWriter
    return make(str(folder), purge_step=global_step + 1)
