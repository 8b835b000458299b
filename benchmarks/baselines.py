"""Simple baselines that a trained model must beat."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from headwater.data.examples import TaggedTokens
from headwater.data.metrics import split_words

Rows = Sequence[tuple[str, str]]


def naive_bayes(train: Rows, test: Rows) -> list[str]:
    """Naive Bayes over words and bigrams: argmax of log p(label) + Σ log p(word | label), with add-one smoothing."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    rows = Counter(label for _, label in train)
    for text, label in train:
        counts[label].update(_grams(text))
    vocabulary = len(set().union(*counts.values()))
    totals = {label: sum(gram_counts.values()) + vocabulary for label, gram_counts in counts.items()}

    def score(text: str, label: str) -> float:
        gram_counts = counts[label]
        return math.log(rows[label]) + sum(math.log((gram_counts[gram] + 1) / totals[label]) for gram in _grams(text))

    return [max(rows, key=lambda label: score(text, label)) for text, _ in test]


def _grams(text: str) -> list[str]:
    words = text.split()
    return words + [f"{a} {b}" for a, b in zip(words, words[1:], strict=False)]


def frequent_tags(train: Sequence[TaggedTokens], test: Sequence[TaggedTokens]) -> list[tuple[str, ...]]:
    """The most frequent tag of each word; O for an unknown word."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in train:
        for word, tag in zip(row.words, row.tags, strict=True):
            counts[word][tag] += 1
    tag_of = {word: tag_counts.most_common(1)[0][0] for word, tag_counts in counts.items()}
    return [tuple(tag_of.get(word, "O") for word in row.words) for row in test]


def nearest_command(train: Rows, test: Rows) -> list[str]:
    """The command with the most similar description: cosine similarity of TF-IDF vectors."""
    bags = [Counter(split_words(text)) for text, _ in train]
    document_counts = Counter(word for bag in bags for word in bag)
    idf = {word: math.log(len(bags) / count) for word, count in document_counts.items()}
    documents_of: dict[str, list[int]] = defaultdict(list)
    for number, bag in enumerate(bags):
        for word in bag:
            documents_of[word].append(number)
    norms = [math.sqrt(sum((n * idf[word]) ** 2 for word, n in bag.items())) or 1.0 for bag in bags]
    commands = []
    for text, _ in test:
        scores: Counter[int] = Counter()
        for word, n in Counter(split_words(text)).items():
            for number in documents_of.get(word, ()):
                scores[number] += n * bags[number][word] * idf[word] ** 2 / norms[number]
        commands.append(train[scores.most_common(1)[0][0]][1] if scores else train[0][1])
    return commands


def best_sentence(question: str, text: str) -> str:
    """The sentence with the most words of the question."""
    question_words = set(split_words(question))
    sentences = [part for part in re.split(r"(?<=[.!?])\s+|(?<=[。!?！？])", text) if part.strip()]
    return max(sentences, key=lambda sentence: len(question_words & set(split_words(sentence))), default=text)
