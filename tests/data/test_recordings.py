"""Recordings with texts or classes: folders, tables, subtitles, LibriSpeech's layout; the split by speaker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.data.error_rates import edit_distance, error_rates, is_unspaced, normalize_transcript
from headwater.data.examples import split_hash
from headwater.data.recordings import LabeledSound, Transcribed
from headwater.data.summary import read_dataset
from headwater.errors import BadFile, BadSetting


def touch(*paths: Path) -> None:
    """Files that have the names of recordings; readers do not open them."""
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number)


def read(*paths: Path, **options):
    summary, splits = read_dataset(paths, **options)
    return summary, splits


def test_a_text_beside_each_recording(tmp_path):
    for number, suffix in enumerate((".wav", ".flac", ".mp3")):
        touch(tmp_path / f"{number}{suffix}")
        (tmp_path / f"{number}.txt").write_text(f"text\nnumber {number}\n")
    touch(tmp_path / "alone.wav")
    summary, splits = read(tmp_path)
    assert summary.task == "speech-recognition"
    assert [(Path(row.path).name, row.text) for row in splits["train"]] == [
        ("0.wav", "text number 0"),
        ("1.flac", "text number 1"),
        ("2.mp3", "text number 2"),
    ]
    assert summary.splits["train"].bad_rows.to_dict()["rows"] == 1


def test_librispeech_folders(tmp_path):
    for split in ("train-clean", "dev-clean"):
        chapter = tmp_path / split / "84" / "121"
        touch(chapter / f"84-121-{split[0]}000.flac", chapter / f"84-121-{split[0]}001.flac")
        lines = [f"84-121-{split[0]}00{n} HE HOPED {n}\n" for n in range(2)]
        (chapter / "84-121.trans.txt").write_text("".join(lines))
    _summary, splits = read(tmp_path)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 2, "valid": 2}
    assert splits["train"][1].text == "HE HOPED 1"
    assert splits["train"][1].speaker == "84"


def test_subtitles_are_parts_of_a_recording(tmp_path):
    touch(tmp_path / "talk.mp3")
    cues = "1\n00:00:01,000 --> 00:00:02,500\n<i>Hello</i>\nthere\n\n2\n00:01:00.000 --> 00:01:01.000\nagain\n\n"
    (tmp_path / "talk.srt").write_text(cues + "3\n00:02:00,000 --> 00:01:00,000\nbackwards\n")
    summary, splits = read(tmp_path)
    assert [(row.start, row.end, row.text) for row in splits["train"]] == [(1.0, 2.5, "Hello there"), (60, 61, "again")]
    assert "ends before it starts" in "".join(summary.splits["train"].bad_rows.summary_lines())


def test_common_voice_keeps_its_recordings_in_clips(tmp_path):
    touch(tmp_path / "clips" / "a.mp3", tmp_path / "b.mp3")
    columns = "client_id\tpath\tsentence\tup_votes\tlocale\n"
    (tmp_path / "train.tsv").write_text(
        columns + "s1\ta.mp3\tHello.\t2\tfr\ns2\tb.mp3\tBye.\t2\tfr\ns2\tc.mp3\t-\t2\tfr\n"
    )
    summary, splits = read(tmp_path / "train.tsv")
    rows = splits["train"]
    assert [row.path for row in rows] == [str(tmp_path / "clips" / "a.mp3"), str(tmp_path / "b.mp3")]
    assert [(row.text, row.speaker, row.language) for row in rows] == [("Hello.", "s1", "fr"), ("Bye.", "s2", "fr")]
    assert summary.splits["train"].bad_rows.to_dict()["rows"] == 1  # there is no c.mp3


TABLES = {"table.tsv": "path\ttext\n{rows}", "table.csv": "audio,sentence\n{rows}", "table.jsonl": "{rows}"}


@pytest.mark.parametrize("name", TABLES)
def test_tables_name_files_beside_them(tmp_path, name):
    touch(*(tmp_path / "clips" / f"{n}.wav" for n in range(3)))
    rows = {
        ".tsv": "".join(f"clips/{n}.wav\ttext {n}\n" for n in range(4)),
        ".csv": "".join(f"clips/{n}.wav,text {n}\n" for n in range(4)),
        ".jsonl": "".join(json.dumps({"path": f"clips/{n}.wav", "text": f"text {n}"}) + "\n" for n in range(4)),
    }[Path(name).suffix]
    (tmp_path / name).write_text(TABLES[name].replace("{rows}", rows))
    for given in (tmp_path / name, tmp_path):  # the table, or the folder it lies in
        summary, splits = read(given)
        assert summary.task == "speech-recognition"
        assert [row.text for row in splits["train"]] == ["text 0", "text 1", "text 2"]
        assert "there is no file" in "".join(summary.splits["train"].bad_rows.summary_lines())


def test_a_column_of_speakers_decides_the_split(tmp_path):
    touch(*(tmp_path / f"{n}.wav" for n in range(40)))
    lines = [f"{n}.wav\ttext {n}\tspeaker{n % 4}\n" for n in range(40)]
    (tmp_path / "table.tsv").write_text("path\ttext\tclient_id\n" + "".join(lines))
    summary, splits = read(tmp_path / "table.tsv", valid_fraction=0.25)
    assert summary.source.roles["speaker"] == "client_id"
    hashes: dict[str, set[int]] = {}
    for row in splits["train"]:
        hashes.setdefault(row.speaker, set()).add(split_hash(row))
    assert all(len(each) == 1 for each in hashes.values())


def test_the_same_file_is_in_one_split(tmp_path):
    touch(tmp_path / "a.wav")
    (tmp_path / "b.wav").write_bytes((tmp_path / "a.wav").read_bytes())
    one, copy = (Transcribed(str(tmp_path / name), "text") for name in ("a.wav", "b.wav"))
    assert split_hash(one) == split_hash(copy)


def test_a_folder_for_each_class(tmp_path):
    touch(*(tmp_path / kind / f"{n}.wav" for kind in ("dog", "cat") for n in range(3)))
    summary, splits = read(tmp_path)
    assert summary.task == "audio-classification"
    assert [row.label for row in splits["train"]] == ["cat"] * 3 + ["dog"] * 3
    assert "6 recordings" in str(summary)


def test_a_table_of_sounds_and_labels(tmp_path):
    touch(*(tmp_path / f"{n}.wav" for n in range(30)))
    (tmp_path / "t.csv").write_text("file,label\n" + "".join(f"{n}.wav,{'ab'[n % 2]}\n" for n in range(30)))
    summary, splits = read(tmp_path / "t.csv")
    assert summary.task == "audio-classification"
    assert splits["train"][0] == LabeledSound(str(tmp_path / "0.wav"), "a")


def test_recordings_without_text_or_class_are_refused(tmp_path):
    touch(tmp_path / "a.wav")
    with pytest.raises(BadFile, match="without a text or a class; put a .txt beside each"):
        read(tmp_path)


def test_another_task_is_refused(tmp_path):
    touch(tmp_path / "dog" / "a.wav")
    with pytest.raises(BadSetting, match="holds recordings for audio-classification, not for speech-recognition"):
        read(tmp_path, task="speech-recognition")


@pytest.mark.parametrize("cell", ["minus", "-1", "nan"])
def test_times_must_be_seconds(tmp_path, cell):
    touch(tmp_path / "a.wav")
    (tmp_path / "t.tsv").write_text(f"path\ttext\tstart\tend\na.wav\tone\t0\t1\na.wav\ttwo\t{cell}\t3\n")
    summary, splits = read(tmp_path / "t.tsv")
    assert len(splits["train"]) == 1
    assert "not a time in seconds" in "".join(summary.splits["train"].bad_rows.summary_lines())


# ------------------------------------------------------------------------------------------------ error rates


def test_error_rates_count_edits_over_all_texts():
    rates = error_rates(["the cat", "a b c d"], ["The cat.", "a c d"])
    assert rates["wer"] == pytest.approx(100 * 1 / 5)
    assert rates["cer"] == pytest.approx(100 * 1 / 9)
    assert error_rates(["x"], ["x"]) == {"wer": 0.0, "cer": 0.0}
    assert error_rates(["one two three"], ["four"])["wer"] == 300.0


def test_chinese_words_are_characters():
    assert error_rates(["你好吗"], ["你好"])["wer"] == 50.0
    assert is_unspaced(["今天天气很好", "ok"])
    assert not is_unspaced(["the weather is fine 好"])


def test_normalization_and_distance():
    assert normalize_transcript(" L'été — ﬁn, 2 000 ! ") == "lété fin 2 000"
    assert edit_distance([], "abc") == 3
    assert edit_distance("abc", "abc") == 0
    assert edit_distance("ab", "ba") == 2
