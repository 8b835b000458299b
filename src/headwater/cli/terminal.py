"""What a model says, made safe for a terminal: control characters are shown, not obeyed."""

from __future__ import annotations

import re
import sys

# C0 and C1 controls (among them the escape that begins every terminal command) but for tab and newline; and the marks
# that turn the direction of writing, with which a line can be made to read as another.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    r"""Each unsafe character as \xNN or \uNNNN. It looks at single characters, so a stream may come in pieces.

    >>> harmless("red: \x1b[31m 你好")
    'red: \\x1b[31m 你好'
    """
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def for_terminal(text: str) -> str:
    """What may be printed as it is: to a terminal only what is harmless, to a file or a pipe all of it."""
    return harmless(text) if sys.stdout.isatty() else text
