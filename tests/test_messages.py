"""Every message has its Chinese in locale/zh.po, is found there by its template, and is punctuated as Chinese is."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.i18n import CATALOGUE, SENTENCE, Template, _letters, translate
from headwater.training.settings import LEAVES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headwater"
HOLE = re.compile(r"\{\d+\}")
CHINESE = "\u4e00-\u9fff"


def tool():
    spec = importlib.util.spec_from_file_location("messages", ROOT / "scripts" / "messages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["messages"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


TOOL = tool()
ENTRIES = {entry.id: entry.string for entry in TOOL.catalogue() if entry.id}


@pytest.fixture(scope="module")
def messages():
    return TOOL.Messages().read()


# ------------------------------------------------------------------------------------------------------ the catalogue


def test_every_message_has_a_translation_and_no_translation_is_stale(messages):
    missing, stale = TOOL.gaps(messages, TOOL.catalogue())
    assert not missing, f"run `python scripts/messages.py --write` and translate in {CATALOGUE.name}: {missing[:5]}"
    assert not stale, f"run `python scripts/messages.py --write`, which removes them: {stale[:5]}"
    assert len(messages.found) > 900


def test_a_translation_has_the_holes_of_its_message():
    differ = {en: zh for en, zh in ENTRIES.items() if set(HOLE.findall(en)) != set(HOLE.findall(zh))}
    assert differ == {}


def test_a_new_message_and_a_stale_one_would_be_seen(tmp_path):
    """Through a variable, an argument, a function and a sum; what is a value ({x!r}) is not followed."""
    (tmp_path / "errors.py").write_text("class Fault(Exception): pass\nclass BadFile(Fault): pass\n")
    (tmp_path / "code.py").write_text(
        "def must(holds, law, came):\n    raise BadFile(f'{law}, got {came!r}; {advice()}' + '!')\n"
        "def advice():\n    return 'try another one'\n"
        "def f(x):\n    kind = 'a small file' if x else 'a large file'\n    must(x, f'{x} must be {kind}', 'a value')\n"
    )
    found = TOOL.Messages().read(tmp_path)
    assert {"{0}, got {1}; {2}!", "try another one", "{0} must be {1}", "a small file", "a large file"} <= set(
        found.found
    )
    assert "a value" not in found.found
    missing, stale = TOOL.gaps(found, TOOL.catalogue())
    assert "try another one" in missing and "no recipe is called {0}; {1}" in stale


def test_what_can_not_be_a_message_is_not_followed(tmp_path):
    """An argument that is no text by its annotation, one of another library's function, another class's method."""
    (tmp_path / "errors.py").write_text("class Fault(Exception): pass\n")
    (tmp_path / "code.py").write_text(
        "from errors import Fault\n"
        "def add(line: int, law: str):\n    raise Fault(f'{line}: {law}')\n"
        "def search(text):\n    raise Fault(f'nothing is in {text}')\n"
        "def write(path: str):\n    raise Fault(f'no room for {path}')\n"
    )
    (tmp_path / "other.py").write_text(
        "import re\n"
        "class Steps:\n"
        "    def write(self, text): ...\n"
        "    def run(self, x):\n"
        "        x.add(f'a formula = {x}', 'a real law')\n"
        "        re.search('a pattern \\\\w', x)\n"
        "        self.write('a line of its own')\n"
        "        x.write('a file of theirs')\n"
    )
    found = set(TOOL.Messages().read(tmp_path).found)
    assert {"{0}: {1}", "a real law", "a file of theirs"} <= found
    assert not {text for text in found if text.startswith(("a formula", "a pattern", "a line"))}


def test_the_help_of_a_setting_is_translated_alike_in_an_error():
    """An error about a setting ends with its help, whose Chinese stands in training/settings.py."""
    words = [leaf.words for leaf in LEAVES.values()]
    alone = [(en, zh) for en, zh in words if [other for other, _ in words].count(en) == 1]
    assert len(alone) > 50
    assert {en: ENTRIES[en] for en, _ in alone} == dict(alone)


# --------------------------------------------------------------------------------------------------- finding a message


def samples(template: Template) -> list[dict[str, str]]:
    """Values for the holes. A template of few letters is trusted only where it explains half of a text."""
    holes = sorted(set(template.holes))
    letters = _letters("".join(template.parts))
    if letters >= SENTENCE:
        values = ("data/a.tsv", "'some words, in quotes; and more'", "17", "x_y")
        inside = {hole for part, hole in zip(template.parts, template.holes, strict=False) if part[-1:].isalnum()}
        return [
            {hole: "2A" if hole in inside else values[(n + shift) % 4] for n, hole in enumerate(holes)}
            for shift in range(4)
        ]
    if letters:
        return [{hole: "?" for hole in holes}]
    return [{hole: "mend it" if n == len(holes) // 3 else str(n) for n, hole in enumerate(holes)}]


def filled(template: Template, en: str, values: dict[str, str]) -> tuple[str, str]:
    """A message made of a template, and the Chinese it must have."""
    made = HOLE.sub(lambda hole: values[hole[0][1:-1]], en)
    return made, template.fill({hole: translate(value, "zh") for hole, value in values.items()})


@pytest.mark.parametrize("en", sorted(ENTRIES), ids=lambda en: en[:60])
def test_a_message_is_translated_by_its_own_template(en):
    template = Template.of(en, ENTRIES[en])
    for values in samples(template):
        message, chinese = filled(template, en, values)
        assert translate(message, "zh") == chinese


def test_a_message_within_a_message_is_translated_too():
    said = "Beam: answers must be from 1 to the width (4), got 9; widen the beam"
    assert translate(said, "zh") == "Beam：answers 必须在 1 到束宽（4）之间，得到 9；请加大束宽"
    said = "no recipe is called 'datez'; did you mean 'dates'?"
    assert translate(said, "zh") == "没有名为 'datez' 的配方；是否想写 'dates'？"


def test_a_part_that_comes_twice_is_taken_where_more_is_explained():
    said = "looks at what came after the same token earlier (induction) (37%)"
    assert translate(said, "zh") == "看同一词元先前出现时的下文（归纳头）（37%）"


def test_a_list_that_is_cut_is_translated_to_its_end():
    assert translate("columns not used: alpha, beta and 3 more", "zh") == "未使用的列：alpha, beta，另有 3 个"


@pytest.mark.parametrize("name", ["rock and roll.tsv", "from 1 to 2.tsv", "a list of songs.tsv", "no notes.tsv"])
def test_a_file_s_name_is_never_translated(name):
    assert translate(f"{name} is empty; give a file with at least one line", "zh").startswith(name)


@pytest.mark.parametrize("message", ["", "nobody ever says this", "x: y", "a, b", "mend that, it is 3"])
def test_an_unknown_message_stays_as_it_is(message):
    assert translate(message, "zh") == message
    assert translate("no recipe is called 'x'; known: a", "en") == "no recipe is called 'x'; known: a"


def test_a_space_stands_between_chinese_and_latin_letters_only():
    assert Template.of("{0} needs {1}", "{0}需要 {1}").fill({"0": "模型", "1": "编码器"}) == "模型需要编码器"
    assert Template.of("{0} needs {1}", "{0}需要{1}").fill({"0": "x", "1": "2"}) == "x 需要 2"


def test_the_catalogue_waits_until_a_message_is_translated():
    code = "import headwater.cli, headwater.i18n as i, sys; i.translate('x', 'en'); print('babel' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# --------------------------------------------------------------------------------------------------------- punctuation

NEAR = f"[{CHINESE}\u3000-\u303f\uff00-\uff60]"
HALF_WIDTH = re.compile(rf"[{CHINESE}] ?[,;:!?(]|[,;:!?)] ?[{CHINESE}]|{NEAR}[,;:!?]|;(?! *[a-z])")
CODE = re.compile(r"[\w.]*\([^()" + CHINESE + r"]*\)(?:\.\w+\([^()]*\))?|[\w.-]+:[A-Z]+")  # f(x), file.py:NAME
NOT_TEXT = {"serving/tiny.py", "data/reading/columns.py", "data/metrics/units.py", "data/dates.py", "text/pieces.py"}


def wrong_marks(text: str) -> bool:
    """Whether a Chinese text has a half-width mark where a full-width one belongs."""
    return bool(re.search(f"[{CHINESE}]", text) and HALF_WIDTH.search(CODE.sub("x", text)))


def texts(path: Path) -> list[str]:
    """The strings of a file but its docstrings; a hole of an f-string is a mark of its own."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare | inner:
            found.append(node.value)
    return found


@pytest.mark.parametrize("text", ["形状,参数", "形状(估计)", "学习率: 1", "结束;请", "对吗?", "束宽 [4];1 为贪心"])
def test_a_half_width_mark_would_be_seen(text):
    assert wrong_marks(text)


def test_marks_in_code_are_left_alone():
    assert not wrong_marks("用 requires_grad_(False) 冻结，或 source=en,target=de，见 file.py:NAME（会被运行）")


def test_chinese_in_the_code_has_full_width_marks():
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).as_posix() not in NOT_TEXT]
    assert [(path.name, text) for path in files for text in texts(path) if wrong_marks(text)] == []


def test_chinese_in_the_catalogue_has_full_width_marks():
    assert [zh for zh in ENTRIES.values() if wrong_marks(HOLE.sub("\0", zh))] == []
