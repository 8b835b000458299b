"""headwater convert OLD NEW: an old checkpoint (a pickle) as a folder with safetensors that loads."""

from __future__ import annotations

import argparse

from headwater.cli.language import say
from headwater.cli.parser import Parser


def arguments(parser: Parser) -> None:
    add = parser.add_argument
    old = say("a folder with config.json and pytorch_model.bin, a fairseq checkpoint, or a known name",
              "含 config.json 与 pytorch_model.bin 的目录、fairseq 检查点,或已知名称")  # fmt: skip
    vocabulary = say("where the tokenizer's files lie, if not in OLD", "分词器文件所在目录(不在 OLD 里时)")
    drop = say("leave out tensors of this name; may be given again", "去掉名字匹配的张量;可以多次使用")
    add("old", metavar="OLD", help=old)
    add("new", metavar="NEW", help=say("the folder to write", "要写入的目录"))
    add("--vocabulary", metavar="FOLDER", help=vocabulary)
    add("--drop", action="append", default=[], metavar="PATTERN", help=drop)
    add("--force", action="store_true", help=say("write into a folder that is there", "允许写入已有目录"))


def run(args: argparse.Namespace) -> None:
    from headwater.families.convert import convert

    done = convert(args.old, args.new, vocabulary=args.vocabulary, drop=args.drop, force=args.force)
    weights = sum(p.numel() for p in done.loaded.model.parameters())
    kind, head = done.loaded.config["model_type"], done.loaded.head
    print(say(f"{done.folder}: {kind} with the head {head!r}, {done.tensors} tensors, {weights:,} weights",
              f"{done.folder}:{kind},输出头 {head!r},{done.tensors} 个张量,{weights:,} 个权重"))  # fmt: skip
    if done.dropped:
        print(say(f"left out: {', '.join(done.dropped)}", f"去掉的张量:{', '.join(done.dropped)}"))
    if done.remark:
        print(say(f"note: {done.remark}", f"注意:{done.remark}"))
    print(say("loaded again and compared: equal", "已重新载入并逐一比对:一致"))
