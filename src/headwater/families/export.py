"""Which family of transformers expresses a model, and the model in the layout of that family.

match tries the families in ORDER: a writer gives a config.json, the family's own reader turns it into a spec, and the
two specs must be equal in all that changes an answer. Where none is, forms of the model that compute the same
(rewrites.py) are tried too. The first family that fits is taken; where none does, the nearest is named with the first
difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from headwater.core import Attention, ClassHead, Fused, LanguageHead, Learned, Model, Stack, TokenHead, Transformer
from headwater.core.init import PAPER
from headwater.errors import BadFile, Fault
from headwater.families.family import FAMILIES
from headwater.families.folder import Loaded
from headwater.families.rewrites import REWRITES, Rewrite, rewritten
from headwater.families.writer import WRITERS, Config, first
from headwater.weights.settings import Settings

# The plainest first: where two families express a model, the better known one is written.
ORDER = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral", "gpt2", "gpt_neox",
    "bert", "megatron-bert", "roberta", "distilbert", "albert",
    "marian", "pegasus", "blenderbot", "bart", "mbart", "t5", "mt5",
)  # fmt: skip
MOST_TOKENS = 256  # of an answer, as headwater.generate has it; transformers would stop after 20
AGREE = 1e-3  # a rewritten model must give the answers of the first to this share of the largest; rounding is far below


@dataclass(frozen=True)
class Match:
    """A family whose config.json describes the model, perhaps in a rewritten form."""

    name: str
    head: str
    config: Config
    rewrites: tuple[Rewrite, ...] = ()


@dataclass(frozen=True)
class Difference:
    """One place where a family's nearest model has something else than this one."""

    where: str
    ours: str
    theirs: str


@dataclass(frozen=True)
class Misfit:
    """No family expresses the model: the nearest, and its first difference."""

    name: str
    difference: Difference


@dataclass(frozen=True)
class Exported:
    """A model as a family of transformers has it. rewrites: names of the changes of form, see rewrites.py."""

    model: Loaded
    rewrites: tuple[str, ...]


def as_public(loaded: Loaded, names: Sequence[str] = ORDER) -> Exported | Misfit:
    """The same model as one of these families: its config.json, and its weights in the form the family has."""
    found = match(loaded.spec, names, _said(loaded))
    if isinstance(found, Misfit):
        return found
    model = rewritten(loaded.model, found.rewrites)
    if found.rewrites:
        _check_same_answers(loaded.model, model)
    labels = [str(label) for label in found.config.get("id2label", {}).values()]
    made = Loaded(model, loaded.tokenizer, found.config, loaded.where, found.head, labels, _generation(loaded))
    return Exported(made, tuple(change.name for change in found.rewrites))


def match(spec: Model, names: Sequence[str] = ORDER, said: Config | None = None) -> Match | Misfit:
    """The first of these families that expresses a spec. said: more keys of its config.json (token ids, labels)."""
    nearest: tuple[tuple[bool, int], Misfit] | None = None
    for changes, form in _forms(spec):
        wanted = essence(form)
        for name, head in _candidates(names, form, said or {}):
            made = _config(name, head, form, said or {})
            found = _differences_of(made, name, head, wanted)
            if not found:
                return Match(name, head, made or {}, changes)
            far = any(other.where == "head" for other in found), len(found)
            if nearest is None or far < nearest[0]:
                nearest = far, Misfit(name, found[0])
    assert nearest is not None, "there is at least one family"
    return nearest[1]


def _forms(spec: Model) -> Iterator[tuple[tuple[Rewrite, ...], Model]]:
    """The spec itself, then each of its other forms, those with the fewest changes first."""
    for count in range(len(REWRITES) + 1):
        for changes in itertools.combinations(REWRITES, count):
            form = spec
            for change in changes:
                before, form = form, change.spec(form)
                if form == before:
                    break
            else:
                yield changes, form


def _candidates(names: Sequence[str], spec: Model, said: Config) -> list[tuple[str, str]]:
    """Families and heads to try. Two scores a token are the ends of an answer, unless there are labels for them."""
    ends = isinstance(spec.head, TokenHead) and spec.head.outputs == 2 and "id2label" not in said
    unfit = "tags" if ends else "span"
    return [(name, head) for name in names for head in FAMILIES[name].heads if head != unfit]


def _config(name: str, head: str, spec: Model, said: Config) -> Config | None:
    """config.json as this family's writer makes it."""
    written = WRITERS[name].config(spec)
    if written is None:
        return None
    about = {key: value for key, value in said.items() if key != "id2label"}
    labels = _labels(spec, said.get("id2label")) if head in ("class", "tags") else {}
    return {
        "architectures": [WRITERS[name].classes[head]],
        "model_type": name,
        "dtype": "float32",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),  # not the defaults of another vocabulary
        **written,
        **labels,
        **about,
    }


def _labels(spec: Model, named: dict[str, str] | None) -> Config:
    count = spec.head.classes if isinstance(spec.head, ClassHead) else getattr(spec.head, "outputs", 2)
    names = list((named or {}).values())
    names = names if len(names) == count else [f"LABEL_{i}" for i in range(count)]
    return {"id2label": {str(i): label for i, label in enumerate(names)},
            "label2id": {label: i for i, label in enumerate(names)}}  # fmt: skip


def _said(loaded: Loaded) -> Config:
    """What config.json says beside the spec: the special tokens, the labels, what the model was trained for."""
    tokenizer, about = loaded.tokenizer, loaded.config.get("about") or {}
    said: Config = {}
    if tokenizer is not None:
        said = {f"{role}_token_id": tokenizer.special(role) for role in ("bos", "eos", "pad")}
    if loaded.spec.encoder is not None and loaded.spec.decoder is not None and loaded.start is not None:
        said["decoder_start_token_id"] = loaded.start
    said |= {"id2label": dict(enumerate(loaded.labels))} if loaded.labels else {}
    return said | ({"about": about} if about else {})


def _generation(loaded: Loaded) -> dict[str, Any]:
    """generation_config.json: without one, transformers would fall back on defaults of the family's own tokenizer."""
    ids = {key: value for key, value in _said(loaded).items() if key.endswith("_token_id") and value is not None}
    writes = loaded.spec.decoder is not None and isinstance(loaded.spec.head, LanguageHead)
    return {**loaded.generation, **ids, "max_new_tokens": MOST_TOKENS} if writes else {}


# ----------------------------------------------------------------------------------------------------------- comparing


def essence(spec: Model) -> Model:
    """A spec without what changes no answer: first weights, dropout, kernels. What may be left out is written out."""
    return replace(_plain(spec, 0), tied=_groups(spec.tied), init=PAPER)


def _plain(value: Any, d_model: int) -> Any:
    """essence of a part, or of a tuple of them; d_model: that of the stack it stands in."""
    if isinstance(value, tuple):
        made = {item: _plain(item, d_model) for item in dict.fromkeys(value)}  # equal layers are worked out once
        return tuple(made[item] for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    d_model = value.d_model if isinstance(value, Stack) else d_model
    found: dict[str, Any] = {f.name: _plain(getattr(value, f.name), d_model) for f in fields(value)}
    if "dropout" in found:
        found["dropout"] = 0.0
    if isinstance(value, Stack):
        found["order"] = value.order or tuple(range(len(value.layers)))
    if isinstance(value, Attention):
        width = value.head_dim or d_model // value.heads
        found |= {
            "kv_heads": value.kv_heads or value.heads,
            "head_dim": width,
            "v_head_dim": value.v_head_dim or width,
            "bias": "".join(sorted(value.bias)),
            "scale": width**-0.5 if value.scale is None else value.scale,
            "kernel": Fused(),
        }
    return replace(value, **found)


def _groups(tied: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The same ties, however they are written: each path with the first of all that are one tensor."""
    groups: list[set[str]] = []
    for pair in tied:
        joined = set(pair).union(*(group for group in groups if group & set(pair)))
        groups = [group for group in groups if not group & joined] + [joined]
    return tuple(sorted((path, min(group)) for group in groups for path in group - {min(group)}))


def _differences_of(config: Config | None, name: str, head: str, wanted: Model) -> list[Difference]:
    """What the model of a config.json has else than the wanted one."""
    if config is None:
        return [Difference("stacks", _stacks(wanted), _stacks_of(name))] * 100
    try:
        theirs = essence(FAMILIES[name].read(Settings(dict(config)), head))
    except Fault as fault:
        return [Difference("config.json", "a setting it does not know", str(fault))] * 99
    return list(dict.fromkeys(_differences(wanted, theirs, "")))


def differences(ours: Model, theirs: Model) -> list[Difference]:
    """Where two specs differ in what changes an answer, each place once."""
    return list(dict.fromkeys(_differences(essence(ours), essence(theirs), "")))


def is_described(loaded: Loaded) -> bool:
    """Whether its config.json still tells what the model is: not after a new head, or with numbers of a GGUF file.

    Tied tables are left out: the weights decide them.
    """
    try:
        theirs = FAMILIES[loaded.config["model_type"]].read(Settings(dict(loaded.config)), loaded.head)
    except Fault:
        return False
    return not differences(loaded.spec, replace(theirs, tied=loaded.spec.tied))


def _differences(ours: Any, theirs: Any, where: str) -> Iterator[Difference]:
    if ours == theirs:
        return
    if type(ours) is type(theirs) and is_dataclass(ours):
        for f in fields(ours):
            yield from _differences(getattr(ours, f.name), getattr(theirs, f.name), f"{where}.{f.name}".strip("."))
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for one, two in zip(ours, theirs, strict=True):
            role = getattr(one, "role", "")
            yield from _differences(one, two, where.replace("branches", role) if role else where)
    else:
        yield Difference(where, _shown(ours), _shown(theirs))


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return f"{len(value)} {type(value[0]).__name__}s"
    text = "nothing" if value in (None, (), "") else " ".join(repr(value).split())
    return text if len(text) <= 60 else f"another {type(value).__name__}"


def _stacks(spec: Model) -> str:
    return " and ".join(side for side in ("encoder", "decoder") if getattr(spec, side) is not None)


def _stacks_of(name: str) -> str:
    """The stacks that a family has weights for."""
    named = {pattern.text.partition(".")[0] for row in FAMILIES[name].names.rows for pattern in row.ours}
    return " and ".join(side for side in ("encoder", "decoder") if side in named)


@torch.inference_mode()
def _check_same_answers(one: Transformer, two: Transformer) -> None:
    """Both forms answer a small padded batch alike, or nothing is written."""
    table, device = first(one.spec, Learned), next(one.parameters()).device
    length = 8 if table is None else min(8, table.size - table.first)
    vocab = min(stack.embed.vocab for stack in (one.spec.encoder, one.spec.decoder) if stack is not None)  # type: ignore
    ids = torch.randint(vocab, (2, length), generator=torch.Generator().manual_seed(0)).to(device)
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, 5:] = False
    pair = {"source": ids.flip(1), "source_keep": keep} if one.encoder is not None and one.decoder is not None else {}
    was = one.training
    before, after = (model.eval()(ids, keep=keep, **pair)[keep] for model in (one, two))
    one.train(was)
    if float((before - after).abs().max()) > AGREE * max(1.0, float(before.abs().max())):
        raise BadFile("the model in the layout of transformers gives other answers than before; not written")
