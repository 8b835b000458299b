"""Parser and evaluator of the formulas of the walkthrough; it knows the grammar, and no model."""

from __future__ import annotations

import math
import re

import numpy as np

TOKEN = re.compile(r"\s*(table\[id\]|(?:(?![ᵀ²])[^\W\d])(?:(?![ᵀ²])\w)*|\d+(?:\.\d+)?(?:e[+-]?\d+)?|[=+−·/()√ᵀ²,∞])")


def _softmax(x: np.ndarray) -> np.ndarray:
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x)


def rot(x: np.ndarray, rotary_dims: int) -> np.ndarray:
    half = rotary_dims // 2
    return np.concatenate((-x[:, half:rotary_dims], x[:, :half], np.zeros_like(x[:, rotary_dims:])), -1)


FUNCTIONS = {
    "mean": lambda x: x.mean(-1, keepdims=True),
    "var": lambda x: x.var(-1, keepdims=True),
    "softmax": _softmax,
    "exp": np.exp,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "gelu": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


class Formula:
    """name = expression, read from left to right; products bind tighter than sums, and from the left."""

    def __init__(self, text: str, rotary_dims: int = 0) -> None:
        self.rotary_dims, self.at = rotary_dims, 0
        self.tokens, end = [], 0
        while end < len(text.rstrip()):
            result = TOKEN.match(text, end)
            assert result, f"not in the grammar: {text[end:]!r}"
            self.tokens.append(result[1])
            end = result.end()
        self.result = self.take()
        assert self.take() == "="

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def value(self, known: dict[str, np.ndarray]) -> np.ndarray:
        self.known, self.at = known, 2
        built = self.sum()
        if self.next() == "where":  # x where M = 1, else −∞
            mask = self.tokens[self.at + 1]
            assert self.tokens[self.at + 2 :] == ["=", "1", ",", "else", "−", "∞"]
            return np.where(known[mask] == 1, built, -np.inf)
        assert self.at == len(self.tokens), f"unread: {self.tokens[self.at :]}"
        return built

    def sum(self) -> np.ndarray:
        built = self.product()
        while self.next() in ("+", "−"):
            built = built + self.product() if self.take() == "+" else built - self.product()
        return built

    def product(self) -> np.ndarray:
        built = self.factor()
        while (sign := self.next()) and sign not in ("+", "−", ")", "where", ",", "="):
            if sign == "·":
                self.take()
                built = built * self.factor()
            elif sign == "/":
                self.take()
                built = built / self.factor()
            else:
                built = built @ self.factor()
        return built

    def factor(self) -> np.ndarray:
        token = self.take()
        if token == "(":
            built = self.sum()
            assert self.take() == ")"
        elif token == "√":
            built = np.sqrt(self.factor())
        elif self.next() == "(":
            self.take()
            built = self.sum()
            assert self.take() == ")"
            built = rot(built, self.rotary_dims) if token == "rot" else FUNCTIONS[token](built)
        elif token[0].isdigit():
            built = np.array(float(token))
        else:
            built = self.known[token]
        while self.next() in ("ᵀ", "²"):
            built = built.T if self.take() == "ᵀ" else built**2
        return built
