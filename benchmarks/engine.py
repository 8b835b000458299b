"""How much faster eight answers come together than one alone, on one engine, and how soon a cancelled one makes room.

    python benchmarks/engine.py [--streams 8] [--tokens 64] [--weights float32 int8 int4]

A decoder of the size of SmolLM2-135M with weights that have learnt nothing (speed does not depend on what they know),
in float32 and packed. One stream and many in turn, medians. Bars: eight give at least 3 times the tokens per second of
one; the place of a cancelled request is taken within one step. Before anything is timed, the log-probabilities of all
streams together are compared with those of the modules, each stream alone: where they are wrong there is no ratio.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from correctness import EXACT, ROUNDED, distance
from side_by_side import Watch, spread, verdict, write

from headwater.core import decoder
from headwater.generation.engine import Engine
from headwater.generation.forward import forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.request import Request
from headwater.generation.sampling import Temperature, TopK
from headwater.quantization.layers import quantize

SIZES = {"d_model": 576, "heads": 9, "kv_heads": 3, "layers": 30, "d_ff": 1536, "gated": True, "activation": "silu"}
SHAPE = {"norm_position": "pre", "norm": "rms", "position": "rotary", "bias": False, "dropout": 0.0}
VOCAB = 49_152
BAR = 3.0


def request(number: int, prompt: int, tokens: int) -> Request:
    ids = tuple((number * 131 + i * 7) % VOCAB for i in range(prompt))
    return Request(ids, processors=(Temperature(0.8), TopK(50)), max_tokens=tokens, seed=number)


def rate(model: torch.nn.Module, streams: int, tokens: int, prompt: int) -> float:
    """Tokens per second, from the moment all prompts are read until every stream has its tokens."""
    engine = Engine(model, max_num_seqs=streams, max_prefill_tokens=streams * prompt)
    for number in range(streams):
        engine.submit(request(number, prompt, tokens + 1))
    engine.step()
    start = time.perf_counter()
    engine.run()
    return streams * tokens / (time.perf_counter() - start)


def steps_until_free(model: torch.nn.Module, streams: int, prompt: int) -> int:
    """After a cancellation: how many steps until the one who waits for a place has its first token."""
    engine = Engine(model, max_num_seqs=streams, max_prefill_tokens=(streams + 1) * prompt)
    rows = [engine.submit(request(number, prompt, 64)) for number in range(streams + 1)]
    engine.step()
    assert rows[0].events and not rows[-1].events
    engine.cancel(rows[0])
    for steps in range(1, 64):
        engine.step()
        if rows[-1].events:
            return steps
    raise AssertionError("the place of a cancelled request stays taken")


def logprobs(model: torch.nn.Module, prompts: list[tuple[int, ...]], compiled: bool) -> list[float]:
    """Of a hundred tokens of the vocabulary after each prompt: all prompts together, then one more token each."""
    slots = BatchKVCache(model, range(len(prompts)))
    if not compiled:
        slots.native_decoder = (model, None)
    scores = [forward_last(model, slots, prompts), forward_last(model, slots, [one[:1] for one in prompts])]
    return torch.cat(scores).log_softmax(-1)[:, :100].flatten().tolist()


def apart(model: torch.nn.Module, streams: int, prompt: int) -> float:
    """How far the streams together are from the modules, which read each alone."""
    prompts = [request(number, prompt, 1).prompt_ids for number in range(streams)]
    alone = [logprobs(model, [one], compiled=False) for one in prompts]
    reference = [value for half in (slice(0, 100), slice(100, 200)) for row in alone for value in row[half]]
    return distance(logprobs(model, prompts, compiled=True), reference)


def measured(weights: str, args: argparse.Namespace) -> dict:
    model = decoder(VOCAB, **SIZES, **SHAPE).build(seed=0).eval()
    if weights != "float32":
        quantize(model, weights)
    wrong, allowed = apart(model, args.streams, args.prompt), EXACT if weights == "float32" else ROUNDED
    if wrong > allowed:
        sys.exit(f"{weights}: no ratio, {args.streams} streams are wrong: {wrong:.2g} away, {allowed:g} is allowed")
    one, many = [], []
    for _ in range(args.rounds + 1):
        one.append(rate(model, 1, args.tokens, args.prompt))
        many.append(rate(model, args.streams, args.tokens, args.prompt))
    found = {"1": spread(one[1:]), str(args.streams): spread(many[1:])}  # the first round warms up
    ratio = found[str(args.streams)]["median"] / found["1"]["median"]
    return {
        **found,
        "ratio": ratio,
        "distance": wrong,
        "steps until free": steps_until_free(model, args.streams, args.prompt),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in (("streams", 8), ("tokens", 64), ("prompt", 64), ("rounds", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--weights", nargs="+", default=["float32", "int8", "int4"], metavar="BITS")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    watch, many = Watch([]), str(args.streams)
    found = {weights: measured(weights, args) for weights in args.weights}
    others = watch.other_load()
    names = [
        "weights",
        "1 stream, tokens/s",
        f"{many} streams, tokens/s",
        f"ratio (bar {BAR:g})",
        "distance",
        "steps until free",
    ]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for weights, one in found.items():
        cells = [f"{one[n]['median']:.1f} [{one[n]['low']:.1f}..{one[n]['high']:.1f}]" for n in ("1", many)]
        lines.append(
            f"| {weights} | "
            + " | ".join(cells)
            + f" | {one['ratio']:.2f} | {one['distance']:.2g} | {one['steps until free']} |"
        )
    lines.append(f"\n{args.rounds} rounds in turn, {args.threads} threads; machine {verdict(others)}.")
    write({"figures": found, "others": others, "threads": args.threads}, "\n".join(lines), "engine")


if __name__ == "__main__":
    main()
