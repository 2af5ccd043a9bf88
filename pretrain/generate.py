"""Text from a model: prompts → ids → continuations → text, whole or as it comes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from model.generate import Sampling, generate_steps
from pretrain.config import RecipeError
from pretrain.subject import Subject
from tokenizer.codec import Codec

BATCH_SIZE = 16  # prompts continued at a time: more would only hold more of the cache
BROKEN = "\ufffd"


@dataclass
class Continuation:
    """The text behind one prompt as its ids come in.

    `settled` is what no later id can change: not the beginning of a character whose other bytes are still to come, nor
    what may turn out to be the beginning of a stop string. Whatever a text ends with stands in `text` at its end.
    """

    codec: Codec
    stop_strings: tuple[str, ...] = ()
    ids: list[int] = field(default_factory=list)
    text: str = ""
    settled: str = ""
    ended: bool = False

    def add(self, token_id: int) -> None:
        """One id more; the EOS, or a stop string that is complete now, ends the text and is no part of it."""
        if self.ended:
            return
        if token_id == self.codec.eos_id:
            self.end()
            return
        self.ids.append(token_id)
        self.text = self.codec.decode(self.ids)
        whole = self.text.rstrip(BROKEN)  # a character that lacks bytes stands as these until it has them
        found = [at for at in (whole.find(stop) for stop in self.stop_strings) if at >= 0]
        if found:
            self.text = whole[: min(found)]
            self.end()
            return
        self.settled = whole[: len(whole) - self._beginning_of_a_stop(whole)]

    def end(self) -> None:
        """No more ids come."""
        self.settled, self.ended = self.text, True

    def _beginning_of_a_stop(self, text: str) -> int:
        """How many characters at the text's end may begin a stop string."""
        longest = max((len(stop) - 1 for stop in self.stop_strings), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stop_strings):
                return length
        return 0


def continue_prompts(
    subject: Subject,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seed: int,
    stop_strings: Sequence[str] = (),
) -> Iterator[tuple[str, str]]:
    """Each prompt with its continuation, which ends at EOS, before a stop string, or after `max_new_tokens`.

    A prompt stands where a document begins in training: behind an EOS. Prompts are continued as one batch, up to
    BATCH_SIZE of them, and each draws as if it were alone. Raises RecipeError for a prompt too long, an empty stop
    string, or a model whose logits are not finite.
    """
    rows = _rows(subject, prompts, max_new_tokens, stop_strings)
    for first in range(0, len(prompts), BATCH_SIZE):
        batch = slice(first, first + BATCH_SIZE)
        *_, last = continue_ids(subject, rows[batch], sampling, max_new_tokens, seed, stop_strings)
        yield from zip(prompts[batch], (one.text for one in last), strict=True)


def stream(
    subject: Subject,
    prompt: str,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seed: int,
    stop_strings: Sequence[str] = (),
) -> Iterator[str]:
    """The continuation of one prompt in pieces as they come, whole characters each; together what `continue_prompts`
    gives. Errors as there."""
    told = 0
    rows = _rows(subject, [prompt], max_new_tokens, stop_strings)
    for (one,) in continue_ids(subject, rows, sampling, max_new_tokens, seed, stop_strings):
        if len(one.settled) > told:
            yield one.settled[told:]
            told = len(one.settled)


def _rows(
    subject: Subject, prompts: Sequence[str], max_new_tokens: int, stop_strings: Sequence[str]
) -> list[list[int]]:
    if not all(stop_strings):
        raise RecipeError("an empty stop string stands in every text: leave it out")
    rows = [[subject.codec.eos_id, *subject.codec.encode(prompt)] for prompt in prompts]
    for number, row in enumerate(rows, 1):
        if len(row) + max_new_tokens > subject.config.seq_len:
            which = "the prompt" if len(rows) == 1 else f"prompt {number}"
            raise RecipeError(
                f"{which}'s {len(row)} tokens and {max_new_tokens} new ones exceed the model's seq_len "
                f"{subject.config.seq_len}: shorten the prompt or --max-new-tokens"
            )
    return rows


def continue_ids(
    subject: Subject,
    rows: Sequence[Sequence[int]],
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
    stop_strings: Sequence[str],
) -> Iterator[list[Continuation]]:
    """The continuations of rows of ids, one id longer each time, until all have ended.

    Raises RecipeError where the model cannot continue them.
    """
    continuations = [Continuation(subject.codec, tuple(stop_strings)) for _ in rows]
    steps = generate_steps(subject.model, rows, max_new_tokens, sampling, seed=seed, known_ids=subject.codec.vocab_size)
    try:
        for number, ids_b in enumerate(steps, 1):
            for one, token_id in zip(continuations, ids_b.tolist(), strict=True):
                one.add(token_id)
                if number == max_new_tokens:
                    one.end()
            yield continuations
            if all(one.ended for one in continuations):
                return
    except ValueError as error:
        raise RecipeError(f"cannot generate from {subject.name}: {error}") from None


# ---------------------------------------------------------------- prompts


def read_prompts(path: Path, name: str = "prompt") -> list[str]:
    """Prompts out of a file, or of standard input as `-`: one a line; of .jsonl the field `name` of each line.

    Raises RecipeError, with the line, for what holds no prompt.
    """
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is no UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            line = _field(path, number, line, name)
        prompts.append(line)
    if not prompts:
        raise RecipeError(f"{path} holds no prompt: write one a line")
    return prompts


def _field(path: Path, number: int, line: str, name: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise RecipeError(f"{path}, line {number} is no JSON") from None
    prompt = found.get(name) if isinstance(found, dict) else None
    if not isinstance(prompt, str):
        raise RecipeError(f'{path}, line {number} has no text "{name}": add it, or name the field with --field')
    return prompt


def typed_prompts() -> Iterator[str]:
    """What a person types, a line at a time, until Ctrl-D; Ctrl-C at the prompt asks again."""
    if sys.stdin.isatty() and os.name == "posix":
        import readline  # noqa: F401  # editing and history for input()
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            continue
        if line.strip():
            yield line
