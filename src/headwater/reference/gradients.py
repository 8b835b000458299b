"""1. The one idea of this edition: every part returns its value and the way back.

    y, back = part(x, w)        y = f(x; w)
    dx = back(dy)               dy = ∂L/∂y comes in, dx = ∂L/∂x = (∂y/∂x)ᵀ dy goes out,
                                and ∂L/∂w = (∂y/∂w)ᵀ dy is added to w's gradients on the way

The chain rule is then nothing but composition: what went through f and then g comes back through g and then f.
Throughout, `dx` is short for ∂L/∂x, the gradient of the loss with respect to x; it has the shape of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Back = Callable[[Array], Any]
Layer = Callable[[Array], tuple[Array, Back]]


def identity(dy: Array) -> Array:
    """The way back through y = x."""
    return dy


def chain(backs: list[Back]) -> Back:
    """The way back through parts that were passed in this order: the last one first.

    >>> chain([lambda dy: dy + 1, lambda dy: dy * 10])(2)
    21
    """

    def back(dy: Array) -> Any:
        for part in reversed(backs):
            dy = part(dy)
        return dy

    return back


class Parameters:
    """Arrays by path, seen from one place in the tree, and the gradients gathered for them.

    >>> import numpy as np
    >>> w = Parameters({"ffn.up.weight": np.ones((3, 2))})
    >>> up = w / "ffn" / "up"
    >>> up["weight"].shape, "bias" in up
    ((3, 2), False)
    >>> up.add("weight", np.ones((3, 2))); up.add("weight", np.ones((3, 2))); w.gradients["ffn.up.weight"][0]
    array([2., 2.])
    """

    def __init__(self, values: dict[str, Array], gradients: dict[str, Array] | None = None, path: str = "") -> None:
        self.values, self.path = values, path
        self.gradients: dict[str, Array] = {} if gradients is None else gradients

    def __truediv__(self, name: str) -> Parameters:
        return Parameters(self.values, self.gradients, f"{self.path}{name}.")

    def __getitem__(self, name: str) -> Array:
        return self.values[self.path + name]

    def __contains__(self, name: str) -> bool:
        return self.path + name in self.values

    def add(self, name: str, gradient: Array) -> None:
        """Gradients add up: a weight that is used twice (a tied table) learns from both uses."""
        key = self.path + name
        self.gradients[key] = self.gradients[key] + gradient if key in self.gradients else gradient
