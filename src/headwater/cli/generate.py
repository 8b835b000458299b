"""headwater generate MODEL "prompt": a model goes on where the prompt ends, or answers to a source."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from headwater.cli import inputs, kernels, sampling
from headwater.cli.language import say
from headwater.cli.starting import undisturbed
from headwater.cli.terminal import harmless
from headwater.errors import BadInput, BadSetting


def arguments(parser: argparse.ArgumentParser) -> None:
    told = say(
        "a folder, a run, a .gguf file or a known name (headwater models)",
        "模型文件夹、训练目录、.gguf 文件或已知名称（见 headwater models）",
    )
    parser.add_argument("model", metavar="MODEL", help=told)
    told = say(
        "the beginning of the text, or a file that holds it; where it is not given, a pipe is read",
        "文本开头，或存有开头的文件；不给则从管道读取",
    )
    parser.add_argument("prompt", nargs="?", help=told)
    told = say("the prompt is a text, even if it looks like a file name", "开头当作文本，即使看起来像文件名")
    parser.add_argument("--as-text", action="store_true", help=told)
    sampling.add(parser)
    told = say("beam search with so many beams", "束搜索的宽度")
    parser.add_argument("--beam", type=int, metavar="N", help=told)
    parser.add_argument("--n", type=int, default=1, metavar="N", help=say("so many answers", "给出几个回答"))
    told = say("guess by looking up the text so far: sooner, the same text", "从已有文本中猜后文：更快，结果不变")
    parser.add_argument("--look-up", action="store_true", help=told)
    told = say("say each word as it comes (usual on a terminal)", "逐词输出（终端默认）")
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=None, help=told)
    told = say(
        "why: the distribution at each step, before and after each chooser",
        "原因：每一步的概率分布，经过各选词规则之前和之后",
    )
    parser.add_argument("--trace", action="store_true", help=told)
    told = say("the answer with ids and log-probabilities as JSON", "以 JSON 输出回答、词元和对数概率")
    parser.add_argument("--json", action="store_true", help=told)


def run(args: argparse.Namespace) -> None:
    prompt = given(args.prompt, args.as_text)
    if not prompt:
        raise BadInput('generate: the prompt must not be empty, got ""; give a beginning, such as "Once upon a time"')
    settings = {**sampling.settings(args), "trace": args.trace}
    way = by(args)
    shown: Callable[[str], str] = str if args.raw else harmless

    with undisturbed():
        from headwater.families.loading import load
        from headwater.generation.ask import generate, stream

        loaded = load(args.model)
    kernels.note_missing()
    plain = not (args.json or args.trace or args.beam or args.n > 1)
    if plain and (sys.stdout.isatty() if args.stream is None else args.stream):
        for event in stream(loaded, prompt, by=way, **settings):
            print(shown(event.text), end="", flush=True)
        print()
        return
    answers = generate(loaded, prompt, by=way, n=args.n, **settings)
    for answer in answers if isinstance(answers, list) else [answers]:
        if args.json:
            print(json.dumps(answer.plain(), ensure_ascii=False, allow_nan=False))
        else:
            print(shown(answer.why(loaded.tokenizer)) + "\n" if args.trace else "", shown(answer.text), sep="")


def given(prompt: str | None, as_text: bool) -> str:
    """The prompt, or all that a file or a pipe has to say."""
    if prompt is not None:
        return inputs.prompt_of(prompt, as_text)
    if sys.stdin.isatty():
        raise BadInput('generate: it needs a prompt, got none; headwater generate MODEL "Once upon a time"')
    try:
        return sys.stdin.read().replace("\r\n", "\n").rstrip("\n")
    except UnicodeDecodeError as torn:
        raise BadInput(
            f"generate: a prompt must be UTF-8, got a pipe that is not at byte {torn.start}; convert it"
        ) from None


def by(args: argparse.Namespace) -> Any:
    if args.beam and args.look_up:
        raise BadSetting("generate: --beam and --look-up exclude each other, got both; choose one")
    if args.beam is not None:
        from headwater.generation.beam import Beam

        return Beam(width=args.beam, answers=args.n)
    if args.look_up:
        from headwater.generation.speculative import LookUp

        return LookUp()
    return None
