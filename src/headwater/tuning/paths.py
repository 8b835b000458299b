"""Path patterns of tuning methods: "*.self_attn.*" matches the path of a module, with * for any characters."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from torch import nn

from headwater.core import Transformer
from headwater.core.functional import ChangedLinear
from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.quantization.layers import QuantizedLinear

TOKEN_TABLE = "embed.tokens"  # the path of a table of tokens ends so
ALL_LINEAR = "all-linear"  # every linear layer but those of the head
LINEAR_TYPES = (nn.Linear, QuantizedLinear, ChangedLinear)

Patterns = str | tuple[str, ...]


def linear_paths(model: Transformer) -> list[str]:
    """The paths of all linear layers, without those inside a changed one."""
    paths = [path for path, module in model.named_modules() if isinstance(module, LINEAR_TYPES)]
    return [path for path in paths if ".base" not in path and ".changes." not in path]


def match_paths(patterns: Patterns, known: Sequence[str], what: str) -> list[str]:
    """The known paths that match a pattern, in their order. A pattern that matches nothing is refused.

    what: what the paths name, for the message.
    """
    chosen: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        matched = {path for path in known if _matches(path, pattern)}
        if not matched:
            raise BadSetting(
                _(
                    "target {pattern!r} matches no {what} of this model; {nearest}",
                    pattern=pattern,
                    what=what,
                    nearest=nearest(pattern, generalized(known)),
                )
            )
        chosen |= matched
    return [path for path in known if path in chosen]


def _matches(path: str, pattern: str) -> bool:
    if pattern == ALL_LINEAR:
        return not path.startswith("head.") and not path.endswith(TOKEN_TABLE)
    return fnmatch.fnmatchcase(path, pattern)


def generalized(paths: Iterable[str]) -> list[str]:
    """Paths with * for the number of the layer, each once.

    >>> generalized(["decoder.layers.0.ffn.up", "decoder.layers.1.ffn.up", "head.out"])
    ['*.ffn.up', 'head.out']
    """
    return list(dict.fromkeys(re.sub(r"^.*\.\d+(?=\.)", "*", path) for path in paths))
