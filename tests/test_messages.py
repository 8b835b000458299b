"""Every message has its Chinese in the catalogue, with the same placeholders, punctuated as Chinese is."""

from __future__ import annotations

import ast
import importlib.util
import pickle
import re
import string
import sys
from pathlib import Path

import pytest

from headwater.errors import BadSetting
from headwater.i18n import CATALOG, Message, _, join, language, set_language, translated, use_language

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headwater"
CHINESE = "\u4e00-\u9fff"


def tool():
    spec = importlib.util.spec_from_file_location("messages", ROOT / "scripts" / "messages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["messages"] = module
    spec.loader.exec_module(module)
    return module


TOOL = tool()
ENTRIES = {entry.id: entry.string for entry in TOOL.catalogue() if entry.id}


def placeholders(text: str) -> set[str]:
    return {field for _literal, field, _spec, _conversion in string.Formatter().parse(text) if field is not None}


def formatted(text: str) -> bool:
    """Whether a msgid is filled by _(): those of argparse are filled with %."""
    return text not in TOOL.FOREIGN


# ------------------------------------------------------------------------------------------------------ the catalogue


def test_every_message_has_a_translation_and_no_translation_is_stale():
    missing, stale = TOOL.gaps(TOOL.messages(), TOOL.catalogue())
    assert not missing, f"run `python scripts/messages.py --write` and translate in {CATALOG.name}: {missing[:5]}"
    assert not stale, f"run `python scripts/messages.py --write`, which removes them: {stale[:5]}"
    assert len(ENTRIES) > 1000


def test_a_new_message_and_a_stale_one_would_be_seen(tmp_path):
    (tmp_path / "code.py").write_text("_('try another one')\n_(variable)\n")
    missing, stale = TOOL.gaps(TOOL.messages(tmp_path), TOOL.catalogue())
    assert "try another one" in missing and "error: {text}" in stale


def values_given() -> dict[str, set[str]]:
    """The names of the values that the calls of _() give, by msgid."""
    given: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_"
            if called and node.args and isinstance(node.args[0], ast.Constant):
                names = {keyword.arg for keyword in node.keywords}
                given[node.args[0].value] = given.get(node.args[0].value, names) & names
    return given


def test_every_placeholder_gets_a_value_in_both_languages():
    given = values_given()
    lacking = {
        en: placeholders(text) - given[en]
        for en, zh in ENTRIES.items()
        if en in given and formatted(en) and given[en]
        for text in (en, zh)
        if placeholders(text) - given[en]
    }
    assert lacking == {}


def test_no_message_is_made_by_an_f_string():
    """The msgid must be the same for all values."""
    bad = [
        f"{path.name}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_"
        if node.args and isinstance(node.args[0], ast.JoinedStr)
    ]
    assert bad == []


FAULTS = {"Fault", "BadSetting", "BadInput", "TooLong", "BadFile", "NotFound", "Unavailable", "CheckFailed"}


def test_no_fault_is_raised_with_a_text_that_is_not_translated():
    bad = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FAULTS
        if node.args and isinstance(node.args[0], (ast.JoinedStr, ast.Constant))
    ]
    assert bad == []


def test_chinese_is_punctuated_as_chinese():
    bad = {zh for zh in ENTRIES.values() if re.search(f"[{CHINESE}][,;:?!]|[,;?!][{CHINESE}]", zh)}
    assert bad == set()


# --------------------------------------------------------------------------------------------------------- a message


@pytest.fixture
def hint():
    return _("did you mean {name!r}?", name="dates")


def test_a_message_is_english_until_it_is_shown_in_another_language(hint):
    message = _("no recipe is called {name!r}; {nearest}", name="datez", nearest=hint)
    english, chinese = (
        "no recipe is called 'datez'; did you mean 'dates'?",
        "没有名为 'datez' 的配方；是否想写 'dates'？",
    )
    assert message == english and str(message) == f"{message}" == english
    with use_language("zh"):
        assert str(message) == f"{message}" == "".join(["", str(message)]) == chinese
        assert message == english, "compared, it is its English"
        assert str(BadSetting(message)) == chinese
    assert translated(message, "zh") == chinese and translated(message, "en") == english
    assert translated("plain text", "zh") == "plain text"


def test_messages_are_added_joined_and_pickled(hint):
    both = "a: " + hint + "!"
    assert isinstance(both, Message) and both == "a: did you mean 'dates'?!"
    assert translated(both, "zh") == "a: 是否想写 'dates'？!"
    assert translated(join("; ", [hint, "x"]), "zh") == "是否想写 'dates'？; x" and join(", ", ["a", "b"]) == "a, b"
    again = pickle.loads(pickle.dumps(both))
    assert again == both and translated(again, "zh") == translated(both, "zh")


def test_the_language_of_a_thread_hides_that_of_the_process():
    assert language() == "en"
    try:
        set_language("zh")
        assert language() == "zh"
        with use_language("en"):
            assert language() == "en"
        assert language() == "zh"
    finally:
        set_language("en")
