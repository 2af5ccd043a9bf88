"""How pretrain/questions/*.jsonl were made: which of four texts goes on, out of held-out text of the sample corpus.

Passages come from those documents alone that `data_pipeline prepare` holds out at --validation-fraction 0.05 (and so at
any larger one): no model that was trained on the sample corpus so has seen them. The wrong continuations are those of
other passages, of other documents where there are any. Made anew, the files are the same, byte for byte.

    python benchmarks/continuations.py            # write them
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder, whose tokenizer.py is no package

from data_pipeline.filters import is_validation

ROOT = Path(__file__).resolve().parents[1]
FRACTION, CHOICES, MOST = 0.05, 4, 300
# Characters of context and of continuation.
SIZES = {"english": (160, 60), "chinese": (48, 16)}


def passages(language: str) -> list[tuple[int, str, str]]:
    """(document, context, continuation), side by side, cut at words where the language has spaces."""
    found = []
    before, behind = SIZES[language]
    lines = (ROOT / "data_pipeline" / "sample_corpus" / f"{language}.jsonl").read_text(encoding="utf-8").split("\n")
    texts = [json.loads(line)["text"] for line in lines if line]
    for number, text in enumerate(text for text in texts if is_validation(text.encode(), FRACTION)):
        place = 0
        while place + before + behind + 40 < len(text):
            cut, end = place + before, place + before + behind
            if language == "english":
                cut, end = text.index(" ", cut), text.index(" ", end)
            found.append((number, text[place:cut], text[cut:end]))
            place = end
    return found


def questions(language: str) -> list[dict[str, object]]:
    draw = random.Random(f"continuations {language}")
    found = passages(language)
    chosen = sorted(draw.sample(range(len(found)), min(MOST, len(found))))
    made = []
    for number in chosen:
        document, context, right = found[number]
        others = [text for other, _, text in found if other != document]
        wrong = draw.sample(others, CHOICES - 1)
        answer = draw.randrange(CHOICES)
        choices = [*wrong[:answer], right, *wrong[answer:]]
        made.append({"context": context, "choices": choices, "answer": answer})
    return made


def main() -> None:
    for language in SIZES:
        path = ROOT / "pretrain" / "questions" / f"continuations-{language}.jsonl"
        lines = [json.dumps(one, ensure_ascii=False) for one in questions(language)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {len(lines)} questions")


if __name__ == "__main__":
    main()
