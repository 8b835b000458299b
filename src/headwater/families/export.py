"""Find the transformers family that expresses a model, and export the model in its layout.

match_family tries the families in FAMILY_ORDER: a config writer gives a config.json, the family's own reader turns it
into a spec, and the two specs must be equal in all that affects the output. Where none is, equivalent forms of the
model (rewrites.py) are tried too. The first family that matches is used; where none does, the nearest is reported
with the first difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from headwater.core import (
    SDPA,
    Attention,
    ClassificationHead,
    Learned,
    LMHead,
    Model,
    Stack,
    TokenClassificationHead,
    Transformer,
)
from headwater.core.init import PAPER_INIT
from headwater.errors import BadFile, Fault
from headwater.families.config_writers import CONFIG_WRITERS, ConfigDict, find_part
from headwater.families.hf_folder import LoadedModel
from headwater.families.registry import FAMILIES, LABELED_HEADS
from headwater.families.rewrites import REWRITES, Rewrite, apply_rewrites
from headwater.i18n import _
from headwater.variants.stochastic_depth import StochasticDepth
from headwater.weights.hf_config import HFConfig

# The best known first: where two families express a model, the first is written.
FAMILY_ORDER = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "mixtral",
    "gpt2",
    "gpt_neox",
    "bert",
    "megatron-bert",
    "roberta",
    "distilbert",
    "albert",
    "marian",
    "pegasus",
    "blenderbot",
    "bart",
    "mbart",
    "t5",
    "mt5",
    "vit",
    "deit",
    "transfo-xl",
    "longformer",
    "led",
    "big_bird",
    "whisper",
    "clip",
    "siglip",
    "clip_text_model",
    "clip_vision_model",
    "siglip_text_model",
    "siglip_vision_model",
    "reformer",
    "longt5",
    "bigbird_pegasus",
)
MAX_NEW_TOKENS = 256  # the default of headwater.generate; that of transformers is 20
OUTPUT_TOLERANCE = 1e-3  # of a rewritten model, relative to the largest output; rounding errors are far smaller


@dataclass(frozen=True)
class FamilyMatch:
    """A family whose config.json describes the model, possibly after rewrites."""

    family: str
    head_type: str
    config: ConfigDict
    rewrites: tuple[Rewrite, ...] = ()


@dataclass(frozen=True)
class SpecDifference:
    """A field in which the nearest model of a family differs from this one."""

    path: str
    model_value: str
    family_value: str


@dataclass(frozen=True)
class FamilyMismatch:
    """No family expresses the model: the nearest family, and the first difference."""

    family: str
    difference: SpecDifference


@dataclass(frozen=True)
class ExportedModel:
    """A model in the form of a transformers family. rewrites: the names of the rewrites applied (rewrites.py)."""

    model: LoadedModel
    rewrites: tuple[str, ...]


def export_to_family(loaded: LoadedModel, families: Sequence[str] = FAMILY_ORDER) -> ExportedModel | FamilyMismatch:
    """Express a model as one of these families: its config.json, and its weights in the family's form."""
    match = match_family(loaded.spec, families, _extra_config(loaded))
    if isinstance(match, FamilyMismatch):
        return match
    model = apply_rewrites(loaded.model, match.rewrites)
    if match.rewrites:
        _check_same_outputs(loaded.model, model)
    labels = [str(label) for label in match.config.get("id2label", {}).values()]
    generation_config = _generation_config(loaded)
    exported = LoadedModel(
        model, loaded.tokenizer, match.config, loaded.path, match.head_type, labels, generation_config, loaded.processor
    )
    return ExportedModel(exported, tuple(rewrite.name for rewrite in match.rewrites))


def match_family(
    spec: Model, families: Sequence[str] = FAMILY_ORDER, extra_config: ConfigDict | None = None
) -> FamilyMatch | FamilyMismatch:
    """The first of these families that expresses a spec. extra_config: more keys of config.json (ids, labels)."""
    nearest: tuple[tuple[bool, int], FamilyMismatch] | None = None
    for rewrites, form in _equivalent_specs(spec):
        expected = canonical_spec(form)
        for family, head_type in _candidates(families, form, extra_config or {}):
            config = _write_config(family, head_type, form, extra_config or {})
            differences = _config_differences(config, family, head_type, expected)
            if not differences:
                return FamilyMatch(family, head_type, config or {}, rewrites)
            distance = (any(difference.path == "head" for difference in differences), len(differences))
            if nearest is None or distance < nearest[0]:
                nearest = (distance, FamilyMismatch(family, differences[0]))
    assert nearest is not None, "there is at least one family"
    return nearest[1]


def _equivalent_specs(spec: Model) -> Iterator[tuple[tuple[Rewrite, ...], Model]]:
    """The spec itself, then its rewritten forms, those with the fewest rewrites first."""
    for count in range(len(REWRITES) + 1):
        for rewrites in itertools.combinations(REWRITES, count):
            form = spec
            for rewrite in rewrites:
                before = form
                form = rewrite.rewrite_spec(form)
                if form == before:  # nothing to rewrite: the same as without this one
                    break
            else:
                yield rewrites, form


def _candidates(families: Sequence[str], spec: Model, extra_config: ConfigDict) -> list[tuple[str, str]]:
    """Families and head types to try.

    Two scores per token without labels may be the span of an answer: question answering is tried before labels of
    tokens. With labels they are never a span.
    """
    has_token_labels = isinstance(spec.head, TokenClassificationHead) and "id2label" in extra_config
    candidates = []
    for name in families:
        # token classification last: sorted() keeps the order of the others
        heads = sorted(FAMILIES[name].head_names, key=lambda head: head == "token_classification")
        candidates += [(name, head) for head in heads if not (has_token_labels and head == "question_answering")]
    return candidates


def _write_config(family: str, head_type: str, spec: Model, extra_config: ConfigDict) -> ConfigDict | None:
    """config.json from the family's config writer, with the head's architecture and labels."""
    config = CONFIG_WRITERS[family].write_config(spec)
    if config is None:
        return None
    extra = {key: value for key, value in extra_config.items() if key != "id2label"}
    labels = _label_config(spec, extra_config.get("id2label")) if head_type in LABELED_HEADS else {}
    return {
        "architectures": [CONFIG_WRITERS[family].architectures[head_type]],
        "model_type": family,
        "dtype": "float32",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),  # not the defaults of another vocabulary
        **config,
        **labels,
        **extra,
    }


def _label_config(spec: Model, id2label: dict[str, str] | None) -> ConfigDict:
    count = spec.head.num_labels if isinstance(spec.head, ClassificationHead) else getattr(spec.head, "num_labels", 2)
    names = list((id2label or {}).values())
    if len(names) != count:
        names = [f"LABEL_{i}" for i in range(count)]
    return {
        "id2label": {str(i): label for i, label in enumerate(names)},
        "label2id": {label: i for i, label in enumerate(names)},
    }


def _extra_config(loaded: LoadedModel) -> ConfigDict:
    """The keys of config.json in addition to the spec: special token ids, labels, metadata of the training."""
    extra: ConfigDict = {}
    if loaded.tokenizer is not None:
        extra = {f"{role}_token_id": loaded.tokenizer.special_id(role) for role in ("bos", "eos", "pad")}
    if loaded.spec.encoder is not None and loaded.spec.decoder is not None and loaded.decoder_start_id is not None:
        extra["decoder_start_token_id"] = loaded.decoder_start_id
    if loaded.labels:
        extra["id2label"] = dict(enumerate(loaded.labels))
    if loaded.config.get("metadata"):
        extra["metadata"] = loaded.config["metadata"]
    return extra


def _generation_config(loaded: LoadedModel) -> dict[str, Any]:
    """generation_config.json: without one, transformers uses defaults of the family's own tokenizer."""
    ids = {
        key: value for key, value in _extra_config(loaded).items() if key.endswith("_token_id") and value is not None
    }
    generates = loaded.spec.decoder is not None and isinstance(loaded.spec.head, LMHead)
    return {**loaded.generation_config, **ids, "max_new_tokens": MAX_NEW_TOKENS} if generates else {}


# ------------------------------------------------------------------------------------------------------ comparing specs


def canonical_spec(spec: Model) -> Model:
    """A spec without what does not affect the output (init, dropout, kernels), and with all defaults filled in."""
    return replace(_canonical(spec, 0), tied=_canonical_ties(spec.tied), init=PAPER_INIT)


def _canonical(value: Any, d_model: int) -> Any:
    """The canonical form of a part or a tuple of parts; d_model: that of the enclosing stack."""
    if isinstance(value, tuple):
        canonical = {item: _canonical(item, d_model) for item in dict.fromkeys(value)}  # equal layers only once
        return tuple(canonical[item] for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    if isinstance(value, StochasticDepth):  # it acts while training
        return _canonical(value.norm, d_model)
    d_model = value.d_model if isinstance(value, Stack) else d_model
    values: dict[str, Any] = {f.name: _canonical(getattr(value, f.name), d_model) for f in fields(value)}
    if "dropout" in values:
        values["dropout"] = 0.0
    if isinstance(value, Stack):
        values["order"] = value.order or tuple(range(len(value.layers)))
    if isinstance(value, Attention):
        head_dim = value.head_dim or d_model // value.heads
        values |= {
            "kv_heads": value.kv_heads or value.heads,
            "head_dim": head_dim,
            "v_head_dim": value.v_head_dim or head_dim,
            "bias": "".join(sorted(value.bias)),
            "scale": head_dim**-0.5 if value.scale is None else value.scale,
            "kernel": SDPA(),
        }
    return replace(value, **values)


def _canonical_ties(tied: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Ties in canonical form: each path with the first of all paths that share its tensor."""
    groups: list[set[str]] = []
    for pair in tied:
        joined = set(pair).union(*(group for group in groups if group & set(pair)))
        groups = [group for group in groups if not group & joined] + [joined]
    return tuple(sorted((path, min(group)) for group in groups for path in group - {min(group)}))


def _config_differences(
    config: ConfigDict | None, family: str, head_type: str, expected: Model
) -> list[SpecDifference]:
    """The differences between the model of a config.json and the expected spec."""
    # a family that cannot be compared counts as many differences: any other family is nearer
    if config is None:
        return [SpecDifference("stacks", _stack_names(expected), _family_stack_names(family))] * 100
    try:
        family_spec = canonical_spec(FAMILIES[family].read_spec(HFConfig(dict(config)), head_type))
    except Fault as fault:
        return [SpecDifference("config.json", "a setting it does not know", str(fault))] * 99
    return list(dict.fromkeys(_iter_differences(expected, family_spec, "")))


def spec_differences(model_spec: Model, family_spec: Model) -> list[SpecDifference]:
    """The differences of two specs that affect the output, each once."""
    return list(dict.fromkeys(_iter_differences(canonical_spec(model_spec), canonical_spec(family_spec), "")))


def config_matches_spec(loaded: LoadedModel) -> bool:
    """Whether config.json still describes the model: not after a new head, or with RoPE factors of a GGUF file.

    Ties are not compared: the weights decide them.
    """
    try:
        family_spec = FAMILIES[loaded.config["model_type"]].read_spec(HFConfig(dict(loaded.config)), loaded.head)
    except Fault:
        return False
    return not spec_differences(loaded.spec, replace(family_spec, tied=loaded.spec.tied))


def _iter_differences(model_value: Any, family_value: Any, path: str) -> Iterator[SpecDifference]:
    """The fields in which two specs differ, part by part."""
    if model_value == family_value:
        return
    if type(model_value) is type(family_value) and is_dataclass(model_value):
        for f in fields(model_value):
            yield from _iter_differences(
                getattr(model_value, f.name), getattr(family_value, f.name), f"{path}.{f.name}".strip(".")
            )
    elif isinstance(model_value, tuple) and isinstance(family_value, tuple) and len(model_value) == len(family_value):
        for model_item, family_item in zip(model_value, family_value, strict=True):
            role = getattr(model_item, "role", "")
            item_path = path.replace("branches", role) if role else path
            yield from _iter_differences(model_item, family_item, item_path)
    else:
        yield SpecDifference(path, _format_value(model_value), _format_value(family_value))


def _format_value(value: Any) -> str:
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return f"{len(value)} {type(value[0]).__name__}s"
    text = "nothing" if value in (None, (), "") else " ".join(repr(value).split())
    return text if len(text) <= 60 else f"another {type(value).__name__}"


def _stack_names(spec: Model) -> str:
    return " and ".join(side for side in ("encoder", "decoder") if getattr(spec, side) is not None)


def _family_stack_names(family: str) -> str:
    """The stacks that a family has weights for."""
    rules = FAMILIES[family].body_names.rules
    named = {pattern.text.partition(".")[0] for rule in rules for pattern in rule.params}
    return " and ".join(side for side in ("encoder", "decoder") if side in named)


@torch.inference_mode()
def _check_same_outputs(original: Transformer, rewritten: Transformer) -> None:
    """A model and its rewritten form must give the same outputs on a small padded batch."""
    device = next(original.parameters()).device
    table = find_part(original.spec, Learned)
    length = 8 if table is None else min(8, table.size - table.offset)
    stacks = [stack for stack in (original.spec.encoder, original.spec.decoder) if stack is not None]
    vocab = min(stack.embed.vocab for stack in stacks)  # type: ignore[attr-defined]

    # A random batch; the second row is padded.
    ids = torch.randint(vocab, (2, length), generator=torch.Generator().manual_seed(0)).to(device)  # [B, S]
    attention_mask = torch.ones_like(ids, dtype=torch.bool)
    attention_mask[1, 5:] = False
    source = {}
    if original.encoder is not None and original.decoder is not None:
        source = {"source": ids.flip(1), "source_attention_mask": attention_mask}

    was_training = original.training
    before = original.eval()(ids, attention_mask=attention_mask, **source)[attention_mask]
    after = rewritten.eval()(ids, attention_mask=attention_mask, **source)[attention_mask]
    original.train(was_training)
    if float((before - after).abs().max()) > OUTPUT_TOLERANCE * max(1.0, float(before.abs().max())):
        raise BadFile(_("in the layout of transformers the model gives other outputs than before; not written"))
