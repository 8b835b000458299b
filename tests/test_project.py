"""The habits of the house, as tests: which way imports point, how long things may grow, what is never done."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headwater"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [path.relative_to(PACKAGE).as_posix() for path in FILES]

every_file = pytest.mark.parametrize("path", FILES, ids=NAMES)


parse = functools.cache(ast.parse)  # several tests read every file


def tree(path: Path) -> ast.Module:
    return parse(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------------------- imports point one way

ORDER = [
    "i18n",
    "errors",
    "parts",
    "rng",
    "io",
    "cpu",
    "quantization",
    "core",
    "variants",
    "weights",
    "tuning",
    "text",
    "vision",
    "audio",
    "codecs",
    "families",
    "data",
    "generation",
    "transcription",
    "audiolm",
    "tasks",
    "training",
    "inspection",
    "checker",
    "doctor",
    "bench",
    "serving",
    "cli",
]
RANK = {name: rank for rank, name in enumerate(ORDER)}  # one package a rank; web has no Python


def import_order(page: str) -> list[str]:
    """The packages that a page puts in order with arrows."""
    chain = re.search(r"(?:`\w+` → ?\n?){5,}`\w+`", page)
    assert chain, "the page gives the order of imports"
    return re.findall(r"`(\w+)`", chain[0])


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_architecture_page_gives_the_order_of_imports(language):
    assert import_order((ROOT / "docs" / language / "architecture.md").read_text(encoding="utf-8")) == ORDER


def test_every_package_has_a_rank():
    packages = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert packages - {"__init__", "__main__", "__pycache__", "reference", "web", "locale"} == set(ORDER)


@functools.cache
def imported(source: str) -> list[str]:
    """Every module named by an import, wherever in the file it stands."""
    found = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [f"{node.module}.{a.name}" if node.module == "headwater" else node.module for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append("." * node.level)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def wrong_way(area: str, source: str) -> list[str]:
    """Imports of a later layer than the file's own. reference stands apart: it may know errors and itself."""
    bad = []
    for module in imported(source):
        first, _, rest = module.partition(".")
        target = rest.partition(".")[0]
        if first != "headwater" or target.startswith("__"):
            continue
        if area == "reference" or target == "reference":
            users = {"reference", "inspection", "serving", "cli"}
            legal = area in users and (area != "reference" or target in {"errors", "i18n", "reference"})
        else:
            assert target in RANK, f"{module}: a new layer; give it a place in ORDER"
            legal = RANK[target] <= RANK[area]
        bad += [] if legal else [module]
    return bad


@pytest.mark.parametrize(
    ("area", "line", "wrong"),
    [
        ("core", "from headwater.training.trainer import Trainer", True),
        ("core", "def f():\n    import headwater.cli", True),
        ("core", "from headwater import serving", True),
        ("reference", "from headwater.core import Model", True),
        ("core", "from headwater.reference import ops", True),
        ("cli", "from headwater.core import Model", False),
        ("reference", "from headwater.errors import Fault", False),
    ],
)
def test_a_wrong_import_would_be_seen(area, line, wrong):
    assert bool(wrong_way(area, line)) is wrong


@every_file
def test_imports_point_one_way(path):
    area = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    source = path.read_text(encoding="utf-8")
    assert "." not in {name[:1] for name in imported(source)}, "write imports in full: from headwater.x import y"
    if area not in ("__init__", "__main__"):
        assert area == "reference" or area in RANK, f"{area} is a new layer; give it a place in ORDER"
        assert wrong_way(area, source) == []


IMPORT_NAMES = {"pyyaml": "yaml", "pillow": "PIL"}  # distributions whose module has another name
OPTIONAL = {"xformers", "resvg_py"}  # used where they are installed
OURS = {"headwater"}


def declared() -> set[str]:
    """The modules of the run-time dependencies in pyproject.toml."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = [re.split(r"[<>=!~ \[]", line, maxsplit=1)[0] for line in dependencies]
    return {IMPORT_NAMES.get(name, name) for name in names}


def test_every_declared_dependency_is_imported():
    used = {name.partition(".")[0] for path in FILES for name in imported(path.read_text(encoding="utf-8"))}
    assert declared() - used == set(), "remove it from pyproject.toml: no file imports it"


@every_file
def test_only_declared_packages_are_imported(path):
    roots = {name.partition(".")[0] for name in imported(path.read_text(encoding="utf-8"))}
    allowed = {"numpy", "matplotlib", "headwater"} if "reference" in path.parts else declared() | OPTIONAL | OURS
    unknown = roots - allowed - set(sys.stdlib_module_names)
    assert not unknown, f"{unknown}: declare it in pyproject.toml and here, or do without"


def at_import_time(module: ast.Module) -> set[str]:
    """Root packages a module imports when it is itself imported."""
    now = [node for node in module.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.If))]
    return {name.partition(".")[0] for node in now for name in imported(ast.unparse(node))}


@every_file
def test_heavy_packages_wait(path):
    area = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    light = area in {"errors", "i18n", "parts", "reference", "cli", "__init__", "__main__"}
    late = {"matplotlib", "torch", "rich"} if light else {"matplotlib"}
    assert not at_import_time(tree(path)) & late, f"import {late} inside the function that needs it"


# ------------------------------------------------------------------------------------------------------------- budgets


# Public functions whose keyword arguments are the settings themselves, one documented line each.
SPELLED_OUT = {"generate", "stream", "transcribe"}


def over_budget(source: str, lines: int = 400, function: int = 60, arguments: int = 12, switches: int = 2) -> list[str]:
    """What makes a file hard to read, as a list of sentences."""
    said = []
    if source.count("\n") > lines:
        said.append(f"{source.count(chr(10))} lines, {lines} allowed")
    for node in ast.walk(parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        long = node.end_lineno - node.lineno + 1
        given = [each for each in (*node.args.posonlyargs, *node.args.args) if each.arg not in ("self", "cls")]
        given += [] if node.name in SPELLED_OUT else node.args.kwonlyargs
        defaults = [*node.args.defaults, *node.args.kw_defaults]
        flags = sum(isinstance(d, ast.Constant) and isinstance(d.value, bool) for d in defaults)
        if long > function or len(given) > arguments or flags > switches:
            said.append(f"{node.name}: {long} lines, {len(given)} arguments, {flags} switches")
    return said


@pytest.mark.parametrize(
    "source",
    [
        "\n" * 401,
        "def f():\n" + "    x = 1\n" * 60,
        "def f(a, b, c, d, e, f, g, h, i, j, k, l, *, m): pass",
        "def f(a=True, b=False, *, c=True): pass",
    ],
)
def test_each_budget_can_be_broken(source):
    assert over_budget(source)


@every_file
def test_nothing_outgrows_its_budget(path):
    assert over_budget(path.read_text(encoding="utf-8")) == []


@every_file
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(tree(path)), "begin the file with a line that says what it is: the README's map shows it"


def code_lines(path: Path) -> int:
    """Lines that do something: neither blank, nor comment, nor docstring, nor import. A refusal counts as one line,
    however long its sentence.
    """
    idle = [node for node in ast.walk(tree(path)) if isinstance(node, (ast.Import, ast.ImportFrom)) or is_text(node)]
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    for node in idle:
        lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    for node in filter(is_refusal, ast.walk(tree(path))):
        lines[node.lineno : node.end_lineno] = [""] * (node.end_lineno - node.lineno)
    return sum(line != "" and not line.startswith("#") for line in lines)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_refusal(node: ast.AST) -> bool:
    """raise …, or must(…)."""
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    return isinstance(node, ast.Raise) or (isinstance(called, ast.Name) and called.id == "must")


def test_lines_that_do_something_are_counted(tmp_path):
    file = tmp_path / "small.py"
    file.write_text('"""One\ntwo."""\n\nimport ast\n\n# why\ndef f():\n    """Text."""\n    return 1\n')
    assert code_lines(file) == 2
    file.write_text("def f():\n    raise Fault(\n        'a long sentence'\n    )\n")
    assert code_lines(file) == 2


def test_the_core_can_be_read_in_one_sitting():
    assert sum(map(code_lines, (PACKAGE / "core").rglob("*.py"))) <= 2050


# ------------------------------------------------------------------------------------- the core never asks for a kind


@functools.cache
def part_names() -> set[str]:
    classes = (node for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef))
    return {c.name for c in classes if any(isinstance(d, ast.Name) and d.id == "part" for d in c.decorator_list)}


def asks_for_a_kind(source: str, parts: set[str]) -> list[str]:
    """isinstance and type() on parts, and comparisons of a class's name: ladders in the making."""
    bad = []
    for node in ast.walk(parse(source)):
        text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Compare, ast.MatchClass)) else ""
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            named = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
            bad += [text] if named & parts else []
        elif isinstance(node, ast.Compare):
            asked = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)} & {"kind", "__name__"}
            typed = "type(" in text and {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & parts
            bad += [text] if asked or typed else []
        elif isinstance(node, ast.MatchClass) and ast.unparse(node.cls) in parts:
            bad.append(text)
    return bad


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(x, RMSNorm)",
        "isinstance(x, (int, RMSNorm))",
        "type(x) is RMSNorm",
        "type(x).__name__ == 'RMSNorm'",
        "spec.kind == 'llama'",
        "match x:\n    case RMSNorm(): pass",
    ],
)
def test_a_ladder_would_be_seen(line):
    assert asks_for_a_kind(line, {"RMSNorm"})


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").rglob("*.py")), ids=lambda p: p.name)
def test_the_core_never_asks_for_a_kind(path):
    assert asks_for_a_kind(path.read_text(encoding="utf-8"), part_names()) == []


# ------------------------------------------------------------------------------------------------- what is never done

# The one file that may look into a pickle (to convert an old checkpoint), if there is one.
CONVERTERS = ("weights/pickles.py",)
DANGEROUS_CALLS = {"eval", "exec", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "torch.load"}
DANGEROUS_MODULES = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "joblib",
    "cloudpickle",
    "requests",
    "httpx",
    "urllib.request",
}
DANGEROUS_SETTINGS = {"shell", "trust_remote_code", "allow_pickle"}


def dangers(source: str) -> list[str]:
    bad = [module for module in imported(source) if module in DANGEROUS_MODULES]
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Call):
            on = {k.arg for k in node.keywords if not (isinstance(k.value, ast.Constant) and k.value.value is False)}
            name = ast.unparse(node.func)
            bad += [name] if name in DANGEROUS_CALLS or on & DANGEROUS_SETTINGS else []
    return bad


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "eval(x)",
        "yaml.load(x)",
        "run(x, shell=True)",
        "np.load(x, allow_pickle=True)",
        "torch.load(x)",
        "f(trust_remote_code=yes)",
        "import urllib.request",
    ],
)
def test_a_danger_would_be_seen(line):
    assert dangers(line)


def test_the_harmless_twin_is_left_alone():
    assert dangers("model.eval(); yaml.safe_load(x); run(x, shell=False); np.load(x, allow_pickle=False)") == []


@every_file
def test_nothing_dangerous_is_called(path):
    assert len(CONVERTERS) <= 1
    if path.relative_to(PACKAGE).as_posix() not in CONVERTERS:
        assert dangers(path.read_text(encoding="utf-8")) == []


PRIVATE = re.compile(
    r"(?<![\w.])/(work|root|opt)/|/home/\w|/tmp/hw|"  # paths of somebody's machine
    r"//[\w.-]*(?:pypi|pythonhosted|npmjs)\b|--(?:extra-)?index[-]url|--find[-]links"  # where packages come from
)
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".html", ".js", ".css", ".sh", ""}


def project_texts() -> list[Path]:
    roots = ["src", "tests", "scripts", "docs", "benchmarks", ".ci"]
    inside = [path for name in roots for path in (ROOT / name).rglob("*")]
    paths = [*ROOT.glob("*"), *inside]
    return [p for p in paths if p.is_file() and p.suffix in TEXT and p.name not in (Path(__file__).name, ".git")
            and not {"__pycache__", "node_modules"} & set(p.parts) and ".egg-info" not in str(p)]  # fmt: skip


def test_no_machine_and_no_registry_is_named():
    named = {path.relative_to(ROOT).as_posix(): found[0] for path in project_texts()
             if (found := PRIVATE.search(path.read_text(encoding="utf-8", errors="replace")))}  # fmt: skip
    assert named == {}
    assert (
        PRIVATE.search("see /opt/x")
        and PRIVATE.search("https://files.pypi.example")
        and PRIVATE.search("--find" + "-links")
    )


# ------------------------------------------------------------------------------------------------------------ the pins


def test_every_version_is_pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), (
        "only name==version, no local suffix, no address"
    )
    assert "torch==2.13.0" in lines


def test_every_declared_package_has_a_pin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    plain = {re.split(r"[=<>\[; ]", line)[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert [name for name in declared if re.split(r"[=<>\[; ]", name)[0].lower() not in plain] == []
