"""Translation with the base model of the 2017 paper, beam 4: Headwater beside CTranslate2 and transformers.

    python benchmarks/translate.py [--threads 2] [--rounds 5] [--without transformers]

6 + 6 layers, 512 wide, 32,000 tokens, 30 tokens in and 30 out; sentences one at a time, and 32 together. Weights have
learnt nothing (speed does not depend on what they know). make bench installs the others.
"""

from __future__ import annotations

import argparse

from side_by_side import BENCH_PYTHON, Contender, compare, finish

FIRST = "headwater int8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without", default="", help="contenders to leave out, such as transformers")
    args = parser.parse_args()
    contenders = [
        Contender(FIRST, "translate_headwater.py", ("int8",)),
        Contender("headwater float32", "translate_headwater.py", ("float32",)),
        Contender("CTranslate2 int8", "translate_ctranslate2.py", ("int8",), BENCH_PYTHON),
        Contender("CTranslate2 float32", "translate_ctranslate2.py", ("float32",), BENCH_PYTHON),
        Contender("transformers float32", "translate_transformers.py"),
    ]
    left = [c for c in contenders if not any(word and word in c.name for word in args.without.split(","))]
    finish(compare(left, args.rounds, args.threads), FIRST, "translate")


if __name__ == "__main__":
    main()
