"""Whether what was timed is right: who gives wrong answers gets no ratio, and wrong answers of our own end the run.

Contenders report as a fact the log-probabilities they give to fixed tokens, computed by the code that is timed, with as
many threads. They are compared with a reference: the mean distance, in standard deviations of the reference.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence

EXACT, ROUNDED = 1e-3, 0.1  # float32; weights or activations of fewer bits


def distance(found: Sequence[float], reference: Sequence[float]) -> float:
    """The mean of |found - reference| in standard deviations of the reference; NaN counts as infinitely far."""
    apart = statistics.fmean(abs(a - b) for a, b in zip(found, reference, strict=True)) / statistics.pstdev(reference)
    return apart if apart == apart else float("inf")


def judge(report: dict, reference: str, tolerances: Mapping[str, float]) -> str:
    """Writes report["wrong"], name to reason, for those beyond their tolerance; the distances as a table.

    facts: {"logprobs": {way: [...]}}. A way that the reference does not have is compared with the reference's first.
    """
    facts = {name: reported["logprobs"] for name, reported in report["facts"].items() if "logprobs" in reported}
    report["wrong"] = {}
    if reference not in facts:
        report["wrong"] = dict.fromkeys(report["figures"], f"{reference} was not there to compare with")
        return f"\nNo ratio: {reference} was not there to compare with."
    usual = next(iter(facts[reference].values()))
    lines = [f"\n| log-probabilities beside {reference} | way | distance | allowed |", "|---|---|---|---|"]
    for name, ways in facts.items():
        for way, values in ways.items():
            apart, allowed = distance(values, facts[reference].get(way, usual)), tolerances.get(name, ROUNDED)
            lines.append(f"| {name} | {way} | {apart:.2g} | {allowed:g} |")
            if apart > allowed:
                report["wrong"][name] = f"its answers are wrong: {way} is {apart:.2g} away, {allowed:g} is allowed"
    for name in report["figures"]:
        if name not in facts:
            report["wrong"][name] = "it reported no log-probabilities"
    return "\n".join(lines)


def end_if_wrong(report: dict, first: str) -> None:
    """The process ends with 1 where our own answers were wrong: nobody may overlook it."""
    if first in report.get("wrong", {}):
        sys.exit(f"{first}: {report['wrong'][first]}")
