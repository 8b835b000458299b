"""Exact match and F1 of answers (SQuAD 1.1 and 2.0), also for scripts without spaces between words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from headwater.data.metrics.rouge import f1
from headwater.data.metrics.units import UNSPACED, same_count

ARTICLES = re.compile(r"\b(a|an|the)\b")


def squad_scores(outputs: Sequence[str], accepted: Sequence[Sequence[str]]) -> dict[str, float]:
    """f1 and exact over all questions; with questions that have no answer among them, also of each kind (SQuAD 2.0).

    >>> squad_scores(["Paris", "Rome", ""], [["Paris"], [], []])["NoAns_exact"]
    50.0
    """
    found = {"f1": answer_f1(outputs, accepted), "exact": exact_match(outputs, accepted)}
    kinds: dict[str, list[tuple[str, Sequence[str]]]] = {"HasAns": [], "NoAns": []}
    for output, answers in zip(outputs, accepted, strict=True):
        kinds["HasAns" if answers else "NoAns"].append((output, answers))
    if not kinds["NoAns"]:
        return found
    for kind, rows in kinds.items():
        if rows:
            some_outputs, some_accepted = zip(*rows, strict=True)
            found[f"{kind}_exact"] = exact_match(some_outputs, some_accepted)
            found[f"{kind}_f1"] = answer_f1(some_outputs, some_accepted)
    return found


def exact_match(outputs: Sequence[str], accepted: Sequence[Sequence[str]]) -> float:
    """The percentage of outputs that are, once normalised, one of the accepted answers. None accepted: '' is right."""
    same_count(outputs, accepted)
    right = sum(tidy(output) in map(tidy, _gold(answers)) for output, answers in zip(outputs, accepted, strict=True))
    return 100 * right / len(outputs)


def answer_f1(outputs: Sequence[str], accepted: Sequence[Sequence[str]]) -> float:
    """The mean, 0 to 100, of the best overlap of words (characters in Chinese and Japanese) with an accepted answer."""
    same_count(outputs, accepted)
    best = [max(_overlap(parts(output), parts(answer)) for answer in _gold(answers))
            for output, answers in zip(outputs, accepted, strict=True)]  # fmt: skip
    return 100 * sum(best) / len(best)


def _gold(answers: Sequence[str]) -> Sequence[str]:
    """The accepted answers that are not empty once normalised, or '' when there is none, as in the SQuAD 2.0 script."""
    return [answer for answer in answers if tidy(answer)] or [""]


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
