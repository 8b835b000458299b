"""Fixtures of the command line tests."""

from __future__ import annotations

import pytest

from headwater.cli import kernels


@pytest.fixture(autouse=True)
def kernel_warning_printed():
    """Mark the warning about missing C kernels as printed, so that tests see all other output."""
    kernels.reported.add(kernels.missing_kernels())
