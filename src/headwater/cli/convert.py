"""headwater convert OLD NEW: a run for transformers or as GGUF; an old checkpoint (a pickle) as safetensors."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from headwater.cli.language import say
from headwater.cli.parser import Parser

if TYPE_CHECKING:
    from headwater.families.convert import Converted


def arguments(parser: Parser) -> None:
    add = parser.add_argument
    old = say("a run, a model folder, a .gguf file, an old checkpoint (pytorch_model.bin, fairseq), or a known name",
              "训练目录、模型目录、.gguf 文件、旧检查点（pytorch_model.bin、fairseq），或已知名称")  # fmt: skip
    layout = say("transformers, headwater, or a model_type such as llama; auto: transformers where a family fits",
                 "transformers、headwater，或 llama 之类的 model_type；auto：有合适家族时用 transformers")  # fmt: skip
    vocabulary = say("where the tokenizer's files lie, if not in OLD", "分词器文件所在目录（不在 OLD 里时）")
    drop = say("leave out tensors of this name; may be given again", "去掉名字匹配的张量；可以多次使用")
    add("old", metavar="OLD", help=old)
    add("new", metavar="NEW", help=say("the folder or .gguf file to write", "要写入的目录或 .gguf 文件"))
    add("--layout", default="auto", metavar="LAYOUT", help=layout)
    add("--vocabulary", metavar="FOLDER", help=vocabulary)
    add("--drop", action="append", default=[], metavar="PATTERN", help=drop)
    add("--force", action="store_true", help=say("write into a folder that is there", "允许写入已有目录"))


def run(args: argparse.Namespace) -> None:
    from headwater.families.convert import convert
    from headwater.families.folder import ModelWeights

    done = convert(args.old, args.new, vocabulary=args.vocabulary, drop=args.drop, force=args.force,
                   layout=args.layout)  # fmt: skip
    held = ModelWeights(done.loaded.model)
    weights = sum(held.outline(name).numel() for name in held)
    kind, head = done.loaded.config["model_type"], done.loaded.head
    en, zh = (f" with the head {head!r}", f"，输出头 {head!r}") if head else ("", "")
    print(say(f"{done.folder}: {kind}{en}, {done.tensors} tensors, {weights:,} weights",
              f"{done.folder}：{kind}{zh}，{done.tensors} 个张量，{weights:,} 个权重"))  # fmt: skip
    _tell_form(done)
    if done.dropped:
        print(say(f"left out: {', '.join(done.dropped)}", f"去掉的张量：{', '.join(done.dropped)}"))
    if done.remark:
        print(say("note: ", "注意：") + say(done.remark))
    print(say("loaded again and compared: equal", "已重新载入并逐一比对：一致"))


REWRITES = {
    "bias": ("a bias of zeros on the output", "输出层加上全零偏置"),
    "sines": ("sines before cosines, features reordered to match", "正弦在前、余弦在后，特征按此重排"),
    "scale": ("the embedding scale moved into the token table", "嵌入的缩放并入词表"),
}


def _tell_form(done: Converted) -> None:
    """What was changed so that a family fits, or why none does."""
    if done.rewrites:
        en, zh = zip(*(REWRITES[name] for name in done.rewrites), strict=True)
        print(say(f"rewritten, with the same answers: {'; '.join(en)}", f"等价改写，结果不变：{'；'.join(zh)}"))
    if done.misfit is not None:
        name, other = done.misfit.name, done.misfit.difference
        print(say(f"note: headwater's own layout, transformers does not open it: its nearest family, {name}, has "
                  f"{other.theirs} as {other.where}, this model has {other.ours}",
                  f"注意：采用 headwater 自己的格式，transformers 打不开：最接近的模型家族 {name} 的 {other.where} "
                  f"是 {other.theirs}，这个模型是 {other.ours}"))  # fmt: skip
