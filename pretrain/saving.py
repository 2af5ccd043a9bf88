"""Saving a checkpoint, and putting one into an engine: what all ranks do together.

A save is three things:

1. capture: what each rank will write, as it is at the step's end; a copy where training goes on meanwhile;
2. writing: each rank writes its files into `step-….partial`, flushes and hashes them, alone (see writing.py);
3. commit: when all have, the first rank writes the manifest and renames the folder: it is saved. Then it moves
   `latest` and prunes (see pruning.py), and so it does behind a save that failed: there may be room for the next.

At once, the three follow each other. Asynchronously, threads do the second and the third, and `poll`, at the end of
every step, asks all ranks whether theirs have ended: no thread ever waits for another rank. A kill anywhere leaves
either the old `latest` or the new one, both whole; so does a write that fails.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data_pipeline.durable import sync_folder
from model.huggingface import save_tensors
from pretrain.checkpoint import manifest_of
from pretrain.parts import Shelf
from pretrain.pruning import tidy
from pretrain.retention import Retention
from pretrain.run_directory import CheckpointError, write_text
from pretrain.runtime import Ranks, one_ranks_fault
from pretrain.snapshot import Snapshot
from pretrain.state import Measured, TrainState
from pretrain.writing import FULL, Job, Written, why, write_files

if TYPE_CHECKING:
    from pretrain.engine import Files, TrainingEngine

# What a run that ends by an error leaves to a thread that writes.
LEAVE_SECONDS = 5.0


class NotSavedError(OSError):
    """What the run ends with could not be saved. Raised on all ranks."""


@dataclass(frozen=True)
class SaveResult:
    """How a save ended, on every rank."""

    step: int
    failure: str | None  # why there is no checkpoint
    held_seconds: float  # for which this rank's loop stood still
    seconds: float  # from its beginning to its end, without the steps between


@dataclass(frozen=True)
class Ended:
    """What the first rank did with what all had written."""

    failure: str | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass
class Flight:
    """A save that has begun and has not ended."""

    step: int
    folder: Path  # its name when it is whole
    healthy: bool
    last: bool
    in_thread: bool
    sum_over_ranks: Callable[..., list[float]]
    writing: Job[Written]
    ending: Job[Ended] | None = None  # when all ranks have written
    held_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def partial(self) -> Path:
        return self.folder.with_name(self.folder.name + ".partial")

    def told(self, faults: Sequence[str], *, failed: bool) -> tuple[str, ...]:
        """What else could not be done behind it, as warnings."""
        step = f"step {self.step}:" if failed else f"step {self.step} is saved, but"
        return tuple(f"warning: {step} {fault}" for fault in faults)


class Checkpoints:
    """The checkpoints of one run. Its methods are called on all ranks together."""

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        ranks: Ranks,
        say: Callable[[str], None] = lambda message: None,
        *,
        asynchronous: bool = False,
        on_end: Callable[[SaveResult], None] = lambda result: None,
        shelf: Shelf | None = None,
    ) -> None:
        """`on_end` hears of every save when it has ended, well or not. `shelf`: where ranks have several homes."""
        self.folder = folder
        self.retention = retention
        self.ranks = ranks
        self.say = say
        self.asynchronous = asynchronous
        self.on_end = on_end
        self.shelf = shelf
        self._leads = ranks.is_first if shelf is None else shelf.sharing.leads  # does what is done once a folder
        self.newest_step: int | None = None  # that was saved or loaded here
        self._snapshot: Snapshot | None = None  # its room is kept from one save to the next
        self._flight: Flight | None = None
        self._abandoned = threading.Event()
        self._warned_of_waiting = False
        self._pruned = False  # what an earlier start left

    @property
    def in_flight(self) -> bool:
        """Whether a save is being written."""
        return self._flight is not None

    def make_room(self, engine: TrainingEngine) -> None:
        """Have the memory of asynchronous saves ready before the first is due, when the optimizer has its state."""
        if self.asynchronous and self._snapshot is None:
            self._snapshot = Snapshot(engine.device)
            with self._snapshot.making_room():
                engine.files(self._snapshot)
                engine.gather_weights(self._snapshot)

    def save(self, engine: TrainingEngine, state: TrainState, identity: Mapping[str, Any], measured: Measured) -> None:
        """Write a checkpoint of `state`: durable on return or, asynchronously, when `on_end` hears of it.

        One that cannot be written is told of and left out. One that holds numbers which are not finite is told of, and
        never costs the last healthy one its place.
        """
        self.poll()
        if self._flight is not None:
            if not self._warned_of_waiting:
                self.say(
                    f"warning: step {state.global_step}: the save of step {self._flight.step} is still being written, "
                    "and training waits for it: set a larger checkpoint.every_steps, or use a faster disk"
                )
            self._warned_of_waiting = True
            self.finish()
        if self.asynchronous and self._snapshot is None:
            self._snapshot = Snapshot(engine.device)
        self._begin(engine, state, identity, measured, self._snapshot, last=False)

    def save_last(
        self, engine: TrainingEngine, state: TrainState, identity: Mapping[str, Any], measured: Measured
    ) -> None:
        """Have a durable checkpoint of `state`, behind which nothing is trained. NotSavedError where there is none."""
        self.finish()
        self._snapshot = None  # nothing changes any more: no copy
        if self.newest_step != state.global_step:
            self._begin(engine, state, identity, measured, None, last=True)

    def poll(self) -> None:
        """Let a save go on that all ranks have written; costs a sum over the ranks while there is one."""
        while self._flight is not None:
            flight = self._flight
            ended = (flight.writing if flight.ending is None else flight.ending).ended
            (waiting,) = flight.sum_over_ranks(not ended)
            if waiting:
                break
            self._go_on(flight)

    def finish(self) -> None:
        """Wait until no save is being written."""
        while self._flight is not None:
            self._go_on(self._flight)

    def close(self) -> None:
        """Give up a save that is being written, on this rank: the run has failed. Returns within some seconds."""
        if self._flight is not None:
            self._abandoned.set()
            (self._flight.ending or self._flight.writing).wait(LEAVE_SECONDS)

    def _begin(
        self,
        engine: TrainingEngine,
        state: TrainState,
        identity: Mapping[str, Any],
        measured: Measured,
        snapshot: Snapshot | None,
        *,
        last: bool,
    ) -> None:
        started = time.perf_counter()
        record = measured.to_dict(finite=engine.is_finite())
        folder = self.folder / f"step-{state.global_step:08d}"
        aside = folder.with_name(folder.name + ".partial")
        if not self._pruned and (self._leads or self.shelf is not None):
            for fault in self._tidy(None):
                self.say(f"warning: {fault}")
        self._pruned = True
        if self._leads:
            shutil.rmtree(aside, ignore_errors=True)
        described = {**asdict(state), **identity, "measured": record}
        if self.shelf is not None:  # in all homes the same bytes: a rank's arithmetic may differ in the last bit
            described = self.ranks.broadcast(described)
        files = self._capture(engine, described, snapshot)  # waits for all ranks
        captured = time.perf_counter() - started
        in_thread = snapshot is not None
        self._flight = Flight(
            state.global_step, folder, bool(record["healthy"]), last, in_thread, engine.sum_over_ranks,
            Job(partial(write_files, files, aside, self._abandoned), in_thread=in_thread),
            held_seconds=time.perf_counter() - started, seconds=captured,
        )  # fmt: skip
        if not in_thread:
            self.finish()

    def _capture(self, engine: TrainingEngine, described: dict[str, Any], snapshot: Snapshot | None) -> Files:
        """This rank's files of a checkpoint. All ranks have passed here before one writes."""
        with nullcontext() if snapshot is None else snapshot.taking():
            files = engine.files(snapshot)
            weights = engine.gather_weights(snapshot)
        files[f"rng-{self.ranks.rank:05d}.pt"] = partial(torch.save, torch.get_rng_state())
        if self.ranks.is_first:
            files["weights.safetensors"] = partial(save_tensors, weights)
            files["model.json"] = partial(_write_json, engine.model_config.to_dict())
        if self._leads:
            files["state.json"] = partial(_write_json, described)
        return files

    def _go_on(self, flight: Flight) -> None:
        """What follows when this rank's job has ended, waiting for it and for the others'."""
        started = time.perf_counter()
        if flight.ending is None:
            everyones = self.ranks.gather(flight.writing.result())
            flight.seconds += max(written.seconds for written in everyones)
            flight.ending = self._end(flight, everyones)
            flight.held_seconds += time.perf_counter() - started
            return
        ended = self._all_ended(flight, flight.ending.result())
        self._flight = None
        flight.held_seconds += time.perf_counter() - started
        for note in ended.notes:
            self.say(note)
        if ended.failure is None:
            self.newest_step = flight.step
        elif not flight.last:
            self.say(
                f"warning: step {flight.step} was not saved: {ended.failure}; the checkpoints before it stay, training "
                "goes on, and the next save is tried when it is due"
            )
        self.on_end(SaveResult(flight.step, ended.failure, flight.held_seconds, flight.seconds + ended.seconds))
        if flight.last and ended.failure is not None:
            remedy = "make room (or lower checkpoint.keep_last)" if FULL in ended.failure else "see to that"
            raise NotSavedError(
                f"{ended.failure}: nothing was saved at {flight.folder.name}, the checkpoints before it are whole: "
                f"{remedy} and start the same command again"
            )

    def _all_ended(self, flight: Flight, ended: Ended) -> Ended:
        """How the save ended. In several homes none names it or removes an older one before all have committed it."""
        if self.shelf is None:
            of_first: Ended = self.ranks.broadcast(ended)
            return of_first
        everyones: list[Ended] = self.ranks.gather(ended)
        failed = next((one for one in everyones if one.failure is not None), None)
        name = flight.folder.name
        faults = self._tidy(name) if failed is None else self._tidy(None, taken_back=name)
        notes = dict.fromkeys(
            [*(note for one in everyones for note in one.notes), *flight.told(faults, failed=failed is not None)]
        )
        return replace(failed or everyones[0], notes=tuple(notes))

    def _end(self, flight: Flight, everyones: list[Written]) -> Job[Ended]:
        """What is done once in a folder behind all ranks' writing: the commit, or taking away what is not whole."""
        failures = [
            written.failure if rank == 0 else f"rank {rank}: {written.failure}"
            for rank, written in enumerate(everyones)
            if written.failure is not None
        ]
        files = {name: receipt for written in everyones for name, receipt in sorted(written.files.items())}
        if failures:
            work = partial(self._discard, flight, failures[0])
        elif self.shelf is None:
            work = partial(self._commit, flight, manifest_of(dict(sorted(files.items()))))
        else:  # all ranks bring to where they are to lie the files that they have written
            work = partial(self._commit_part, flight, self.shelf, [written.files for written in everyones])
            return Job(work, in_thread=flight.in_thread)
        if not self._leads:
            return Job(Ended, in_thread=False)
        return Job(work, in_thread=flight.in_thread)

    def _discard(self, flight: Flight, failure: str | None) -> Ended:
        started = time.perf_counter()
        shutil.rmtree(flight.partial, ignore_errors=True)
        faults = self._tidy(None) if self.shelf is None else []
        return Ended(failure, time.perf_counter() - started, flight.told(faults, failed=True))

    def _commit_part(self, flight: Flight, shelf: Shelf, written: list[dict[str, dict[str, int | str]]]) -> Ended:
        started = time.perf_counter()
        failure = None
        try:
            manifest = shelf.settle(flight.partial, written)
        except OSError as error:
            failure = str(error)
        if not self._leads:
            return Ended(failure, time.perf_counter() - started)
        if failure is not None or manifest is None:
            return self._discard(flight, failure)
        ended = self._commit(flight, manifest)
        return replace(ended, seconds=time.perf_counter() - started)

    def _commit(self, flight: Flight, manifest: dict[str, Any]) -> Ended:
        started, aside, final = time.perf_counter(), flight.partial, flight.folder
        try:
            for folder in {(aside / name).parent for name in manifest["files"]}:
                sync_folder(folder)
            # No newline behind the last brace: cut by one byte, it is no JSON any more.
            write_text(aside / "manifest.json", json.dumps(manifest, indent=2))
            if final.exists():  # a run resumed from before it, saving the same step again
                shutil.rmtree(final)
            aside.rename(final)
        except OSError as error:
            return self._discard(flight, why(error, aside / "manifest.json"))
        notes = () if flight.healthy else (
            f"warning: step {flight.step}: not every weight and moment is a finite number; {final.name} "
            "is kept to be looked at, beside the last healthy checkpoint, and no run will resume from it",
        )  # fmt: skip
        faults = []
        try:
            sync_folder(self.folder)
        except OSError as error:
            faults.append(f"may not outlast a loss of power: {why(error, self.folder)}")
        if self.shelf is None:
            faults += self._tidy(final.name)
        return Ended(None, time.perf_counter() - started, (*notes, *flight.told(faults, failed=False)))

    def _tidy(self, named: str | None, taken_back: str | None = None) -> list[str]:
        sharing = None if self.shelf is None else self.shelf.sharing
        return tidy(self.folder, self.retention, sharing, named, taken_back)

    def load(self, path: Path, engine: TrainingEngine) -> TrainState:
        """Put a checkpoint of this run (see `choose`) into the engine, and return the state it describes.

        One of other ranks or another ZeRO stage is converted, and that is said.
        """
        if self.shelf is not None and engine.lies_otherwise(path / "engine"):
            path = self.shelf.take_all()
        with one_ranks_fault():  # each reads files of its own
            try:
                written = engine.load(path / "engine")
                if written is None or self.ranks.rank < written.world_size:
                    torch.set_rng_state(torch.load(path / f"rng-{self.ranks.rank:05d}.pt", weights_only=True))
            except pickle.UnpicklingError as error:
                name = re.search(r"GLOBAL (\S+)", str(error))
                raise CheckpointError(
                    f"{path} holds {name[1] if name else 'something'}, which is neither a tensor nor a number and "
                    "could run when it is loaded: it was not; take a checkpoint that a run of this program wrote"
                ) from None
        if written is not None:
            self.say(f"{path} was written by {written}: converted for {engine.layout().told_beside(written)}")
        state = TrainState.of(path)
        self.newest_step = state.global_step
        return state


def _write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
