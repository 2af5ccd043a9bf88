from __future__ import annotations

import dataclasses
import gc
import os
import random
import resource
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from tests.tokenizer.fastbpe.conftest import Check
from tests.tokenizer.fastbpe.models import BYTES, CONTROLS, random_model, random_texts, ranked, write_model
from tokenizer.fastbpe import encoder
from tokenizer.fastbpe.encoder import DEFAULT_CACHE_BYTES, MIN_CACHE_BYTES, FastBPE
from tokenizer.model_file import ModelFile, PieceType

ROOT = Path(__file__).resolve().parents[3]
KINDS = ["as we train", "dummy prefix, no bytes", "dummy prefix, bytes", "across spaces"]


def model_of(*texts: str, byte_fallback: bool = True, dummy_prefix: bool = False) -> bytes:
    pieces = CONTROLS + BYTES * byte_fallback + ranked(texts)
    return write_model(pieces, byte_fallback=byte_fallback, dummy_prefix=dummy_prefix)


def long_segment_model() -> bytes:
    """Merges everywhere: no text of its characters can be cut."""
    letters = ["a", "b", "\u2581", "中"]
    pairs = [left + right for left in letters for right in letters]
    return model_of(*pairs, *(pair * 2 for pair in pairs), *letters)


# ---------------------------------------------------------------- equal ids


@pytest.mark.parametrize("seed", range(8))
def test_ids_equal_sentencepieces_for_random_models_and_texts(check: Check, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        model, alphabet = random_model(chance)
        check(model, random_texts(chance, alphabet, 40), cache_bytes=chance.choice([MIN_CACHE_BYTES, 1 << 14]))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_sentencepieces_for_learned_models(
    check: Check, trained: dict[str, bytes], texts: list[str], kind: str
) -> None:
    """Real text, first with a cache that holds nothing for long, then with one that holds it all, then from it."""
    documents = [text.encode() for text in texts]
    tiny = check(trained[kind], documents, cache_bytes=MIN_CACHE_BYTES)
    assert tiny.stats().evictions > 1000
    large = check(trained[kind], documents, cache_bytes=64 << 20)
    misses = large.stats().misses
    check(trained[kind], documents, fast=large)
    assert large.stats().misses - misses < misses / 5  # what came from the caches was right too


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_sentencepieces_for_any_bytes(check: Check, trained: dict[str, bytes], kind: str) -> None:
    chance = random.Random(0)
    noise = [chance.randbytes(chance.randint(0, 300)) for _ in range(300)]
    anywhere = random_texts(
        chance, ["the ", "def ", "  ", "道", "👩\u200d👧", "e\u0301", "<s>", "</s>", "<0x0A>", "\u2581"], 600
    )
    check(trained[kind], noise + anywhere, cache_bytes=1 << 14)


def test_every_byte_after_every_beginning_of_a_character(check: Check) -> None:
    """All there is to malformed UTF-8, alone and between letters, cut short at the end of a text or not."""
    model = model_of("ab", "a", "b", "\ufffd", "\ufffdb", "中")
    beginnings = [b"", *(bytes([lead]) for lead in range(0x80, 0x100))]
    beginnings += [
        bytes([lead, second]) for lead in (0xE0, 0xE4, 0xED, 0xF0, 0xF1, 0xF4) for second in (0x80, 0x8F, 0x90, 0xA0)
    ]
    beginnings += [b"\xf0\x90\x80", b"\xf4\x8f\xbf"]
    check(
        model,
        [b"a" + start + bytes([byte]) + end for start in beginnings for byte in range(256) for end in (b"", b"b")],
    )


def test_ties_go_to_the_leftmost_and_scores_compare_as_sentencepiece_does(check: Check) -> None:
    letters = [(letter, 0.0, PieceType.NORMAL) for letter in "abc"]
    close = np.nextafter(np.float32(1), np.float32(2)).item()
    unequal = [(1.0, close), (0.0, -0.0), (1e-45, 0.0), (0.0, -1e-45), (3e38, -3e38)]
    for one, other in [(1.0, 1.0), *unequal, *((low, high) for high, low in unequal)]:
        pieces = [*CONTROLS, ("ab", one, PieceType.NORMAL), ("bc", other, PieceType.NORMAL), *letters]
        check(write_model(pieces, byte_fallback=False, dummy_prefix=False), [b"abc", b"abcabc", b"cabca", b"bcab"])


def test_unknown_characters_in_a_row_are_one_unknown_id(check: Check) -> None:
    model = model_of("a", "ab", "\u2581", byte_fallback=False)
    check(model, [b"xx", b"x", b"xaxx", b"x x", b"", b"a", b"\xff\xff", "x𝕏é".encode(), b"b"])
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert reference.encode("xyzaz") == [0, 3, 0]


def test_text_never_yields_a_control_id(check: Check) -> None:
    model = model_of("</", "s>", "<", "s", ">", "/", "\u2581", "un", "k", "u", "n")
    fast = check(model, [b"<s></s><unk>", b"<0x41>", b"x</s>y"])
    ids, _ = fast.encode([b"<s></s><unk>"])
    assert not set(ids.tolist()) & {0, 1, 2}


def test_pieces_that_text_never_reaches(check: Check) -> None:
    """A piece with a plain space (text has U+2581 for it), one that no two pieces make, one that is a control piece."""
    pieces = [*ranked(["a b", " ", "b", "a", "\u2581", "abcde", "c"]), ("x", 0.0, PieceType.CONTROL), *CONTROLS]
    check(write_model(pieces, byte_fallback=False, dummy_prefix=True), [b"a b", b"abcde", b"axb", b" ", b"xx"])


@pytest.mark.parametrize("dummy_prefix", [False, True])
def test_vocabularies_over_16_bits(check: Check, dummy_prefix: bool) -> None:
    """70,000 pieces: ids in 32 bits, and the short cache's entries hold three."""
    han = [chr(code) for code in range(0x4E00, 0x9FA0)]
    chance = random.Random(0)
    pairs = list(
        {left + right for left, right in zip(chance.choices(han, k=60_000), chance.choices(han, k=60_000), strict=True)}
    )
    rest = pairs[: 70_000 - len(han) - 600] + han + [chr(code) for code in range(0x21, 0x180)]
    model = write_model(CONTROLS + BYTES + ranked(rest), byte_fallback=True, dummy_prefix=dummy_prefix)
    texts = ["".join(chance.choices([*pairs, " ", "abc", "😀"], k=chance.randint(0, 60))).encode() for _ in range(300)]
    fast = check(model, texts, cache_bytes=1 << 15)
    ids, _ = check(model, texts, fast=fast).encode(texts)
    assert ids.dtype == np.uint32
    assert int(ids.max()) > 65_536


@pytest.mark.parametrize("size, dtype", [(65_536, np.uint16), (65_537, np.uint32)])
def test_the_last_id_fits_its_width(check: Check, size: int, dtype: type) -> None:
    filler = [f"{number:x}zz" for number in range(size - 5)]
    model = write_model([*CONTROLS, *ranked([*filler, "b", "a"])], byte_fallback=False, dummy_prefix=False)
    ids, _ = check(model, [b"ab", b"ba"]).encode([b"a"])
    assert ids.dtype == dtype
    assert ids.tolist() == [size - 1]


def test_a_mutant_model_gives_other_ids(trained: dict[str, bytes], texts: list[str]) -> None:
    """What a self-test at load can hold against SentencePiece: the same model with two scores exchanged."""
    model = ModelFile.parse(trained["as we train"])
    scores = model.scores.copy()
    scores[[260, 500]] = scores[[500, 260]]
    documents = [text.encode() for text in texts]
    ids, _ = FastBPE.build(model).encode(documents)
    mutant, _ = FastBPE.build(dataclasses.replace(model, scores=scores)).encode(documents)
    assert not np.array_equal(ids, mutant)


# ---------------------------------------------------------------- the shape of calls


def test_no_texts_and_empty_texts(check: Check) -> None:
    fast = check(model_of("a", "\u2581", dummy_prefix=True), [b"", b"a", b"", b"", b"a", b""])
    ids, ends = fast.encode([])
    assert (ids.tolist(), ends.tolist()) == ([], [])
    assert (ids.dtype, ends.dtype) == (np.uint16, np.uint64)


@pytest.mark.parametrize("length", range(140))
def test_every_length_at_the_end_of_a_buffer(check: Check, length: int) -> None:
    """Lengths around those of keys, windows and the two ways to merge, as last text and before another one."""
    fast = check(long_segment_model(), [b"a" * length])
    check(long_segment_model(), [b"ab" * length + b" ", b"a" * length, "中".encode() * length], fast=fast)
    check(model_of("a", "b"), [b"ab" * length + b"a", b"b" * length])  # here every character is a segment


@pytest.mark.parametrize("texts", [["str"], [b"a", None], [np.arange(3)], [b"a", 1]])
def test_only_bytes_are_texts(check: Check, texts: list[object]) -> None:
    fast = check(model_of("a"), [b"a"])
    with pytest.raises(TypeError):
        fast.encode(texts)
    check(model_of("a"), [b"a"], fast=fast)


@pytest.mark.parametrize("cache_bytes", [0, -1, MIN_CACHE_BYTES - 1, 1 << 60])
def test_impossible_cache_sizes_are_refused(cache_bytes: int) -> None:
    with pytest.raises(ValueError, match="cache_bytes"):
        FastBPE.build(ModelFile.parse(model_of("a")), cache_bytes=cache_bytes)


def test_sizes_are_checked_before_memory_is_touched() -> None:
    """The C interface itself: ends that fall or lie outside the text, and a wrong number of ids, are refused."""
    core = encoder._core()
    one = encoder._Encoder(encoder._Model(core, ModelFile.parse(model_of("a"))), MIN_CACHE_BYTES)
    id_ends = np.zeros(2, dtype=np.uint64)

    def encode(ends: list[int], text_bytes: int = 4) -> int:
        array = np.array(ends, dtype=np.uint64)
        return core.fastbpe_encode(one.handle, b"aaaa", text_bytes, array.ctypes.data, len(ends), id_ends.ctypes.data)

    assert encode([1, 4]) == 0
    room = np.zeros(8, dtype=np.uint16)
    assert core.fastbpe_take(one.handle, room.ctypes.data, 5) == 1
    assert core.fastbpe_take(one.handle, room.ctypes.data, 4) == 0
    assert [encode([3, 2]), encode([1, 5]), encode([2**64 - 1]), encode([1], 2**63)] == [1, 1, 1, 1]
    assert core.fastbpe_encode(None, b"", 0, None, 0, None) == 1
    assert core.fastbpe_encoder_new(None, 1 << 20, None) == 1
    assert core.fastbpe_model_new(None, None, None, 0) == 1


# ---------------------------------------------------------------- caches, memory, time


def test_every_segment_is_a_hit_or_a_miss(check: Check) -> None:
    model = model_of("a", "b", "c")
    fast = check(model, [b"abcabc"])
    stats = fast.stats()
    assert (stats.segments, stats.hits, stats.misses, stats.evictions) == (6, 3, 3, 0)
    check(model, [b"cba"], fast=fast)
    assert (fast.stats().hits, fast.stats().misses) == (6, 3)


def test_what_comes_once_does_not_drive_out_what_returns() -> None:
    """A smallest cache, and 2,000 words of which each comes once between two words that come all the time."""
    letters = "abcdefgh"
    model = model_of(*(left + right for left in letters for right in letters), *letters)
    fast = FastBPE.build(ModelFile.parse(model), cache_bytes=MIN_CACHE_BYTES)
    once = [f"{number:05o}".translate(str.maketrans("01234567", letters)) for number in range(2000)]
    fast.encode([" ".join(f"hhhh {word}" for word in once).encode()])
    assert fast.stats().misses == len(once) + 2  # the two: hhhh and the space
    assert fast.stats().evictions > 1500


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_caches_stay_within_their_bytes() -> None:
    """20 MB of text in which no segment returns: what is kept is the caches and little more."""
    letters = "abcdefghijklmnop"
    model = ModelFile.parse(model_of(*(left + right for left in letters for right in letters), *letters))
    cache_bytes = 4 << 20
    fast = FastBPE.build(model, cache_bytes=cache_bytes)
    chance = random.Random(0)
    fast.encode([b"a b"])
    before = resident_bytes()
    for _ in range(20):
        words = chance.randbytes(500_000).hex().translate(str.maketrans("0123456789", "ghijklmnop"))
        text = " ".join(words[place : place + 12] for place in range(0, len(words), 12))
        fast.encode([text.encode()])
    gc.collect()
    stats = fast.stats()
    assert stats.evictions > 1_000_000
    assert cache_bytes * 0.9 < stats.cache_bytes <= cache_bytes
    assert resident_bytes() - before < 4 * cache_bytes


@pytest.mark.parametrize("name", ["one word", "spaces outside the vocabulary", "truncated characters"])
def test_memory_of_a_large_call_is_given_back(name: str) -> None:
    """A call may take 37 times its text's bytes; at most 14 MB of it are kept."""
    spaces = name == "spaces outside the vocabulary"
    fast = FastBPE.build(ModelFile.parse(model_of("a") if spaces else long_segment_model()))
    fast.encode([b" " * (1 << 22) if spaces else worst_texts(1 << 22)[name]])
    assert fast.stats().scratch_bytes <= 14 << 20
    fast.encode([b"a" * 100_000])
    assert 100_000 < fast.stats().scratch_bytes <= 14 << 20


def worst_texts(length: int) -> dict[str, bytes]:
    chance = random.Random(0)
    return {
        "one word": "".join(chance.choices("ab", k=length)).encode(),
        "spaces": b" " * length,
        "one character": "中".encode() * (length // 3),
        "one letter": b"a" * length,
        "random bytes": chance.randbytes(length),
        "outside the vocabulary": "é".encode() * (length // 2),
        "truncated characters": b"\xe4\xb8" * (length // 2),
    }


@pytest.mark.parametrize("name", worst_texts(6))
def test_worst_texts_equal_sentencepieces(check: Check, name: str) -> None:
    check(long_segment_model(), [worst_texts(100_000)[name]])


@pytest.mark.parametrize("name", worst_texts(6))
def test_time_grows_with_the_length_alone(name: str) -> None:
    """16 times the text: about 16 times the processor's time, where anything quadratic takes 256 times."""
    fast = FastBPE.build(ModelFile.parse(long_segment_model()))

    def seconds(text: bytes) -> float:
        def once() -> float:
            begin = time.thread_time()
            fast.encode([text])
            return time.thread_time() - begin

        return min(once() for _ in range(3))

    short, long = (worst_texts(length)[name] for length in (1 << 16, 1 << 20))
    fast.encode([short])
    assert seconds(long) < 80 * max(seconds(short), 1e-4)


@pytest.mark.soak
def test_more_than_two_gigabytes_in_one_call(trained: dict[str, bytes], texts: list[str]) -> None:
    """Text, and a segment's place in it, beyond 2^31 bytes; about 11 GB of memory."""
    block = "".join(texts).encode()
    fast = FastBPE.build(ModelFile.parse(trained["as we train"]))
    block_ids, _ = fast.encode([block])
    repeats = (1 << 31) // len(block) + 2
    ids, ends = fast.encode([block] * repeats)
    assert ends.tolist() == [len(block_ids) * (place + 1) for place in range(repeats)]
    assert all(np.array_equal(ids[end - len(block_ids) : end], block_ids) for end in ends.tolist())
    del ids
    one_id, _ = fast.encode([b"\x00" * ((1 << 31) + 5)])  # outside the vocabulary: a byte each
    assert len(one_id) == (1 << 31) + 5
    assert (one_id == one_id[0]).all()


@pytest.mark.soak
def test_a_segment_of_four_billion_characters_is_refused() -> None:
    """Places in a segment are 32 bits. It is said before memory is asked for: this needs the text's 4 GiB alone."""
    fast = FastBPE.build(ModelFile.parse(model_of("aa", "a")))
    with pytest.raises(OverflowError, match=r"2\^32 - 1 or more"):
        fast.encode([b"a" * ((1 << 32) - 1)])
    assert fast.encode([b"aaa"])[0].tolist() == [259, 260]


# ---------------------------------------------------------------- threads, forks, ends


def test_threads_share_a_model_and_each_has_its_own_encoder(trained: dict[str, bytes], texts: list[str]) -> None:
    fast = FastBPE.build(ModelFile.parse(trained["across spaces"]), cache_bytes=1 << 16)
    documents = [text.encode() for text in texts]
    expected = [fast.encode([document])[0].tolist() for document in documents]
    together = threading.Barrier(4)

    def work(seed: int) -> None:
        order = list(range(len(documents)))
        random.Random(seed).shuffle(order)
        together.wait()
        for place in order:
            assert fast.encode([documents[place]])[0].tolist() == expected[place]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    stats = fast.stats()
    assert 1 <= stats.encoders <= 5
    assert stats.cache_bytes <= stats.encoders * (1 << 16)


def test_the_interpreter_runs_while_a_text_is_encoded() -> None:
    """With the lock held, the other thread would not get on before the call is over."""
    fast = FastBPE.build(ModelFile.parse(long_segment_model()))
    text = worst_texts(1 << 21)["one word"]
    begun, done = threading.Event(), threading.Event()
    worker = threading.Thread(target=lambda: (begun.set(), fast.encode([text]), done.set()))
    worker.start()
    begun.wait()
    turns = 0
    while not done.is_set():
        turns += 1
        time.sleep(0)  # lets the worker have the lock, if it waits for it
    worker.join()
    assert turns > 1000


def test_a_fork_goes_on_by_itself(check: Check, trained: dict[str, bytes], texts: list[str]) -> None:
    model, documents = trained["as we train"], [text.encode() for text in texts[:3]]
    fast = check(model, documents)
    child = os.fork()
    if child == 0:
        try:
            check(model, documents, fast=fast)
            os._exit(0)
        except BaseException:
            os._exit(1)
    check(model, documents, fast=fast)
    assert os.waitpid(child, 0)[1] == 0


def test_all_is_freed_with_the_encoder(trained: dict[str, bytes]) -> None:
    fast = FastBPE.build(ModelFile.parse(trained["as we train"]))
    fast.encode([b"text"])
    model, one = weakref.ref(fast._model), weakref.ref(fast._encoders[0])
    ids, ends = fast.encode([b"some text"])
    before = ids.tolist()
    del fast
    gc.collect()
    assert model() is None
    assert one() is None
    assert ids.tolist() == before  # the arrays are the caller's own
    assert ends.tolist() == [len(before)]


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on address space is kept by Linux alone")
def test_no_memory_is_an_exception() -> None:
    """Each limit stops at another place; whatever fails, the process lives and encodes on."""
    program = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
import numpy as np
from tests.tokenizer.fastbpe.test_encoder import long_segment_model
from tokenizer.fastbpe.encoder import FastBPE
from tokenizer.model_file import ModelFile
from pathlib import Path

model = ModelFile.parse(long_segment_model())
fast = FastBPE.build(model, cache_bytes=1 << 16)
fast.encode([b"a b"])
word, short, spaces = b"ab" * 4_000_000, b"ab " * 1000, b" \\xff" * 4_000_000
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
expected = fast.encode([short])[0].tolist()
refused = 0
for more in (1, 4, 8, 16, 32, 64, 128, 4096):
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (more << 20), resource.RLIM_INFINITY))
    for text in (word, spaces):
        try:
            fast.encode([text])
        except MemoryError:
            refused += 1
        assert fast.stats().scratch_bytes <= 14 << 20
    try:
        FastBPE.build(model, cache_bytes=1 << 28).encode([short])
    except MemoryError:
        refused += 1
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert fast.encode([short])[0].tolist() == expected
print(refused)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 8 <= int(done.stdout) < 24


def test_the_default_cache_is_what_the_documents_say() -> None:
    fast = FastBPE.build(ModelFile.parse(model_of("a")))
    fast.encode([b"a"])
    assert DEFAULT_CACHE_BYTES * 0.99 < fast.stats().cache_bytes <= DEFAULT_CACHE_BYTES
