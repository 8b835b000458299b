"""Files to examples: formats, columns, bad rows, and the dataset summary."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headwater.data.examples import DocumentChunk, LabeledText, QAExample, TaggedTokens, TextPair
from headwater.data.readers.detect import SourceOptions, detect_source
from headwater.data.readers.lines import BadRows, DecodeOptions
from headwater.data.summary import summarize_files
from headwater.errors import BadFile, BadSetting, NotFound


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def read(*paths: Path, split: str = "train", **options) -> tuple[list, BadRows]:
    bad_rows = BadRows()
    return list(detect_source(paths, (), SourceOptions(**options)).examples(split, bad_rows)), bad_rows


def test_parallel_files_pair_line_by_line(tmp_path: Path) -> None:
    en, de = (
        write(tmp_path / "train.en", "one\n\u2028two\n\nfour\n"),
        write(tmp_path / "train.de", "eins\nzwei\ndrei\nvier"),
    )
    write(tmp_path / "val.en", "five\n"), write(tmp_path / "val.de", "fünf\n")
    result, bad_rows = read(en, de)
    assert result == [TextPair("one", "eins"), TextPair("\u2028two", "zwei"), TextPair("four", "vier")]
    assert bad_rows.summary_lines() == ["1 × empty in train.en (train.en:3)"]
    assert read(de, en)[0][0] == TextPair("eins", "one")
    assert read(tmp_path, source="en", target="de", split="valid")[0] == [TextPair("five", "fünf")]
    source = detect_source([tmp_path], (), SourceOptions(target="en"))
    assert source.languages == ("de", "en")
    with pytest.raises(BadSetting, match="no file is in language 'dee'; did you mean 'de'"):
        detect_source([tmp_path], (), SourceOptions(source="dee", target="en"))
    write(tmp_path / "train.fr", "un\n")
    with pytest.raises(BadSetting, match=r"3 languages .*say which is the source"):
        detect_source([tmp_path])
    with pytest.raises(BadFile, match=r"has 1 lines and .*train.en has more"):
        read(tmp_path, source="en", target="fr")


def test_one_file_per_class(tmp_path: Path) -> None:
    paths = write(tmp_path / "reviews.pos", "good\n"), write(tmp_path / "reviews.neg", "bad\n\n")
    assert read(*paths)[0] == [LabeledText("good", "pos"), LabeledText("bad", "neg")]
    en, de = write(tmp_path / "lang.en", "hello\n"), write(tmp_path / "lang.de", "hallo\n")
    assert read(en, de, task="classification")[0] == [LabeledText("hello", "en"), LabeledText("hallo", "de")]


def test_a_bad_row_is_skipped_counted_and_located(tmp_path: Path) -> None:
    rows = [{"text": "a", "summary": "b"}, "no object", {"text": "a"}, {"text": 5, "summary": ["x"]},
            {"text": "\ud800", "summary": "b"}, {"text": "", "summary": "b"}]  # fmt: skip
    path = write(
        tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)) + '\n{"text": \n\n{"text": 1, "summary": true}\n'
    )
    result, bad_rows = read(path)
    assert result == [TextPair("a", "b"), TextPair("1", "True")]
    assert {reason: bad_rows.locations[reason] for reason in bad_rows.counts} == {
        "not a JSON object": ["a.jsonl:2"], "no target": ["a.jsonl:3"], "target is not text but list": ["a.jsonl:4"],
        "source contains a lone surrogate, which is not valid text": ["a.jsonl:5"], "empty source": ["a.jsonl:6"],
        "not JSON: Expecting value: line 1 column 10 (char 9)": ["a.jsonl:7"]}  # fmt: skip
    with pytest.raises(BadFile, match=r"more than 2 bad rows, mostly 'not a JSON object' \(first at a.jsonl:2\)"):
        list(detect_source([path]).examples("train", BadRows(max_count=2)))


def test_csv_quotes_span_lines_and_an_open_one_costs_a_row(tmp_path: Path) -> None:
    text = 'text,label\n"two\nlines, ""quoted""",pos\n6" long,neg\n"never closed,pos\nplain,neg\nthree,cells,here\n'
    result, bad_rows = read(write(tmp_path / "a.csv", text))
    assert result == [
        LabeledText('two\nlines, "quoted"', "pos"),
        LabeledText('6" long', "neg"),
        LabeledText("plain", "neg"),
    ]
    assert bad_rows.counts == {"a quote that is never closed": 1, "3 columns instead of 2": 1}
    semicolons = write(tmp_path / "b.csv", "text;label\nyes, indeed;pos\n")
    assert read(semicolons)[0] == [LabeledText("yes, indeed", "pos")]


def test_columns_by_name_by_content_and_by_choice(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.tsv", "zh\tid\ten\n你好\t7\thello\n"))[0] == [TextPair("你好", "hello")]
    assert read(write(tmp_path / "b.tsv", "标签\t文本\n好\t很喜欢\n"))[0] == [LabeledText("很喜欢", "好")]
    assert read(write(tmp_path / "c.txt", 'a "b\tc d\ne f\tg\n'))[0] == [TextPair('a "b', "c d"), TextPair("e f", "g")]
    names = write(tmp_path / "d.tsv", "".join(f"pkg-{i}\ta long text {i * i}\tshort one {i}\n" for i in range(40)))
    assert detect_source([names]).roles == {"source": "2", "target": "3"}
    assert detect_source([names]).notes == ("columns not used: 1",)
    labels = write(tmp_path / "e.tsv", "".join(f"{'AB'[i % 2]}\tsome text {i}\n" for i in range(40)))
    assert detect_source([labels]).roles == {"text": "2", "label": "1"}
    assert detect_source([labels], (), SourceOptions("seq2seq", {"source": "1", "target": "2"})).roles["source"] == "1"
    odd = write(tmp_path / "f.csv", "headline,kind\nrain again,weather\n")
    chosen = SourceOptions(columns={"text": "headline", "label": "kind"})
    assert list(detect_source([odd], (), chosen).examples("train", BadRows())) == [LabeledText("rain again", "weather")]
    with pytest.raises(BadSetting, match="no column is called 'headlin'; did you mean 'headline'"):
        detect_source(
            [write(tmp_path / "g.jsonl", '{"headline": "a", "kind": "b"}\n')],
            (),
            SourceOptions(columns={"text": "headlin"}),
        )
    with pytest.raises(BadSetting, match="token-classification needs columns words, tags"):
        detect_source([odd], (), SourceOptions("token-classification"))
    message = "no task is called 'token-clasification'; did you mean 'token-classification'"
    with pytest.raises(BadSetting, match=message):
        detect_source([odd], (), SourceOptions("token-clasification"))


def test_conll_sentences(tmp_path: Path) -> None:
    text = "-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VB O\n\n# NN O\n\nlonely\nline NN O\n\nlast NN B-LOC"
    result, bad_rows = read(write(tmp_path / "a.conll", text))
    assert result == [
        TaggedTokens(("EU", "rejects"), ("B-ORG", "O")),
        TaggedTokens(("#",), ("O",)),
        TaggedTokens(("last",), ("B-LOC",)),
    ]
    assert bad_rows.counts == {"wrong number of columns: 1": 1}
    assert detect_source([write(tmp_path / "unnamed", text.replace("lonely\n", ""))]).task == "token-classification"
    rows = write(
        tmp_path / "b.jsonl", '{"tokens": ["a", "b"], "ner_tags": [0, 1]}\n{"tokens": ["a"], "ner_tags": []}\n'
    )
    assert read(rows)[0] == [TaggedTokens(("a", "b"), ("0", "1"))]


def test_squad_answers_must_be_at_answer_start(tmp_path: Path) -> None:
    ask = {"question": "Who?", "id": "1", "answers": [{"text": "Ann", "answer_start": 4}]}
    wrong = {"question": "Who?", "id": "2", "answers": [{"text": "Ann", "answer_start": 5}]}
    none = {"question": "Where?", "id": "3", "answers": [], "is_impossible": True}
    value = {"data": [{"paragraphs": [{"context": "See Ann run.", "qas": [ask, wrong, none, {"id": "4"}]}]}]}
    result, bad_rows = read(write(tmp_path / "a.json", json.dumps(value)))
    assert result == [
        QAExample("Who?", "See Ann run.", ("Ann",), (4,), "1"),
        QAExample("Where?", "See Ann run.", (), (), "3"),
    ]
    assert bad_rows.count == 2
    with pytest.raises(BadFile, match="must be SQuAD JSON"):
        read(write(tmp_path / "b.json", '{"other": 1}'))
    with pytest.raises(BadFile, match="nested too deeply"):
        read(write(tmp_path / "c.json", "[" * 200_000))


def test_plain_text_is_read_completely(tmp_path: Path) -> None:
    text = "".join(f"line {i} {'x' * (i % 200)}\n" for i in range(2000))
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(text.encode()))
    result, _ = read(path, write(tmp_path / "b.txt", "another\n"))
    assert "".join(p.text for p in result if p.document_id == 0) == text
    assert result[-1] == DocumentChunk("another\n", 1)
    assert max(len(p.text) for p in result) < 2**16 + 300


def test_the_same_file_twice_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "a b\tc d\n")
    (tmp_path / "link.tsv").symlink_to(path)
    source = detect_source([path, tmp_path / "link.tsv"])
    assert len(list(source.examples("train", BadRows()))) == 1
    assert source.notes[0] == "link.tsv is the same file as a.tsv; read once"
    (tmp_path / "nothing").mkdir()
    with pytest.raises(BadFile, match="folder without data files"):
        detect_source([tmp_path / "nothing"])
    with pytest.raises(NotFound, match="no data file was given"):
        detect_source([])
    with pytest.raises(BadFile, match="all files must have the same format"):
        detect_source([path, write(tmp_path / "b.conll", "a\tO\n")])


def test_the_summary_describes_the_files(tmp_path: Path) -> None:
    rows = [f"a sentence number {i}\t{'pos' if i % 3 else 'neg'}" for i in range(200)]
    train = write(tmp_path / "train.tsv", "text\tlabel\n" + "\n".join([*rows, rows[0], "only one"]) + "\n")
    result = summarize_files(train)
    assert (result.task, result.splits["train"].rows, result.splits["train"].duplicates) == ("classification", 201, 1)
    assert result.splits["train"].labels == {"pos": 133, "neg": 68}
    assert 2 <= result.validation_rows <= 25
    summary = str(result)
    assert "1 × 1 columns instead of 2 (train.tsv:203)" in summary
    assert "labels     2: pos 133, neg 68" in summary
    assert json.loads(json.dumps(result.to_dict()))["splits"]["train"]["bad_rows"]["rows"] == 1
    valid = write(tmp_path / "valid.tsv", "text\tlabel\nnew text\tpos\n" + rows[3] + "\n")
    assert summarize_files([train, valid]).overlap == {"valid": 1}
    copy = write(tmp_path / "copy.tsv", "text\tlabel\n" + "\n".join(rows[:20]) + "\n")
    with pytest.raises(BadFile, match="20 of 20 rows of valid are in train too"):
        summarize_files(train, valid=[copy])
    with pytest.raises(BadFile, match="holds no row"):
        summarize_files(write(tmp_path / "blank.jsonl", '{"text": "", "label": "x"}\n'))


def test_a_column_of_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes("原文\t译文\n今天天气很好\tfine weather\n".encode("gbk"))
    assert next(iter(summarize_files(path).encodings.values())).startswith("gb18030 (not UTF-8 at byte 2")
    assert read(path, decode_options=DecodeOptions(encoding="gbk"))[0] == [TextPair("今天天气很好", "fine weather")]


COUNTS = [  # row counts as published with the data
    (["multi30k"], {"source": "en", "target": "de"}, "seq2seq", {"train": 29000, "valid": 1014, "test": 1000}),
    (["nl2bash/all.nl.gz", "nl2bash/all.cm.gz"], {}, "seq2seq", {"train": 12607}),
    (["tatoeba_en_zh"], {}, "seq2seq", {"train": 29155}),  # and one empty last line
    (["debian_summarisation"], {}, "seq2seq", {"train": 45506}),
    (["xquad/xquad.zh.json.gz"], {}, "question-answering", {"train": 1190}),
    (["mbpp/sanitized-mbpp.json.gz"], {}, "seq2seq", {"train": 427}),
    (
        ["wnut17/wnut17train.conll.gz", "wnut17/emerging.test.annotated.gz"],
        {},
        "token-classification",
        {"train": 3394, "test": 1287},
    ),
    (["tinyshakespeare"], {}, "language-model", {"train": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("names", "choice", "task", "rows"), COUNTS, ids=lambda v: str(v)[:30])
def test_real_files(names, choice, task, rows, public_files) -> None:
    result = summarize_files([public_files / "data" / name for name in names], **choice)
    assert result.task == task
    assert {name: facts.rows for name, facts in result.splits.items()} == rows
    assert not any(facts.bad_rows.count for facts in result.splits.values())
