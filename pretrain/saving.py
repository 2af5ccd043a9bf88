"""Saving a checkpoint, and putting one into an engine: what all ranks do together.

Protocol of a save: all ranks write into `step-….partial`; each flushes and hashes its share of the files; the first
rank writes the manifest, renames the folder, moves `latest`, then prunes (see retention.py). A kill anywhere leaves
either the old `latest` or the new one, both whole.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data_pipeline.durable import file_sha256, sync_folder
from model.huggingface import save_tensors
from pretrain.checkpoint import list_checkpoints, manifest_of, remove, saved, step_of
from pretrain.retention import Retention
from pretrain.run_directory import CheckpointError, write_text
from pretrain.runtime import Ranks, one_ranks_fault
from pretrain.state import Measured, TrainState

if TYPE_CHECKING:
    from pretrain.engine import TrainingEngine


class Checkpoints:
    """The checkpoints of one run. Its methods are called on all ranks together."""

    def __init__(
        self, folder: Path, retention: Retention, ranks: Ranks, say: Callable[[str], None] = lambda message: None
    ) -> None:
        self.folder = folder
        self.retention = retention
        self.ranks = ranks
        self.say = say

    def save(self, engine: TrainingEngine, state: TrainState, identity: Mapping[str, Any], measured: Measured) -> Path:
        """Write a checkpoint of `state`; on return it is durable and `latest` names it.

        One that holds numbers which are not finite is told of, and never costs the last healthy one its place.
        """
        record = measured.to_dict(finite=engine.is_finite())
        final = self.folder / f"step-{state.global_step:08d}"
        partial = final.with_name(final.name + ".partial")
        if self.ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.ranks.barrier()
        with _full_disk_told(partial):
            engine.save(partial / "engine")
            torch.save(torch.get_rng_state(), partial / f"rng-{self.ranks.rank:05d}.pt")
            weights = engine.gather_weights()
            if self.ranks.is_first:
                save_tensors(weights, partial / "weights.safetensors")
                (partial / "model.json").write_text(json.dumps(engine.model_config.to_dict(), indent=2) + "\n")
                described = {**asdict(state), **identity, "measured": record}
                (partial / "state.json").write_text(json.dumps(described, indent=2) + "\n")
            del weights
            self.ranks.barrier()
            files = self._receipts(partial)
        if self.ranks.is_first:
            # No newline behind the last brace: cut by one byte, it is no JSON any more.
            write_text(partial / "manifest.json", json.dumps(manifest_of(files), indent=2))
            if final.exists():  # a run resumed from before it, saving the same step again
                shutil.rmtree(final)
            partial.rename(final)
            sync_folder(self.folder)
            write_text(self.folder / "latest", final.name + "\n")
            self._prune()
            if not record["healthy"]:
                self.say(
                    f"warning: step {state.global_step}: not every weight and moment is a finite number; {final.name} "
                    "is kept to be looked at, beside the last healthy checkpoint, and no run will resume from it"
                )
        self.ranks.barrier()
        return final

    def _receipts(self, partial: Path) -> dict[str, dict[str, int | str]]:
        """Flush and hash every file, each rank its share; the union, on every rank."""
        paths = sorted(path for path in partial.rglob("*") if path.is_file())
        mine = {}
        for path in paths[self.ranks.rank :: self.ranks.world_size]:
            mine[str(path.relative_to(partial))] = {"bytes": path.stat().st_size, "sha256": _hash_durable(path)}
        if self.ranks.is_first:
            for folder in {path.parent for path in paths}:
                sync_folder(folder)
        receipts: dict[str, dict[str, int | str]] = {}
        for share in self.ranks.gather(mine):
            receipts.update(share)
        return dict(sorted(receipts.items()))

    def _prune(self) -> None:
        checkpoints = list_checkpoints(self.folder)
        reasons = self.retention.reasons([saved(path) for path in checkpoints])
        for path in checkpoints:
            if not reasons[step_of(path)]:
                remove(path)

    def load(self, path: Path, engine: TrainingEngine) -> TrainState:
        """Put a checkpoint of this run (see `choose`) into the engine, and return the state it describes.

        One of other ranks or another ZeRO stage is converted, and that is said.
        """
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
        return TrainState.of(path)


@contextmanager
def _full_disk_told(partial: Path) -> Iterator[None]:
    """Say in one line that the disk is full, however the writer that met it put it, and give back what was written.

    torch and safetensors report it in words of their own, some without one of the disk.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        free_bytes = shutil.disk_usage(partial.parent).free
        if not full and free_bytes >= 2**20 and "No space left" not in str(error):
            raise
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(
            f"{partial.parent}: the disk is full, nothing was saved at {partial.stem}, the checkpoints before it are "
            "whole: make room (or lower checkpoint.keep_last) and start the same command again"
        ) from error


def _hash_durable(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return file_sha256(path)
