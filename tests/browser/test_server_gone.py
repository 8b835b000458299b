"""The server stops and restarts: one banner, the last figure stays, and the page recovers by itself."""

from __future__ import annotations

import json
import time

import pytest

from headwater.serving.model_store import StoredModel

TEXT = "the cat sat on the mat"
BANNER = "#unreachable"
PAINTED = """() => {
    const canvas = document.querySelector("canvas.heat"), pen = canvas.getContext("2d");
    const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
    return new Set(Array.from({length: data.length / 4}, (_, n) => data.slice(4 * n, 4 * n + 3).join())).size;
}"""


@pytest.fixture
def server(tmp_path, start_server):
    """A server that can be stopped and restarted on the same port, with a run in progress."""

    class Server:
        folder = tmp_path / "run"
        context = None
        address = ""

        def start(self):
            port = int(self.address.rstrip("/").rpartition(":")[2]) if self.address else 0
            self.context = start_server([StoredModel("run", "run", self.folder)], port)
            self.address = self.context.__enter__()

        def stop(self):
            if self.context:
                self.context.__exit__(None, None, None)
            self.context = None

        def learn(self, step):
            line = {"step": step, "split": "train", "loss": 5 / step, "lr": 1e-3, "grad_norm": 1.0, "time": time.time()}
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    built = Server()
    built.folder.mkdir()
    (built.folder / "config.yaml").write_text("task: seq2seq\n")
    for step in (1, 2, 3):
        built.learn(step)
    built.start()
    yield built
    built.stop()


@pytest.fixture
def looking(visit, server):
    one = visit()
    one.address = server.address
    one.expected = ("ERR_", "Failed to fetch", "410", "willReadFrequently")
    return one


def test_a_map_is_never_blank(looking, server):
    page = looking.go("attention", model="tiny decoder", text=TEXT)
    page.wait_for_selector(".large[data-drawn] canvas")
    page.wait_for_function("() => [...document.querySelector('.map').heat.tiles.values()].every(Boolean)")
    before = page.evaluate(PAINTED)
    assert before > 20
    server.stop()
    page.click(".thumbnail[data-head='1.1']")
    page.wait_for_selector(BANNER)
    assert "Server not reachable, trying again" in page.inner_text(BANNER)
    page.click(".thumbnail[data-head='1.2']")
    page.wait_for_timeout(1500)
    assert page.locator(BANNER).count() == 1, "one banner for all waiting requests"
    assert page.evaluate(PAINTED) > 20, "the last figure stays"
    assert page.locator(".notice.bad").count() == 0
    server.start()
    page.wait_for_selector(BANNER, state="detached")
    page.wait_for_function("() => [...document.querySelector('.map').heat.tiles.values()].every(Boolean)")
    assert page.get_attribute(".large", "data-drawn") == "decoder.self_attn 1 2"
    page.focus("canvas.heat")
    page.keyboard.press("ArrowDown")
    page.wait_for_function("() => /attends to/.test(document.querySelector('.readout.big').textContent)")


def test_a_run_is_watched_again(looking, server):
    page = looking.go("training", run="run")
    page.wait_for_function("() => document.querySelector('[role=status]').textContent.includes('step 3')")
    server.stop()
    page.wait_for_selector(BANNER)
    assert page.locator(".charts svg").count() >= 1, "the curves stay"
    server.learn(4)
    server.start()
    page.wait_for_function("() => document.querySelector('[role=status]').textContent.includes('step 4')")
    assert page.locator(BANNER).count() == 0
    server.learn(5)
    page.wait_for_function("() => document.querySelector('[role=status]').textContent.includes('step 5')")


def test_a_run_is_watched_after_a_refusal(looking, server):
    """A temporarily missing folder does not stop the polling, and the curves stay."""
    looking.expected = ("404",)
    page = looking.go("training", run="run")
    page.wait_for_function("() => document.querySelector('[role=status]').textContent.includes('step 3')")
    server.folder.rename(server.folder.with_name("away"))
    page.wait_for_selector(".notice.bad")
    assert page.locator(".charts svg").count() >= 1
    server.folder.with_name("away").rename(server.folder)
    server.learn(6)
    page.wait_for_function("() => document.querySelector('[role=status]').textContent.includes('step 6')")
    page.wait_for_selector(".notice.bad", state="detached")


def test_a_view_that_was_not_loaded_comes_later(looking, server):
    page = looking.go("start", model="tiny decoder")
    server.stop()
    page.click("nav a[data-view=walkthrough]")
    page.wait_for_selector(BANNER)
    assert page.locator(".notice.bad").count() == 0 and "Something went wrong" not in page.inner_text("body")
    server.start()
    page.wait_for_selector(".text-form")
    page.wait_for_selector(BANNER, state="detached")


def test_the_banner_is_chinese_on_a_chinese_page(visit, server):
    one = visit(locale="zh-CN")
    one.address, one.expected = server.address, ("ERR_", "Failed to fetch")
    page = one.go("next-token", model="tiny decoder", text=TEXT)
    page.wait_for_selector(".candidates li")
    server.stop()
    page.click("#next-token-step")
    page.wait_for_selector(BANNER)
    assert page.inner_text(BANNER) == "连不上服务器，正在重试……"
    assert page.locator(".candidates li").count() > 5, "the last bars stay"
    server.start()
    page.wait_for_selector(BANNER, state="detached")
