"""Languages of texts: sentences of each language, the sample corpus, and texts that are in none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import orjson
import pytest

from data_pipeline.card import kind_of_character
from data_pipeline.languages import language_of

SAMPLE = Path(__file__).parents[2] / "data_pipeline" / "sample_corpus"


def told(text: str) -> str:
    return language_of(text, Counter(map(kind_of_character, text)))


@pytest.mark.parametrize(
    "language, text",
    [
        ("English", "The house stands at the end of a long street, and from its windows you can see the sea."),
        ("German", "Das Haus steht am Ende einer langen Straße, und von den Fenstern aus sieht man auf das Meer."),
        ("French", "La maison est au bout de la longue rue, et de ses fenêtres on voit la mer et les bateaux."),
        ("Spanish", "La casa está al final de una larga calle, y desde sus ventanas se ve el mar con los barcos."),
        ("Portuguese", "A casa fica no fim de uma rua comprida, e das janelas não se vê o mar, mas sim os campos."),
        ("Italian", "La casa si trova in fondo alla strada, e dalle finestre della cucina non si vede che il mare."),
        ("Dutch", "Het huis staat aan het einde van een lange straat, en uit de ramen is de zee te zien."),
        ("Swedish", "Huset står på en höjd vid slutet av en lång gata, och från fönstren ser man att det är hav."),
        ("Danish or Norwegian", "Huset ligger i enden af en gade, og fra vinduerne kan man ikke se det, men høre."),
        ("Finnish", "Talo on pitkän kadun päässä, ja se ei ole suuri, mutta sen ikkunoista näkyy meri."),
        ("Polish", "Dom stoi na końcu długiej ulicy, a z okien widać morze, ale nie zawsze, bo jest to daleko."),
        ("Czech", "Dům je na konci dlouhé ulice a z oken se dívá na moře, ale ne vždy, protože je to daleko."),
        ("Turkish", "Ev uzun bir sokağın sonunda ve pencereleri çok büyük, ama deniz buradan daha uzak bir yerde."),
        ("Indonesian", "Rumah itu ada di ujung jalan yang panjang, dan dari jendela tidak terlihat laut."),
        ("Vietnamese", "Ngôi nhà ở cuối một con đường dài và từ cửa sổ có thể nhìn thấy biển của những người dân."),
        ("Russian", "Дом стоит в конце длинной улицы, и из его окон видно море, но не всегда, так как это далеко."),
        ("Ukrainian", "Будинок стоїть у кінці довгої вулиці, і з його вікон видно море, але не завжди, як це буває."),
        ("Bulgarian", "Къщата е в края на дълга улица и от прозорците се вижда морето, но не винаги, като сега."),
        ("Arabic", "يقع البيت في آخر الشارع الطويل، ومن نوافذه كان يرى البحر إلى أن غربت الشمس في هذا اليوم."),
        ("Persian", "خانه در انتهای خیابان است و از پنجره های آن دریا را می توان دید که با باد آرام شد."),
        ("Urdu", "یہ گھر ایک لمبی گلی کے آخر میں ہے اور اس کی کھڑکیوں سے سمندر نظر نہیں آتا ہے۔"),
        ("Chinese", "房子在一条长街的尽头，从窗户可以看见大海。"),
        ("Japanese", "家は長い通りの端にあり、窓から海が見えます。"),
        ("Korean", "집은 긴 거리의 끝에 있고 창문에서 바다가 보입니다."),
        ("Greek", "Το σπίτι βρίσκεται στο τέλος ενός μακριού δρόμου."),
        ("Hebrew", "הבית עומד בקצה רחוב ארוך."),
        ("Thai", "บ้านอยู่สุดถนนยาว"),
        ("code or markup", "def total(rows):\n    return sum(row[0] for row in rows if row[0] > 0)\n"),
        ("code or markup", "<ul>\n  <li><a href='x.html'>The house at the end of the street</a></li>\n</ul>"),
        ("other", "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed eiusmod tempor incididunt."),
        ("other", "12 345 6789 ... 0"),
        ("other", "बड़ा घर समुद्र के पास"),
        ("other", ""),
    ],
)  # fmt: skip
def test_a_text_is_told_by_its_letters_and_small_words(language: str, text: str) -> None:
    assert told(text) == language


@pytest.mark.parametrize("name, language", [("english", "English"), ("chinese", "Chinese"), ("code", "code or markup")])
def test_the_sample_corpus_is_what_it_is_called(name: str, language: str) -> None:
    texts = [orjson.loads(line)["text"][:4000] for line in (SAMPLE / f"{name}.jsonl").read_bytes().splitlines()[:100]]
    counts = Counter(map(told, texts))
    assert counts[language] >= 0.97 * len(texts), counts
