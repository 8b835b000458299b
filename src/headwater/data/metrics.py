"""Evaluation metrics: BLEU, chrF, ROUGE, accuracy, F1, perplexity, SQuAD scores, classification and entity reports.

Scores are from 0 to 100. Texts are compared by words, and by characters where a script has no spaces; BLEU and chrF
are sacrebleu's, with the tokenizer of the language.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

from headwater.errors import BadInput
from headwater.i18n import _

# -------------------------------------------------------------------------------------------------------------- words

HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
KANA = "\u3040-\u30ff"
UNSPACED_CHARACTER = f"[{HAN}{KANA}]"
WORD_PATTERN = re.compile(f"{UNSPACED_CHARACTER}|[^\\W_{HAN}{KANA}]+")


def split_words(text: str) -> list[str]:
    """Words in lower case without punctuation; Chinese and Japanese by character.

    >>> split_words("GPT-4 在 2023年 发布。")
    ['gpt', '4', '在', '2023', '年', '发', '布']
    """
    return WORD_PATTERN.findall(text.lower())


def check_same_length(outputs: Sequence[object], references: Sequence[object]) -> None:
    """Raise BadInput unless there is one reference for each output, and at least one output."""
    if len(outputs) != len(references):
        raise BadInput(
            _(
                "there must be one reference for each output, got {num_outputs} and {num_references}",
                num_outputs=len(outputs),
                num_references=len(references),
            )
        )
    if not outputs:
        raise BadInput(_("a metric needs at least one output, got none"))


# -------------------------------------------------------------------------------------------------------------- ROUGE


def rouge(outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L: the mean F1 of each."""
    check_same_length(outputs, references)
    totals = {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}
    for output, reference in zip(outputs, references, strict=True):
        output_words = split_words(output)
        reference_words = split_words(reference)
        totals["rouge1"] += ngram_f1(output_words, reference_words, 1)
        totals["rouge2"] += ngram_f1(output_words, reference_words, 2)
        matches = lcs_length(output_words, reference_words)
        totals["rougeL"] += f1_score(matches, len(output_words), len(reference_words))
    return {name: 100 * total / len(outputs) for name, total in totals.items()}


def ngram_f1(output: Sequence[str], reference: Sequence[str], n: int) -> float:
    """F1 of the n-grams two texts share, each counted as often as both have it."""
    left, right = (Counter(zip(*(text[i:] for i in range(n)), strict=False)) for text in (output, reference))
    return f1_score((left & right).total(), left.total(), right.total())


def f1_score(matches: float, num_output: float, num_reference: float) -> float:
    """2 matches / (num_output + num_reference); two empty sides agree."""
    return 2 * matches / (num_output + num_reference) if num_output + num_reference else 1.0


def lcs_length(left: Sequence[str], right: Sequence[str]) -> int:
    """Length of the longest common subsequence; a row of the dynamic programming table is the bits of one integer.

    >>> lcs_length("abcbdab", "bdcaba")
    4
    """
    positions: dict[str, int] = {}  # word -> bits of its positions in left
    for i, word in enumerate(left):
        positions[word] = positions.get(word, 0) | 1 << i
    row = (1 << len(left)) - 1  # bit i is 0 where the length grows at i
    for word in right:
        matches = row & positions.get(word, 0)
        row = (row + matches) | (row - matches)
    return len(left) - (row & ((1 << len(left)) - 1)).bit_count()


# ------------------------------------------------------------------------------------------------------ BLEU and chrF


def bleu(outputs: Sequence[str], references: Sequence[str], language: str = "") -> float:
    """Corpus BLEU. The language ('zh', 'ja', 'de' …) is detected from the references when it is not given."""
    from sacrebleu.metrics import BLEU  # slow to import, and needed only in evaluation

    check_same_length(outputs, references)
    metric = BLEU(tokenize=bleu_tokenizer(references, language))
    return float(metric.corpus_score(list(outputs), [list(references)]).score)


def chrf(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Corpus chrF2: F-score of character n-grams."""
    from sacrebleu.metrics import CHRF

    check_same_length(outputs, references)
    return float(CHRF().corpus_score(list(outputs), [list(references)]).score)


def bleu_tokenizer(references: Sequence[str], language: str = "") -> str:
    """sacrebleu's tokenizer: 'zh' for Chinese, 'char' for Japanese and Thai, '13a' for spaced scripts."""
    by_name = {"zh": "zh", "cmn": "zh", "yue": "zh", "zho": "zh", "ja": "char", "jpn": "char", "th": "char"}
    if language:
        return by_name.get(language.lower().replace("_", "-").split("-")[0], "13a")
    text = "".join(references)
    han = len(re.findall(f"[{HAN}]", text))
    kana = len(re.findall(f"[{KANA}]", text))
    thai = len(re.findall("[\u0e00-\u0e7f]", text))
    letters = max(1, sum(c.isalpha() for c in text))
    if kana > 0.05 * letters or thai > 0.3 * letters:
        return "char"
    return "zh" if han > 0.3 * letters else "13a"


# ---------------------------------------------------------------------------------------- accuracy, F1 and perplexity


def accuracy(outputs: Sequence[object], references: Sequence[object]) -> float:
    """Accuracy: the percentage of outputs equal to their reference."""
    check_same_length(outputs, references)
    return 100 * sum(a == b for a, b in zip(outputs, references, strict=True)) / len(outputs)


def class_f1(outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Macro F1, the mean over the classes of the references, and micro F1, over all rows (here the accuracy)."""
    check_same_length(outputs, references)
    correct = Counter(b for a, b in zip(outputs, references, strict=True) if a == b)
    predicted = Counter(outputs)
    support = Counter(references)
    scores = [2 * correct[name] / (predicted[name] + support[name]) for name in support]
    return {"macro": 100 * sum(scores) / len(scores), "micro": 100 * correct.total() / len(outputs)}


def entity_f1(outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 of entities in BIO tags: type, first and last word must match, as in CoNLL."""
    check_same_length(outputs, references)
    correct = 0
    predicted = 0
    support = 0
    for output, reference in zip(outputs, references, strict=True):
        if len(output) != len(reference):
            raise BadInput(
                _(
                    "each word must have one tag, got {num_output} tags for {num_reference} words",
                    num_output=len(output),
                    num_reference=len(reference),
                )
            )
        output_entities = bio_entities(output)
        reference_entities = bio_entities(reference)
        correct += len(output_entities & reference_entities)
        predicted += len(output_entities)
        support += len(reference_entities)
    return {
        "precision": 100 * correct / predicted if predicted else 0.0,
        "recall": 100 * correct / support if support else 0.0,
        "f1": 200 * correct / (predicted + support) if predicted + support else 100.0,
    }


def bio_entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Entities as (type, first word, word after the last). An I- that continues no entity of its type begins one.

    >>> sorted(bio_entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC", "I-PER"]))
    [('LOC', 3, 4), ('LOC', 4, 5), ('PER', 0, 2), ('PER', 5, 6)]
    """
    entities: set[tuple[str, int, int]] = set()
    start = 0
    entity_type = ""  # of the open entity; "" if there is none
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, tag_type = tag.partition("-")
        if entity_type and (prefix != "I" or tag_type != entity_type):
            entities.add((entity_type, start, position))
            entity_type = ""
        if prefix in ("B", "I") and not entity_type:
            start = position
            entity_type = tag_type or "entity"
    return entities


def perplexity(total_loss: float, num_tokens: int) -> float:
    """Perplexity: exp of the mean loss per token; inf on overflow."""
    if num_tokens < 1:
        raise BadInput(_("perplexity needs at least one token, got {tokens}", tokens=num_tokens))
    try:
        return math.exp(total_loss / num_tokens)
    except OverflowError:
        return math.inf


# ------------------------------------------------------------------------------------------ SQuAD: exact match and F1

ARTICLES = re.compile(r"\b(a|an|the)\b")


def squad_scores(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """SQuAD F1 and exact match; with unanswerable questions also HasAns and NoAns scores (SQuAD 2.0).

    >>> squad_scores(["Paris", "Rome", ""], [["Paris"], [], []])["NoAns_exact"]
    50.0
    """
    scores = {"f1": answer_f1(outputs, references), "exact": exact_match(outputs, references)}
    groups: dict[str, list[tuple[str, Sequence[str]]]] = {"HasAns": [], "NoAns": []}
    for output, answers in zip(outputs, references, strict=True):
        groups["HasAns" if answers else "NoAns"].append((output, answers))
    if not groups["NoAns"]:
        return scores
    for name, rows in groups.items():
        if rows:
            group_outputs, group_references = zip(*rows, strict=True)
            scores[f"{name}_exact"] = exact_match(group_outputs, group_references)
            scores[f"{name}_f1"] = answer_f1(group_outputs, group_references)
    return scores


def exact_match(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Exact match: the percentage of outputs that equal a gold answer after normalization ('' if there is none)."""
    check_same_length(outputs, references)
    correct = sum(
        normalize_answer(output) in map(normalize_answer, _gold_answers(answers))
        for output, answers in zip(outputs, references, strict=True)
    )
    return 100 * correct / len(outputs)


def answer_f1(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Mean over the outputs of the best word F1 with a gold answer (by character in Chinese and Japanese)."""
    check_same_length(outputs, references)
    best = [
        max(_word_f1(answer_words(output), answer_words(answer)) for answer in _gold_answers(answers))
        for output, answers in zip(outputs, references, strict=True)
    ]
    return 100 * sum(best) / len(best)


def _gold_answers(answers: Sequence[str]) -> Sequence[str]:
    """The answers that are not empty after normalization, or '' when there is none, as in the SQuAD 2.0 script."""
    return [answer for answer in answers if normalize_answer(answer)] or [""]


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces.

    >>> normalize_answer("The  Panthers’ (2015)!")
    'panthers 2015'
    """
    letters = "".join(c for c in text.lower() if not unicodedata.category(c).startswith(("P", "S")))
    return " ".join(ARTICLES.sub(" ", letters).split())


def answer_words(text: str) -> list[str]:
    """Words of the normalized text; each character of an unspaced script is a word."""
    return re.sub(f"({UNSPACED_CHARACTER})", r" \1 ", normalize_answer(text)).split()


def _word_f1(output: list[str], reference: list[str]) -> float:
    return f1_score((Counter(output) & Counter(reference)).total(), len(output), len(reference))


# ---------------------------------------------------------------------------------- classification and entity reports


class LabelScores(TypedDict):
    """Precision, recall and F1 (0 to 100) of a class, or their mean over classes."""

    precision: float
    recall: float
    f1: float
    support: int  # occurrences in the references


class MajorityBaseline(TypedDict):
    """Majority baseline: always predict the most frequent class of the references."""

    label: str
    accuracy: float


class ClassificationReport(TypedDict):
    """Scores of each class and their means, the majority baseline, and the confusion matrix."""

    rows: int
    majority_baseline: MajorityBaseline
    classes: dict[str, LabelScores]  # every class of the references or outputs, the most frequent reference first
    macro_avg: LabelScores  # the mean over the classes of the references
    weighted_avg: LabelScores  # the mean weighted by support
    confusion: dict[str, dict[str, int]]  # reference -> output -> rows, without those that are 0


class EntityReport(TypedDict):
    """Scores of each entity type, and their means."""

    rows: int
    entities: dict[str, LabelScores]
    macro_avg: LabelScores
    weighted_avg: LabelScores


def classification_report(outputs: Sequence[str], references: Sequence[str]) -> ClassificationReport:
    """Scores of each class, averages, the majority baseline and the confusion matrix. A zero division gives 0.

    >>> report = classification_report(["a", "b", "b"], ["a", "a", "b"])
    >>> report["classes"]["b"]
    {'precision': 50.0, 'recall': 100.0, 'f1': 66.66666666666667, 'support': 1}
    """
    check_same_length(outputs, references)
    support = Counter(references)
    predicted = Counter(outputs)
    pairs = Counter(zip(references, outputs, strict=True))
    names = sorted(set(support) | set(predicted), key=lambda name: (-support[name], name))
    classes = {name: _label_scores(pairs[name, name], predicted[name], support[name]) for name in names}
    return {
        "rows": len(references),
        "majority_baseline": {"label": names[0], "accuracy": 100 * support[names[0]] / len(references)},
        "classes": classes,
        "macro_avg": _average_scores(classes, weighted=False),
        "weighted_avg": _average_scores(classes, weighted=True),
        "confusion": _confusion_matrix(pairs),
    }


def entity_report(outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> EntityReport:
    """Scores of each entity type in BIO tags: type, first and last word must match."""
    check_same_length(outputs, references)
    correct = Counter[str]()
    predicted = Counter[str]()
    support = Counter[str]()
    for output, reference in zip(outputs, references, strict=True):
        output_entities = bio_entities(output)
        reference_entities = bio_entities(reference)
        correct.update(name for name, _, _ in output_entities & reference_entities)
        predicted.update(name for name, _, _ in output_entities)
        support.update(name for name, _, _ in reference_entities)
    names = sorted(set(support) | set(predicted), key=lambda name: (-support[name], name))
    types = {name: _label_scores(correct[name], predicted[name], support[name]) for name in names}
    return {
        "rows": len(references),
        "entities": types,
        "macro_avg": _average_scores(types, weighted=False),
        "weighted_avg": _average_scores(types, weighted=True),
    }


def _confusion_matrix(pairs: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    matrix: dict[str, dict[str, int]] = {}
    for (reference, output), count in pairs.most_common():
        matrix.setdefault(reference, {})[output] = count
    return matrix


def _label_scores(correct: int, predicted: int, support: int) -> LabelScores:
    return {
        "precision": _percent(correct, predicted),
        "recall": _percent(correct, support),
        "f1": _percent(2 * correct, predicted + support),
        "support": support,
    }


def _percent(count: int, total: int) -> float:
    return 100 * count / total if total else 0.0


def _average_scores(classes: dict[str, LabelScores], weighted: bool) -> LabelScores:
    """The mean over the classes that are in the references, weighted by support or not."""
    rows = [scores for scores in classes.values() if scores["support"]]
    weights = [scores["support"] if weighted else 1 for scores in rows]
    total = sum(weights)

    def mean(values: Sequence[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / total if total else 0.0

    return {
        "precision": mean([scores["precision"] for scores in rows]),
        "recall": mean([scores["recall"] for scores in rows]),
        "f1": mean([scores["f1"] for scores in rows]),
        "support": sum(scores["support"] for scores in rows),
    }
