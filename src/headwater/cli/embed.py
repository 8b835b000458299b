"""headwater embed MODEL "text" …: texts as vectors, and how near they are to one another."""

from __future__ import annotations

import argparse
import json

from headwater.cli import inputs, kernels
from headwater.cli.language import say
from headwater.cli.parser import Parser
from headwater.cli.terminal import for_terminal
from headwater.errors import BadInput


def arguments(parser: Parser) -> None:
    parser.add_argument("model", help=say("a sentence encoder, such as minilm", "句子编码模型，例如 minilm"))
    told = say(
        "texts, files with one text a line, tables (CSV, TSV, JSONL), or - for the standard input",
        "文本、每行一条的文件、表格（CSV、TSV、JSONL），或 - 表示标准输入",
    )
    parser.add_argument("texts", nargs="*", help=told)
    inputs.arguments(parser)
    parser.add_argument("--json", action="store_true", help=say("the vectors, a JSON line each", "每行一个 JSON 向量"))


def run(args: argparse.Namespace) -> None:
    from headwater.families.embedding import embed
    from headwater.families.loading import load

    entries = list(inputs.inputs_of(args.texts, inputs.Options.of(args)).entries())
    texts = [entry.text for entry in entries]
    if not texts:
        raise BadInput('embed: it needs at least one text, got none; headwater embed minilm "a text" "another"')
    model = load(args.model)
    kernels.note_missing()
    vectors = embed(model, texts)
    if args.json:
        for entry, vector in zip(entries, vectors.tolist(), strict=True):
            row = entry.cells or {"text": entry.text}
            print(json.dumps({**row, "vector": [round(x, 7) for x in vector]}, ensure_ascii=False))
        return
    cosines = vectors @ vectors.T
    for row, text in zip(cosines.tolist(), texts, strict=True):
        print(" ".join(f"{cosine:7.4f}" for cosine in row) + f"   {for_terminal(' '.join(text.split())[:60])}")
