"""Continuous batching: the throughput of eight streams compared with one, and the delay until a slot is reused.

    python benchmarks/engine.py [--streams 8] [--tokens 64] [--weights float32 int8 int4]

A randomly initialized decoder of the size of SmolLM2-135M, in float32 and quantized; medians of interleaved rounds of
one stream and of several. Targets: eight streams reach at least 3 times the tokens per second of one; the slot of a
cancelled request is reused within one step. Before anything is timed, the log-probabilities of the batched streams are
compared with those of the modules on each stream alone: wrong outputs get no ratio.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from correctness import EXACT, ROUNDED, distance
from side_by_side import LoadMonitor, spread, verdict, write

from headwater.core.model import Transformer
from headwater.families.builders import decoder
from headwater.generation.engine import Engine
from headwater.generation.forward import forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.request import Request
from headwater.generation.sampling import Temperature, TopK
from headwater.quantization.layers import quantize

SIZES = {"d_model": 576, "heads": 9, "kv_heads": 3, "layers": 30, "d_ff": 1536, "gated": True, "activation": "silu"}
SHAPE = {"norm_position": "pre", "norm": "rms", "position": "rotary", "bias": False, "dropout": 0.0}
VOCAB = 49_152
TARGET_RATIO = 3.0


def request(number: int, prompt: int, tokens: int) -> Request:
    ids = tuple((number * 131 + i * 7) % VOCAB for i in range(prompt))
    return Request(ids, processors=(Temperature(0.8), TopK(50)), max_tokens=tokens, seed=number)


def rate(model: Transformer, streams: int, tokens: int, prompt: int) -> float:
    """Tokens per second from the end of prefill until every stream has its tokens."""
    engine = Engine(model, max_num_seqs=streams, max_prefill_tokens=streams * prompt)
    for number in range(streams):
        engine.submit(request(number, prompt, tokens + 1))
    engine.step()
    start = time.perf_counter()
    engine.run()
    return streams * tokens / (time.perf_counter() - start)


def steps_until_admitted(model: Transformer, streams: int, prompt: int) -> int:
    """Steps from a cancellation until the waiting request has its first token."""
    engine = Engine(model, max_num_seqs=streams, max_prefill_tokens=(streams + 1) * prompt)
    sequences = [engine.submit(request(number, prompt, 64)) for number in range(streams + 1)]
    engine.step()
    assert sequences[0].events and not sequences[-1].events
    engine.cancel(sequences[0])
    for steps in range(1, 64):
        engine.step()
        if sequences[-1].events:
            return steps
    raise AssertionError("the slot of a cancelled request is not reused")


def logprobs(model: Transformer, prompts: list[tuple[int, ...]], compiled: bool) -> list[float]:
    """Log-probabilities of a hundred tokens after each prompt, in one batch, then after one more token each."""
    cache = BatchKVCache(model, range(len(prompts)))
    if not compiled:
        cache.native_decoder = (model, None)
    scores = [forward_last(model, cache, prompts), forward_last(model, cache, [prompt[:1] for prompt in prompts])]
    return torch.cat(scores).log_softmax(-1)[:, :100].flatten().tolist()


def batch_error(model: Transformer, streams: int, prompt: int) -> float:
    """The distance of the batched streams from the modules on each stream alone."""
    prompts = [request(number, prompt, 1).prompt_ids for number in range(streams)]
    alone = [logprobs(model, [ids], compiled=False) for ids in prompts]
    reference = [value for half in (slice(0, 100), slice(100, 200)) for row in alone for value in row[half]]
    return distance(logprobs(model, prompts, compiled=True), reference)


def measure(weights: str, args: argparse.Namespace) -> dict:
    model = decoder(VOCAB, **SIZES, **SHAPE).build(seed=0).eval()
    if weights != "float32":
        quantize(model, weights)
    error, allowed = batch_error(model, args.streams, args.prompt), EXACT if weights == "float32" else ROUNDED
    if error > allowed:
        sys.exit(f"{weights}: no ratio, {args.streams} streams are wrong: {error:.2g} away, {allowed:g} is allowed")
    single, batched = [], []
    for _ in range(args.rounds + 1):
        single.append(rate(model, 1, args.tokens, args.prompt))
        batched.append(rate(model, args.streams, args.tokens, args.prompt))
    results = {"1": spread(single[1:]), str(args.streams): spread(batched[1:])}  # the first round warms up
    ratio = results[str(args.streams)]["median"] / results["1"]["median"]
    return {
        **results,
        "ratio": ratio,
        "distance": error,
        "steps_until_admitted": steps_until_admitted(model, args.streams, args.prompt),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("streams", 8), ("tokens", 64), ("prompt", 64), ("rounds", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--weights", nargs="+", default=["float32", "int8", "int4"], metavar="BITS")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    monitor, batched = LoadMonitor([]), str(args.streams)
    results = {weights: measure(weights, args) for weights in args.weights}
    other_load = monitor.other_load()
    names = [
        "weights",
        "1 stream, tokens/s",
        f"{batched} streams, tokens/s",
        f"ratio (target {TARGET_RATIO:g})",
        "distance",
        "steps until admitted",
    ]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for weights, stats in results.items():
        cells = [f"{stats[n]['median']:.1f} [{stats[n]['low']:.1f}..{stats[n]['high']:.1f}]" for n in ("1", batched)]
        lines.append(
            f"| {weights} | "
            + " | ".join(cells)
            + f" | {stats['ratio']:.2f} | {stats['distance']:.2g} | {stats['steps_until_admitted']} |"
        )
    lines.append(f"\n{args.rounds} interleaved rounds, {args.threads} threads; machine {verdict(other_load)}.")
    write({"figures": results, "other_load": other_load, "threads": args.threads}, "\n".join(lines), "engine")


if __name__ == "__main__":
    main()
