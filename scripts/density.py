"""Code density by package: lines with more than one idea, vague names, and the fraction of comment lines.

    python scripts/density.py              a table of all packages
    python scripts/density.py data text    and every such line and name of these packages

A line is dense if it assigns several values (`a, b = x, y` or `a = b = x`), has more than one conditional expression
or a nested one, has several statements, or assigns inside a comprehension (`:=`). A swap (`a, b = b, a`) and the
unpacking of one value (`a, b = f()`) are each one idea. A vague name is a variable or parameter such as found, made
or given: it describes what happened to a value, not what it is.
"""

from __future__ import annotations

import ast
import collections
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "headwater"
VAGUE_WORDS = """found made given asked said says told heard shown held came gone whole thing room
mine least most began own chance share shares together"""
VAGUE_NAMES = frozenset(VAGUE_WORDS.split())
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class DenseLine(NamedTuple):
    line: int
    reason: str


def dense_lines(source: str) -> list[DenseLine]:
    """The dense lines of a source file, in order."""
    tree = ast.parse(source)
    lines = {*_several_values(tree), *_several_conditionals(tree), *_walrus_comprehensions(tree)}
    return sorted(lines | set(_several_statements(tree)))


def _several_values(tree: ast.Module) -> Iterator[DenseLine]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (len(node.targets) > 1 or _assigns_unrelated(node)):
            yield DenseLine(node.lineno, "assigns several values")


def _assigns_unrelated(node: ast.Assign) -> bool:
    """Whether a tuple of values is assigned to a tuple of names, none of which is read in it (a swap reads them)."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    assigned = {ast.unparse(element) for element in target.elts}
    read = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.expr)}
    return not assigned & read


def _several_conditionals(tree: ast.Module) -> Iterator[DenseLine]:
    conditionals = [node for node in ast.walk(tree) if isinstance(node, ast.IfExp)]
    count_by_line = collections.Counter(node.lineno for node in conditionals)
    for node in conditionals:
        nested = any(isinstance(part, ast.IfExp) for part in ast.walk(node) if part is not node)
        if nested or count_by_line[node.lineno] > 1:
            yield DenseLine(node.lineno, "has several conditional expressions")


def _walrus_comprehensions(tree: ast.Module) -> Iterator[DenseLine]:
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS) and any(isinstance(part, ast.NamedExpr) for part in ast.walk(node)):
            yield DenseLine(node.lineno, "assigns inside a comprehension")


def _several_statements(tree: ast.Module) -> Iterator[DenseLine]:
    """Statements after a semicolon or a colon; `def f(): ...`, the form of a stub, is one statement."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    stubs = {id(node.body[0]) for node in statements if isinstance(node, ast.FunctionDef) and _is_stub(node)}
    count_by_line = collections.Counter(node.lineno for node in statements if id(node) not in stubs)
    for line, count in count_by_line.items():
        if count > 1:
            yield DenseLine(line, "has several statements")


def _is_stub(function: ast.FunctionDef) -> bool:
    body = function.body[0]
    return isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant) and body.value.value is ...


def vague_names(source: str) -> list[tuple[int, str]]:
    """(line, name) of every variable and parameter with a vague name."""
    bound = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.append((node.lineno, node.id))
        elif isinstance(node, ast.arg):
            bound.append((node.lineno, node.arg))
    return sorted((line, name) for line, name in bound if name in VAGUE_NAMES)


def package_of(path: Path) -> str:
    """The package of a source file: core, data, …; for a top-level module its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def count_dense_lines() -> dict[str, int]:
    """The number of dense lines of each package."""
    counts: collections.Counter[str] = collections.Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        counts[package_of(path)] += len(dense_lines(path.read_text(encoding="utf-8")))
    return dict(counts)


def count_vague_names() -> dict[str, int]:
    """The number of vague names of each package."""
    counts: collections.Counter[str] = collections.Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        counts[package_of(path)] += len(vague_names(path.read_text(encoding="utf-8")))
    return dict(counts)


def comment_fractions() -> dict[str, float]:
    """Lines that are or end in a comment, as a fraction of the lines of code of each package."""
    comments: collections.Counter[str] = collections.Counter()
    lines: collections.Counter[str] = collections.Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            lines[package_of(path)] += bool(line.strip())
            comments[package_of(path)] += line.lstrip().startswith("# ") or "  # " in line
    return {package: comments[package] / lines[package] for package in lines}


def main(packages: list[str]) -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        if package_of(path) in packages:
            source = path.read_text(encoding="utf-8")
            for line, reason in dense_lines(source):
                print(f"{path.relative_to(PACKAGE)}:{line}: {reason}")
            for line, name in vague_names(source):
                print(f"{path.relative_to(PACKAGE)}:{line}: {name} is a vague name")
    fractions = comment_fractions()
    vague = count_vague_names()
    print(f"{'package':<14}{'dense lines':>12}{'vague names':>12}{'comments':>10}")
    for package, count in count_dense_lines().items():
        print(f"{package:<14}{count:>12}{vague[package]:>12}{fractions[package]:>10.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
