"""The report: which sections it has, what is said above each in English and Chinese, and the page made of them."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from headwater.inspection.booklet import document, image, shown, table
from headwater.inspection.costs import Count
from headwater.inspection.maps import Attention
from headwater.inspection.words import Both, spoken

# name -> heading and one sentence, each in English and Chinese, in the order of the report
TITLES: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "next": (
        ("Next token", "The most probable tokens after the last one; of a translation, where it was least sure."),
        ("下一个词元", "在最后一个词元之后最可能出现的词元；若是译文，则取模型最没把握的地方。"),
    ),
    "losses": (
        ("Surprise, token by token", "The deeper the colour, the less the model expected the token: -ln p."),
        ("逐词元的意外程度", "颜色越深，模型越没有料到这个词元：-ln p。"),
    ),
    "alignment": (
        ("Alignment", "Where the decoder looked while it wrote each token: cross-attention, mean of layers and heads."),
        ("对齐", "写每个词元时解码器看了哪里：交叉注意力，各层各头的平均。"),
    ),
    "heads": (
        ("What each head does", "Where each head looks, as means over the text; the clearest of each kind first."),
        ("每个头在做什么", "每个头看向哪里（全文平均）；每类中最典型的在前。"),
    ),
    "attention": (
        ("Attention", "Rows look, columns are looked at. Attention shows where a model reads, not why it answers."),
        ("注意力", "行是在看的词元，列是被看的词元。注意力说明模型读了哪里，并不说明它为何这样回答。"),
    ),
    "lens": (
        ("Logit lens", "What the model would say if it stopped after each layer; the embedding is at the bottom."),
        ("各层的预测（logit lens）", "假如在某一层后就停下，模型会说什么；最下面是嵌入。"),
    ),
    "attribution": (
        ("What made it say that", "How much each token that was read adds to ln p of the answer."),
        ("它为何这样说", "读到的每个词元给答案的 ln p 增加了多少。"),
    ),
    "gradients": (
        ("Gradients", "What this text would teach: the size of the gradient through the layers, and by parameter."),
        ("梯度", "这段文本会教给模型什么：梯度流过各层的大小，以及每个参数的梯度。"),
    ),
    "ablation": (
        ("Without a head", "What changes when a head's output is set to zero."),
        ("去掉一个头", "把一个头的输出置零后，有什么变化。"),
    ),
    "positions": (
        ("Positions", "How this model knows where a token stands, drawn from the model itself."),
        ("位置编码", "这个模型怎样知道词元的位置，直接由模型画出。"),
    ),
    "costs": (
        ("Costs", "Parameters, memory and operations at this length."),
        ("开销", "在这个长度下的参数、内存和运算量。"),
    ),
}
WORDS = {
    "en": ("Inside", "model", "read", "written", "tokens", "left out", "NaN or infinity"),
    "zh": ("模型内部", "模型", "读到", "写出", "词元", "未包含", "NaN 或无穷"),
}


def page(found: Any, language: str = "en") -> str:
    """The whole report of an Inspection."""
    words = WORDS["zh" if language == "zh" else "en"]
    source = found.reading.source or found.reading.tokens
    facts = [(words[1], found.name), (f"{words[2]} ({len(source)} {words[4]})", _text(source))]
    if found.reading.source:
        facts.append((f"{words[3]} ({len(found.reading.follows)} {words[4]})", _text(found.reading.follows)))
    facts += [(f"{words[5]}: {name}", spoken(why, language)) for name, why in found.missing.items()]
    facts += [(words[6], f"{found.bad.path}: {found.bad.what}")] if found.bad else []
    return document(f"{words[0]}: {found.name}", facts, list(_sections(found, language)))


def body(found: Any) -> str:
    """The sections alone, for a notebook."""
    return "".join(f"<h3>{escape(head)}</h3>{made}" for _, head, _, made in _sections(found, "en"))


def _sections(found: Any, language: str) -> Any:
    for name, titles in TITLES.items():
        if name in found.results:
            head, why = titles[language == "zh"]
            result = found.results[name]
            made = costs_table(result.count, language) if name == "costs" else shown(result, language)
            yield name, head, why, _large(found, result, language) + made


def _large(found: Any, result: Any, language: str) -> str:
    """Of attention, the heads worth a look as large maps before the grids."""
    if not isinstance(result, Attention):
        return ""
    made = []
    for h in found.worth(result):
        drawn = image(result, h.name, kind=h.kind, layer=h.layer, head=h.head)
        made.append(
            f"<figure>{drawn}<figcaption>{escape(h.name)}: {escape(spoken(h.does, language))}</figcaption></figure>"
        )
    return "".join(made)


def _text(tokens: Any) -> str:
    whole = "".join(token.text for token in tokens if token.part == 1).strip()
    return whole if len(whole) <= 400 else whole[:400] + " …"


COSTS = {  # the names in a Count, in Chinese
    "embeddings": "嵌入",
    "encoder": "编码器",
    "decoder": "解码器",
    "output": "输出",
    "other": "其他",
    "weights": "权重",
    "gradients": "梯度",
    "optimiser": "优化器",
    "activations": "激活",
    "kv cache": "KV 缓存",
    "linear": "线性层",
    "attention": "注意力",
    "forward": "前向",
    "training": "训练",
}


def costs_table(counted: Count, language: str = "en") -> str:
    megabytes = {name: size / 1e6 for name, size in counted.bytes.items()}
    millions = {name: number / 1e6 for name, number in counted.flops.items()}
    tables: list[tuple[str, Mapping[str, float]]] = [
        (Both("parameters", "参数量"), counted.groups),
        (Both("memory, MB", "内存，MB"), megabytes),
        (Both("million operations a token", "每个词元的运算量，百万次"), millions),
    ]
    made = []
    for head, numbers in tables:
        rows = [(COSTS.get(name, name) if language == "zh" else name, number) for name, number in numbers.items()]
        made.append(table([head, ""], rows, language=language))
    return "".join(made)
