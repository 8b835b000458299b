"""The public datasets of tasks.py as training and test files, with the scores of simple baselines.

Each function writes into a folder and returns a Task. The test set is disjoint from the training set: split by article,
by sentence, or, where rows are near duplicates, by family.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baselines import best_sentence, frequent_tags, naive_bayes, nearest_command

from headwater.data.metrics import accuracy, answer_f1, bleu, chrf, entity_f1, exact_match, rouge
from headwater.data.readers.formats import read_conll, read_squad
from headwater.data.readers.lines import DEFAULT_DECODE_OPTIONS, BadRows


@dataclass
class Task:
    """train, test: files; metric: the main metric; baselines: their scores on the test set, by name."""

    train: list[Path]
    test: list[Path]
    metric: str
    baselines: dict[str, dict[str, float]]
    valid: list[Path] = field(default_factory=list)


def hash_fraction(text: str) -> float:
    """A hash of the text as a number in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


def lines_of(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def write(path: Path, lines: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------- Multi30k: English to German


def multi30k(data: Path, work: Path) -> Task:
    """Its own three splits. The baseline copies the source sentence."""
    sides = {part: [lines_of(data / "multi30k" / f"{part}.{language}.gz") for language in ("en", "de")]
             for part in ("train", "val", "test_2016_flickr")}  # fmt: skip
    files = {part: [write(work / f"{part}.{side}", lines) for side, lines in zip(("en", "de"), both, strict=True)]
             for part, both in sides.items()}  # fmt: skip
    english, german = sides["test_2016_flickr"]
    baselines = {"the English sentence itself": {"bleu": bleu(english, german), "chrf": chrf(english, german)}}
    return Task(files["train"], files["test_2016_flickr"], "bleu", baselines, files["val"])


# ------------------------------------------------------------------------------- Debian: a description to its synopsis

MAX_FAMILY = 150  # packages: larger families (python3-, golang-, …) are boilerplate, and only in the training set


def family(package: str) -> str:
    """The family of a package: 'foo' for 'libfoo2-dev' and 'foo-doc'."""
    first = package.split("-")[0]
    return re.sub(r"[\d.+]+$", "", re.sub(r"^lib(?=\w{3})", "", first)) or first


def debian(data: Path, work: Path) -> Task:
    """Split by family; other packages with the name of a test family (python3-foo) are dropped."""
    rows = [line.split("\t") for line in lines_of(data / "debian_summarisation" / "debian_long_to_synopsis.tsv.gz")]
    rows = [row for row in rows if len(row) == 3 and all(cell.strip() for cell in row)]
    sizes = Counter(family(row[0]) for row in rows)
    tested = {name for name, size in sizes.items() if size < MAX_FAMILY and hash_fraction(name) < 0.04}
    test = [row for row in rows if family(row[0]) in tested]
    train = [row for row in rows if not tested & {family(part) for part in row[0].split("-")}]
    known = {row[2].lower() for row in train}
    test = [row for row in test if row[2].lower() not in known][:1000]
    lead = rouge([first_sentence(row[1]) for row in test], [row[2] for row in test])
    files = [write(work / f"{name}.tsv", ["description\tsynopsis", *("\t".join(row[1:]) for row in split)])
             for name, split in (("train", train), ("test", test))]  # fmt: skip
    return Task([files[0]], [files[1]], "rougeL", {"the first sentence": {"rougeL": lead["rougeL"]}})


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]


# -------------------------------------------------------------------------------------- nl2bash: description to command


def nl2bash(data: Path, work: Path) -> Task:
    """Split by command, so that no test command is in the training set."""
    folder = data / "nl2bash"
    pairs = list(dict.fromkeys(zip(lines_of(folder / "all.nl.gz"), lines_of(folder / "all.cm.gz"), strict=True)))
    pairs = [(a.strip(), b.strip()) for a, b in pairs if a.strip() and b.strip() and "\t" not in a + b]
    test = [pair for pair in pairs if hash_fraction(pair[1]) < 0.08]
    test_descriptions = {description for description, _ in test}
    train = [pair for pair in pairs if hash_fraction(pair[1]) >= 0.08 and pair[0] not in test_descriptions]
    references = [command for _, command in test]
    most_frequent = Counter(command for _, command in train).most_common(1)[0][0]
    outputs = {
        "the most frequent command": [most_frequent] * len(test),
        "the nearest description": nearest_command(train, test),
    }
    baselines = {
        name: {"chrf": chrf(out, references), "bleu": bleu(out, references), "exact": accuracy(out, references)}
        for name, out in outputs.items()
    }
    files = [write(work / f"{name}.tsv", ["nl\tcmd", *("\t".join(pair) for pair in split)])
             for name, split in (("train", train), ("test", test))]  # fmt: skip
    return Task([files[0]], [files[1]], "chrf", baselines)


# ----------------------------------------------------------------------------- sentence polarity: sentiment of reviews


def polarity(data: Path, work: Path) -> Task:
    """Sentences of film reviews; a tenth is the test set, by a hash of the sentence."""
    rows: list[tuple[str, str]] = []
    with zipfile.ZipFile(data / "nltk_sentiment" / "sentence_polarity.zip") as archive:
        for label in ("neg", "pos"):
            text = archive.read(f"sentence_polarity/rt-polarity.{label}").decode("latin-1")
            rows += [(line.strip(), label) for line in text.splitlines() if line.strip() and "\t" not in line]
    train, test = ([row for row in rows if (hash_fraction(row[0]) < 0.1) is in_test] for in_test in (False, True))
    references = [label for _, label in test]
    most_frequent = Counter(label for _, label in train).most_common(1)[0][0]
    baselines = {
        "the more frequent label": {"accuracy": accuracy([most_frequent] * len(test), references)},
        "naive Bayes over words": {"accuracy": accuracy(naive_bayes(train, test), references)},
    }
    files = [write(work / f"{name}.tsv", ["text\tlabel", *("\t".join(row) for row in split)])
             for name, split in (("train", train), ("test", test))]  # fmt: skip
    return Task([files[0]], [files[1]], "accuracy", baselines)


# ------------------------------------------------------------------------------------- WNUT-17: emerging named entities


def wnut(data: Path, work: Path) -> Task:
    """The split of its authors: the entities of the test set are new."""
    folder = data / "wnut17"
    train, test = folder / "wnut17train.conll.gz", folder / "emerging.test.annotated.gz"
    train_rows, test_rows = (list(read_conll(path, DEFAULT_DECODE_OPTIONS, BadRows())) for path in (train, test))
    scores = entity_f1(frequent_tags(train_rows, test_rows), [row.tags for row in test_rows])
    return Task([train], [test], "f1", {"the most frequent tag of each word": scores},
                [folder / "emerging.dev.conll.gz"])  # fmt: skip


# --------------------------------------------------------------------------------- XQuAD: extractive question answering


def xquad(language: str) -> Callable[[Path, Path], Task]:
    def build(data: Path, work: Path) -> Task:
        """Split by article, the same in every language."""
        with gzip.open(data / "xquad" / f"xquad.{language}.json.gz", "rt", encoding="utf-8") as file:
            articles = json.load(file)["data"]
        sides: dict[str, list[dict]] = defaultdict(list)
        for number, article in enumerate(articles):
            sides["test" if number % 5 == 4 else "train"].append(article)
        files = {name: write(work / f"{name}.json", [json.dumps({"data": split}, ensure_ascii=False)])
                 for name, split in sides.items()}  # fmt: skip
        test_rows = list(read_squad(files["test"], DEFAULT_DECODE_OPTIONS, BadRows()))
        references = [row.answers for row in test_rows]
        outputs: dict[str, Sequence[str]] = {
            "the first five words": [" ".join(row.context.split()[:5]) if language != "zh" else row.context[:5]
                                     for row in test_rows],
            "the sentence most like the question": [best_sentence(row.question, row.context) for row in test_rows],
        }  # fmt: skip
        baselines = {
            name: {"f1": answer_f1(out, references), "exact": exact_match(out, references)}
            for name, out in outputs.items()
        }
        return Task([files["train"]], [files["test"]], "f1", baselines)

    return build
