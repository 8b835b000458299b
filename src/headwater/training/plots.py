"""The curves of a run as pictures, from metrics.jsonl alone, so that they can be drawn again at any time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from headwater.training.events import Evaluated, Event, Stopped
from headwater.training.run import Run

SMOOTH, EVERY = 0.9, 30.0  # share of the past in a smoothed curve; seconds between pictures
WIDE = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "PingFang SC", "SimHei")


class Plots:
    """Draws at the end, and at evaluations if the last picture is some time ago: drawing takes half a second."""

    name = "plots"

    def __init__(self, run: Run) -> None:
        self.run, self.drawn = run, time.monotonic()

    def __call__(self, event: Event) -> None:
        old = time.monotonic() - self.drawn > EVERY
        if isinstance(event, Stopped) or (isinstance(event, Evaluated) and old):
            draw(self.run)
            self.drawn = time.monotonic()


def draw(run: Run) -> list[Path]:
    """plots/loss.png, plots/scores.png and plots/learning.png, as far as there is something to draw."""
    lines = run.lines("metrics.jsonl")
    train = [x for x in lines if x.get("split") == "train" and x["loss"] is not None]
    valid = [x for x in lines if x.get("split") == "valid"]
    drawn = []
    if train:
        drawn.append(_loss(run.plots / "loss.png", train, valid))
        drawn.append(_learning(run.plots / "learning.png", train))
    names = [
        n for n in (valid[-1] if valid else {}) if n not in ("step", "split", "best", "time", "loss", "perplexity")
    ]
    if names:
        drawn.append(_scores(run.plots / "scores.png", valid, names))
    return drawn


def _loss(path: Path, train: list[dict[str, Any]], valid: list[dict[str, Any]]) -> Path:
    figure, axes = _new()
    steps, losses = [x["step"] for x in train], [x["loss"] for x in train]
    axes.plot(steps, losses, color="#b8c4d6", linewidth=1, label="training, each logged step")
    axes.plot(steps, _smooth(losses), color="#2c5f9e", linewidth=1.8, label="training, smoothed")
    measured = [x for x in valid if x.get("loss") is not None]
    axes.plot([x["step"] for x in measured], [x["loss"] for x in measured], "o-", color="#c8553d", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="Loss")
    if losses[-1] > 0 and max(losses) / losses[-1] > 50:
        axes.set_yscale("log")
    return _save(figure, axes, path)


def _learning(path: Path, train: list[dict[str, Any]]) -> Path:
    figure, axes = _new()
    steps = [x["step"] for x in train]
    axes.plot(steps, [x["lr"] for x in train], color="#2c5f9e", label="learning rate")
    axes.set(xlabel="step", ylabel="learning rate", title="Learning rate and gradient norm")
    norms = axes.twinx()
    norms.plot(steps, [x["grad_norm"] for x in train], color="#c8a13d", linewidth=1, label="gradient norm")
    norms.set_ylabel("gradient norm")
    return _save(figure, axes, path)


def _scores(path: Path, valid: list[dict[str, Any]], names: list[str]) -> Path:
    figure, axes = _new()
    for name in names:
        axes.plot([x["step"] for x in valid], [x.get(name) for x in valid], "o-", label=name)
    axes.set(xlabel="step", ylabel="score", title="Validation")
    return _save(figure, axes, path)


def _smooth(values: list[float]) -> list[float]:
    out: list[float] = []
    for n, value in enumerate(values):
        share = min(SMOOTH, (n + 1) / (n + 10))
        out.append(value if not out else share * out[-1] + (1 - share) * value)
    return out


def _new() -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> Path:
    axes.legend(frameon=False)
    new = path.with_suffix(".new.png")
    new.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(new)
    new.replace(path)
    return path


def attention(trained: Any, text: str, path: Path) -> Path:
    """Where the decoder looked while it wrote: cross-attention of the last layer, the mean of its heads."""
    import torch

    from headwater.data.objectives.lesson import Marks

    marks, tokenizer = Marks.of(trained.tokenizer), trained.tokenizer
    source = [marks.bos, *tokenizer.encode(text, special=False), marks.eos]
    target = [marks.bos, *tokenizer.encode(trained(text, beam=1), special=False)]
    heard: list[torch.Tensor] = []
    tap = trained.model.decoder.layers[-1].cross_attn.kernel.weights
    handle = tap.register_forward_hook(lambda module, inputs, output: heard.append(output))
    try:
        with torch.no_grad():
            trained.model(torch.tensor([target]), source=torch.tensor([source]))
    finally:
        handle.remove()
    weights = heard[0][0].mean(0)  # [Q, S]
    read, wrote = ([tokenizer.piece(n) for n in ids] for ids in (source, [*target[1:], marks.eos]))
    figure, axes = _new()
    axes.grid(False)
    axes.imshow(weights, cmap="Blues", aspect="auto", vmin=0)
    fonts = _fonts()
    axes.set_xticks(range(len(read)), _drawable(read, fonts), rotation=60, ha="right", fontfamily=fonts)
    axes.set_yticks(range(len(wrote)), _drawable(wrote, fonts), fontfamily=fonts)
    axes.set(xlabel="read", ylabel="written", title="Cross-attention of the last layer")
    figure.savefig(path)
    return path


def _fonts() -> list[str]:
    """Fonts that are installed, one for Chinese and Japanese if there is any."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in WIDE if name in installed)]


def _drawable(pieces: list[str], fonts: list[str]) -> list[str]:
    """Without a font for them, wide characters are named by number rather than drawn as boxes."""
    if len(fonts) > 1:
        return pieces
    return ["".join(c if ord(c) < 0x2E80 else f"U+{ord(c):04X}" for c in piece) for piece in pieces]
