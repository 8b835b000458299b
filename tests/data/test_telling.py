"""The report before training says the same in both languages."""

from __future__ import annotations

import re

import pytest

from headwater.data.look import look
from headwater.data.telling import english, filled, told

FILES = {
    "pairs.tsv": "".join(f"good morning {n}\tguten Morgen {n}\n" for n in range(60)) + "only one\n",
    "named.tsv": "en\tde\n" + "good morning\tguten Morgen\n" * 3 + "good night\tgute Nacht\n",
    "labels.tsv": "".join(f"text number {n}\t{'good' if n % 3 else 'bad'}\n" for n in range(60)),
    "running.txt": "it was the best of times\n" * 30,
    "words.conll": "Ada\tB-PER\nleft\tO\n\n" * 5,
}


def chinese(en, zh):
    return zh


@pytest.mark.parametrize("name", FILES)
def test_both_languages_say_the_same_numbers_line_by_line(tmp_path, name):
    (tmp_path / name).write_text(FILES[name])
    found = look(tmp_path / name)
    first, second = (told(found, say).split("\n") for say in (english, chinese))
    assert str(found) == "\n".join(first) and len(first) == len(second)
    for en, zh in zip(first, second, strict=True):
        assert sorted(re.findall(r"\d+", en)) == sorted(re.findall(r"\d+", zh)), (en, zh)
        assert re.match(r"[\u4e00-\u9fff]| {11}", zh) and not re.search(r"[\u4e00-\u9fff]", en)


def test_columns_without_names_are_called_columns(tmp_path):
    for name, said in (("pairs.tsv", "task       text-to-text, from column 1 to column 2"),
                       ("named.tsv", "task       text-to-text, from en to de"),
                       ("labels.tsv", "task       classification (text = column 1, label = column 2)")):  # fmt: skip
        (tmp_path / name).write_text(FILES[name])
        assert told(look(tmp_path / name)).split("\n")[0] == said
    assert told(look(tmp_path / "pairs.tsv"), chinese).split("\n")[0] == "任务       text-to-text,第 1 列 → 第 2 列"


def test_names_stand_in_one_column():
    assert filled("任务", 6) == "任务  " and filled("task", 6) == "task  " and filled("long name", 4) == "long name"
