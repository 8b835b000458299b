"""`import headwater` is quick and light, its public names are true, and an unknown one is answered with the nearest."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headwater


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_is_light():
    heavy = {"torch", "numpy", "matplotlib", "rich", "pydantic", "tokenizers", "yaml"}
    loaded = run("import headwater, sys; print(*{name.partition('.')[0] for name in sys.modules})").split()
    assert not heavy & set(loaded)


def test_importing_is_quick():
    """Seconds of processor time, which a busy machine does not stretch: 0.02 measured."""
    code = "import time; t = time.process_time(); import headwater; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.1


@pytest.mark.parametrize("name", headwater.__all__)
def test_every_public_name_is_there(name):
    assert getattr(headwater, name) is not None
    assert name in dir(headwater)


def test_the_type_checker_sees_the_same_names():
    """The names imported under TYPE_CHECKING are those of the table, from the same modules."""
    tree = ast.parse(Path(headwater.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == headwater.LAZY_IMPORTS
    assert set(headwater.LAZY_IMPORTS) <= set(headwater.__all__)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match="headwater has no name 'BadSeting'; did you mean 'BadSetting'"):
        headwater.BadSeting
    assert not hasattr(headwater, "__wrapped__")


def test_the_packages_are_reached_from_the_top():
    assert run("import headwater; print(headwater.core.__name__, headwater.inspection.__name__)").split() == [
        "headwater.core",
        "headwater.inspection",
    ]


def test_a_star_import_brings_what_all_lists():
    space: dict = {}
    exec("from headwater import *", space)
    assert set(headwater.__all__) <= set(space)


def test_a_saved_model_of_any_parts_is_read_in_a_new_process():
    """Reading weights registers every part of core and variants, also those that nothing else imports."""
    package = Path(headwater.__file__).parent
    sources = [
        path.read_text(encoding="utf-8") for name in ("core", "variants") for path in (package / name).glob("*.py")
    ]
    written = {name for source in sources for name in re.findall(r"^@part\nclass (\w+)", source, re.MULTILINE)}
    registered = run("import headwater.weights.native; from headwater.parts import REGISTRY; print(*REGISTRY)")
    assert len(written) > 90
    assert written <= set(registered.split())
