"""The generated reference pages docs/*/reference/: command line, training settings, Python API.

    python scripts/reference.py            write them (make reference)
    python scripts/reference.py --check    exit 1 if one of them is out of date

They come from the argparse parsers, from TrainConfig, and from signatures and docstrings. Flags and settings are in the
language of the page; docstrings are English in both.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

import headwater
from headwater import parts, variants
from headwater.cli import VERBS, build_parser
from headwater.cli.parser import COMMON_FLAGS
from headwater.cli.train import HEADINGS
from headwater.errors import Fault
from headwater.i18n import LANGUAGES, set_language, translated
from headwater.training.config import FIELDS, SECTIONS

ROOT = Path(__file__).resolve().parent.parent
LINE_LENGTH = 110

# Every fixed text of the pages: name -> English, Chinese.
TEXTS = {
    "generated": ("Written by `make reference`; do not edit it by hand.", "由 `make reference` 生成，请勿手工修改。"),
    "cli": ("Command line reference", "命令行参考"),
    "cli_intro": (
        "Every command with its arguments and flags, from the parsers; `headwater VERB --help` prints the same.",
        "全部命令及其参数和选项，直接取自解析器；`headwater 命令 --help` 显示同样的内容。",
    ),
    "argument": ("argument", "参数"),
    "meaning": ("meaning", "含义"),
    "everywhere": ("Everywhere", "通用选项"),
    "settings_link": (
        "Every [setting](settings.md) is a flag too: `batch_tokens` is `--batch-tokens`.",
        "每一项[设置](settings.md)也都是选项：`batch_tokens` 写作 `--batch-tokens`。",
    ),
    "settings": ("Settings reference", "训练设置参考"),
    "settings_intro": (
        "Every setting of `headwater train`, from `TrainConfig`: a flag on the command line (`--batch-tokens 4096`),\n"
        "a key of a YAML file (`--config`), a keyword in Python (`headwater.train(..., batch_tokens=4096)`).\n"
        "0 or `auto` means: chosen when the data has been read; `config.yaml` of the run says what was chosen.\n"
        "A setting marked *resume* may change when a run is resumed.",
        "`headwater train` 的全部设置，取自 `TrainConfig`：命令行上是选项（`--batch-tokens 4096`），\n"
        "YAML 文件里是键（`--config`），Python 里是关键字参数（`headwater.train(..., batch_tokens=4096)`）。\n"
        "0 或 `auto` 表示读过数据之后再定，定下的值写在训练目录的 `config.yaml` 里。\n"
        "标有“可改”的设置在恢复训练时可以改变。",
    ),
    "setting": ("setting", "设置"),
    "type": ("type", "类型"),
    "default": ("default", "默认值"),
    "resume": ("resume", "恢复时"),
    "yes": ("resume", "可改"),
    "api": ("API reference", "API 参考"),
    "api_intro": (
        "The public names with their signatures and docstrings; `help(name)` prints the same.",
        "公开的名字，连同签名和文档字符串（英文）；`help(名字)` 显示同样的内容。",
    ),
    "train_keywords": (
        "`**settings`: every [setting](settings.md) by its name.",
        "`**settings`：每一项[设置](settings.md)，按名字给出。",
    ),
    "errors": ("Errors", "错误"),
}

# Modules whose package exports nothing, and their public names.
MODULES = {
    "headwater.parts": ["part", "must", "to_dict", "from_dict", "swap"],
    "headwater.quantization.layers": ["quantize"],
    "headwater.generation.engine": ["Engine"],
    "headwater.generation.beam": ["Beam"],
    "headwater.generation.speculative": ["PromptLookup", "Draft"],
    "headwater.generation.sampling": ["Greedy", "Temperature", "TopK", "TopP", "MinP"],
}


def text(name: str, language: str) -> str:
    return TEXTS[name][LANGUAGES.index(language)]


def cell(content: object) -> str:
    """A text as a cell of a Markdown table."""
    return " ".join(str(content).split()).replace("|", "\\|")


def header(page: str, language: str) -> list[str]:
    """The title, the link to the page in the other language, and the introduction."""
    other, name = ("zh", "中文") if language == "en" else ("en", "English")
    index = "index" if language == "en" else "目录"
    links = f"[{name}](../../{other}/reference/{page}.md) · [{index}](../index.md)"
    return [
        f"# {text(page, language)}",
        "",
        links,
        "",
        text(f"{page}_intro", language),
        text("generated", language),
        "",
    ]


# ------------------------------------------------------------------------------------------------------- command line


def invocation(action: argparse.Action) -> str:
    """An argument as typed on the command line: FILE …, --vocab N, --quiet."""
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        return ", ".join(f"`{flag}`" for flag in action.option_strings)
    value = action.metavar or (action.option_strings and action.dest.upper()) or action.dest
    if action.choices and not action.metavar:
        value = "|".join(map(str, action.choices))
    suffix = " …" if action.nargs in ("+", "*") else ""
    if not action.option_strings:
        return f"`{value}{suffix}`"
    return ", ".join(f"`{flag} {value}{suffix}`" for flag in action.option_strings)


def flag_rows(parser: argparse.ArgumentParser, skip: set[str]) -> list[str]:
    """One table row per argument that --help shows."""
    formatter = parser._get_formatter()
    rows = []
    for action in parser._actions:
        if action.help is argparse.SUPPRESS or action.dest in skip:
            continue
        rows.append(f"| {cell(invocation(action))} | {cell(formatter._expand_help(action) if action.help else '')} |")
    return rows


def cli_page(language: str) -> str:
    common = {flag.lstrip("-") for flag in COMMON_FLAGS}
    columns = [f"| {text('argument', language)} | {text('meaning', language)} |", "|---|---|"]
    lines = [*header("cli", language), "```sh", "headwater --help", "```"]
    for group, verbs in VERBS.items():
        lines += ["", f"## {translated(group, language)}"]
        for verb, entry in verbs.items():
            parser = build_parser(verb)
            lines += ["", f"### {verb}", "", cell(entry.help), "", "```text", parser.usage_line(), "```"]
            rows = flag_rows(parser, common | (set(FIELDS) if verb == "train" else set()))
            if rows:
                lines += ["", *columns, *rows]
            if verb == "train":
                lines += ["", text("settings_link", language)]
    lines += ["", f"## {text('everywhere', language)}", "", *columns]
    lines += [f"| `{flag}` | {cell(meaning)} |" for flag, meaning in COMMON_FLAGS.items()]
    return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------------------------------------- settings


class Setting(NamedTuple):
    name: str
    section: str
    type: str
    default: str
    mutable: bool
    description: str


def type_name(annotation: Any) -> str:
    """The type of a setting, without its module: int, list[str], duration; of a Literal its values."""
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(typing.get_args(annotation))
    return {"YesNoAuto": "yes, no, auto", "Duration": "duration"}.get(
        annotation_text(annotation), annotation_text(annotation)
    )


def settings() -> Iterator[Setting]:
    """Every setting of TrainConfig, in its order."""
    types = {name: hint for section in SECTIONS.values() for name, hint in typing.get_type_hints(section).items()}
    for name, field in FIELDS.items():
        default = "" if field.default in ("", [], {}) else str(field.default)
        kind = type_name(types.get(name, str))
        yield Setting(name, field.section, kind, default, field.mutable, field.description)


def settings_page(language: str) -> str:
    names = [text(name, language) for name in ("setting", "type", "default", "resume", "meaning")]
    example = ["```sh", "headwater train pairs.tsv --size s --max-time 5m --dry-run", "```"]
    lines = [*header("settings", language), *example]
    for section in SECTIONS:
        heading = translated(HEADINGS[section], language)
        lines += ["", f"## {heading}", "", f"| {' | '.join(names)} |", "|---|---|---|---|---|"]
        for setting in settings():
            if setting.section == section and setting.name != "paths":
                resume = text("yes", language) if setting.mutable else ""
                default = f"`{setting.default}`" if setting.default else ""
                meaning = cell(translated(setting.description, language))
                lines.append(f"| `{setting.name}` | {setting.type} | {default} | {resume} | {meaning} |")
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------------- Python API


def annotation_text(annotation: Any) -> str:
    """The source of an annotation, without quotes and module names."""
    code = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", code)


def default_text(default: Any) -> str:
    """A default as Python code; a function by its name, so that no address is printed."""
    return default.__name__ if callable(default) and hasattr(default, "__name__") else " ".join(repr(default).split())


def parameters(signature: inspect.Signature) -> list[str]:
    """Each parameter with annotation and default. All settings of TrainConfig together are **settings."""
    items = []
    keyword_only = False
    has_settings = len(set(signature.parameters) & set(FIELDS)) > len(FIELDS) / 2
    for name, parameter in signature.parameters.items():
        if has_settings and name in FIELDS and name != "paths":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            items.append("*")
        keyword_only = keyword_only or parameter.kind in (
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.VAR_POSITIONAL,
        )
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        item = stars + name
        if parameter.annotation is not inspect.Parameter.empty:
            item += f": {annotation_text(parameter.annotation)}"
        if parameter.default is not inspect.Parameter.empty:
            item += f" = {default_text(parameter.default)}"
        items.append(item)
    return [*items, "**settings"] if has_settings else items


def definition(name: str, value: Any) -> str:
    """The first lines of a function or class: its signature, broken where it is long."""
    if isinstance(value, type) and issubclass(value, BaseModel):
        return f"class {name}(**settings):"
    signature = inspect.signature(value)
    items = parameters(signature)
    is_class = isinstance(value, type)
    keyword = "class" if is_class else "def"
    arrow = ""
    if not is_class and signature.return_annotation is not inspect.Signature.empty:
        arrow = f" -> {annotation_text(signature.return_annotation)}"
    line = f"{keyword} {name}({', '.join(items)}){arrow}:"
    if is_class and not items:
        line = f"class {name}:"
    if len(line) <= LINE_LENGTH:
        return line
    return "\n".join([f"{keyword} {name}(", *(f"    {item}," for item in items), f"){arrow}:"])


def documentation(value: Any) -> list[str]:
    """The docstring, indented. The settings that train() and resume() list have their own page."""
    docstring = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
    if not docstring or docstring.startswith(f"{value.__name__}("):  # generated by @dataclass
        return ["    ..."]
    docstring = inspect.cleandoc(docstring).partition("\n\nEvery setting is a keyword")[0]
    lines = [f"    {line}".rstrip() for line in f'"""{docstring}'.splitlines()]
    return [*lines[:-1], lines[-1] + '"""'] if len(lines) == 1 else [*lines, '    """']


def entry(name: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        return ["", f"### {name}", "", ", ".join(f"`{key}`" for key in value)]
    return ["", f"### {name}", "", "```py", definition(name, value), *documentation(value), "```"]


def exported_names() -> dict[str, list[str]]:
    """Module -> its public names: packages that export names, the parts of headwater.variants, and MODULES."""
    exported = {"headwater": list(headwater.__all__)}
    for package in sorted(info.name for info in pkgutil.iter_modules(headwater.__path__) if info.ispkg):
        module = importlib.import_module(f"headwater.{package}")
        names = getattr(module, "__all__", None) or getattr(module, "LAZY_IMPORTS", {})
        if names:
            exported[module.__name__] = sorted(names)
    for info in pkgutil.iter_modules(variants.__path__):
        name = f"headwater.variants.{info.name}"
        importlib.import_module(name)
        exported[name] = [part for part, value in sorted(parts.REGISTRY.items()) if value.__module__ == name]
    return exported | MODULES


def public_names(module_name: str, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Functions, classes and registries, by name; errors are in their own section."""
    module = importlib.import_module(module_name)
    for name in names:
        value = getattr(module, name)
        is_error = isinstance(value, type) and issubclass(value, Fault)
        if (callable(value) or isinstance(value, dict)) and not is_error:
            yield name, value


def api_page(language: str) -> str:
    example = ["```sh", 'python -c "import headwater; help(headwater.check)"', "```"]
    lines = [*header("api", language), *example]
    seen: set[int] = set()  # a name that two packages export is listed under the first
    for module_name, names in exported_names().items():
        lines += ["", f"## {module_name}"]
        for name, value in public_names(module_name, names):
            if id(value) in seen:
                continue
            seen.add(id(value))
            lines += entry(name, value)
            if module_name == "headwater" and name in ("train", "resume"):
                lines += ["", text("train_keywords", language)]
    errors = inspect.getdoc(importlib.import_module("headwater.errors")) or ""
    lines += ["", f"## {text('errors', language)}", "", "```text", errors, "```"]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------------ writing

PAGES = {"cli": cli_page, "settings": settings_page, "api": api_page}


def page_path(page: str, language: str) -> Path:
    return ROOT / "docs" / language / "reference" / f"{page}.md"


def generate(page: str, language: str) -> str:
    """The text of a page, from the current code."""
    before = set_language(language)
    try:
        return PAGES[page](language)
    finally:
        set_language(before)


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for language in LANGUAGES:
        for page in PAGES:
            path = page_path(page, language)
            expected = generate(page, language)
            if path.is_file() and path.read_text(encoding="utf-8") == expected:
                continue
            stale.append(path)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(expected, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: {'out of date; run make reference' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
