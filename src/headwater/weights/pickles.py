"""Old pickled weights (pytorch_model.bin, .pt) turned into safetensors, at arm's length.

A pickle is a program. It is read by torch's weights-only reader in a process of its own, with bounds on memory, time
and files and no network where the system allows that; only plain dense tensors come out, as a safetensors file, which
is then checked like any stranger's. This is the only file that mentions torch.load.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headwater.errors import BadFile, NotFound
from headwater.weights.files import open_plain, read_bounded, shown

MOST_SECONDS, MOST_FILES, ROOM = 900, 64, 12 << 30  # torch alone maps several gigabytes of addresses
HOLDERS = ("state_dict", "model_state_dict", "model", "module")  # where training programs put the weights
INDEX = "pytorch_model.bin.index.json"
# What programs keep beside their weights and we have no use for: each becomes an Unread, and nothing of it is run.
UNREAD = (
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
)
START = "import sys; sys.path.insert(0, sys.argv[1]); from headwater.weights.pickles import child; child(*sys.argv[2:])"


def convert(source: str | Path, folder: str | Path) -> list[Path]:
    """Turn a pickle, or the pickles of a folder, into model.safetensors (or shards and an index) in `folder`."""
    from headwater.weights.shards import write_folder

    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".convert-") as place:
        return write_folder(folder, read(source, place).tensors)


class Read(NamedTuple):
    tensors: dict[str, Any]  # mapped from safetensors files in the place that was given
    settings: dict[str, Any]  # what a training program kept beside them, where it is plain: sizes, flags, names


def read(source: str | Path, place: str | Path) -> Read:
    """What a pickle, or the pickles of a folder, hold: checked tensors, mapped from files written into `place`."""
    from headwater.weights.strict_json import parse_object
    from headwater.weights.tensors import TensorFile

    tensors: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for n, path in enumerate(_pickles(Path(source))):
        part = Path(place) / f"{n}.safetensors"
        _run_child(path, part)
        found = TensorFile(part)
        if twice := sorted(set(found) & set(tensors)):
            raise BadFile(f"{path}: holds {shown(twice[0])}, which another shard holds too")
        tensors |= {name: found[name] for name in found}
        settings |= parse_object(found.metadata.get("settings", "{}").encode(), path)
    return Read(tensors, settings)


def _pickles(source: Path) -> list[Path]:
    if not source.is_dir():
        open_plain(source).close()
        return [source]
    if (source / INDEX).exists():
        from headwater.weights.strict_json import parse_object

        placed = parse_object(read_bounded(source / INDEX, 16 << 20), source / INDEX).get("weight_map")
        names = sorted(set(placed.values())) if isinstance(placed, dict) and all(map(_plain, placed.values())) else []
        if not 0 < len(names) <= 2000:
            raise BadFile(f"{source / INDEX}: weight_map must name files in this folder")
        return [source / name for name in names]
    for pattern in ("pytorch_model.bin", "*.bin", "*.pt", "*.pth", "*.ckpt"):
        if found := sorted(source.glob(pattern)):
            return found[:1]
    raise NotFound(f"{source} must hold a pickle such as pytorch_model.bin; it holds none")


def _plain(name: Any) -> bool:
    return isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name


def _run_child(source: Path, target: Path) -> None:
    package = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-I", "-c", START, str(package), str(source.resolve()), str(target.resolve())]
    keep = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=MOST_SECONDS, env=keep | {"OMP_NUM_THREADS": "1"}, check=False
        )
    except subprocess.TimeoutExpired:
        raise BadFile(f"{source}: took more than {MOST_SECONDS} s to read; not converted") from None
    last = done.stdout.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]
    if done.returncode or last != "converted":
        told = last or f"the reading process ended with {done.returncode} (out of memory or of time)"
        raise BadFile(f"{source}: not converted: {told[:300]}")


# ---------------------------------------------------------------------------------------------- in the child


def _limit(size: int) -> None:
    import resource

    bounds = {
        resource.RLIMIT_AS: ROOM + 3 * size,
        resource.RLIMIT_CPU: MOST_SECONDS,
        resource.RLIMIT_NOFILE: MOST_FILES,
        resource.RLIMIT_FSIZE: 8 * size + (64 << 20),
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in bounds.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    new_user, new_network = 0x10000000, 0x40000000
    libc = ctypes.CDLL(None)
    if hasattr(libc, "unshare") and libc.unshare(new_network):
        libc.unshare(new_user | new_network)  # without rights: in a user namespace of its own, or not at all


class Unread:
    """Stands for a value that is passed over: it takes any arguments and any state, and keeps none."""

    def __new__(cls, *given: Any) -> Unread:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def _settings(value: Any) -> dict[str, Any]:
    """The plain ones among a training program's settings of its model: fairseq keeps them in args or cfg.model."""
    if not isinstance(value, Mapping):
        return {}
    inner = value.get("cfg")
    for held in (value.get("args"), inner.get("model") if isinstance(inner, Mapping) else None):
        kept = vars(held) if isinstance(held, argparse.Namespace) else held
        if isinstance(kept, Mapping):
            return {name: v for name, v in kept.items() if isinstance(name, str) and _is_plain(v)}
    return {}


def _is_plain(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, int) or (type(value) is str and len(value) <= 1000)


def _tensors(value: Any, size: int) -> dict[str, Any]:
    """The named dense tensors of what was read; training states are looked into one level deep."""
    import torch

    held = next(
        (value[name] for name in HOLDERS if isinstance(value, Mapping) and isinstance(value.get(name), Mapping)), value
    )
    if not isinstance(held, Mapping) or not all(isinstance(name, str) for name in held):
        raise BadFile("it must hold a table of named tensors, it holds something else")
    found = {}
    for name, tensor in held.items():
        if not isinstance(tensor, torch.Tensor):
            continue  # a step count, a version: not a weight
        dense = (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and not tensor.is_quantized
        )
        if not dense or tensor.device.type != "cpu":
            raise BadFile(
                f"{shown(name)} must be a plain dense tensor; sparse, quantised and special ones are not read"
            )
        found[name] = tensor.detach()
    total = sum(math.prod(t.shape) * t.dtype.itemsize for t in found.values())
    if not found or total > 4 * size + (1 << 20):
        raise BadFile(f"it must hold tensors of about its size, they claim {total:,} bytes of {size:,}")
    return found


def _convert(source: str, target: str) -> str:
    import torch

    from headwater.weights.tensors import write

    size = os.path.getsize(source)
    if os.name == "posix":
        _limit(size)
    torch.serialization.add_safe_globals([argparse.Namespace])  # plain data that programs keep beside the weights
    torch.serialization.add_safe_globals([(Unread, name) for name in UNREAD])
    with open(source, "rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    value = torch.load(source, map_location="cpu", weights_only=True, mmap=zipped)
    settings = json.dumps(_settings(value))
    write(target, _tensors(value, size), {"settings": settings} if len(settings) < 1 << 20 else {})
    return "converted"


def _reason(error: BaseException) -> str:
    """Why it can not be read, in our words: torch's own say how to load the file anyway, which would run its code."""
    said = str(error)
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"GLOBAL ([\w.]{1,100})", said)
        if named:
            return f"it asks for {named[1]}, which is no tensor and no plain data; to read it would be to run its code"
        return "it is not a pickle of plain tensors; to read it would be to run its code, or it is no pickle at all"
    if isinstance(error, EOFError) or "PytorchStreamReader" in said or "magic number" in said:
        return "it is no whole file of weights: it is cut short, damaged or of another kind; fetch it again"
    words = " ".join("".join(c if c.isprintable() else " " for c in said).split())
    return f"it can not be read ({type(error).__name__}: {words[:120]})"


def child(source: str, target: str) -> None:
    """What the child does: its last line is `converted`, or what is wrong."""
    try:
        told = _convert(source, target)
    except BadFile as fault:
        told = str(fault)
    except BaseException as error:
        told = _reason(error)
    sys.stdout.write(f"\n{told}\n")
