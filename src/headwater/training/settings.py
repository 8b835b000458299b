"""One typed tree of settings behind the flags of the command, the YAML file and headwater.train(...).

Every leaf has a name of its own, so `lr` is `--lr` on the command line, `optimiser: {lr: …}` in YAML, `lr=…` in Python.
Zero or "auto" means: chosen when the data has been seen. What was chosen is written to config.yaml.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headwater.errors import BadSetting, nearest

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MOST = 2.0**40


def seconds(text: str) -> float | None:
    """'90s', '5m', '1h30m'; None for what is no time.

    >>> seconds("5m"), seconds("1.5h"), seconds("soon")
    (300.0, 5400.0, None)
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    whole = bool(parts) and "".join(number + unit for number, unit in parts) == text
    return sum(float(number) * _UNITS[unit] for number, unit in parts) if whole else None


class Time(float):
    """Seconds, or words for them."""


class YesNoAuto(str):
    """'yes', 'no' or 'auto'; true and false are yes and no."""


def leaf(default: Any, words: str, zh: str, low: float = 0.0, high: float = MOST, free: bool = False) -> Any:
    """One setting. free: it may change when a run is resumed."""
    about = {"words": (words, zh), "low": low, "high": high, "free": free}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)


def share(default: float, words: str, zh: str, **more: Any) -> Any:
    return leaf(default, words, zh, high=math.nextafter(1.0, 0.0), **more)


section = dataclass(frozen=True, kw_only=True)


@section
class Data:
    paths: list[str] = leaf([], "the files to learn from", "训练文件")
    valid: list[str] = leaf([], "files to measure on; else a part is held out", "验证文件；不给则从训练集留出一部分")
    task: str = leaf(
        "auto",
        "text-to-text, classification, tagging, answers, language-model",
        "任务：text-to-text、classification、tagging、answers、language-model",
    )
    columns: dict[str, str] = leaf(
        {}, "which column plays which role: source=en,target=de", "哪一列作什么：source=en,target=de"
    )
    source: str = leaf("", "the column or suffix to read from", "读入的列名或文件后缀")
    target: str = leaf("", "the column or suffix to write", "要写出的列名或文件后缀")
    header: YesNoAuto = leaf(
        "auto",
        "whether the first row of a TSV or CSV names the columns: yes, no or auto",
        "TSV 或 CSV 的第一行是不是列名：yes、no 或 auto",
    )
    encoding: str = leaf("auto", "of the files", "文件的编码")
    invalid: str = leaf(
        "strict",
        "bytes that do not fit it: strict (stop there), skip the line, or replace them",
        "不合编码的字节：strict（停在那里）、skip（跳过该行）或 replace（替换）",
    )
    held_out: float = share(0.05, "share of the rows kept for validation", "留作验证集的行所占比例")
    longest: int = leaf(
        0,
        "most tokens of a text; longer rows are left out (0: chosen)",
        "每条文本的最多词元数，更长的行略去（0：自动选择）",
    )
    cut: bool = leaf(False, "longer texts are cut to that length, not left out", "过长的文本截到该长度，而不是略去")
    context: int = leaf(256, "tokens a language model reads at once", "语言模型一次读多少词元（上下文长度）")
    objective: str = leaf(
        "auto",
        "of running text: causal, packed, masked, masked-next, denoise or spans",
        "连续文本的训练目标：causal、packed、masked、masked-next、denoise 或 spans",
    )
    augment: dict[str, str] = leaf(
        {},
        "changes of what is read: delete=0.1,swap=0.1,noise=0.02,synonyms=0.2",
        "对读入文本的改动：delete=0.1,swap=0.1,noise=0.02,synonyms=0.2",
    )
    synonyms: str = leaf("", "a table for it: word, tab, synonyms", "供其使用的同义词表：词、制表符、同义词")
    tokenizer: str = leaf(
        "auto",
        "bpe, unigram, characters, or a folder; auto: bpe, or that of --from",
        "bpe、unigram、characters 或目录；auto：bpe，或 --from 模型的分词器",
    )
    vocab: int = leaf(0, "pieces of a tokenizer that is learned (0: chosen)", "要学习的分词器的词表大小（0：自动选择）")


@section
class Model:
    start: str = leaf(
        "",
        "a model folder, run or known name to start from (--from); else from scratch",
        "从哪个模型目录、训练目录或已知名称开始（--from）；不给则从零开始",
    )
    size: str = leaf("auto", "xs, s, m, l or xl", "xs、s、m、l 或 xl")
    layers: int = leaf(0, "of each stack (0: from the size)", "编码器、解码器各自的层数（0：由 size 决定）")
    d_model: int = leaf(0, "width of the residual stream (0: from the size)", "残差流的宽度（0：由 size 决定）")
    heads: int = leaf(0, "of attention (0: from the size)", "注意力头数（0：由 size 决定）")
    d_ff: int = leaf(0, "width of the feed-forward layers (0: from the size)", "前馈层的宽度（0：由 size 决定）")
    dropout: float = share(0.1, "share of values dropped while training", "训练时随机丢弃的比例")
    position: str = leaf(
        "auto",
        "sinusoidal, learned, rotary, alibi, relative or none",
        "位置编码：sinusoidal、learned、rotary、alibi、relative 或 none",
    )


@section
class Optimiser:
    method: str = leaf(
        "auto",
        "adamw; adamw8, in a quarter of its memory; or muon for the matrices and adamw for the rest",
        "优化方法：adamw；adamw8，内存为其四分之一；或 muon（矩阵用 muon，其余用 adamw）",
    )
    lr: float = leaf(
        0.0, "peak learning rate; the factor of noam (0: chosen)", "学习率峰值；noam 时为其系数（0：自动选择）"
    )
    schedule: str = leaf(
        "cosine",
        "noam, inverse-root, cosine, linear or constant",
        "学习率曲线：noam、inverse-root、cosine、linear 或 constant",
    )
    warmup: int = leaf(-1, "steps of rising learning rate (-1: chosen)", "学习率预热的步数（-1：自动选择）", low=-1)
    floor: float = share(0.0, "last learning rate as a share of the peak", "最终学习率与峰值之比")
    beta1: float = share(0.9, "of AdamW", "AdamW 的 beta1")
    momentum: float = share(0.95, "of Muon", "Muon 的动量")
    beta2: float = share(0.98, "of AdamW", "AdamW 的 beta2")
    eps: float = leaf(1e-9, "of AdamW", "AdamW 的 eps", low=1e-300)
    weight_decay: float = leaf(
        0.01, "on matrices, never on biases, norms, tables", "权重衰减，只用于矩阵，不用于偏置、归一化和嵌入表"
    )
    clip: float = leaf(1.0, "most length of a gradient (0: no limit)", "梯度范数的上限，超过则裁剪（0：不限）")
    smoothing: float = share(0.0, "label smoothing", "标签平滑")
    average: float = share(
        0.0, "decay of the running average of the weights (0: none)", "权重滑动平均的衰减率（0：不用）"
    )


@section
class Loop:
    batch_tokens: int = leaf(0, "tokens of a step, padding included (0: chosen)", "每步的词元数，含填充（0：自动选择）")
    micro_tokens: int = leaf(
        0,
        "at most so many at once; gradients add up (0: all)",
        "一次最多处理多少词元，梯度累加（0：一次全部）",
        free=True,
    )
    max_steps: int = leaf(0, "steps in all (0: from epochs or time)", "总步数（0：由 epochs 或时间决定）", free=True)
    epochs: float = leaf(0.0, "times through the data (0: chosen)", "遍历数据的次数（0：自动选择）", free=True)
    max_time: Time = leaf(
        0.0,
        "end within 90s, 30m, 2h of clock time, reading and the last evaluation included (0: no limit)",
        "在 90s、30m、2h 之内结束，读取数据和最后的评估都算在内（0：不限）",
        free=True,
    )
    seed: int = leaf(0, "of first weights, order of data and dropout", "初始权重、数据顺序和 dropout 的随机种子")
    dtype: str = leaf("auto", "fp32, bf16 or fp16", "数值精度：fp32、bf16 或 fp16")
    device: str = leaf("auto", "cpu, cuda, mps …", "设备：cpu、cuda、mps …", free=True)
    compile: bool = leaf(False, "compile the stacks with torch.compile", "用 torch.compile 编译各层", free=True)
    recompute: bool = leaf(
        False,
        "less memory for more time: activations again on the way back, freed memory back to the system at once",
        "用时间换内存：反向传播时重新计算激活值，释放的内存立即还给系统",
        free=True,
    )
    shard: bool = leaf(
        False, "each process holds a part of the model (FSDP2)", "每个进程只存模型的一部分（FSDP2）", free=True
    )
    spike: float = leaf(
        0.0,
        "leave out a gradient so many times the usual (0: none)",
        "梯度达到平常的多少倍就跳过该步（0：不跳过）",
        free=True,
    )
    bad_steps: int = leaf(3, "stop after so many NaN steps in a row", "连续多少步出现 NaN 就停止", low=1, free=True)


@section
class Evaluation:
    eval_every: int = leaf(
        0, "steps between evaluations (0: chosen by what they cost)", "每隔多少步评估（0：按评估的开销选定）"
    )
    eval_rows: int = leaf(
        0,
        "most validation rows of an evaluation (0: chosen by what they cost, at most 2000)",
        "每次评估最多用多少行验证数据（0：按开销选定，至多 2000）",
    )
    final_rows: int = leaf(
        0,
        "most validation rows for the best model at the end (0: chosen, at most 2000)",
        "结束时评估最好的模型最多用多少行（0：自动，至多 2000）",
        free=True,
    )
    patience: int = leaf(
        0,
        "stop after so many evaluations without a better one (0: never)",
        "连续多少次评估没有变好就停止（0：从不）",
        free=True,
    )
    metric: str = leaf(
        "auto",
        "what decides which model is best: loss, bleu, chrf, exact …",
        "用哪个指标选出最好的模型：loss、bleu、chrf、exact …",
    )
    samples: int = leaf(4, "outputs to show at an evaluation", "每次评估展示多少条输出", free=True)


@section
class Keeping:
    out: str = leaf("", "the folder of the run; else runs/TASK/NAME", "训练目录；不给则为 runs/TASK/NAME", free=True)
    save_every: Time = leaf(60.0, "time between checkpoints: 60s, 10m", "保存检查点的时间间隔：60s、10m", free=True)
    save_steps: int = leaf(
        0, "steps between checkpoints, in place of time", "每隔多少步保存检查点，代替时间间隔", free=True
    )
    keep: int = leaf(2, "checkpoints to keep", "保留几个检查点", low=2, free=True)
    log_every: int = leaf(10, "steps between lines of metrics.jsonl", "metrics.jsonl 每隔多少步记一行", low=1)
    log_order: bool = leaf(
        False, "write which examples each step saw to order.jsonl", "把每步用到的样本写入 order.jsonl"
    )


@section
class Settings:
    data: Data = Data()
    model: Model = Model()
    optimiser: Optimiser = Optimiser()
    loop: Loop = Loop()
    evaluation: Evaluation = Evaluation()
    keeping: Keeping = Keeping()

    def __getattr__(self, name: str) -> Any:
        """A leaf by its own name: settings.lr is settings.optimiser.lr."""
        if name in LEAVES:
            return getattr(getattr(self, LEAVES[name].section), name)
        raise AttributeError(name)

    def but(self, **changes: Any) -> Settings:
        """The same settings with some leaves changed."""
        return read({**self.flat(), **changes})

    def flat(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in LEAVES}

    def nested(self) -> dict[str, dict[str, Any]]:
        return {name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS}


class Leaf(NamedTuple):
    section: str
    kind: Any
    default: Any
    words: tuple[str, str]  # English, Chinese
    free: bool  # may change when a run is resumed
    low: float
    high: float


def _leaves() -> Iterator[tuple[str, Leaf]]:
    for name, part in SECTIONS.items():
        kinds, usual = typing.get_type_hints(part), part()
        for f in dataclasses.fields(part):
            about = f.metadata
            bounds = about["low"], about["high"]
            yield f.name, Leaf(name, kinds[f.name], getattr(usual, f.name), about["words"], about["free"], *bounds)


SECTIONS: dict[str, Any] = {n: k for n, k in typing.get_type_hints(Settings).items() if dataclasses.is_dataclass(k)}
LEAVES: dict[str, Leaf] = dict(_leaves())
SAME = {
    "from": "start", "learning_rate": "lr", "output": "out", "val": "valid", "ema": "average",
    "label_smoothing": "smoothing"}  # fmt: skip


def read(given: Mapping[str, Any]) -> Settings:
    """Settings from leaves (lr=…), from sections (optimiser={"lr": …}), or both; what is not known is refused."""
    tree: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, value in _flattened(given):
        name = SAME.get(name, name)
        if name not in LEAVES:
            raise BadSetting(f"there is no setting {name!r}; {nearest(name, [*LEAVES, *SAME])}")
        tree[LEAVES[name].section][name] = fitting(name, value)
    return Settings(**{name: SECTIONS[name](**leaves) for name, leaves in tree.items()})


def _flattened(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if name in SECTIONS and isinstance(value, Mapping):
            yield from ((str(leaf_name), v) for leaf_name, v in value.items())
        elif name in SECTIONS and name not in LEAVES:
            raise BadSetting(f"{name} must hold settings (name: value), got {value!r}; see config.yaml of any run")
        else:
            yield str(name), value


def fitting(name: str, value: Any) -> Any:
    """The value as the leaf wants it; words from a command line become numbers. What does not fit is refused."""
    leaf_ = LEAVES[name]
    made = MAKERS[leaf_.kind](value)
    inside = made is not None and (not isinstance(made, (int, float)) or leaf_.low <= made <= leaf_.high)
    if not inside or (isinstance(made, float) and not math.isfinite(made)):
        bounds = f" from {leaf_.low:g} to {leaf_.high:g}" if leaf_.kind in (int, float) else ""
        wanted = f"{WANTED[leaf_.kind]}{bounds if leaf_.high < MOST else bounds.partition(' to ')[0]}"
        raise BadSetting(f"{name} must be {wanted}, got {str(value)[:60]!r}; it means: {leaf_.words[0]}")
    return made


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"-?\d+(_\d+)*", value):
        return int(value)
    return value if type(value) is int else None


def _number(value: Any) -> float | None:
    try:
        return float(value) if type(value) in (str, int, float) else None
    except ValueError:
        return None


def _time(value: Any) -> float | None:
    return seconds(value.strip().lower()) or _number(value) if isinstance(value, str) else _number(value)


def _texts(value: Any) -> list[str] | None:
    if isinstance(value, str):
        return [value]
    return [str(v) for v in value] if isinstance(value, (list, tuple)) else None


def _pairs(value: Any) -> dict[str, str] | None:
    """{"source": "en"}, or words such as source=en."""
    if isinstance(value, str):
        value = dict(pair.split("=", 1) for pair in value.split(",") if "=" in pair) or None
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else None


def _yes(value: Any) -> bool | None:
    return {"true": True, "yes": True, "false": False, "no": False}.get(str(value).lower())


def _yes_no_auto(value: Any) -> str | None:
    return {"true": "yes", "false": "no"}.get(word := str(value).lower(), word if word in YES_NO_AUTO else None)


YES_NO_AUTO = ("yes", "no", "auto")
MAKERS: dict[Any, Any] = {
    int: _whole, float: _number, Time: _time, bool: _yes, list[str]: _texts, dict[str, str]: _pairs,
    YesNoAuto: _yes_no_auto,
    str: lambda value: os.fspath(value) if isinstance(value, (str, os.PathLike)) else None}  # fmt: skip
WANTED: dict[Any, str] = {
    int: "a whole number", float: "a number", Time: "a time such as 90s or 5m", bool: "true or false, yes or no",
    YesNoAuto: "yes, no or auto", list[str]: "a list of words", dict[str, str]: "pairs such as source=en",
    str: "a word"}  # fmt: skip
