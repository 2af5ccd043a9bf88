"""What a report draws of a run's looks at itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretrain.chronicle import read
from pretrain.inside import inside
from tests.pretrain.written_run import train, write_run


def look(step: int, **values: Any) -> dict[str, Any]:
    return {
        "kind": "observation", "step": step, "attempt": 1, "update_ratio": 0.01 * step, "update_ratio_of": "a matrix",
        "update_ratio_median": 0.005, "attention_logit": 30.0 * step, "dead_units": 0.0, "saturated_units": 0.0,
        "residual_rms_by_layer": [float(layer + step) for layer in range(9)], "at": "2026-01-01T00:30:00.000+00:00",
        **values,
    }  # fmt: skip


def test_what_was_looked_at_is_drawn(tmp_path: Path) -> None:
    steps = [train(step) for step in range(1, 5)]
    run = read(write_run(tmp_path / "run", [*steps, look(2), look(4)]))
    assert [one.title for one in inside(run)] == ["Attention's scores", "Updates", "Residual stream"]
    scores, _, stream = inside(run)
    assert "alarm above 1000" in [entry.label for entry in scores.legend]  # 120 is more than a tenth of it
    assert [entry.label for entry in stream.legend] == [f"behind layer {layer}" for layer in (0, 2, 4, 6, 8)]


def test_what_was_not_is_not(tmp_path: Path) -> None:
    steps = [train(step) for step in range(1, 5)]
    assert inside(read(write_run(tmp_path / "once", [*steps, look(4)]))) == []
    holes = {name: None for name in look(1) if name.startswith(("update", "residual", "attention"))}
    idle = [look(2, **holes, dead_units=0.5), look(4, **holes, dead_units=None)]
    assert [one.title for one in inside(read(write_run(tmp_path / "holes", [*steps, *idle])))] == ["Idle units"]
