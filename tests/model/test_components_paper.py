"""The table of docs/components.md is what the arithmetic says."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

from model.accounting import flops_per_token, kv_cache_bytes_per_token, parameter_count
from model.config import PRESETS

PAPER = Path(__file__).parents[2] / "docs" / "components.md"


def test_what_each_component_costs() -> None:
    text = PAPER.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \| ([\d,]+) \| ([\d.]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert len(rows) == 13
    for change, parameters, megaflops, cache in rows:
        fields = tomllib.loads("\n".join(re.findall(r"`(\w+ = [^`]+)`", change)))
        others = [{**fields, next(iter(fields)): other} for other in re.findall(r'or `"(\w+)"`', change)]
        for choice in (fields, *others):
            config = replace(PRESETS["mini"], **choice)
            assert f"{parameter_count(config):,}" == parameters, change
            assert f"{flops_per_token(config).causal / 1e6:.1f}" == megaflops, change
            assert f"{kv_cache_bytes_per_token(config):,}" == cache, change
