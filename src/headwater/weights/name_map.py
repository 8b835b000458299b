"""Map checkpoint tensor names to parameter names and back, with a two-column table; every tensor is accounted for.

    BODY_NAMES = name_map('''
        [transformer.]wte                 decoder.embed.tokens
        [transformer.]h.{i}.ln_1          decoder.layers.{i}.self_attn_norm
        [transformer.]h.{i}.attn.c_attn   decoder.layers.{i}.self_attn.{q,k,v} : transpose, split
        [transformer.]h.{i}.attn.bias     -
        lm_head                           head.out
        .gamma = .weight
    ''')

One line is one rule: the name in the checkpoint, the parameter's name, and after a colon transforms (transforms.py).

    {i}, {j}       an index
    {q,k,v}        several parameters in one tensor
    [prefix]       optional when loading, always written
    -              ignored when loading, never written
    .old = .new    an old suffix, and the one it is loaded as
    : unless x     not for a model that has the parameter x; a later rule applies instead

A name matches itself, and itself with `.weight` or `.bias` appended. A rule that names the tensor in full has priority;
otherwise the first match does.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.errors import BadFile, BadSetting
from headwater.i18n import _
from headwater.io.files import quote
from headwater.weights.name_rules import NameRule, RuleMatch, find_rule, index_rules, parse_rule
from headwater.weights.safetensors import LazyStateDict, meta_tensor


def name_map(text: str) -> NameMap:
    """Parse a name map (for the syntax, see the top of this file)."""
    rules = []
    suffix_aliases = {}
    for line in filter(None, (line.split("#")[0].strip() for line in text.splitlines())):
        if " = " in line:
            old, new = line.split(" = ")
            suffix_aliases[old.strip()] = new.strip()
        else:
            rules.append(parse_rule(line))
    return NameMap(rules, suffix_aliases)


class NameMap:
    """A parsed name map. load() is a checkpoint under parameter names, export() the parameters under checkpoint names.

    Both are lazy: no tensor is copied.
    """

    def __init__(self, rules: Iterable[NameRule], suffix_aliases: Mapping[str, str]):
        self.rules = tuple(rules)
        self.suffix_aliases = dict(suffix_aliases)
        self._checkpoint_index = index_rules(
            (pattern, rule) for rule in self.rules for pattern in (rule.checkpoint, *rule.checkpoint_variants)
        )
        self._param_index = index_rules((pattern, rule) for rule in self.rules for pattern in rule.params)

    def __add__(self, other: NameMap) -> NameMap:
        """The rules of both maps, in order: a family's body, then its head."""
        return NameMap(self.rules + other.rules, {**self.suffix_aliases, **other.suffix_aliases})

    def load(
        self,
        checkpoint: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        *,
        tied: Mapping[str, str] | None = None,
        ignored_prefixes: tuple[str, ...] = (),
        **sizes: int,
    ) -> LazyStateDict:
        """A checkpoint under parameter names, every name and shape checked; a BadFile lists all that do not match.

        params            the expected parameters by name; meta tensors will do
        tied              second name -> first name of a shared tensor; the file may hold both if they are equal
        ignored_prefixes  prefixes of parameters that the file may hold though the model lacks them: an unused head
        sizes             the sizes that transforms name after `by`: heads=12, kv_heads=4

        No tensor is read until it is used, except where the file holds one twice and both must be compared.
        """
        return _LoadedTensors(self, checkpoint, params, tied or {}, ignored_prefixes, self._check_sizes(sizes))

    def export(self, params: Mapping[str, Tensor], **sizes: int) -> LazyStateDict:
        """Parameters under checkpoint names, each transformed on access. A parameter without a rule is a BadFile."""
        return _ExportedTensors(self, params, self._check_sizes(sizes))

    def match_checkpoint(self, name: str, existing_params: Container[str] = ()) -> RuleMatch | None:
        """The rule for a tensor of a checkpoint; one that is not for a model with these parameters comes last."""
        for old, new in self.suffix_aliases.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        return find_rule(self._checkpoint_index, name, existing_params) or find_rule(self._checkpoint_index, name)

    def match_param(self, name: str, existing_params: Container[str] = ()) -> RuleMatch | None:
        """The rule for a parameter of a model."""
        return find_rule(self._param_index, name, existing_params)

    def _check_sizes(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        required = set().union(*(rule.transforms.required_sizes() for rule in self.rules))
        if missing := required - set(sizes):
            raise BadSetting(
                _(
                    "this name map needs the sizes {missing}, got {sizes}; pass them as arguments",
                    missing=sorted(missing),
                    sizes=sorted(sizes),
                )
            )
        return sizes


class TensorSource(NamedTuple):
    """The source of a parameter: the checkpoint's tensor name, the rule that matched, and the piece of the tensor."""

    checkpoint_name: str
    match: RuleMatch
    piece_index: int


class _LoadedTensors(LazyStateDict):
    """A checkpoint under parameter names."""

    def __init__(
        self,
        names: NameMap,
        checkpoint: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        tied: Mapping[str, str],
        ignored_prefixes: tuple[str, ...],
        sizes: Mapping[str, int],
    ):
        self.where = getattr(checkpoint, "where", "the file")
        self._checkpoint = checkpoint
        self._sizes = sizes

        # Which checkpoint tensors each parameter comes from.
        sources: dict[str, list[TensorSource]] = {name: [] for name in params}
        unknown = []
        for name in checkpoint:
            match = names.match_checkpoint(name, params)
            targets = [] if match is None else [tied.get(param, param) for param in match.param_names()]
            if match is None or any(t not in sources and not t.startswith(ignored_prefixes or "\0") for t in targets):
                unknown.append(name)
                continue
            for piece_index, target in enumerate(targets):
                sources.get(target, []).append(TensorSource(name, match, piece_index))

        # Every name and shape must match before a tensor is read.
        missing = [name for name, candidates in sources.items() if not candidates]
        mismatches = [self._mismatch(name, s, params[name]) for name, candidates in sources.items() for s in candidates]
        self._raise_mismatches(missing, unknown, [text for text in mismatches if text])
        self._source_of = {name: self._check_duplicates(name, candidates) for name, candidates in sources.items()}

    def __getitem__(self, name: str) -> Tensor:
        source = self._source_of[name]
        return self._transformed(source, self._checkpoint[source.checkpoint_name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._source_of)

    def __len__(self) -> int:
        return len(self._source_of)

    def meta_tensor(self, name: str) -> Tensor:
        source = self._source_of[name]
        return self._transformed(source, meta_tensor(self._checkpoint, source.checkpoint_name))

    def release(self, name: str) -> None:
        if isinstance(self._checkpoint, LazyStateDict):
            self._checkpoint.release(self._source_of[name].checkpoint_name)

    def _transformed(self, source: TensorSource, tensor: Tensor) -> Tensor:
        pieces = source.match.rule.transforms.forward(tensor, len(source.match.rule.params), self._sizes)
        assert pieces is not None, "shapes were checked when the file was opened"
        return pieces[source.piece_index]

    def _mismatch(self, name: str, source: TensorSource, param: Tensor) -> str:
        """The difference of a checkpoint tensor from its parameter in shape or dtype, as text; "" if there is none."""
        stored = meta_tensor(self._checkpoint, source.checkpoint_name)
        pieces = source.match.rule.transforms.forward(stored, len(source.match.rule.params), self._sizes)
        shape = stored.shape if pieces is None else pieces[source.piece_index].shape
        if pieces is None or shape != param.shape:
            return f"{quote(source.checkpoint_name)} gives {name} {list(shape)}, must be {list(param.shape)}"
        if stored.is_floating_point() != param.is_floating_point():
            return f"{quote(source.checkpoint_name)} is {stored.dtype}, must be {param.dtype}".replace("torch.", "")
        return ""

    def _raise_mismatches(self, missing: list[str], unknown: list[str], mismatched: list[str]) -> None:
        """Raise one BadFile that names what is missing, unknown or of another shape."""
        problems = []
        if missing:
            problems.append(f"{len(missing)} missing: {format_names(missing)}")
        if unknown:
            problems.append(f"{len(unknown)} not known: {format_names(unknown)}")
        if mismatched:
            others = f" and {len(mismatched) - 2} more" if len(mismatched) > 2 else ""
            problems.append(f"{len(mismatched)} of the wrong shape or kind: {'; '.join(mismatched[:2])}{others}")
        if problems:
            raise BadFile(
                _(
                    "{where}: its tensors do not fit this model; {problems}",
                    where=self.where,
                    problems=". ".join(problems),
                )
            )

    def _check_duplicates(self, name: str, sources: list[TensorSource]) -> TensorSource:
        """The source of a parameter; where the file holds several, as for tied weights, they must be equal."""
        first, *others = sources
        for other in others:
            first_tensor = self._transformed(first, self._checkpoint[first.checkpoint_name])
            other_tensor = self._transformed(other, self._checkpoint[other.checkpoint_name])
            if not torch.equal(first_tensor, other_tensor):
                raise BadFile(
                    _(
                        "{where}: {first} and {second} both mean {name} and must be equal but differ; the "
                        "weights are not tied as the model says",
                        where=self.where,
                        first=quote(first.checkpoint_name),
                        second=quote(other.checkpoint_name),
                        name=name,
                    )
                )
        return first


class _ExportedTensors(LazyStateDict):
    """The parameters of a model under checkpoint names."""

    def __init__(self, names: NameMap, params: Mapping[str, Tensor], sizes: Mapping[str, int]):
        self.where = "the model"
        self._params = params
        self._sizes = sizes
        matches = [names.match_param(name, params) for name in params]
        self._matches = {match.checkpoint_name(): match for match in matches if match is not None}
        covered = {name for match in self._matches.values() for name in match.param_names()}
        unknown = [name for name in params if name not in covered]
        missing = [name for name in covered if name not in params]
        if unknown or missing:
            raise BadFile(
                _(
                    "the model cannot be written in this layout: {num_unknown} tensors have no public name "
                    "({unknown}), {num_missing} pieces are missing ({missing})",
                    num_unknown=len(unknown),
                    unknown=format_names(unknown),
                    num_missing=len(missing),
                    missing=format_names(missing),
                )
            )

    def __getitem__(self, name: str) -> Tensor:
        match = self._matches[name]
        return match.rule.transforms.inverse([self._params[param] for param in match.param_names()], self._sizes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._matches)

    def __len__(self) -> int:
        return len(self._matches)

    def meta_tensor(self, name: str) -> Tensor:
        match = self._matches[name]
        pieces = [meta_tensor(self._params, param) for param in match.param_names()]
        return match.rule.transforms.inverse(pieces, self._sizes)


def format_names(names: Iterable[str], max_names: int = 4) -> str:
    """The first few names, and how many more.

    >>> format_names(["a", "b", "c"], max_names=1)
    "'a' and 2 more"
    """
    names = list(names)
    others = _(" and {count} more", count=len(names) - max_names) if len(names) > max_names else ""
    return ", ".join(quote(name, 80) for name in names[:max_names]) + others
