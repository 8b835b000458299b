"""headwater train and the verbs that use its runs, on runs of a few steps."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import shutil
import sys
from contextlib import suppress

import pytest
import yaml

from headwater import cli
from headwater.cli.parser import escape_for_terminal
from headwater.data.dates import dates_dataset
from headwater.families import FAMILIES
from headwater.families.hf_folder import LoadedModel, save_hf_folder
from headwater.text.train import train_tokenizer
from headwater.training.predict import load_run
from headwater.weights.hf_config import HFConfig

FEW = ["--size", "xs", "--max-steps", "3", "--batch-tokens", "600", "--eval-examples", "10", "--quiet"]
CONTEXT = "The day was 2026-11-15. It rained."


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One small file for each task."""
    folder, pairs = tmp_path_factory.mktemp("files"), dates_dataset("train", 120)
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    kinds = "".join(f"{a}\t{'tagged' if a[0] == '>' else 'plain'}\n" for a, _ in pairs)
    (folder / "labels.tsv").write_text("text\tlabel\n" + kinds)
    words = ("\n".join(f"{w}\t{'B-NUM' if w[0].isdigit() else 'O'}" for w in a.split()) for a, _ in pairs)
    (folder / "words.conll").write_text("\n\n".join(words) + "\n")
    (folder / "text.txt").write_text("\n\n".join(f"{a} is {b}.\nThen it was over.\nAll went home." for a, b in pairs))
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": f"{a} is {b}."}) + "\n" for a, b in pairs))
    paragraphs = [{"context": f"The day was {b}. It rained.",
              "qas": [{"id": b, "question": "What day was it?", "answers": [{"text": b, "answer_start": 12}]}]}
             for _, b in pairs[:40]]  # fmt: skip
    (folder / "questions.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return folder


@pytest.fixture(scope="module")
def runs(files, tmp_path_factory):
    """A run for each task, trained by the command."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("pairs.tsv", "labels.tsv", "words.conll", "text.txt", "questions.json"):
        assert (
            cli.main(
                ["train", str(files / name), "--out", str(folder / name.split(".")[0]), "--context-length", "32", *FEW]
            )
            == 0
        )
    return folder


@pytest.fixture
def run_cli(capsys, monkeypatch):
    def run(*words, pipe=None):
        if pipe is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(pipe))
        code = cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


# ------------------------------------------------------------------------------------------------- the verbs


def test_a_text_a_pipe_and_a_file_give_the_same_output(runs, run_cli, tmp_path):
    texts = ["3. März 1987", "le 15 novembre 2026"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    code, expected_output, _ = run_cli("translate", runs / "pairs", *texts)
    assert code == 0 and expected_output.count("\n") == 2
    assert run_cli("translate", runs / "pairs", pipe="\n".join(texts) + "\n")[1] == expected_output
    assert run_cli("translate", runs / "pairs", tmp_path / "texts.txt")[1] == expected_output
    assert run_cli("summarize", runs / "pairs", *texts)[1] == expected_output
    _, lines, _ = run_cli("translate", runs / "pairs", *texts, "--json")
    assert [json.loads(line)["input"] for line in lines.splitlines()] == texts


def test_a_label_and_its_probability(runs, run_cli):
    code, out, _ = run_cli("classify", runs / "labels", "3. März 1987", ">>de 1 May 2020")
    label, prob = out.splitlines()[0].split("\t")
    assert code == 0 and label in ("plain", "tagged") and 0.5 <= float(prob) <= 1 and out.count("\n") == 2
    probs = json.loads(run_cli("classify", runs / "labels", "3. März", "--json")[1])["output"]
    assert sum(probs.values()) == pytest.approx(1, abs=1e-3) and list(probs.values()) == sorted(probs.values())[::-1]
    alone = run_cli("classify", runs / "labels", ">>de 1 May 2020")[1]
    assert out.splitlines()[1] + "\n" == alone, "a text beside others is answered as if alone"


def test_every_word_keeps_its_order(runs, run_cli):
    code, out, _ = run_cli("tag", runs / "words", "on 15 May 2020")
    assert code == 0 and [word.split("/")[0] for word in out.split()] == ["on", "15", "May", "2020"]
    words = json.loads(run_cli("tag", runs / "words", "on 15 May", "--json")[1])["output"]
    assert [word for word, _ in words] == ["on", "15", "May"] and {tag for _, tag in words} <= {"O", "B-NUM"}


def test_an_answer_is_a_span_of_the_text(runs, run_cli, tmp_path):
    (tmp_path / "day.txt").write_text(CONTEXT)
    code, out, _ = run_cli("answer", runs / "questions", "What day was it?", "--text", tmp_path / "day.txt")
    assert code == 0 and out.strip() in CONTEXT and out.strip()
    assert run_cli("answer", runs / "questions", "What day was it?", pipe=CONTEXT)[1] == out
    both = run_cli(
        "answer", runs / "questions", "What day was it?", "Was it wet?", "--text", tmp_path / "day.txt", "--json"
    )
    assert [json.loads(line)["input"] for line in both[1].splitlines()] == ["What day was it?", "Was it wet?"]
    (tmp_path / "gbk.txt").write_bytes("今天下雨。".encode("gbk"))
    for path, code, line in [("nowhere.txt", 6, "does not exist"), (tmp_path / "gbk.txt", 3, "must be UTF-8")]:
        result = run_cli("answer", runs / "questions", "x", "--text", path)
        assert result[0] == code and line in result[2] and result[2].count("\n") == 1
    assert "must not be empty" in run_cli("answer", runs / "questions", "x", pipe="")[2]


def test_a_language_model_continues_a_prompt(runs, run_cli):
    code, out, _ = run_cli("generate", runs / "text", "Then it", "--max-tokens", "4", "--no-stream")
    assert code == 0 and out.endswith("\n")


@pytest.mark.parametrize(
    ("run", "file", "measure"),
    [("pairs", "pairs.tsv", "bleu"), ("labels", "labels.tsv", "accuracy"), ("words", "words.conll", "f1"),
     ("text", "text.txt", "perplexity"), ("questions", "questions.json", "exact")],
)  # fmt: skip
def test_evaluated_on_a_file(runs, files, run_cli, run, file, measure):
    code, out, _ = run_cli("eval", runs / run, files / file, "--rows", "5", "--json")
    assert code == 0 and measure in json.loads(out)
    assert measure in run_cli("eval", runs / run, files / file, "--rows", "5")[1]


def test_a_run_knows_its_input_column(files, runs, run_cli, tmp_path):
    """The columns may have another order, and no label; a single text gets the same prediction."""
    rows = [line.split("\t")[0] for line in (files / "labels.tsv").read_text().splitlines()[1:5]]
    (tmp_path / "in.csv").write_text("sentence2,text\n" + "".join(f'x,"{row}"\n' for row in rows))
    code, out, _ = run_cli("classify", runs / "labels", tmp_path / "in.csv")
    result = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [row["text"] for row in result] == rows and list(result[0]) == [
        "sentence2", "text", "label", "probability"]  # fmt: skip
    alone = [line.split("\t")[0] for line in run_cli("classify", runs / "labels", "--as-text", *rows)[1].splitlines()]
    assert [row["label"] for row in result] == alone
    assert load_run(runs / "pairs").columns == {"source": "1", "target": "2"}


def reported(expected, output):
    """Precision, recall and F1 of every class by their definitions, one row at a time."""
    result = {}
    for name in sorted(set(expected)):
        both = [(name == a, name == b) for a, b in zip(expected, output, strict=True)]
        right, printed, real = sum(a and b for a, b in both), sum(b for _, b in both), sum(a for a, _ in both)
        precision, recall = right / printed if printed else 0.0, right / real
        f1 = 2 * precision * recall / (precision + recall) if right else 0.0
        result[name] = [100 * precision, 100 * recall, 100 * f1, real]
    return result


def test_eval_reports_every_class(files, runs, run_cli):
    """Against what classify says of the same rows, counted by hand."""
    rows = [line.split("\t") for line in (files / "labels.tsv").read_text().splitlines()[1:]]
    printed = run_cli("classify", runs / "labels", "--as-text", *(text for text, _ in rows))[1]
    output = [line.split("\t")[0] for line in printed.splitlines()]
    expected = [label for _, label in rows]
    result = json.loads(run_cli("eval", runs / "labels", files / "labels.tsv", "--json")[1])
    assert result["rows"] == len(rows) == 120
    by_hand = reported(expected, output)
    for name, scores in by_hand.items():
        assert list(result["classes"][name].values()) == pytest.approx(scores)
    for average, weights in (("macro_avg", [1, 1]), ("weighted_avg", [scores[3] for scores in by_hand.values()])):
        for index, measure in enumerate(("precision", "recall", "f1")):
            mean = sum(w * s[index] for w, s in zip(weights, by_hand.values(), strict=True)) / sum(weights)
            assert result[average][measure] == pytest.approx(mean)
    assert result["macro_f1"] == pytest.approx(result["macro_avg"]["f1"])
    majority = max(set(expected), key=expected.count)
    assert result["majority_baseline"] == {
        "label": majority,
        "accuracy": pytest.approx(100 * expected.count(majority) / 120),
    }
    pairs = list(zip(expected, output, strict=True))
    for label in set(expected):
        row = {name: pairs.count((label, name)) for name in set(output) if pairs.count((label, name))}
        assert result["confusion"][label] == row
    table = run_cli("eval", runs / "labels", files / "labels.tsv")[1]
    for words in ("rows         120", "baseline", "precision     recall         f1    support", "confusion matrix"):
        assert words in table


def test_eval_reports_every_entity_type(files, runs, run_cli):
    result = json.loads(run_cli("eval", runs / "words", files / "words.conll", "--json")[1])
    numbers = result["entities"]["NUM"]
    assert result["rows"] == 120 and set(result["entities"]) == {"NUM"}, "one type, so its scores are those of all"
    assert [numbers[name] for name in ("precision", "recall", "f1")] == pytest.approx(
        [result[name] for name in ("precision", "recall", "f1")]
    )
    assert "NUM" in run_cli("eval", runs / "words", files / "words.conll")[1]


def test_runs_lists_the_stop_reasons(run_cli, tmp_path):
    words = {
        "finished": ("finished", "已完成"),
        "early_stopping": ("stopped early", "已早停"),
        "time_limit": ("time limit reached", "时间用完"),
        "interrupted": ("stopped (signal)", "已中断（信号）"),
        "diverged": ("stopped (NaN)", "已停止（NaN）"),
    }
    for state in words:
        folder = tmp_path / state.replace(" ", "-")
        folder.mkdir()
        (folder / "config.yaml").write_text("")
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 7, "stop_reason": state}) + "\n")
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "config.yaml").write_text("")
    words["started"] = ("unfinished", "未完成")
    for index, lang in enumerate(("en", "zh")):
        lines = run_cli("runs", tmp_path, "--lang", lang)[1].splitlines()
        for state, label in words.items():
            assert any(state.replace(" ", "-") in line and f" {label[index]} " in line for line in lines), state
    states = {json.loads(line)["state"] for line in run_cli("runs", tmp_path, "--json")[1].splitlines()}
    assert states == {*words} - {"started"} | {"unfinished"}, "JSON has the untranslated states"


def test_runs_are_listed(runs, run_cli):
    code, out, _ = run_cli("runs", runs)
    assert code == 0 and out.count("finished") == 5 and "accuracy" in out
    listed = [json.loads(line) for line in run_cli("runs", runs, "--json")[1].splitlines()]
    assert {line["step"] for line in listed} == {3}


@pytest.mark.parametrize("verb", ["classify", "tag", "answer"])
def test_the_verb_of_another_task_is_refused_in_a_line(runs, run_cli, verb):
    code, out, err = run_cli(verb, runs / "pairs", "a text", pipe="x")
    assert (code, out, err.count("\n")) == (3, "", 1) and "use headwater translate" in err


# --------------------------------------------------------------------------------------------------- training


def test_a_dry_run_prints_the_plan_and_writes_nothing(files, run_cli, tmp_path):
    code, out, _ = run_cli("train", files / "labels.tsv", "--out", tmp_path / "run", "--dry-run", *FEW)
    assert code == 0 and not (tmp_path / "run").exists()
    for word in (
        "classification",
        "120 rows",
        "held out",
        "labels",
        "encoding",
        "tokenizer",
        "model",
        "memory",
        "time",
    ):
        assert word in out


@pytest.mark.parametrize("objective", ["packed", "mlm", "mlm-nsp", "denoising", "span-corruption"])
def test_every_objective_trains_and_is_evaluated(files, run_cli, tmp_path, objective):
    file = files / ("documents.jsonl" if objective == "packed" else "text.txt")
    code, out, _ = run_cli(
        "train", file, "--objective", objective, "--out", tmp_path / "run", "--context-length", "48", *FEW
    )
    next_verb = "headwater generate" if objective == "packed" else f"--init-from {tmp_path / 'run'}"
    assert code == 0 and next_verb in out
    assert "loss" in json.loads(run_cli("eval", tmp_path / "run", file, "--rows", "4", "--json")[1])


@pytest.fixture(scope="module")
def bert(files, tmp_path_factory):
    """A small BERT in the public layout, with a tokenizer."""
    tokenizer = train_tokenizer([CONTEXT, *(a for a, _ in dates_dataset("train", 120))], vocab_size=320)
    config = {"model_type": "bert", "vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 3,
              "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 48}  # fmt: skip
    model = FAMILIES["bert"].read_spec(HFConfig(dict(config)), "language").build(seed=0)
    folder = save_hf_folder(
        LoadedModel(model, tokenizer, config, files, "language"), tmp_path_factory.mktemp("bert") / "model"
    )
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("name", ["labels.tsv", "words.conll", "questions.json"])
def test_from_a_public_folder(files, bert, run_cli, tmp_path, name):
    code, out, _ = run_cli("train", files / name, "--init-from", bert, "--out", tmp_path / "run", *FEW[2:])
    assert code == 0 and "3 layers, d_model 16, 2 heads" in out
    chosen = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (
        chosen["model"]["init_from"] == str(bert)
        and chosen["data"]["max_length"] == 45
        and chosen["model"]["d_ff"] == 24
    )
    assert run_cli("eval", tmp_path / "run", files / name, "--rows", "4")[0] == 0


def test_masked_language_modelling_from_a_public_folder(files, bert, run_cli, tmp_path):
    masked = ["--init-from", bert, "--objective", "mlm", "--context-length", "32"]
    assert run_cli("train", files / "text.txt", *masked, "--out", tmp_path / "run", *FEW[2:])[0] == 0
    code, _, err = run_cli("train", files / "pairs.tsv", "--init-from", bert, "--out", tmp_path / "other", *FEW[2:])
    assert code == 2 and "seq2seq needs an encoder and a decoder, the model has an encoder" in err
    assert run_cli("train", files / "pairs.tsv", "--init-from", "nothing", "--out", tmp_path / "other")[0] == 6


# ----------------------------------------------------------------------------------- augmentation, back-translation


def test_augmentation_does_not_depend_on_checkpoints(files, run_cli, tmp_path):
    (tmp_path / "words.tsv").write_text("may\tmay month\n")
    more = ["--augment", "delete=0.2,noise=0.1,synonyms=0.5", "--synonyms", tmp_path / "words.tsv", "--log-every", "1"]
    assert run_cli("train", files / "pairs.tsv", *more, "--out", tmp_path / "single", *FEW, "--max-steps", "4")[0] == 0
    assert run_cli("train", files / "pairs.tsv", *more, "--out", tmp_path / "several", *FEW, "--max-steps", "4",
               "--checkpoint-steps", "2", "--patience", "0")[0] == 0  # fmt: skip
    losses = [[line["loss"] for line in map(json.loads, (tmp_path / run / "metrics.jsonl").open()) if "lr" in line]
              for run in ("single", "several")]  # fmt: skip
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_augmentation_that_does_not_apply_is_reported(files, run_cli, tmp_path):
    for words, line in [
        (["--augment", "delet=0.1"], "no augmentation is called 'delet'; did you mean 'delete'"),
        (["--augment", "delete=much"], "delete must have a rate such as delete=0.1"),
        (["--augment", "synonyms=0.2"], "synonyms needs a table"),
        (["--synonyms", "x.tsv"], "a table that nothing uses"),
    ]:
        code, _, err = run_cli("train", files / "pairs.tsv", *words, "--out", tmp_path / "run", *FEW)
        assert code == 2 and line in err and err.count("\n") == 1
    code, _, err = run_cli("train", files / "words.conll", "--augment", "swap=0.1", "--out", tmp_path / "run", *FEW)
    assert code == 2 and "the task is token-classification" in err


def test_back_translation_of_monolingual_text(runs, run_cli, tmp_path):
    (tmp_path / "one.txt").write_text("2026-11-15\n\n1987-03-03\n")
    words = ["backtranslate", runs / "pairs", tmp_path / "one.txt", "--out", tmp_path / "more.tsv"]
    code, out, _ = run_cli(*words)
    rows = [line.split("\t") for line in (tmp_path / "more.tsv").read_text().splitlines()]
    assert code == 0 and "2 pairs" in out and [row[1] for row in rows] == ["2026-11-15", "1987-03-03"]
    assert all(len(row) == 2 and row[0] for row in rows) and not (tmp_path / "more.tsv.part").exists()
    code, _, err = run_cli(*words)
    assert code == 2 and "must be a new file" in err


# ------------------------------------------------------------------------------------------- as a stranger uses it


def test_texts_may_be_in_any_encoding_that_train_reads(runs, run_cli, tmp_path):
    (tmp_path / "plain.txt").write_text("3. März 1987\nle 15 novembre 2026, café, été\n", encoding="utf-8")
    text = (tmp_path / "plain.txt").read_text(encoding="utf-8")
    (tmp_path / "wide.txt").write_bytes(text.encode("utf-16"))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(text.encode()))
    code, expected_output, _ = run_cli("translate", runs / "pairs", tmp_path / "plain.txt")
    assert code == 0 and expected_output.count("\n") == 2
    for name in ("wide.txt", "packed.gz"):
        assert run_cli("translate", runs / "pairs", tmp_path / name)[1] == expected_output
    (tmp_path / "odd.txt").write_bytes("今日はいい天気ですね".encode("shift_jis") * 20)
    code, out, err = run_cli("translate", runs / "pairs", tmp_path / "odd.txt")
    assert (code, out, err.count("\n")) == (5, "", 1) and "byte 0 is not UTF-8" in err
    code, _, err = run_cli("translate", runs / "pairs", pipe="good\nbad \udcff\n")
    assert code == 3 and "the standard input must be UTF-8, line 2 is not" in err and err.count("\n") == 1


def test_model_output_is_escaped_for_the_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert escape_for_terminal("a\x1b[2J") == "a\x1b[2J", "a file or a pipe gets the unescaped output"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert escape_for_terminal("a\x1b[2J") == "a\\x1b[2J"


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["translate", "{pairs}", "x", "--beam", "0"], "beam must be at least 1 (which is greedy), got 0"),
        (["train", "{file}", "--nproc", "0"], "--nproc must be from 1 to 64, got 0"),
        (["train"], "it needs files or examples to learn from, got none; try: headwater train pairs.tsv"),
        (["train", "{file}", "--max-time", "soon"], "max_time must be a time such as 90s or 5m, got 'soon'"),
    ],
)
def test_an_error_is_one_line(runs, files, run_cli, words, printed):
    code, out, err = run_cli(*(word.format(pairs=runs / "pairs", file=files / "pairs.tsv") for word in words))
    assert code == 2 and not out and printed in err and err.count("\n") == 1


def test_all_output_of_train_is_chinese(files, run_cli, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWATER_LANG", "en")  # and so it is again afterwards
    loud = [word for word in FEW if word != "--quiet"]
    code, out, _ = run_cli("train", files / "pairs.tsv", "--out", tmp_path / "run", *loud, "--lang", "zh")
    names = "任务|训练集|验证集|长度|编码|分词器|模型|训练|内存|时间|步|目前最好|训练完成：第"
    assert code == 0 and all(name in out for name in names.split("|"))
    english = "rows|characters|steps|weights|about|left|best so far|expected|usual"
    assert not [line for line in out.splitlines() if re.search(rf"\b({english})\b", line)]
    code, out, _ = run_cli("runs", tmp_path, "--lang", "zh")
    assert "已完成" in out and "步 3" in out
    assert "finished           step 3" in run_cli("runs", tmp_path, "--lang", "en")[1]


def test_a_note_is_printed_once(files, run_cli, tmp_path):
    loud = [word for word in FEW if word != "--quiet"]
    path = tmp_path / "long.tsv"
    path.write_text((files / "pairs.tsv").read_text() + f"{'a long day ' * 400}\tnever\n")
    for name, words in (("a", loud), ("b", FEW), ("c", [*loud, "--dry-run"])):
        code, out, _ = run_cli("train", path, "--out", tmp_path / name, *words)
        assert code == 0 and out.count("rows are longer than 512 tokens and left out") == 1, name


def test_a_finished_run_prints_how_to_continue(runs, run_cli, tmp_path):
    shutil.copytree(runs / "labels", tmp_path / "run")
    code, out, _ = run_cli("train", "--resume", tmp_path / "run")
    assert code == 0 and "all its 3 steps were done; to continue, give --max-steps above 3" in " ".join(out.split())


def test_a_packed_file_gives_a_run_its_name(files, run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress((files / "text.txt").read_bytes()))
    assert run_cli("train", "book.txt.gz", "--context-length", "32", *FEW)[0] == 0
    assert (tmp_path / "runs/language-model/book/config.yaml").is_file()


def test_control_characters_of_a_file_are_escaped(run_cli, tmp_path):
    rows = "".join(f"a text of number {n}\tgood\x1b[2J{n % 2}\n" for n in range(60))
    (tmp_path / "a.tsv").write_text(rows)
    code, out, _ = run_cli("train", tmp_path / "a.tsv", "--dry-run", *FEW)
    assert code == 0 and "labels     2: good\\x1b[2J0 30, good\\x1b[2J1 30" in out and "\x1b" not in out
    code, _, err = run_cli("train", tmp_path / "a.tsv", "--dry-run", "--columns", "text=\x1b[2J", *FEW)
    assert code == 2 and "\x1b" not in err and "no column is called" in err


def test_help_starts_with_the_positional_arguments(capsys, monkeypatch):
    monkeypatch.setenv("HEADWATER_LANG", "en")
    for words, first in ((["train"], "usage: headwater train [FILES …] [flags]"),
                         (["--lang", "zh", "eval"], "用法：headwater eval RUN FILES … [选项]")):  # fmt: skip
        with suppress(SystemExit):
            cli.main([*words, "--help"])
        assert capsys.readouterr().out.split("\n")[0] == first


def test_evaluated_on_a_file_with_other_columns(runs, files, run_cli, tmp_path):
    """An unknown header is detected from the rows below it; with too few rows it needs --columns."""
    rows = (files / "labels.tsv").read_text().splitlines()[1:9]
    other = tmp_path / "other.tsv"
    other.write_text("what\twhich\n" + "\n".join(rows) + "\n")
    assert run_cli("eval", runs / "labels", other)[0] == 0
    other.write_text("what\twhich\n" + "\n".join(rows[:3]) + "\n")
    code, _, err = run_cli("eval", runs / "labels", other)
    assert code == 3 and "the label 'which' is not one the model knows" in err
    code, out, _ = run_cli("eval", runs / "labels", other, "--columns", "text=what,label=which", "--json")
    assert code == 0 and json.loads(out)["rows"] == 3
    code, _, err = run_cli("eval", runs / "labels", other, "--columns", "text=what,label=witch")
    assert code == 2 and "no column is called" in err and err.count("\n") == 1
