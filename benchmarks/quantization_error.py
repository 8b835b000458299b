"""Quantization error, of weights and of activations: perplexity of SmolLM2-135M, and BLEU of a translation model.

    python benchmarks/quantization_error.py [--text FILE] [--tokens 8192]
        [--run RUN] [--pairs FILE.en FILE.de] [--sentences 300]

Perplexity: the start of the test split of wikitext-2, in the folder HEADWATER_DATA, or any --text. The modules quantize
weights only; the compiled step also quantizes the activations that are multiplied with quantized weights to 8 bits. It
is measured in decoding (few tokens at a time) and in prefill (a full window). llama.cpp, which quantizes activations
too, evaluates the same files in the same run (make bench installs it): the error must not be larger than its own. That
is tested by the KL divergence from the distributions of the exact weights, token by token: the perplexity of a few
thousand tokens varies by chance as much as by quantization.
BLEU: a sequence-to-sequence run (headwater train), on the first lines of a pair of files, beam 4. Targets: int8 within
1 % of float32, int4 within 5 %. The file of SmolLM2 has 4-bit weights and an 8-bit embedding, so that quantizing it the
same way shows the error of the activations alone; the weights of the translation model are float32.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from multi30k import DATA
from side_by_side import BENCH_PYTHON, HERE, environment, write
from torch import Tensor, nn
from torch.nn import functional as F

import headwater
from headwater.data.metrics import bleu
from headwater.families.gguf import save_gguf
from headwater.families.hub import find_installed
from headwater.generation.forward import forward_single
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.native import NativeDecoder
from headwater.quantization.layers import QuantizedEmbedding, QuantizedModule, quantize, replace_module
from headwater.training.predict import load_run

TEXT = DATA / "wikitext2_valid_test" / "test.txt.gz"
PAIRS = [DATA / "multi30k" / f"test_2016_flickr.{language}.gz" for language in ("en", "de")]
WINDOW = 512
DECODE_CHUNK = 4
TARGETS = {"int8": 0.01, "int4": 0.05}
DTYPES = ("float32", "int8", "int4")
DECODE, PREFILL = "step, decode", "step, prefill"
MIN_STANDARD_ERRORS = 2.0  # a smaller difference is not significant


def dequantize(model: nn.Module) -> None:
    """Replace every quantized layer by a float32 one."""
    tables: dict[int, nn.Parameter] = {}
    for path, module in [(path, m) for path, m in model.named_modules() if isinstance(m, QuantizedModule)]:
        weight = tables.setdefault(module.blocks.data_ptr(), nn.Parameter(module.weight))
        if isinstance(module, QuantizedEmbedding):
            plain: nn.Module = nn.Embedding(*weight.shape, device="meta")
        else:
            plain = nn.Linear(module.columns, module.rows, bias=module.bias is not None, device="meta")
            plain.bias = module.bias
        plain.weight = weight
        replace_module(model, path, plain)


def quantize_model(model: nn.Module, bits: str) -> None:
    if bits != "float32":
        quantize(model, bits)


def open_text(path: Path):
    if not path.exists():
        raise SystemExit(f"{path} does not exist; see --help")
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------- perplexity


@torch.inference_mode()
def by_modules(model: nn.Module, windows: Tensor) -> list[float]:
    """The loss of each of the independent windows [N, WINDOW]."""
    return [F.cross_entropy(model(window[None])[0, :-1], window[1:]).item() for window in windows]


@torch.inference_mode()
def by_steps(model: nn.Module, windows: Tensor, chunk_size: int) -> list[float]:
    """The same through the compiled step, chunk_size tokens at a time."""
    return [F.cross_entropy(step_logits(model, window, chunk_size), window[1:]).item() for window in windows]


def step_logits(model: nn.Module, window: Tensor, chunk_size: int) -> Tensor:
    """Logits [WINDOW - 1, V] of the compiled step, chunk_size tokens at a time."""
    cache, ids = BatchKVCache(model, [0], max_columns=WINDOW), window[:-1].tolist()
    parts = [ids[i : i + chunk_size] for i in range(0, len(ids), chunk_size)]
    logits = torch.cat([forward_single(model, cache, part, len(part)) for part in parts])
    assert cache.native_decoder[1] is not None, "the compiled step does not know this model"
    return logits


def perplexity(losses: list[float]) -> float:
    return math.exp(statistics.fmean(losses))


def weight_megabytes(model: nn.Module) -> float:
    """Megabytes of weights, shared tensors counted once."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in model.state_dict().values()}.values()) / 1e6


def perplexities(text: str, tokens: int) -> dict[str, dict[str, float]]:
    results = {}
    for bits in DTYPES:
        loaded = headwater.load("smollm2")
        dequantize(loaded.model)
        quantize_model(loaded.model, bits)
        ids = torch.tensor(loaded.tokenizer.encode(text))[:tokens]
        windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
        results[bits] = {
            "MB": weight_megabytes(loaded.model),
            "modules": perplexity(by_modules(loaded.model, windows)),
            DECODE: perplexity(by_steps(loaded.model, windows, DECODE_CHUNK)),
            PREFILL: perplexity(by_steps(loaded.model, windows, WINDOW)),
        }
    return results


def format_perplexities(results: dict[str, dict[str, float]], tokens: int, name: str) -> str:
    modes = [mode for mode in results["float32"] if mode != "MB"]
    first = results["float32"]["modules"]
    lines = ["| perplexity | MB | " + " | ".join(modes) + " | target |", "|---" * (3 + len(modes)) + "|"]
    for bits, row in results.items():
        cells = [f"{row[mode]:.2f} ({row[mode] / first - 1:+.2%})" for mode in modes]
        lines.append(f"| {bits} | {row['MB']:.0f} | " + " | ".join(cells) + f" | {target(bits)} |")
    return "\n".join([*lines, f"\n{tokens} tokens of {name}, in windows of {WINDOW}, compared with float32 modules."])


# -------------------------------------------------------------------------------------------- compared with llama.cpp


@dataclass
class Rounded:
    """The error of quantized activations: one value per window."""

    loss: list[float]
    kl: list[float]  # KL divergence from the exact distributions, the mean over the tokens of a window


@dataclass
class File:
    """One model file: the losses of its exact weights, and the errors: {contender: {mode: Rounded}}."""

    exact: list[float]
    rounded: dict[str, dict[str, Rounded]]


@torch.inference_mode()
def exact_log_probs(model: nn.Module, windows: Tensor, file: Path) -> np.ndarray:
    """Log-probabilities [N, WINDOW - 1, V] of the exact weights, in a file for other processes."""
    exact_file = None
    for i, window in enumerate(windows):
        log_probs = model(window[None])[0, :-1].log_softmax(-1).numpy()
        if exact_file is None:
            exact_file = np.lib.format.open_memmap(
                file, mode="w+", dtype=np.float32, shape=(len(windows), *log_probs.shape)
            )
        exact_file[i] = log_probs
    assert exact_file is not None, "the text is shorter than one window"
    exact_file.flush()
    return exact_file


def loss_of(log_probs: Tensor, window: Tensor) -> float:
    return F.nll_loss(log_probs, window[1:]).item()


@torch.inference_mode()
def by_headwater(model: nn.Module, windows: Tensor, exact: np.ndarray, chunk_size: int) -> Rounded:
    rounded = Rounded([], [])
    for window, row in zip(windows, exact, strict=True):
        log_probs = step_logits(model, window, chunk_size).log_softmax(-1)
        exact_row = torch.from_numpy(row)
        rounded.loss.append(loss_of(log_probs, window))
        rounded.kl.append((exact_row.exp() * (exact_row - log_probs)).sum(-1).mean().item())
    return rounded


def by_llama_cpp(file: Path, windows: Tensor, exact: Path, chunk_size: int, threads: int) -> Rounded:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as windows_file:
        json.dump(windows.tolist(), windows_file)
        windows_file.flush()
        script = str(HERE / "contenders" / "quantization_error_llama_cpp.py")
        command = [str(BENCH_PYTHON), script, str(file), windows_file.name, str(exact), str(chunk_size)]
        run = subprocess.run(command, env=environment(threads), capture_output=True, text=True, check=True)
    return Rounded(**json.loads(run.stdout.splitlines()[-1]))


def compare_llama_cpp(text: str, tokens: int, threads: int) -> dict[str, File]:
    """For each file the losses of its exact weights, and the errors of quantized activations."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        plain = headwater.load("smollm2")
        dequantize(plain.model)
        q8_file = save_gguf(plain, Path(folder) / "q8_0.gguf", "Q8_0")
        for name, file in (("Q4_1", find_installed("smollm2")), ("Q8_0", q8_file)):
            # The exact weights: the same file, dequantized.
            exact_model = headwater.load(str(file))
            dequantize(exact_model.model)
            ids = torch.tensor(exact_model.tokenizer.encode(text))[:tokens]
            windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
            exact_file = Path(folder) / "exact.npy"
            exact = exact_log_probs(exact_model.model, windows, exact_file)
            losses = [loss_of(torch.from_numpy(row), window) for row, window in zip(exact, windows, strict=True)]
            # The two with quantized activations.
            model = headwater.load(str(file)).model
            modes = {DECODE: 1, PREFILL: WINDOW}
            ours = {mode: by_headwater(model, windows, exact, n) for mode, n in modes.items()}
            theirs = {mode: by_llama_cpp(file, windows, exact_file, n, threads) for mode, n in modes.items()}
            results[name] = File(losses, {"headwater": ours, "llama.cpp": theirs})
    return results


def format_comparison(results: dict[str, File]) -> str:
    lines = ["\n| file | perplexity of its weights | mode | | headwater | llama.cpp |", "|---|---|---|---|---|---|"]
    for name, file in results.items():
        exact = perplexity(file.exact)
        for mode in (DECODE, PREFILL):
            pair = [file.rounded[contender][mode] for contender in ("headwater", "llama.cpp")]
            start = f"| {name} | {exact:.3f} | {mode.removeprefix('step, ')}"
            kls = [f"{statistics.fmean(r.kl):.5f}" for r in pair]
            values = [perplexity(r.loss) for r in pair]
            lines.append(f"{start} | KL divergence | {' | '.join(kls)} |")
            lines.append(f"{start} | perplexity | {' | '.join(f'{v:.3f} ({v / exact - 1:+.2%})' for v in values)} |")
    return "\n".join(lines)


def larger_errors(results: dict[str, File]) -> list[str]:
    """Where the KL divergence is significantly larger than that of llama.cpp, window by window."""
    larger = []
    for name, file in results.items():
        for mode in (DECODE, PREFILL):
            ours, theirs = (file.rounded[contender][mode].kl for contender in ("headwater", "llama.cpp"))
            differences = [a - b for a, b in zip(ours, theirs, strict=True)]
            error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else math.inf
            if (mean := statistics.fmean(differences)) > MIN_STANDARD_ERRORS * error:
                larger.append(f"{name}, {mode}: KL divergence {mean:.5f} ± {error:.5f} larger")
    return larger


def target(bits: str) -> str:
    return f"≤ {TARGETS[bits]:.0%}" if bits in TARGETS else ""


# ------------------------------------------------------------------------------------------------------------- BLEU


@contextmanager
def modules_only(model: nn.Module):
    """Use the modules instead of the compiled step: a forward hook disables it."""
    hook = model.decoder.register_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        hook.remove()


def translations(run: Path, sources: list[str], references: list[str]) -> dict[str, float]:
    """BLEU of beam 4: float32 by modules and by the compiled step, then quantized."""
    trained = load_run(run)
    assert NativeDecoder.try_build(trained.model), "the compiled step does not know this model"
    with modules_only(trained.model):
        results = {"float32, modules": bleu(trained(sources), references)}
    results["float32, step"] = bleu(trained(sources), references)
    for bits in TARGETS:
        trained = load_run(run)
        quantize_model(trained.model, bits)
        results[f"{bits}, step"] = bleu(trained(sources), references)
    return results


def format_translations(results: dict[str, float], sentences: int, name: str) -> str:
    first = next(iter(results.values()))
    lines = ["\n| BLEU | | change | target |", "|---|---|---|---|"]
    lines += [
        f"| {mode} | {n:.2f} | {n / first - 1:+.2%} | {target(mode.removesuffix(', step'))} |"
        for mode, n in results.items()
    ]
    return "\n".join([*lines, f"\n{sentences} sentences of {name}, beam 4."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--run", type=Path, help="a sequence-to-sequence run: BLEU too")
    parser.add_argument("--pairs", type=Path, nargs=2, default=PAIRS, metavar="FILE")
    parser.add_argument("--sentences", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with open_text(args.text) as file:
        text = file.read(8 * args.tokens)
    results = perplexities(text, args.tokens)
    table, report = format_perplexities(results, args.tokens, args.text.name), {"perplexity": results}
    larger: list[str] = []
    if BENCH_PYTHON.exists():
        compared = compare_llama_cpp(text, args.tokens, args.threads)
        report["llama.cpp"] = {name: asdict(file) for name, file in compared.items()}
        table += "\n" + format_comparison(compared)
        larger = larger_errors(compared)
    if args.run:
        sides = [open_text(path).read().splitlines()[: args.sentences] for path in args.pairs]
        report["bleu"] = translations(args.run, *sides)
        table += "\n" + format_translations(report["bleu"], len(sides[0]), args.pairs[0].name)
    write({"tokens": args.tokens, **report}, table, "quantization_error")
    if larger:
        sys.exit("the quantization error is larger than that of llama.cpp: " + "; ".join(larger))


if __name__ == "__main__":
    main()
