"""Word and character error rates of transcripts (WER, CER): the edit distance over the length of the references.

Texts are compared after normalization: Unicode NFKC, lower case, without punctuation and symbols, one space between
words. Of scripts without spaces (Chinese, Japanese) a character is a word, so their CER is the rate to look at.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable, Sequence

from headwater.data.metrics import UNSPACED_CHARACTER, check_same_length

KEPT = "LMNZ"  # the general categories letter, mark, number and separator


def normalize_transcript(text: str) -> str:
    """A text as error rates compare it.

    >>> normalize_transcript("Ｈello, World - it's  10 €!")
    'hello world its 10'
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    kept = (c if unicodedata.category(c)[0] in KEPT else " " * (c in "-–—…\n\t") for c in text)
    return " ".join("".join(kept).split())


def transcript_words(text: str) -> list[str]:
    """The words of a normalized text; Chinese and Japanese by character.

    >>> transcript_words("hello 你好")
    ['hello', '你', '好']
    """
    return re.sub(f"({UNSPACED_CHARACTER})", r" \1 ", text).split()


def edit_distance(output: Sequence[Hashable], reference: Sequence[Hashable]) -> int:
    """The fewest insertions, deletions and substitutions (Levenshtein).

    >>> edit_distance("kitten", "sitting")
    3
    """
    row = list(range(len(reference) + 1))
    for i, token in enumerate(output, 1):
        last = row
        row = [i]
        for j, wanted in enumerate(reference, 1):
            row.append(min(row[-1] + 1, last[j] + 1, last[j - 1] + (token != wanted)))
    return row[-1]


def error_rates(outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """WER and CER in percent, over all texts together: a long one counts more. Above 100 where too much is said."""
    check_same_length(outputs, references)
    pairs = [(normalize_transcript(a), normalize_transcript(b)) for a, b in zip(outputs, references, strict=True)]
    words = [(transcript_words(a), transcript_words(b)) for a, b in pairs]
    characters = [(a.replace(" ", ""), b.replace(" ", "")) for a, b in pairs]
    return {
        name: 100 * sum(edit_distance(a, b) for a, b in rows) / max(1, sum(len(b) for _unused, b in rows))
        for name, rows in (("wer", words), ("cer", characters))
    }


def is_unspaced(texts: Sequence[str]) -> bool:
    """Whether most letters of these texts are of a script without spaces."""
    letters = [c for text in texts for c in text if c.isalnum()]
    return 2 * sum(bool(re.match(UNSPACED_CHARACTER, c)) for c in letters) > len(letters)
