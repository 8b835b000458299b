"""Rules of a name map: parse one line of the table, and find the rule that matches a tensor name (see name_map.py)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.weights.transforms import Transforms, parse_transforms

# In this order: a rule that names the tensor in full has priority over one that names its module.
SUFFIXES = ("", ".weight", ".bias")
_INDEX = re.compile(r"(?:(?<=\.)|^)(?:0|[1-9][0-9]{0,5})(?=\.|$)", re.ASCII)
_PLACEHOLDER = re.compile(r"\{(\w+)\}|(?:(?<=\.)|^)(\d+)(?=\.|$)", re.ASCII)
_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")


@dataclass(frozen=True)
class NamePattern:
    """A tensor name with index placeholders: `h.{i}.mlp` has the key `h.#.mlp`. A literal number is a fixed index."""

    text: str

    @property
    def key(self) -> str:
        """The name with every index replaced by `#`, for the lookup of rules."""
        return _PLACEHOLDER.sub("#", self.text)

    @property
    def placeholders(self) -> set[str]:
        return {match[1] for match in _PLACEHOLDER.finditer(self.text) if match[1]}

    def match(self, indices: list[str]) -> dict[str, str] | None:
        """The value of each placeholder, or None where a fixed index differs or one placeholder has two values."""
        values: dict[str, str] = {}
        for placeholder, index in zip(_PLACEHOLDER.finditer(self.text), indices, strict=True):
            variable, literal = placeholder.groups()
            if literal not in (None, index):
                return None
            if variable and values.setdefault(variable, index) != index:
                return None
        return values

    def format(self, indices: Mapping[str, str]) -> str:
        """The name with its placeholders filled in."""
        return _PLACEHOLDER.sub(lambda match: indices[match[1]] if match[1] else match[2], self.text)


@dataclass(frozen=True)
class NameRule:
    """One line of a name map."""

    checkpoint: NamePattern  # the name that is written
    checkpoint_variants: tuple[NamePattern, ...]  # other names that are loaded too
    params: tuple[NamePattern, ...]  # none: the tensor is ignored
    transforms: Transforms
    unless: tuple[NamePattern, ...] = ()  # the rule does not apply to a model that has this parameter


@dataclass(frozen=True)
class RuleMatch:
    """A rule that matched a name: the rule, its indices, and the suffix both names share."""

    rule: NameRule
    indices: tuple[tuple[str, str], ...]
    suffix: str

    def param_names(self) -> list[str]:
        return [pattern.format(dict(self.indices)) + self.suffix for pattern in self.rule.params]

    def checkpoint_name(self) -> str:
        return self.rule.checkpoint.format(dict(self.indices)) + self.suffix

    def is_excluded(self, existing_params: Container[str]) -> bool:
        return any(pattern.format(dict(self.indices)) + self.suffix in existing_params for pattern in self.rule.unless)


def parse_rule(line: str) -> NameRule:
    """Parse one line: the checkpoint's name, the parameters' names, transforms and `unless`."""
    names, _unused, options = line.partition(" :")
    transforms, _unused, unless = options.partition(" unless ")
    checkpoint, *params = names.split()
    if not params:
        raise BadSetting(
            _(
                "a line of a name map must be `checkpoint_name  parameter_name`, got {line!r}; ignore a "
                "tensor with `-`",
                line=line,
            )
        )
    written_name, *variants = _expand_optional(checkpoint)
    expanded = [] if params == ["-"] else [name for text in params for name in _expand_alternatives(text)]
    if any(NamePattern(name).placeholders != NamePattern(written_name).placeholders for name in expanded):
        raise BadSetting(
            _(
                "both sides of a name map must have the same placeholders, or it could not be exported: {line!r}",
                line=line,
            )
        )
    return NameRule(
        NamePattern(written_name),
        tuple(map(NamePattern, variants)),
        tuple(map(NamePattern, expanded)),
        parse_transforms(transforms),
        tuple(map(NamePattern, unless.split())),
    )


def _expand_optional(name: str) -> list[str]:
    """`[a.]b[.c]` -> all spellings, the one with every optional part first."""
    parts = re.split(r"\[([^\]]*)\]", name)
    optional = parts[1::2]
    return [
        "".join(itertools.chain.from_iterable(itertools.zip_longest(parts[::2], chosen, fillvalue="")))
        for chosen in itertools.product(*((text, "") for text in optional))
    ]


def _expand_alternatives(name: str) -> list[str]:
    """`attn.{q,k,v}` -> attn.q attn.k attn.v."""
    choice = _ALTERNATIVES.search(name)
    if not choice:
        return [name]
    before = name[: choice.start()]
    after = name[choice.end() :]
    expanded = []
    for word in choice[1].split(","):
        expanded += _expand_alternatives(before + word.strip() + after)
    return expanded


def index_rules(pairs: Iterable[tuple[NamePattern, NameRule]]) -> dict[str, list[tuple[NamePattern, NameRule]]]:
    """Rules by the key of their pattern, in the order of the table."""
    index: dict[str, list[tuple[NamePattern, NameRule]]] = {}
    for pattern, rule in pairs:
        index.setdefault(pattern.key, []).append((pattern, rule))
    return index


def find_rule(
    index: dict[str, list[tuple[NamePattern, NameRule]]], name: str, existing_params: Container[str] = ()
) -> RuleMatch | None:
    """The rule that matches a name. existing_params: the parameters of the exported model, for rules with `unless`."""
    for suffix in SUFFIXES:
        if not name.endswith(suffix):
            continue
        stem = name.removesuffix(suffix)
        for pattern, rule in index.get(_INDEX.sub("#", stem), ()):
            indices = pattern.match(_INDEX.findall(stem))
            if indices is None:
                continue
            match = RuleMatch(rule, tuple(indices.items()), suffix)
            if not rule.unless or not match.is_excluded(existing_params):
                return match
    return None
