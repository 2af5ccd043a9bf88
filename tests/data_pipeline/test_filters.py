"""Why documents go, and on which side they fall."""

import pytest

from data_pipeline.corpus import Document
from data_pipeline.filters import DuplicateFilter, LengthFilter, Remark, held_out, is_validation, loss


def outcome(passed: Document | Remark) -> str | None:
    return passed.reason if isinstance(passed, Remark) else None


def test_bounds_are_inclusive_and_count_characters() -> None:
    bounds = LengthFilter(min_chars=2, max_chars=3)
    reasons = {text: outcome(bounds(Document(text, "x", 1))) for text in ("", "文", "文字", "abc", "abcd")}
    assert reasons == {
        "": "too_few_chars", "文": "too_few_chars", "文字": None, "abc": None, "abcd": "too_many_chars",
    }  # fmt: skip
    document = Document("", "x", 1)
    assert LengthFilter()(document) is document


def test_duplicates_are_dropped_by_their_number() -> None:
    duplicates = DuplicateFilter([(1, "a:1"), (2, "b:7"), (4, "a:1")])
    passed = [duplicates(Document(str(number), "x", 9)) for number in range(6)]
    assert [one.text if isinstance(one, Document) else one.detail for one in passed] == [
        "0", "of a:1", "of b:7", "3", "of a:1", "5",
    ]  # fmt: skip
    assert {one.reason for one in passed if isinstance(one, Remark)} == {"duplicate"}


@pytest.mark.parametrize("bounds", [(-1, None), (5, 4), (0, 0), (0, -1)])
def test_bounds_that_let_nothing_through_are_refused(bounds: tuple[int, int | None]) -> None:
    with pytest.raises(ValueError, match="no document"):
        LengthFilter(*bounds)


def test_a_literal_space_mark_is_a_loss_to_be_noted() -> None:
    assert loss("a\u2581b\u2581") == Remark("literal_u2581", "2 become spaces")
    assert loss("a b _") is None


def test_the_split_is_fixed_for_good_and_grows_by_inclusion() -> None:
    documents = [f"document {number} 文".encode() for number in range(20_000)]
    held_out_by = {fraction: [is_validation(one, fraction) for one in documents] for fraction in (0.0, 0.02, 0.1, 0.5)}
    assert sum(held_out_by[0.0]) == 0
    for fraction, sides in held_out_by.items():
        assert abs(sum(sides) - fraction * 20_000) < 4 * (20_000 * 0.25) ** 0.5
    for less, more in ((0.02, 0.1), (0.1, 0.5)):
        assert all(b for a, b in zip(held_out_by[less], held_out_by[more], strict=True) if a)
    assert [number for number, side in enumerate(held_out_by[0.02][:200]) if side] == [192]
    for fraction, sides in held_out_by.items():
        assert held_out(documents, fraction) == sides
