"""Hashes of many texts at once are those of hashlib."""

import random
from hashlib import blake2b

import pytest

from data_pipeline.keyed_hash import _by_hashlib, _core, keyed_hashes


def by_definition(texts: list[bytes], key: bytes) -> list[int]:
    return [int.from_bytes(blake2b(text, digest_size=8, key=key).digest(), "little") for text in texts]


def test_the_compiled_hash_is_there() -> None:
    assert _core() is not None, "not built: run `pip install -e .` where a C++ compiler is"


@pytest.mark.parametrize("key", [b"k", b"zerohalf-validation-1", bytes(range(64))])
def test_hashes_are_those_of_hashlib(key: bytes) -> None:
    rng = random.Random(1)
    texts = [rng.randbytes(length) for length in [*range(300), 383, 384, 385, 5000, 70_000]]
    for count in (0, 1, 2, 7, 8, 9, 17, len(texts)):
        rng.shuffle(texts)
        some = texts[:count]
        assert keyed_hashes(some, key).tolist() == _by_hashlib(some, key).tolist() == by_definition(some, key)


def test_what_cannot_be_hashed_is_refused() -> None:
    for key in (b"", bytes(65)):
        with pytest.raises(ValueError, match="key"):
            keyed_hashes([b"text"], key)
    with pytest.raises(TypeError):
        keyed_hashes(["text"], b"k")  # type: ignore[list-item]
