"""Which configuration of a recipe common devices hold, as a table: `python -m pretrain plan RECIPE --presets`."""

from __future__ import annotations

from typing import Any

from pretrain.config import Compute, RunConfig
from pretrain.device_memory import GB, described, show_size
from pretrain.fit import Search
from pretrain.fit_found import Fit

DEVICES_GB = (8, 12, 16, 24, 40, 80, 141)  # as sold; a device shows a little more or less
RANKS = (1, 2, 4, 8)


def presets(config: RunConfig, compute: Compute) -> list[tuple[int, int, Fit]]:
    """(GB of one GPU, ranks, the first configuration that fits)."""
    searches = {ranks: Search(config, ranks, "cuda", compute) for ranks in RANKS}
    return [
        (gigabytes, ranks, search.first_fit(described(gigabytes * GB)))
        for gigabytes in DEVICES_GB
        for ranks, search in searches.items()
    ]


def to_dicts(table: list[tuple[int, int, Fit]]) -> list[dict[str, Any]]:
    """JSON-able, one object a row."""
    return [
        {
            "device_memory_bytes": gigabytes * GB,
            "world_size": ranks,
            "chosen": None if fit.chosen is None else fit.chosen.to_dict(),
            "smallest": fit.smallest.to_dict(),
        }
        for gigabytes, ranks, fit in table
    ]


def to_markdown(table: list[tuple[int, int, Fit]]) -> str:
    """A table; time is that of a token on all ranks together, 1 the quickest row's, by the cost model."""
    rows = [
        "| GB | GPUs | batch × accumulation | checkpointing | DeepSpeed JSON | masters | sums | a GPU needs | time |",
        "|---:|---:|---:|---|---|---|---|---:|---:|",
    ]
    times = [fit.chosen.seconds_per_token / ranks for _, ranks, fit in table if fit.chosen is not None]
    for gigabytes, ranks, fit in table:
        one = fit.chosen
        if one is None:
            smallest = show_size(fit.smallest.need.total_bytes)
            rows.append(f"| {gigabytes} | {ranks} | nothing fits: the smallest needs {smallest} | | | | | | |")
            continue
        precision, choice = one.config.precision, one.choice
        kahan = "" if precision.compensation == "none" else f", {precision.compensation}"
        host = f" + host {show_size(one.need.host_bytes)}" if choice.layout.offload_level else ""
        rows.append(
            f"| {gigabytes} | {ranks} | {choice.micro_batch_size} × {one.accumulation_steps} | {choice.checkpointing} "
            f"| {choice.layout.path.removeprefix('ds_configs/')} | {precision.master}{kahan} | {precision.accumulate} "
            f"| {show_size(one.need.total_bytes)}{host} | {one.seconds_per_token / ranks / min(times):.2f} |"
        )
    return "\n".join(rows)
