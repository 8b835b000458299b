"""What may stand where: one base for each slot of the tree, so that a part in the wrong place is refused by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from headwater.core.embed import Rows


class Norm(ABC):
    @abstractmethod
    def build(self, d_model: int) -> nn.Module: ...


class Layer(ABC):
    """Stands beside the residual stream, in a branch: attention, a feed-forward layer."""

    @abstractmethod
    def build(self, d_model: int) -> nn.Module: ...


class Layers(ABC):
    """One layer of a stack: branches, in a row or side by side."""

    @abstractmethod
    def build(self, d_model: int) -> nn.Module: ...


class Embedding(ABC):
    @abstractmethod
    def build(self, d_model: int) -> nn.Module: ...


class Head(ABC):
    @abstractmethod
    def build(self, d_model: int) -> nn.Module: ...


class BeforeHead(ABC):
    @abstractmethod
    def build(self, d_model: int, width: int) -> nn.Module: ...


class Pooling(ABC):
    """One state of each row."""

    @abstractmethod
    def pick(self, x: Tensor, rows: Rows) -> Tensor: ...


class Attending(ABC):
    """A kernel: q, k, v -> out."""

    @abstractmethod
    def build(self, scale: float, dropout: float) -> Any: ...


class Placing(ABC):
    """A position. acts: where; shared: whether the layers of a stack have one module of it."""

    acts: ClassVar[str]
    shared: ClassVar[bool] = True

    @abstractmethod
    def build(self, width: int, heads: int = 1) -> Any: ...


class Between(ABC):
    """Stands between encoder and decoder."""

    @abstractmethod
    def build(self) -> nn.Module: ...


class Filling(ABC):
    """How a tensor gets its first values."""

    @abstractmethod
    def fill(self, t: Tensor, draw: Generator) -> None: ...
