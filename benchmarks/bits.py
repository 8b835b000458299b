"""What fewer bits cost, in weights and in activations: perplexity of SmolLM2-135M, and BLEU of a translator.

    python benchmarks/bits.py [--text FILE] [--tokens 8192] [--run RUN] [--pairs FILE.en FILE.de] [--sentences 300]

Perplexity: the beginning of wikitext-2's test part, in the folder that HEADWATER_DATA names, or any --text. The modules
round weights only; the compiled step also rounds to 8 bits what meets packed weights. It is measured as it writes (few
tokens at a time) and as it reads prompts (a whole window). llama.cpp, which rounds activations too, reads the same
files in the same run (make bench installs it): our rounding may cost no more than its own. That is judged by the KL
divergence of the rounded distributions from those of the exact weights, token by token: perplexity on a few thousand
tokens moves by chance as much as by rounding.
BLEU: a run of text to text (headwater train), on the first lines of a pair of files, beam 4. Bars: int8 within 1 % of
float32, int4 within 5 %. SmolLM2's own file has 4 bits and a table of 8, so packing it likewise repeats what is in the
file and shows the rounding of activations alone; the translator's weights are float32.
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
WINDOW, FEW = 512, 4
BARS = {"int8": 0.01, "int4": 0.05}
WAYS = ("float32", "int8", "int4")
WRITES, READS = "step, as it writes", "step, as it reads prompts"
SURE = 2.0  # standard errors: a smaller difference between two ways of rounding is chance


def widen(model: nn.Module) -> None:
    """Every packed layer as a plain one."""
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


def packed(model: nn.Module, bits: str) -> None:
    if bits != "float32":
        quantize(model, bits)


def opened(path: Path):
    if not path.exists():
        raise SystemExit(f"{path} is not there; --help tells how to name another")
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------- perplexity


@torch.inference_mode()
def by_modules(model: nn.Module, windows: Tensor) -> list[float]:
    """The loss of each of the windows [N, WINDOW], which know nothing of one another."""
    return [F.cross_entropy(model(window[None])[0, :-1], window[1:]).item() for window in windows]


@torch.inference_mode()
def by_steps(model: nn.Module, windows: Tensor, together: int) -> list[float]:
    """The same through the compiled step, so many tokens at a time."""
    return [F.cross_entropy(step_logits(model, window, together), window[1:]).item() for window in windows]


def step_logits(model: nn.Module, window: Tensor, together: int) -> Tensor:
    """Logits [WINDOW - 1, V] of the compiled step, which reads so many tokens at a time."""
    slots, ids = BatchKVCache(model, [0], max_columns=WINDOW), window[:-1].tolist()
    parts = [ids[i : i + together] for i in range(0, len(ids), together)]
    logits = torch.cat([forward_single(model, slots, part, len(part)) for part in parts])
    assert slots.native_decoder[1] is not None, "the compiled step does not know this model"
    return logits


def perplexity(losses: list[float]) -> float:
    return math.exp(statistics.fmean(losses))


def held(model: nn.Module) -> float:
    """Megabytes of weights, each once."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in model.state_dict().values()}.values()) / 1e6


def perplexities(text: str, tokens: int) -> dict[str, dict[str, float]]:
    found = {}
    for bits in WAYS:
        loaded = headwater.load("smollm2")
        widen(loaded.model)
        packed(loaded.model, bits)
        ids = torch.tensor(loaded.tokenizer.encode(text))[:tokens]
        windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
        found[bits] = {
            "MB": held(loaded.model),
            "modules": perplexity(by_modules(loaded.model, windows)),
            WRITES: perplexity(by_steps(loaded.model, windows, FEW)),
            READS: perplexity(by_steps(loaded.model, windows, WINDOW)),
        }
    return found


def format_perplexities(found: dict[str, dict[str, float]], tokens: int, name: str) -> str:
    ways = [way for way in found["float32"] if way != "MB"]
    first = found["float32"]["modules"]
    lines = ["| perplexity | MB | " + " | ".join(ways) + " | bar |", "|---" * (3 + len(ways)) + "|"]
    for bits, one in found.items():
        cells = [f"{one[way]:.2f} ({one[way] / first - 1:+.2%})" for way in ways]
        lines.append(f"| {bits} | {one['MB']:.0f} | " + " | ".join(cells) + f" | {bar(bits)} |")
    return "\n".join([*lines, f"\n{tokens} tokens of {name}, in windows of {WINDOW}; beside float32 by modules."])


# ------------------------------------------------------------------------------------------------- beside llama.cpp


@dataclass
class Rounded:
    """What rounded activations make of the exact weights: a number for each window."""

    loss: list[float]
    kl: list[float]  # of the rounded distributions from the exact ones, the mean over a window's tokens


@dataclass
class File:
    """One file: the losses of its exact weights, and who rounds how: {who: {way: Rounded}}."""

    exact: list[float]
    rounded: dict[str, dict[str, Rounded]]


@torch.inference_mode()
def exact_log_probs(model: nn.Module, windows: Tensor, file: Path) -> np.ndarray:
    """Log-probabilities [N, WINDOW - 1, V] of the exact weights, in a file that other processes read."""
    kept = None
    for i, window in enumerate(windows):
        log_probs = model(window[None])[0, :-1].log_softmax(-1).numpy()
        if kept is None:
            kept = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(len(windows), *log_probs.shape))
        kept[i] = log_probs
    assert kept is not None, "the text is shorter than one window"
    kept.flush()
    return kept


def loss_of(log_probs: Tensor, window: Tensor) -> float:
    return F.nll_loss(log_probs, window[1:]).item()


@torch.inference_mode()
def by_headwater(model: nn.Module, windows: Tensor, exact: np.ndarray, together: int) -> Rounded:
    rounded = Rounded([], [])
    for window, row in zip(windows, exact, strict=True):
        log_probs = step_logits(model, window, together).log_softmax(-1)
        true = torch.from_numpy(row)
        rounded.loss.append(loss_of(log_probs, window))
        rounded.kl.append((true.exp() * (true - log_probs)).sum(-1).mean().item())
    return rounded


def by_llama_cpp(file: Path, windows: Tensor, exact: Path, together: int, threads: int) -> Rounded:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as given:
        json.dump(windows.tolist(), given)
        given.flush()
        script = str(HERE / "contenders" / "bits_llama_cpp.py")
        command = [str(BENCH_PYTHON), script, str(file), given.name, str(exact), str(together)]
        run = subprocess.run(command, env=environment(threads), capture_output=True, text=True, check=True)
    return Rounded(**json.loads(run.stdout.splitlines()[-1]))


def beside_llama_cpp(text: str, tokens: int, threads: int) -> dict[str, File]:
    """For each file the losses of its exact weights, and what activations of fewer bits make of them."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        plain = headwater.load("smollm2")
        widen(plain.model)
        eight = save_gguf(plain, Path(folder) / "q8_0.gguf", "Q8_0")
        for name, file in (("Q4_1", find_installed("smollm2")), ("Q8_0", eight)):
            # The exact weights: the same file, widened.
            true = headwater.load(str(file))
            widen(true.model)
            ids = torch.tensor(true.tokenizer.encode(text))[:tokens]
            windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
            kept = Path(folder) / "exact.npy"
            exact = exact_log_probs(true.model, windows, kept)
            losses = [loss_of(torch.from_numpy(row), window) for row, window in zip(exact, windows, strict=True)]
            # The two that round.
            model = headwater.load(str(file)).model
            ways = {WRITES: 1, READS: WINDOW}
            ours = {way: by_headwater(model, windows, exact, n) for way, n in ways.items()}
            theirs = {way: by_llama_cpp(file, windows, kept, n, threads) for way, n in ways.items()}
            found[name] = File(losses, {"headwater": ours, "llama.cpp": theirs})
    return found


def format_beside(found: dict[str, File]) -> str:
    lines = ["\n| file | perplexity of its weights | way | | headwater | llama.cpp |", "|---|---|---|---|---|---|"]
    for name, one in found.items():
        exact = perplexity(one.exact)
        for way in (WRITES, READS):
            both = [one.rounded[who][way] for who in ("headwater", "llama.cpp")]
            start = f"| {name} | {exact:.3f} | {way.removeprefix('step, ')}"
            kls = [f"{statistics.fmean(r.kl):.5f}" for r in both]
            values = [perplexity(r.loss) for r in both]
            lines.append(f"{start} | KL divergence | {' | '.join(kls)} |")
            lines.append(f"{start} | perplexity | {' | '.join(f'{v:.3f} ({v / exact - 1:+.2%})' for v in values)} |")
    return "\n".join(lines)


def costs_more(found: dict[str, File]) -> list[str]:
    """Where our rounding is farther from the exact weights than llama.cpp's, window by window, beyond chance."""
    more = []
    for name, one in found.items():
        for way in (WRITES, READS):
            ours, theirs = (one.rounded[who][way].kl for who in ("headwater", "llama.cpp"))
            apart = [a - b for a, b in zip(ours, theirs, strict=True)]
            error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else math.inf
            if (mean := statistics.fmean(apart)) > SURE * error:
                more.append(f"{name}, {way}: KL divergence {mean:.5f} ± {error:.5f} more")
    return more


def bar(bits: str) -> str:
    return f"≤ {BARS[bits]:.0%}" if bits in BARS else ""


# ------------------------------------------------------------------------------------------------------------- BLEU


@contextmanager
def listened(model: nn.Module):
    """While someone listens, modules do the work."""
    hook = model.decoder.register_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        hook.remove()


def translations(run: Path, sources: list[str], references: list[str]) -> dict[str, float]:
    """BLEU of beam 4, float32 by modules and by steps, then packed."""
    trained = load_run(run)
    assert NativeDecoder.try_build(trained.model), "the compiled step does not know this model"
    with listened(trained.model):
        found = {"float32, modules": bleu(trained(sources), references)}
    found["float32, step"] = bleu(trained(sources), references)
    for bits in BARS:
        trained = load_run(run)
        packed(trained.model, bits)
        found[f"{bits}, step"] = bleu(trained(sources), references)
    return found


def format_translations(found: dict[str, float], sentences: int, name: str) -> str:
    first = next(iter(found.values()))
    lines = ["\n| BLEU | | change | bar |", "|---|---|---|---|"]
    lines += [
        f"| {way} | {n:.2f} | {n / first - 1:+.2%} | {bar(way.removesuffix(', step'))} |" for way, n in found.items()
    ]
    return "\n".join([*lines, f"\n{sentences} sentences of {name}, beam 4."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--run", type=Path, help="a run of text to text: BLEU too")
    parser.add_argument("--pairs", type=Path, nargs=2, default=PAIRS, metavar="FILE")
    parser.add_argument("--sentences", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with opened(args.text) as file:
        text = file.read(8 * args.tokens)
    found = perplexities(text, args.tokens)
    table, report = format_perplexities(found, args.tokens, args.text.name), {"perplexity": found}
    more: list[str] = []
    if BENCH_PYTHON.exists():
        beside = beside_llama_cpp(text, args.tokens, args.threads)
        report["beside llama.cpp"] = {name: asdict(file) for name, file in beside.items()}
        table += "\n" + format_beside(beside)
        more = costs_more(beside)
    if args.run:
        sides = [opened(path).read().splitlines()[: args.sentences] for path in args.pairs]
        report["bleu"] = translations(args.run, *sides)
        table += "\n" + format_translations(report["bleu"], len(sides[0]), args.pairs[0].name)
    write({"tokens": args.tokens, **report}, table, "bits")
    if more:
        sys.exit("rounding costs more than in llama.cpp: " + "; ".join(more))


if __name__ == "__main__":
    main()
