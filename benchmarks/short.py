"""Each benchmark's short form: the command, and which figures of its report stand in the common table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

REPORT, WORK = "{report}", "{work}"  # in a command: a file for the report, an empty folder to work in


@dataclass(frozen=True)
class Row:
    """One figure: a ratio of ours to what it is measured against, or a share."""

    what: str
    ratio: float
    reference: str


@dataclass(frozen=True)
class Short:
    """A script with the arguments of its short form. Its report is JSON: on standard output, or in the file REPORT."""

    arguments: tuple[str, ...]
    rows: Callable[[Any], Iterator[Row]]


# ---------------------------------------------------------------- figures out of reports


def data(report: Any) -> Iterator[Row]:
    for part in (prepare, loader, startup, peers):
        yield from part(report[part.__name__])


def prepare(report: Any) -> Iterator[Row]:
    yield Row("`prepare`, speed", report["ratio_to_usual_script"], "the script that people write first")
    yield Row("`prepare`, speed", report["ratio_to_bare_encoder"], "the bare encoder")


def loader(report: Any) -> Iterator[Row]:
    yield Row("loader, speed, files in memory", report["warm"]["ratio"], "`np.memmap` of a flat file")
    if report["cold"]["ratio"] is not None:
        yield Row("loader, speed, files on disk", report["cold"]["ratio"], "`np.memmap` of a flat file")
    yield Row("waiting for a batch, time", report["step"]["share"], f"a step of `{report['step']['preset']}`")


def startup(report: Any) -> Iterator[Row]:
    first, *_, last = report["data_sets"]
    what = f"first batch of {last['tokens'] / 1e9:g} G tokens, time"
    yield Row(what, last["first"]["seconds"] / first["first"]["seconds"], f"of {first['tokens'] / 1e6:g} M tokens")


def peers(report: Any) -> Iterator[Row]:
    for name, one in report["loaders"].items():
        if name != "zerohalf":
            yield Row("loader, speed", one["ratio"], name)


def tokenizer(report: Any) -> Iterator[Row]:
    for language, ratios in report["ratio"].items():
        yield Row(f"encoding, speed, {language}", ratios["zerohalf"], "SentencePiece's `encode`")
    for name, one in report["times_one_thread"].items():
        if name in ("threads", "processes"):
            yield Row(f"encoding, speed, two {name}", one, f"one {name.removesuffix('s').removesuffix('e')}")


def tokenizer_training(report: Any) -> Iterator[Row]:
    for size in report["sizes"]:
        text = f"{size['text_bytes'] / 1e6:g} MB"
        plain = size["plain"]
        yield Row(f"training on {text}, CPU time", plain["cpu_time_ratio"], "SentencePiece's trainer alone")
        yield Row(f"training on {text}, memory", plain["memory_ratio"], "SentencePiece's trainer alone")


def model(reports: Any) -> Iterator[Row]:
    for report in reports:
        for one in report["ratios"]:
            what = f"forward and backward, speed, `{report['preset']}`, {report['dtype']}"
            yield Row(what + one["of"].removeprefix("zerohalf").rstrip(","), one["median"], one["to"])


def loss(report: Any) -> Iterator[Row]:
    yield Row("loss, memory", report["chunked_bytes"] / report["plain_bytes"], "all logits in fp32")
    yield Row("loss, CPU time of a step", report["time_ratio"], "all logits in fp32")


def generate(report: Any) -> Iterator[Row]:
    for one in report["speed"]:
        yield Row(f"`generate`, speed, {one['dtype']}, {one['batch_size']} rows", one["ratio"], "transformers")
    for one in report["late_cost"]:
        what = f"a late token, time beside attention, {one['dtype']}, {one['batch_size']} rows"
        yield Row(what, one["ratio_beyond_attention"], "an early token")


def freed_memory(report: Any) -> Iterator[Row]:
    yield Row("training with freed memory kept, speed", report["ratio"], "glibc's defaults")


def memory(report: Any) -> Iterator[Row]:
    for kind in ("static", "peak"):
        ratios = [one[f"{kind}_ratio"] for one in report]
        for name, value in (("least", min(ratios)), ("most", max(ratios))):
            yield Row(f"predicted memory, {kind}, {name} of {len(ratios)} cases", value, "what the engine holds")


def saving(report: Any) -> Iterator[Row]:
    for one in report:
        ranks = f"{one['ranks']} rank{'s' if one['ranks'] > 1 else ''}"
        yield Row(f"asynchronous save, time held, {ranks}", one["held_ratio"], "a save at once")
        yield Row(f"steps while it is written, time, {ranks}", one["step_ratio"], "steps alone")


def precision_study(report: Any) -> Iterator[Row]:
    for name, kind in report["kinds"].items():
        if name != "fp32":
            yield Row(f"updates that arrive, {name}", sum(kind["arrived"]) / len(kind["arrived"]), "fp32 masters")


def scaling_sweep(report: Any) -> Iterator[Row]:
    farthest = max(report["without_the_largest"], key=lambda one: one["tokens"])
    yield Row("loss of the largest size, forecast by the others' law", farthest["forecast"] / farthest["loss"],
              "as measured")  # fmt: skip


def gpu(report: Any) -> Iterator[Row]:
    speeds = [one for one in report["cases"] if "tokens_per_second" in one]
    static = [one["static_predicted_bytes"] / one["static_bytes"] for one in speeds]
    yield Row(f"predicted memory, static, one rank, median of {len(static)}", sorted(static)[len(static) // 2],
              "what the engine holds")  # fmt: skip
    saved = next(one for one in report["cases"] if "held_seconds" in one)
    yield Row("asynchronous save, time held", saved["held_seconds"] / saved["at_once_seconds"], "a save at once")


def overhead(report: Any) -> Iterator[Row]:
    for one in report["found"]:
        step = f"{one['tokens']:,} tokens a step, ZeRO-{one['stage']}"
        yield Row(f"training, time, {step}", one["wall_ratio"], "a bare loop without DeepSpeed")
        yield Row(f"training, CPU time, {step}", one["cpu_ratio"], "a bare loop without DeepSpeed")
        yield Row(f"waiting for data, time, {step}", one["data_wait"], "the step")


def trainer(report: Any) -> Iterator[Row]:
    for one in report["found"]:
        step = f"{one['ranks']} rank{'s' if one['ranks'] > 1 else ''}, ZeRO-{one['stage']}, {one['tokens']:,} tokens"
        yield Row(f"training, speed, {step}", one["wall_ratio"], "transformers' Trainer")
        yield Row(f"training, speed by CPU time, {step}", one["cpu_ratio"], "transformers' Trainer")


def ranks(report: Any) -> Iterator[Row]:
    for one in report["found"]:
        step = f"ZeRO-{one['stage']}, {one['tokens']:,} tokens a step"
        yield Row(f"two ranks, speed, {step}", one["speed_ratio"], "one rank, a thread each")
        yield Row(f"two ranks, CPU time, {step}", one["work_ratio"], "one rank, a thread each")


# ---------------------------------------------------------------- the benchmarks

BENCHMARKS: dict[str, Short] = {
    "data": Short(
        (
            "--json", "--work", WORK, "--repetitions", "2", "--megabytes", "2", "--files", "4", "--vocab-size", "8000",
            "--loader-megabytes", "40", "--batches", "200", "--cold-batches", "60", "--steps", "2",
            "--startup-tokens", "1e7", "1e10", "--peers-megabytes", "2",
        ),
        data,
    ),
    "tokenizer": Short(
        (
            "--json", "--vocab-size", "8000", "--megabytes", "2", "--warm-megabytes", "2", "--train-megabytes", "6",
            "--rounds", "3",
        ),
        tokenizer,
    ),
    "tokenizer_training": Short(("--json", "--megabytes", "2", "--repetitions", "2"), tokenizer_training),
    "model": Short(("--json", "--preset", "mini", "--batch-size", "2", "--pairs", "5"), model),
    "loss": Short(("--json", "--pairs", "3", "--sequences", "1"), loss),
    "generate": Short(("--json", "--repetitions", "3", "--steps", "20", "--new-tokens", "32"), generate),
    "freed_memory": Short(("--json", "--pairs", "2", "--steps", "12"), freed_memory),
    "memory": Short(("--json", "--quick"), memory),
    "saving": Short(("--json", "--ranks", "1", "--rounds", "3", "--work", WORK), saving),
    "precision_study": Short(
        (
            "--json", "--width", "64", "--layers", "1", "--seq-len", "64", "--vocab-size", "2048",
            "--first-steps", "40", "--steps", "40", "--evaluation-tokens", "2048",
        ),
        precision_study,
    ),
    "scaling_sweep": Short(("--short", "--work", WORK, "--json", REPORT), scaling_sweep),
    "overhead": Short(("--json", "--stage", "2", "--blocks", "5", "--block-tokens", "8192"), overhead),
    "trainer": Short(("--json", "--quick"), trainer),
    "ranks": Short(("--json", "--quick", "--block-steps", "1"), ranks),
    "gpu": Short(("--tiny", "--work", WORK, "--json", REPORT), gpu),
}  # fmt: skip
