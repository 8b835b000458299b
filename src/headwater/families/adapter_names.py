"""The public names of a tuned model's layers: which module of a transformers model each of our linear layers is in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from headwater.core import NoHead, Transformer
from headwater.errors import BadSetting
from headwater.families.export import FamilyMismatch, config_matches_spec, match_family
from headwater.families.hf_folder import LoadedModel, transform_sizes
from headwater.families.registry import FAMILIES
from headwater.i18n import _
from headwater.tuning.embedding import embedding_paths
from headwater.tuning.paths import linear_paths
from headwater.weights.name_map import NameMap
from headwater.weights.name_rules import RuleMatch
from headwater.weights.transforms import Transforms

HEADLESS = ("hidden_states", "pooler")  # transformers' models without a head, whose names have no prefix


class PublicModule(NamedTuple):
    """A module of a transformers model, and the linear layers of ours that it holds: several, where it is q, k, v."""

    name: str
    paths: tuple[str, ...]
    rows: Transforms  # from its rows to theirs


@dataclass(frozen=True)
class PublicNames:
    """The names of a family for one model. headless: its names are written without the prefix of the body."""

    model_type: str
    names: NameMap
    sizes: Mapping[str, int]
    headless: bool

    @classmethod
    def of(cls, loaded: LoadedModel) -> PublicNames:
        """The names of the family that a model is of, or that expresses it without rewriting its weights."""
        model_type = str(loaded.config.get("model_type"))
        head_type = loaded.head
        if model_type not in FAMILIES or not config_matches_spec(loaded):
            match = match_family(loaded.spec)
            if isinstance(match, FamilyMismatch):  # a head of ours on a public body
                match = match_family(replace(loaded.spec, head=NoHead(), tied=()))
            if isinstance(match, FamilyMismatch) or match.rewrites:
                raise BadSetting(
                    _(
                        "no family of transformers has this model, so an adapter of it has no public layout; "
                        "use the layout headwater"
                    )
                )
            model_type = match.family
            head_type = match.head_type
        family = FAMILIES[model_type]
        names = family.body_names + family.head_names[head_type]
        return cls(model_type, names, transform_sizes(loaded.spec), head_type in HEADLESS)

    def module_of(self, path: str) -> PublicModule:
        """The module that holds one of our linear layers."""
        match = self.names.match_param(f"{path}.weight")
        if match is None:
            raise BadSetting(_("{path} has no public name in {model_type}", path=path, model_type=self.model_type))
        return self._module(match)

    def modules(self, model: Transformer) -> list[PublicModule]:
        """The modules of all linear layers of a model, each once."""
        return list({module.name: module for module in map(self.module_of, linear_paths(model))}.values())

    def tables(self, model: Transformer) -> dict[str, str]:
        """Our paths of the tables of tokens by public name: one for each stack, also where they share weights."""
        paths = embedding_paths(model)
        weights = {f"{path}.weight" for path in paths}
        matches = {path: self.names.match_param(f"{path}.weight", weights) for path in paths}
        return {self._module(match).name: path for path, match in matches.items() if match is not None}

    def find_module(self, name: str) -> PublicModule | None:
        """The module of a public name, with or without the prefix of the body."""
        match = self.names.match_checkpoint(f"{name}.weight")
        return None if match is None else self._module(match)

    def paths_of(self, name: str) -> tuple[str, ...]:
        """Our paths in the module of a public name; none where it is unknown."""
        module = self.find_module(name)
        return () if module is None else module.paths

    def _module(self, match: RuleMatch) -> PublicModule:
        pattern = match.rule.checkpoint
        if self.headless and match.rule.checkpoint_variants:
            pattern = match.rule.checkpoint_variants[-1]
        name = (pattern.format(dict(match.indices)) + match.suffix).removesuffix(".weight")
        paths = tuple(path.removesuffix(".weight") for path in match.param_names())
        return PublicModule(name, paths, match.rule.transforms.of_rows())

    def parameter_name(self, path: str) -> str:
        """The public name of one of our parameters that is stored as it is."""
        match = self.names.match_param(path)
        if match is None or len(match.rule.params) != 1 or match.rule.transforms.steps:
            raise BadSetting(_("{path} has no public name in {model_type}", path=path, model_type=self.model_type))
        return match.checkpoint_name()

    def find_parameter(self, name: str) -> str | None:
        """Our parameter of a public name; None where it is unknown, or not stored as it is."""
        match = self.names.match_checkpoint(name)
        if match is None or len(match.rule.params) != 1 or match.rule.transforms.steps:
            return None
        return match.param_names()[0]

    def split_rows(self, module: PublicModule, tensor: Tensor) -> list[Tensor] | None:
        """The rows [out, …] of a public module for each of our layers in it; None where they do not divide."""
        return module.rows.forward(tensor, len(module.paths), self.sizes)

    def join_rows(self, module: PublicModule, pieces: Sequence[Tensor]) -> Tensor:
        """The inverse of split_rows."""
        return module.rows.inverse(list(pieces), self.sizes)


def group_by_module(names: PublicNames, paths: Sequence[str]) -> dict[PublicModule, list[str]]:
    """Paths of ours by the public module that holds them."""
    groups: dict[PublicModule, list[str]] = defaultdict(list)
    for path in paths:
        groups[names.module_of(path)].append(path)
    return dict(groups)
