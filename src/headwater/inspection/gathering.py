"""headwater.inspect: everything that can be seen of a model and a text, in one result, one folder, one HTML file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headwater.errors import BadFile, BadInput, BadSetting, Fault, nearest
from headwater.inspection.ablation import ablate, ablations
from headwater.inspection.costs import Count, count
from headwater.inspection.credit import ENOUGH, attribution
from headwater.inspection.flow import first_bad, gradients
from headwater.inspection.logit_lens import lens
from headwater.inspection.maps import Attention, alignment, attention
from headwater.inspection.patterns import Heads, heads
from headwater.inspection.places import positions
from headwater.inspection.results import Result, plain
from headwater.inspection.subjects import Reading, Subject, read
from headwater.inspection.surprise import next_tokens, token_losses

LONG = 256  # tokens, above which gradients are only taken where they are asked for
LAST = 24  # places of the lens, the last ones


@dataclass(frozen=True, eq=False)
class Costs(Result):
    """Parameters, bytes and operations at this text's length (costs.py)."""

    count: Count

    def to_plain(self) -> dict[str, Any]:
        return self.count.plain()

    def lines(self) -> list[str]:
        by = ", ".join(f"{name} {number:,}" for name, number in self.count.groups.items())
        sizes = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in self.count.bytes.items())
        work = f"{self.count.flops['forward'] / 1e6:,.1f} million operations a token"
        return [f"{self.count.parameters:,} parameters: {by}", f"{sizes}; {work} at length {self.count.at['length']}"]

    def _repr_html_(self) -> str:
        from headwater.inspection.sections import costs_table

        return costs_table(self.count)


@dataclass(frozen=True)
class Asked:
    """What one look needs: the model as it was given, the text as it is read, and the head that was named."""

    model: Any
    reading: Reading
    layer: int | None
    head: int | None
    kind: str | None
    named: bool  # the user asked for this look by name

    def place(self) -> int | None:
        """The place to ask about: after the last token; of a text that is written, where the model was least sure."""
        return int(token_losses(self.model, self.reading).losses.argmax()) if self.reading.source else None

    @property
    def long(self) -> bool:
        return len(self.reading.tokens) > LONG and not self.named


def _attention(asked: Asked) -> Result:
    layers = [asked.layer] if asked.layer is not None else None
    only = [asked.head] if asked.head is not None else None
    kinds = [asked.kind] if asked.kind is not None else None
    return attention(asked.model, asked.reading, kinds=kinds, layers=layers, heads=only)


def _lens(asked: Asked) -> Result:
    length = len(asked.reading.tokens)
    return lens(asked.model, asked.reading, places=range(max(0, length - LAST), length))


def _attribution(asked: Asked) -> Result:
    """Integrated gradients; where they do not add up, the way that needs no gradient."""
    if asked.long:
        raise BadInput(f"left out for {len(asked.reading.tokens)} tokens; ask for it by name")
    place = asked.place()
    found = attribution(asked.model, asked.reading, place=place)
    return found if found.gap <= ENOUGH else attribution(asked.model, asked.reading, place=place, by="blanked")


def _gradients(asked: Asked) -> Result:
    if asked.long:
        raise BadInput(f"left out for {len(asked.reading.tokens)} tokens; ask for it by name")
    return gradients(asked.model, asked.reading)


def _ablation(asked: Asked) -> Result:
    if asked.layer is None or asked.head is None:
        return ablations(asked.model, asked.reading, kind=asked.kind)
    return ablate(asked.model, asked.reading, asked.layer, asked.head, kind=asked.kind)


def _costs(asked: Asked) -> Result:
    return Costs(count(asked.reading.model.spec, 1, max(len(asked.reading.tokens), len(asked.reading.source))))


LOOKS: dict[str, Callable[[Asked], Result]] = {
    "next": lambda asked: next_tokens(asked.model, asked.reading, place=asked.place()),
    "losses": lambda asked: token_losses(asked.model, asked.reading),
    "heads": lambda asked: heads(asked.model, asked.reading),
    "alignment": lambda asked: alignment(asked.model, asked.reading),
    "attention": _attention,
    "lens": _lens,
    "attribution": _attribution,
    "gradients": _gradients,
    "ablation": _ablation,
    "positions": lambda asked: positions(asked.model),
    "costs": _costs,
}
USUAL = tuple(name for name in LOOKS if name != "ablation")


@dataclass(frozen=True, eq=False)
class Inspection(Result):
    """results by name; missing: what could not be had, and why. bad: the module where NaN or inf arises, if any."""

    name: str
    reading: Reading
    results: dict[str, Result]
    missing: dict[str, str] = field(default_factory=dict)
    bad: Any = None

    def __getitem__(self, name: str) -> Result:
        if name not in self.results:
            why = self.missing.get(name) or nearest(name, self.results)
            raise KeyError(f"{name!r} is not among the results; {why}")
        return self.results[name]

    def lines(self) -> list[str]:
        made = [f"NaN or inf arises first in {self.bad.path}: {self.bad.what}"] if self.bad else []
        for name in ("next", "losses", "heads", "alignment", "attribution", "gradients", "ablation"):
            made += self.results[name].lines() if name in self.results else []
        return made

    def to_plain(self) -> dict[str, Any]:
        found = {name: result.to_plain() for name, result in self.results.items()}
        return {
            "model": self.name,
            "reading": plain(self.reading),
            **found,
            "missing": self.missing,
            "bad": plain(self.bad),
        }

    def html(self, language: str = "en") -> str:
        from headwater.inspection.sections import page

        return page(self, language)

    def _repr_html_(self) -> str:
        from headwater.inspection.sections import body

        return body(self)

    def write(self, folder: str | Path, language: str = "en", kind: str = "png") -> list[Path]:
        """report.html, inspection.json, a picture of each result, attention.npz with the weights; gives the paths."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            made = [folder / "report.html", folder / "inspection.json"]
            made[0].write_text(self.html(language), encoding="utf-8")
            told = json.dumps(self.to_plain(), ensure_ascii=False, allow_nan=False)
            made[1].write_text(told, encoding="utf-8")
            return made + self._pictures(folder, kind) + self._weights(folder)
        except OSError as error:
            raise BadFile(
                f"{folder} must be a folder that can be written, got: {error.strerror}; choose another"
            ) from None

    def _pictures(self, folder: Path, kind: str) -> list[Path]:
        from headwater.inspection.pictures import save

        made = []
        for name, result in self.results.items():
            if isinstance(result, Attention):
                made += [save(result, folder / f"{name}.{one}.{kind}", kind=one) for one in result.kinds]
                made += [
                    save(
                        result, folder / f"{h.kind}.{h.layer}.{h.head}.{kind}", kind=h.kind, layer=h.layer, head=h.head
                    )
                    for h in self.worth(result)
                ]
            elif not isinstance(result, Costs) and getattr(result, "drawn", True):
                made.append(save(result, folder / f"{name}.{kind}"))
        return made

    def worth(self, kept: Attention) -> list[Any]:
        """Heads that deserve a picture of their own, among those whose weights were kept."""
        known = self.results.get("heads")
        there = {(m.kind, m.layer, head) for m in kept.maps for head in m.heads}
        some = known.worth(4) if isinstance(known, Heads) else []
        return [h for h in some if (h.kind, h.layer, h.head) in there]

    def _weights(self, folder: Path) -> list[Path]:
        found = self.results.get("attention")
        if not isinstance(found, Attention):
            return []
        path = folder / "attention.npz"
        np.savez_compressed(path, **{f"{m.kind}.{m.layer}": m.weights for m in found.maps})  # type: ignore[arg-type]
        return [path]


def inspect(
    model: Any,
    text: Any,
    target: Any = None,
    *,
    what: Iterable[str] | None = None,
    layer: int | None = None,
    head: int | None = None,
    kind: str | None = None,
) -> Inspection:
    """Look at a model while it reads a text. what: the looks wanted (see LOOKS), all but ablation where it is None;
    then what a model cannot show (no language head, no encoder) is left out with the reason. layer, head, kind: narrow
    attention, and say which head ablation switches off.
    """
    wanted = list(what) if what is not None else list(USUAL)
    for name in wanted:
        if name not in LOOKS:
            raise BadSetting(f"inspect: there is no look {name!r}; {nearest(name, LOOKS)}")
    reading = read(model, text, target)
    if what is None and not reading.source:
        wanted.remove("alignment")
    if what is None and layer is not None and head is not None:
        wanted.append("ablation")
    results, missing = {}, {}
    for name in wanted:
        try:
            results[name] = LOOKS[name](Asked(model, reading, layer, head, kind, named=what is not None))
        except BadInput as fault:
            if what is not None:
                raise
            missing[name] = str(fault)
    return Inspection(
        _named(model), reading, results, missing, first_bad(model, reading) if not missing else _bad(model, reading)
    )


def _bad(model: Any, reading: Reading) -> Any:
    try:
        return first_bad(model, reading)
    except Fault:
        return None


def _named(model: Any) -> str:
    where = Path(getattr(model, "where", None) or getattr(model, "folder", None) or "")
    name = where.parent.name if where.name == "model" else where.name  # a run keeps its model in a folder of that name
    shape = Subject.of(model).model
    kind = "encoder-decoder" if shape.encoder is not None and shape.decoder is not None else (
        "decoder-only" if shape.decoder is not None else "encoder-only")  # fmt: skip
    return f"{name} ({kind})" if name else kind
