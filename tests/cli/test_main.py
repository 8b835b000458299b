"""The command line: verbs, flags, languages, exit codes; any error is one line on stderr."""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import headwater
from headwater import cli, errors
from headwater.cli.parser import CommandParser
from headwater.i18n import language_of, translated

VERBS = [verb for group in cli.VERBS.values() for verb in group]


@pytest.fixture
def verb(monkeypatch):
    """Add a verb `probe` that runs a function."""

    def plant(work, arguments=lambda parser: None):
        module = types.ModuleType("headwater.cli.probe")
        module.run, module.add_arguments = work, arguments
        monkeypatch.setitem(sys.modules, "headwater.cli.probe", module)
        monkeypatch.setitem(cli.VERBS, "Test", {"probe": cli.Verb("a planted verb", "headwater.cli.probe")})

    monkeypatch.setattr(os, "environ", dict(os.environ, HEADWATER_LANG="en"))
    return plant


def raising(error):
    def work(args):
        raise error

    return work


def command(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **settings}
    return subprocess.run([sys.executable, "-m", "headwater", *words], capture_output=True, text=True, env=environment)


# ------------------------------------------------------------------------------------------------------------- verbs


def test_verbs_are_exactly_the_functions_that_run():
    """Every function run_VERB, and run of a module with the name of a verb, is in VERBS, and its arguments exist."""
    implemented, functions = set(), set()
    for path in Path(cli.__file__).parent.glob("*.py"):
        module = f"headwater.cli.{path.stem}"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        functions |= {(module, name) for name in names}
        implemented |= {(verb, module, f"run_{verb}") for verb in VERBS if f"run_{verb}" in names}
        if {"add_arguments", "run"} <= names:
            implemented.add((path.stem, module, "run"))
    verbs = {name: verb for group in cli.VERBS.values() for name, verb in group.items()}
    assert implemented == {(name, verb.module, verb.run) for name, verb in verbs.items()}
    assert functions >= {(verb.module, verb.add_arguments) for verb in verbs.values()}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_help_of_every_verb_needs_no_torch(verb, lang):
    code = f"import sys; from headwater.cli import main; main(['{verb}', '--help', '--lang', '{lang}']); "
    code += "print('torch' in sys.modules, 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    helps = {name: verb.help for group in cli.VERBS.values() for name, verb in group.items()}
    assert out.endswith("False False\n")
    assert translated(helps[verb], lang).split()[0] in out


@pytest.mark.parametrize("words", [["--help"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_is_quick(words):
    """CPU seconds, including the start of Python: 0.05 measured, 0.25 for train (pydantic).

    A busy machine increases even these: its cores share their caches.
    """
    times = []
    for _ in range(3):
        before = os.times()
        assert command(*words).returncode == 0
        after = os.times()
        times.append(after.children_user - before.children_user + after.children_system - before.children_system)
    assert min(times) < (0.6 if "train" in words else 0.3)


def test_alone_it_lists_every_verb(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in VERBS)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"headwater {headwater.__version__}\n"


# --------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["docter"], "headwater has no verb 'docter'; did you mean 'doctor'?"),
        (["--vershion"], "headwater has no flag '--vershion'; did you mean '--version'?"),
        (["doctor", "--jsn"], "headwater doctor has no flag '--jsn'; did you mean '--json'?"),
        (["doctor", "--no-spee=1"], "did you mean '--no-speed'?"),
        (["doctor", "more"], "headwater doctor takes no further argument, got 'more'; see headwater doctor --help"),
        (["--lang", "fr"], "--lang must be en or zh, got 'fr'"),
        (["doctor", "--lang"], "--lang must be en or zh, got 'nothing'"),
    ],
)
def test_an_invalid_argument_is_one_line_and_exit_2(words, message, capsys):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_bad_value_names_the_flag(verb, capsys):
    verb(lambda args: 0, lambda parser: parser.add_argument("--steps", type=int))
    assert cli.main(["probe", "--steps", "many"]) == 2
    assert "argument --steps: invalid int value: 'many'; see headwater probe --help" in capsys.readouterr().err


def test_an_abbreviated_flag_is_rejected(verb, capsys):
    verb(lambda args: 0, lambda parser: parser.add_argument("--max-time"))
    assert cli.main(["probe", "--max", "5"]) == 2
    assert "no flag '--max'" in capsys.readouterr().err


@pytest.mark.parametrize("spelling", ["--max-time", "--max_time"])
def test_both_spellings_of_a_flag(verb, spelling, capsys):
    verb(lambda args: print(args.max_time), lambda parser: parser.add_argument("--max-time"))
    assert cli.main(["probe", spelling, "a_b"]) == 0
    assert cli.main(["probe", f"{spelling}=a_b"]) == 0
    assert capsys.readouterr().out == "a_b\na_b\n"


# -------------------------------------------------------------------------------------------------- whatever goes wrong

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.Fault)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_fault_is_one_line_and_its_exit_code(verb, kind, capsys):
    verb(raising(kind("heads must divide d_model,\ngot 7; use 8")))
    assert cli.main(["probe"]) == kind.exit_code
    assert capsys.readouterr().err == "error: heads must divide d_model, got 7; use 8\n"


def test_an_os_error_is_one_line(verb, tmp_path, capsys):
    verb(lambda args: (tmp_path / "absent").read_text())
    assert cli.main(["probe"]) == 5
    assert capsys.readouterr().err == f"error: {tmp_path / 'absent'}: No such file or directory\n"


def test_a_package_that_is_not_installed_is_one_line(verb, capsys):
    verb(raising(ModuleNotFoundError("No module named 'torch'", name="torch")))
    assert cli.main(["probe"]) == 7
    err = capsys.readouterr().err
    assert err == "error: the package 'torch' is not installed; pip install torch, or see headwater doctor\n"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"),
        ImportError("libgfortran.so: failed to map segment from shared object"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_is_one_line(verb, error, capsys):
    verb(raising(error))
    assert cli.main(["probe"]) == 7
    assert capsys.readouterr().err == (
        "error: out of memory or threads; close other programs, or use a smaller model or --micro-batch-tokens\n"
    )
    verb(raising(type(error)("something else") if not isinstance(error, MemoryError) else KeyError("x")))
    with pytest.raises((RuntimeError, ImportError, KeyError)):
        cli.main(["probe"])


@pytest.mark.parametrize(
    ("words", "result"),
    [
        (["--truncate"], {"truncate": True}),
        (["--truncate", "yes"], {"truncate": True}),
        (["--truncate", "TRUE"], {"truncate": True}),
        (["--truncate=no"], {"truncate": False}),
        (["--truncate", "false", "a.tsv"], {"truncate": False}),
        (["--truncate", "a.tsv", "--log-order", "no"], {"truncate": True, "log_order": False}),
    ],
)
def test_boolean_flags_of_train_take_yes_or_no(words, result):
    from headwater.cli import train
    from headwater.training.config import FIELDS, parse_config

    parser = CommandParser("headwater train", "")
    train.add_arguments(parser)
    args = parser.parse(words)
    flags = {name: getattr(args, name) for name in FIELDS if name != "paths" and getattr(args, name) is not None}
    assert args.files == [word for word in words if word == "a.tsv"]
    settings = parse_config(flags)
    assert flags.keys() == result.keys() and {name: getattr(settings, name) for name in result} == result
    assert "--truncate [yes|no]" in parser.format_help()


def test_ctrl_c_is_one_line_and_130(verb, capsys):
    verb(raising(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"


def test_a_bug_raises(verb):
    verb(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


@pytest.mark.parametrize("words", [["probe", "--traceback"], ["--traceback", "probe"]])
def test_a_traceback_on_request(verb, words, capsys):
    verb(raising(errors.BadFile("cut short")))
    assert cli.main(words) == 5
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("error: cut short\n")


def test_a_broken_pipe_is_not_an_error():
    """A pipe whose reader has closed: no output, and the exit code of SIGPIPE."""
    code = "import sys, headwater.cli as c; c.dispatch = lambda words: print('x\\n' * 10**6) or 0; sys.exit(c.main([]))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


def test_a_terminal_without_chinese_does_not_end_the_command():
    done = command("--help", "--lang", "zh", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "doctor" in done.stdout


# -------------------------------------------------------------------------------------------------------- languages


def test_every_verb_help_is_translated():
    pairs = [
        text for heading, verbs in cli.VERBS.items() for text in (heading, *(verb.help for verb in verbs.values()))
    ]
    for text in pairs:
        assert text.isascii()
        assert not translated(text, "zh").isascii()


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "en_GB.UTF-8", "HEADWATER_LANG": "zh"}, "zh"),
        ({"LANG": "", "LC_ALL": ""}, "en"),
    ],
)
def test_the_locale_chooses(settings, chosen):
    assert language_of(settings) == chosen


def test_the_flag_beats_the_locale():
    assert "用法" in command("--lang", "zh").stdout
    assert "usage" in command("--lang=en", HEADWATER_LANG="zh").stdout


def test_the_parser_is_plain_argparse(verb):
    parsers = []
    verb(lambda args: 0, parsers.append)
    cli.main(["probe"])
    assert isinstance(parsers[0], argparse.ArgumentParser)
