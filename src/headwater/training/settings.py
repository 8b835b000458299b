"""One typed tree of settings behind the flags of the command, the YAML file and headwater.train(...).

Every leaf has a name of its own, so `lr` is `--lr` on the command line, `optimiser: {lr: …}` in YAML, `lr=…` in Python.
Zero or "auto" means: chosen when the data has been seen. What was chosen is written to config.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from headwater.errors import BadSetting, nearest

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: object) -> object:
    """'90s', '5m', '1.5h' or a number of seconds.

    >>> seconds("5m"), seconds("1.5h"), seconds(20)
    (300.0, 5400.0, 20)
    """
    if not isinstance(text, str):
        return text
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text.strip().lower())
    if parts and "".join(n + u for n, u in parts) == text.strip().lower():
        return sum(float(n) * _UNITS[u] for n, u in parts)
    return text


def listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Time = Annotated[float, BeforeValidator(seconds)]
Paths = Annotated[list[str], BeforeValidator(listed)]
Share = Annotated[float, Field(ge=0, lt=1)]
Whole = Annotated[int, Field(ge=0, le=2**40)]


def leaf(default: Any, words: str, zh: str, **more: Any) -> Any:
    """free=True: may change when a run is resumed."""
    extra = {"zh": zh, "free": more.pop("free", False)}
    return Field(default, description=words, json_schema_extra=extra, **more)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Data(Section):
    paths: Paths = leaf([], "the files to learn from", "训练文件")
    valid: Paths = leaf([], "files to measure on; else a part is held out", "验证文件;默认从训练集留出")
    task: str = leaf("auto", "text-to-text, classification, tagging, answers, language-model", "任务")
    columns: dict[str, str] = leaf({}, "which column plays which role: source=en target=de", "列的角色")
    source: str = leaf("", "the column or suffix to read from", "源语言列")
    target: str = leaf("", "the column or suffix to write", "目标语言列")
    encoding: str = leaf("auto", "of the files", "文件编码")
    held_out: Share = leaf(0.05, "share of the rows kept for validation", "留作验证的比例")
    longest: Whole = leaf(0, "most tokens of a text; longer rows are left out (0: chosen)", "每条文本的最多词元数")
    context: Whole = leaf(256, "tokens a language model reads at once", "语言模型的上下文长度")
    objective: str = leaf("auto", "causal, masked, denoise or spans, for running text", "语言模型的训练目标")
    tokenizer: str = leaf("bpe", "bpe, unigram, characters, wordpiece, or a folder", "分词器种类或目录")
    vocab: Whole = leaf(0, "pieces of a tokenizer that is learned (0: chosen)", "词表大小")


class Model(Section):
    start: str = leaf("", "a model folder or run to start from, else from scratch", "从已有模型开始")
    size: str = leaf("auto", "mini, small, medium or base", "模型大小")
    layers: Whole = leaf(0, "of each stack (0: from the size)", "层数")
    d_model: Whole = leaf(0, "width of the residual stream (0: from the size)", "模型宽度")
    heads: Whole = leaf(0, "of attention (0: from the size)", "注意力头数")
    d_ff: Whole = leaf(0, "width of the feed-forward layers (0: from the size)", "前馈层宽度")
    dropout: Share = leaf(0.1, "share of values dropped while training", "dropout 比例")
    position: str = leaf("auto", "sinusoidal, learned, rotary, alibi, relative or none", "位置编码")


class Optimiser(Section):
    lr: Annotated[float, Field(ge=0)] = leaf(0.0, "peak learning rate; the factor of noam (0: chosen)", "学习率峰值")
    schedule: str = leaf("cosine", "noam, inverse-root, cosine, linear or constant", "学习率曲线")
    warmup: int = leaf(-1, "steps of rising learning rate (-1: chosen)", "预热步数")
    floor: Share = leaf(0.0, "last learning rate as a share of the peak", "最终学习率占峰值的比例")
    beta1: Share = leaf(0.9, "of AdamW", "AdamW 的 beta1")
    beta2: Share = leaf(0.98, "of AdamW", "AdamW 的 beta2")
    eps: Annotated[float, Field(gt=0)] = leaf(1e-9, "of AdamW", "AdamW 的 eps")
    weight_decay: Annotated[float, Field(ge=0)] = leaf(0.01, "on matrices, never on biases, norms, tables", "权重衰减")
    clip: Annotated[float, Field(ge=0)] = leaf(1.0, "most length of a gradient (0: no limit)", "梯度裁剪")
    smoothing: Share = leaf(0.0, "label smoothing", "标签平滑")
    average: Share = leaf(0.0, "decay of the running average of the weights (0: none)", "权重滑动平均的衰减率")


class Loop(Section):
    batch_tokens: Whole = leaf(0, "tokens of a step, padding included (0: chosen)", "每步词元数")
    micro_tokens: Whole = leaf(0, "at most so many at once; gradients add up (0: all)", "每个小批的词元数", free=True)
    max_steps: Whole = leaf(0, "steps in all (0: from epochs or time)", "总步数", free=True)
    epochs: Annotated[float, Field(ge=0)] = leaf(0.0, "times through the data (0: chosen)", "遍历数据的次数", free=True)
    max_time: Time = leaf(0.0, "stop after 90s, 30m, 2h (0: no limit)", "最长训练时间", free=True)
    seed: Whole = leaf(0, "of first weights, order of data and dropout", "随机种子")
    dtype: str = leaf("auto", "fp32, bf16 or fp16", "数值精度")
    device: str = leaf("auto", "cpu, cuda, mps …", "设备", free=True)
    compile: bool = leaf(False, "compile the stacks with torch.compile", "使用 torch.compile", free=True)
    recompute: bool = leaf(False, "less memory for more time: activations again on the way back", "梯度检查点", free=True)
    bad_steps: Annotated[int, Field(ge=1)] = leaf(3, "stop after so many NaN steps in a row", "连续多少步 NaN 后停止", free=True)


class Evaluation(Section):
    eval_every: Whole = leaf(0, "steps between evaluations (0: chosen)", "每隔多少步评估")
    eval_rows: Whole = leaf(2000, "most rows of an evaluation", "评估的最多行数")
    patience: Whole = leaf(0, "stop after so many evaluations without a better one (0: never)", "早停耐心", free=True)
    metric: str = leaf("auto", "what decides which model is best: loss, bleu, chrf, exact …", "选最优模型的指标")
    samples: Whole = leaf(4, "outputs to show at an evaluation", "展示的样例数", free=True)


class Keeping(Section):
    out: str = leaf("", "the folder of the run; else runs/TASK/NAME", "运行目录", free=True)
    save_every: Time = leaf(60.0, "time between checkpoints: 60s, 10m", "保存检查点的时间间隔", free=True)
    save_steps: Whole = leaf(0, "steps between checkpoints, in place of time", "保存检查点的步数间隔", free=True)
    keep: Annotated[int, Field(ge=2)] = leaf(2, "checkpoints to keep", "保留的检查点数", free=True)
    log_every: Annotated[int, Field(ge=1)] = leaf(10, "steps between lines of metrics.jsonl", "记录指标的步数间隔")
    log_order: bool = leaf(False, "write which examples each step saw to order.jsonl", "记录每步的样本序号")


class Settings(Section):
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
        return self.model_dump()


class Leaf(NamedTuple):
    section: str
    kind: Any
    default: Any
    words: tuple[str, str]  # English, Chinese
    free: bool  # may change when a run is resumed


def _leaves() -> Iterator[tuple[str, Leaf]]:
    for section, part in Settings.model_fields.items():
        for name, field in part.annotation.model_fields.items():  # type: ignore[union-attr]
            extra: Any = field.json_schema_extra
            yield name, Leaf(section, field.annotation, field.default, (field.description or "", extra["zh"]), extra["free"])


LEAVES: dict[str, Leaf] = dict(_leaves())
SAME = {"learning_rate": "lr", "output": "out", "val": "valid", "ema": "average", "label_smoothing": "smoothing"}


def read(given: Mapping[str, Any]) -> Settings:
    """Settings from leaves (lr=…), from sections (optimiser={"lr": …}), or both; what is not known is refused."""
    tree: dict[str, dict[str, Any]] = {section: {} for section in Settings.model_fields}
    for name, value in given.items():
        name = SAME.get(name, name)
        if name in tree:
            if not isinstance(value, Mapping):
                raise BadSetting(f"{name} must hold settings (name: value), got {value!r}; see config.yaml of any run")
            tree[name].update(value)
        elif name in LEAVES:
            tree[LEAVES[name].section][name] = value
        else:
            raise BadSetting(f"there is no setting {name!r}; {nearest(name, [*LEAVES, *SAME])}")
    try:
        return Settings(**tree)  # type: ignore[arg-type]
    except ValidationError as error:
        raise BadSetting(_in_words(error)) from None


def _in_words(error: ValidationError) -> str:
    first: Any = error.errors()[0]
    name = str(first["loc"][min(1, len(first["loc"]) - 1)])
    if first["type"] == "extra_forbidden":
        return f"there is no setting {name!r}; {nearest(name, LEAVES)}"
    return f"{name}: {first['msg'].lower()}, got {str(first['input'])[:60]!r}; {LEAVES[name].words[0]}"


class Change(NamedTuple):
    name: str
    before: Any
    now: Any


def changes(before: Settings, now: Settings) -> list[Change]:
    """What differs. A leaf that would make it another run is refused; the others are for showing."""
    found = [Change(n, getattr(before, n), getattr(now, n)) for n in LEAVES if getattr(before, n) != getattr(now, n)]
    for change in found:
        if not LEAVES[change.name].free:
            raise BadSetting(f"{change.name} is fixed in a resumed run: it was {change.before!r}, got {change.now!r}; "
                             "leave it out, or begin a new run")  # fmt: skip
    return found
