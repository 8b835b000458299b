"""Text to image on drawn shapes: how well the codec reconstructs, and how often a drawing shows what was asked for.

    python benchmarks/text_to_image.py --work DIR [--pictures 4000] [--codec-steps 1500] [--steps 2000] [--sheet PNG]

8 shapes in 8 colours, of any size and place, each with a caption such as "a red star". Codec and Transformer are
trained by `headwater train --task text-to-image`; a classifier, trained apart on other drawings, says which shape and
colour it sees. It must itself be right in 98 % of drawings that it has not seen, else no figure is printed. Captions
that were held out (a caption is in one split alone) are reported apart: they are combinations never seen together.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional as F

import headwater
from headwater.codecs import load_codec
from headwater.codecs.vqvae import psnr
from headwater.data.examples import CaptionedPicture, split_hash, validation_mask
from headwater.tasks.drawing import PictureModel, draw, draw_steps, open_picture_model
from headwater.vision.sheets import contact_sheet, to_pixels, write_png

COLORS = {
    "red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (240, 210, 40),
    "purple": (150, 60, 180), "orange": (245, 140, 30), "black": (20, 20, 20), "pink": (245, 150, 190),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star", "heart", "cross", "ring", "diamond")
SIZE, SUPERSAMPLE = 32, 4
JUDGE_ACCURACY = 0.98
BAR = 0.70


def draw_shape(shape: str, color: tuple[int, int, int], x: float, y: float, r: float) -> np.ndarray:
    """[32, 32, 3] a shape around (x, y) of radius r, drawn larger and averaged."""
    image = Image.new("RGB", (SIZE * SUPERSAMPLE,) * 2, (255, 255, 255))
    pen = ImageDraw.Draw(image)
    x, y, r = (value * SUPERSAMPLE for value in (x, y, r))
    box = (x - r, y - r, x + r, y + r)
    corners = {
        "triangle": [(x, y - r), (x - 0.95 * r, y + 0.8 * r), (x + 0.95 * r, y + 0.8 * r)],
        "diamond": [(x, y - r), (x - 0.75 * r, y), (x, y + r), (x + 0.75 * r, y)],
        "star": [(x + a * math.sin(i * math.pi / 5), y - a * math.cos(i * math.pi / 5))
                 for i in range(10) for a in [r if i % 2 == 0 else 0.42 * r]],
    }  # fmt: skip
    if shape in corners:
        pen.polygon(corners[shape], fill=color)
    elif shape in ("circle", "ring"):
        pen.ellipse(box, fill=color)
        if shape == "ring":
            pen.ellipse((x - 0.55 * r, y - 0.55 * r, x + 0.55 * r, y + 0.55 * r), fill=(255, 255, 255))
    elif shape == "square":
        pen.rectangle((x - 0.85 * r, y - 0.85 * r, x + 0.85 * r, y + 0.85 * r), fill=color)
    elif shape == "cross":
        pen.rectangle((x - 0.3 * r, y - r, x + 0.3 * r, y + r), fill=color)
        pen.rectangle((x - r, y - 0.3 * r, x + r, y + 0.3 * r), fill=color)
    else:
        pen.ellipse((x - r, y - 0.9 * r, x, y + 0.1 * r), fill=color)
        pen.ellipse((x, y - 0.9 * r, x + r, y + 0.1 * r), fill=color)
        pen.polygon([(x - 0.93 * r, y - 0.15 * r), (x + 0.93 * r, y - 0.15 * r), (x, y + r)], fill=color)
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BOX))


def make_drawings(count: int, seed: int) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Pixels [N, 32, 32, 3], and the colour and shape of each."""
    rng = np.random.default_rng(seed)
    pixels, names = [], []
    for _ in range(count):
        shape, color = SHAPES[rng.integers(len(SHAPES))], list(COLORS)[rng.integers(len(COLORS))]
        r = rng.uniform(8, 14)
        x, y = rng.uniform(r + 1, SIZE - 1 - r, 2)
        pixels.append(draw_shape(shape, COLORS[color], x, y, r))
        names.append((color, shape))
    return np.stack(pixels), names


def write_pairs(folder: Path, count: int) -> Path:
    """pairs.csv with path and caption, beside the pictures."""
    table = folder / "pairs.csv"
    if table.is_file() and sum(1 for _ in table.open()) == count + 1:
        return table
    folder.mkdir(parents=True, exist_ok=True)
    pixels, names = make_drawings(count, seed=1)
    for n, picture in enumerate(pixels):
        Image.fromarray(picture).save(folder / f"{n:05d}.png")
    with table.open("w", newline="") as file:
        rows = [(f"{n:05d}.png", f"a {color} {shape}") for n, (color, shape) in enumerate(names)]
        csv.writer(file).writerows([("path", "caption"), *rows])
    return table


# ------------------------------------------------------------------------------------------------------- the judge


class Judge(nn.Module):
    """A small convolutional classifier of shape and colour."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, 48, 3, 2, 1), nn.ReLU(), nn.Conv2d(48, 96, 3, 2, 1),
            nn.ReLU(), nn.Flatten(), nn.Linear(96 * 16, 128), nn.ReLU(),
        )  # fmt: skip
        self.shape, self.color = nn.Linear(128, len(SHAPES)), nn.Linear(128, len(COLORS))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(pictures)
        return self.shape(hidden), self.color(hidden)


def to_pictures(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


def labels(names: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    colors = list(COLORS)
    return torch.tensor([SHAPES.index(s) for _, s in names]), torch.tensor([colors.index(c) for c, _ in names])


def train_judge(steps: int = 1000) -> tuple[Judge, float]:
    """A judge, and its accuracy on drawings it has not seen. It is trained on blurred and noisy ones too."""
    torch.manual_seed(0)
    judge = Judge()
    pixels, names = make_drawings(4000, seed=2)
    pictures, (shapes, colors) = to_pictures(pixels), labels(names)
    optimizer = torch.optim.AdamW(judge.parameters(), 2e-3)
    for step in range(steps):
        at = torch.randint(len(pictures), (64,))
        x = pictures[at]
        if step % 2:
            x = (F.avg_pool2d(x, 3, 1, 1) + 0.05 * torch.randn_like(x)).clamp(0, 1)
        shape, color = judge(x)
        loss = F.cross_entropy(shape, shapes[at]) + F.cross_entropy(color, colors[at])
        optimizer.param_groups[0]["lr"] = 2e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    test, test_names = make_drawings(500, seed=3)
    return judge, float(recognised(judge, to_pictures(test), test_names).float().mean())


@torch.no_grad()
def recognised(judge: Judge, pictures: Tensor, names: list[tuple[str, str]]) -> Tensor:
    """[N] whether the judge sees the shape and the colour of each name."""
    shape, color = judge(pictures)
    shapes, colors = labels(names)
    return (shape.argmax(1) == shapes) & (color.argmax(1) == colors)


# ------------------------------------------------------------------------------------------------------- the figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the data and the runs; runs there are kept")
    parser.add_argument("--pictures", type=int, default=4000)
    parser.add_argument("--codec-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--codec-channels", type=int, default=64)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--each", type=int, default=4, help="drawings of each caption")
    parser.add_argument("--sheet", type=Path, help="write the contact sheet of the docs here")
    args = parser.parse_args()

    judge, accuracy = train_judge()
    print(f"judge: {accuracy:.1%} of unseen drawings", flush=True)
    if accuracy < JUDGE_ACCURACY:
        sys.exit(f"the judge must be right in {JUDGE_ACCURACY:.0%}: no figure")

    table = write_pairs(args.work / "pictures", args.pictures)
    start = time.monotonic()
    codec_run, run = args.work / "codec", args.work / "run"
    common = {"quiet": True, "valid_fraction": 0.08}
    if not (codec_run / "config.yaml").is_file():
        headwater.train(
            table,
            task="picture-codec",
            out=codec_run,
            max_steps=args.codec_steps,
            d_model=args.codec_channels,
            **common,
        )
    print(f"codec: {time.monotonic() - start:.0f} s", flush=True)
    if not (run / "config.yaml").is_file():
        headwater.train(table, task="text-to-image", codec=codec_run, out=run, max_steps=args.steps,
                        d_model=args.d_model, heads=4, layers=args.layers, **common)  # fmt: skip
    print(f"codec and Transformer: {time.monotonic() - start:.0f} s", flush=True)

    # the codec, on new drawings
    pixels, names = make_drawings(500, seed=4)
    codec = load_codec(codec_run / "model")
    with torch.no_grad():
        rebuilt = codec.decode(codec.encode(to_pictures(pixels)))
    decibels = float(psnr(rebuilt, to_pictures(pixels)).mean())
    kept = float(recognised(judge, rebuilt, names).float().mean())

    # the drawings of every caption; those of the validation split were never seen in training
    captions = [row["caption"] for row in csv.DictReader(table.open())]
    hashes = np.array([split_hash(CaptionedPicture("", caption)) for caption in captions], np.uint64)
    held_out = {c for c, out in zip(captions, validation_mask(hashes, common["valid_fraction"]), strict=True) if out}
    model = open_picture_model(run)
    asked = [(color, shape) for color in COLORS for shape in SHAPES for _ in range(args.each)]
    began = time.monotonic()
    drawings = draw(model, [f"a {color} {shape}" for color, shape in asked], seed=0)
    seconds = (time.monotonic() - began) / len(asked)
    right = recognised(judge, drawings, asked)
    unseen = torch.tensor([f"a {color} {shape}" in held_out for color, shape in asked])
    unguided = draw(model, [f"a {color} {shape}" for color, shape in asked], seed=0, scale=1.0)
    right_unguided = float(recognised(judge, unguided, asked).float().mean())
    print(json.dumps({
        "codec PSNR, dB": round(decibels, 2),
        "recognised after the codec": round(kept, 3),
        "recognised drawings": round(float(right.float().mean()), 3),
        f"of {len(held_out)} captions never seen": round(float(right[unseen].float().mean()), 3),
        "without guidance": round(right_unguided, 3),
        "chance": round(1 / (len(SHAPES) * len(COLORS)), 3),
        "seconds a drawing": round(seconds, 3),
        "threads": torch.get_num_threads(),
    }, indent=1))  # fmt: skip
    if args.sheet:
        write_sheet(model, args.sheet)
    if float(right.float().mean()) < BAR:
        sys.exit(f"below the bar of {BAR:.0%}")


def write_sheet(model: PictureModel, path: Path) -> None:
    """One drawing of each colour and shape, and beside it a few of them while they grow."""
    texts = [f"a {color} {shape}" for color in COLORS for shape in SHAPES]
    write_png(contact_sheet(to_pixels(draw(model, texts, seed=1)), len(SHAPES), enlarge=2), path)
    stages = list(draw_steps(model, texts[1:64:9], seed=1, every=8))
    grown = torch.stack(stages, 1).flatten(0, 1)
    write_png(contact_sheet(to_pixels(grown), len(stages), enlarge=2), path.with_name(path.stem + "-growing.png"))


if __name__ == "__main__":
    main()
