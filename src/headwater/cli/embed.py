"""headwater embed MODEL "text" …: texts as vectors, and how near they are to one another."""

from __future__ import annotations

import argparse
import json
import sys

from headwater.cli.language import say
from headwater.cli.parser import Parser
from headwater.errors import BadInput


def arguments(parser: Parser) -> None:
    parser.add_argument("model", help=say("a sentence encoder, such as minilm", "句子编码模型,例如 minilm"))
    told = say("texts; where none is given, a line each from a pipe", "文本;不给则从管道逐行读取")
    parser.add_argument("texts", nargs="*", help=told)
    parser.add_argument("--json", action="store_true", help=say("the vectors, a JSON line each", "每行一个 JSON 向量"))


def run(args: argparse.Namespace) -> None:
    from headwater.families.embedding import embed
    from headwater.families.loading import load

    texts = args.texts or [line.rstrip("\n") for line in sys.stdin]
    if not texts:
        raise BadInput('embed: it needs at least one text, got none; headwater embed minilm "a text" "another"')
    vectors = embed(load(args.model), texts)
    if args.json:
        for text, vector in zip(texts, vectors.tolist(), strict=True):
            print(json.dumps({"text": text, "vector": [round(x, 7) for x in vector]}, ensure_ascii=False))
        return
    cosines = vectors @ vectors.T
    for row, text in zip(cosines.tolist(), texts, strict=True):
        print(" ".join(f"{cosine:7.4f}" for cosine in row) + f"   {text[:60]}")
