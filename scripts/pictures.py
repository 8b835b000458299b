"""Screenshots of the web page for docs/img, taken in a real browser, from a run of `headwater demo`.

    python scripts/pictures.py RUN          RUN: the folder of the run; smollm2 must be installed (make models)

Chromium and the playwright package must be installed (make browser; apt-get install chromium fonts-noto-cjk).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import headwater
from headwater.serving.model_store import build_tiny_model
from headwater.weights.native import save_native

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "img"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1180, "height": 792}
COLORS = 96  # the page has few: with a palette a PNG has a quarter of its size
DATE = {"source": ">>zh 15 November 2026"}


@dataclass
class Picture:
    """A screenshot: file name, view and its parameters, locale and color scheme."""

    name: str
    view: str
    params: dict[str, str] = field(default_factory=dict)
    locale: str = "en-US"
    scheme: str = "light"
    full: bool = False  # the full height of the page, not only the viewport


def pictures(run: str, first: int) -> list[Picture]:
    """The screenshots of docs/*/web.md. run: its name on the page; first: the step of its first checkpoint."""
    date = {"model": run, **DATE}
    question = {"model": "smollm2", "text": "When Mary and John went to the store, John gave a drink to"}
    return [
        Picture("page-attention", "attention", {**date, "kind": "cross", "layer": "1", "head": "1"}),
        Picture("page-attribution", "attribution", {**date, "position": "2"}),
        Picture("page-next-token", "next-token", question, scheme="dark"),
        Picture("page-walkthrough", "walkthrough", date, locale="zh-CN"),
        Picture("page-compare", "compare", {**date, "compare": f"{run}@{first}"}, locale="zh-CN", full=True),
        Picture("page-training", "training", {"run": run}),
        Picture("page-visibility", "visibility", {"model": "bigbird", "length": "128", "position": "60"}, full=True),
    ]


def save_bigbird(folder: Path) -> Path:
    """An untrained encoder with BigBird attention: who sees whom does not depend on weights."""
    tokenizer = build_tiny_model("tiny encoder").tokenizer
    spec = headwater.encoder(len(tokenizer), d_model=16, heads=2, layers=3, attention="bigbird:block=8,random=1")
    save_native(folder / "bigbird", spec.build(seed=0), {"task": "masked-lm"})
    tokenizer.save(folder / "bigbird")
    return folder / "bigbird"


def take(browser: Browser, address: str, picture: Picture) -> None:
    context = browser.new_context(viewport=SIZE, locale=picture.locale, color_scheme=picture.scheme)
    page = context.new_page()
    page.goto(f"{address}#/{picture.view}?{urlencode(picture.params)}")
    page.wait_for_selector(".view[data-ready=yes]", timeout=120_000)
    page.wait_for_selector("[aria-busy=true]", state="detached", timeout=120_000)
    page.wait_for_timeout(500)  # until the last CSS transition has ended
    shot = Image.open(BytesIO(page.screenshot(full_page=picture.full)))
    shot.quantize(COLORS, dither=Image.Dither.NONE).save(IMAGES / f"{picture.name}.png", optimize=True)
    context.close()
    print(f"docs/img/{picture.name}.png")


def main(run: Path) -> None:
    first = min(int(folder.name.partition("-")[2]) for folder in (run / "checkpoints").glob("step-*"))
    folder = TemporaryDirectory()
    models = [str(run), "smollm2", str(save_bigbird(Path(folder.name)))]
    server = subprocess.Popen(
        [sys.executable, "-m", "headwater", "ui", *models, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        path = next(filter(None, map(shutil.which, BROWSERS)))
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
            for picture in pictures(run.name, first):
                take(browser, address, picture)
            browser.close()
    finally:
        server.terminate()
        folder.cleanup()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
