"""What the tests of the command share."""

from __future__ import annotations

import pytest

from headwater.cli import kernels


@pytest.fixture(autouse=True)
def said_before():
    """On a machine without a compiler the note about it has been said: tests read all else that is said."""
    kernels.reported.add(kernels.missing_kernels())
