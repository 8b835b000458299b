"""No HTML injection by tokens, names, notes, samples or errors; and the content security policy blocks the rest."""

from __future__ import annotations

import pytest

ATTACKS = [
    '<img src=x onerror="window.hit=1">',
    "<script>window.hit=1</script>",
    '"><svg onload=window.hit=1>',
    "javascript:window.hit=1",
    "<iframe srcdoc='<script>parent.hit=1</script>'>",
    "{{constructor.constructor('window.hit=1')()}}",
    "</textarea><img src=x onerror=window.hit=1>",
    "${window.hit=1}`;window.hit=1;//",
    "\u202e<b onclick=window.hit=1>\u2066",
    "<a href='javascript:window.hit=1'>x</a>",
]
EVIL = ATTACKS[0]


@pytest.mark.parametrize("view", ["attention", "next-token", "walkthrough"])
def test_tokens_are_text(visit, view):
    one = visit()
    for text in (EVIL, " ".join(ATTACKS)):
        page = one.go(view, model="tiny decoder", text=text)
        page.wait_for_selector(".large[data-drawn] canvas, .candidates li, .step canvas")
        assert page.locator("main img, main iframe, main script").count() == 0


def test_names_notes_and_samples_are_text(visit):
    one = visit()
    for view in ("start", "training", "attention", "architecture", "chat"):
        page = one.go(view, model=EVIL, run=EVIL, source="a", text="b")
        page.wait_for_timeout(200)
        assert page.locator("main img, header img").count() == 0 and EVIL in page.inner_text("#model")
    page = one.go("training", run=EVIL)
    page.wait_for_selector(".notes")
    assert EVIL in page.inner_text(".notes") and EVIL in page.inner_text("tbody")


def test_errors_and_addresses_are_text(visit):
    one = visit()
    one.expected = ("404", "422")
    for attack in ATTACKS[:4]:
        refused(one, attack)


def refused(one, attack):
    page = one.go("attention", model=f"{attack}!", text=attack)
    page.wait_for_selector(".notice.bad")
    for odd in (
        f"#/{attack}",
        f"#/attention?model=tiny%20decoder&ids={attack}&kind={attack}&layer={attack}&text=a",
        "#/next-token?%ff",
    ):
        page.goto(one.address + odd)
        page.wait_for_timeout(150)
        assert page.locator("main img, main iframe").count() == 0


def test_generated_text_is_not_html(visit):
    one = visit()
    page = one.go("chat", model="tiny decoder")
    page.fill("#message", EVIL)
    page.click("#send")
    page.wait_for_selector(".message[data-done]")
    assert page.inner_text(".user-message") == EVIL and page.locator("main img").count() == 0


def test_the_policy_stops_what_gets_through(visit):
    """The planted fault: injected HTML and a request to another host are blocked by the browser."""
    one = visit()
    one.expected = ("Content Security Policy", "violates", "TrustedHTML", "Refused", "blocked", "Failed to load")
    page = one.go("start")
    stopped = page.evaluate("""async () => {
        let html = "let in", call = "let out";
        try { document.body.innerHTML = "<img src=x onerror='window.hit=1'>"; } catch (e) { html = "stopped"; }
        try { await fetch("http://192.0.2.1/"); } catch (e) { call = "stopped"; }
        return [html, call];
    }""")
    assert stopped == ["stopped", "stopped"]
    one.external_requests = [url for url in one.external_requests if "192.0.2.1" not in url]


def test_no_other_page_may_frame_it(visit, address, browser):
    context = browser.new_context()
    page = context.new_page()
    page.set_content(f"<iframe src='{address}'></iframe>")
    page.wait_for_timeout(500)
    assert all("Headwater" not in (frame.title() or "") for frame in page.frames)
    context.close()
