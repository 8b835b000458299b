"""A real model on the page: 128 tokens of SmolLM2, traced and drawn."""

from __future__ import annotations

import os
from urllib.parse import urlencode

import pytest

DRAWN = """() => {
    const map = document.querySelector(".map")?.heat;
    return map && map.tiles.size > 0 && [...map.tiles.values()].every(Boolean);
}"""


@pytest.mark.slow
def test_128_tokens_of_smollm2_are_drawn_within_two_seconds(browser, real):
    """From the request to the last tile, with the model in memory; the best of a few tries on a busy machine."""
    page = browser.new_page(locale="en-US")
    page.set_default_timeout(120_000)
    page.goto(real + "#/attention?" + urlencode({"model": "smollm2", "text": "once"}))
    page.wait_for_function(DRAWN)
    durations = []
    while len(durations) < 4 and not any(t < 2000 for t in durations):
        text = " ".join([f"The cat number {len(durations)} sat on the mat because it was tired of the rain and"] * 9)[
            :520
        ]
        page.fill("#text", text)
        start = page.evaluate("performance.now()")
        page.keyboard.press("Control+Enter")
        page.wait_for_function("() => (document.querySelector('.map')?.heat.source.rows.length ?? 0) > 100")
        page.wait_for_function(DRAWN)
        durations.append(page.evaluate("performance.now()") - start)
    tokens = page.evaluate("document.querySelector('.map').heat.source.rows.length")
    page.close()
    assert tokens >= 120
    if min(durations) >= 2000 and os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip(f"the machine is too busy to tell: load {os.getloadavg()[0]:.1f}, {durations} ms")
    assert min(durations) < 2000, durations
