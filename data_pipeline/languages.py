"""Which language a text is mostly in, by its letters and its commonest small words: a count for data cards, no more.

Letters that one language alone is written in decide. Latin, Cyrillic and Arabic letters are shared, so there the
language is the one whose small words (articles, pronouns, prepositions) make up most of the text's words. Code is told
by its brackets, operators and underscores, which prose hardly has. What is too short or unlike all of these is "other".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

CODE = "code or markup"
OTHER = "other"

_CODE_SIGNS = re.compile(r"[{}()\[\]<>;=_/\\*&|+#@$^~]")
_CODE_SHARE = 0.05  # of all characters but spaces; prose has below 0.02, programs 0.07 and more
_SMALL_WORDS_SHARE = 0.10  # of all words; texts in their own language have 0.2 to 0.5
_KANA_SHARE = 0.05  # of Han characters and kana together
_WORD = re.compile(r"[^\W\d_]+")

_OF_SCRIPT = {"Hangul": "Korean", "Greek": "Greek", "Hebrew": "Hebrew", "Thai": "Thai", "Georgian": "Georgian",
              "Armenian": "Armenian"}  # fmt: skip

_SMALL_WORDS: dict[str, dict[str, str]] = {
    "Latin": {
        "English": "the of and to a in is it that was for with as he his on be at by had not are but from or this have",
        "German": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an er",
        "French": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce il",
        "Spanish": "de la que el en y a los se del las un por con no una su para es al lo como más pero",
        "Portuguese": "de a o que e do da em um para com não uma os no se na por mais as dos como mas ao",
        "Italian": "di e il la che in un a per è una del non si le con da sono dei i al della come più",
        "Dutch": "de van het een en in is dat op te zijn met voor niet aan er om ook als dan maar hij bij uit",
        "Swedish": "och i att det som en på är av för med den till inte har de om ett men var jag så",
        "Danish or Norwegian": "og i at det er en til på som for med den av af ikke der de har et om men jeg",
        "Finnish": "ja on ei se että oli hän joka mutta kuin myös ovat niin tai jos kun ole mitä sen",
        "Polish": "w i na z się nie do to że jest o po co jak ale od za przez dla był tak czy",
        "Czech": "a je se v na že to s z do o i ale jako za by pro tak jsem po co jeho",
        "Turkish": "bir ve bu da de için ile çok ne o daha gibi kadar olan en ama olarak var ben sonra",
        "Indonesian": "yang dan di itu dengan untuk tidak ini dari dalam akan pada juga saya ke karena ada oleh",
        "Vietnamese": "của và các là có được cho một những không trong với người này đã để khi",
    },
    "Cyrillic": {
        "Russian": "и в не на что с он как я по это но его к из она так за от все мы был для о",
        "Ukrainian": "і в не на що з як він до це але й його за та я від у ми для є був про",
        "Bulgarian": "на и да не се в е за от с че си по като което са ще той това го до",
    },
    "Arabic": {
        "Arabic": "في من على إلى أن عن التي ما الذي لا هذا كان هذه هو مع لم ذلك بعد أو",
        "Persian": "و در به از که این را با است آن برای یک خود تا بر هم نیز شد بود می",
        "Urdu": "کے میں کی ہے کا اور سے نے کو پر کہ اس کیا ہیں یہ ایک بھی نہیں تھا",
    },
}
_WORD_SETS = {
    script: {language: frozenset(words.split()) for language, words in languages.items()}
    for script, languages in _SMALL_WORDS.items()
}


def language_of(text: str, kinds: Mapping[str, int]) -> str:
    """The language of a text whose characters are of these kinds (scripts among them, see `card.kind_of_character`)."""
    dense = sum(count for kind, count in kinds.items() if kind != "spaces and line breaks")
    if dense and len(_CODE_SIGNS.findall(text)) > _CODE_SHARE * dense:
        return CODE
    han, kana = kinds.get("Han", 0), kinds.get("Kana", 0)
    scripts = {**_letters(kinds), "Han": han + kana}
    script = max(scripts, key=lambda name: scripts[name])
    if not scripts[script]:
        return OTHER
    if script == "Han":
        return "Japanese" if kana > _KANA_SHARE * (han + kana) else "Chinese"
    if script in _WORD_SETS:
        return _by_small_words(text, script)
    return _OF_SCRIPT.get(script, OTHER)


def _letters(kinds: Mapping[str, int]) -> dict[str, int]:
    return {name: kinds.get(name, 0) for name in (*_WORD_SETS, *_OF_SCRIPT)}


def _by_small_words(text: str, script: str) -> str:
    words = Counter(_WORD.findall(text.lower()))
    found = {
        language: sum(count for word, count in words.items() if word in small)
        for language, small in _WORD_SETS[script].items()
    }
    best = max(found, key=lambda language: found[language])
    return best if found[best] > _SMALL_WORDS_SHARE * words.total() else OTHER
