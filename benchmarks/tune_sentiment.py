"""PPO against best of n: a small language model learns to write praise, by the judgment of a classifier.

    HEADWATER_DATA=… python benchmarks/tune_sentiment.py --work runs/sentiment

1. a classifier of sentence polarity, and a language model of the same sentences
2. PPO with the log-odds of "pos" as reward and a penalty for leaving the language model
3. the same without the penalty, and the best of n answers of the untrained model
Bars: from about half to 90 % positive at a divergence of at most 10 nats; without the penalty the model repeats itself.
"""

from __future__ import annotations

import itertools
import sys
import zipfile
from pathlib import Path

from tuning_demo import Bar, is_trained, judge, metric_lines, parse, parser, write_rows

import headwater
from headwater.data.conversations import ChatTurn, PromptExample
from headwater.tasks.best_of_n import best_of_n, best_of_n_kl
from headwater.tasks.rewards import Answer, RewardFunction, load_reward

PROMPT_WORDS = 3
N = 16


def sentences(data: Path) -> list[tuple[str, str]]:
    """(text, label) of sentence polarity."""
    rows = []
    with zipfile.ZipFile(data / "nltk_sentiment" / "sentence_polarity.zip") as archive:
        for label in ("pos", "neg"):
            name = next(each for each in archive.namelist() if each.endswith(f".{label}"))
            text = archive.read(name).decode("latin-1")
            rows += [(line.strip().replace("\t", " "), label) for line in text.splitlines() if line.strip()]
    return rows


def score(prompts: list[str], texts: list[str], reward: RewardFunction) -> tuple[float, float]:
    """The percentage of positive answers, and of different pairs of words among those of all answers (distinct-2)."""
    examples = [PromptExample((ChatTurn("user", prompt),)) for prompt in prompts]
    answers = [Answer(example, text) for example, text in zip(examples, texts, strict=True)]
    rewards = [value for value in reward(answers) if value is not None]
    pairs = [pair for text in texts for pair in itertools.pairwise(text.split())]
    return 100 * sum(value > 0 for value in rewards) / len(rewards), 100 * len(set(pairs)) / max(1, len(pairs))


def main() -> int:
    options = parse(parser(__doc__))
    work: Path = options.work
    rows = sentences(options.data)
    quick = options.quick

    # the classifier and the language model
    table = work / "polarity.tsv"
    table.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows), encoding="utf-8")
    if not is_trained(work / "classifier"):
        headwater.train(table, out=work / "classifier", d_model=128, layers=1, heads=4, d_ff=256, dropout=0.4,
                        vocab=4000, lr=1e-3, max_steps=20 if quick else 350, eval_every=10 if quick else 175,
                        samples=2)  # fmt: skip
    documents = write_rows(work / "sentences.jsonl", [{"text": text} for text, _ in rows])
    if not is_trained(work / "lm"):
        headwater.train(documents, task="language-model", objective="packed", out=work / "lm", d_model=192, layers=3,
                        heads=4, d_ff=768, vocab=2000, context_length=64, max_steps=20 if quick else 300,
                        eval_every=10 if quick else 150, dtype="bf16")  # fmt: skip

    # PPO with and without a penalty
    prompts = [" ".join(text.split()[:PROMPT_WORDS]) for text, _ in rows if len(text.split()) > 2 * PROMPT_WORDS]
    prompts = list(dict.fromkeys(prompts))
    prompt_file = write_rows(work / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts[200:]])
    source = f"{work / 'classifier'}:pos"
    settings = {"init_from": work / "lm", "task": "ppo", "reward": source, "chat_template": "none", "rollouts": 64,
                "minibatch": 16, "answer_tokens": 24, "normalize_rewards": True, "missing_end_penalty": 0.0,
                "optimizer": "adamw", "batch_tokens": 2048, "log_every": 16, "eval_every": 320, "eval_examples": 64,
                "metric": "reward", "samples": 4}  # fmt: skip
    if not is_trained(work / "ppo"):
        headwater.train(prompt_file, out=work / "ppo", beta=0.1, kl_target=6, kl_horizon=640, lr=2e-4,
                        max_steps=32 if quick else 640, **settings)  # fmt: skip
    if not is_trained(work / "free"):
        headwater.train(prompt_file, out=work / "free", beta=0.0, lr=1e-3, max_steps=32 if quick else 640,
                        **settings)  # fmt: skip

    # positive answers before and after, and of best of n
    reward = load_reward(source)
    test = prompts[:200]
    shares, distinct = {}, {}
    for name in ("lm", "ppo", "free"):
        best = best_of_n(headwater.load(work / name), test, reward, n=1, max_tokens=24)
        shares[name], distinct[name] = score(test, [each.text for each in best], reward)
    best = best_of_n(headwater.load(work / "lm"), test, reward, n=N, max_tokens=24)
    shares["best"], distinct["best"] = score(test, [each.text for each in best], reward)
    kl = {name: metric_lines(work / name, "kl")[-1] for name in ("ppo", "free")}
    kl |= {"lm": 0.0, "best": best_of_n_kl(N)}
    print("\n| model | positive (%) | distinct-2 (%) | KL (nats) |\n|---|---|---|---|")
    for name, title in (("lm", "language model"), ("best", f"best of {N}"), ("ppo", "PPO"), ("free", "PPO, β = 0")):
        print(f"| {title} | {shares[name]:.1f} | {distinct[name]:.1f} | {kl[name]:.2f} |")
    if quick:
        return 0
    return judge([
        Bar("positive after PPO (%)", shares["ppo"], 90),
        Bar("divergence of PPO (nats)", kl["ppo"], 10, at_most=True),
        Bar("distinct-2 without the penalty, of that with it (%)",
            100 * distinct["free"] / distinct["ppo"], 80, at_most=True),
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
