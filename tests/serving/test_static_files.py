"""Files of the web page: the same keys in both languages, no external script, no HTML injection, small size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import headwater
from headwater.serving.app import StaticFiles

WEB = Path(headwater.__file__).parent / "web"
SCRIPTS = sorted((WEB / "js").rglob("*.js"))
MESSAGES = {name: json.loads((WEB / "locales" / f"{name}.json").read_text(encoding="utf-8")) for name in ("en", "zh")}


def test_both_languages_have_the_same_keys():
    assert list(MESSAGES["en"]) == list(MESSAGES["zh"])
    for key, text in MESSAGES["en"].items():
        assert text.strip() and MESSAGES["zh"][key].strip()
        holes = [sorted(re.findall(r"\{(\w+)\}", MESSAGES[name][key])) for name in MESSAGES]
        assert holes[0] == holes[1], key


def test_what_is_chinese_is_chinese():
    same = [
        key for key, text in MESSAGES["en"].items() if MESSAGES["zh"][key] == text and not key.startswith("example.")
    ]
    assert same == ["walkthrough.softmax"]


def used_keys() -> tuple[set[str], list[str]]:
    """Message keys that the scripts name, and prefixes of the keys that they build."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in SCRIPTS)
    built = [part.partition("$")[0] for part in re.findall(r"\bt\(`([^`]+)`", text)]
    built += [f"{group}." for group in re.findall(r'\btranslateName\("(\w+)"', text)]
    return set(re.findall(r'"([a-z]+(?:[._][\w ]+)*)"', text)), built


def test_every_message_is_there_and_used():
    text = "\n".join(path.read_text(encoding="utf-8") for path in SCRIPTS)
    named, built = used_keys()
    assert {key for key in re.findall(r'\bt\("([^"]+)"', text)} <= set(MESSAGES["en"])
    unused = [key for key in MESSAGES["en"] if key not in named and not any(b and key.startswith(b) for b in built)]
    assert unused == []


FORBIDDEN = [
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "eval(",
    "new Function",
    "DOMParser",
    "srcdoc",
    "importScripts",
    "javascript:",
    ".cookie",
    "WebSocket",
    "EventSource",
    "sendBeacon",
    'setAttribute("style"',
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_text_never_becomes_html(path):
    text = path.read_text(encoding="utf-8")
    assert [word for word in FORBIDDEN if word in text] == []
    assert text.startswith("// ") and "// @ts-check" in text and text.count("\n") <= 400


def test_nothing_is_loaded_from_elsewhere():
    for path in WEB.rglob("*"):
        if path.suffix in (".js", ".css", ".html", ".json"):
            hosts = set(
                re.findall(
                    r"(?:https?:)?//([\w.-]+\.\w+)",
                    re.sub(r"^\s*//.*$", "", path.read_text(encoding="utf-8"), flags=re.M),
                )
            )
            assert hosts <= {"www.w3.org"}, path
    page = (WEB / "index.html").read_text(encoding="utf-8")
    assert (
        "style=" not in page
        and "onload" not in page
        and re.findall(r"<script[^>]*>", page) == ['<script type="module" src="/static/js/main.js">']
    )


def test_the_page_is_small():
    files = StaticFiles().files
    assert sum(len(content) for content, *_ in files.values()) < 330_000
    assert "/" in files and "/static/js/main.js" in files and "/static/tsconfig.json" not in files


def test_a_file_that_is_known_is_not_sent_again(client):
    first = client.get("/static/style.css")
    assert first.headers["content-type"] == "text/css; charset=utf-8"
    assert client.get("/static/style.css", headers={"if-none-match": first.headers["etag"]}).status_code == 304
