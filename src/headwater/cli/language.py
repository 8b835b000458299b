"""The language the command line speaks: English or Chinese, by flag, setting or locale."""

from __future__ import annotations

import os
from collections.abc import Mapping

from headwater.i18n import LANGUAGES

__all__ = ["LANGUAGES", "error_line", "language", "say"]


def language(settings: Mapping[str, str] = os.environ) -> str:
    """The first of HEADWATER_LANG (which --lang sets), LC_ALL, LC_MESSAGES and LANG that is set decides.

    >>> language({"LANG": "zh_CN.UTF-8"}), language({"HEADWATER_LANG": "en", "LANG": "zh_CN.UTF-8"}), language({})
    ('zh', 'en', 'en')
    """
    names = ("HEADWATER_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
    chosen = next((settings[name] for name in names if settings.get(name)), "en")
    return "zh" if chosen.lower().startswith("zh") else "en"


def say(en: str, zh: str | None = None) -> str:
    """One of two texts that mean the same. Without the Chinese, it is looked up in the catalogue (headwater.i18n)."""
    if language() == "en":
        return en
    if zh is not None:
        return zh
    from headwater.inspection.words import chinese

    return chinese(en)


def error_line(message: str) -> str:
    """What a terminal shows of an error."""
    return say("error: ", "错误：") + say(message)
