"""A wire between two machines that falls silent: both sides end, neither has a result of its own, the run goes on."""

from __future__ import annotations

import json
import sys

import pytest
from tests.training.test_team import Crew, close
from tests.training.wires import possible

from headwater.errors import Unavailable

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not possible(), reason="this machine lends no networks of their own (unshare, ip)"
)
SILENCE = 4.0  # seconds, in place of twenty


@pytest.fixture(scope="module")
def crew():
    made = Crew("unshare", "--user", "--map-root-user", "--net")
    yield made
    made.process.stdin.close()
    made.process.wait(timeout=60)


@pytest.fixture(scope="module")
def unbroken(crew, tmp_path_factory):
    first, second = crew.together(2, tmp_path_factory.mktemp("unbroken") / "c", wired=True)
    assert first["lines"] == second["lines"] and len(first["lines"]) == 50
    return first


def test_a_cut_wire_ends_both_sides_and_the_run_goes_on_to_the_same_end(crew, unbroken, tmp_path):
    found = crew(2, tmp_path / "c", wired=True, cut=13, silence=SILENCE)
    assert found["codes"] == [Unavailable.exit_code] * 2 and found["seconds"] < 60
    near, far = ((tmp_path / f"stderr-{rank}").read_text() for rank in (0, 1))
    assert "error: process 1 has been silent for 4 s; process 0 stops here" in near
    assert "process 1 stops here" in far and "the run goes on from its last checkpoint" in far
    saved = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert saved == ["step-00000005", "step-00000010"], "no side went on alone"
    again = crew.together(2, tmp_path / "c", wired=True)
    assert json.loads(again[0]["lines"][0])[0] == 11
    assert again[0]["lines"] == again[1]["lines"] == unbroken["lines"][10:]
    assert again[0]["weights"] == unbroken["weights"]


def test_a_wire_that_is_silent_for_a_moment_changes_nothing(crew, unbroken, tmp_path):
    found = crew.together(2, tmp_path / "c", wired=True, cut=13, mend=2.0)
    assert found[0]["lines"] == found[1]["lines"] == unbroken["lines"]
    assert found[0]["weights"] == unbroken["weights"]


def test_over_a_wire_the_curve_is_that_of_one_process(crew, unbroken, tmp_path):
    close(unbroken["lines"], crew.together(1, tmp_path / "c")[0]["lines"])
