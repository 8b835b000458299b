"""Wayfinding: each of the field's terms is found in the file that does it, and a class name means one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "headwater"
FILES = sorted(PACKAGE.rglob("*.py"))

# term -> the file that does it; the term must stand in its text, in these words
TERMS = {
    "gradient clipping": "training/gradients.py",
    "learning rate": "training/schedules.py",
    "warmup": "training/schedules.py",
    "optimizer": "training/optim.py",
    "AdamW": "training/optim.py",
    "Muon": "training/optim.py",
    "EMA": "training/optim.py",
    "8-bit": "cpu/adamw8bit.py",
    "label smoothing": "tasks/losses.py",
    "cross-entropy": "tasks/losses.py",
    "micro-batch": "training/trainer.py",
    "gradient accumulation": "training/trainer.py",
    "early stopping": "training/trainer.py",
    "checkpoint": "training/checkpoint.py",
    "resume": "training/checkpoint.py",
    "process group": "training/distributed.py",
    "all-reduce": "training/distributed.py",
    "FSDP": "training/distributed.py",
    "callback": "training/loggers.py",
    "progress bar": "training/loggers.py",
    "evaluate": "training/evaluate.py",
    "TrainConfig": "training/config.py",
    "run directory": "training/run_dir.py",
    "NaN": "training/diagnostics.py",
    "dataset": "data/dataset.py",
    "batch sampler": "data/dataset.py",
    "collate": "data/collate.py",
    "masked language model": "data/corruption.py",
    "span corruption": "data/corruption.py",
    "denoising": "data/corruption.py",
    "BLEU": "data/metrics.py",
    "sequence to sequence": "tasks/seq2seq.py",
    "greedy decoding": "tasks/seq2seq.py",
    "causal language modelling": "tasks/language_model.py",
    "packed documents": "tasks/language_model.py",
    "next sentence prediction": "tasks/masked_lm.py",
    "token classification": "tasks/token_classification.py",
    "question answering": "tasks/question_answering.py",
    "ROUGE": "data/metrics.py",
    "augmentation": "data/augment.py",
    "permutation": "rng.py",
    "Gumbel": "rng.py",
    "top-p": "generation/sampling.py",
    "nucleus sampling": "generation/sampling.py",
    "temperature": "generation/sampling.py",
    "repetition penalty": "generation/penalties.py",
    "logits processor": "generation/sampling.py",
    "sampling": "generation/sampling.py",
    "beam search": "generation/beam.py",
    "KV cache": "generation/kv_cache.py",
    "continuous batching": "generation/engine.py",
    "prefill": "generation/engine.py",
    "speculative decoding": "generation/speculative.py",
    "prefix caching": "generation/prefix_cache.py",
    "stop string": "generation/streaming.py",
    "attention mask": "core/masks.py",
    "causal": "core/masks.py",
    "sliding window": "core/masks.py",
    "rotary": "core/positions.py",
    "ALiBi": "core/positions.py",
    "YaRN": "variants/rope_scaling.py",
    "Transformer-XL": "variants/transformer_xl.py",
    "encoder-decoder": "families/builders.py",
    "softmax": "core/kernels.py",
    "grouped-query": "core/attention.py",
    "residual": "core/stack.py",
    "keys and values": "core/cache.py",
    "RMSNorm": "core/norms.py",
    "token embedding": "core/embeddings.py",
    "GGUF": "weights/gguf.py",
    "safetensors": "weights/safetensors.py",
    "config.json": "weights/hf_config.py",
    "quantized": "quantization/layers.py",
    "tokenizer": "text/tokenizer.py",
    "special token": "text/special_tokens.py",
    "chat template": "text/chat.py",
    "SentencePiece": "text/loaders/sentencepiece.py",
    "logit lens": "inspection/logit_lens.py",
    "attribution": "inspection/attribution.py",
    "forward hook": "inspection/hooks.py",
    "ablation": "inspection/ablation.py",
    "HTTP 400": "errors.py",
    "gettext": "i18n.py",
}


def test_there_are_enough_terms():
    assert len(TERMS) >= 60


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_the_field_is_found_in_the_file_that_does_it(term):
    path = PACKAGE / TERMS[term]
    assert path.is_file(), f"{term}: no file {TERMS[term]}"
    assert term.lower() in path.read_text(encoding="utf-8").lower(), f"{TERMS[term]} does not say {term!r}"


def class_names(files: list[Path]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(PACKAGE).as_posix() if PACKAGE in path.parents else path.name)
    return places


def test_a_class_name_means_one_thing():
    """The NumPy edition has the names of the core: it is the same machine."""
    ours = [path for path in FILES if "reference" not in path.parts]
    assert {name: places for name, places in class_names(ours).items() if len(places) > 1} == {}


def test_a_name_given_twice_would_be_seen(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.py").write_text("class Same: ...\n")
    assert len(class_names(sorted(tmp_path.glob("*.py")))["Same"]) == 2


# Phrases for which the field has its own words, or plain English a shorter one.
FOREIGN_PHRASES = re.compile(
    r"\b(told|heard|mend(s|ed)?|anew|can not|worked out|on the way back|as they lie|by heart|spoil(t|ed))\b",
    re.IGNORECASE,
)
SUFFIXES = {".py", ".c", ".h", ".js", ".json", ".j2", ".md"}
ENGLISH_TEXTS = [
    *(path for path in sorted(PACKAGE.rglob("*")) if path.suffix in SUFFIXES),
    *sorted((PACKAGE.parents[1] / "docs" / "en").rglob("*.md")),
    *(PACKAGE.parents[1] / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
]


def foreign_phrases(text: str) -> list[str]:
    return [line for line in text.splitlines() if FOREIGN_PHRASES.search(line)]


def test_a_foreign_phrase_would_be_seen():
    assert foreign_phrases("# the gradient is worked out on the way back\nit cannot be\n") != []


@pytest.mark.parametrize("path", ENGLISH_TEXTS, ids=lambda path: path.relative_to(PACKAGE.parents[1]).as_posix())
def test_prose_is_plain_technical_english(path):
    assert foreign_phrases(path.read_text(encoding="utf-8")) == []


# Words of a private dialect, which no identifier may have again, as a whole or between underscores.
FOREIGN_WORDS = set(
    [
        "lesson",
        "exam",
        "chooser",
        "choosers",
        "sight",
        "lane",
        "lanes",
        "culprit",
        "mishap",
        "mishaps",
        "booklet",
        "shelf",
        "pulse",
        "told",
        "heard",
        "mended",
        "spoilt",
    ]
)


def identifiers(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names


def words_of(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def dialect(source: str) -> set[str]:
    return {name for name in identifiers(source) if words_of(name) & FOREIGN_WORDS}


def test_an_old_word_would_be_seen():
    assert dialect("class LessonPlan: ...\nsight_of = 1\nclassed = 2") == {"LessonPlan", "sight_of"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_names_are_the_words_of_the_field(path):
    assert dialect(path.read_text(encoding="utf-8")) == set()
