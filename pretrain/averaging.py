"""The mean of several checkpoints' weights, as a checkpoint of its own.

Averaging weights along one run of training finds a point nearer the middle of a wide minimum (Izmailov et al. 2018,
"Averaging Weights Leads to Wider Optima and Better Generalization"), and the mean of the latest ones stands where the
run would be only later (Kaddour 2022, "Stop Wasting My Time! Saving Days of ImageNet and BERT Training with Latest
Weight Averaging"). It pays while the learning rate is still high; behind a decay to near zero little is left to gain.

The mean of N weights is their sum in float64, in the order of steps, divided by N. It is stored in fp32: a mean of bf16
numbers has more bits than they have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from data_pipeline.durable import file_sha256
from pretrain.checkpoint import (
    list_checkpoints,
    model_config,
    open_weights,
    read_manifest,
    refuse_unhealthy,
    saved,
    step_of,
    tokenizer_of,
    verify,
    write_imported,
)
from pretrain.export import IMPORTED, Report, refuse_among_checkpoints, report
from pretrain.run_directory import CheckpointError, RunDirectory
from tokenizer.codec import Codec, refuse_occupied
from tokenizer.folder import published, refuse_unwritable

ORIGIN = "averaged.json"  # beside the weights: what they are the mean of


def average(
    run: RunDirectory,
    wanted: int | Sequence[int],
    out: Path,
    *,
    overwrite: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Report, list[Path]]:
    """Write the mean of the newest `wanted` healthy checkpoints of a run, or of those of these steps, to `out`.

    A checkpoint without a run, as an import is: evaluate, generate and export take it, a run can start from it. Gives
    what was written and the checkpoints it is the mean of. `on_bytes` hears how much of them has been verified. Raises
    CheckpointError or TokenizerError, with nothing written: too few of them, one that is damaged, not finite, or of
    another model or tokenizer; an `out` that is occupied.
    """
    refuse_unwritable(out)
    refuse_among_checkpoints(out)
    refuse_occupied(out, overwrite=overwrite, replaceable=IMPORTED, kind="checkpoint")
    chosen = choose(run, wanted)
    codec = _verified(chosen, on_bytes)
    config = model_config(chosen[0])
    weights = mean_weights(chosen)
    origin = {
        "run": str(run.path),
        "checkpoints": [
            {"step": step_of(path), "manifest_sha256": file_sha256(path / "manifest.json")} for path in chosen
        ],
    }
    with published(out, overwrite=overwrite, replaceable=IMPORTED, kind="checkpoint") as fresh:
        (fresh / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
        write_imported(fresh, config, weights, codec)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return report(out, files, weights, config.vocab_size, codec), chosen


def choose(run: RunDirectory, wanted: int | Sequence[int]) -> list[Path]:
    """The newest so many healthy checkpoints of a run, or those of the steps named, oldest first; not verified.

    Raises CheckpointError where there are not so many, or not those.
    """
    found = list_checkpoints(run.checkpoints)
    steps = [step_of(path) for path in found]
    if isinstance(wanted, int):
        healthy = [path for path in found if saved(path).healthy]
        if wanted < 2 or len(healthy) < wanted:
            raise CheckpointError(
                f"--average {wanted}: a mean is of 2 or more, and {run.path} has {len(healthy)} healthy checkpoints"
            )
        return healthy[-wanted:]
    chosen = sorted(set(wanted))
    missing = [step for step in chosen if step not in steps]
    if missing:
        there = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{run.path} has no checkpoint of step {missing[0]}: it has {there}")
    if len(chosen) < 2:
        raise CheckpointError(f"--average {chosen[0]}: a mean is of 2 or more different steps")
    return [found[steps.index(step)] for step in chosen]


def _verified(paths: Sequence[Path], on_bytes: Callable[[int, int], None]) -> Codec:
    """Raise CheckpointError unless all are whole, healthy and of one model and tokenizer; gives the tokenizer."""
    first, codec = paths[0], Codec.load(tokenizer_of(paths[0]))
    for path in paths:
        refuse_unhealthy(path)
        if model_config(path) != model_config(first):
            raise CheckpointError(f"{path} is of another model than {first}: they have no mean")
        if tokenizer_of(path) != codec.folder and Codec.load(tokenizer_of(path)).fingerprint != codec.fingerprint:
            raise CheckpointError(f"{path} goes with another tokenizer than {first}: they have no mean")
    done, total = 0, sum(record["bytes"] for path in paths for record in read_manifest(path)["files"].values())

    def count(read: int) -> None:
        nonlocal done
        done += read
        on_bytes(done, total)

    for path in paths:
        verify(path, count)
    return codec


def mean_weights(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The mean of each weight of verified checkpoints, in fp32; tied weights once. Holds one tensor of each at a time.

    Raises CheckpointError where the weights have other names or shapes, or are not finite.
    """
    weights: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        files = [stack.enter_context(open_weights(path)) for path in paths]
        names = list(files[0].keys())
        for path, file in zip(paths, files, strict=True):
            if set(file.keys()) != set(names):
                raise CheckpointError(f"{path} holds other weights than {paths[0]}: they have no mean")
        for name in names:
            total = files[0].get_tensor(name).double()
            for path, file in zip(paths[1:], files[1:], strict=True):
                weight = file.get_tensor(name)
                if weight.shape != total.shape:
                    raise CheckpointError(f"{path}: {name} has another shape than in {paths[0]}: they have no mean")
                total += weight
            weights[name] = (total / len(paths)).float()
            if not bool(weights[name].isfinite().all()):
                raise CheckpointError(f"the mean of {name} is not finite: leave out the checkpoint that is not")
    return weights
