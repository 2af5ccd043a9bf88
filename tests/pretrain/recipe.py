"""The smallest whole recipe, for tests that change one thing of it."""

from __future__ import annotations

import tomllib
from typing import Any

from pretrain.config import RunConfig, parse_recipe

TEXT = """
[model]
preset = "mini"

[data]
path = "data/x"
tokenizer = "tokenizers/x"

[batch]
global_batch_size = 32
micro_batch_size = 4

[schedule]
peak_lr = 1e-3
min_lr = 1e-4
warmup_steps = 10
max_steps = 100

[evaluation]
every_steps = 50

[checkpoint]
every_steps = 50
"""


def recipe(**tables: Any) -> RunConfig:
    """The recipe above with some values, of some tables or beside them, replaced."""
    whole = tomllib.loads(TEXT)
    for name, values in tables.items():
        whole[name] = {**whole.get(name, {}), **values} if isinstance(values, dict) else values
    return parse_recipe(whole)
