from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tokenizer.codec import TokenizerError
from tokenizer.sample import HELD_OUT_BYTES, MAX_CHARACTERS, MIN_SAMPLE_BYTES, MIN_SPARING_BYTES, Sample

ROOT = Path(__file__).resolve().parents[2]


def drawn(texts: list[str], *, max_bytes: int = 10_000_000, seed: int = 0, weight: float = 1.0) -> Sample:
    sample = Sample(max_bytes=max_bytes, seed=seed)
    for text in texts:
        sample.add(text, weight)
    return sample


def test_long_documents_are_cut_and_lose_nothing(texts: list[str]) -> None:
    for text in [*texts, "".join(texts), "no-space" * 20_000, "words and words " * 9_000, "\n" * 50_000, "中" * 40_000]:
        sample = drawn([text])
        pieces = [piece.decode() for piece in sample.pieces()]
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= MAX_CHARACTERS
        assert sample.cuts == len(pieces) - 1


def test_cuts_fall_before_line_breaks_or_spaces_where_there_are_any(texts: list[str]) -> None:
    lines = drawn(["".join(texts)])
    assert all(piece.startswith(b"\n") for piece in list(lines.pieces())[1:])
    words = drawn(["some  words " * 9_000])
    assert all(piece.startswith(b" ") for piece in list(words.pieces())[1:])
    assert not any(piece.endswith((b" ", b"\n")) for piece in list(words.pieces())[:-1])
    assert (lines.cuts_inside_words, words.cuts_inside_words) == (0, 0)
    assert drawn(["x" * 100_000]).cuts_inside_words == 100_000 // MAX_CHARACTERS


def test_the_budget_holds_and_the_sample_spreads_over_the_stream() -> None:
    texts = [f"{number:06d} " + "x" * (number % 190) for number in range(40_000)]
    sample = drawn(texts, max_bytes=400_000)
    numbers = [int(piece[:6]) for piece in sample.pieces()]
    assert 390_000 < sample.sampled_bytes == sum(len(piece) for piece in sample.pieces()) <= 400_000
    assert numbers == sorted(numbers)
    for quarter in range(4):
        share = sum(number // 10_000 == quarter for number in numbers) / len(numbers)
        assert abs(share - 0.25) < 0.03
    mean_length = sample.sampled_bytes / len(sample)
    assert abs(mean_length - sample.text_bytes / sample.documents) < 3  # long texts are neither favoured nor shunned


def test_a_sample_depends_on_the_seed_alone() -> None:
    texts = [str(number) * 9 for number in range(20_000)]
    one, again, other = (list(drawn(texts, max_bytes=200_000, seed=seed).pieces()) for seed in (1, 1, 2))
    assert one == again
    assert one != other


@pytest.mark.parametrize("weight", [0.25, 1, 2, 2.5])
def test_a_weight_is_how_often_a_text_counts(weight: float) -> None:
    sample = drawn(["ten bytes!"] * 4_000, weight=weight)
    assert abs(len(sample) / 4_000 - weight) < 0.04


@pytest.mark.parametrize("weight", [0.25, 1.5])
def test_of_one_huge_text_a_weight_takes_its_share(weight: float) -> None:
    """And not the text as a whole or nothing."""
    for seed in range(3):
        sample = drawn(["words and words " * 500_000], weight=weight, max_bytes=10**8, seed=seed)
        assert abs(sample.sampled_bytes / sample.text_bytes - weight) < 0.06


def test_weights_shape_a_sample_that_is_full() -> None:
    sample = Sample(max_bytes=MIN_SAMPLE_BYTES, seed=0)
    for _ in range(20_000):
        sample.add("a" * 10, 3)
        sample.add("b" * 10, 1)
    share = sum(piece.startswith(b"a") for piece in sample.pieces()) / len(sample)
    assert abs(share - 0.75) < 0.02


def test_the_reserved_character_costs_itself_only() -> None:
    sample = drawn(["left\u2585right", "\u2585\u2585"])
    assert list(sample.pieces()) == [b"left", b"right"]
    assert sample.reserved_characters == 3


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), 1e6])
def test_senseless_weights_are_refused(weight: float) -> None:
    with pytest.raises(TokenizerError, match="weight"):
        drawn(["x"], weight=weight)


# ---------------------------------------------------------------- text not trained on


def held_out_of(sample: Sample) -> list[bytes]:
    return [piece for _, piece in sample.hold_out()]


def test_text_beyond_the_sample_is_held_out_and_spreads_over_the_stream() -> None:
    sample = drawn([f"{number:07d} " + "x" * 92 for number in range(100_000)], max_bytes=1_000_000)
    held_out = held_out_of(sample)
    trained_on = set(sample.pieces())
    assert 0.99 * HELD_OUT_BYTES < sum(map(len, held_out)) <= HELD_OUT_BYTES
    assert not trained_on & set(held_out)
    numbers = [int(piece[:7]) for piece in held_out]
    assert numbers == sorted(numbers)
    for quarter in range(4):
        assert abs(sum(number // 25_000 == quarter for number in numbers) / len(numbers) - 0.25) < 0.02
    assert held_out_of(sample) == []


def test_what_a_small_overflow_leaves_is_held_out_whole() -> None:
    texts = [f"{number:04d}" * 25 for number in range(1100)]
    sample = drawn(texts, max_bytes=100_000)
    assert sorted([*held_out_of(sample), *sample.pieces()]) == [text.encode() for text in texts]


def test_copies_of_what_is_trained_on_are_not_held_out() -> None:
    sample = drawn([f"{number % 10}" * 100 for number in range(5_000)], max_bytes=100_000)
    assert held_out_of(sample) == []
    sample = drawn([f"{number:04d}" * 25 for number in range(2_000)], max_bytes=200_000, weight=3)
    trained_on = set(sample.pieces())
    assert not trained_on & set(held_out_of(sample))


def test_a_large_text_that_fits_spares_a_hundredth_and_a_small_one_nothing() -> None:
    texts = [f"{number:06d} " + "x" * 993 for number in range(MIN_SPARING_BYTES // 1000 + 1)]
    sample = drawn(texts, max_bytes=10**9)
    held_out = held_out_of(sample)
    assert sum(map(len, held_out)) == pytest.approx(MIN_SPARING_BYTES * 0.01, rel=0.02)
    assert sorted([*held_out, *sample.pieces()]) == [text.encode() for text in texts]
    assert sample.sampled_bytes == sum(map(len, sample.pieces()))
    small = drawn(texts[:-2], max_bytes=10**9)
    assert held_out_of(small) == []
    assert len(small) == len(texts) - 2


def test_holding_out_depends_on_the_seed_alone() -> None:
    texts = [f"{number}" * 9 for number in range(20_000)]
    one, again, other = (held_out_of(drawn(texts, max_bytes=200_000, seed=seed)) for seed in (1, 1, 2))
    assert one == again != other


def test_some_pieces_are_taken_evenly() -> None:
    sample = drawn([f"{number:05d}" for number in range(10_000)])
    assert list(sample.some(10**9)) == list(sample.pieces())
    some = [int(piece) for piece in sample.some(500)]
    assert some == list(range(0, 10_000, 100))


def test_pieces_know_their_source() -> None:
    sample = Sample(max_bytes=MIN_SAMPLE_BYTES, seed=0)
    for number in range(3_000):
        for source in (2, 0):
            sample.add(f"{source}{number:07d}" * 5, 1 + source, source)
    held_out, of_sources = sample.hold_out(), sample.by_source()
    assert {source for source, _ in held_out} == set(of_sources) == {0, 2}
    assert all(piece.startswith(b"%d" % source) for source, piece in held_out)
    assert all(piece.startswith(b"0") for piece in of_sources[0])
    assert of_sources[2] == [piece for piece in sample.pieces() if piece.startswith(b"2")]
    assert sum(map(len, of_sources.values())) == len(sample)


# ---------------------------------------------------------------- memory


def test_draining_gives_the_sample_once() -> None:
    sample = drawn([f"{number:05d}" for number in range(50_000)], max_bytes=100_000)
    pieces = list(sample.pieces())
    assert list(sample.drain()) == pieces
    assert (len(sample), list(sample.drain())) == (0, [])
    assert sample.sampled_bytes == sum(map(len, pieces))


BOUNDED = """
from pathlib import Path
from tokenizer.sample import Sample


def memory(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


sample = Sample(max_bytes=20_000_000, seed=0)
before = memory("VmRSS:")
for number in range(25_000):
    sample.add(f"{number:07d} " * 1_250)  # 10 kB each, 250 MB in all
peak = memory("VmHWM:") - before
held = len(sample.hold_out())
for _ in sample.drain():
    pass
print(sample.text_bytes, sample.sampled_bytes, peak, memory("VmRSS:") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_follows_the_sample_and_not_the_corpus() -> None:
    done = subprocess.run([sys.executable, "-c", BOUNDED], cwd=ROOT, capture_output=True, check=True)
    text_bytes, sampled_bytes, peak, left = map(int, done.stdout.split())
    assert text_bytes == 250_000_000
    assert 19_900_000 < sampled_bytes <= 20_000_000
    assert 20_000_000 < peak < 45_000_000
    assert left < 10_000_000
