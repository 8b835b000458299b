"""A wire between two machines that falls silent: both sides end, neither has a result of its own, the run goes on."""

from __future__ import annotations

import json
import sys

import pytest
from tests.training.network import possible
from tests.training.test_distributed import Workers, close

from headwater.errors import Unavailable

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not possible(), reason="this machine lends no networks of their own (unshare, ip)"
)
TIMEOUT = 4.0  # seconds, in place of 120


@pytest.fixture(scope="module")
def workers():
    made = Workers("unshare", "--user", "--map-root-user", "--net")
    yield made
    made.process.stdin.close()
    made.process.wait(timeout=60)


@pytest.fixture(scope="module")
def unbroken(workers, tmp_path_factory):
    first, second = workers.results(2, tmp_path_factory.mktemp("unbroken") / "c", wired=True)
    assert first["lines"] == second["lines"] and len(first["lines"]) == 50
    return first


def test_a_cut_wire_ends_both_sides_and_the_run_goes_on_to_the_same_end(workers, unbroken, tmp_path):
    found = workers(2, tmp_path / "c", wired=True, cut=13, timeout=TIMEOUT)
    assert found["codes"] == [Unavailable.exit_code] * 2 and found["seconds"] < 60
    near, far = (said["fault"] for said in found["said"])
    assert "process 1 does not answer" in near and "process 0 does not answer" in far
    saved = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert saved == ["step-00000005", "step-00000010"], "no side went on alone"
    again = workers.results(2, tmp_path / "c", wired=True)
    assert json.loads(again[0]["lines"][0])[0] == 11
    assert again[0]["lines"] == again[1]["lines"] == unbroken["lines"][10:]
    assert again[0]["weights"] == unbroken["weights"]


def test_a_wire_that_is_silent_for_a_moment_changes_nothing(workers, unbroken, tmp_path):
    found = workers.results(2, tmp_path / "c", wired=True, cut=13, fix=2.0)
    assert found[0]["lines"] == found[1]["lines"] == unbroken["lines"]
    assert found[0]["weights"] == unbroken["weights"]


def test_over_a_wire_the_curve_is_that_of_one_process(workers, unbroken, tmp_path):
    close(unbroken["lines"], workers.results(1, tmp_path / "c")[0]["lines"])
