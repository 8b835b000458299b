"""A real browser against the real server; without a browser the tests are skipped with the reason."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlencode

import pytest

from headwater.families.hub import HUB
from headwater.serving.model_store import ModelStore, StoredModel, build_tiny_model
from headwater.serving.security import AccessPolicy
from headwater.serving.server import bind_socket, build_server
from headwater.weights.native import save_native

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
EVIL = '<img src=x onerror="window.hit=1">'


def no_browser() -> str:
    """Why the browser tests cannot run here; empty if they can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ModuleNotFoundError:
        return "the browser part did not run: playwright is not installed (make browser)"
    if not any(map(shutil.which, BROWSERS)):
        return "the browser part did not run: no chromium is installed (apt-get install chromium fonts-noto-cjk)"
    return ""


def pytest_collection_modifyitems(items):
    reason = no_browser()
    for item in items:
        if reason and Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=path, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A run with two checkpoints whose name is an HTML injection, and a model that a test may delete."""
    from headwater.training.checkpoint import CheckpointManager
    from headwater.weights.native import named_tensors
    from headwater.weights.safetensors import serialize_safetensors

    root = tmp_path_factory.mktemp("served")
    tiny = build_tiny_model("tiny encoder-decoder")
    for name in ("doomed", "run"):
        where = root / name / "model" if name == "run" else root / name
        save_native(where, tiny.model, {"task": "seq2seq"})
        tiny.tokenizer.save(where)
    run = root / "run"
    (run / "config.yaml").write_text("task: seq2seq\n")
    norms = {"encoder.layers.0": 0.5, "decoder.layers.0": 0.25, "frozen": 0.0}
    train = {"split": "train", "lr": 1e-3, "grad_norm": 1.0, "time": 1.0}
    lines = [
        {"step": n, "loss": 5 / n, **train, "grad_norms": {name: v / n for name, v in norms.items()}}
        for n in range(1, 41)
    ]
    lines += [
        {"step": n, "split": "valid", "loss": 4 / n, "exact": n / 40, "best": True, "time": 1.0} for n in (20, 40)
    ]
    lines += [{"step": 40, "note": EVIL, "time": time.time()}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [{"step": n, "input": f"the cat {EVIL}", "output": f"{EVIL} {n}"} for n in (20, 40)]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    (run / "checkpoints").mkdir()
    store = CheckpointManager(run / "checkpoints", "run")
    for step in (20, 40):
        tensors = {name: value * (1 + step / 100) for name, value in named_tensors(tiny.model).items()}
        store.save(step, {"model.safetensors": lambda t=tensors: serialize_safetensors("model.safetensors", t)})
    return {"doomed": root / "doomed", EVIL: run}


@contextlib.contextmanager
def serving(items: list[StoredModel], port: int = 0):
    """Run a real server with these models; yields its address."""
    listening = bind_socket("127.0.0.1", port)
    port = listening.getsockname()[1]
    running = build_server(ModelStore(items), AccessPolicy("127.0.0.1", port))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}/"
    running.should_exit = True
    with contextlib.suppress(OSError):  # wakes its loop, which a test with a clock of its own may have put to sleep
        socket.create_connection(("127.0.0.1", port), 1).close()
    thread.join(10)


@pytest.fixture(scope="session")
def start_server():
    """A context manager that runs a server with these models."""
    return serving


@pytest.fixture(scope="session")
def address(folders):
    with serving([StoredModel("doomed", "model", folders["doomed"]), StoredModel(EVIL, "run", folders[EVIL])]) as where:
        yield where


@pytest.fixture(scope="session")
def real():
    """The address of a server on SmolLM2, where it is installed."""
    path = HUB["smollm2"].installed_path()
    if path is None or not path.exists():
        pytest.skip("SmolLM2 is not installed: make models")
    with serving([StoredModel("smollm2", "model", path)]) as where:
        yield where


class Visit:
    """A page that records external requests and console errors."""

    def __init__(self, context, address: str) -> None:
        self.page, self.address = context.new_page(), address
        self.page.set_default_timeout(60_000)  # the first visit may wait for C to be compiled
        self.external_requests: list[str] = []
        self.errors: list[str] = []
        self.expected: tuple[str, ...] = ()
        self.page.on("request", lambda r: self.external_requests.append(r.url) if not self._ours(r.url) else None)
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))

    def _ours(self, url: str) -> bool:
        return url.startswith((self.address, "blob:" + self.address, "data:"))

    def go(self, view: str, **params):
        """Open a view and wait until it is drawn."""
        place = f"#/{view}" + (f"?{urlencode(params)}" if params else "")
        if self.page.url.startswith(self.address):  # as a link would, without loading the page again
            self.page.evaluate("to => new Promise(done => { location.hash = to; setTimeout(done, 60); })", place)
        else:
            self.page.goto(self.address + place)
        return self.settled()

    def settled(self):
        self.page.wait_for_selector(".view[data-ready=yes]")
        self.page.wait_for_selector("[aria-busy=true]", state="detached")
        return self.page

    def check(self) -> None:
        assert self.external_requests == [], "a request to another host"
        assert [e for e in self.errors if not any(x in e for x in self.expected)] == []
        assert self.page.evaluate("window.hit === undefined"), "text was executed as code"


@pytest.fixture
def visit(browser, address):
    """Create visits; each is checked at the end: no external request, no console error, no injected code."""
    visits: list[tuple] = []

    def make(**options):
        options = {"viewport": {"width": 1280, "height": 900}, "locale": "en-US", **options}
        context = browser.new_context(**options)
        one = Visit(context, address)
        visits.append((context, one))
        return one

    yield make
    for context, one in visits:
        if os.environ.get("HEADWATER_SHOTS"):
            one.page.screenshot(path=f"{os.environ['HEADWATER_SHOTS']}/{id(one)}.png", full_page=True)
        one.check()
        context.close()
