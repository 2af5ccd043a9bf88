from __future__ import annotations

import pytest

from model.accounting import parameter_count
from model.config import PRESETS
from pretrain.config import RecipeError
from pretrain.memory import static_budget

HALF_B = parameter_count(PRESETS["0.5b"])

# Bytes per parameter measured on live engines with two ranks; None: refused, or not what was asked for.
MEASURED = {
    ("fp32", "bf16"): [16, 10, 9, 8],
    ("fp32", "fp32"): [None, 14, 10, 9],
    ("bf16", "bf16"): [None, 7, 6, 5],
    ("bf16", "fp32"): [None, None, 7, 6],
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("master, accumulate", MEASURED)
def test_two_ranks_hold_what_was_measured(master, accumulate, stage):
    expected = MEASURED[master, accumulate][stage]
    if expected is None:
        with pytest.raises(RecipeError):
            static_budget(10**6, stage, 2, master, accumulate)
    else:
        assert static_budget(10**6, stage, 2, master, accumulate).bytes_per_parameter == expected


@pytest.mark.parametrize("accumulate, measured", [("fp16", [10, 9, 8]), ("fp32", [12, 10, 9])])
def test_fp16_on_two_ranks_holds_what_was_measured(accumulate, measured):
    budgets = [static_budget(10**6, stage, 2, "fp32", accumulate, "fp16") for stage in (1, 2, 3)]
    assert [budget.bytes_per_parameter for budget in budgets] == measured
    with pytest.raises(RecipeError, match="does not scale the loss"):
        static_budget(10**6, 0, 2, "fp32", accumulate, "fp16")


@pytest.mark.parametrize("stage, expected", [(0, 16), (1, 14), (2, 12), (3, 10)])
def test_fp32_compute_on_two_ranks_holds_what_was_measured(stage, expected):
    assert static_budget(10**6, stage, 2, "fp32", "fp32", "fp32").bytes_per_parameter == expected


@pytest.mark.parametrize(
    "stage, master, accumulate, gigabytes",
    [
        (0, "fp32", "bf16", 8.04),
        (1, "fp32", "fp32", 10.04),
        (2, "fp32", "fp32", 9.04),
        (3, "fp32", "fp32", 9.04),
        (1, "bf16", "bf16", 5.02),
        (3, "bf16", "bf16", 5.02),
    ],
)
def test_reference_figures_unsharded(stage, master, accumulate, gigabytes):
    assert static_budget(HALF_B, stage, 1, master, accumulate).total_bytes / 1e9 == pytest.approx(gigabytes, abs=0.005)


def test_parts_name_their_formulas_and_sum_up():
    budget = static_budget(HALF_B, 2, 8, "fp32", "fp32")
    assert {part.name: part.formula for part in budget.parts} == {
        "weights": "2P",
        "gradients": "4P/8",
        "accumulation buffer": "0",
        "masters": "4P/8",
        "moments": "8P/8",
    }
    assert sum(part.bytes for part in budget.parts) == budget.total_bytes


def test_a_partition_is_rounded_up():
    parts = {part.name: part.bytes for part in static_budget(10, 3, 3, "fp32", "bf16").parts}
    assert parts["weights"] == 2 * 4
