"""Correctness of the timed code: a contender with wrong outputs gets no ratio; wrong outputs of Headwater fail the run.

Contenders report the log-probabilities of fixed tokens as a fact, computed by the timed code with the same number of
threads. They are compared with a reference: the mean distance in standard deviations of the reference.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence

EXACT, ROUNDED = 1e-3, 0.1  # float32; weights or activations of fewer bits


def distance(values: Sequence[float], reference: Sequence[float]) -> float:
    """The mean of |values - reference| in standard deviations of the reference; infinity for NaN."""
    error = statistics.fmean(abs(a - b) for a, b in zip(values, reference, strict=True)) / statistics.pstdev(reference)
    return error if error == error else float("inf")


def judge(report: dict, reference: str, tolerances: Mapping[str, float]) -> str:
    """Set report["wrong"] (name -> reason) for contenders beyond their tolerance; returns the distances as a table.

    facts: {"logprobs": {mode: [...]}}. A mode that the reference does not have is compared with its first mode.
    """
    facts = {name: reported["logprobs"] for name, reported in report["facts"].items() if "logprobs" in reported}
    report["wrong"] = {}
    if reference not in facts:
        report["wrong"] = dict.fromkeys(report["figures"], f"{reference} is missing, nothing to compare with")
        return f"\nNo ratio: {reference} is missing, nothing to compare with."
    first_mode = next(iter(facts[reference].values()))
    lines = [f"\n| log-probabilities compared with {reference} | mode | distance | allowed |", "|---|---|---|---|"]
    for name, modes in facts.items():
        for mode, values in modes.items():
            error, allowed = distance(values, facts[reference].get(mode, first_mode)), tolerances.get(name, ROUNDED)
            lines.append(f"| {name} | {mode} | {error:.2g} | {allowed:g} |")
            if error > allowed:
                report["wrong"][name] = f"its outputs are wrong: {mode} is {error:.2g} away, {allowed:g} is allowed"
    for name in report["figures"]:
        if name not in facts:
            report["wrong"][name] = "it reported no log-probabilities"
    return "\n".join(lines)


def end_if_wrong(report: dict, first: str) -> None:
    """Exit with code 1 if the outputs of the first contender are wrong."""
    if first in report.get("wrong", {}):
        sys.exit(f"{first}: {report['wrong'][first]}")
