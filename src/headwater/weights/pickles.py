"""Convert pickled checkpoints (pytorch_model.bin, .pt) to safetensors in a sandboxed subprocess.

A pickle is a program. It is read by torch's weights-only unpickler in a subprocess, with limits on memory, time and
open files and without network where the system allows that. Only dense tensors come out, as a safetensors file, which
is then validated like any other. This is the only file that calls torch.load.
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
from headwater.i18n import _
from headwater.io.files import open_regular, quote, read_limited

MAX_SECONDS = 900
MAX_OPEN_FILES = 64
BASE_ADDRESS_SPACE = 12 << 30  # torch alone maps several gigabytes of addresses
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "module")  # keys of the weights in a training state
PICKLE_INDEX_NAME = "pytorch_model.bin.index.json"
# Objects that training programs save next to the weights: each becomes an IgnoredObject, and none of their code is run.
IGNORED_GLOBALS = (
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
)
CHILD_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from headwater.weights.pickles import child_main; child_main(*sys.argv[2:])"
)


def convert_pickles(source: str | Path, folder: str | Path) -> list[Path]:
    """Convert a pickle, or the pickles of a folder, to model.safetensors (or shards and an index) in `folder`."""
    from headwater.weights.shards import save_weights

    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".convert-") as work_dir:
        return save_weights(folder, read_pickles(source, work_dir).tensors)


class PickleContents(NamedTuple):
    """The tensors of a checkpoint, and the hyper-parameters saved with them."""

    tensors: dict[str, Any]  # mapped from safetensors files in the work directory
    training_args: dict[str, Any]  # only JSON scalars: sizes, flags, names


def read_pickles(source: str | Path, work_dir: str | Path) -> PickleContents:
    """Read a pickle, or the pickles of a folder: validated tensors, mapped from files written into `work_dir`."""
    from headwater.io.strict_json import parse_json_object
    from headwater.weights.safetensors import SafetensorsFile

    tensors: dict[str, Any] = {}
    training_args: dict[str, Any] = {}
    for n, path in enumerate(_find_pickles(Path(source))):
        converted = Path(work_dir) / f"{n}.safetensors"
        _run_in_subprocess(path, converted)
        shard = SafetensorsFile(converted)
        if duplicates := sorted(set(shard) & set(tensors)):
            raise BadFile(
                _("{path}: holds {name}, which another shard holds too", path=path, name=quote(duplicates[0]))
            )
        tensors |= {name: shard[name] for name in shard}
        training_args |= parse_json_object(shard.metadata.get("training_args", "{}").encode(), path)
    return PickleContents(tensors, training_args)


def _find_pickles(source: Path) -> list[Path]:
    """The pickles of a checkpoint: the file itself, the shards of an index, or the first that a folder holds."""
    if not source.is_dir():
        open_regular(source).close()
        return [source]
    index = source / PICKLE_INDEX_NAME
    if index.exists():
        from headwater.io.strict_json import parse_json_object

        weight_map = parse_json_object(read_limited(index, 16 << 20), index).get("weight_map")
        names: list[str] = []
        if isinstance(weight_map, dict) and all(map(_is_file_name, weight_map.values())):
            names = sorted(set(weight_map.values()))
        if not 0 < len(names) <= 2000:
            raise BadFile(_("{source}: weight_map must name files in this folder", source=index))
        return [source / name for name in names]
    for pattern in ("pytorch_model.bin", "*.bin", "*.pt", "*.pth", "*.ckpt"):
        if paths := sorted(source.glob(pattern)):
            return paths[:1]
    raise NotFound(_("{source} must hold a pickle such as pytorch_model.bin; it holds none", source=source))


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name


def _run_in_subprocess(source: Path, target: Path) -> None:
    """Convert one pickle in a subprocess; BadFile with its last line of output if it fails."""
    package = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-I", "-c", CHILD_CODE, str(package), str(source.resolve()), str(target.resolve())]
    env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    env["OMP_NUM_THREADS"] = "1"
    try:
        process = subprocess.run(command, capture_output=True, timeout=MAX_SECONDS, env=env, check=False)
    except subprocess.TimeoutExpired:
        raise BadFile(
            _("{source}: took more than {max_seconds} s to read; not converted", source=source, max_seconds=MAX_SECONDS)
        ) from None
    last_line = process.stdout.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]
    if process.returncode or last_line != "converted":
        problem = last_line or _(
            "the reading process ended with {returncode} (out of memory or time)", returncode=process.returncode
        )
        raise BadFile(_("{source}: not converted: {details}", source=source, details=problem[:300]))


# ------------------------------------------------------------------------------------------------- in the subprocess


def _limit_resources(file_size: int) -> None:
    """Limit memory, time, open files and file size of this process, and cut off the network."""
    import resource

    limits = {
        resource.RLIMIT_AS: BASE_ADDRESS_SPACE + 3 * file_size,
        resource.RLIMIT_CPU: MAX_SECONDS,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_FSIZE: 8 * file_size + (64 << 20),
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        hard_limit = resource.getrlimit(kind)[1]
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(kind, (limit, limit))

    clone_newuser = 0x10000000
    clone_newnet = 0x40000000
    libc = ctypes.CDLL(None)
    if hasattr(libc, "unshare") and libc.unshare(clone_newnet):
        libc.unshare(clone_newuser | clone_newnet)  # without privileges: in a new user namespace, or not at all


class IgnoredObject:
    """Stands in for an object that is not needed: accepts any arguments and any state, and stores nothing."""

    def __new__(cls, *args: Any) -> IgnoredObject:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def _extract_training_args(value: Any) -> dict[str, Any]:
    """The JSON scalars among the hyper-parameters: fairseq saves them in args or cfg.model, Whisper in dims."""
    if not isinstance(value, Mapping):
        return {}
    cfg = value.get("cfg")
    model_cfg = cfg.get("model") if isinstance(cfg, Mapping) else None
    for args in (value.get("args"), model_cfg, value.get("dims")):
        items = vars(args) if isinstance(args, argparse.Namespace) else args
        if isinstance(items, Mapping):
            return {name: v for name, v in items.items() if isinstance(name, str) and _is_json_scalar(v)}
    return {}


def _is_json_scalar(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, int) or (type(value) is str and len(value) <= 1000)


def _extract_tensors(value: Any, file_size: int) -> dict[str, Any]:
    """The named dense tensors of an unpickled value: a state dict, or a training state that holds one."""
    import torch

    # the state dict, perhaps inside a training state
    state_dict = value
    if isinstance(value, Mapping):
        nested = (value[name] for name in STATE_DICT_KEYS if isinstance(value.get(name), Mapping))
        state_dict = next(nested, value)
    if not isinstance(state_dict, Mapping) or not all(isinstance(name, str) for name in state_dict):
        raise BadFile(_("it must hold a table of named tensors, it holds something else"))

    tensors = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            continue  # not a weight: a step count or a version
        dense = (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and not tensor.is_quantized
        )
        if not dense or tensor.device.type != "cpu":
            raise BadFile(
                _(
                    "{name} must be a plain dense tensor; sparse, quantized and special ones are not read",
                    name=quote(name),
                )
            )
        tensors[name] = tensor.detach()

    # an expanded tensor may claim much more memory than the file has bytes
    total = sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors.values())
    if not tensors or total > 4 * file_size + (1 << 20):
        raise BadFile(
            _(
                "it must hold tensors of about its size, they claim {total:,} bytes of {size:,}",
                total=total,
                size=file_size,
            )
        )
    return tensors


def _convert_pickle(source: str, target: str) -> str:
    """Unpickle a file and write its tensors as safetensors."""
    import torch

    from headwater.weights.safetensors import write_safetensors

    size = os.path.getsize(source)
    if os.name == "posix":
        _limit_resources(size)
    torch.serialization.add_safe_globals([argparse.Namespace])  # plain data that is saved with the weights
    torch.serialization.add_safe_globals([(IgnoredObject, name) for name in IGNORED_GLOBALS])
    with open(source, "rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    value = torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip)
    training_args = json.dumps(_extract_training_args(value))
    metadata = {"training_args": training_args} if len(training_args) < 1 << 20 else {}
    write_safetensors(target, _extract_tensors(value, size), metadata)
    return "converted"


def _explain_error(error: BaseException) -> str:
    """Why a file cannot be read. torch's own message says how to load it anyway, which would run its code."""
    text = str(error)
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"GLOBAL ([\w.]{1,100})", text)
        if named:
            return f"it needs {named[1]}, which is neither a tensor nor plain data; loading it would run its code"
        return "it is not a pickle of plain tensors: loading it would run its code, or it is not a pickle at all"
    if isinstance(error, EOFError) or "PytorchStreamReader" in text or "magic number" in text:
        return "it is not a complete weight file: it is cut short, damaged or of another format; fetch it again"
    printable = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return f"it cannot be read ({type(error).__name__}: {printable[:120]})"


def child_main(source: str, target: str) -> None:
    """The entry point of the subprocess: its last line of output is `converted`, or what is wrong."""
    try:
        result = _convert_pickle(source, target)
    except BadFile as fault:
        result = str(fault)
    except BaseException as error:
        result = _explain_error(error)
    sys.stdout.write(f"\n{result}\n")
