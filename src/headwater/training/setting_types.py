"""Types of settings: what a value may be written as, and what its type is called in help and errors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from headwater.i18n import _

MAX_NUMBER = 2**40


class SettingType(NamedTuple):
    """What a type of setting is called in the help of a command and in an error."""

    metavar: str
    description: str


_SECONDS_PER_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float | None:
    """'90s', '5m', '1h30m'; None for what is no time.

    >>> parse_duration("5m"), parse_duration("1.5h"), parse_duration("soon")
    (300.0, 5400.0, None)
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    complete = bool(parts) and "".join(number + unit for number, unit in parts) == text
    return sum(float(number) * _SECONDS_PER_UNIT[unit] for number, unit in parts) if complete else None


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError
    return value


def _to_seconds(value: Any) -> Any:
    seconds = parse_duration(value.strip().lower()) if isinstance(value, str) else None
    return _refuse_bool(value) if seconds is None else seconds


def _to_yes_no_auto(value: Any) -> str:
    text = str(value).lower()
    return {"true": "yes", "false": "no"}.get(text, text)


def _to_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _to_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    return [str(each) for each in value] if isinstance(value, (list, tuple)) else value


def _to_pairs(value: Any) -> Any:
    """{"source": "en"}, or text such as source=en,target=de."""
    if isinstance(value, str):
        value = dict(pair.split("=", 1) for pair in value.split(",") if "=" in pair) or value
    return {str(name): str(each) for name, each in value.items()} if isinstance(value, Mapping) else value


Int = Annotated[int, BeforeValidator(_refuse_bool), SettingType("N", _("an integer"))]
Float = Annotated[float, BeforeValidator(_refuse_bool), SettingType("X", _("a number"))]
Seconds = Annotated[float, BeforeValidator(_to_seconds), SettingType("TIME", _("a time such as 90s or 5m"))]
Bool = Annotated[bool, SettingType("yes|no", _("true or false, yes or no"))]
YesNoAuto = Annotated[
    Literal["yes", "no", "auto"], BeforeValidator(_to_yes_no_auto), SettingType("yes|no|auto", _("yes, no or auto"))
]
Text = Annotated[str, BeforeValidator(_to_text), SettingType("NAME", _("a string"))]
TextList = Annotated[list[str], BeforeValidator(_to_list), SettingType("FILE", _("a list of strings"))]
TextPairs = Annotated[dict[str, str], BeforeValidator(_to_pairs), SettingType("A=B", _("pairs such as source=en"))]


def setting(default: Any, description: str, mutable: bool = False, **bounds: float) -> Any:
    """One setting. mutable: it may change when a run is resumed. bounds: ge and lt of a number; from 0 if not given."""
    if type(default) in (int, float):
        bounds = {"ge": 0, "le": MAX_NUMBER, **bounds}
    constraints: dict[str, Any] = dict(bounds)
    return Field(default, description=description, json_schema_extra={"mutable": mutable}, **constraints)


class ConfigSection(BaseModel):
    """Settings that stand together in config.yaml and in the help."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)
