"""Time from process start to the first token: Headwater compared with llama.cpp (the same file) and transformers.

    python benchmarks/first_token.py [--rounds 5] [--threads 2] [--without transformers]

Each is a fresh process: import, load SmolLM2-135M, prefill a prompt of 32 tokens, generate the next. Headwater's is
the command `headwater generate`. `import torch` alone is the lower bound of everything that uses it. A contender with
another token than transformers gets no ratio.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from correctness import end_if_wrong
from decode import write_float32_folder
from side_by_side import BENCH_PYTHON, Contender, compare, finish

from headwater.families.hub import find_installed

PROMPT = (
    "The history of the river begins at its headwater, high in the hills, where the snow melts late in spring and "
    "the first water finds its way between stones"
)
FIRST, REFERENCE, IMPORT_ONLY = "headwater Q4_1", "transformers float32", "import torch alone"


def fresh_process(name: str, script: str, *arguments: str, python: Path | None = None) -> Contender:
    contender = Contender(name, "load_fresh.py", (f"first_token_{script}.py", *arguments))
    contender.python = python or contender.python
    return contender


def first_token(output: str) -> str:
    """The first token as text: from JSON, or after its id."""
    return json.loads(output)["text"].strip() if output.startswith("{") else output.partition(" ")[2].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without", default="", help="contenders to leave out, such as transformers")
    args = parser.parse_args()
    file = str(find_installed("smollm2"))
    with tempfile.TemporaryDirectory() as folder:
        contenders = [
            fresh_process(FIRST, "headwater", file, PROMPT),
            fresh_process("llama.cpp Q4_1", "llama_cpp", file, PROMPT, python=BENCH_PYTHON),
            fresh_process(REFERENCE, "transformers", str(write_float32_folder(Path(folder))), PROMPT),
            fresh_process(IMPORT_ONLY, "torch"),
        ]
        selected = [c for c in contenders if not any(word and word in c.name for word in args.without.split(","))]
        report = compare(selected, args.rounds, args.threads)
    tokens = {name: first_token(facts["output"]) for name, facts in report["facts"].items() if name != IMPORT_ONLY}
    report["wrong"] = {
        name: f"its token is {output!r}" for name, output in tokens.items() if output != tokens.get(REFERENCE, output)
    }
    finish(report, FIRST, "first_token")
    end_if_wrong(report, FIRST)


if __name__ == "__main__":
    main()
