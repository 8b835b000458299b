"""Plots of a run (loss, learning rate, metrics, cross-attention), drawn from metrics.jsonl at any time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.training.run_dir import RunDir
from headwater.training.state import EvalEvent, Event, StopEvent

if TYPE_CHECKING:
    from headwater.training.predict import Predictor

# of the moving average; seconds between plots
SMOOTHING_DECAY = 0.9
PLOT_INTERVAL = 30.0
CJK_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "PingFang SC", "SimHei")


class PlotWriter:
    """Callback: plots at the end, and at evaluations, at most every PLOT_INTERVAL seconds."""

    name = "plots"

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.last_drawn = time.monotonic()

    def __call__(self, event: Event) -> None:
        old = time.monotonic() - self.last_drawn > PLOT_INTERVAL
        if isinstance(event, StopEvent) or (isinstance(event, EvalEvent) and old):
            plot_run(self.run)
            self.last_drawn = time.monotonic()


def plot_run(run: RunDir) -> list[Path]:
    """plots/loss.png, scores.png, learning.png and feedback.png, as far as there is something to draw."""
    lines = run.read_log("metrics.jsonl")
    train = [x for x in lines if x.get("split") == "train" and x["loss"] is not None]
    valid = [x for x in lines if x.get("split") == "valid"]
    drawn = []
    if train:
        drawn.append(_plot_loss(run.plots_dir / "loss.png", train, valid))
        drawn.append(_plot_lr(run.plots_dir / "learning.png", train))
        drawn += _plot_feedback(run.plots_dir / "feedback.png", train)
    names = [
        n for n in (valid[-1] if valid else {}) if n not in ("step", "split", "best", "time", "loss", "perplexity")
    ]
    if names:
        drawn.append(_plot_metrics(run.plots_dir / "scores.png", valid, names))
    return drawn


def _plot_loss(path: Path, train: list[dict[str, Any]], valid: list[dict[str, Any]]) -> Path:
    figure, axes = _new_figure()
    steps = [x["step"] for x in train]
    losses = [x["loss"] for x in train]
    axes.plot(steps, losses, color="#b8c4d6", linewidth=1, label="training, each logged step")
    axes.plot(steps, _smoothed(losses), color="#2c5f9e", linewidth=1.8, label="training, smoothed")
    measured = [x for x in valid if x.get("loss") is not None]
    axes.plot([x["step"] for x in measured], [x["loss"] for x in measured], "o-", color="#c8553d", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="Loss")
    if losses[-1] > 0 and max(losses) / losses[-1] > 50:
        axes.set_yscale("log")
    return _save_figure(figure, axes, path)


def _plot_lr(path: Path, train: list[dict[str, Any]]) -> Path:
    figure, axes = _new_figure()
    steps = [x["step"] for x in train]
    axes.plot(steps, [x["lr"] for x in train], color="#2c5f9e", label="learning rate")
    axes.set(xlabel="step", ylabel="learning rate", title="Learning rate and gradient norm")
    norms = axes.twinx()
    norms.plot(steps, [x["grad_norm"] for x in train], color="#c8a13d", linewidth=1, label="gradient norm")
    norms.set_ylabel("gradient norm")
    return _save_figure(figure, axes, path)


FEEDBACK_PANELS = (  # metrics of training steps that are drawn together
    ("Reward", ("reward", "reward_chosen", "reward_rejected", "margin")),
    ("KL divergence from the reference (nats)", ("kl",)),
    ("Share (%)", ("accuracy", "ended", "clipped")),
)


def _plot_feedback(path: Path, train: list[dict[str, Any]]) -> list[Path]:
    """Rewards, divergence and accuracy of a run on preferences or rewards, one panel each."""
    panels = [(title, [n for n in names if any(n in x for x in train)]) for title, names in FEEDBACK_PANELS]
    panels = [(title, names) for title, names in panels if names]
    if not panels:
        return []
    figure, axes = _new_figure(len(panels))
    axes = [axes] if len(panels) == 1 else list(axes)
    for axis, (title, names) in zip(axes, panels, strict=True):
        for name in names:
            lines = [x for x in train if x.get(name) is not None]
            axis.plot([x["step"] for x in lines], [x[name] for x in lines], label=name)
        axis.set(title=title, xlabel="step")
        axis.legend(frameon=False)
    return [_save_figure(figure, axes[-1], path)]


def _plot_metrics(path: Path, valid: list[dict[str, Any]], names: list[str]) -> Path:
    figure, axes = _new_figure()
    for name in names:
        axes.plot([x["step"] for x in valid], [x.get(name) for x in valid], "o-", label=name)
    axes.set(xlabel="step", ylabel="score", title="Validation")
    return _save_figure(figure, axes, path)


def _smoothed(values: list[float]) -> list[float]:
    out: list[float] = []
    for n, value in enumerate(values):
        decay = min(SMOOTHING_DECAY, (n + 1) / (n + 10))
        out.append(value if not out else decay * out[-1] + (1 - decay) * value)
    return out


def _new_figure(panels: int = 1) -> tuple[Any, Any]:
    """A figure and its axes; of several panels, one below the other, an array of axes."""
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    figure = Figure(figsize=(7, 4 if panels == 1 else 2.5 * panels), dpi=120, layout="constrained")
    axes = figure.subplots(panels, squeeze=False)[:, 0]
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0] if panels == 1 else axes


def _save_figure(figure: Any, axes: Any, path: Path) -> Path:
    axes.legend(frameon=False)
    new = path.with_suffix(".new.png")
    new.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(new)
    new.replace(path)
    return path


def plot_cross_attention(predictor: Predictor, text: str, path: Path) -> Path:
    """Plot the cross-attention of the last layer, averaged over heads."""
    import torch

    from headwater.data.collate import SpecialTokens

    special_tokens = SpecialTokens.from_tokenizer(predictor.tokenizer)
    tokenizer = predictor.tokenizer
    source = [special_tokens.bos_id, *tokenizer.encode(text, add_special_tokens=False), special_tokens.eos_id]
    target = [special_tokens.bos_id, *tokenizer.encode(predictor(text, beam=1), add_special_tokens=False)]
    captured: list[torch.Tensor] = []
    decoder: Any = predictor.model.decoder
    tap = decoder.layers[-1].cross_attn.kernel.weights
    handle = tap.register_forward_hook(lambda module, inputs, output: captured.append(output))
    try:
        with torch.no_grad():
            predictor.model(torch.tensor([target]), source=torch.tensor([source]))
    finally:
        handle.remove()
    weights = captured[0][0].mean(0)  # [Q, S]
    source_tokens, target_tokens = (
        [tokenizer.piece(n) for n in ids] for ids in (source, [*target[1:], special_tokens.eos_id])
    )
    figure, axes = _new_figure()
    axes.grid(False)
    axes.imshow(weights, cmap="Blues", aspect="auto", vmin=0)
    fonts = _installed_fonts()
    axes.set_xticks(
        range(len(source_tokens)), _drawable_pieces(source_tokens, fonts), rotation=60, ha="right", fontfamily=fonts
    )
    axes.set_yticks(range(len(target_tokens)), _drawable_pieces(target_tokens, fonts), fontfamily=fonts)
    axes.set(xlabel="read", ylabel="written", title="Cross-attention of the last layer")
    figure.savefig(path)
    return path


def _installed_fonts() -> list[str]:
    """Fonts that are installed, one for Chinese and Japanese if there is any."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in CJK_FONTS if name in installed)]


def _drawable_pieces(pieces: list[str], fonts: list[str]) -> list[str]:
    """Without a CJK font, wide characters are shown as code points rather than boxes."""
    if len(fonts) > 1:
        return pieces
    return ["".join(c if ord(c) < 0x2E80 else f"U+{ord(c):04X}" for c in piece) for piece in pieces]
