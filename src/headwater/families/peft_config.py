"""adapter_config.json of peft: every key is honoured, known to be harmless, or refused by name.

And its rules of which modules are changed: a list of endings, a regular expression, or "all-linear".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headwater.errors import BadFile, nearest
from headwater.i18n import _
from headwater.io.files import quote, read_limited
from headwater.io.strict_json import parse_json_object
from headwater.text.patterns import check_pattern

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 4 << 20

# What does not change the result of an adapter that was trained.
HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "inference_mode", "init_ia3_weights",
    "init_weights", "loftq_config", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "task_type", "token_dim", "num_attention_heads", "num_layers", "num_transformer_submodules",
    "fan_in_fan_out", "encoder_hidden_size", "encoder_num_layers", "encoder_dropout", "prefix_projection",
    "encoder_reparameterization_type", "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path",
    "tokenizer_kwargs",
}  # fmt: skip
HONOURED = {
    "peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "use_rslora",
    "use_dora", "modules_to_save", "layers_to_transform", "layers_pattern", "feedforward_modules",
    "num_virtual_tokens", "init_lora_weights", "bias",
}  # fmt: skip
# These initial values changed the base itself, so the adapter does not fit the base as it was published.
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "mica", "eva", "lora_ga")
OFF: tuple[object, ...] = (None, False, {}, [], "")


class UsualTargets(NamedTuple):
    """The modules that peft means where target_modules is null: of LoRA, of IA3, and IA3's feed-forward ones."""

    lora: str
    ia3: str
    feed_forward: str


_BERT = UsualTargets("query value", "key value output.dense", "output.dense")
_LLAMA = UsualTargets("q_proj v_proj", "k_proj v_proj down_proj", "down_proj")
_QWEN = UsualTargets("q_proj v_proj", "q_proj v_proj down_proj", "down_proj")
USUAL_TARGETS = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": UsualTargets("q_proj v_proj", "k_proj v_proj w2", "w2"),
    "gemma": _QWEN,
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "gpt2": UsualTargets("c_attn", "c_attn mlp.c_proj", "mlp.c_proj"),
    "gpt_neox": UsualTargets("query_key_value", "query_key_value dense_4h_to_h", "dense_4h_to_h"),
    "t5": UsualTargets("q v", "k v wo", "wo"),
    "mt5": UsualTargets("q v", "k v wi_1", ""),
    "bart": UsualTargets("q_proj v_proj", "q_proj v_proj fc2", "fc2"),
}


class PeftConfig:
    """The settings of an adapter_config.json, checked."""

    def __init__(self, values: Mapping[str, Any], where: object) -> None:
        self.values = dict(values)
        self.where = where
        for key, value in self.values.items():
            if key not in HARMLESS | HONOURED and value not in OFF:
                raise BadFile(
                    _(
                        "{where}: the setting {key} = {value} is not supported and may change the outputs",
                        where=where,
                        key=quote(key),
                        value=quote(value),
                    )
                )
        if self.get("bias", str, "none") != "none":
            raise BadFile(
                _(
                    "{where}: trained biases are not supported (bias = {bias})",
                    where=where,
                    bias=quote(self.values["bias"]),
                )
            )
        initial = self.values.get("init_lora_weights", True)
        if isinstance(initial, str) and initial.lower().startswith(CHANGED_BASE):
            raise BadFile(
                _(
                    "{where}: init_lora_weights = {initial} changed the base's own weights; "
                    "convert it to a plain LoRA with peft",
                    where=where,
                    initial=quote(initial),
                )
            )

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        path = folder / CONFIG_NAME
        return cls(parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path), path)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """A setting of one type; its default where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(each.__name__ for each in kinds)
            raise BadFile(
                _(
                    "{where}: {key} must be {expected}, got {value}",
                    where=self.where,
                    key=key,
                    expected=expected,
                    value=quote(value),
                )
            )
        return value

    @property
    def peft_type(self) -> str:
        return str(self.get("peft_type", str, "")).upper()

    @property
    def base(self) -> str:
        """The name or path of the base, as its author called it."""
        return str(self.get("base_model_name_or_path", str, ""))

    def names(self, key: str) -> list[str]:
        """A list of names; empty where it is missing."""
        names = self.get(key, (list, str), [])
        names = [names] if isinstance(names, str) else names
        if not all(isinstance(name, str) for name in names):
            raise BadFile(_("{where}: {key} must be a list of strings", where=self.where, key=key))
        return list(names)

    # ----------------------------------------------------------------------------------------- which modules it changes

    def targets(self, known: Sequence[str], model_type: str, method: str) -> list[str]:
        """The public modules, of those known, that target_modules means. method: lora or ia3."""
        patterns = self.get("target_modules", (list, str), None)
        if patterns is None and model_type not in USUAL_TARGETS:
            raise BadFile(
                _(
                    "{where}: target_modules is missing, and {model_type} has no usual ones",
                    where=self.where,
                    model_type=model_type,
                )
            )
        patterns = getattr(USUAL_TARGETS[model_type], method).split() if patterns is None else patterns
        to_save = self.names("modules_to_save")
        chosen = [
            name
            for name in known
            if self.matches(name, patterns)
            and not (self.values.get("exclude_modules") and self.matches(name, self.values["exclude_modules"]))
            and not any(name.endswith(saved) for saved in to_save)
            and self._in_layers(name)
        ]
        if not chosen:
            raise BadFile(
                _(
                    "{where}: target_modules {patterns} match no module of this model; {nearest}",
                    where=self.where,
                    patterns=quote(patterns),
                    nearest=nearest(str(patterns[0]), {name.rpartition(".")[2] for name in known}),
                )
            )
        return chosen

    def matches(self, name: str, patterns: Any) -> bool:
        """peft's rule: a list of whole names or endings after a dot, or one regular expression of the whole name."""
        if patterns == "all-linear":
            return not re.search(r"(^|\.)(lm_head|embed_out|score|classifier|qa_outputs|cls)(\.|$)", name)
        if isinstance(patterns, str):
            return re.fullmatch(self._safe(patterns), name) is not None
        return any(name == each or name.endswith(f".{each}") for each in patterns)

    def _in_layers(self, name: str) -> bool:
        """layers_to_transform: the number after the name of the list of layers, or else the first number."""
        layers = self.get("layers_to_transform", (list, int), None)
        if layers is None:
            return True
        wanted = [layers] if isinstance(layers, int) else layers
        patterns = [rf".*\.{re.escape(pattern)}\.(\d+)\." for pattern in self.names("layers_pattern")]
        matches = [re.match(pattern, name) for pattern in patterns or [r".*?\.[^.]*\.(\d+)\."]]
        return any(match is not None and int(match[1]) in wanted for match in matches)

    def pattern_value(self, key: str, name: str, default: float) -> float:
        """rank_pattern or alpha_pattern: the value of the first key that is the name or its ending."""
        for pattern, value in self.get(key, dict, {}).items():
            if re.match(rf"(.*\.)?({self._safe(pattern)})$", name):
                return float(value)
        return default

    def _safe(self, pattern: str) -> str:
        """A regular expression of a file that cannot take forever."""
        check_pattern(pattern, self.where)
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError):
            raise BadFile(
                _("{where}: {pattern} is not a regular expression", where=self.where, pattern=quote(pattern))
            ) from None
        return pattern
