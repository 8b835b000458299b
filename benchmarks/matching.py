"""A matcher of images and texts, trained on emoji, their names and keywords in thirteen languages, and what it finds.

    npm pack emoji-datasource-google@16.0.0 cldr-annotations-full@48.2.0          the data, 81 MB
    python benchmarks/matching.py --data FOLDER_OF_BOTH --work DIR --processor-time --max-time 10m
    … --figure docs/img/matching.png                                              the search results of the docs

An emoji has two captions in a language: its name ("ewe") and its keywords ("animal, female, sheep, wool").
Retrieval at 1 of images by captions, apart:

- known: a caption that was trained, among all images that were;
- held-out concepts: emoji of which no image and no caption in any language was trained, among those emoji alone;
- held-out languages: captions of trained emoji in languages that were not trained, among all trained images. A caption
  that is spelled as in a trained language is not asked.

Chance is 1 / the number of images. A caption that several emoji share in a language is right for each of them.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
import tarfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from vision_train import count_processor_time

from headwater.families.matching import Matcher, load_matcher
from headwater.training.api import resume, train
from headwater.vision.images import read_image

IMAGES, NAMES = "emoji-datasource-google-16.0.0.tgz", "cldr-annotations-full-48.2.0.tgz"
TRAINED = ("en", "zh", "de", "fr", "es", "it", "pt", "nl", "sv", "ru", "uk", "cs", "ja")
HELD_OUT = {"gl": "Galician", "ca": "Catalan", "da": "Danish", "af": "Afrikaans", "sk": "Slovak", "be": "Belarusian",
            "hu": "Hungarian", "sw": "Swahili"}  # fmt: skip
HELD_OUT_CONCEPTS = 10  # one emoji in so many
MIN_RETRIEVAL = 10  # times chance: held-out concepts by keywords, in English and in Chinese
RECIPE = {
    "task": "image-text", "d_model": 128, "heads": 2, "layers": 4, "d_ff": 256, "image_size": 32, "patch_size": 8,
    "patch_embedding": "conv-stem", "augment": "crop=0.08,color=0.1", "optimizer": "muon", "lr": 2e-3,
    "weight_decay": 0.1, "dropout": 0.0, "batch_tokens": 12000, "vocab": 4000, "max_length": 32,
    "valid_fraction": 0.01, "ema": 0.998, "min_lr_ratio": 0.001, "final_eval_examples": 1,
}  # fmt: skip
QUERIES = ("a red flower", "红色的花", "sea animal", "海洋动物", "sad face", "悲伤的脸", "fruit", "水果", "car", "汽车")


KINDS = ("names", "keywords")


class Emoji(NamedTuple):
    """An emoji: the path of its image, and its captions: by kind, then by language."""

    path: Path
    captions: dict[str, dict[str, str]]
    is_held_out: bool


def unpack(data: Path, folder: Path) -> None:
    """The images and the names that are used, once."""
    if (folder / "annotations").is_dir():
        return
    with tarfile.open(data / IMAGES) as archive:
        members = [m for m in archive if m.name == "package/emoji.json" or m.name.startswith("package/img/google/64/")]
        archive.extractall(folder, members, filter="data")
    with tarfile.open(data / NAMES) as archive:
        wanted = {f"package/annotations/{language}/annotations.json" for language in (*TRAINED, *HELD_OUT)}
        archive.extractall(folder, [m for m in archive if m.name in wanted], filter="data")
    (folder / "package" / "annotations").rename(folder / "annotations")


def read_emoji(folder: Path) -> list[Emoji]:
    """Every emoji with an image and captions in every language."""
    languages = (*TRAINED, *HELD_OUT)
    tables = {language: read_captions(folder / "annotations" / language / "annotations.json") for language in languages}
    emoji = []
    for entry in json.loads((folder / "package" / "emoji.json").read_text()):
        character = plain("".join(chr(int(code, 16)) for code in entry["unified"].split("-")))
        if not entry["has_img_google"] or any(character not in table for table in tables.values()):
            continue
        captions = {kind: {language: tables[language][character][kind] for language in languages} for kind in KINDS}
        path = folder / "package" / "img" / "google" / "64" / entry["image"]
        digest = hashlib.sha256(character.encode()).digest()
        emoji.append(Emoji(path, captions, digest[0] % HELD_OUT_CONCEPTS == 0))
    return emoji


def read_captions(path: Path) -> dict[str, dict[str, str]]:
    """character -> kind -> caption, of one language."""
    entries = json.loads(path.read_text())["annotations"]["annotations"]
    return {
        plain(character): {"names": entry["tts"][0], "keywords": ", ".join(entry["default"])}
        for character, entry in entries.items()
        if "tts" in entry and "default" in entry
    }


def plain(character: str) -> str:
    """Without the selector of the colored form."""
    return character.replace("\ufe0f", "")


def trained_captions(emoji: list[Emoji]) -> list[tuple[Path, str]]:
    """Each trained emoji with its captions in each trained language.

    A caption of a held-out emoji is left out wherever it occurs.
    """
    secret = {text for each in emoji if each.is_held_out for kind in KINDS for text in each.captions[kind].values()}
    rows = []
    for each in emoji:
        captions = dict.fromkeys(each.captions[kind][language] for kind in KINDS for language in TRAINED)
        rows += [(each.path, text) for text in captions if text not in secret and not each.is_held_out]
    return rows


def write_pairs(emoji: list[Emoji], table: Path) -> None:
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("path", "caption"), *trained_captions(emoji)])


# ---------------------------------------------------------------------------------------------------------- retrieval


class Retrieval(NamedTuple):
    """How many captions found their image first, in percent, what chance would find, and the number of captions."""

    at_1: float
    chance: float
    asked: int


class Pool(NamedTuple):
    """Images to find, with their vectors."""

    emoji: list[Emoji]
    vectors: np.ndarray  # [I, W]

    def retrieval(self, matcher: Matcher, kind: str, language: str, known: frozenset[str] = frozenset()) -> Retrieval:
        """By their captions of a kind in a language, without those that are known."""
        captions = [each.captions[kind][language] for each in self.emoji]
        asked = [n for n, text in enumerate(captions) if text not in known]
        texts = matcher.text_vectors([captions[n] for n in asked]).numpy()
        nearest = (texts @ self.vectors.T).argmax(1)
        right = [captions[found] == captions[n] for found, n in zip(nearest, asked, strict=True)]
        return Retrieval(100 * float(np.mean(right)), 100 / len(self.emoji), len(asked))


def evaluate(matcher: Matcher, emoji: list[Emoji]) -> dict[tuple[str, str], dict[str, Retrieval]]:
    """The tables: (part, kind of caption) -> language -> retrieval."""
    vectors = image_vectors(matcher, emoji)
    is_held_out = np.array([each.is_held_out for each in emoji])
    known = Pool([each for each in emoji if not each.is_held_out], vectors[~is_held_out])
    unseen = Pool([each for each in emoji if each.is_held_out], vectors[is_held_out])
    trained = frozenset(text for _, text in trained_captions(emoji))
    tables = {}
    for kind in KINDS:
        tables["known", kind] = {code: known.retrieval(matcher, kind, code) for code in TRAINED}
        tables["held-out concepts", kind] = {code: unseen.retrieval(matcher, kind, code) for code in TRAINED}
        tables["held-out languages", kind] = {code: known.retrieval(matcher, kind, code, trained) for code in HELD_OUT}
    return tables


def image_vectors(matcher: Matcher, emoji: list[Emoji]) -> np.ndarray:
    return matcher.image_vectors([read_image(each.path) for each in emoji]).numpy()


def draw_search(matcher: Matcher, emoji: list[Emoji], path: Path, columns: int = 8) -> None:
    """For each query a row of the nearest images; a held-out emoji has a frame."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["font.family"] = ["DejaVu Sans", "Noto Sans CJK SC", "Noto Serif CJK SC", "Noto Sans CJK JP"]
    vectors = image_vectors(matcher, emoji)
    cosines = matcher.text_vectors(list(QUERIES)).numpy() @ vectors.T
    figure, axes = plt.subplots(len(QUERIES), columns + 1, figsize=(columns + 2, len(QUERIES) * 0.95))
    for query, values, row in zip(QUERIES, cosines, axes, strict=True):
        row[0].text(1, 0.5, query, ha="right", va="center", fontsize=13)
        row[0].axis("off")
        for axis, n in zip(row[1:], values.argsort()[::-1][:columns], strict=True):
            axis.imshow(read_image(emoji[n].path))
            axis.set(xticks=[], yticks=[])
            for side in axis.spines.values():
                side.set(visible=emoji[n].is_held_out, color="tab:orange", linewidth=3)
    figure.subplots_adjust(0.02, 0.01, 0.99, 0.99, 0.06, 0.06)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the two archives")
    parser.add_argument("--work", type=Path, required=True, help="the folder of images and run; a run there is kept")
    parser.add_argument("--max-time", default="10m")
    parser.add_argument("--processor-time", action="store_true", help="of this process, not of the clock")
    parser.add_argument("--figure", type=Path, help="draw search results here")
    parser.add_argument("--resume", action="store_true", help="go on with the run")
    args = parser.parse_args()
    if args.processor_time:
        count_processor_time()

    # data
    unpack(args.data, args.work)
    emoji = read_emoji(args.work)
    table, run = args.work / "pairs.csv", args.work / "run"

    # training
    start = time.monotonic()
    if args.resume:
        resume(run, max_time=args.max_time)
    elif not run.is_dir():
        write_pairs(emoji, table)
        train(table, out=run, max_time=args.max_time, **RECIPE)
    seconds = time.monotonic() - start

    # what it finds
    matcher = load_matcher(run)
    parts = evaluate(matcher, emoji)
    size = sum(p.numel() for p in matcher.model.parameters())
    held_out = sum(each.is_held_out for each in emoji)
    print(json.dumps({"emoji": len(emoji), "held out": held_out, "parameters": size, "seconds": round(seconds)}))
    for (part, kind), rows in parts.items():
        for language, row in rows.items():
            name = HELD_OUT.get(language, language)
            print(f"{part:20} {kind:8} {name:10} {row.at_1:6.1f} % of {row.asked:5}, chance {row.chance:.2f} %")
    if args.figure:
        draw_search(matcher, emoji, args.figure)
    concepts = parts["held-out concepts", "keywords"]
    if any(concepts[code].at_1 < MIN_RETRIEVAL * concepts[code].chance for code in ("en", "zh")):
        sys.exit(f"held-out concepts: below {MIN_RETRIEVAL} x chance")


if __name__ == "__main__":
    main()
