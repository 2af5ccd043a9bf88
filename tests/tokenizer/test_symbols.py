from __future__ import annotations

import pytest

from tokenizer.codec import TokenizerError
from tokenizer.symbols import Symbols, arrange


def test_ids_follow_the_order_given() -> None:
    symbols = arrange(["<|user|>", "<|tool|>"], ["<think>", "→"], spare=2)
    assert symbols == Symbols(("<|user|>", "<|tool|>", "<|reserved_0|>", "<|reserved_1|>"), ("<think>", "→"))
    assert symbols.ids == {
        "<|user|>": 4,
        "<|tool|>": 5,
        "<|reserved_0|>": 6,
        "<|reserved_1|>": 7,
        "<think>": 8,
        "→": 9,
    }
    assert symbols.fixed_pieces == 4 + 6 + 256


def test_a_look_up_of_one_id_does_not_number_them_all_again() -> None:
    symbols = arrange(["<|user|>"], [], spare=3000)
    assert symbols.ids is symbols.ids


def test_no_symbols_leave_the_four_ids_and_the_bytes() -> None:
    assert arrange([], [], spare=0).ids == {}
    assert arrange([], [], spare=0).fixed_pieces == 260


REFUSED = [
    ([""], [], "empty"),
    ([], [""], "empty"),
    (["</s>"], [], "fixed ids"),
    ([], ["<unk>"], "fixed ids"),
    (["<|a|>", "<|a|>"], [], "twice"),
    (["<|a|>"], ["<|a|>"], "twice"),
    (["<|reserved_1|>"], [], "twice"),
    ([], ["<0xFf>"], "single byte"),
    (["a b"], [], "white space"),
    ([], ["a\nb"], "white space"),
    ([], ["\u3000"], "white space"),
    ([], ["a\u2581"], "white space"),
    ([], ["\u2585"], "U\\+2585"),
    (["nul\0"], [], "do not print"),
    (["half\ud800"], [], "do not print"),
    (["e"], [], "one character"),
    (["x" * 129], [], "129 characters"),
]


@pytest.mark.parametrize("control, user, fault", REFUSED)
def test_names_that_mean_something_else_are_refused(control: list[str], user: list[str], fault: str) -> None:
    with pytest.raises(TokenizerError, match=f"^symbol '[^\n]*{fault}[^\n]*$"):
        arrange(control, user, spare=2)
