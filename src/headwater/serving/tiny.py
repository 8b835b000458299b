"""Models made on the spot, one of each shape, with first weights: something to look at before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from headwater.core.shapes import decoder, encoder, transformer
from headwater.data.learn import learn
from headwater.text.tokenizer import Tokenizer

SHAPES: dict[str, Any] = {"tiny encoder-decoder": transformer, "tiny encoder": encoder, "tiny decoder": decoder}
SIZES: dict[str, Any] = {"d_model": 32, "heads": 4, "layers": 3, "d_ff": 64, "dropout": 0.0}
WIDER = 1.6  # first weights are so even that nothing would be seen
TEXT = """the cat sat on the mat because it was tired . the dog did not sit there , it was too warm outside .
a small river begins at its headwater and flows down to the sea . attention is all you need .
we read the words one by one and look back at what came before . hello world , how are you today ?
小 河 从 源 头 流 向 大 海 。 注 意 力 就 是 你 所 需 要 的 一 切 。 猫 坐 在 垫 子 上 , 因 为 它 累 了 。"""


@dataclass
class Made:
    """As headwater.load gives it, as far as the page asks."""

    model: Any
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    start: int
    longest: int = 2048
    labels: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    where: None = None

    def said(self, key: str) -> None:
        return None


@cache
def words() -> Tokenizer:
    return learn(TEXT.split("\n"), vocab=384, wrapped=False)


def made(name: str) -> Made:
    """Always the same model for the same name."""
    tokenizer = words()
    shape = SHAPES[name]
    model: Any = shape(len(tokenizer), **SIZES).build(seed=7).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.rpartition(".")[0].endswith((".q", ".k")):
                weight.mul_(WIDER)
    return Made(model, tokenizer, (tokenizer.eos or 0,), tokenizer.bos or 0)
