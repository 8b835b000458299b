"""Under HEADWATER_LANG=zh errors, notes, findings and reports are Chinese, and help tells as much as in English."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re

import pytest
import torch

from headwater import cli
from headwater.cli.doctor import print_report
from headwater.doctor.environment import IMPORTED
from headwater.families.builders import decoder
from headwater.i18n import _, translated, use_language
from headwater.text.train import train_tokenizer
from headwater.weights.native import save_native

CHINESE = re.compile("[\u4e00-\u9fff]")
# What may stay English in a Chinese line: quoted values, commands to type, flags, formats and names.
NAMES = re.compile(
    r"'[^']*'|\"[^\"]*\"|`[^`]*`|headwater \w+(?: [A-Z]+)*|pip install [^；。]*|apt install [^）]*|--[\w-]+"
    r"|[^\s：；，（）]*[/\\][^\s：；，（）]*|[\w-]+\.[\w.]+|已知的有：.*|export \S+"
    r"|抛出 \w+：[^；]*|不是 YAML（[^）]*）"  # what Python or a library says of a user's own file
)
ENGLISH = re.compile(r"\b[A-Za-z]+(?: [A-Za-z]+){2,}")  # three words in a row


@pytest.fixture(autouse=True)
def chinese_language(monkeypatch):
    monkeypatch.setenv("HEADWATER_LANG", "zh")


def run_chinese(capsys, *words) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def english(text: str) -> list[str]:
    """The English sentences in a text."""
    return ENGLISH.findall(NAMES.sub("_", text))


def test_english_would_be_seen():
    assert english("错误：no file is at x; check the name")
    assert not english("错误：没有名为 'no such verb here' 的命令；用 `headwater runs` 列出，见 headwater train --help")


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files with something wrong, by name."""
    folder = tmp_path_factory.mktemp("files")
    contents = {
        "empty.tsv": b"",
        "blank.tsv": b"\n\n\n",
        "one-label.csv": b"text,label\n" + b"".join(b"row %d,a\n" % n for n in range(40)),
        "bad.json": b'{"a": ',
        "list.json": b'{"a": 1}',
        "bytes.txt": "привет мир\n".encode("koi8-r") * 30,
        "table.csv": b"a,b,c\n1,2,3\n4,5,6\n",
        "bad.yaml": b"a: [1",
        "words.yaml": b"just words",
        "archive.zip": b"PK\x03\x04rest",
        "pairs.tsv": b"".join(b"source %d\ttarget %d\n" % (n, n) for n in range(60)),
        "model.py": b"x = 1\n",
        "broken.py": b"raise ValueError('no')\n",
        "short.safetensors": b"abc",
        "short.gguf": b"GGUF",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text("{")
    return folder


MISTAKES = [
    ("docter",),
    ("--vershion",),
    ("doctor", "--jsn"),
    ("doctor", "more"),
    ("--lang", "fr"),
    ("train", "--nproc", "many"),
    ("check", "mini", "--pad", "middle"),
    ("generate",),
    ("train",),
    ("train", "{}/absent.tsv"),
    ("train", "{}/empty.tsv"),
    ("train", "{}/blank.tsv"),
    ("train", "{}/bad.json"),
    ("train", "{}/list.json"),
    ("train", "{}/bytes.txt"),
    ("train", "{}/archive.zip"),
    ("train", "{}/folder"),
    ("train", "{}/pairs.tsv", "--lr", "much"),
    ("train", "{}/pairs.tsv", "--layers", "1.5"),
    ("train", "{}/pairs.tsv", "--max-time", "soon"),
    ("train", "{}/pairs.tsv", "--valid-fraction", "2"),
    ("train", "{}/pairs.tsv", "--batch-size", "8"),
    ("train", "{}/pairs.tsv", "--schedule", "cosin", "--dry-run"),
    ("train", "{}/pairs.tsv", "--size", "huge", "--dry-run"),
    ("train", "{}/pairs.tsv", "--task", "sing"),
    ("train", "{}/pairs.tsv", "--encoding", "klingon"),
    ("train", "{}/pairs.tsv", "--encoding-errors", "maybe"),
    ("train", "{}/pairs.tsv", "--augment", "shout=0.1"),
    ("train", "{}/pairs.tsv", "--source", "english", "--target", "german"),
    ("train", "{}/pairs.tsv", "--config", "{}/absent.yaml"),
    ("train", "--config", "{}/bad.yaml"),
    ("train", "--config", "{}/words.yaml"),
    ("train", "--recipe", "datez"),
    ("train", "{}/one-label.csv", "--dry-run"),
    ("train", "{}/pairs.tsv", "--resume", "{}/folder"),
    ("train", "--resume", "{}/folder"),
    ("eval", "{}/folder", "{}/pairs.tsv"),
    ("translate", "{}/folder", "text"),
    ("answer", "{}/folder", "who?", "--text", "{}/absent.txt"),
    ("generate", "smollm", "text"),
    ("generate", "{}/folder", "text"),
    ("generate", "{}/config", "text"),
    ("generate", "{}/short.gguf", "text"),
    ("generate", "{}/folder", "text", "--beam", "2", "--look-up"),
    ("inspect", "{}/folder", "text", "--head", "1"),
    ("check", "{}/absent.py:model"),
    ("check", "{}/model.py:modell"),
    ("check", "{}/model.py:x"),
    ("check", "{}/broken.py:x"),
    ("check", "{}/model.py"),
    ("check", "mini", "--only", "futures"),
    ("show", "minii"),
    ("show", "mini", "--depth", "-1"),
    ("show", "mini", "--batch", "0"),
    ("show", "mini", "--dtype", "fp31"),
    ("convert", "{}/absent", "{}/new"),
    ("convert", "{}/folder", "{}/folder"),
    ("bench", "--rounds", "0"),
    ("bench", "--workload", "z"),
    ("ui", "--port", "99999"),
    ("ui", "{}/pairs.tsv"),
    ("backtranslate", "{}/folder", "{}/pairs.tsv", "--out", "{}/pairs.tsv"),
    ("backtranslate", "{}/folder", "{}/pairs.tsv"),
]


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_an_error_is_chinese(words, files, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, _, err = run_chinese(capsys, *(word.replace("{}", str(files)) for word in words))
    assert code > 0 and err.count("\n") == 1
    assert err.startswith("错误：") and CHINESE.search(err.removeprefix("错误：")), err
    assert english(err.replace(str(files), "…")) == [], err


def test_the_words_of_some_errors(files, capsys):
    expected = {
        ("docter",): "错误：headwater 没有命令 'docter'；是否想写 'doctor'？（全部见 headwater --help）",
        ("train", "--nproc", "many"): "错误：headwater train：参数 --nproc：'many' 不是有效的 int；"
        "见 headwater train --help",
        ("show", "mini", "--depth", "-1"): "错误：--depth 至少为 0，实际为 -1；0 只显示合计",
        ("train", files / "pairs.tsv", "--lr", "much"): "错误：lr 必须是不小于 0 的数，实际为 'much'；"
        "含义：学习率峰值；noam 时为其系数（0：自动选择）",
    }
    for words, line in expected.items():
        assert run_chinese(capsys, *words)[2] == line + "\n"


def test_the_same_error_in_python_is_english(files):
    import headwater

    with pytest.raises(headwater.BadSetting, match="lr must be a number from 0, got 'much'"):
        headwater.train(files / "pairs.tsv", lr="much")


def test_the_server_sends_both_languages():
    from headwater.errors import NotFound
    from headwater.serving.errors import error_body

    error = error_body(NotFound(_("no file is at {path}; check the name", path="/srv/data/x.tsv")))["error"]
    assert error == {
        "type": "NotFound",
        "message": "no file is at x.tsv; check the name",
        "message_zh": "x.tsv 处没有文件；请检查名字",
    }


# ------------------------------------------------------------------------------------------------ reports and findings


def test_doctor_is_chinese(capsys):
    _, out, _ = run_chinese(capsys, "doctor", "--no-speed")
    assert english(out) == []
    for name in ("可用内存 GB", "可用核数", "区域设置", "Python 头文件", "融合注意力"):
        assert name in out


def test_every_finding_of_doctor_is_chinese():
    from headwater.doctor import checks

    facts = {
        "versions": {"torch": None, "numpy": "1.0"},
        "machine": {
            "memory free GB": 1, "disk free GB": 0.1, "shared memory GB": 0.1, "usable cores": 2, "load": 9.0
        },
        "threads": {"torch": 8},
        "backends": {"torch": "ImportError: x", "C++ compiler": None, "Python headers": False},
        "terminal": {"encoding": "ascii"},
        "speed": {"matmul fp32 GFLOP/s": 100.0, "matmul bf16 GFLOP/s": 10.0},
    }  # fmt: skip
    result = checks.run_checks(facts)
    assert len(result) >= 11
    for finding in result:
        says, remedy = (translated(text, "zh") for text in (finding.message, finding.remedy))
        assert CHINESE.search(says), finding
        assert english(says + remedy) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tokenizer = train_tokenizer(["the cat sat on the mat", "a dog ran to the house"] * 20, vocab_size=300)
    torch.manual_seed(0)
    model = decoder(len(tokenizer), d_model=16, heads=2, layers=2, position="rotary", norm_position="pre").build(seed=0)
    save_native(folder / "model", model, {"task": "language-model"})
    tokenizer.save(folder / "model")
    (folder / "config.yaml").write_text("data: {}\n")
    return folder


@pytest.mark.parametrize(
    "more", [[], ["--layer", "0", "--head", "1"], *(["--analyses", name] for name in ("lens", "positions", "costs"))]
)
def test_inspect_is_chinese(run, capsys, more):
    code, out, _ = run_chinese(capsys, "inspect", run, "the cat", *more)
    assert code == 0 and english(out) == []
    assert all(CHINESE.search(line) for line in out.splitlines() if line.strip() and not line.startswith("  "))


def test_check_is_chinese(capsys):
    code, out, _ = run_chinese(capsys, "check", "mini", "--only", "future,padding", "--length", "8")
    assert code == 0 and english(out) == [] and "规则全部守住" in out


def test_models_are_described_in_chinese(capsys):
    code, out, _ = run_chinese(capsys, "models")
    assert code == 0 and english(out) == [] and "小型对话模型" in out


def test_the_output_before_training_is_chinese(tmp_path, capsys):
    rows = "".join(f"{n}\tsource {n}\ttarget {n}\tmore\n" for n in range(80)) + "broken row\n"
    (tmp_path / "data.tsv").write_text("id\tsource\ttarget\trest\n" + rows)
    code, out, _ = run_chinese(capsys, "train", tmp_path / "data.tsv", "--dry-run", "--max-steps", "2", "--size", "xs")
    assert code == 0 and english(out) == []
    for words in ("utf-8（编码正确）", "未使用的列：id, rest", "1 × 有 1 列而不是 4 列"):
        assert words in out


def test_notes_of_training_are_chinese(capsys):
    from rich.console import Console

    from headwater.training.loggers import ProgressBar
    from headwater.training.state import NoteEvent

    show = ProgressBar(Console(highlight=False, soft_wrap=True))
    text = "steps {words} than planned: {steps} fit into the time, not {steps2}"
    note = _(text, words=_("take longer"), steps=16, steps2=53)
    with use_language("zh"):
        for text in (note, _("resumed at step {step}", step=7)):
            show(NoteEvent(1, text))
    out = capsys.readouterr().out
    assert out == "注意 每步比预计慢：时间内可做 16 步，而不是 53 步\n注意 从第 7 步接着训练\n"


# --------------------------------------------------------------------------------------------------------------- help


def registered() -> set[str]:
    """The values that flags accept: choices, formats and units."""
    from headwater.data.augment import AUGMENTATIONS
    from headwater.data.readers.lines import ERROR_POLICIES
    from headwater.families.attentions import ATTENTIONS
    from headwater.inspection.api import ANALYSES
    from headwater.tasks import OBJECTIVES, TASKS
    from headwater.text.train import ALGORITHMS
    from headwater.training.optim import OPTIMIZERS
    from headwater.training.recipes import DTYPES, SIZES
    from headwater.training.schedules import SCHEDULES

    formats = {"TSV", "CSV", "JSONL", "CoNLL", "SQuAD", "JSON", "YAML", "SVG", "GPT", "FSDP2", "AdamW", "Muon"}
    positions = {"sinusoidal", "learned", "rotary", "alibi", "relative", "none"}
    known = (
        AUGMENTATIONS,
        TASKS,
        ALGORITHMS,
        ERROR_POLICIES,
        ANALYSES,
        ATTENTIONS,
        OPTIMIZERS,
        DTYPES,
        SIZES,
        OBJECTIVES,
        SCHEDULES,
    )
    return formats | positions | {str(name) for names in known for name in names}


PLAIN = {
    "gradients",
    "answers",
    "characters",
    "learned",
    "none",
    "next",
    "heads",
    "text",
    "attention",
    "costs",
    "positions",
    "losses",
    "tags",
    "base",
    "large",
}
FACT = re.compile(
    r"(?<![\w.-])-?\d[\d.]*(?:[smhd]\b)?"  # numbers and times: 0, -1, 0.95, 90s
    r"|--[a-z][\w-]+|\b\w+=[\w.]+|\b[\w/]*[\w]+\.(?:json|jsonl|yaml|bin|md|en|de|gguf|compile)\b"  # flags, pairs, files
    r"|\b(?:runs/TASK/NAME|config\.yaml|HEADWATER_LANG|stdin)\b|\[[^\]]+\]"  # names, defaults in brackets
)


def facts(english: str, names: set[str]) -> set[str]:
    """What an English help text says that another language must say too."""
    words = set(re.findall(r"(?<![\w'’])[A-Za-z][\w-]*", english))
    listed = {
        word for word in words & names if word not in PLAIN or re.search(rf"\b{word}(?:,| or\b)|or {word}\b", english)
    }
    return listed | set(FACT.findall(re.sub(r"\[\d\S*: \w+\]", lambda m: m[0].partition(":")[0][1:], english)))


def helps(verb: str, monkeypatch, lang: str) -> dict[str, str]:
    monkeypatch.setenv("HEADWATER_LANG", lang)
    parser = cli.build_parser(verb)
    kept = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return {(action.option_strings or [action.dest])[-1]: action.help or "" for action in kept}


def test_what_help_must_tell_is_found():
    result = facts("stop after 90s, 30m, 2h (0: no limit), -1; noam, cosine or constant [0.5]", {"noam", "cosine"})
    assert {"90s", "30m", "2h", "0", "-1", "noam", "cosine"} <= result


@pytest.mark.parametrize("verb", [verb for group in cli.VERBS.values() for verb in group])
def test_chinese_help_is_as_complete_as_english(verb, monkeypatch):
    names = registered()
    english_helps, chinese_helps = helps(verb, monkeypatch, "en"), helps(verb, monkeypatch, "zh")
    assert english_helps.keys() == chinese_helps.keys()
    lost = {
        flag: missing
        for flag, text in english_helps.items()
        if (missing := {fact for fact in facts(text, names) if fact not in chinese_helps[flag]})
    }
    assert lost == {}
    assert [
        flag for flag, text in chinese_helps.items() if not (CHINESE.search(text) or text == english_helps[flag])
    ] == []


def test_headings_of_help_end_with_a_chinese_colon(capsys):
    _, out, _ = run_chinese(capsys, "train", "--help")
    assert "\n数据：\n" in out and not re.search("[\u4e00-\u9fff]:", out)


def test_both_languages_list_the_same_verbs():
    """Numbers and names in a verb's line are in its Chinese line too."""
    for group in cli.VERBS.values():
        for name, verb in group.items():
            facts_ = re.findall(r"--[\w-]+|\d+|torch\.nn\.Transformer|pickle", verb.help)
            zh = translated(verb.help, "zh")
            assert [fact for fact in facts_ if fact not in zh] == [], name


def test_json_stays_english(capsys):
    """Programs read the same names whatever the language."""
    _, out, _ = run_chinese(capsys, "doctor", "--no-speed", "--json")
    assert "usable cores" in json.loads(out)["machine"]


# ----------------------------------------------------------------------------------------------------- help and reports


@pytest.mark.parametrize("verb", [verb for group in cli.VERBS.values() for verb in group])
def test_the_help_of_every_flag_is_chinese(verb, capsys):
    """argparse formats a help text with %, which must not give the English one."""
    _code, out, _err = run_chinese(capsys, verb, "--help")
    assert english(out) == []


def test_tables_are_chinese(capsys):
    _code, out, _err = run_chinese(capsys, "show", "gpt2", "--depth", "1")
    assert all(words in out for words in ("模块", "参数量", "批大小 1，长度 1024，fp32", "每个词元的浮点运算量"))
    assert "module" not in out and "parameters" not in out


def test_the_facts_of_doctor_are_chinese():
    facts = {"backends": {"torch": IMPORTED, "C kernels": True, "CUDA": False}}
    out = io.StringIO()
    with use_language("zh"), contextlib.redirect_stdout(out):
        print_report(facts, [])
    assert "已导入" in out.getvalue() and "C 内核" in out.getvalue() and "有" in out.getvalue()
    assert not re.search("yes|no|imported|kernels", out.getvalue())
