"""1. Backpropagation by hand: every operation returns its value and its backward function.

    y, backward = op(x, w)      y = f(x; w)
    dx = backward(dy)           takes dy = ∂L/∂y, returns dx = ∂L/∂x = (∂y/∂x)ᵀ dy,
                                and adds ∂L/∂w = (∂y/∂w)ᵀ dy to w's gradients

The chain rule is then composition: the gradient passes the operations in reverse order.
Throughout, `dx` is short for ∂L/∂x, the gradient of the loss with respect to x; it has the shape of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Backward = Callable[[Array], Any]
Layer = Callable[[Array], tuple[Array, Backward]]


def identity(dy: Array) -> Array:
    """The backward function of y = x."""
    return dy


def chain(backwards: list[Backward]) -> Backward:
    """The backward function of operations applied in this order: their backward functions, the last one first.

    >>> chain([lambda dy: dy + 1, lambda dy: dy * 10])(2)
    21
    """

    def backward(dy: Array) -> Any:
        for step in reversed(backwards):
            dy = step(dy)
        return dy

    return backward


class Parameters:
    """Parameters by path, relative to one module of the tree, and their accumulated gradients.

    >>> import numpy as np
    >>> w = Parameters({"ffn.up.weight": np.ones((3, 2))})
    >>> up = w / "ffn" / "up"
    >>> up["weight"].shape, "bias" in up
    ((3, 2), False)
    >>> up.add("weight", np.ones((3, 2))); up.add("weight", np.ones((3, 2))); w.gradients["ffn.up.weight"][0]
    array([2., 2.])
    """

    def __init__(self, values: dict[str, Array], gradients: dict[str, Array] | None = None, path: str = "") -> None:
        self.values = values
        self.path = path
        self.gradients: dict[str, Array] = {} if gradients is None else gradients

    def __truediv__(self, name: str) -> Parameters:
        return Parameters(self.values, self.gradients, f"{self.path}{name}.")

    def __getitem__(self, name: str) -> Array:
        return self.values[self.path + name]

    def __contains__(self, name: str) -> bool:
        return self.path + name in self.values

    def add(self, name: str, gradient: Array) -> None:
        """Accumulate a gradient: a weight that is used twice (a tied embedding) gets the sum of both."""
        key = self.path + name
        self.gradients[key] = self.gradients[key] + gradient if key in self.gradients else gradient
