"""Exact match and overlap of answers with any of the accepted ones (SQuAD), also where words have no spaces."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from headwater.data.metrics.rouge import f1
from headwater.data.metrics.units import UNSPACED, same_count

ARTICLES = re.compile(r"\b(a|an|the)\b")


def exact_match(outputs: Sequence[str], accepted: Sequence[Sequence[str]]) -> float:
    """The percentage of outputs that are, once tidied, one of the accepted answers. None accepted: '' is right."""
    same_count(outputs, accepted)
    right = sum(tidy(output) in {tidy(answer) for answer in answers or ("",)}
                for output, answers in zip(outputs, accepted, strict=True))  # fmt: skip
    return 100 * right / len(outputs)


def answer_f1(outputs: Sequence[str], accepted: Sequence[Sequence[str]]) -> float:
    """The mean, 0 to 100, of the best overlap of words (characters in Chinese and Japanese) with an accepted answer."""
    same_count(outputs, accepted)
    best = [max(_overlap(parts(output), parts(answer)) for answer in answers or ("",))
            for output, answers in zip(outputs, accepted, strict=True)]  # fmt: skip
    return 100 * sum(best) / len(best)


def tidy(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces.

    >>> tidy("The  Panthers’ (2015)!")
    'panthers 2015'
    """
    plain = "".join(c for c in text.lower() if not unicodedata.category(c).startswith(("P", "S")))
    return " ".join(ARTICLES.sub(" ", plain).split())


def parts(text: str) -> list[str]:
    """The words of the tidied text; each character of an unspaced script stands alone."""
    return re.sub(f"({UNSPACED})", r" \1 ", tidy(text)).split()


def _overlap(said: list[str], wanted: list[str]) -> float:
    return f1((Counter(said) & Counter(wanted)).total(), len(said), len(wanted))
