"""The report before training says the same in both languages."""

from __future__ import annotations

import json
import re

import pytest

from headwater.data.summary import format_summary, summarize_files
from headwater.i18n import padded, use_language

FILES = {
    "pairs.tsv": "".join(f"good morning {n}\tguten Morgen {n}\n" for n in range(60)) + "only one\n",
    "named.tsv": "en\tde\n" + "good morning\tguten Morgen\n" * 3 + "good night\tgute Nacht\n",
    "labels.tsv": "".join(f"text number {n}\t{'good' if n % 3 else 'bad'}\n" for n in range(60)),
    "running.txt": "it was the best of times\n" * 30,
    "words.conll": "Ada\tB-PER\nleft\tO\n\n" * 5,
    "imbalanced.tsv": "".join(f"text number {n}\t{'rare' if n % 51 == 0 else 'usual'}\n" for n in range(1530)),
    "alpaca.jsonl": '{"instruction": "Say hello.", "input": "", "output": "Hello.", "id": 1}\n' * 3,
    "squad.json": json.dumps(
        {
            "data": [
                {
                    "paragraphs": [
                        {
                            "context": "See Ann run.",
                            "qas": [
                                {"question": "Who?", "answers": [{"text": "Ann", "answer_start": 4}]},
                                {"question": "Where?", "answers": [], "is_impossible": True},
                                {
                                    "question": "When?",
                                    "answers": [{"text": "Ann", "answer_start": 4}],
                                    "is_impossible": True,
                                },
                            ],
                        }
                    ]
                }
            ]
        }
    ),
}


def report_in(language, result):
    with use_language(language):
        return format_summary(result)


@pytest.mark.parametrize("name", FILES)
def test_both_languages_have_the_same_numbers_line_by_line(tmp_path, name):
    (tmp_path / name).write_text(FILES[name])
    result = summarize_files(tmp_path / name)
    first, second = (report_in(language, result).split("\n") for language in ("en", "zh"))
    assert str(result) == "\n".join(first) and len(first) == len(second)
    for en, zh in zip(first, second, strict=True):
        assert sorted(re.findall(r"\d+", en)) == sorted(re.findall(r"\d+", zh)), (en, zh)
        assert re.match(r"[\u4e00-\u9fff]| {11}", zh) and not re.search(r"[\u4e00-\u9fff]", en)


def test_columns_without_names_are_called_columns(tmp_path):
    for name, said in (("pairs.tsv", "task       seq2seq, from column 1 to column 2"),
                       ("named.tsv", "task       seq2seq, from en to de"),
                       ("labels.tsv", "task       classification (text = column 1, label = column 2)")):  # fmt: skip
        (tmp_path / name).write_text(FILES[name])
        assert format_summary(summarize_files(tmp_path / name)).split("\n")[0] == said
    first_line = report_in("zh", summarize_files(tmp_path / "pairs.tsv")).split("\n")[0]
    assert first_line == "任务       seq2seq，第 1 列 → 第 2 列"


def test_names_stand_in_one_column():
    assert padded("任务", 6) == "任务  " and padded("task", 6) == "task  " and padded("long name", 4) == "long name"


def test_imbalanced_classes_are_warned_of(tmp_path):
    """1,500 rows against 30: the counts, and what always answering the majority class is worth."""
    path = tmp_path / "a.tsv"
    path.write_text(FILES["imbalanced.tsv"])
    (said,) = [line for line in format_summary(summarize_files(path)).split("\n") if line.startswith("warning")]
    assert "1,500 rows of usual, 30 of rare" in said and "an accuracy of 98.0 %" in said and "macro_f1" in said
    for times, warned in ((9, False), (10, True)):
        path.write_text("".join(f"text {n}\t{'few' if n < 10 else 'many'}\n" for n in range(10 * times + 10)))
        assert ("warning" in format_summary(summarize_files(path))) is warned
    tagged = tmp_path / "a.conll"
    tagged.write_text("".join("Ada\tB-PER\n" + "left\tO\n" * 50 + "\n" for _ in range(5)))
    assert "warning" not in format_summary(summarize_files(tagged))  # in tagging O is always frequent


def test_questions_without_an_answer_are_counted(tmp_path):
    (tmp_path / "squad.json").write_text(FILES["squad.json"])
    result = summarize_files(tmp_path / "squad.json")
    assert result.splits["train"].unanswerable == 2 and result.to_dict()["splits"]["train"]["unanswerable"] == 2
    assert "questions without an answer: 2 of 3" in format_summary(result)
    assert "没有答案的问题：2 / 3" in report_in("zh", result)
