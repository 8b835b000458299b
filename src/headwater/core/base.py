"""Base classes of the specs, one for each type of component, so that a spec in the wrong field is refused by name.

And the checks that specs share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from torch import nn

from headwater.errors import BadSetting, nearest
from headwater.i18n import Message, _
from headwater.parts import must

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from headwater.core.embeddings import InputEmbedding, ModelInputs
    from headwater.core.kernels import Kernel
    from headwater.core.masks import MaskRule
    from headwater.core.positions import PositionEncoding


Choice = TypeVar("Choice")


class NormSpec(ABC):
    """A normalization layer: a module called as norm(x), or as norm(x, y, p) = norm(x + dropout(y, p))."""

    @abstractmethod
    def build(self, d_model: int) -> nn.Module: ...


FEATURES: dict[str, Message] = {  # what an attention may be unable to honour
    "bias": _("a position encoding that adds a bias to the scores"),
    "cache": _("a KV cache"),
    "packing": _("packed documents"),
    "padding": _("padding"),
    "left_padding": _("padding on the left"),
}


class BranchLayerSpec(ABC):
    """A layer in a residual branch: attention or a feed-forward layer.

    unsupported: what it cannot honour, by the names in FEATURES, with what to do instead.
    """

    @property
    def unsupported(self) -> Mapping[str, Message]:
        return {}

    @abstractmethod
    def build(self, d_model: int) -> nn.Module: ...


class BlockSpec(ABC):
    """One layer of a stack: residual branches, in sequence or in parallel."""

    @abstractmethod
    def build(self, d_model: int) -> nn.Module: ...


class EmbeddingSpec(ABC):
    """The input embedding of a stack: of token ids, image patches, mel frames, several codebooks at once."""

    @abstractmethod
    def build(self, d_model: int) -> InputEmbedding: ...


class HeadSpec(ABC):
    """A head on the last hidden states: logits, a pooled vector, the states themselves."""

    @abstractmethod
    def build(self, d_model: int) -> nn.Module: ...


class HeadTransformSpec(ABC):
    """What a language-model head applies before the projection to the vocabulary."""

    @abstractmethod
    def build(self, d_model: int, width: int) -> nn.Module: ...


class PoolingSpec(ABC):
    """Pooling: hidden states [B, Q, D] to one vector per row [B, D]."""

    @abstractmethod
    def pool(self, x: Tensor, inputs: ModelInputs) -> Tensor: ...


@dataclass(frozen=True)
class KernelConfig:
    """What an attention kernel is built for: the sizes, mask rule and position encoding of its attention layer.

    name: of the kind of layer, for messages. is_cross: keys and values come from the encoder output.
    """

    name: str
    heads: int
    head_dim: int
    scale: float
    dropout: float
    mask: MaskRule
    position: PositionSpec
    is_cross: bool = False


class KernelSpec(ABC):
    """An attention kernel: q, k, v -> output. build() refuses a mask rule or a dropout that it cannot honour.

    unsupported: what else it cannot honour, by the names in FEATURES, with what to do instead.
    """

    unsupported: ClassVar[Mapping[str, Message]] = {}

    @abstractmethod
    def build(self, config: KernelConfig) -> Kernel: ...

    def equivalent_keys(self, keys: int, head_dim: int) -> int:
        """The number of keys of softmax attention that would cost as much per query."""
        return keys

    def state_elements(self, head_dim: int, v_head_dim: int) -> int | None:
        """Elements of the state of a recurrent kernel, for one key/value head; None: it keeps keys and values."""
        return None


class PositionSpec(ABC):
    """A position encoding.

    applies_to: "embedding", "attention" or "none". shared: whether equal layers of a stack use one module.
    """

    applies_to: ClassVar[str]
    shared: ClassVar[bool] = True

    @property
    def max_positions(self) -> int | None:
        """The number of positions that can be encoded; None: no limit."""
        return None

    @abstractmethod
    def build(self, width: int, heads: int = 1) -> PositionEncoding: ...


class BridgeSpec(ABC):
    """What the encoder output passes through before the decoder reads it."""

    @abstractmethod
    def build(self) -> nn.Module: ...

    def output_width(self, width: int) -> int:
        """The width of what the decoder reads, from that of the encoder output."""
        return width


class InitSpec(ABC):
    """Weight initialization: how a tensor gets its initial values."""

    @abstractmethod
    def fill(self, tensor: Tensor, generator: Generator) -> None: ...


def check_positive(spec: object, field: str, hint: str) -> None:
    """Refuse a size below 1; None is a size that is left out."""
    value = getattr(spec, field)
    must(value is None or value >= 1, spec, _("{name} must be at least 1", name=field), value, hint)


def check_dropout(spec: object) -> None:
    """Refuse a dropout rate outside of 0 <= rate < 1."""
    rate = spec.dropout  # type: ignore[attr-defined]
    must(0 <= rate < 1, spec, _("dropout must be from 0 up to 1"), rate, _("0.1 is usual"))


def choose(name: str, known: Mapping[str, Choice], field: str) -> Choice:
    """The entry of that name, or a fault that names the known ones."""
    if name not in known:
        raise BadSetting(
            _(
                "{field} must be one of {known}, got {name!r}; {nearest}",
                field=field,
                known=", ".join(known),
                name=name,
                nearest=nearest(name, known),
            )
        )
    return known[name]
