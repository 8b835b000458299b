"""What lets a command begin sooner: no garbage is looked for while modules are imported and a model is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """Half a million objects come into being and none of them is garbage: to look, again and again, is an eighth of the
    time to the first word. What is there afterwards stays until the command ends, so it is not looked through either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
