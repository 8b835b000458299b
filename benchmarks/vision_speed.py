"""Images a second of ViT-B/16 and CLIP-B/32, and of a training step of a small ViT, beside transformers.

    python benchmarks/vision_speed.py                        vit-b16, clip-b32 and cifar-step, interleaved rounds
    python benchmarks/vision_speed.py --work tiny --rounds 2

Both sides run the same random weights, read from one folder, on the same pixels in one process with the same threads.
Outputs are compared before anything is timed: float32 within 2e-5 of the largest value, int8 within 5 %, the loss of
the training step within 1e-4. Where they differ there is no ratio and the run fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from headwater.families.load import load
from headwater.quantization.int8 import quantize_int8
from headwater.training.config import TrainConfig
from headwater.training.optim import build_optimizer

FLOAT_LIMIT, INT8_LIMIT, LOSS_LIMIT = 2e-5, 0.05, 1e-4
SMALL = {"image_size": 32, "patch_size": 4, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 6,
         "num_attention_heads": 3, "num_labels": 10, "layer_norm_eps": 1e-6}  # fmt: skip
WORKLOADS = {
    "tiny": ("ViTForImageClassification", "ViTConfig", {**SMALL, "hidden_size": 48, "intermediate_size": 96}, 4),
    "vit-b16": ("ViTForImageClassification", "ViTConfig", {"num_labels": 1000}, 8),
    "clip-b32": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", {}, 8),
    "cifar-step": ("ViTForImageClassification", "ViTConfig", SMALL, 64),
}


class Contender(NamedTuple):
    """A way to compute the same, its images a second by round, and its error against the first."""

    name: str
    work: Callable[[], torch.Tensor]
    limit: float


def first_output(out: object) -> torch.Tensor:
    return out["logits"] if "logits" in out else out["image_embeds"]  # type: ignore[operator,index]


def inference(folder: Path, theirs: torch.nn.Module, pixels: torch.Tensor) -> list[Contender]:
    """transformers, Headwater, and Headwater with int8 linear layers."""
    ours = load(folder).model
    packed = load(folder).model
    quantize_int8(packed, ["encoder.layers.*"])

    def run(model: torch.nn.Module) -> Callable[[], torch.Tensor]:
        def work() -> torch.Tensor:
            with torch.inference_mode():
                out = model(pixels)
            return out if isinstance(out, torch.Tensor) else first_output(out)

        return work

    return [
        Contender("transformers", run(theirs), 0.0),
        Contender("headwater", run(ours), FLOAT_LIMIT),
        Contender("headwater int8", run(packed), INT8_LIMIT),
    ]


def training(folder: Path, theirs: torch.nn.Module, pixels: torch.Tensor) -> list[Contender]:
    """Forward, backward, AdamW; the result is the loss. The learning rate is 0, so every round does the same."""
    labels = torch.arange(len(pixels)) % 10
    ours = load(folder).model.train()
    for parameter in ours.parameters():
        parameter.data = parameter.data.clone()
    optimizer = build_optimizer(ours, 0.0, TrainConfig(optimizer="adamw"))
    peer_optimizer = torch.optim.AdamW(theirs.train().parameters(), lr=0.0, fused=True)

    def run(model: torch.nn.Module, step: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
        def work() -> torch.Tensor:
            out = model(pixels)
            logits = out if isinstance(out, torch.Tensor) else first_output(out)
            loss = torch.nn.functional.cross_entropy(logits, labels)
            loss.backward()
            step.step()
            step.zero_grad(set_to_none=True)
            return loss.detach()[None]

        return work

    return [
        Contender("transformers", run(theirs, peer_optimizer), 0.0),
        Contender("headwater", run(ours, optimizer), LOSS_LIMIT),
    ]


def measure(name: str, rounds: int, seconds: float) -> dict:
    """Errors, then the images a second of each contender, the median of interleaved rounds."""
    model_class, config_class, settings, batch = WORKLOADS[name]
    torch.manual_seed(0)
    theirs = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).eval()
    size = theirs.config.image_size
    pixels = torch.randn(batch, 3, size, size)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        build = training if name.endswith("step") else inference
        contenders = build(Path(folder), theirs, pixels)
        reference = contenders[0].work()
        errors = {
            each.name: float((each.work() - reference).abs().max() / reference.abs().max()) for each in contenders
        }
        wrong = {each.name: errors[each.name] for each in contenders if not errors[each.name] <= each.limit}
        if wrong:
            return {"work": name, "wrong": wrong}
        speeds: dict[str, list[float]] = {each.name: [] for each in contenders}
        for _round in range(rounds):
            for each in contenders:
                speeds[each.name].append(images_a_second(each.work, batch, seconds))
    medians = {who: statistics.median(values) for who, values in speeds.items()}
    ratios = {who: value / medians["transformers"] for who, value in medians.items()}
    return {"work": name, "errors": errors, "images_per_second": medians, "ratio": ratios}


def images_a_second(work: Callable[[], torch.Tensor], batch: int, seconds: float) -> float:
    work()
    start = time.perf_counter()
    count = 0
    while time.perf_counter() - start < seconds:
        work()
        count += batch
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORKLOADS, default=["vit-b16", "clip-b32", "cifar-step"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    reports = [measure(name, args.rounds, args.seconds) for name in args.work]
    for report in reports:
        print(json.dumps(report))
    if args.out:
        args.out.write_text(json.dumps(reports, indent=1))
    if any("wrong" in report for report in reports):
        sys.exit("outputs are wrong: no ratio")


if __name__ == "__main__":
    main()
