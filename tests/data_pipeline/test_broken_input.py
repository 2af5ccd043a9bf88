"""Two thousand broken files through `prepare`: what their bytes hold, read otherwise, is stored or in the ledger."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path

from data_pipeline.filters import is_validation
from data_pipeline.prepare import Options, prepare
from data_pipeline.shards import SPLITS
from data_pipeline.stream import TokenStream
from data_pipeline.verification import verify_collection
from tests.data_pipeline.readers.test_fuzz import GOOD, broken, lines_of
from tokenizer.codec import Codec

FILES = 2000


def test_documents_in_are_documents_out_plus_the_ledger(tmp_path: Path, tokenizer_folder: Path, codec: Codec) -> None:
    rng = random.Random(11)
    folder, lines = tmp_path / "in", [json.dumps({"text": text}).encode() + b"\n" for text in GOOD]
    folder.mkdir()
    contents: dict[str, bytes] = {}
    for number in range(FILES):
        path = folder / f"{number:04}.jsonl"
        content = broken(rng, b"".join(rng.sample(lines, 3)))
        path.write_bytes(content)
        contents[str(path)] = content
    options = Options(validation_fraction=0.2, unit_bytes=30_000)
    source = prepare({"x": [folder]}, tokenizer_folder, tmp_path / "out", options).collection.sources["x"]
    verify_collection(tmp_path / "out", full=True)

    dropped: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for entry in map(json.loads, (source.path / "ledger.jsonl").read_bytes().splitlines()):
        if entry["kind"] == "dropped":
            assert entry["position"] not in dropped[entry["path"]], "a drop that is told twice"
            dropped[entry["path"]][entry["position"]] = entry["reason"]
    documents, wanted = 0, {split: [] for split in SPLITS}
    for path, content in contents.items():
        if not content:
            assert dropped[path] == {0: "empty_file"}
        documents += max(1, len(lines_of(content)))
        for position, line in enumerate(lines_of(content), 1):
            if position not in dropped[path]:
                bare = line.removeprefix(b"\xef\xbb\xbf") if position == 1 else line
                text = json.loads(bare)["text"]
                side = "validation" if is_validation(text.encode(), 0.2) else "train"
                wanted[side].append(text.replace("\u2581", " "))
    assert source.manifest["documents_read"] == documents
    assert sum(source.manifest["dropped"].values()) == sum(map(len, dropped.values())) > FILES / 4
    assert len({reason for reasons in dropped.values() for reason in reasons.values()}) > 8
    for split in SPLITS:
        stream = TokenStream(source.splits[split])
        stored = (stream.read(*stream.document(number)) for number in range(stream.documents))
        assert [codec.decode(ids[:-1].tolist()) for ids in stored] == wanted[split]
