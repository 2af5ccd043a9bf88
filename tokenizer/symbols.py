"""The ids that are no pieces of text: the fixed control ids, control symbols, spare ids, and symbols matched in text.

    0 to 3        <unk> <s> </s> <pad>
    then          control symbols in the order given, then the spare ones <|reserved_0|>, <|reserved_1|> …
    then          user symbols in the order given
    then          256 bytes, and all that is learned

Text never becomes a control symbol, not even text that spells it. A user symbol always becomes one id wherever it
stands in a text, so whoever writes the text can write it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizer.codec import SPACE_MARK, TokenizerError
from tokenizer.sample import TRAINER_RESERVED

CONTROL_IDS = {"unk": 0, "bos": 1, "eos": 2, "pad": 3}
FIXED_NAMES = ("<unk>", "<s>", "</s>", "<pad>")
BYTE_PIECES = 256
MAX_SYMBOL_CHARACTERS = 128


@dataclass(frozen=True)
class Symbols:
    """What stands in the vocabulary between the four fixed ids and the bytes."""

    control: tuple[str, ...]  # the spare ones last
    user: tuple[str, ...]

    @cached_property  # a dictionary a look-up would be quadratic
    def ids(self) -> dict[str, int]:
        """The id of each, by name."""
        return {name: token_id for token_id, name in enumerate(self.control + self.user, len(CONTROL_IDS))}

    @property
    def fixed_pieces(self) -> int:
        """How many ids are given before anything is learned."""
        return len(CONTROL_IDS) + len(self.control) + len(self.user) + BYTE_PIECES


def arrange(control: Sequence[str], user: Sequence[str], *, spare: int) -> Symbols:
    """The symbols in the order of their ids, `spare` reserved ones among them.

    Raises TokenizerError for a name that is empty, given twice, or stands for something else already: white space, a
    byte, a fixed id.
    """
    symbols = Symbols((*control, *(f"<|reserved_{number}|>" for number in range(spare))), tuple(user))
    seen = set(FIXED_NAMES)
    for name in symbols.control + symbols.user:
        if fault := _fault(name, seen):
            raise TokenizerError(f"symbol {name!r}: {fault}")
        seen.add(name)
    alone = next((name for name in symbols.control if len(name) == 1), None)
    if alone is not None:
        raise TokenizerError(f"symbol {alone!r}: a control symbol of one character would take it away from text")
    return symbols


def _fault(name: str, seen: set[str]) -> str | None:
    if not name:
        return "empty; give it a name such as <|name|>"
    if name in FIXED_NAMES:
        return "is one of the four fixed ids already"
    if name in seen:
        return "is given twice; each symbol has one id"
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", name):
        return "is how a single byte is written in the vocabulary"
    if not name.isprintable() or any(character in name for character in (" ", SPACE_MARK, TRAINER_RESERVED)):
        return "white space, U+2581, U+2585 and characters that do not print cannot stand in a symbol"
    if len(name) > MAX_SYMBOL_CHARACTERS:
        return f"has {len(name)} characters; at most {MAX_SYMBOL_CHARACTERS} are possible"
    return None
