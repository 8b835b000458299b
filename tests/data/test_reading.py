"""Files to examples: layouts, columns, bad rows, and the look that says it all."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headwater.data.examples import Labelled, Pair, Passage, Question, Tagged
from headwater.data.look import look
from headwater.data.reading.lines import Reading
from headwater.data.reading.problems import Problems
from headwater.data.reading.settle import Wanted, settle
from headwater.errors import BadFile, BadSetting, NotFound


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def read(*paths: Path, split: str = "train", **wanted) -> tuple[list, Problems]:
    problems = Problems()
    return list(settle(paths, (), Wanted(**wanted)).examples(split, problems)), problems


def test_parallel_files_pair_line_by_line(tmp_path: Path) -> None:
    en, de = (
        write(tmp_path / "train.en", "one\n\u2028two\n\nfour\n"),
        write(tmp_path / "train.de", "eins\nzwei\ndrei\nvier"),
    )
    write(tmp_path / "val.en", "five\n"), write(tmp_path / "val.de", "fünf\n")
    found, problems = read(en, de)
    assert found == [Pair("one", "eins"), Pair("\u2028two", "zwei"), Pair("four", "vier")]
    assert problems.lines() == ["1 × empty in train.en (train.en:3)"]
    assert read(de, en)[0][0] == Pair("eins", "one")
    assert read(tmp_path, source="en", target="de", split="valid")[0] == [Pair("five", "fünf")]
    recipe = settle([tmp_path], (), Wanted(target="en"))
    assert recipe.languages == ("de", "en")
    with pytest.raises(BadSetting, match="no file is in language 'dee'; did you mean 'de'"):
        settle([tmp_path], (), Wanted(source="dee", target="en"))
    write(tmp_path / "train.fr", "un\n")
    with pytest.raises(BadSetting, match=r"3 languages .*say which is the source"):
        settle([tmp_path])
    with pytest.raises(BadFile, match=r"has 1 lines and .*train.en has more"):
        read(tmp_path, source="en", target="fr")


def test_a_file_for_each_class(tmp_path: Path) -> None:
    paths = write(tmp_path / "reviews.pos", "good\n"), write(tmp_path / "reviews.neg", "bad\n\n")
    assert read(*paths)[0] == [Labelled("good", "pos"), Labelled("bad", "neg")]
    en, de = write(tmp_path / "lang.en", "hello\n"), write(tmp_path / "lang.de", "hallo\n")
    assert read(en, de, task="classification")[0] == [Labelled("hello", "en"), Labelled("hallo", "de")]


def test_a_bad_row_is_skipped_counted_and_placed(tmp_path: Path) -> None:
    rows = [{"text": "a", "summary": "b"}, "no object", {"text": "a"}, {"text": 5, "summary": ["x"]},
            {"text": "\ud800", "summary": "b"}, {"text": "", "summary": "b"}]  # fmt: skip
    path = write(
        tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)) + '\n{"text": \n\n{"text": 1, "summary": true}\n'
    )
    found, problems = read(path)
    assert found == [Pair("a", "b"), Pair("1", "True")]
    assert {reason: problems.places[reason] for reason in problems.counts} == {
        "not a JSON object": ["a.jsonl:2"], "no target": ["a.jsonl:3"], "target is not text but list": ["a.jsonl:4"],
        "source holds half of a surrogate pair, which no text has": ["a.jsonl:5"], "empty source": ["a.jsonl:6"],
        "not JSON: Expecting value: line 1 column 10 (char 9)": ["a.jsonl:7"]}  # fmt: skip
    with pytest.raises(BadFile, match=r"more than 2 bad rows, mostly 'not a JSON object' \(first at a.jsonl:2\)"):
        list(settle([path]).examples("train", Problems(limit=2)))


def test_csv_quotes_span_lines_and_an_open_one_costs_a_row(tmp_path: Path) -> None:
    text = 'text,label\n"two\nlines, ""quoted""",pos\n6" long,neg\n"never closed,pos\nplain,neg\nthree,cells,here\n'
    found, problems = read(write(tmp_path / "a.csv", text))
    assert found == [Labelled('two\nlines, "quoted"', "pos"), Labelled('6" long', "neg"), Labelled("plain", "neg")]
    assert problems.counts == {"a quote that is never closed": 1, "3 columns instead of 2": 1}
    semicolons = write(tmp_path / "b.csv", "text;label\nyes, indeed;pos\n")
    assert read(semicolons)[0] == [Labelled("yes, indeed", "pos")]


def test_columns_by_name_by_content_and_by_choice(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.tsv", "zh\tid\ten\n你好\t7\thello\n"))[0] == [Pair("你好", "hello")]
    assert read(write(tmp_path / "b.tsv", "标签\t文本\n好\t很喜欢\n"))[0] == [Labelled("很喜欢", "好")]
    assert read(write(tmp_path / "c.txt", 'a "b\tc d\ne f\tg\n'))[0] == [Pair('a "b', "c d"), Pair("e f", "g")]
    names = write(tmp_path / "d.tsv", "".join(f"pkg-{i}\ta long text {i * i}\tshort one {i}\n" for i in range(40)))
    assert settle([names]).roles == {"source": "2", "target": "3"}
    assert settle([names]).notes == ("columns not used: 1",)
    labels = write(tmp_path / "e.tsv", "".join(f"{'AB'[i % 2]}\tsome text {i}\n" for i in range(40)))
    assert settle([labels]).roles == {"text": "2", "label": "1"}
    assert settle([labels], (), Wanted("text-to-text", {"source": "1", "target": "2"})).roles["source"] == "1"
    odd = write(tmp_path / "f.csv", "headline,kind\nrain again,weather\n")
    chosen = Wanted(columns={"text": "headline", "label": "kind"})
    assert list(settle([odd], (), chosen).examples("train", Problems())) == [Labelled("rain again", "weather")]
    with pytest.raises(BadSetting, match="no column is called 'headlin'; did you mean 'headline'"):
        settle(
            [write(tmp_path / "g.jsonl", '{"headline": "a", "kind": "b"}\n')], (), Wanted(columns={"text": "headlin"})
        )
    with pytest.raises(BadSetting, match="tagging needs columns words, tags"):
        settle([odd], (), Wanted("tagging"))
    with pytest.raises(BadSetting, match="no task is called 'taging'; did you mean 'tagging'"):
        settle([odd], (), Wanted("taging"))


def test_conll_sentences(tmp_path: Path) -> None:
    text = "-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VB O\n\n# NN O\n\nlonely\nline NN O\n\nlast NN B-LOC"
    found, problems = read(write(tmp_path / "a.conll", text))
    assert found == [Tagged(("EU", "rejects"), ("B-ORG", "O")), Tagged(("#",), ("O",)), Tagged(("last",), ("B-LOC",))]
    assert problems.counts == {"1 columns in a sentence of word and tag": 1}
    assert settle([write(tmp_path / "unnamed", text.replace("lonely\n", ""))]).task == "tagging"
    rows = write(
        tmp_path / "b.jsonl", '{"tokens": ["a", "b"], "ner_tags": [0, 1]}\n{"tokens": ["a"], "ner_tags": []}\n'
    )
    assert read(rows)[0] == [Tagged(("a", "b"), ("0", "1"))]


def test_squad_answers_stand_where_they_say(tmp_path: Path) -> None:
    ask = {"question": "Who?", "id": "1", "answers": [{"text": "Ann", "answer_start": 4}]}
    wrong = {"question": "Who?", "id": "2", "answers": [{"text": "Ann", "answer_start": 5}]}
    none = {"question": "Where?", "id": "3", "answers": [], "is_impossible": True}
    value = {"data": [{"paragraphs": [{"context": "See Ann run.", "qas": [ask, wrong, none, {"id": "4"}]}]}]}
    found, problems = read(write(tmp_path / "a.json", json.dumps(value)))
    assert found == [
        Question("Who?", "See Ann run.", ("Ann",), (4,), "1"),
        Question("Where?", "See Ann run.", (), (), "3"),
    ]
    assert problems.count == 2
    with pytest.raises(BadFile, match="must be SQuAD JSON"):
        read(write(tmp_path / "b.json", '{"other": 1}'))
    with pytest.raises(BadFile, match="nested too deeply"):
        read(write(tmp_path / "c.json", "[" * 200_000))


def test_running_text_is_kept_whole(tmp_path: Path) -> None:
    text = "".join(f"line {i} {'x' * (i % 200)}\n" for i in range(2000))
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(text.encode()))
    found, _ = read(path, write(tmp_path / "b.txt", "another\n"))
    assert "".join(p.text for p in found if p.document == 0) == text
    assert found[-1] == Passage("another\n", 1)
    assert max(len(p.text) for p in found) < 2**16 + 300


def test_the_same_file_twice_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "a b\tc d\n")
    (tmp_path / "link.tsv").symlink_to(path)
    recipe = settle([path, tmp_path / "link.tsv"])
    assert len(list(recipe.examples("train", Problems()))) == 1
    assert recipe.notes[0] == "link.tsv is the same file as a.tsv; read once"
    (tmp_path / "nothing").mkdir()
    with pytest.raises(BadFile, match="folder without data files"):
        settle([tmp_path / "nothing"])
    with pytest.raises(NotFound, match="no data file was given"):
        settle([])
    with pytest.raises(BadFile, match="all files must have one layout"):
        settle([path, write(tmp_path / "b.conll", "a\tO\n")])


def test_look_says_what_it_found(tmp_path: Path) -> None:
    rows = [f"a sentence number {i}\t{'pos' if i % 3 else 'neg'}" for i in range(200)]
    train = write(tmp_path / "train.tsv", "text\tlabel\n" + "\n".join([*rows, rows[0], "only one"]) + "\n")
    found = look(train)
    assert (found.task, found.sets["train"].rows, found.sets["train"].duplicates) == ("classification", 201, 1)
    assert found.sets["train"].labels == {"pos": 133, "neg": 68}
    assert 2 <= found.held_out <= 25
    said = str(found)
    assert "1 × 1 columns instead of 2 (train.tsv:203)" in said
    assert "labels     2: pos 133, neg 68" in said
    assert json.loads(json.dumps(found.to_plain()))["sets"]["train"]["bad"]["rows"] == 1
    valid = write(tmp_path / "valid.tsv", "text\tlabel\nnew text\tpos\n" + rows[3] + "\n")
    assert look([train, valid]).overlap == {"valid": 1}
    copy = write(tmp_path / "copy.tsv", "text\tlabel\n" + "\n".join(rows[:20]) + "\n")
    with pytest.raises(BadFile, match="20 of 20 rows of valid are in train too"):
        look(train, valid=[copy])
    with pytest.raises(BadFile, match="holds no row"):
        look(write(tmp_path / "blank.jsonl", '{"text": "", "label": "x"}\n'))


def test_a_column_of_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes("原文\t译文\n今天天气很好\tfine weather\n".encode("gbk"))
    assert next(iter(look(path).encodings.values())).startswith("gb18030 (not UTF-8 at byte 2")
    assert read(path, reading=Reading(encoding="gbk"))[0] == [Pair("今天天气很好", "fine weather")]


COUNTS = [  # rows as stated beside the data
    (["multi30k"], {"source": "en", "target": "de"}, "text-to-text", {"train": 29000, "valid": 1014, "test": 1000}),
    (["nl2bash/all.nl.gz", "nl2bash/all.cm.gz"], {}, "text-to-text", {"train": 12607}),
    (["tatoeba_en_zh"], {}, "text-to-text", {"train": 29155}),  # and one empty last line
    (["debian_summarisation"], {}, "text-to-text", {"train": 45506}),
    (["xquad/xquad.zh.json.gz"], {}, "answers", {"train": 1190}),
    (["mbpp/sanitized-mbpp.json.gz"], {}, "text-to-text", {"train": 427}),
    (
        ["wnut17/wnut17train.conll.gz", "wnut17/emerging.test.annotated.gz"],
        {},
        "tagging",
        {"train": 3394, "test": 1287},
    ),
    (["tinyshakespeare"], {}, "language-model", {"train": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("names", "choice", "task", "rows"), COUNTS, ids=lambda v: str(v)[:30])
def test_real_files(names, choice, task, rows, public_files) -> None:
    found = look([public_files / "data" / name for name in names], **choice)
    assert found.task == task
    assert {name: facts.rows for name, facts in found.sets.items()} == rows
    assert not any(facts.problems.count for facts in found.sets.values())
