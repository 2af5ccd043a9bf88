"""What a step of a run reads, in one hash: equal where it would read the very same samples in the same way.

    reading = Reading(steps, history, order)    of the run as it is now
    reading.digest(12)                          of its twelfth step

A step's number alone does not say it: another batch, other data, another mixture, other windows or rows give the same
number other samples. So what is compared are the samples themselves: (source, epoch, window) one by one, and what of.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data_pipeline.history import History
from data_pipeline.order import SampleOrder
from data_pipeline.steps import Steps


@dataclass(frozen=True)
class Reading:
    """All that says what a run's steps read, those before its changes included.

    `order`: the description of its newest order with `content_sha256`, as a checkpoint has it.
    """

    steps: Steps
    history: History
    order: Mapping[str, Any]

    def samples(self, step: int) -> range:
        """The numbers of the samples that a step, from 1, reads. ValueError for a step below 1."""
        return self.steps.samples(step - 1)

    def reads(self, step: int, first_sample: int, samples: int, digest: str) -> bool:
        """Whether a step, from 1, still reads what was recorded of it. ValueError for a step below 1."""
        found = self.samples(step)
        return (found.start, len(found)) == (first_sample, samples) and self.digest(step) == digest

    def digest(self, step: int) -> str:
        """SHA-256 of what a step, from 1, reads. ValueError for a step below 1."""
        samples = self.samples(step)
        described = next((read.order for end, read in self.history.reads() if samples.start < end), self.order)
        read = SampleOrder.of(described).locate_many(samples)
        windows = zip(read.sources.tolist(), read.epochs.tolist(), read.windows.tolist(), strict=True)
        what = {
            "content_sha256": described["content_sha256"],
            "seq_len": described["seq_len"],
            "packing": described.get("packing", "concat"),
            "plan_sha256": described.get("plan_sha256"),
            "windows": [(read.names[source], epoch, window) for source, epoch, window in windows],
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
