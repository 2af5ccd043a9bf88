"""pretrain generate."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from pretrain.verbs.options import Asked
from pretrain.verbs.telling import complain, memory_told

EXAMPLES = """
python -m pretrain generate runs/mini --prompt 'It is a truth'
python -m pretrain generate runs/mini --prompt 'def main(' --temperature 0 --stop '\\n\\n' --stream
python -m pretrain generate runs/mini --prompt 'Once' --prompt '从前' --top-p 0.9 --seed 7 --json
python -m pretrain generate runs/mini --file prompts.txt --num-samples 4 --compare runs/other
python -m pretrain generate exported/mini --interactive
"""


def generate(
    asked: Asked,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="Several are continued as one batch, each as if alone."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts, one a line; .jsonl: a field of each line; -: stdin.")
    ] = None,
    name: Annotated[str, typer.Option("--field", metavar="NAME", help="Of a .jsonl file.")] = "prompt",
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Continue what is typed; Ctrl-C ends a text, Ctrl-D all.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=0, metavar="N", help="Of the N likeliest; 0: of all.")] = 50,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, metavar="P", help="Of the fewest that together reach P.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, metavar="P", help="Of those P times as likely as the likeliest.")
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(metavar="X", help="Above 1: what stands in the text already becomes less likely.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help=r"End before it; \n is a line's end. May be repeated.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Same prompt, same seed: same text.")
    ] = 1,
    num_samples: Annotated[
        int, typer.Option(min=1, max=10_000, metavar="N", help="Texts a prompt: with this seed and those behind it.")
    ] = 1,
    compare: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN|CHECKPOINT|DIR", help="Ask this one too: same prompts, same seeds. May be repeated."),
    ] = None,
    streaming: Annotated[
        bool, typer.Option("--stream", help="Print a text as it comes, one prompt at a time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a text instead of text.")] = False,
) -> None:
    """Continue prompts with the model of a run, a checkpoint or an export, by the tokenizer that goes with it."""
    from model.generate import Sampling
    from pretrain.config import RecipeError
    from pretrain.generate import continue_prompts, read_prompts, stream, typed_prompts
    from pretrain.subject import open_subject
    from tokenizer.codec import TokenizerError

    if [bool(prompts), file is not None, interactive].count(True) != 1:
        raise RecipeError("say what to continue: --prompt TEXT, --file FILE or --interactive, one of them")
    if (streaming or interactive) and as_json:
        raise RecipeError("--json prints whole texts: leave out --stream and --interactive")
    if (interactive or streaming) and num_samples > 1:
        raise RecipeError("--num-samples needs whole texts: leave out --stream and --interactive")
    if (interactive or streaming) and compare:
        raise RecipeError("--compare needs whole texts: leave out --stream and --interactive")
    try:
        sampling = Sampling(temperature, top_k or None, top_p, min_p, repetition_penalty)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "stop_strings": [text.replace("\\n", "\n") for text in stop or ()],
    }
    wanted = prompts or (read_prompts(file, name) if file is not None else [])
    with memory_told("give fewer or shorter prompts, or set --max-new-tokens lower"):
        subjects = [
            open_subject(path, accelerator=os.environ.get("DS_ACCELERATOR")) for path in (asked, *(compare or ()))
        ]
        if interactive or streaming:
            for prompt in typed_prompts() if interactive else wanted:
                print(prompt if not interactive else "", end="", flush=True)
                try:
                    for piece in stream(subjects[0], prompt, sampling, seed=seed, **settings):
                        print(piece, end="", flush=True)
                except (RecipeError, TokenizerError) as error:
                    if not interactive:
                        raise
                    complain(str(error))
                except KeyboardInterrupt:
                    if not interactive:
                        raise
                print(flush=True)
            return
        # By sample, then model: a prompt's texts side by side, each of which draws with the seed of its sample.
        found = {
            (sample, number): list(continue_prompts(subject, wanted, sampling, seed=seed + sample, **settings))
            for sample in range(num_samples)
            for number, subject in enumerate(subjects)
        }
    for number, prompt in enumerate(wanted):
        if len(wanted) > 1 and not as_json:
            print(f"──── prompt {number + 1} of {len(wanted)} ────")
        for (sample, which), texts in found.items():
            told: dict[str, Any] = {"subject": subjects[which].name} if compare else {}
            told |= {"seed": seed + sample} if num_samples > 1 else {}
            _show(prompt, texts[number][1], told, as_json=as_json)


def _show(prompt: str, text: str, told: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"prompt": prompt, "continuation": text, **told}, ensure_ascii=False))
        return
    if told:
        print(f"── {', '.join(f'seed {value}' if key == 'seed' else value for key, value in told.items())} ──")
    print(prompt + text)
