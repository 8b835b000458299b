"""Read a Hugging Face config.json: typed, bounds-checked getters, RoPE parameters, an error for unread keys.

    config = HFConfig.from_json_file(folder / "config.json")
    heads = config.get_int("num_attention_heads", "n_head")   # aliases: whichever is present
    eps = config.get_float("layer_norm_eps", default=1e-12)
    config.refuse_unread()                                    # rejects the remaining keys by name

A null counts as absent. A bool is not a number. Sizes are bounded before anything is built from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from headwater.errors import BadFile, nearest
from headwater.i18n import _
from headwater.io.files import quote, read_limited
from headwater.io.strict_json import parse_json_object

# ------------------------------------------------------------------------------------------ forbidden and ignored keys
#
# A key that is not read may change what the model computes, so it is rejected by name. These lists are the exceptions:
# keys known not to matter, collected from the files that transformers 2 to 5 wrote and from published model cards.

# Keys that ask to run code shipped with the weights, or to fetch it.
FORBIDDEN_KEYS = frozenset(
    [
        "auto_map",
        "trust_remote_code",
        "custom_pipelines",
        "code_revision",
        "_attn_implementation_internal",
        "_experts_implementation_internal",
        "custom_generate",
        "custom_code",
    ]
)

_METADATA_KEYS = """
    _name_or_path name_or_path architectures model_type transformers_version torch_dtype dtype torchscript
    _commit_hash finetuning_task task_specific_params prefix problem_type language languages license tags
    pipeline_tag tokenizer_class tokenizer_name processor_class feature_extractor_type _num_labels num_labels
    id2label label2id directionality _diffusers_version adapters keys_to_ignore_at_inference is_composition
    xla_device tf_legacy_loss use_bfloat16 transformers.js_config metadata
"""
_RUNTIME_KEYS = """
    use_cache output_past output_attentions output_hidden_states output_scores output_logits output_router_logits
    return_dict return_dict_in_generate gradient_checkpointing _attn_implementation_autoset attn_implementation
    _attn_implementation _flash_attn_2_enabled use_flash_attn pretraining_tp memory_efficient_attention
"""
_GENERATION_KEYS = """
    max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p min_p repetition_penalty encoder_no_repeat_ngram_size
    no_repeat_ngram_size length_penalty bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id
    forced_eos_token_id forced_decoder_ids force_bos_token_to_be_generated num_return_sequences
    remove_invalid_values exponential_decay_length_penalty renormalize_logits guidance_scale bos_token_id
    eos_token_id eos_token_ids pad_token_id decoder_start_token_id sep_token_id unk_token_id cls_token_id
    mask_token_id n_special predict_special_tokens
"""
_TRAINING_KEYS = """
    initializer_range initializer_factor init_std initializer_cutoff_factor layerdrop encoder_layerdrop
    decoder_layerdrop attention_dropout attention_probs_dropout_prob hidden_dropout_prob hidden_dropout dropout
    dropout_rate activation_dropout activation_dropout_prob classifier_dropout classifier_dropout_prob
    classif_dropout seq_classif_dropout qa_dropout attn_pdrop embd_pdrop resid_pdrop embed_dropout
    summary_first_dropout router_aux_loss_coef router_jitter_noise apply_spec_augment mask_time_prob
    mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length mask_feature_min_masks
"""
_REDUNDANT_KEYS = """
    is_encoder_decoder tie_word_embeddings n_ctx total_flos net_structure_type num_memory_blocks down_scale_factor
    gap_size pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    add_bias_logits static_position_embeddings extra_pos_embeddings normalize_embedding classifier_dim
    classifier_proj_size median_filter_width summary_activation summary_proj_to_labels summary_type summary_use_proj
    is_gated_act dense_act_fn
"""
IGNORED_KEYS = frozenset(
    " ".join((_METADATA_KEYS, _RUNTIME_KEYS, _GENERATION_KEYS, _TRAINING_KEYS, _REDUNDANT_KEYS)).split()
)

# Ignored with these values only: other values would change what the model computes.
IGNORED_VALUES: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "chunk_size_feed_forward": (0, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "position_embedding_type": ("absolute", None),
    "normalize_before": (False, None),
    "add_final_layer_norm": (False, None),
    "use_weighted_layer_sum": (False, None),
    "sinusoidal_pos_embds": (False, None),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "reorder_and_upcast_attn": (False, None),
    "use_bidirectional_attention": (False, None),
}


# ----------------------------------------------------------------------------------------------------------- the config

MAX_CONFIG_BYTES = 4 << 20  # the longest real part is id2label of a large classifier
MAX_INT = 2**31 - 1
MAX_LAYERS = 10_000

T = TypeVar("T")


class Required:
    """The type of REQUIRED, the default of a key that must be present."""


REQUIRED = Required()


class HFConfig:
    """The values of a config.json, with a record of the keys that were read."""

    def __init__(self, values: dict[str, Any], where: object = "config.json"):
        self.where = where
        self._values = values
        self._read_keys = set[str]()
        self._sections: list[HFConfig] = []
        if forbidden := sorted(_nested_keys(values) & FORBIDDEN_KEYS):
            raise BadFile(
                _(
                    "{where}: {forbidden!r} asks to run code that came with the weights; Headwater never "
                    "does. Remove the key if the model is a plain one of its model_type",
                    where=where,
                    forbidden=forbidden[0],
                )
            )

    @classmethod
    def from_json_file(cls, path: str | Path) -> HFConfig:
        return cls(parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path), path)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get_int(self, *names: str, minimum: int = 1, maximum: int = MAX_INT, default: int | Required = REQUIRED) -> int:
        """An integer: a width, a count, an id (with minimum=0)."""
        return self._get(
            names,
            default,
            lambda v: type(v) is int and minimum <= v <= maximum,
            _("an integer, {minimum} to {maximum}", minimum=minimum, maximum=maximum),
        )

    def get_num_layers(self, *names: str, default: int | Required = REQUIRED) -> int:
        """A number of layers, at most MAX_LAYERS."""
        return self.get_int(*names, maximum=MAX_LAYERS, default=default)

    def get_float(
        self, *names: str, minimum: float = 0.0, maximum: float = 1e18, default: float | Required = REQUIRED
    ) -> float:
        """A finite number, as a float."""
        is_valid = lambda v: type(v) in (int, float) and minimum <= v <= maximum  # noqa: E731
        return float(
            self._get(
                names, default, is_valid, _("a number, {minimum:g} to {maximum:g}", minimum=minimum, maximum=maximum)
            )
        )

    def get_bool(self, *names: str, default: bool | Required = REQUIRED) -> bool:
        return self._get(names, default, lambda v: type(v) is bool, _("true or false"))

    def get_str(self, *names: str, choices: Iterable[str] = (), default: str | Required = REQUIRED) -> str:
        """A string; one of `choices`, where there are any."""
        value = self._get(names, default, lambda v: isinstance(v, str) and len(v) <= 1000, _("a text"))
        if (choices := list(choices)) and value not in choices:
            raise BadFile(
                _(
                    "{where}: {names} {value} is not known; {nearest}",
                    where=self.where,
                    names=names[0],
                    value=quote(value),
                    nearest=nearest(value[:50], choices),
                )
            )
        return value

    @overload
    def get_list(self, name: str, item_type: type[T], default: None) -> list[T] | None: ...
    @overload
    def get_list(self, name: str, item_type: type[T], default: list[T] | Required = REQUIRED) -> list[T]: ...
    def get_list(self, name: str, item_type: type[T], default: list[T] | Required | None = REQUIRED) -> list[T] | None:
        """A list of at most 10,000 items of one type: eos ids, the type of each layer."""
        is_valid = lambda v: isinstance(v, list) and len(v) <= 10_000 and all(type(x) is item_type for x in v)  # noqa: E731
        return self._get((name,), default, is_valid, _("a list of {kind}", kind=item_type.__name__))

    def get_numbers(
        self, *names: str, max_count: int = 16, default: tuple[float, ...] | Required = REQUIRED
    ) -> tuple[float, ...]:
        """A number, or a list of up to max_count numbers."""
        is_number = lambda v: type(v) in (int, float) and abs(v) < 1e18  # noqa: E731
        is_valid = lambda v: (  # noqa: E731
            is_number(v) or (isinstance(v, list | tuple) and 0 < len(v) <= max_count and all(map(is_number, v)))
        )
        value = self._get(names, default, is_valid, _("a number, or a list of at most {count}", count=max_count))
        return tuple(map(float, value)) if isinstance(value, list | tuple) else (float(value),)

    def get_pair(self, name: str, maximum: int = MAX_INT, default: int | Required = REQUIRED) -> tuple[int, int]:
        """Two sizes, height and width: a number, or a list of two."""
        is_size = lambda v: type(v) is int and 1 <= v <= maximum  # noqa: E731
        is_valid = lambda v: is_size(v) or (isinstance(v, list) and len(v) == 2 and all(map(is_size, v)))  # noqa: E731
        value = self._get((name,), default, is_valid, _("an integer, 1 to {maximum}, or two of them", maximum=maximum))
        return (value, value) if type(value) is int else (value[0], value[1])

    def is_number(self, key: str) -> bool:
        """Whether a key holds a number, where it may hold an object too."""
        return type(self._values.get(key)) in (int, float)

    def get_int_list(self, name: str, default: Any = REQUIRED, minimum: int = 1, layers: int = 0) -> tuple[int, ...]:
        """An integer, or a list of at most 16; with `layers`, a list of one for each layer, or one for all."""
        is_size = lambda v: type(v) is int and minimum <= v <= MAX_INT  # noqa: E731
        counts = (layers,) if layers else range(17)
        is_valid = lambda v: is_size(v) or (isinstance(v, list | tuple) and len(v) in counts and all(map(is_size, v)))  # noqa: E731
        requirement = _("an integer from {minimum}, or {count} of them", minimum=minimum, count=layers or "1-16")
        value = self._get((name,), default, is_valid, requirement)
        return (value,) * (layers or 1) if type(value) is int else tuple(value)

    def get_labels(self, default_count: int = 2) -> list[str]:
        """The names of the classes, in order: those of id2label, or LABEL_0, LABEL_1 … up to num_labels."""
        id2label = self._get(("id2label",), {}, lambda v: isinstance(v, dict), _("an object from id to name"))
        count = len(id2label) or self.get_int("num_labels", "_num_labels", maximum=1_000_000, default=default_count)
        return [str(id2label.get(str(i), f"LABEL_{i}")) for i in range(count)]

    def get_optional(
        self, getter: Literal["get_int", "get_float", "get_bool", "get_str"], *names: str, **bounds: Any
    ) -> Any:
        """The value of a getter, or None where the key is absent: config.get_optional("get_int", "head_dim")."""
        self._read_keys.update(names)
        if not any(name in self for name in names):
            return None
        return getattr(self, getter)(*names, **bounds)

    def section(self, name: str, override: str = "") -> HFConfig:
        """A nested object, empty if it is absent. Its unread keys are rejected with those of the outer config.

        override: the name of a second object, whose values take precedence.
        """
        value = self._get((name,), {}, lambda v: isinstance(v, dict), _("a JSON object"))
        if override:
            value = {**value, **self._get((override,), {}, lambda v: isinstance(v, dict), _("a JSON object"))}
        inner = HFConfig(value, f"{self.where}: {name}")
        self._sections.append(inner)
        return inner

    def ignore(self, *names: str) -> None:
        """Mark keys as read."""
        self._read_keys.update(names)

    def refuse_unread(self) -> None:
        """Reject keys that were not read: each may change what the model computes."""
        for inner in self._sections:
            inner.refuse_unread()
        unread = [key for key in self._values if key not in self._read_keys and not self._ignored(key)]
        if unread:
            named = ", ".join(f"{quote(key, 40)} = {quote(self._values[key], 30)}" for key in unread[:5])
            others = _(" and {count} more", count=len(unread) - 5) if len(unread) > 5 else ""
            raise BadFile(
                _(
                    "{where}: unknown settings, which may change what the model computes: {settings}{more}; "
                    "remove them if they do not matter",
                    where=self.where,
                    settings=named,
                    more=others,
                )
            )

    def _ignored(self, key: str) -> bool:
        return key in IGNORED_KEYS or (key in IGNORED_VALUES and self._values[key] in IGNORED_VALUES[key])

    def _get(self, names: tuple[str, ...], default: Any, is_valid: Callable[[Any], bool], requirement: str) -> Any:
        """The value under one of several names, checked; where several are present, they must be equal."""
        # the key that is present, or the default
        self._read_keys.update(names)
        present = [name for name in names if self._values.get(name) is not None]
        if not present:
            if isinstance(default, Required):
                raise BadFile(
                    _(
                        "{where}: {names} is missing; it must be {requirement}",
                        where=self.where,
                        names=" or ".join(names),
                        requirement=requirement,
                    )
                )
            return default

        # its value
        value = self._values[present[0]]
        if not is_valid(value):
            raise BadFile(
                _(
                    "{where}: {key} must be {requirement}, got {value}",
                    where=self.where,
                    key=present[0],
                    requirement=requirement,
                    value=quote(value),
                )
            )

        # other names of the same setting
        for other in present[1:]:
            if self._values[other] != value:
                conflict = _(
                    "{key} = {value} and {other_key} = {other_value}",
                    key=present[0],
                    value=quote(value),
                    other_key=other,
                    other_value=quote(self._values[other]),
                )
                raise BadFile(
                    _("{where}: {conflict} mean the same and must be equal", where=self.where, conflict=conflict)
                )
        return value


def _nested_keys(value: Any) -> set[str]:
    """All keys of a JSON value, at any depth."""
    keys: set[str] = set()
    level = [value]
    while level:
        tables = [node for node in level if isinstance(node, dict)]
        keys.update(key for node in tables for key in node)
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    return keys


# ------------------------------------------------------------------------------------------------------ RoPE parameters

# The parameters of each rope_type: required ones, then optional ones.
ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
    "longrope": ((), ("factor", "attention_factor", "original_max_position_embeddings")),
}


@dataclass(frozen=True)
class RopeConfig:
    """RoPE parameters: theta, the fraction of each head that is rotated, the type of scaling and its parameters."""

    theta: float
    partial_rotary_factor: float = 1.0
    rope_type: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()
    short_factor: tuple[float, ...] = ()  # longrope: factors per dimension, up to the original length
    long_factor: tuple[float, ...] = ()  # and beyond it


def read_rope_config(
    config: HFConfig, theta: float = 10_000.0, partial_rotary_factor: float = 1.0, layer_type: str = ""
) -> RopeConfig:
    """Read the RoPE parameters in either published form, with a family's defaults.

        old    "rope_theta": 500000.0, "rope_scaling": {"rope_type" or "type": "llama3", "factor": 8.0, ...}
        new    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, ...}

    layer_type: which of several to read, where each type of layer has its own (Gemma 3: "full_attention").
    """
    new = config.section("rope_parameters")
    if layer_type and layer_type in new:
        new = new.section(layer_type)
    old = config.section("rope_scaling")

    # theta and the rotated fraction: the new form wins over the old one.
    theta = config.get_float("rope_theta", "rotary_emb_base", default=theta)
    partial_rotary_factor = config.get_float(
        "partial_rotary_factor", "rotary_pct", maximum=1.0, default=partial_rotary_factor
    )
    theta = new.get_float("rope_theta", default=theta)
    partial_rotary_factor = new.get_float("partial_rotary_factor", maximum=1.0, default=partial_rotary_factor)

    # The scaling.
    scaling = new if "rope_type" in new or "factor" in new else old
    rope_type = scaling.get_str("rope_type", "type", choices=ROPE_TYPES, default="default")
    required, optional = ROPE_TYPES[rope_type]
    parameters = [(name, scaling.get_float(name)) for name in required]
    parameters += [(name, scaling.get_float(name)) for name in optional if name in scaling]
    scaling.ignore("rope_theta", "truncate")
    short_factor = tuple(scaling.get_list("short_factor", float, []))
    long_factor = tuple(scaling.get_list("long_factor", float, []))
    return RopeConfig(theta, partial_rotary_factor, rope_type, tuple(parameters), short_factor, long_factor)
