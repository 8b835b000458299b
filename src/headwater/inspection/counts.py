"""How many parameters, where, and by which formula: exact, from a skeleton without memory, shared tensors once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from headwater.core.model import Model
from headwater.inspection.formulas import Sizes, Term, sizes_of, term, written

GROUPS = ("embeddings", "encoder", "decoder", "output", "other")


@dataclass(frozen=True)
class Node:
    """One part. A run of equal neighbours is one node: `times` of them, `parameters` of all together, `formula` of one.

    same_as: the home of a tensor that is shared; it is counted there.
    """

    name: str
    path: str
    kind: str
    parameters: int
    formula: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    same_as: str = ""
    times: int = 1
    children: tuple[Node, ...] = ()
    terms: Counter[Term] = field(default_factory=Counter, repr=False, compare=False)

    def shape(self) -> tuple[Any, ...]:
        """What two nodes must have in common to be drawn as one."""
        return self.kind, self.parameters, self.formula, self.shapes, tuple(c.shape() for c in self.children)

    def plain(self) -> dict[str, Any]:
        here = {"name": self.name, "path": self.path, "kind": self.kind, "parameters": self.parameters}
        more = {"formula": self.formula, "shapes": [list(s) for s in self.shapes], "same_as": self.same_as}
        here |= {name: value for name, value in more.items() if value}
        here |= {"times": self.times} if self.times > 1 else {}
        return here | ({"parts": [child.plain() for child in self.children]} if self.children else {})


def skeleton(spec: Model) -> nn.Module:
    return spec.skeleton()


def tree(model: nn.Module) -> Node:
    """The model as nodes; modules without tensors are left out."""
    root = _node(model, "", "", {}, {})
    assert root is not None or not list(model.parameters())
    return root or Node("model", "", type(model).__name__, 0)


def _node(module: nn.Module, name: str, path: str, sizes: Sizes, seen: dict[int, str]) -> Node | None:
    sizes = sizes_of(module, sizes)
    terms: Counter[Term] = Counter()
    total, shapes, same = 0, [], ""
    for own, tensor in module.named_parameters(recurse=False):
        shapes.append(tuple(tensor.shape))
        home = seen.setdefault(id(tensor), path or own)
        if home != (path or own):
            same = home
            continue
        number, factors = term(_named(name, path), tuple(tensor.shape), sizes)
        terms[factors] += number
        total += tensor.numel()
    found = [_node(child, n, f"{path}.{n}" if path else n, sizes, seen) for n, child in module.named_children()]
    children = _folded([node for node in found if node])
    for child in children:
        total += child.parameters
        for factors, number in child.terms.items():
            terms[factors] += number * child.times
    if not (shapes or children):
        return None
    lone = len(children) == 1 and not shapes and children[0].times > 1 and isinstance(module, nn.ModuleList)
    if lone:  # a list of equal layers is drawn as one line: layers ×12
        return replace(children[0], name=name)
    if path and len(children) == 1 and not shapes:
        return replace(children[0], name=f"{name}.{children[0].name}")
    kind, made = type(module).__name__, tuple(children)
    return Node(name or "model", path, kind, total, written(terms), tuple(shapes), same, 1, made, terms)


def _named(name: str, path: str) -> str:
    """The name formulas know a module by: a head's output is as wide as its table, a stack's positions are buckets."""
    return "tokens" if path == "head.out" else "buckets" if ".positions." in path else name


def _folded(nodes: list[Node]) -> list[Node]:
    """Neighbours in a list (0, 1, 2 …) that are alike become one."""
    made: list[Node] = []
    for node in nodes:
        alike = made and node.name.isdigit() and made[-1].name[:1].isdigit() and _one(made[-1]).shape() == node.shape()
        if not alike:
            made.append(node)
            continue
        last, first = made[-1], made[-1].name.partition("…")[0]
        name, total = f"{first}…{node.name}", last.parameters + node.parameters
        made[-1] = replace(last, name=name, times=last.times + 1, parameters=total)
    return made


def _one(node: Node) -> Node:
    return replace(node, parameters=node.parameters // node.times)


def groups(model: nn.Module) -> dict[str, int]:
    """Parameters by place: embeddings (with their positions), encoder, decoder, output; other for the rest."""
    found = dict.fromkeys(GROUPS, 0)
    for path, tensor in model.named_parameters():  # a shared tensor comes once, under its home
        first, _, rest = path.partition(".")
        group = "output" if first == "head" else first if first in ("encoder", "decoder") else "other"
        found["embeddings" if rest.startswith("embed.") else group] += tensor.numel()
    return {name: number for name, number in found.items() if number}


def total(model: nn.Module) -> int:
    return sum(tensor.numel() for tensor in model.parameters())
