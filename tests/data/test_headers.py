"""Header detection: whether the first row of a table names its columns, and the override by --header."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.examples import LabeledText, TextPair
from headwater.data.readers.columns import language_code
from headwater.data.readers.detect import SourceOptions, detect_source
from headwater.data.readers.lines import BadRows
from headwater.data.readers.tables import has_header, header_names
from headwater.data.summary import summarize_files
from headwater.errors import BadFile, BadSetting
from headwater.training.config import parse_config

WORDS = ("river", "stone", "quick", "green", "morning", "table", "bird", "window", "garden", "letter", "music")
NAMES = st.lists(
    st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12).map(lambda name: "c" + name),
    min_size=2, max_size=4, unique=True,
)  # fmt: skip


def write(path: Path, rows: list[list[str]], delimiter: str = "\t") -> Path:
    path.write_text("".join(delimiter.join(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(3, 9)))


@given(NAMES, st.integers(5, 30), st.integers())
def test_sentences_with_and_without_a_header(names, count, seed) -> None:
    """The same rows, with names above them and without."""
    rng = random.Random(seed)
    rows = [[sentence(rng) for _ in names] for _ in range(count)]
    assert has_header([names, *rows])
    assert not has_header(rows)


@given(NAMES, st.sampled_from([("0", "1"), ("spam", "ham"), ("12.5", "-3")]), st.integers(20, 40), st.integers())
def test_labels_and_numbers_with_and_without_a_header(names, labels, count, seed) -> None:
    rng = random.Random(seed)
    at = rng.randrange(len(names))
    rows = [[labels[n % 2] if column == at else sentence(rng) for column in range(len(names))] for n in range(count)]
    assert has_header([names, *rows])
    assert not has_header(rows)


NOUNS = [["dog", "Hund"], ["cat", "Katze"], ["sun", "Sonne"], ["sea", "Meer"], ["sky", "Himmel"]]
FILMS = [["a very long and boring film", "neg"], ["some more of the same here", "pos"]]


@pytest.mark.parametrize(
    ("first", "rest", "expected"),
    [
        (["id", "english", "german"], [["1", "Hello.", "Hallo."]], True),
        (["Englisch", "Deutsch"], [["house", "Haus"], ["dog", "Hund"]], True),
        (["英文", "中文"], [["hello", "你好"]], True),
        (["house", "Haus"], NOUNS, False),
        (["Go.", "Va !"], [["Good morning to you.", "Bonjour à vous tous."]] * 6, False),
        (["great film", "pos"], FILMS * 20, False),
        (["no", "it"], [["yes", "it"]] * 9, False),  # two language codes, but one of them is data
        (["marke", "preis"], [["a thing", "1.50"]] * 5, True),
        (["pkg-0", "text 0"], [[f"pkg-{n}", f"text {n}"] for n in range(1, 20)], False),
        (["", "text", "label"], [["0", "fine", "pos"]], True),  # as pandas writes its index
    ],
)  # fmt: skip
def test_single_cases(first, rest, expected) -> None:
    assert has_header([first, *rest]) is expected


def test_a_header_in_ordinary_words_names_the_columns(tmp_path: Path) -> None:
    rows = [[str(n), f"good morning number {n}", f"guten Morgen Nummer {n}"] for n in range(40)]
    path = write(tmp_path / "three.tsv", [["id", "english", "german"], *rows])
    result = summarize_files(path)
    assert result.splits["train"].rows == 40 and result.source.languages == ("en", "de")
    assert result.source.roles == {"source": "english", "target": "german"}
    back = summarize_files(path, source="german", target="english")
    assert back.splits["train"].samples[0] == TextPair("guten Morgen Nummer 0", "good morning number 0")
    excel = tmp_path / "excel.csv"
    lines = ["Englisch;Deutsch", *(f"{row[1]};{row[2]}" for row in rows)]
    excel.write_text("\r\n".join(lines) + "\r\n", encoding="utf-8-sig")
    assert summarize_files(excel).source.roles == {"source": "Englisch", "target": "Deutsch"}
    assert summarize_files(excel).splits["train"].rows == 40


def test_the_flag_overrides_the_detection(tmp_path: Path) -> None:
    named = write(tmp_path / "named.tsv", [["english", "german"], ["house", "Haus"], ["dog", "Hund"]])
    plain = write(tmp_path / "plain.tsv", [["haus", "hus"], ["Haus", "Hus"], ["Hund", "Hund"]])

    def rows(path: Path, header: str) -> list:
        return list(detect_source([path], (), SourceOptions(header=header)).examples("train", BadRows()))

    assert [len(rows(named, header)) for header in ("auto", "yes", "no")] == [2, 2, 3]
    assert [len(rows(plain, header)) for header in ("auto", "yes", "no")] == [3, 2, 3]
    assert rows(named, "no")[0] == TextPair("english", "german")
    with pytest.raises(BadSetting, match="header must be yes, no or auto, got 'maybe'"):
        SourceOptions(header="maybe")
    twice = write(tmp_path / "twice.tsv", [["text", "text"], ["a b", "c d"]])
    with pytest.raises(BadFile, match="column names must differ, 'text' occurs twice"):
        detect_source([twice], (), SourceOptions(header="yes"))


def test_the_setting_is_a_string_or_a_boolean() -> None:
    """YAML reads a bare yes as true."""
    assert [parse_config({"header": value}).header for value in ("yes", True, "No", False, "auto")] == [
        "yes", "yes", "no", "no", "auto"]  # fmt: skip
    with pytest.raises(BadSetting, match="header must be yes, no or auto, got 'perhaps'"):
        parse_config({"header": "perhaps"})


def test_the_summary_names_the_header(tmp_path: Path) -> None:
    named = write(tmp_path / "named.tsv", [["english", "german"], ["a house", "ein Haus"], ["a dog", "ein Hund"]])
    plain = write(tmp_path / "plain.tsv", [["a house", "ein Haus"], ["a dog", "ein Hund"]])
    assert "header     english, german (the first row; --header no takes it for data)" in str(summarize_files(named))
    assert "header     none, the first row is data (--header yes" in str(summarize_files(plain))
    assert "header     none" in str(summarize_files(named, header="no"))
    assert "header" not in str(summarize_files(write(tmp_path / "a.txt", [["it was the best of times"]])))


def test_a_header_of_one_file_is_known_in_the_next(tmp_path: Path) -> None:
    """Too few rows to detect it, but the row is the header of train."""
    long = [[f"{n} times rain again in the north", "weather" if n % 2 else "sport"] for n in range(40)]
    train = write(tmp_path / "train.tsv", [["headline", "kind"], *long])
    valid = write(tmp_path / "valid.tsv", [["headline", "kind"], ["sun again in the south", "weather"]])
    source = detect_source([train, valid])
    assert list(source.examples("valid", BadRows())) == [LabeledText("sun again in the south", "weather")]


def test_names() -> None:
    assert header_names([" a ", "", "b"]) == ("a", "2", "b")
    codes = [language_code(name) for name in ("English", "Deutsch", "français", "zh-CN", "日语", "label", "x")]
    assert codes == ["en", "de", "fr", "zh", "ja", "", ""]
