"""Models in other layouts: runs for transformers, old checkpoints (pickles) for safetensors; all is compared.

    a run, a model folder with safetensors, or a .gguf file          the layout that is asked for (see loading.py)
    a folder with config.json and pytorch_model.bin (or shards)      the public layout, with safetensors
    fairseq's checkpoint.pt with dict.*.txt and byte-pair codes      a folder of the family `fairseq`

The new folder is built aside, loaded, compared tensor by tensor with what was read, and only then put in place.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from headwater.errors import BadFile, BadSetting, NotFound, nearest
from headwater.families.export import Misfit
from headwater.families.family import find
from headwater.families.folder import Loaded, ModelWeights, load_folder, plan, sizes
from headwater.families.known import KNOWN, locate
from headwater.families.loading import find_model, load, save_as
from headwater.families.old_text import fairseq_tokenizer, public_tokenizer
from headwater.weights.files import atomic, read_bounded
from headwater.weights.names import listed
from headwater.weights.pickles import Read, read
from headwater.weights.settings import MOST_BYTES
from headwater.weights.shards import INDEX, WHOLE, write_folder


@dataclass(frozen=True)
class Converted:
    """What was written, for a report: what was left out, and why there is no tokenizer where there is none."""

    folder: Path
    loaded: Loaded
    tensors: int
    dropped: list[str] = field(default_factory=list)
    remark: str = ""
    rewrites: tuple[str, ...] = ()
    misfit: Misfit | None = None


def convert(
    old: str | Path,
    new: str | Path,
    *,
    vocabulary: str | Path | None = None,
    drop: Iterable[str] = (),
    force: bool = False,
    layout: str = "auto",
) -> Converted:
    """Convert a model (a run, a folder, a file or a known name) into a new folder or .gguf file.

    vocabulary: the folder with the tokenizer's files, where they do not lie with the weights.
    drop: patterns of tensor names to leave out, such as heads of its own that no family has.
    layout: as in save; an old checkpoint becomes what its config.json says.
    """
    new = Path(new)
    if new.exists() and (not new.is_dir() or any(new.iterdir())) and not force:
        raise BadFile(f"{new}: it must be a new or empty folder, it is there already; choose another, or give --force")
    source = Path(old) if Path(old).exists() or str(old) not in KNOWN else locate(str(old))
    if source.exists() and (loadable := find_model(source)) and _is_whole(loadable):
        if drop or vocabulary:
            raise BadSetting(f"--drop and --vocabulary are for old checkpoints, {source} is not one; leave them out")
        return _convert_model(loadable, new, layout)
    if layout != "auto":
        raise BadSetting(f"--layout is for models that load, {source} is an old checkpoint; convert it first")
    folder, pickles = _find(source)
    public = (folder / "config.json").is_file()
    if public:
        plan(folder)  # whatever config.json has wrong is said before anything is read
    new.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=new.parent, prefix=f".{new.name}-") as aside:
        made, raw = Path(aside) / "made", Path(aside) / "raw"
        made.mkdir()
        raw.mkdir()
        found = read(pickles, raw)
        kept, dropped = _without(found.tensors, list(drop), source)
        write = _write_public if public else _write_fairseq
        written, remark = write(folder, Read(kept, found.settings), made, Path(vocabulary) if vocabulary else folder)
        _compare(made, written, source)
        _put_in_place(made, new)
    return Converted(new, load_folder(new), len(kept), dropped, remark)


def _is_whole(path: Path) -> bool:
    """Whether a model can be loaded as it is, without a pickle."""
    return path.suffix == ".gguf" or any((path / name).is_file() for name in (WHOLE, INDEX))


def _convert_model(source: Path, new: Path, layout: str) -> Converted:
    new.parent.mkdir(parents=True, exist_ok=True)
    loaded = load(source)
    with tempfile.TemporaryDirectory(dir=new.parent, prefix=f".{new.name}-") as aside:
        saved = save_as(loaded, Path(aside) / new.name, layout)
        if saved.path.is_dir():
            _put_in_place(saved.path, new)
        else:
            os.replace(saved.path, new)
    return Converted(new, saved.model, len(ModelWeights(saved.model.model)), [], "", saved.rewrites, saved.misfit)


# ------------------------------------------------------------------------------------------------------------ reading


def _find(source: Path) -> tuple[Path, Path]:
    """The folder of a checkpoint, and the file (or folder) with its pickles."""
    if not source.exists():
        raise NotFound(f"{source} is not there; name a folder, a .pt or .bin file, or one of {', '.join(KNOWN)}")
    if source.is_file():
        return source.parent, source
    if (source / "config.json").is_file():
        return source, source
    for pattern in ("checkpoint_best.pt", "checkpoints/checkpoint_best.pt", "*.pt", "checkpoints/*.pt"):
        if files := sorted(source.glob(pattern)):
            return source, files[0]
    raise NotFound(
        f"{source} must hold a config.json with a pickle, or a checkpoint of fairseq (*.pt); it holds neither"
    )


def _without(tensors: Mapping[str, Tensor], drop: list[str], where: object) -> tuple[dict[str, Tensor], list[str]]:
    for pattern in drop:
        if not any(fnmatchcase(name, pattern) for name in tensors):
            raise BadSetting(f"{where}: no tensor is called {pattern!r}, to be dropped; {nearest(pattern, tensors)}")
    dropped = [name for name in tensors if any(fnmatchcase(name, pattern) for pattern in drop)]
    return {name: tensor for name, tensor in tensors.items() if name not in set(dropped)}, dropped


# ------------------------------------------------------------------------------------------------------------ writing


def _write_public(folder: Path, found: Read, made: Path, vocabulary: Path) -> tuple[dict[str, Tensor], str]:
    relation = plan(folder).relation
    known = [relation.names, *relation.heads.values()]
    strange = [name for name in found.tensors if not any(names.find_theirs(name) for names in known)]
    if strange:
        parts = sorted({name.rpartition(".")[0] + ".*" for name in strange})
        raise BadFile(
            f"{folder}: {len(strange)} tensors belong to no part of {relation.name}: {listed(strange)}; to leave them "
            f"out: {' '.join(f'--drop {part!r}' for part in parts[:6])}"
        )
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            _write(made / name, read_bounded(folder / name, MOST_BYTES))
    write_folder(made, found.tensors)
    return found.tensors, public_tokenizer(vocabulary, made)


def _write_fairseq(folder: Path, found: Read, made: Path, vocabulary: Path) -> tuple[dict[str, Tensor], str]:
    from headwater.families.fairseq import config_from

    if "arch" not in found.settings or "encoder.embed_tokens.weight" not in found.tensors:
        raise BadFile(f"{folder} must hold a config.json, or a translator trained by fairseq; it holds neither")
    config, tensors = config_from(found.settings, folder), dict(found.tensors)
    tables = [tensors[f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder")]
    extra = fairseq_tokenizer(vocabulary, made, len(tables[0]), len(tables[1]), found.settings)
    if extra:  # pieces its dictionary lacks mean <unk> to fairseq: they get rows of their own, equal to that one's
        tables[0] = torch.cat([tables[0], tables[0][3:4].expand(extra, -1)])
        tensors["encoder.embed_tokens.weight"] = tables[0]
    config |= {"source_vocab_size": len(tables[0]), "target_vocab_size": len(tables[1])}
    _write(made / "config.json", json.dumps(config, indent=2).encode())
    write_folder(made, tensors)
    return tensors, ""


def _write(path: Path, content: bytes) -> None:
    with atomic(path) as file:
        file.write(content)


# ----------------------------------------------------------------------------------------------------------- checking


def _compare(made: Path, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Load what was written: the model must hold what was read from the old file, number for number."""
    loaded = load_folder(made)
    relation = find(loaded.config["model_type"])
    names, state = relation.names + relation.heads[loaded.head], loaded.model.state_dict()
    for theirs, tensor in tensors.items():
        found = names.find_theirs(theirs)
        ours = found.ours() if found else []
        pieces = (found.row.steps.read(tensor.float(), len(ours), sizes(loaded.spec)) if found and ours else None) or []
        for name, piece in zip(ours, pieces, strict=True):
            if not torch.equal(state[name], piece):
                raise BadFile(f"{source}: {theirs} does not come back as it was read; not converted")


def _put_in_place(made: Path, new: Path) -> None:
    """File by file, the weights last. Other files of an old folder stay, but for weights that are now out of date."""
    new.mkdir(exist_ok=True)
    files = sorted(made.iterdir(), key=lambda path: path.name in (WHOLE, INDEX))
    for path in files:
        os.replace(path, new / path.name)
    for name in {WHOLE, INDEX} - {path.name for path in files}:
        (new / name).unlink(missing_ok=True)
