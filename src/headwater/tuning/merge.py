"""Merge adapters into the weights of their base, and take them out again; with the largest change of a logit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from headwater.core import Transformer
from headwater.core.modules import eval_mode
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.quantization.layers import replace_module
from headwater.tuning.base import DEFAULT_NAME, ChangedModule, Tuning, method_names, tuning_of
from headwater.tuning.embedding import TunedEmbedding
from headwater.tuning.hooks import StackChanges
from headwater.tuning.linear import TunedLinear

TiedPairs = tuple[tuple[str, str], ...]
MERGEABLE = (TunedLinear, TunedEmbedding)
PROBE_LENGTH = 8


@dataclass
class Merged:
    """The result of merge(). largest_change: of a logit, by rounding; undo() takes the adapter out again.

    Until undo() is called or this object is gone, the weights from before are kept beside the merged ones.
    """

    model: Transformer
    name: str
    largest_change: float
    _replaced: dict[str, TunedLinear | TunedEmbedding] = field(repr=False)
    _tied: TiedPairs = field(repr=False)
    _tuning: Tuning = field(repr=False)

    @property
    def paths(self) -> list[str]:
        """The layers that have new weights."""
        return list(self._replaced)

    def undo(self) -> None:
        """Unmerge: the model has its own weights again, bit for bit, and the adapter beside them."""
        for path, layer in self._replaced.items():
            replace_module(self.model, path, layer)
        self.model.spec = replace(self.model.spec, tied=self._tied)
        self.model.__dict__["tuning"] = self._tuning


def can_merge(model: nn.Module, name: str = DEFAULT_NAME) -> bool:
    """Whether an adapter changes linear layers and tables of tokens alone."""
    changed = [module for module in model.modules() if isinstance(module, ChangedModule) and name in module.changes]
    adds_tokens = any(isinstance(module, StackChanges) and name in module for module in model.modules())
    return not adds_tokens and all(isinstance(module, MERGEABLE) for module in changed)


@torch.no_grad()
def merge(model: Transformer, name: str = DEFAULT_NAME) -> Merged:
    """Merge an adapter into the weights: one plain layer in place of each that it changed.

    A table that other layers are tied to is then one of its own: these keep the weights of the base.
    A quantized layer becomes one in float32: in 4 bits most of what was learned would be rounded away.
    """
    tuning = tuning_of(model)
    if tuning is None:
        raise BadSetting(_("merge: the model has no adapter; load one, or call headwater.tune"))
    tuning.check_name(name)
    if len(tuning.adapters) > 1:
        raise BadSetting(_("merge: the model has several adapters, and one can be merged; load it with that one alone"))
    if not can_merge(model, name):
        raise BadSetting(
            _(
                "merge: {methods} cannot become weights of the base; keep the adapter beside it",
                methods=method_names(tuning.adapters[name]),
            )
        )

    before = probe(model)
    layers = {path: module for path, module in model.named_modules() if isinstance(module, MERGEABLE)}
    tied = model.spec.tied
    for path, layer in layers.items():
        replace_module(model, path, layer.merged(name))
    model.spec = replace(model.spec, tied=tuple(pair for pair in tied if not set(pair) & set(layers)))
    del model.__dict__["tuning"]
    change = float((probe(model) - before).abs().max())
    return Merged(model, name, change, layers, tied, tuning)


def probe(model: Transformer) -> Tensor:
    """The outputs of a model for two rows of random tokens, images or sounds."""
    longest = model.spec.max_positions
    length = PROBE_LENGTH if longest is None else min(PROBE_LENGTH, longest)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = model.output_stack.embed.random_input(2, length, generator).to(device)
    source = {}
    if model.encoder is not None and model.decoder is not None:
        source = {"source": model.encoder.embed.random_input(2, length, generator).to(device)}
    with eval_mode(model):
        return model(ids, **source)
