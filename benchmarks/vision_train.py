"""Accuracy of a small ViT trained from scratch within a time limit: CIFAR-10 and Fashion-MNIST, on the test set.

    HEADWATER_DATA=… python benchmarks/vision_train.py cifar10 --max-time 60m
    HEADWATER_DATA=… python benchmarks/vision_train.py fashion --max-time 15m
    HEADWATER_DATA=… python benchmarks/vision_train.py digits --max-time 60s      a minute, to see that it runs
    … cifar10 --processor-time --max-time 120m --out run             120 processor minutes: an hour of two cores
    … cifar10 --processor-time --max-time 120m --out run --resume    goes on with a run that was stopped

The images are unpacked into folders of classes, as users have them, and trained by headwater.train; the test set is
read only by the evaluation at the end. The figure is the accuracy that `headwater eval` prints. With --processor-time
the limit counts the processor time of this process, so that other work on the machine changes nothing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import struct
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
from multi30k import DATA
from PIL import Image

from headwater.training.api import resume, train
from headwater.training.evaluate import evaluate_files

MAX_PARAMETERS = 2_000_000
COMMON = {
    "label_smoothing": 0.1,
    "dropout": 0.0,
    "weight_decay": 0.05,
    "valid_fraction": 0.02,
    "batch_tokens": 8320,
    "patch_embedding": "conv-stem",
    "min_lr_ratio": 0.001,
    "final_eval_examples": 1,
    "eval_examples": 1000,
}
RECIPES = {
    "cifar10": {"d_model": 128, "heads": 2, "layers": 4, "d_ff": 256, "lr": 2e-3, "ema": 0.998, "optimizer": "muon",
                "augment": "flip=0.5,crop=0.125"},
    "fashion": {"d_model": 96, "heads": 4, "layers": 4, "d_ff": 192, "lr": 2e-3, "ema": 0.998,
                "augment": "flip=0.5,crop=0.08", "batch_tokens": 6400, "optimizer": "muon"},
    "digits": {"d_model": 64, "heads": 4, "layers": 3, "d_ff": 128, "lr": 2e-3, "augment": "crop=0.125",
               "image_size": 8, "patch_size": 2, "batch_tokens": 1100},
}  # fmt: skip


def count_processor_time() -> None:
    """Every clock that training reads is now the processor time of this process."""
    time.monotonic = time.perf_counter = time.process_time


def unpack_cifar10(data: Path, folder: Path) -> None:
    """train/CLASS/*.jpg and test/CLASS/*.jpg"""
    for name in ("train", "test"):
        with tarfile.open(data / "cifar10" / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")


def unpack_fashion(data: Path, folder: Path) -> None:
    """The same of Fashion-MNIST's IDX files."""
    for name, prefix in (("train", "train"), ("test", "t10k")):
        images = gzip.decompress((data / "fashion_mnist" / f"{prefix}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((data / "fashion_mnist" / f"{prefix}-labels-idx1-ubyte.gz").read_bytes())
        count, rows, columns = struct.unpack(">3I", images[4:16])
        pixels = np.frombuffer(images, np.uint8, offset=16).reshape(count, rows, columns)
        write_images(folder / name, pixels, np.frombuffer(labels, np.uint8, offset=8))


def unpack_digits(data: Path, folder: Path) -> None:
    """The same of scikit-learn's digits, 8 x 8; every fifth is for the test."""
    with gzip.open(data / "digits" / "digits.csv.gz") as file:
        rows = np.loadtxt(file, delimiter=",")
    pixels = (rows[:, :-1].reshape(-1, 8, 8) * 15.9).astype(np.uint8)
    is_test = np.arange(len(rows)) % 5 == 0
    write_images(folder / "train", pixels[~is_test], rows[~is_test, -1].astype(int))
    write_images(folder / "test", pixels[is_test], rows[is_test, -1].astype(int))


def write_images(folder: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        path = folder / str(int(label)) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


UNPACK = {"cifar10": unpack_cifar10, "fashion": unpack_fashion, "digits": unpack_digits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=RECIPES)
    parser.add_argument("--max-time", default="15m")
    parser.add_argument("--processor-time", action="store_true", help="of this process, not of the clock")
    parser.add_argument("--folder", type=Path, help="where the images are, or are unpacked to")
    parser.add_argument("--out", type=Path, help="the folder of the run")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    args = parser.parse_args()
    if args.processor_time:
        count_processor_time()
    with tempfile.TemporaryDirectory() as temp:
        folder = args.folder or Path(temp) / "images"
        if not (folder / "train").is_dir():
            UNPACK[args.data](DATA, folder)
        run = args.out or Path(temp) / "run"
        start = time.monotonic()
        if args.resume:
            predictor = resume(run, max_time=args.max_time)
        else:
            predictor = train(folder / "train", out=run, max_time=args.max_time, **{**COMMON, **RECIPES[args.data]})
        seconds = time.monotonic() - start
        size = sum(p.numel() for p in predictor.model.parameters())
        assert size <= MAX_PARAMETERS, f"{size:,} parameters"
        metrics = evaluate_files(run, [str(folder / "test")]).metrics
    clock = "processor_seconds" if args.processor_time else "seconds"
    print(json.dumps({"data": args.data, "parameters": size, clock: round(seconds), "test": metrics}))


if __name__ == "__main__":
    main()
