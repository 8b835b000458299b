"""The command `headwater`: finds the verb, and turns whatever goes wrong into one line and an exit code.

A verb is a file here with `arguments(parser)` and `run(args)`, and a line in VERBS. Only the verb that is asked for
is imported, and torch only inside its `run`, so help is answered at once.

Exit codes: 0 done, 1-8 a Fault (see headwater.errors), 130 stopped by Ctrl-C, 141 nobody reads our output.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from headwater import __version__
from headwater.cli import kernels
from headwater.cli.language import error_line, say
from headwater.cli.parser import COMMON, Parser, spelled_alike, take_common
from headwater.cli.terminal import harmless
from headwater.errors import BadFile, BadSetting, Fault, Unavailable, nearest, out_of_memory

# group -> verb -> what it does; each text in English and in Chinese
VERBS: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("Looking at models", "查看模型"): {
        "show": (
            "draw a model with shapes, parameters and costs, before anything is allocated",
            "画出模型：形状、参数量、开销，此时还不分配内存",
        ),
        "check": (
            "prove that a model sees neither the future nor the padding, and find where it does",
            "查证模型看不到未来和填充；看到了就指出在哪里",
        ),
        "inspect": (
            "see a model read a text: attention, heads, surprise, logit lens, gradients; with pictures",
            "看模型怎样读一段文本：注意力、各个头、意外程度、各层预测、梯度，并画成图",
        ),
        "ui": (
            "a page in the browser: attention, next token, training, anatomy; nothing leaves this machine",
            "在浏览器里看：注意力、下一个词元、训练、解剖；数据不出本机",
        ),
    },
    ("Training", "训练"): {
        "demo": (
            "a model that reads dates in eleven languages, in a minute or two",
            "一两分钟训练一个模型，能读十一种语言的日期",
        ),
        "train": (
            "learn from your files; --resume goes on where a run stopped",
            "用你的文件训练；--resume 从停下处接着训练",
        ),
        "eval": ("how good a trained model is on other data", "在其他数据上评估训练好的模型"),
        "runs": ("what has been trained here, and how good it is", "列出这里训练过的模型及其成绩"),
        "translate": ("text to text with a model you trained", "用训练好的模型翻译"),
        "summarize": ("the same, for a model that shortens", "用训练好的模型写摘要"),
        "classify": ("the label of a text", "给文本分类"),
        "tag": ("a tag for every word", "给每个词打标签"),
        "backtranslate": ("pairs to learn from, made out of text in one language", "用单语文本反向翻译出训练句对"),
        "answer": ("the stretch of a text that answers a question", "在文本中找出问题的答案"),
    },
    ("Using models", "使用模型"): {
        "generate": ("go on where a prompt ends, or answer to a source", "接着开头往下写，或根据原文作答"),
        "chat": ("talk with a model in the terminal", "在终端里与模型对话"),
        "embed": ("texts as vectors, and how near they are to one another", "把文本变成向量，并比较它们有多接近"),
        "convert": ("an old checkpoint (a pickle) as a folder that loads", "把旧检查点（pickle）转成可载入的目录"),
        "models": ("what can be had on this machine without a hub", "不连外网，这台机器上能得到哪些模型"),
    },
    ("Your machine", "本机"): {
        "doctor": (
            "what this machine has, how fast it is, and what to do about each problem",
            "看看这台机器：装了什么、跑得多快、有问题该怎么办",
        ),
        "bench": (
            "how fast it learns and writes, beside torch.nn.Transformer, and whether it was quiet enough to say",
            "测训练和解码有多快，与 torch.nn.Transformer 对比，并说明机器是否够空闲",
        ),
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show 注意力 must not end a training run
    try:
        settings, words = take_common(spelled_alike(sys.argv[1:] if argv is None else argv))
        os.environ.update(settings)  # child processes follow
        code = respond(words)
        sys.stdout.flush()
        kernels.note_failed()
        return code
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return report(130, say("stopped by Ctrl-C", "已被 Ctrl-C 停止"))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        return 141
    except Fault as fault:
        return failed(fault.exit_code, *fault.args[:1])
    except (MemoryError, RuntimeError, ImportError) as error:
        if out_of_memory(error):
            return failed(
                Unavailable.exit_code,
                "the machine has no more memory, or no more threads; end other programs, or give it less to do (a "
                "smaller model, --micro-tokens)",
            )
        if not isinstance(error, ModuleNotFoundError):
            raise  # a mistake of ours
        if (error.name or "headwater").partition(".")[0] == "headwater":
            raise  # a mistake of ours
        return failed(
            Unavailable.exit_code,
            f"the package {error.name!r} is not installed; pip install {error.name}, or see headwater doctor",
        )
    except OSError as error:
        return failed(BadFile.exit_code, f"{error.filename or 'the system'}: {error.strerror or error}")


def failed(code: int, message: str = "") -> int:
    return report(code, error_line(message))


def report(code: int, line: str) -> int:
    if os.environ.get("HEADWATER_TRACEBACK") == "1":
        traceback.print_exc()
    print(harmless(" ".join(line.split())), file=sys.stderr)
    return code


def respond(words: list[str]) -> int:
    match words:
        case [] | ["-h" | "--help", *_]:
            print(overview())
            return 0
        case ["--version", *_]:
            print(f"headwater {__version__}")
            return 0
        case [verb, *rest]:
            return run_verb(verb, rest)
    raise AssertionError("words is a list")


def run_verb(verb: str, words: list[str]) -> int:
    helps = {name: text for group in VERBS.values() for name, text in group.items()}
    if verb not in helps:
        kind, known = ("flag", ["--version", *COMMON]) if verb.startswith("-") else ("verb", list(helps))
        raise BadSetting(f"headwater has no {kind} {verb!r}; {nearest(verb, known)} (all of them: headwater --help)")
    module = importlib.import_module(f"headwater.cli.{verb}")
    parser = Parser(f"headwater {verb}", say(*helps[verb]))
    module.arguments(parser)
    parser.add_common()
    return module.run(parser.parse(words)) or 0


def overview() -> str:
    """What `headwater` alone prints: every verb with its line, group by group."""
    lines = [
        say(
            "headwater: one Transformer core, and the family that flows from it",
            "headwater：一个 Transformer 核心，全家由此而出",
        ),
        "",
        say("usage: headwater VERB …", "用法：headwater 动词 …"),
        "",
    ]
    for heading, verbs in VERBS.items():
        lines += [say(*heading), *(f"  {verb:<12} {say(*text)}" for verb, text in verbs.items()), ""]
    flags = {"--version": ("the version", "显示版本号"), **COMMON}
    lines += [say("flags", "选项"), *(f"  {flag:<12} {say(*text)}" for flag, text in flags.items())]
    lines += ["", say("More about one verb: headwater VERB --help", "某个动词的用法：headwater 动词 --help")]
    return "\n".join(lines)
