"""Why documents go, and on which side they fall."""

import pytest

from data_pipeline.filters import LengthFilter, is_validation, losses


def test_bounds_are_inclusive_and_count_characters() -> None:
    bounds = LengthFilter(min_chars=2, max_chars=3)
    reasons = {
        text: remark and remark.reason for text in ("", "文", "文字", "abc", "abcd") for remark in [bounds(text)]
    }
    assert reasons == {
        "": "too_few_chars", "文": "too_few_chars", "文字": None, "abc": None, "abcd": "too_many_chars",
    }  # fmt: skip
    assert LengthFilter()("") is None


@pytest.mark.parametrize("bounds", [(-1, None), (5, 4), (0, 0), (0, -1)])
def test_bounds_that_let_nothing_through_are_refused(bounds: tuple[int, int | None]) -> None:
    with pytest.raises(ValueError, match="no document"):
        LengthFilter(*bounds)


def test_a_literal_space_mark_is_a_loss_to_be_noted() -> None:
    assert [(remark.reason, remark.detail) for remark in losses("a\u2581b\u2581")] == [
        ("literal_u2581", "2 become spaces")
    ]
    assert list(losses("a b _")) == []


def test_the_split_is_fixed_for_good_and_grows_by_inclusion() -> None:
    documents = [f"document {number} 文".encode() for number in range(20_000)]
    held_out = {fraction: [is_validation(one, fraction) for one in documents] for fraction in (0.0, 0.02, 0.1, 0.5)}
    assert sum(held_out[0.0]) == 0
    for fraction, sides in held_out.items():
        assert abs(sum(sides) - fraction * 20_000) < 4 * (20_000 * 0.25) ** 0.5
    for less, more in ((0.02, 0.1), (0.1, 0.5)):
        assert all(b for a, b in zip(held_out[less], held_out[more], strict=True) if a)
    assert [number for number, side in enumerate(held_out[0.02][:200]) if side] == [192]
