"""From the start of a process to its first token: Headwater beside llama.cpp (the same file) and transformers.

    python benchmarks/first_token.py [--rounds 5] [--threads 2] [--without transformers]

Each is a fresh process: import, load SmolLM2-135M, read a prompt of 32 tokens, say the next. Ours is the command
`headwater generate`. Importing torch alone stands beside them: whoever builds on it starts no sooner. Who says another
token than transformers does gets no ratio.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from correctness import end_if_wrong
from decode import widened
from side_by_side import BENCH_PYTHON, Contender, compare, finish

from headwater.families.hub import find_installed

PROMPT = (
    "The history of the river begins at its headwater, high in the hills, where the snow melts late in spring and "
    "the first water finds its way between stones"
)
FIRST, TRUTH, ALONE = "headwater Q4_1", "transformers float32", "import torch alone"


def fresh(name: str, script: str, *words: str, python: Path | None = None) -> Contender:
    contender = Contender(name, "load_fresh.py", (f"first_token_{script}.py", *words))
    contender.python = python or contender.python
    return contender


def word(said: str) -> str:
    """The first token as text: of our JSON, or what stands after an id."""
    return json.loads(said)["text"].strip() if said.startswith("{") else said.partition(" ")[2].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without", default="", help="contenders to leave out, such as transformers")
    args = parser.parse_args()
    file = str(find_installed("smollm2"))
    with tempfile.TemporaryDirectory() as folder:
        contenders = [
            fresh(FIRST, "headwater", file, PROMPT),
            fresh("llama.cpp Q4_1", "llama_cpp", file, PROMPT, python=BENCH_PYTHON),
            fresh(TRUTH, "transformers", str(widened(Path(folder))), PROMPT),
            fresh(ALONE, "torch"),
        ]
        left = [c for c in contenders if not any(word and word in c.name for word in args.without.split(","))]
        found = compare(left, args.rounds, args.threads)
    words = {name: word(facts["said"]) for name, facts in found["facts"].items() if name != ALONE}
    found["wrong"] = {name: f"it says {said!r}" for name, said in words.items() if said != words.get(TRUTH, said)}
    finish(found, FIRST, "first_token")
    end_if_wrong(found, FIRST)


if __name__ == "__main__":
    main()
