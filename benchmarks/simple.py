"""Simple answers, a few lines each: what a trained model must beat to be worth its training."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from headwater.data.examples import TaggedTokens
from headwater.data.metrics import split_words

Rows = Sequence[tuple[str, str]]


def naive_bayes(train: Rows, test: Rows) -> list[str]:
    """argmax over labels of log p(label) + Σ log p(word | label), counts plus one; words and pairs of neighbours."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    rows = Counter(label for _, label in train)
    for text, label in train:
        counts[label].update(_grams(text))
    vocabulary = len(set().union(*counts.values()))
    totals = {label: sum(found.values()) + vocabulary for label, found in counts.items()}

    def score(text: str, label: str) -> float:
        found = counts[label]
        return math.log(rows[label]) + sum(math.log((found[gram] + 1) / totals[label]) for gram in _grams(text))

    return [max(rows, key=lambda label: score(text, label)) for text, _ in test]


def _grams(text: str) -> list[str]:
    words = text.split()
    return words + [f"{a} {b}" for a, b in zip(words, words[1:], strict=False)]


def frequent_tags(train: Sequence[TaggedTokens], test: Sequence[TaggedTokens]) -> list[tuple[str, ...]]:
    """Each word has the tag it has most often; a word never met has none."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in train:
        for word, tag in zip(row.words, row.tags, strict=True):
            counts[word][tag] += 1
    usual = {word: found.most_common(1)[0][0] for word, found in counts.items()}
    return [tuple(usual.get(word, "O") for word in row.words) for row in test]


def nearest_command(train: Rows, test: Rows) -> list[str]:
    """The command whose description shares most with the question: cosine of words weighted by how rare they are."""
    bags = [Counter(split_words(text)) for text, _ in train]
    met = Counter(word for bag in bags for word in bag)
    rare = {word: math.log(len(bags) / count) for word, count in met.items()}
    holders: dict[str, list[int]] = defaultdict(list)
    for number, bag in enumerate(bags):
        for word in bag:
            holders[word].append(number)
    sizes = [math.sqrt(sum((n * rare[word]) ** 2 for word, n in bag.items())) or 1.0 for bag in bags]
    found = []
    for text, _ in test:
        scores: Counter[int] = Counter()
        for word, n in Counter(split_words(text)).items():
            for number in holders.get(word, ()):
                scores[number] += n * bags[number][word] * rare[word] ** 2 / sizes[number]
        found.append(train[scores.most_common(1)[0][0]][1] if scores else train[0][1])
    return found


def best_sentence(question: str, text: str) -> str:
    """The sentence that has most of the question's words in it."""
    asked = set(split_words(question))
    sentences = [part for part in re.split(r"(?<=[.!?])\s+|(?<=[。!?！？])", text) if part.strip()]
    return max(sentences, key=lambda sentence: len(asked & set(split_words(sentence))), default=text)
