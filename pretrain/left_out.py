"""Roll backs of a run, and the steps that it leaves out since: RUN/roll_backs.json, and every later checkpoint.

Behind a roll back the step of the alarm is left out: it keeps its samples, so that which step reads which stays
arithmetic, but it is not run, and nothing is learnt from them. That holds for every later start of the run as well,
from whatever checkpoint, as long as the step reads the very same samples (data_pipeline/reading.py): where the data,
their mixture, the windows or the batch are changed before it, its number means other ones.

The file is written when the earlier checkpoint has been loaded and before the run goes on from it. Then the checkpoints
behind it are removed, which the run has left; a start that finds some after a kill removes them (`abandoned`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.reading import Reading
from pretrain.checkpoint import list_checkpoints, read_json, step_of
from pretrain.run_directory import CheckpointError, RunDirectoryError, now, write_text


@dataclass(frozen=True)
class RollBack:
    """One return to an earlier step."""

    step: int  # of the alarm; it is left out
    condition: str
    to_step: int  # of the checkpoint that was loaded
    first_sample: int  # of the step that is left out
    samples: int
    reads_sha256: str  # what it read: `Reading.digest`
    at: str = field(default_factory=now)

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> RollBack:
        """Out of JSON. ValueError where it is none."""
        kinds = {name: str if name in ("condition", "reads_sha256", "at") else int for name in cls.__annotations__}
        if not isinstance(table, Mapping) or any(type(table.get(name)) is not kind for name, kind in kinds.items()):
            raise ValueError("a roll back is damaged")
        one = cls(**{name: table[name] for name in kinds})
        if not 0 <= one.to_step < one.step or one.first_sample < 0 or one.samples < 1:
            raise ValueError("no run goes back like that")
        return one

    @classmethod
    def behind(cls, step: int, condition: str, to_step: int, reading: Reading) -> RollBack:
        """Of an alarm at `step`, in a run that reads this."""
        samples = reading.samples(step)
        return cls(step, condition, to_step, samples.start, len(samples), reading.digest(step))

    def leaves_out(self, reading: Reading) -> bool:
        """Whether its step reads the same samples in a run that reads this."""
        return reading.reads(self.step, self.first_sample, self.samples, self.reads_sha256)

    def told(self) -> str:
        return f"step {self.step} ({self.condition}) is left out since the run went back to step {self.to_step}"


RollBacks = tuple[RollBack, ...]


def read(path: Path) -> RollBacks:
    """The roll backs that a run's file records, in order; none where it is not there.

    RunDirectoryError: it is damaged, so that which steps are left out is not known.
    """
    try:
        return from_json(json.loads(path.read_bytes())["roll_backs"])
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be read ({error.strerror or error}), so which steps the run leaves out is not known: "
            "it must be a file that this user may read"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RunDirectoryError(
            f"{path} is damaged: restore it from a copy, or remove it, and the run leaves out only the steps that the "
            "checkpoint knows of which it goes on from"
        ) from None


def write(path: Path, roll_backs: RollBacks) -> None:
    """Durable when it returns."""
    write_text(path, json.dumps({"roll_backs": to_json(roll_backs)}, indent=2) + "\n")


def to_json(roll_backs: RollBacks) -> list[dict[str, Any]]:
    return [asdict(one) for one in roll_backs]


def from_json(tables: object) -> RollBacks:
    """ValueError where it is none."""
    if not isinstance(tables, list):
        raise ValueError("roll backs are a list")
    return tuple(RollBack.of(table) for table in tables)


def known_to(checkpoint: Path) -> RollBacks:
    """Those made before a checkpoint was saved. CheckpointError: damaged."""
    try:
        return from_json(read_json(checkpoint / "state.json").get("health", {}).get("roll_backs", []))
    except (ValueError, AttributeError, TypeError):
        raise CheckpointError(f"{checkpoint}/state.json is damaged: it does not tell of the run's roll backs") from None


def merged(one: RollBacks, other: RollBacks) -> RollBacks:
    """Of both, in the order made, each once."""
    return tuple(sorted({*one, *other}, key=lambda record: record.at))


def abandoned(folder: Path, roll_backs: RollBacks) -> list[str]:
    """The names of checkpoints behind those that were gone back to: saved later, and without knowing of it."""
    names = []
    for path in list_checkpoints(folder) if roll_backs else ():
        try:
            unknown = {*roll_backs} - {*known_to(path)}
        except CheckpointError:
            continue  # whether it is whole is others' affair
        if any(step_of(path) > one.to_step for one in unknown):
            names.append(path.name)
    return names


def steps_left_out(roll_backs: Sequence[RollBack], reading: Reading) -> frozenset[int]:
    """The numbers, from 1, of the steps that a run does not run."""
    return frozenset(one.step for one in roll_backs if one.leaves_out(reading))
