"""Who may see whom, computed slowly and separately, token by token: the laws compare the core with it."""

from __future__ import annotations

from typing import Any

from headwater import core as hw


def allows(rule: Any, q: int, k: int) -> bool:
    """The rules as a reader of the manual would state them."""
    if rule == hw.Bidirectional():
        return True
    if rule == hw.Causal():
        return k <= q
    if isinstance(rule, hw.SlidingWindow):
        return q - rule.size < k <= q
    if isinstance(rule, hw.LocalWindow):
        return q - rule.size <= k <= q + rule.size
    assert isinstance(rule, hw.And), rule
    return allows(rule.first, q, k) and allows(rule.second, q, k)


def visible(stack: hw.Stack, real: list[bool], documents: list[int] | None) -> list[list[bool]]:
    """[Q][S] which embedded tokens can reach each answer through all layers of a stack."""
    length = len(real)
    documents = documents or [1] * length
    reach = [[q == k for k in range(length)] for q in range(length)]  # the residual stream carries each token itself
    for index in stack.order or range(len(stack.layers)):
        rules = [branch.layer.mask for branch in stack.layers[index].branches if branch.role == "self_attn"]
        for rule in rules:
            step = [[_one(rule, real, documents, q, k) for k in range(length)] for q in range(length)]
            reach = [
                [reach[q][k] or any(step[q][m] and reach[m][k] for m in range(length)) for k in range(length)]
                for q in range(length)
            ]
    return reach


def _one(rule: Any, real: list[bool], documents: list[int], q: int, k: int) -> bool:
    """Places are counted over the real tokens before, or within a document over all of its tokens."""
    packed = len(set(documents)) > 1
    place = [documents[:n].count(documents[n]) if packed else max(sum(real[: n + 1]) - 1, 0) for n in (q, k)]
    return real[k] and documents[q] == documents[k] and allows(rule, *place)
