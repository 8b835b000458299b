"""BLEU and chrF as sacrebleu computes them, cut into words or characters as the language asks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headwater.data.metrics.units import HAN, KANA, same_count


def bleu(outputs: Sequence[str], references: Sequence[str], language: str = "") -> float:
    """Corpus BLEU, 0 to 100. The language ('zh', 'ja', 'de' …) is told by the references when it is not named."""
    from sacrebleu.metrics import BLEU  # slow to import, and only wanted after training has begun

    same_count(outputs, references)
    return float(BLEU(tokenize=cutter(references, language)).corpus_score(list(outputs), [list(references)]).score)


def chrf(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Corpus chrF2, 0 to 100: characters, so it needs no words."""
    from sacrebleu.metrics import CHRF

    same_count(outputs, references)
    return float(CHRF().corpus_score(list(outputs), [list(references)]).score)


def cutter(references: Sequence[str], language: str = "") -> str:
    """sacrebleu's name for the way to cut: 'zh' for Chinese, 'char' for Japanese and Thai, '13a' for spaced scripts."""
    by_name = {"zh": "zh", "cmn": "zh", "yue": "zh", "zho": "zh", "ja": "char", "jpn": "char", "th": "char"}
    if language:
        return by_name.get(language.lower().replace("_", "-").split("-")[0], "13a")
    text = "".join(references)
    han, kana, thai = (len(re.findall(f"[{c}]", text)) for c in (HAN, KANA, "\u0e00-\u0e7f"))
    letters = max(1, sum(c.isalpha() for c in text))
    if kana > 0.05 * letters or thai > 0.3 * letters:
        return "char"
    return "zh" if han > 0.3 * letters else "13a"
