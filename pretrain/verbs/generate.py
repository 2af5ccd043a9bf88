"""pretrain generate."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from pretrain.verbs.options import Checkpoint
from pretrain.verbs.telling import memory_told

EXAMPLES = """
python -m pretrain generate runs/mini --prompt 'It is a truth'
python -m pretrain generate runs/mini --prompt 'def main(' --temperature 0 --max-new-tokens 100
python -m pretrain generate runs/mini --prompt 'Once' --prompt '从前' --top-p 0.9 --seed 7 --json
"""


def generate(
    checkpoint: Checkpoint,
    prompts: Annotated[
        list[str],
        typer.Option("--prompt", metavar="TEXT", help="Several are continued as one batch, each as if alone."),
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, metavar="N")] = 50,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, metavar="P")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Same prompt, same seed: same text.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt instead of text.")] = False,
) -> None:
    """Continue prompts with the model of a run or checkpoint, by the tokenizer that the run carries."""
    from pretrain.generate import continue_prompts

    continued = continue_prompts(
        checkpoint,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        accelerator=os.environ.get("DS_ACCELERATOR"),
    )
    with memory_told("give fewer or shorter prompts, or set --max-new-tokens lower"):
        for number, (prompt, continuation) in enumerate(continued, 1):
            if as_json:
                print(json.dumps({"prompt": prompt, "continuation": continuation}, ensure_ascii=False))
                continue
            if len(prompts) > 1:
                print(f"──── prompt {number} of {len(prompts)} ────")
            print(prompt + continuation)
