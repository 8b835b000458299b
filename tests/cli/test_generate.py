"""headwater generate and headwater chat, with an untrained byte-level model."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import pydoc
import re
import sys

import pytest
import torch

import headwater
from headwater import cli
from headwater.cli import generate, predict
from headwater.cli.parser import escape_control
from headwater.generation.sampling_params import PROCESSORS, SamplingParams


class ByteTokenizer:
    """A byte-level tokenizer."""

    bos_id, chat_template, specials = 2, "", {}

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i > 3).decode("utf-8", "replace")

    def piece(self, token):
        return chr(token)


class TinyModel:
    def __init__(self):
        sizes = {"d_model": 32, "heads": 4, "layers": 2, "position": "rotary", "norm_position": "pre"}
        self.model = headwater.decoder(256, **sizes).build(seed=0).double().eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(2)
        self.tokenizer = ByteTokenizer()
        self.eos_ids = (3,)
        self.decoder_start_id = None
        self.max_positions = 300
        self.generation_setting = {}.get


@pytest.fixture
def loaded(monkeypatch):
    one = TinyModel()
    monkeypatch.setattr("headwater.families.load.load", lambda name: one)
    return one


@pytest.fixture
def run_cli(monkeypatch, capsys):
    def run(*words, lines=None):
        waiting = iter(lines or [])

        def ask(prompt=""):
            line = next(waiting, None)
            if line is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", ask)
        code = cli.main(list(words))
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


# -------------------------------------------------------------------------------------------------------- generate


def test_streamed_text_equals_the_full_text(loaded, run_cli):
    expected = escape_control(headwater.generate(loaded, "ab", max_tokens=12, temperature=0.9, seed=2).text)
    words = ["generate", "any", "ab", "--max-tokens", "12", "--temperature", "0.9", "--seed", "2"]
    for more in (["--stream"], ["--no-stream"], ["--no-stream", "--prompt-lookup"], ["--stream", "--prompt-lookup"]):
        assert run_cli(*words, *more) == (0, expected + "\n", "")


@pytest.mark.parametrize("words", [[""], ["", "--stream"], ["", "--json"]])
def test_an_empty_prompt_is_rejected(loaded, run_cli, words):
    code, out, err = run_cli("generate", "any", *words)
    assert (
        (code, out, err.count("\n")) == (3, "", 1)
        and "the prompt must not be empty" in err
        and "give a text such as" in err
    )


def test_an_empty_pipe_or_file_is_an_empty_prompt(loaded, run_cli, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert run_cli("generate", "any")[0] == 3


def test_a_file_may_hold_the_prompt(loaded, run_cli, tmp_path):
    (tmp_path / "prompt.txt").write_text("ab\ncd\n")
    expected = run_cli("generate", "any", "ab\ncd", "--max-tokens", "5")
    assert run_cli("generate", "any", str(tmp_path / "prompt.txt"), "--max-tokens", "5") == expected
    name = str(tmp_path / "prompt.txt")
    assert run_cli("generate", "any", name, "--max-tokens", "5", "--as-text")[1] != expected[1]


def test_help_lists_every_setting_on_a_line_of_its_own():
    lines = [line.split() for line in inspect.getdoc(headwater.generate).splitlines()]
    parameters = set(inspect.signature(headwater.generate).parameters)
    settings = parameters - {"model", "prompt"}
    assert settings >= {*PROCESSORS, *(field.name for field in dataclasses.fields(SamplingParams)), "n", "strategy"}
    assert settings - {line[0] for line in lines if line} == set()
    firsts = [line[0] for line in lines if line and line[0] in settings]
    assert len(firsts) == len(set(firsts)), "each once"
    assert not [line for line in lines if len(settings & set(line)) > 2], "no line lists several"
    printed = pydoc.plain(pydoc.render_doc(headwater.generate))
    assert all(re.search(rf"^ +{name} +\S", printed, re.M) for name in settings)


def test_json_lines(loaded, run_cli):
    code, out, _ = run_cli("generate", "any", "ab", "--max-tokens", "5", "--json", "--n", "2", "--temperature", "1")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (
        code == 0
        and len(lines) == 2
        and all(len(line["ids"]) == 5 and line["finish_reason"] == "length" for line in lines)
    )
    _, out, _ = run_cli("generate", "any", "ab", "--max-tokens", "5", "--json", "--beam", "3", "--n", "2")
    scores = [json.loads(line)["score"] for line in out.splitlines()]
    assert scores == sorted(scores, reverse=True) and len(scores) == 2


def test_generate_prints_the_trace(loaded, run_cli):
    _, out, _ = run_cli("generate", "any", "ab", "--max-tokens", "2", "--top-k", "3", "--trace")
    assert out.startswith("step 1: chosen") and "the model" in out and "TopK(k=3)" in out and "3 left" in out


def test_a_pipe_is_a_prompt(loaded, run_cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n"))
    assert (
        run_cli("generate", "any", "--max-tokens", "5")[1] == run_cli("generate", "any", "ab", "--max-tokens", "5")[1]
    )


def test_a_pipe_that_is_not_utf8_is_rejected(loaded, run_cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), "utf-8"))
    code, _, err = run_cli("generate", "any")
    assert code == 3 and err.startswith("error: generate: the prompt must be UTF-8, byte 2 of the pipe is not")


@pytest.mark.parametrize(
    "read",
    [lambda: generate.prompt_or_stdin(None, False), lambda: predict._read_context("-")],
    ids=["generate", "answer"],
)
def test_lines_of_a_pipe_end_without_carriage_returns(monkeypatch, read):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon\r\na ti\rme\r\n"))
    assert read().rstrip("\n") == "Once upon\na ti\rme"


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--temperature", "-1"], 2, "error: Temperature: value must be 0 (greedy) or from 0.0001 to 100, got -1.0"),
        (["--temperature", "nan"], 2, "error: Temperature: value must be a finite number"),
        (["--max-tokens", "9999"], 4, "error: generate: there are 300 positions"),
        (["--top-k", "x"], 2, "argument --top-k: invalid int value"),
        (["--beam", "0"], 2, "error: Beam: width must be from 1 to 1024"),
        (["--beam", "2", "--prompt-lookup"], 2, "exclude each other"),
        (["--stop", ""], 2, "a stop string must have 1 to 1000 characters"),
        (["--tempreature", "1"], 2, "did you mean '--temperature'?"),
    ],
)
def test_mistakes_are_one_line(loaded, run_cli, words, code, line):
    got, _, err = run_cli("generate", "any", "ab", *words)
    assert got == code and line in err and err.count("\n") == 1


def test_control_characters_of_the_output_are_escaped(loaded, run_cli):
    escape = ["generate", "any", "ab", "--max-tokens", "1", "--no-stream"]
    with torch.no_grad():
        loaded.model.head.out = torch.nn.Linear(32, 256).double()
        loaded.model.head.out.bias[0x1B] = 1e6
    assert run_cli(*escape)[1] == "\\x1b\n" and run_cli(*escape, "--raw")[1] == "\x1b\n"


def test_printable_characters_are_not_escaped():
    assert escape_control("a\tb\n你好 é 🙂") == "a\tb\n你好 é 🙂"
    assert escape_control("\x1b]0;x\x07\x9b\x7f\u202e\r") == "\\x1b]0;x\\x07\\x9b\\x7f\\u202e\\r"


# ------------------------------------------------------------------------------------------------------------ chat


@pytest.fixture
def chat_model(loaded, monkeypatch):
    """The conversation as plain text, one line per message."""

    def encode(tokenizer, messages, **_):
        return tokenizer.encode("".join(f"{m['role'][0]}:{m['content']}\n" for m in messages) + "a:")

    monkeypatch.setattr("headwater.text.chat.encode_chat", encode)
    return loaded


FEW = ["--max-tokens", "6", "--temperature", "1"]


def test_a_chat_reuses_its_cache_and_equals_generate(chat_model, run_cli):
    read = []
    hook = chat_model.model.decoder.register_forward_pre_hook(lambda _, args: read.append(args[0].ids.shape[1]))
    code, out, err = run_cli("chat", "any", *FEW, lines=["hello", "again"])
    hook.remove()
    assert code == 0 and err == ""
    first = headwater.generate(chat_model, "u:hello\na:", max_tokens=6, temperature=1).text
    second = headwater.generate(chat_model, f"u:hello\na:{first}\nu:again\na:", max_tokens=6, temperature=1).text
    assert out == escape_control(first) + "\n" + escape_control(second) + "\n"
    assert max(read[2:]) < len(f"{first}\nu:again\na:".encode()) + 2, "the second turn prefills only the new tokens"


def test_commands(chat_model, run_cli, tmp_path):
    path = tmp_path / "talk.json"
    lines = [
        "/help",
        "/system be kind",
        "hello",
        f"/save {path}",
        f"/save {path}",
        "/reset",
        "/unknown",
        "/exit",
        "never",
    ]
    code, out, err = run_cli("chat", "any", *FEW, lines=lines)
    assert code == 0 and out.count("/reset") == 2 and "never" not in out
    assert "must be a new file" in err and err.count("\n") == 1
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert [m["role"] for m in saved] == ["system", "user", "assistant"] and saved[0]["content"] == "be kind"


def test_ctrl_c_stops_the_reply_and_not_the_program(chat_model, run_cli, monkeypatch):
    expected = run_cli("chat", "any", *FEW, lines=["hello"])[1]
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    hook = chat_model.model.decoder.register_forward_pre_hook(interrupt)
    code, out, _ = run_cli("chat", "any", *FEW, lines=["hello", "/reset", "hello"])
    hook.remove()
    assert code == 0 and "[stopped]" in out and out.endswith(expected)


def test_the_chat_continues_after_an_error(chat_model, run_cli):
    code, out, err = run_cli("chat", "any", *FEW, lines=["x" * 500, "hello"])
    assert code == 0 and "has 300 positions" in err and err.count("\n") == 1 and out.count("\n") == 1


def test_the_oldest_turns_are_dropped(chat_model, run_cli):
    code, out, err = run_cli("chat", "any", *FEW, lines=["x" * 120] * 4)
    assert code == 0 and err.count("[the oldest turn is dropped]") >= 2 and out.count("\n") >= 4


def test_a_model_without_a_chat_template_is_reported(loaded, run_cli):
    code, _, err = run_cli("chat", "any", lines=["hello"])
    assert code == 0 and "has no chat template" in err
