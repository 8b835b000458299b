"""The public data sets of tasks.py as files to train on and files to test on, with simple answers to compare with.

Each function writes into a folder and gives a Task. What is tested on is never trained on: split by article, by
sentence, or, where neighbours are near duplicates of each other, by the family they belong to.
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

from simple import best_sentence, frequent_tags, naive_bayes, nearest_command

from headwater.data.metrics import accuracy, answer_f1, bleu, chrf, entity_f1, exact_match, rouge
from headwater.data.readers.formats import read_conll, read_squad
from headwater.data.readers.lines import DEFAULT_DECODE_OPTIONS, BadRows


@dataclass
class Task:
    """train and test: files; measure: what decides; simple: scores of simple answers on the test set, by name."""

    train: list[Path]
    test: list[Path]
    measure: str
    simple: dict[str, dict[str, float]]
    valid: list[Path] = field(default_factory=list)


def share_of(text: str) -> float:
    """A number from 0 up to 1 that depends on the text alone."""
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
    """Its own three sets. The simple answer is to leave the sentence as it is."""
    sides = {part: [lines_of(data / "multi30k" / f"{part}.{language}.gz") for language in ("en", "de")]
             for part in ("train", "val", "test_2016_flickr")}  # fmt: skip
    files = {part: [write(work / f"{part}.{side}", lines) for side, lines in zip(("en", "de"), both, strict=True)]
             for part, both in sides.items()}  # fmt: skip
    english, german = sides["test_2016_flickr"]
    simple = {"the English sentence itself": {"bleu": bleu(english, german), "chrf": chrf(english, german)}}
    return Task(files["train"], files["test_2016_flickr"], "bleu", simple, files["val"])


# ------------------------------------------------------------------------------- Debian: a description to its synopsis

FAMILY = 150  # packages: a larger family (python3-, golang-, …) is boilerplate, and is only learned from


def family(package: str) -> str:
    """'libfoo2-dev' and 'foo-doc' are of the family 'foo'."""
    first = package.split("-")[0]
    return re.sub(r"[\d.+]+$", "", re.sub(r"^lib(?=\w{3})", "", first)) or first


def debian(data: Path, work: Path) -> Task:
    """A family is on one side, and packages elsewhere that carry a tested family's name (python3-foo) on none."""
    rows = [line.split("\t") for line in lines_of(data / "debian_summarisation" / "debian_long_to_synopsis.tsv.gz")]
    rows = [row for row in rows if len(row) == 3 and all(cell.strip() for cell in row)]
    sizes = Counter(family(row[0]) for row in rows)
    tested = {name for name, size in sizes.items() if size < FAMILY and share_of(name) < 0.04}
    test = [row for row in rows if family(row[0]) in tested]
    train = [row for row in rows if not tested & {family(part) for part in row[0].split("-")}]
    known = {row[2].lower() for row in train}
    test = [row for row in test if row[2].lower() not in known][:1000]
    lead = rouge([first_sentence(row[1]) for row in test], [row[2] for row in test])
    files = [write(work / f"{name}.tsv", ["description\tsynopsis", *("\t".join(row[1:]) for row in some)])
             for name, some in (("train", train), ("test", test))]  # fmt: skip
    return Task([files[0]], [files[1]], "rougeL", {"the first sentence": {"rougeL": lead["rougeL"]}})


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]


# ------------------------------------------------------------------------------------------ nl2bash: words to a command


def nl2bash(data: Path, work: Path) -> Task:
    """Equal commands are on one side, so none can be looked up."""
    folder = data / "nl2bash"
    pairs = list(dict.fromkeys(zip(lines_of(folder / "all.nl.gz"), lines_of(folder / "all.cm.gz"), strict=True)))
    pairs = [(a.strip(), b.strip()) for a, b in pairs if a.strip() and b.strip() and "\t" not in a + b]
    test = [pair for pair in pairs if share_of(pair[1]) < 0.08]
    asked = {words for words, _ in test}
    train = [pair for pair in pairs if share_of(pair[1]) >= 0.08 and pair[0] not in asked]
    wanted = [command for _, command in test]
    usual = Counter(command for _, command in train).most_common(1)[0][0]
    said = {"the most frequent command": [usual] * len(test), "the nearest description": nearest_command(train, test)}
    simple = {name: {"chrf": chrf(out, wanted), "bleu": bleu(out, wanted), "exact": accuracy(out, wanted)}
              for name, out in said.items()}  # fmt: skip
    files = [write(work / f"{name}.tsv", ["nl\tcmd", *("\t".join(pair) for pair in some)])
             for name, some in (("train", train), ("test", test))]  # fmt: skip
    return Task([files[0]], [files[1]], "chrf", simple)


# --------------------------------------------------------------------------------- sentence polarity: good or bad film


def polarity(data: Path, work: Path) -> Task:
    """Sentences of film reviews; a tenth is the test set, by a hash of the sentence."""
    rows: list[tuple[str, str]] = []
    with zipfile.ZipFile(data / "nltk_sentiment" / "sentence_polarity.zip") as archive:
        for label in ("neg", "pos"):
            text = archive.read(f"sentence_polarity/rt-polarity.{label}").decode("latin-1")
            rows += [(line.strip(), label) for line in text.splitlines() if line.strip() and "\t" not in line]
    train, test = ([row for row in rows if (share_of(row[0]) < 0.1) is wanted] for wanted in (False, True))
    wanted = [label for _, label in test]
    usual = Counter(label for _, label in train).most_common(1)[0][0]
    simple = {"the more frequent label": {"accuracy": accuracy([usual] * len(test), wanted)},
              "naive Bayes over words": {"accuracy": accuracy(naive_bayes(train, test), wanted)}}  # fmt: skip
    files = [write(work / f"{name}.tsv", ["text\tlabel", *("\t".join(row) for row in some)])
             for name, some in (("train", train), ("test", test))]  # fmt: skip
    return Task([files[0]], [files[1]], "accuracy", simple)


# -------------------------------------------------------------------------------- WNUT-17: names nobody has met before


def wnut(data: Path, work: Path) -> Task:
    """The split of its authors: the entities of the test set are new."""
    folder = data / "wnut17"
    train, test = folder / "wnut17train.conll.gz", folder / "emerging.test.annotated.gz"
    seen, asked = (list(read_conll(path, DEFAULT_DECODE_OPTIONS, BadRows())) for path in (train, test))
    scores = entity_f1(frequent_tags(seen, asked), [row.tags for row in asked])
    return Task([train], [test], "f1", {"the most frequent tag of each word": scores},
                [folder / "emerging.dev.conll.gz"])  # fmt: skip


# ---------------------------------------------------------------------------- XQuAD: the answer is a stretch of a text


def xquad(language: str) -> Callable[[Path, Path], Task]:
    def made(data: Path, work: Path) -> Task:
        """Whole articles are on one side; the same ones in every language."""
        with gzip.open(data / "xquad" / f"xquad.{language}.json.gz", "rt", encoding="utf-8") as file:
            articles = json.load(file)["data"]
        sides: dict[str, list[dict]] = defaultdict(list)
        for number, article in enumerate(articles):
            sides["test" if number % 5 == 4 else "train"].append(article)
        files = {name: write(work / f"{name}.json", [json.dumps({"data": some}, ensure_ascii=False)])
                 for name, some in sides.items()}  # fmt: skip
        asked = list(read_squad(files["test"], DEFAULT_DECODE_OPTIONS, BadRows()))
        wanted = [row.answers for row in asked]
        said: dict[str, Sequence[str]] = {
            "the first five words": [" ".join(row.context.split()[:5]) if language != "zh" else row.context[:5]
                                     for row in asked],
            "the sentence most like the question": [best_sentence(row.question, row.context) for row in asked],
        }  # fmt: skip
        simple = {name: {"f1": answer_f1(out, wanted), "exact": exact_match(out, wanted)} for name, out in said.items()}
        return Task([files["train"]], [files["test"]], "f1", simple)

    return made
