"""What the server was started on: models and runs by name. A page asks by these names; paths never come from it.

RUN@STEP names a run's model as it was at a checkpoint, so that every view can look at the past.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import BadInput, NotFound, nearest
from headwater.families.known import KNOWN
from headwater.families.loading import find_model, load
from headwater.inspection.subjects import Subject
from headwater.inspection.words import Both
from headwater.serving import tiny
from headwater.training.snapshot import MODEL
from headwater.training.use import load_run
from headwater.weights.native import is_native, put
from headwater.weights.tensors import TensorFile

MOST_LOADED, MOST_NAMES = 2, 200


@dataclass(frozen=True)
class Item:
    """kind: model, run (a folder of training), checkpoint (of a run) or made (on the spot, with first weights)."""

    name: str
    kind: str
    path: Path | None = None

    @property
    def stamp(self) -> tuple[int, ...]:
        """Changes when the files do, so that a run's newer model is seen; a fault where they are gone."""
        if self.path is None:
            return ()
        model = self.path / "model" if self.kind == "run" else self.path
        try:
            files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
            return tuple(f.stat().st_mtime_ns for f in [model, *files])
        except OSError:
            if self.kind == "run" and self.path.is_dir():
                en = f"{self.name} has no model yet; wait for its first evaluation"
                raise NotFound(Both(en, f"{self.name} 还没有模型；请等第一次评估")) from None
            raise gone(self.name) from None


def gone(name: str) -> NotFound:
    en = f"{name} was here when the page was opened and is gone now; put it back, or choose another"
    return NotFound(Both(en, f"{name} 在打开页面时还在，现在不见了；请放回去，或另选一个"))


@dataclass(frozen=True, eq=False)
class Opened:
    """A model in memory. subject: how it is asked in words."""

    item: Item
    stamp: tuple[int, ...]
    subject: Subject
    given: Any

    @property
    def shape(self) -> str:
        model = self.subject.model
        return "both" if self.subject.two else "decoder" if model.decoder is not None else "encoder"

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.item.name, self.stamp)


class Shelf:
    def __init__(self, items: Iterable[Item]) -> None:
        made = [Item(name, "made") for name in tiny.SHAPES]
        self.items = {item.name: item for item in [*items, *made]}
        self.loaded: OrderedDict[str, Opened] = OrderedDict()

    def item(self, name: str) -> Item:
        run, at, step = name.rpartition("@")
        if name in self.items:
            return self.items[name]
        if at and step.isdecimal() and self.items.get(run, Item("", "")).kind == "run":
            return self._past(run, int(step))
        en = f"this server was not started on {name[:60]!r}; {nearest(name, self.items)}"
        raise NotFound(Both(en, f"本服务启动时没有给它 {name[:60]!r}；有：{'、'.join(list(self.items)[:5])}"))

    def _past(self, run: str, step: int) -> Item:
        path = self.run(run) / "checkpoints" / f"step-{step:08d}"
        if step not in checkpoints(self.run(run)) or not (path / MODEL).is_file():
            en = f"{run} has no checkpoint of step {step}; older ones are let go as training goes on"
            raise NotFound(Both(en, f"{run} 没有第 {step} 步的检查点；训练中较早的会被删去"))
        return Item(f"{run}@{step}", "checkpoint", path)

    def run(self, name: str) -> Path:
        item = self.item(name)
        if item.kind != "run" or item.path is None:
            runs = [n for n, one in self.items.items() if one.kind == "run"]
            en = f"{name} is a model, not a run; {nearest(name, runs) if runs else 'there are no runs'}"
            raise NotFound(Both(en, f"{name} 是模型，不是训练记录；记录有：{'、'.join(runs[:5]) or '无'}"))
        if not item.path.is_dir():
            raise gone(name)
        return item.path

    def open(self, name: str) -> Opened:
        """The model of that name, read again if its files have changed. Called in the model's thread only."""
        item = self.item(name)
        stamp = item.stamp
        held = self.loaded.get(name)
        if held is None or held.stamp != stamp:
            self.loaded.pop(name, None)
            while len(self.loaded) >= MOST_LOADED:
                self.loaded.popitem(last=False)
            given = _read(item)
            held = self.loaded[name] = Opened(item, stamp, Subject.of(given), given)
        self.loaded.move_to_end(name)
        return held


def _read(item: Item) -> Any:
    if item.path is None:
        return tiny.made(item.name)
    if item.kind == "checkpoint":
        trained = load_run(item.path.parent.parent)
        put(trained.model, TensorFile(item.path / MODEL), item.name)
        return trained
    folder = find_model(item.path)
    if folder.is_dir() and is_native(folder):
        return load_run(item.path)
    return load(item.path)


def checkpoints(folder: Path) -> list[int]:
    """Steps of a run's committed checkpoints, oldest first."""
    found = (folder / "checkpoints").glob("step-*/manifest.json") if (folder / "checkpoints").is_dir() else ()
    return sorted(int(path.parent.name[5:]) for path in found if path.parent.name[5:].isdigit())


# ------------------------------------------------------------------------------------------------ what there is to find


def find(words: Iterable[str]) -> list[Item]:
    """Items for what stands on the command line: models, runs, folders of runs. Nothing given: what lies around."""
    words = list(words)
    if not words:
        return _named([*_runs(Path("runs")), *_installed()])
    found: list[tuple[str, str, Path]] = []
    for word in words:
        path = Path(word)
        if word in KNOWN and not path.exists():
            found.append((word, "model", find_model(word)))
        elif (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file():
            found.append((_name(path), "run", path.resolve()))
        elif path.suffix == ".gguf" or (path / "config.json").is_file():
            found.append((_name(path), "model", path.resolve()))
        elif path.is_dir() and (inside := [*_runs(path), *_models(path)]):
            found += inside
        else:
            find_model(word)  # a fault that says what is known, where there is no such path
            raise BadInput(f"{word} must be a model, a run or a folder of them, it is neither; see headwater models")
    return _named(found)


def _runs(folder: Path) -> Iterator[tuple[str, str, Path]]:
    for path in sorted(folder.rglob("config.yaml"))[:MOST_NAMES] if folder.is_dir() else ():
        yield path.parent.relative_to(folder).as_posix(), "run", path.parent.resolve()


def _models(folder: Path) -> Iterator[tuple[str, str, Path]]:
    for path in sorted([*folder.glob("*/config.json"), *folder.glob("*.gguf")])[:MOST_NAMES]:
        model = path.parent if path.name == "config.json" else path
        yield _name(model), "model", model.resolve()


def _installed() -> Iterator[tuple[str, str, Path]]:
    for name, known in KNOWN.items():
        path = known.path()
        if path is not None and (path.suffix == ".gguf" or any(path.glob("*.safetensors"))) and path.exists():
            yield name, "model", path


def _name(path: Path) -> str:
    return path.resolve().name or "model"


def _named(found: Iterable[tuple[str, str, Path]]) -> list[Item]:
    """Each name once; what no terminal should print is taken out of it."""
    items: dict[str, Item] = {}
    for name, kind, path in found:
        clean = re.sub(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]", "?", name)[:100]
        unique = next(n for i in range(1, 10**6) if (n := clean if i == 1 else f"{clean}-{i}") not in items)
        items[unique] = Item(unique, kind, path)
    return list(items.values())
