"""One small tokenizer, trained on real code and Chinese, shared by the tests of this folder."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenizer.codec import Codec
from tokenizer.fastbpe.encoder import FastBPE
from tokenizer.model_file import ModelFile
from tokenizer.train import train

# 道德經, chapters 1, 2, 8 and 11: in the public domain.
CHINESE = """道可道，非常道。名可名，非常名。無名天地之始；有名萬物之母。
故常無欲，以觀其妙；常有欲，以觀其徼。
此兩者，同出而異名，同謂之玄。玄之又玄，衆妙之門。
天下皆知美之為美，斯惡已。皆知善之為善，斯不善已。故有無相生，難易相成，長短相較，高下相傾，音聲相和，前後相隨。
是以聖人處無為之事，行不言之教。
上善若水。水善利萬物而不爭，處衆人之所惡，故幾於道。居善地，心善淵，與善仁，言善信，正善治，事善能，動善時。夫唯不爭，故無尤。
三十輻，共一轂，當其無，有車之用。埏埴以為器，當其無，有器之用。鑿戶牖以為室，當其無，有室之用。故有之以為利，無之以為用。
"""


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Real documents: some modules of Python's standard library, and classical Chinese. About 0.7 MB."""
    library = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "ast", "dataclasses", "inspect", "pathlib", "pickle", "subprocess", "tarfile", "typing")
    modules = [library / f"{name}.py" for name in names]
    return [path.read_text(encoding="utf-8") for path in modules if path.exists()] + [CHINESE] * 20


@pytest.fixture(scope="session")
def tokenizer_folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "small"
    train(texts, folder, vocab_size=1024)
    return folder


@pytest.fixture(scope="session")
def codec(tokenizer_folder: Path) -> Codec:
    return Codec.load(tokenizer_folder)


@pytest.fixture(scope="session")
def fast() -> Callable[[ModelFile], FastBPE]:
    """Builds a compiled encoder. Without a compiler there is none to test; with one, a core that isn't built fails."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler: SentencePiece itself encodes")
    return FastBPE.build
