"""The catalogue of Chinese messages, src/headwater/locale/zh.po, kept in step with the messages in the code.

    python scripts/messages.py            list the messages without a translation and those the code no longer has
                                          (exit 1 if there are any)
    python scripts/messages.py --write    add the new messages with an empty translation, remove the old ones

A message is a string that reaches a Fault, a note, a finding or say(text). An f-string becomes a template: the first
expression in it is the hole {0}, the next different one {1}, and so on. Text that reaches a message through a variable,
an argument or a function's return value is followed to where it is written.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headwater"
CATALOGUE = PACKAGE / "locale" / "zh.po"
HOLE = re.compile(r"\{\d+\}")
CHINESE = re.compile("[\u4e00-\u9fff]")

# Calls whose arguments are shown to a user: the name of the function -> which arguments (None: all of them).
SHOWN_ARGUMENTS: dict[str, tuple[int, ...] | None] = {
    "Noted": (1,),
    "Finding": (1, 2),
    "Line": (2,),
    "Encoding": (2,),
    "failed": (1,),
    "Known": (3,),
    "Drawn": (2,),
    "leaf": (1,),
    "share": (1,),
}
# Functions whose return value is shown to a user, by file.
SHOWN_RETURNS: dict[str, tuple[str, ...]] = {
    "data/look.py": ("_say_encoding", "_first_problem"),
    "data/reading/problems.py": ("lines",),
    "families/old_text.py": ("public_tokenizer",),
    "inspection/scores.py": ("loss",),
    "inspection/surprise.py": ("_before", "_hidden", "lines"),
    "training/culprit.py": ("culprit", "bad_gradient"),
    "training/pace.py": ("heard",),
    "training/planning.py": ("unplannable", "unusual_lr"),
    "inspection/flow.py": ("lines", "hint"),
    "inspection/patterns.py": ("lines", "words"),
    **{
        f"inspection/{name}.py": ("lines",)
        for name in ("ablation", "maps", "logit_lens", "gathering", "places", "credit")
    },
}
# Names whose value is shown to a user wherever it is assigned, and constants, by file.
SHOWN_NAMES = {"notes", "self.told"}
SHOWN_CONSTANTS: dict[str, tuple[str, ...]] = {
    "inspection/patterns.py": ("SAYS",),
    "data/reading/magic.py": ("ARCHIVES", "DOCUMENTS", "TABLES", "MEDIA", "MODELS"),
}
# Dictionaries whose keys are shown to a user, by file: the functions that make them.
SHOWN_KEYS: dict[str, tuple[str, ...]] = {
    "inspection/machine.py": ("machine", "threads", "terminal", "backends", "torch_backends", "speed"),
}
# Messages of Python and of the system that become part of ours.
FOREIGN = (
    "the following arguments are required: {0}",
    "argument {0}: {1}",
    "argument {0}",
    "expected one argument",
    "expected at most one argument",
    "expected at least one argument",
    "expected {0} argument",
    "expected {0} arguments",
    "invalid int value: {0}",
    "invalid float value: {0}",
    "invalid choice: {0} (choose from {1})",
    "not allowed with argument {0}",
    "ignored explicit argument {0}",
    "No such file or directory",
    "Permission denied",
    "Is a directory",
    "Not a directory",
    "File exists",
    "File name too long",
    "No space left on device",
    "Read-only file system",
    "Too many open files",
    "Address already in use",
    "Cannot assign requested address",
    "Directory not empty",
    "Input/output error",
    "Broken pipe",
    "Expecting value: line {0} column {1} (char {2})",
    "Expecting property name enclosed in double quotes: line {0} column {1} (char {2})",
    "Expecting ',' delimiter: line {0} column {1} (char {2})",
    "Expecting ':' delimiter: line {0} column {1} (char {2})",
    "Extra data: line {0} column {1} (char {2})",
    "Invalid control character at: line {0} column {1} (char {2})",
    "Unterminated string starting at: line {0} column {1} (char {2})",
)
# Texts that are put together from pieces.
PIECED = (
    "a number from {0}",
    "a number from {0} to {1}",
    "a whole number from {0}",
    "a whole number from {0} to {1}",
    "en or zh",
    "imported",
)
IGNORED_CALLS = {"say", "Both", "repr", "len", "type", "shown", "int", "tuple", "sorted", "isinstance", "getattr"}


@dataclass(frozen=True, eq=False)
class Scope:
    """Where an expression stands: its file and the functions and classes around it, the innermost last."""

    file: str
    tree: ast.Module
    inside: tuple[ast.AST, ...] = ()

    @property
    def functions(self) -> list[ast.FunctionDef]:
        return [node for node in self.inside if isinstance(node, ast.FunctionDef)]


def walk(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
    """Every node with the scope it stands in."""
    for child in ast.iter_child_nodes(node):
        yield child, scope
        deeper = isinstance(child, (ast.FunctionDef, ast.ClassDef))
        yield from walk(child, Scope(scope.file, scope.tree, (*scope.inside, child)) if deeper else scope)


def called(call: ast.Call) -> str:
    """The last part of the name of what is called: parser.error -> error."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@dataclass
class Messages:
    """found: template -> the files it is written in; words: single words, which may be translated but need not be;
    pairs: the Chinese that stands beside a text in the code (the help of a setting).
    """

    found: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    words: set[str] = field(default_factory=set)
    pairs: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    scopes: list[Scope] = field(default_factory=list)
    functions: dict[str, list[tuple[ast.FunctionDef, Scope]]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[str, list[tuple[ast.Call, Scope]]] = field(default_factory=lambda: defaultdict(list))
    faults: set[str] = field(default_factory=lambda: {"Fault", "fault"})
    imports: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    # --------------------------------------------------------------------------------------------- the whole package

    def read(self, package: Path = PACKAGE) -> Messages:
        for path in sorted(package.rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            self.scopes.append(Scope(path.relative_to(package).as_posix(), tree))
        nodes = [pair for scope in self.scopes for pair in walk(scope.tree, scope)]
        for node, scope in nodes:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name].append((node, scope))
            elif isinstance(node, ast.Call):
                self.calls[called(node)].append((node, scope))
        for _ in range(3):  # a Fault's subclass may have subclasses
            classes = [node for node, _ in nodes if isinstance(node, ast.ClassDef)]
            self.faults |= {c.name for c in classes if {ast.unparse(base) for base in c.bases} & self.faults}
        for node, scope in nodes:
            self.sink(node, scope)
        for text in (*FOREIGN, *PIECED):
            self.found[text].add("")
        return self

    def sink(self, node: ast.AST, scope: Scope) -> None:
        """Take up what this node shows to a user, if it shows anything."""
        if isinstance(node, ast.Call):
            name = called(node)
            alone = len(node.args) == 1 and not isinstance(node.args[0], ast.Starred)
            if (name in self.faults and node.args) or (name == "say" and alone):
                self.text(node.args[0], scope, whole=True)
            elif name in SHOWN_ARGUMENTS:
                if name in ("leaf", "share") and len(node.args) > 2:
                    en, zh = (template_of(argument)[0] for argument in node.args[1:3])
                    self.pairs[en].add(zh)
                for place in SHOWN_ARGUMENTS[name] or ():
                    if place < len(node.args):
                        self.text(node.args[place], scope, whole=True)
            elif name == "append" and "notes" in ast.unparse(node.func):
                self.text(node.args[0], scope, whole=True)
            elif name == "add" and ast.unparse(node.func).endswith("problems.add"):
                self.text(node.args[2], scope, whole=True)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and "reading" in scope.file:
            if called(node.exc) == "ValueError":  # counted among the bad rows
                self.text(node.exc.args[0], scope, whole=True)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {*SHOWN_NAMES, *SHOWN_CONSTANTS.get(scope.file, ())}
            if node.value is not None and any(ast.unparse(target) in names for target in targets):
                self.text(node.value, scope, whole=True)
        elif isinstance(node, ast.FunctionDef):
            self.function(node, scope)

    def function(self, node: ast.FunctionDef, scope: Scope) -> None:
        inner = Scope(scope.file, scope.tree, (*scope.inside, node))
        if any(scope.file.startswith(file) and node.name in names for file, names in SHOWN_RETURNS.items()):
            self.returns(node, inner, whole=True)
        if node.name in SHOWN_KEYS.get(scope.file, ()):
            for part in ast.walk(node):
                for key in part.keys if isinstance(part, ast.Dict) else ():
                    self.text(key, inner, whole=True) if key is not None else None

    # ----------------------------------------------------------------------------------------------- one expression

    def text(self, node: ast.AST, scope: Scope, whole: bool = False) -> None:
        """Follow an expression to the strings it may be. whole: it is shown by itself, not within another text."""
        if id(node) in self.seen:
            return
        self.seen.add(id(node))
        if isinstance(node, (ast.Constant, ast.JoinedStr)) or is_sum(node):
            self.string(node, scope, whole)
        elif isinstance(node, ast.IfExp):
            self.texts([node.body, node.orelse], scope, whole)
        elif isinstance(node, ast.BoolOp):
            self.texts(node.values, scope, whole)
        elif isinstance(node, ast.BinOp):
            self.texts([node.left, node.right], scope, whole)
        elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            self.texts(node.elts, scope, whole)
        elif isinstance(node, ast.Dict):
            self.texts(node.values, scope, whole)
        elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            self.text(node.elt, scope, whole)
        elif isinstance(node, (ast.Starred, ast.NamedExpr, ast.Subscript, ast.FormattedValue)):
            self.text(node.value, scope, whole)
        elif isinstance(node, ast.Name):
            self.texts(self.bound(node.id, scope), scope, whole)
        elif isinstance(node, ast.Call):
            self.call(node, scope, whole)

    def texts(self, nodes: list[ast.AST] | list[ast.expr], scope: Scope, whole: bool) -> None:
        for node in nodes:
            self.text(node, scope, whole)

    def string(self, node: ast.AST, scope: Scope, whole: bool) -> None:
        template, holes = template_of(node)
        literal = HOLE.sub("", template)
        if "\n" in template or CHINESE.search(template):
            return
        if re.search("[A-Za-z,:;?!()]", literal):
            if whole or " " in template.strip():
                self.found[template].add(scope.file)
            else:
                self.words.add(template)
        for hole in holes:
            if not (isinstance(hole, ast.FormattedValue) and hole.conversion == ord("r")):  # a value, in quotes
                self.text(hole, scope)

    def call(self, node: ast.Call, scope: Scope, whole: bool) -> None:
        name = called(node)
        if name in IGNORED_CALLS:
            return
        if name in ("join", "get", "next", "filter", "dict", "removeprefix", "partition", "str"):
            of = [node.func.value] if name in ("get", "partition") and isinstance(node.func, ast.Attribute) else []
            self.texts([*of, *(arg for arg in node.args if not self.is_table(arg, scope))], scope, whole)
            return
        for function, outer in self.functions.get(name, ()):
            if outer.file == scope.file or outer.file in self.homes(name, scope):
                inside = Scope(outer.file, outer.tree, (*outer.inside, function))
                self.returns(function, inside, whole)

    def is_table(self, node: ast.AST, scope: Scope) -> bool:
        """A dictionary by its name: joined, it gives its keys, which are names."""
        values = self.bound(node.id, scope) if isinstance(node, ast.Name) else []
        return any(isinstance(value, ast.Dict) for value in values)

    def returns(self, function: ast.FunctionDef, scope: Scope, whole: bool) -> None:
        for node, _ in walk(function, scope):
            if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) and node.value is not None:
                self.text(node.value, scope, whole)

    # ------------------------------------------------------------------------------------------------------ a name

    def bound(self, name: str, scope: Scope) -> list[ast.AST]:
        """What a name may stand for: what is assigned to it, what it is given as an argument, a constant of a file."""
        for function in reversed(scope.functions):
            parameters = [*function.args.posonlyargs, *function.args.args]
            every = [parameter.arg for parameter in [*parameters, *function.args.kwonlyargs]]
            found = list(assigned(name, function))
            if name in every:
                self.arguments(name, function, [parameter.arg for parameter in parameters], scope.file)
                return found
            if found:
                return found
        own = list(assigned(name, scope.tree, deep=False))
        if own:
            return own
        others = [other for other in self.scopes if other.file in self.homes(name, scope)]
        return [value for other in others for value in assigned(name, other.tree, deep=False)]

    def homes(self, name: str, scope: Scope) -> set[str]:
        """The files a name is imported from."""
        if scope.file not in self.imports:
            self.imports[scope.file] = table = defaultdict[str, set[str]](set)
            for node in ast.walk(scope.tree):
                if isinstance(node, ast.ImportFrom):
                    path = (node.module or "").removeprefix("headwater.").replace(".", "/")
                    for alias in node.names:
                        table[alias.asname or alias.name] |= {f"{path}.py", f"{path}/__init__.py"}
        return self.imports[scope.file].get(name, set())

    def is_foreign(self, call: ast.Call, scope: Scope) -> bool:
        """Whether a function of a module outside the package is called: re.search(…), subprocess.run(…)."""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        modules = {
            alias.asname or alias.name
            for node in ast.walk(scope.tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if not alias.name.startswith("headwater")
        }
        return isinstance(owner, ast.Name) and owner.id in modules

    def defines(self, scope: Scope, call: ast.Call) -> bool:
        """Whether the file of a call has a function of that name."""
        return any(other.file == scope.file for _, other in self.functions[called(call)])

    def arguments(self, name: str, function: ast.FunctionDef, positional: list[str], file: str) -> None:
        """Follow what every caller gives for a parameter."""
        if not may_be_text(name, function):
            return
        own = positional[1:] if positional[:1] in (["self"], ["cls"]) else positional
        for call, scope in self.calls.get(function.name, ()):
            if self.is_foreign(call, scope) or (of_self(call) and file != scope.file and self.defines(scope, call)):
                continue
            if isinstance(call.func, ast.Name) and scope.file != file and file not in self.homes(function.name, scope):
                continue  # another function of that name
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            given |= dict(zip(own, call.args, strict=False))
            if name in given:
                self.text(given[name], scope)


def of_self(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self"


def may_be_text(name: str, function: ast.FunctionDef) -> bool:
    """Whether a parameter may be a message: its annotation, if there is one, names a string or leaves it open.

    >>> f = ast.parse("def f(path: Path, law: str, places: list[str], at: int, reason): ...").body[0]
    >>> [name for name in ("path", "law", "places", "at", "reason") if may_be_text(name, f)]
    ['law', 'places', 'reason']
    """
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    (kind,) = (parameter.annotation for parameter in parameters if parameter.arg == name)
    return kind is None or bool(re.search(r"\b(str|Any|object|Both)\b", ast.unparse(kind)))


def is_sum(node: ast.AST) -> bool:
    """A sum with a string in it."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and any(map(is_text, addends(node)))


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def addends(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*addends(node.left), *addends(node.right)]
    return [node]


def template_of(node: ast.AST) -> tuple[str, list[ast.AST]]:
    """A string with numbers in place of its expressions, and these expressions.

    >>> template_of(ast.parse("f'{path}: {len(ids)} of {path}'", mode="eval").body)[0]
    '{0}: {1} of {0}'
    """
    made, holes = "", dict[str, ast.AST]()
    pieces = [piece for part in addends(node) for piece in (part.values if isinstance(part, ast.JoinedStr) else [part])]
    for piece in pieces:
        if isinstance(piece, ast.Constant):
            made += piece.value if isinstance(piece.value, str) else ""
            continue
        name = ast.unparse(piece.value if isinstance(piece, ast.FormattedValue) else piece)
        holes.setdefault(name, piece)
        made += f"{{{list(holes).index(name)}}}"
    return made, list(holes.values())


def assigned(name: str, tree: ast.AST, deep: bool = True) -> Iterator[ast.AST]:
    """Every expression assigned to a name in a function or in a file, loops and comprehensions included."""
    nodes = ast.walk(tree) if deep else ast.iter_child_nodes(tree)
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from matched(name, target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
            yield from matched(name, node.target, node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            for item in items(node.iter):
                yield from matched(name, node.target, item)


def items(node: ast.AST) -> list[ast.AST]:
    """The items a loop runs over, where they are written out."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return list(node.elts)
    if isinstance(node, ast.Call) and called(node) == "items" and isinstance(node.func, ast.Attribute):
        table = node.func.value
        if isinstance(table, ast.Dict):
            return [ast.Tuple([key, value]) for key, value in zip(table.keys, table.values, strict=True) if key]
    if isinstance(node, ast.Call) and called(node) == "zip" and isinstance(node.args[0], ast.Tuple):
        unknown = [ast.Constant(None)] * (len(node.args) - 1)
        return [ast.Tuple([item, *unknown]) for item in node.args[0].elts]
    return []


def matched(name: str, target: ast.AST, value: ast.AST) -> Iterator[ast.AST]:
    """The part of a value that an assignment gives to the name: a, b = x, y gives y to b."""
    if isinstance(target, ast.Name):
        if target.id == name:
            yield value
    elif isinstance(target, ast.Tuple):
        if isinstance(value, ast.IfExp):
            yield from matched(name, target, value.body)
            yield from matched(name, target, value.orelse)
        elif isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            for inner, part in zip(target.elts, value.elts, strict=True):
                yield from matched(name, inner, part)


# ------------------------------------------------------------------------------------------------------ the catalogue


def catalogue() -> Catalog:
    if not CATALOGUE.exists():
        return Catalog(locale="zh")
    with CATALOGUE.open("rb") as file:
        return read_po(file, locale="zh")


def gaps(messages: Messages, known: Catalog) -> tuple[list[str], list[str]]:
    """The messages without a translation, and the translations without a message."""
    translated = {entry.id for entry in known if entry.id and entry.string}
    every = {entry.id for entry in known if entry.id}
    return sorted(set(messages.found) - translated), sorted(every - set(messages.found) - messages.words)


def write(messages: Messages, known: Catalog) -> None:
    """The catalogue anew, sorted, so that a change shows as a change of its own lines."""
    made = Catalog(locale="zh", header_comment="# Chinese messages of Headwater; see scripts/messages.py.")
    old = {entry.id: entry.string for entry in known if entry.id}
    for text in sorted({*messages.found, *(messages.words & set(old))}):
        files = sorted(file for file in messages.found.get(text, ()) if file)
        (beside, *others) = messages.pairs.get(text) or [""]
        chinese = beside if beside and not others else old.get(text, "")
        made.add(text, chinese, locations=[(file, None) for file in files])
    CATALOGUE.parent.mkdir(exist_ok=True)
    with CATALOGUE.open("wb") as file:
        write_po(file, made, width=0, omit_header=True)


def main() -> int:
    messages, known = Messages().read(), catalogue()
    if "--write" in sys.argv:
        write(messages, known)
        known = catalogue()
    missing, stale = gaps(messages, known)
    for kind, texts in (("no translation", missing), ("not in the code", stale)):
        for text in texts:
            print(f"{kind}: {text!r}")
    print(f"{len(messages.found)} messages, {len(missing)} without a translation, {len(stale)} not in the code")
    return 1 if missing or stale else 0


if __name__ == "__main__":
    sys.exit(main())
