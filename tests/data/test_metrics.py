"""Metrics: against values computed by hand, and laws: equal texts score 100, disjoint ones 0, order does not matter."""

from __future__ import annotations

import math
import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.metrics import (
    accuracy,
    answer_f1,
    bio_entities,
    bleu,
    bleu_tokenizer,
    chrf,
    class_f1,
    entity_f1,
    exact_match,
    lcs_length,
    normalize_answer,
    perplexity,
    rouge,
    split_words,
    squad_scores,
)
from headwater.errors import BadInput

ENGLISH = ["the cat sat on the mat today", "a dog ran across the green field", "we will meet again in spring"]
CHINESE = ["今天天气很好，我们去公园散步。", "他正在读一本有意思的书。", "明天下午三点开会。"]


@pytest.mark.parametrize("texts", [ENGLISH, CHINESE])
@pytest.mark.parametrize("score", [bleu, chrf, lambda a, b: min(rouge(a, b).values())])
def test_equal_texts_score_100_and_unrelated_ones_0(score, texts: list[str]) -> None:
    assert score(texts, texts) == pytest.approx(100)
    assert score(["xyzq", "qqq", "zzzz"], texts) < 3
    mixed = list(zip([texts[0], texts[0], texts[2]], texts, strict=True))
    turned = mixed[::-1]
    assert score(*map(list, zip(*mixed, strict=True))) == pytest.approx(score(*map(list, zip(*turned, strict=True))))


def test_bleu_is_sacrebleu_with_the_right_tokenizer() -> None:
    import sacrebleu

    outputs = ["the cat sat on a mat today", *ENGLISH[1:]]
    assert bleu(outputs, ENGLISH) == sacrebleu.corpus_bleu(outputs, [ENGLISH]).score
    assert chrf(outputs, ENGLISH) == sacrebleu.corpus_chrf(outputs, [ENGLISH]).score
    nearly = [CHINESE[0].replace("公园", "学校"), *CHINESE[1:]]
    assert bleu(nearly, CHINESE) == sacrebleu.corpus_bleu(nearly, [CHINESE], tokenize="zh").score > 60
    assert sacrebleu.corpus_bleu(nearly, [CHINESE]).score < 50  # with the default tokenizer
    texts = ("今天天气很好", "今日はいい天気ですね", "fine weather 好", "오늘 날씨")
    assert [bleu_tokenizer([text]) for text in texts] == ["zh", "char", "13a", "13a"]
    assert bleu_tokenizer(["ok"], "zh-CN") == "zh"


def test_rouge_by_hand() -> None:
    result = rouge(["the cat the cat"], ["the cat sat on the mat"])
    assert result["rouge1"] == pytest.approx(100 * 2 * 3 / 10)  # the twice, cat once
    assert result["rouge2"] == pytest.approx(100 * 2 * 1 / 8)
    assert result["rougeL"] == pytest.approx(100 * 2 * 3 / 10)  # the cat … the
    chinese = rouge(["我爱北京"], ["我爱上海"])
    assert chinese == {"rouge1": 50, "rouge2": pytest.approx(100 / 3), "rougeL": 50}
    assert rouge(["海上爱我"], ["我爱上海"])["rougeL"] == 25
    assert rouge(["GPT-4 发布"], ["gpt 4 发布了"])["rouge1"] == pytest.approx(100 * 8 / 9)
    assert rouge(["", "a"], ["", "b"])["rouge1"] == 50
    assert split_words("Ünïcode_wörds, naïve!") == ["ünïcode", "wörds", "naïve"]


@given(st.text("abcd", max_size=20), st.text("abcd", max_size=20))
def test_longest_common_subsequence(left: str, right: str) -> None:
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    assert lcs_length(left, right) == table[-1][-1]


def test_classes() -> None:
    outputs, references = ["a", "a", "b", "c"], ["a", "b", "b", "b"]
    assert accuracy(outputs, references) == 50
    result = class_f1(outputs, references)
    assert result["micro"] == 50
    assert result["macro"] == pytest.approx(100 * (2 / 3 + 1 / 2) / 2)
    assert class_f1(["a"] * 9, ["a"] * 8 + ["b"])["macro"] < 50 < class_f1(["a"] * 9, ["a"] * 8 + ["b"])["micro"]


def test_entities_must_match_completely() -> None:
    reference = ["B-PER", "I-PER", "O", "B-LOC", "O"]
    assert entity_f1([reference], [reference])["f1"] == 100
    half = entity_f1([["B-PER", "O", "O", "B-LOC", "O"]], [reference])  # an entity with a wrong end does not count
    assert half == {"precision": 50, "recall": 50, "f1": 50}
    assert entity_f1([["O"] * 5], [reference])["f1"] == 0
    assert accuracy(["O"] * 5, reference) == 40  # accuracy by word would reward it
    assert bio_entities(["O", "I-X", "I-X", "I-Y"]) == {("X", 1, 3), ("Y", 3, 4)}
    with pytest.raises(BadInput, match="got 1 tags for 5 words"):
        entity_f1([["O"]], [reference])


@given(st.lists(st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"]), max_size=12))
def test_entities_cover_what_is_tagged(tags: list[str]) -> None:
    result = bio_entities(tags)
    positions = [p for _, start, end in result for p in range(start, end)]
    assert sorted(positions) == [i for i, tag in enumerate(tags) if tag != "O"]
    assert sum(tag[0] == "B" for tag in tags) <= len(result)


def test_answers() -> None:
    assert normalize_answer("An  Apple, the “best”!") == "apple best"
    assert exact_match(["the Denver Broncos!", "x"], [["Denver Broncos", "Broncos"], ["y"]]) == 50
    assert answer_f1(["the Broncos of Denver"], [["Denver Broncos"]]) == pytest.approx(100 * 4 / 5)
    assert answer_f1(["三百零八分"], [["308分", "三百零八"]]) == pytest.approx(100 * 8 / 9)
    assert exact_match(["《红楼梦》"], [["红楼梦"]]) == 100
    assert (exact_match([""], [[]]), answer_f1([""], [[]]), answer_f1(["x"], [[]])) == (100, 100, 0)


def test_perplexity_and_counts() -> None:
    assert perplexity(10 * math.log(65), 10) == pytest.approx(65)
    assert perplexity(1e9, 1) == math.inf
    rows = list(range(100))
    random.Random(0).shuffle(rows)
    assert perplexity(sum(rows), 100) == pytest.approx(math.exp(49.5))
    with pytest.raises(BadInput, match="at least one token"):
        perplexity(1.0, 0)
    for score in (bleu, chrf, rouge, accuracy, class_f1, entity_f1, exact_match, answer_f1):
        with pytest.raises(BadInput, match="one reference for each output, got 1 and 2"):
            score(["a"], ["a", "b"])
        with pytest.raises(BadInput, match="at least one output"):
            score([], [])


def official(outputs: list[str], accepted: list[list[str]]) -> dict[str, float]:
    """The SQuAD 2.0 evaluation (evaluate-v2.0.py) for ASCII texts, reimplemented from its description."""

    def normalize(text: str) -> str:
        kept = "".join(c for c in text.lower() if c not in string.punctuation)
        return " ".join(word for word in kept.split() if word not in ("a", "an", "the"))

    def f1(gold: str, predicted: str) -> float:
        left, right = normalize(gold).split(), normalize(predicted).split()
        if not left or not right:
            return float(left == right)
        same = sum(min(left.count(word), right.count(word)) for word in set(left))
        return 2 * same / (len(left) + len(right)) if same else 0.0

    rows = []
    for output, answers in zip(outputs, accepted, strict=True):
        gold = [answer for answer in answers if normalize(answer)] or [""]
        exact = max(float(normalize(answer) == normalize(output)) for answer in gold)
        rows.append((bool(answers), exact, max(f1(answer, output) for answer in gold)))
    kinds = {"": rows, "HasAns_": [r for r in rows if r[0]], "NoAns_": [r for r in rows if not r[0]]}
    result = {}
    for kind, some in kinds.items():
        if some and (kind == "" or kinds["NoAns_"]):
            result[f"{kind}exact"] = 100 * sum(r[1] for r in some) / len(some)
            result[f"{kind}f1"] = 100 * sum(r[2] for r in some) / len(some)
    return result


TEXT = st.text("ab the,.A-", max_size=8)


@given(st.lists(st.tuples(TEXT, st.lists(TEXT.filter(bool), max_size=3)), min_size=1, max_size=12))
def test_squad_scores_equal_the_official_script(rows) -> None:
    outputs, accepted = map(list, zip(*rows, strict=True))
    assert squad_scores(outputs, accepted) == pytest.approx(official(outputs, accepted))


def test_unanswerable_questions_have_scores_of_their_own() -> None:
    result = squad_scores(["Paris", "Rome", "", "x"], [["Paris"], ["Oslo"], [], []])
    assert result == {"exact": 50, "f1": 50, "HasAns_exact": 50, "HasAns_f1": 50, "NoAns_exact": 50, "NoAns_f1": 50}
    assert squad_scores(["Paris"], [["Paris"]]) == {"exact": 100, "f1": 100}
    assert exact_match([""], [["the", "cat"]]) == 0  # an accepted answer that is only an article is not counted
