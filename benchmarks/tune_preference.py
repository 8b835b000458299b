"""DPO towards something that can be checked: SmolLM2 answers tasks of mbpp with short Python code and nothing else.

    HEADWATER_DATA=… python benchmarks/tune_preference.py --work runs/preference

1. SmolLM2 answers the tasks. It writes code, but between backticks, with examples and explanations
2. pairs: rejected is the answer as it is; chosen is the code at its beginning, when that fits the rule
3. DPO by LoRA, with the likelihood of the chosen answer beside it (RPO); no code of mbpp is read
The rule: ast.parse succeeds on the whole answer, and it has at most 60 tokens.
Bars, on tasks that were held out: 90 % fit the rule; in 90 % of their pairs the chosen answer has the higher reward.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tuning_demo import Bar, float_base, is_trained, judge, parse, parser, write_rows

import headwater
from headwater.data.answers import ChatEncoder
from headwater.data.collate import SpecialTokens
from headwater.data.conversations import ChatTurn
from headwater.families.adapters import load_with_base
from headwater.families.load import LoadedModel
from headwater.tasks.chat import ChatOutput, answer_prompts
from headwater.tuning import use_adapter

SYSTEM = "Answer with Python code only."
MAX_TOKENS = 60
FENCE = re.compile(r"```(?:python)?\n")


def fits(answer: str, num_tokens: int) -> bool:
    """The rule."""
    try:
        ast.parse(answer)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return bool(answer.strip()) and num_tokens <= MAX_TOKENS


def turns(task: str) -> tuple[ChatTurn, ChatTurn]:
    return ChatTurn("system", SYSTEM), ChatTurn("user", task)


def answers_of(loaded: LoadedModel, tasks: Sequence[str], **options: object) -> list[ChatOutput]:
    return answer_prompts(loaded.model.eval(), loaded.tokenizer, (), list(map(turns, tasks)), **options)


def share_that_fits(loaded: LoadedModel, answers: Sequence[ChatOutput]) -> float:
    """The percentage of answers that fit the rule and end by themselves."""
    count = sum(answer.ended and fits(answer.text, len(loaded.tokenizer.encode(answer.text))) for answer in answers)
    return 100 * count / len(answers)


def code_of(loaded: LoadedModel, answer: str) -> str:
    """The first function of an answer, as code alone, if it fits the rule; else nothing."""
    blocks = FENCE.split(answer)
    code = blocks[1] if len(blocks) > 1 else answer
    lines = code.split("```")[0].rstrip().split("\n")
    for end in range(len(lines), 0, -1):  # the longest beginning that fits
        text = "\n".join(lines[:end]).rstrip()
        if "def " in text and fits(text, len(loaded.tokenizer.encode(text)) + 1):
            return text
    return ""


def write_pairs(loaded: LoadedModel, tasks: Sequence[str], path: Path) -> Path:
    """Pairs from the model's own answers."""
    answers = answers_of(loaded, tasks, temperature=0.7, max_tokens=MAX_TOKENS + 30, seed=0)
    rows = []
    for task, answer in zip(tasks, answers, strict=True):
        if chosen := code_of(loaded, answer.text):
            prompt = [{"role": turn.role, "content": turn.content} for turn in turns(task)]
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": answer.text})
    print(f"{len(rows)} pairs of {len(tasks)} tasks", flush=True)
    return write_rows(path, rows)


@torch.no_grad()
def divergence(tuned: LoadedModel, tasks: Sequence[str], answers: Sequence[ChatOutput]) -> float:
    """KL of the tuned model to its base in nats per answer, estimated on answers of the tuned one."""
    encoder = ChatEncoder(tuned.tokenizer, SpecialTokens.from_tokenizer(tuned.tokenizer).eos_id)
    total = 0.0
    for task, answer in zip(tasks, answers, strict=True):
        row = encoder.answer_row(turns(task), answer.text)
        ids, learned = torch.tensor([row.ids]), torch.tensor(row.learned)
        logprobs = []
        for name in ("default", None):
            use_adapter(tuned.model, name)
            every = tuned.model(ids)[0, :-1].log_softmax(-1)
            logprobs.append(every.gather(1, ids[0, 1:, None])[learned[1:], 0].sum())
        total += float(logprobs[0] - logprobs[1])
    use_adapter(tuned.model, "default")
    return total / len(tasks)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--tasks", type=int, default=200, help="tasks of mbpp that pairs are made of [200]")
    options = parse(made)
    work: Path = options.work
    with gzip.open(options.data / "mbpp" / "mbpp.jsonl.gz", "rt", encoding="utf-8") as file:
        tasks = [json.loads(line)["text"] for line in file]
    num_train, num_test = (8, 4) if options.quick else (options.tasks, 64)
    train, held_out = tasks[: num_train + num_test // 2], tasks[-num_test:]

    # pairs from the answers of the base; the last of them are held out
    pairs = work / "pairs.jsonl"
    packed = headwater.load("smollm2")
    if not pairs.exists():
        write_pairs(packed, train, pairs)
    rows = pairs.read_text(encoding="utf-8").splitlines(keepends=True)
    cut = len(rows) - num_test // 2
    for name, part in (("train", rows[:cut]), ("valid", rows[cut:])):
        (work / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    before = share_that_fits(packed, answers_of(packed, held_out, max_tokens=MAX_TOKENS + 1))

    # DPO
    if not is_trained(work / "dpo"):
        headwater.train(work / "train.jsonl", valid=[str(work / "valid.jsonl")], init_from=float_base(work),
                        task="preference", out=work / "dpo", tune="lora", tune_target="all-linear", lr=3e-4,
                        dtype="bf16", beta=0.1, rpo_alpha=1.0, batch_tokens=1536, epochs=2, eval_examples=num_test // 2,
                        log_every=2)  # fmt: skip

    # answers to tasks that were held out
    answers = answers_of(headwater.load(work / "dpo"), held_out, max_tokens=MAX_TOKENS + 1)
    after = share_that_fits(packed, answers)
    lines = [json.loads(line) for line in (work / "dpo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    accuracy = [line["accuracy"] for line in lines if line.get("split") == "valid"][-1]
    kl = divergence(load_with_base(work / "dpo"), held_out[:16], answers[:16])
    for task, answer in list(zip(held_out, answers, strict=True))[:3]:
        print(f"\n{task}\n{answer.text}")
    print(f"\nfit the rule: {before:.1f} % before, {after:.1f} % after; KL {kl:.1f} nats per answer")
    if options.quick:
        return 0
    return judge([Bar("fit the rule (%)", after, 90), Bar("reward accuracy, held out (%)", accuracy, 90)])


if __name__ == "__main__":
    sys.exit(main())
