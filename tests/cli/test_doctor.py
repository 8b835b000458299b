"""headwater doctor: its facts, and a finding for every planted fact."""

from __future__ import annotations

import copy
import json
import sys
import time

import pytest

from headwater import cli
from headwater.cli import doctor
from headwater.doctor import environment
from headwater.doctor.checks import CHECKS, Finding, run_checks


@pytest.fixture(scope="module")
def facts():
    return environment.collect_facts()


def healthy(facts):
    """The facts of a machine without problems."""
    healthy_facts = copy.deepcopy(facts)
    healthy_facts["machine"] |= {"memory free GB": 16.0, "disk free GB": 100.0, "shared memory GB": 8.0, "load": 0.0}
    healthy_facts["machine"]["usable cores"] = 2
    healthy_facts["threads"] |= {"torch": 2, "OMP_NUM_THREADS": None}
    healthy_facts["backends"] |= {"torch": "imported", "C++ compiler": "g++", "Python headers": True}
    healthy_facts["terminal"]["encoding"] = "utf-8"
    healthy_facts["speed"] = {"matmul fp32 GFLOP/s": 100, "matmul bf16 GFLOP/s": 200, "memory GB/s": 20}
    return healthy_facts


def test_a_healthy_machine_has_no_findings(facts):
    assert run_checks(healthy(facts)) == []


PLANTED = {
    "torch cannot be imported (ImportError: libgomp)": ("backends", "torch", "ImportError: libgomp"),
    "numpy 1.21.0 is installed, numpy>=2.0 is needed": ("versions", "numpy", "1.21.0"),
    "rich is not installed, rich>=13.9 is needed": ("versions", "rich", None),
    "only 0.5 GB of memory are free": ("machine", "memory free GB", 0.5),
    "only 0.1 GB of disk are free": ("machine", "disk free GB", 0.1),
    "processes share only 0.06 GB": ("machine", "shared memory GB", 0.06),
    "torch uses 16 threads on 2 cores": ("threads", "torch", 16),
    "torch uses 2 of 8 cores": ("machine", "usable cores", 8),
    "other programs keep 1.9 of 2 cores busy": ("machine", "load", 1.9),
    "bf16 is 50.0 times slower than fp32": ("speed", "matmul bf16 GFLOP/s", 2),
    "torch.compile cannot run: no C++ compiler": ("backends", "C++ compiler", None),
    "the terminal's encoding is ascii": ("terminal", "encoding", "ascii"),
}


@pytest.mark.parametrize("message", PLANTED)
def test_every_problem_is_found_and_has_a_remedy(facts, message):
    section, name, value = PLANTED[message]
    planted = healthy(facts)
    planted[section][name] = value
    (finding,) = run_checks(planted)
    assert message in finding.message
    assert finding.remedy


def test_no_check_goes_untested():
    assert len(PLANTED) >= len(CHECKS)


def test_problems_come_first(facts):
    planted = healthy(facts)
    planted["backends"] |= {"C++ compiler": None, "torch": "ImportError: x"}
    assert [finding.level for finding in run_checks(planted)] == ["problem", "note"]


def test_the_measured_speed_is_a_speed():
    start = time.perf_counter()
    speed = environment.measure_speed(seconds=0.05)
    assert all(value > 0 for value in speed.values())
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("rich", [True, False])
def test_brackets_in_a_remedy_are_not_markup(facts, monkeypatch, capsys, rich):
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    doctor.print_report(healthy(facts), [Finding("note", "too old", 'pip install "package[extra]"')])
    assert 'pip install "package[extra]"\n' in capsys.readouterr().out


def test_without_rich_there_is_still_a_report(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    cli.main(["doctor", "--no-speed"])
    out = capsys.readouterr().out
    assert "usable cores" in out
    assert "[bold]" not in out


def test_a_package_that_is_half_installed_is_a_problem(facts, monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    (finding,) = run_checks(healthy(facts))
    assert (finding.level, "not fully installed" in finding.message) == ("problem", True)


def test_without_torch_there_is_still_a_report(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["doctor", "--json"]) == 7
    report = json.loads(capsys.readouterr().out)
    assert report["backends"]["torch"].startswith("ModuleNotFoundError")
    assert report["findings"][0]["level"] == "problem"


def test_json_holds_all_sections(capsys):
    code = cli.main(["doctor", "--json", "--no-speed"])
    report = json.loads(capsys.readouterr().out)
    assert {"versions", "machine", "threads", "backends", "terminal", "findings"} == set(report)
    assert code == (7 if any(f["level"] == "problem" for f in report["findings"]) else 0)


def test_the_report_is_plain_where_there_is_no_terminal(capsys):
    cli.main(["doctor", "--no-speed"])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "usable cores" in out


def test_container_limits_are_respected(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 9000000 kB",
        "/sys/fs/cgroup/cpu.max": "50000 100000",
    }
    files |= {"/sys/fs/cgroup/memory.max": "2000000000", "/sys/fs/cgroup/memory.current": "500000000"}
    monkeypatch.setattr(environment, "read_text", files.get)
    assert environment.memory_gb() == (2.0, 1.5)
    assert environment.usable_cores() == 0.5
