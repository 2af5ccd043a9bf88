"""Alarms and the judgement of a step, by their numbers; and that a step which may not be made moves nothing at all."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from pretrain.config import HealthTable, RecipeError
from pretrain.engine import TrainingEngine, process_group
from pretrain.health import Alarm, Monitor
from pretrain.resolve import resolve
from pretrain.runtime import Ranks
from pretrain.spikes import Judge, Window
from pretrain.step import train_step
from tests.pretrain.recipe import recipe
from tests.pretrain.test_engine import build_model, micro_batches, plan_of
from tests.pretrain.test_offload import IN_MAIN_MEMORY
from tests.pretrain.test_optimizer import recipe as optimizer_recipe
from tests.pretrain.test_optimizer import states
from tests.ranks import run_ranks

# ---------------------------------------------------------------- the recipe


@pytest.mark.parametrize(
    "health, told",
    [
        ({"non_finite": "warn"}, "health.non_finite = 'warn'"),
        ({"rank_mismatch": "skip"}, "health.rank_mismatch = 'skip'"),
        ({"hang": "roll_back"}, "health.hang = 'roll_back'"),
        ({"loss_spikes": "warn"}, "did you mean health.loss_spike?"),
        ({"window_steps": 7}, "health.window_steps = 7"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_in_one_line(health: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError) as refused:
        recipe(health=health)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_run_that_may_go_back_keeps_checkpoints_old_enough() -> None:
    back = {"loss_spike": "roll_back", "roll_back_steps": 150}
    with pytest.raises(RecipeError, match=r"may reach back 101: set checkpoint.keep_last = 4, or lower .* to 101"):
        recipe(health=back, checkpoint={"keep_last": 3})
    recipe(health=back, checkpoint={"keep_last": 4})
    recipe(health=back, checkpoint={"keep_every_steps": 150})
    with pytest.raises(RecipeError, match=r"keep_every_steps 200 is rarer than that: set checkpoint.keep_last = 4"):
        recipe(health=back, checkpoint={"keep_every_steps": 200})
    recipe(health={"roll_back_steps": 10_000})


# ---------------------------------------------------------------- alarms


def test_an_alarm_is_said_when_it_begins_and_recorded_each_time() -> None:
    told: list[Alarm] = []
    said: list[str] = []
    monitor = Monitor(HealthTable(update_ratio="off"), told.append, said.append)
    assert monitor.raise_alarm(3, "attention_logit", 120.0, 100.0, "layer 1") == "warn"
    assert monitor.raise_alarm(4, "attention_logit", 130.0, 100.0, "layer 1") == "warn"
    assert monitor.raise_alarm(4, "update_ratio", 9.0, 1.0, "") is None
    assert [alarm.step for alarm in told] == [3, 4]
    assert said == ["alarm: step 3: attention_logit 120 (above 100): layer 1; action: warn"]
    assert monitor.harm == ["attention_logit"]
    assert [alarm.step for alarm in monitor.take()] == [3]
    assert monitor.take() == []
    monitor.is_over("attention_logit")
    assert monitor.harm == []
    monitor.raise_alarm(9, "attention_logit", 120.0, 100.0, "layer 1")
    assert len(said) == 2


def test_the_gravest_action_comes_first_and_a_late_rank_spoils_no_checkpoint() -> None:
    monitor = Monitor(HealthTable(loss_spike="roll_back", grad_norm_spike="skip"))
    for condition in ("late_rank", "grad_norm_spike", "loss_spike", "rank_mismatch"):
        monitor.raise_alarm(1, condition, 2.0, 1.0, "")  # type: ignore[arg-type]
    assert [alarm.action for alarm in monitor.take()] == ["stop", "roll_back", "skip", "warn"]
    assert monitor.harm == ["grad_norm_spike", "loss_spike", "rank_mismatch"]


def test_behind_a_checkpoint_only_what_is_still_watched_stays_on() -> None:
    """Each start gives all ranks the same weights, and what is off never ends."""
    monitor = Monitor(HealthTable(attention_logit="off"))
    monitor.goes_on(("attention_logit", "dead_units", "rank_mismatch", "late_rank"))
    assert monitor.on == {"dead_units"}


def test_an_alarm_that_stops_is_known_before_it_is_taken() -> None:
    monitor = Monitor(HealthTable())
    monitor.raise_alarm(1, "loss_spike", 2.0, 1.0, "")
    assert monitor.stopping is None
    monitor.raise_alarm(2, "rank_mismatch", 1.0, 0.0, "")
    assert monitor.stopping is not None
    assert monitor.stopping.condition == "rank_mismatch"
    monitor.take()
    assert monitor.stopping is None


# ---------------------------------------------------------------- the judge


def test_a_limit_by_hand() -> None:
    """1 … 9 has median 5 and median distance 2: s = 2.9652. A hundred in it moves the median by one place at most."""
    window = Window(9, [float(value) for value in range(1, 10)])
    assert window.limit(3.0, logarithmic=False) == pytest.approx(5 + 3 * 2.9652)
    wild = Window(9, [*(float(value) for value in range(1, 9)), 1e9])
    assert wild.limit(3.0, logarithmic=False) == pytest.approx(5 + 3 * 2.9652)
    still = Window(9, [4.0] * 9)
    assert still.limit(10.0, logarithmic=False) == pytest.approx(4.0 * 1.1)
    assert still.limit(10.0, logarithmic=True) == pytest.approx(4.0 * math.e)
    assert Window(9, [4.0] * 3).limit(10.0, logarithmic=False) is None


def judge(monitor: Monitor) -> Judge:
    return Judge(monitor.table, monitor)


def fed(one: Judge, losses: list[float], norms: list[float], first: int = 1) -> None:
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), first):
        one.judge(step, loss, norm, updated=True, overflowed=False)


def test_spikes_are_told_from_noise() -> None:
    """3,000 steps of a falling loss whose noise is that of small batches, gradients that differ by factors: silence.
    Then one of each."""
    draw = random.Random(5)
    told: list[Alarm] = []
    one = judge(Monitor(HealthTable(), told.append))
    steps = range(3000)
    losses = [2.5 + 6 * math.exp(-step / 40) + draw.gauss(0, 0.05) for step in steps]
    norms = [math.exp(draw.gauss(0, 0.3)) * (1 + 5 * math.exp(-step / 20)) for step in steps]
    fed(one, losses, norms)
    assert told == []
    fed(one, [3.5, 2.5], [1.0, 1000.0], first=3001)
    assert [(alarm.step, alarm.condition) for alarm in told] == [(3001, "loss_spike"), (3002, "grad_norm_spike")]
    assert told[0].value == 3.5
    assert told[0].threshold == pytest.approx(3.0, abs=0.15)
    assert "of the last 100 healthy steps" in told[0].detail


def test_a_spike_is_over_with_the_next_healthy_step_and_is_no_part_of_what_follows() -> None:
    one = judge(Monitor(HealthTable(window_steps=8)))
    fed(one, [4.0] * 8, [1.0] * 8)
    fed(one, [9.0], [1.0], first=9)
    assert one.monitor.harm == ["loss_spike"]
    assert [*one.losses.values] == [4.0] * 8
    fed(one, [4.0], [1.0], first=10)
    assert one.monitor.harm == []


def test_a_level_that_lasts_is_no_spike() -> None:
    told: list[Alarm] = []
    one = judge(Monitor(HealthTable(window_steps=8), told.append))
    fed(one, [4.0] * 8 + [9.0] * 30, [1.0] * 38)
    assert [alarm.step for alarm in told] == [*range(9, 17)]


def test_a_level_lasts_over_a_resume_too() -> None:
    """Spikes in a row are counted behind a checkpoint as they would have been without it."""
    table = HealthTable(window_steps=8)
    whole = judge(Monitor(table))
    fed(whole, [4.0] * 8 + [9.0] * 5, [1.0] * 13)
    again = Judge(table, Monitor(table), whole.to_dict())
    for one in (whole, again):
        fed(one, [9.0] * 3, [1.0] * 3, first=14)
    assert whole.to_dict() == again.to_dict()
    assert whole.to_dict()["losses"] == []


def test_an_overflow_of_fp16_is_no_alarm_but_many_in_a_row_are() -> None:
    told: list[Alarm] = []
    one = judge(Monitor(HealthTable(skipped_in_a_row=3), told.append))
    for step in range(1, 8):
        one.judge(step, 4.0, math.inf, updated=False, overflowed=True)
    assert [(alarm.step, alarm.condition, alarm.value) for alarm in told] == [
        (3, "skipped_steps", 3), (6, "skipped_steps", 6),
    ]  # fmt: skip
    one.judge(8, math.nan, math.inf, updated=False, overflowed=True)
    assert told[-1].condition == "non_finite"


def test_what_a_policy_lets_update() -> None:
    for policy, allowed in (("off", True), ("warn", True), ("skip", False), ("stop", False), ("roll_back", False)):
        one = judge(Monitor(HealthTable(window_steps=8, loss_spike=policy)))  # type: ignore[arg-type]
        fed(one, [4.0] * 8, [1.0] * 8)
        assert one.allows(9.0, 1.0) is allowed
        assert one.allows(4.1, 1.0)
        assert not one.allows(math.nan, 1.0)
        assert not one.allows(4.0, math.inf)


def test_a_judge_goes_on_where_another_was() -> None:
    one = judge(Monitor(HealthTable(window_steps=8)))
    fed(one, [4.0, 4.1, 4.2, 3.9, 3.8], [1.0, 1.1, 1.2, 0.9, 0.8])
    other = Judge(one.table, Monitor(one.table), one.to_dict())
    assert other.to_dict() == one.to_dict()
    assert other.findings(9.0, 9.0) == one.findings(9.0, 9.0) != []


# ---------------------------------------------------------------- a step that may not be made

# Optimizer and precision as test_optimizer.py names them, the stage, and what is offloaded.
HELD: list[tuple[str, int, tuple[str, ...]]] = [
    ("plain", 0, ()), ("bf16", 0, ()), ("bf16", 1, ()), ("bf16", 3, ()),
    ("bf16", 2, ("offload_optimizer",)), ("bf16", 3, ("offload_optimizer", "offload_param")),
    ("muon", 3, ()), ("muon, kahan", 2, ()), ("stochastic", 3, ()), ("adamw8bit", 2, ()),
]  # fmt: skip


def engine_of(ranks: Ranks, name: str, stage: int, offloaded: tuple[str, ...]) -> tuple[TrainingEngine, Any]:
    config = optimizer_recipe("adamw" if name in ("plain", "bf16") else name)
    if name == "bf16":
        precision = config.precision.model_copy(update={"compute": "bf16", "accumulate": "fp32" if stage else "bf16"})
        config = config.model_copy(update={"precision": precision})
    zero: dict[str, Any] = {"stage": stage, **dict.fromkeys(offloaded, IN_MAIN_MEMORY)}
    if stage == 3:
        zero["sub_group_size"] = 5_000  # several calls of the optimizer a step
    resolved = resolve({"zero_optimization": zero}, config, ranks.world_size)
    return TrainingEngine(build_model(config), config, resolved, ranks, torch.device("cpu")), config


def held_everything(engine: TrainingEngine) -> list[torch.Tensor]:
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in engine._engine.module.parameters()]
    return [tensor.detach().clone() for tensor in (*weights, *states(engine))]


def held_case(ranks: Ranks, cases: list[tuple[str, int, tuple[str, ...]]]) -> list[dict[str, Any]]:
    found = []
    with process_group(torch.device("cpu")):
        for case in cases:
            asked: list[tuple[float, float]] = []

            def refuse(loss: float, norm: float, asked: Any = asked) -> bool:
                asked.append((loss, norm))
                return False

            runs = []
            for held in (True, False):
                engine, config = engine_of(ranks, *case)
                batches, plan = micro_batches(config, ranks), plan_of(config, ranks)
                first = train_step(engine, batches, plan, 1e-3)
                before = held_everything(engine)
                second = train_step(engine, batches, plan, 1e-3, allows=refuse) if held else None
                behind = held_everything(engine)
                third = train_step(engine, batches, plan, 1e-3)
                runs.append((first, second, third, held_everything(engine)))
                same = [torch.equal(a, b) for a, b in zip(before, behind, strict=True)]
                if held:
                    found.append({"unmoved": all(same), "held": (first.held, second and second.held, third.held)})
            (_, second, third, end), (_, _, reference, other) = runs
            found[-1] |= {
                "asked": len(asked) == 1 and asked[0] == (second.loss, second.grad_norm),  # type: ignore[union-attr]
                "norm": second.grad_norm == third.grad_norm,  # type: ignore[union-attr]
                "third": (third.loss, third.grad_norm) == (reference.loss, reference.grad_norm),
                "end": len(end) == len(other) and all(torch.equal(a, b) for a, b in zip(end, other, strict=True)),
                "moved": not all(torch.equal(a, b) for a, b in zip(end, before, strict=True)),
            }
    return found


def test_a_held_step_moves_nothing_and_the_next_is_as_if_it_had_not_been() -> None:
    """Weights, masters, moments and the count of steps, bit for bit, on both ranks."""
    for results in run_ranks(2, held_case, HELD):
        for case, found in zip(HELD, results, strict=True):
            assert found == {
                "unmoved": True, "held": (False, True, False), "asked": True, "norm": True, "third": True, "end": True,
                "moved": True,
            }, (case, found)  # fmt: skip
