"""TrainConfig: every training setting with its type, bounds and meaning, behind flags, YAML and train(...).

Every setting has a unique name: `lr` is `--lr` on the command line, `optim: {lr: …}` in YAML, `lr=…` in Python.
Zero or "auto" means: chosen from the data. The resolved settings are written to config.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict

from pydantic import ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.training.feedback_config import FeedbackConfig, FeedbackKwargs
from headwater.training.setting_types import (
    Bool,
    ConfigSection,
    Float,
    Int,
    Seconds,
    SettingType,
    Text,
    TextList,
    TextPairs,
    YesNoAuto,
    setting,
)

# ------------------------------------------------------------------------------------------------------------- settings


class DataConfig(ConfigSection):
    paths: TextList = setting([], _("the training files"))
    valid: TextList = setting([], _("the validation files; else a part of the training files is held out"))
    task: Text = setting(
        "auto",
        _(
            "seq2seq, classification, token-classification, question-answering, language-model, chat, preference, "
            "reward, ppo, grpo, text-to-image, picture-codec, speech-recognition, audio-classification, "
            "audio-language-model or sound-codec"
        ),
    )
    columns: TextPairs = setting({}, _("which column plays which role: source=en,target=de"))
    source: Text = setting("", _("the column or suffix to read from"))
    target: Text = setting("", _("the column or suffix to write"))
    header: YesNoAuto = setting("auto", _("whether the first row of a TSV or CSV names the columns: yes, no or auto"))
    encoding: Text = setting("auto", _("text encoding of the files"))
    encoding_errors: Text = setting(
        "strict", _("bytes that do not fit it: strict (stop there), skip the line, or replace them")
    )
    valid_fraction: Float = setting(0.05, _("fraction of the rows held out for validation"), lt=1)
    max_length: Int = setting(0, _("maximum tokens of a text; longer rows are left out (0: chosen)"))
    truncate: Bool = setting(False, _("longer texts are cut to that length, not left out"))
    context_length: Int = setting(256, _("context length of a language model, in tokens"))
    objective: Text = setting(
        "auto", _("of a language model: causal, packed, segments, mlm, mlm-nsp, denoising or span-corruption")
    )
    chat_template: Text = setting(
        "auto", _("of conversations: auto (the model's own), plain, chatml, llama3, zephyr, none, or a Jinja file")
    )
    augment: TextPairs = setting({}, _("data augmentation of the inputs: delete=0.1,swap=0.1,noise=0.02,synonyms=0.2"))
    synonyms: Text = setting("", _("a table for it: word, tab, synonyms"))
    language: Text = setting("", _("speech recognition: the language of the recordings, such as fr (default: en)"))
    window_seconds: Float = setting(
        0.0,
        _("of sounds: the seconds that the model hears at once (0: Whisper's 30, or the longest recording)"),
        lt=30.01,
    )
    image_size: Int = setting(0, _("pixels of a side that pictures are resized to (0: chosen)"))
    codec: Text = setting(
        "",
        _(
            "text-to-image, audio-language-model: the run of a trained codec of pictures or sounds; without it one is "
            "trained first"
        ),
    )
    semantic_model: Text = setting(
        "", _("audio-language-model: a Whisper whose encoder states become semantic tokens; else spectrograms do")
    )
    tokenizer: Text = setting("auto", _("bpe, unigram, char, or a folder; auto: bpe, or that of --init-from"))
    vocab: Int = setting(0, _("vocabulary size of a trained tokenizer (0: chosen)"))


class ModelConfig(ConfigSection):
    init_from: Text = setting("", _("a model folder, run or known name to start from; else from scratch"))
    size: Text = setting("auto", _("xs, s, m, l or xl"))
    layers: Int = setting(0, _("layers of each stack (0: from the size)"))
    d_model: Int = setting(0, _("width of the residual stream (0: from the size)"))
    heads: Int = setting(0, _("attention heads (0: from the size)"))
    d_ff: Int = setting(0, _("width of the feed-forward layers (0: from the size)"))
    dropout: Float = setting(0.1, _("dropout: the fraction of values set to zero in training"), lt=1)
    patch_size: Int = setting(0, _("pixels of a side of a patch of a picture (0: chosen)"))
    patch_embedding: Text = setting(
        "linear", _("how a patch of a picture becomes a vector: linear (ViT), or conv-stem (small convolutions)")
    )
    stochastic_depth: Float = setting(0.0, _("rate at which the last layer is left out in training, of pictures"), lt=1)
    position: Text = setting("auto", _("sinusoidal, learned, rotary, alibi, relative or none"))
    attention: Text = setting(
        "full", _("full, window, linear, performer, linformer …, with sizes: window:size=256 (see long-sequences)")
    )
    encoder_attention: Text = setting("", _("another attention for the encoder"))
    decoder_attention: Text = setting("", _("another attention for the decoder"))


class TuningConfig(ConfigSection):
    tune: Text = setting(
        "full",
        _(
            "what learns of the model of --init-from: full, head, decoder, lora, dora, ia3, houlsby, pfeiffer, "
            "parallel, prefix, prompt or p-tuning"
        ),
    )
    tune_rank: Int = setting(8, _("lora, dora: the rank r"), ge=1)
    tune_alpha: Float = setting(0.0, _("lora, dora: the scale is alpha / r (0: alpha is 2 r)"))
    tune_dropout: Float = setting(0.0, _("lora, dora: dropout of the input of the adapter"), lt=1)
    tune_target: TextList = setting(
        [], _('lora, dora: paths of the layers, such as "*.self_attn.*", or all-linear (default: q and v of attention)')
    )
    tune_tokens: Int = setting(16, _("prefix, prompt, p-tuning: the number of virtual tokens"), ge=1)
    tune_reduction: Int = setting(
        0, _("houlsby, pfeiffer, parallel: the width of the adapter is d_model / this (0: 16, 16 and 2)")
    )


class OptimConfig(ConfigSection):
    optimizer: Text = setting(
        "auto", _("adamw; adamw8, in a quarter of its memory; or muon for the matrices and adamw for the rest")
    )
    lr: Float = setting(0.0, _("peak learning rate; the factor of noam (0: chosen)"))
    schedule: Text = setting("cosine", _("noam, inverse-sqrt, cosine, linear or constant"))
    warmup: Int = setting(-1, _("warmup steps of the learning rate (-1: chosen)"), ge=-1)
    min_lr_ratio: Float = setting(0.0, _("last learning rate as a fraction of the peak"), lt=1)
    beta1: Float = setting(0.9, _("AdamW: decay of the first moment"), lt=1)
    momentum: Float = setting(0.95, _("Muon: momentum"), lt=1)
    beta2: Float = setting(0.98, _("AdamW: decay of the second moment"), lt=1)
    eps: Float = setting(1e-09, _("AdamW: epsilon, added to the denominator"), ge=1e-300)
    weight_decay: Float = setting(0.01, _("weight decay of matrices, never of biases, norms and embeddings"))
    max_grad_norm: Float = setting(1.0, _("maximum gradient norm, for clipping (0: no limit)"))
    label_smoothing: Float = setting(0.0, _("label smoothing"), lt=1)
    ema: Float = setting(0.0, _("decay of the exponential moving average (EMA) of the weights (0: none)"), lt=1)


class LoopConfig(ConfigSection):
    batch_tokens: Int = setting(0, _("tokens of a global batch, padding included (0: chosen)"))
    micro_batch_tokens: Int = setting(
        0, _("maximum tokens of a micro-batch; gradients are accumulated (0: one micro-batch)"), mutable=True
    )
    max_steps: Int = setting(0, _("steps in all (0: from epochs or time)"), mutable=True)
    epochs: Float = setting(0.0, _("epochs: passes over the training data (0: chosen)"), mutable=True)
    max_time: Seconds = setting(
        0.0,
        _("end within 90s, 30m, 2h of clock time, reading and the last evaluation included (0: no limit)"),
        mutable=True,
    )
    seed: Int = setting(0, _("random seed of the initial weights, the data order and dropout"))
    dtype: Text = setting("auto", _("fp32, bf16 or fp16"))
    device: Text = setting("auto", _("cpu, cuda, mps …"), mutable=True)
    compile: Bool = setting(False, _("compile the stacks with torch.compile"), mutable=True)
    gradient_checkpointing: Bool = setting(
        False,
        _(
            "less memory for more time: activations are recomputed in the backward pass, freed "
            "memory is returned at once"
        ),
        mutable=True,
    )
    fsdp: Bool = setting(False, _("each process holds a part of the model (FSDP2)"), mutable=True)
    skip_grad_spikes: Float = setting(
        0.0, _("skip a step whose gradient norm is this many times the usual one (0: never)"), mutable=True
    )
    max_nan_steps: Int = setting(3, _("stop after this many consecutive NaN steps"), ge=1, mutable=True)


class EvalConfig(ConfigSection):
    eval_every: Int = setting(0, _("steps between evaluations (0: chosen by what they cost)"))
    eval_examples: Int = setting(
        0, _("maximum validation rows of an evaluation (0: chosen by what they cost, at most 2000)")
    )
    final_eval_examples: Int = setting(
        0, _("maximum validation rows for the best model at the end (0: chosen, at most 2000)"), mutable=True
    )
    patience: Int = setting(
        0, _("early stopping: stop after this many evaluations without improvement (0: never)"), mutable=True
    )
    metric: Text = setting("auto", _("what decides which model is best: loss, bleu, chrf, exact …"))
    samples: Int = setting(4, _("outputs to show at an evaluation"), mutable=True)


class OutputConfig(ConfigSection):
    out: Text = setting("", _("the folder of the run; else runs/TASK/NAME"), mutable=True)
    checkpoint_every: Seconds = setting(60.0, _("time between checkpoints: 60s, 10m"), mutable=True)
    checkpoint_steps: Int = setting(0, _("steps between checkpoints, in place of time"), mutable=True)
    keep_checkpoints: Int = setting(2, _("checkpoints to keep"), ge=2, mutable=True)
    log_every: Int = setting(10, _("steps between lines of metrics.jsonl"), ge=1)
    log_order: Bool = setting(False, _("write which examples each step saw to order.jsonl"))


class TrainConfig(
    DataConfig, ModelConfig, TuningConfig, FeedbackConfig, OptimConfig, LoopConfig, EvalConfig, OutputConfig
):
    """All settings of a run, by name: config.lr. A setting that does not fit is refused with BadSetting."""

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            first = error.errors()[0]
            raise BadSetting(_describe_error(str(first["loc"][0]), first["input"])) from None

    def replace(self, **changes: Any) -> TrainConfig:
        """A copy with some settings changed."""
        return TrainConfig(**{**self.model_dump(), **changes})

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The settings by section, as in config.yaml."""
        return {
            name: {field: getattr(self, field) for field in section.model_fields} for name, section in SECTIONS.items()
        }


SECTIONS: dict[str, type[ConfigSection]] = {
    "data": DataConfig,
    "model": ModelConfig,
    "tuning": TuningConfig,
    "feedback": FeedbackConfig,
    "optim": OptimConfig,
    "train": LoopConfig,
    "evaluation": EvalConfig,
    "output": OutputConfig,
}
ALIASES = {"learning_rate": "lr", "output": "out", "val": "valid"}


class ConfigField(NamedTuple):
    section: str
    type: SettingType
    default: Any
    description: str
    mutable: bool  # may change when a run is resumed
    bounds: dict[str, float]  # ge, and le or lt


def _collect_fields(section: str) -> dict[str, ConfigField]:
    fields = {}
    for name, info in SECTIONS[section].model_fields.items():
        (setting_type,) = (each for each in info.metadata if isinstance(each, SettingType))
        bounds = {key: getattr(each, key) for each in info.metadata for key in ("ge", "le", "lt") if hasattr(each, key)}
        extra = info.json_schema_extra
        assert isinstance(extra, dict) and info.description is not None
        fields[name] = ConfigField(
            section, setting_type, info.default, info.description, bool(extra["mutable"]), bounds
        )
    return fields


FIELDS = {name: field for section in SECTIONS for name, field in _collect_fields(section).items()}


def _describe_error(name: str, value: Any) -> str:
    """Why a setting is refused, in one line."""
    if name not in FIELDS:
        return _("there is no setting {name!r}; {nearest}", name=name, nearest=nearest(name, [*FIELDS, *ALIASES]))
    field = FIELDS[name]
    wanted = field.type.description
    if field.type.metavar in ("N", "X"):
        template = _("{number} from {low:g} to {high:g}") if "lt" in field.bounds else _("{number} from {low:g}")
        wanted = _(template, number=wanted, low=field.bounds["ge"], high=field.bounds.get("lt"))
    return _(
        "{name} must be {wanted}, got {value!r}; it means: {words}",
        name=name,
        wanted=wanted,
        value=str(value)[:60],
        words=field.description,
    )


def parse_config(values: Mapping[str, Any]) -> TrainConfig:
    """A config from settings (lr=…), sections (optim={"lr": …}), or both, as in config.yaml."""
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if name in SECTIONS and isinstance(value, Mapping):
            settings |= {str(each): value[each] for each in value}
        elif name in SECTIONS and name not in ALIASES:
            raise BadSetting(
                _(
                    "{name} must hold settings (name: value), got {value!r}; see config.yaml of any run",
                    name=name,
                    value=value,
                )
            )
        else:
            settings[str(name)] = value
    return TrainConfig(**{ALIASES.get(name, name): value for name, value in settings.items()})


# ---------------------------------------------------------------------------------------------------- keyword arguments
# Written out, because editors do not run code; a test compares them with the settings above.


class ResumeKwargs(TypedDict, total=False):
    """The settings that resume() may change."""

    micro_batch_tokens: int
    max_steps: int
    epochs: float
    max_time: str | float
    device: str
    compile: bool
    gradient_checkpointing: bool
    fsdp: bool
    skip_grad_spikes: float
    max_nan_steps: int
    final_eval_examples: int
    patience: int
    samples: int
    out: str | Path
    checkpoint_every: str | float
    checkpoint_steps: int
    keep_checkpoints: int


class TrainKwargs(ResumeKwargs, FeedbackKwargs, total=False):
    """The settings that train() takes: those of resume(), and these."""

    valid: str | list[str]
    task: str
    columns: str | dict[str, str]
    source: str
    target: str
    header: str
    encoding: str
    encoding_errors: str
    valid_fraction: float
    max_length: int
    truncate: bool
    context_length: int
    objective: str
    chat_template: str | Path
    augment: str | dict[str, str]
    synonyms: str | Path
    language: str
    window_seconds: float
    image_size: int
    codec: str | Path
    semantic_model: str
    tokenizer: str | Path
    vocab: int
    init_from: str | Path
    size: str
    layers: int
    d_model: int
    heads: int
    d_ff: int
    dropout: float
    patch_size: int
    patch_embedding: str
    stochastic_depth: float
    position: str
    tune: str
    tune_tokens: int
    tune_reduction: int
    tune_rank: int
    tune_alpha: float
    tune_dropout: float
    tune_target: str | list[str]
    attention: str
    encoder_attention: str
    decoder_attention: str
    optimizer: str
    lr: float
    schedule: str
    warmup: int
    min_lr_ratio: float
    beta1: float
    momentum: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    label_smoothing: float
    ema: float
    batch_tokens: int
    seed: int
    dtype: str
    eval_every: int
    eval_examples: int
    metric: str
    log_every: int
    log_order: bool
