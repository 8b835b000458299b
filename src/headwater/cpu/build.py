"""Compile the C kernels on first use, cache and load the shared libraries, and bind their functions with ctypes.

There are two libraries: the training kernels, and the decoding step. Without a compiler there is none, and torch
computes the same. HEADWATER_FAST=0 turns them off; HEADWATER_CFLAGS adds compiler flags (sanitizers).

A compiled library is cached under the hash of its sources, its flags and the processor. Its own hash stands at its end,
so that a damaged file is noticed and compiled again. Before any function is called, the structs and constants of the
library are compared with those that Python uses (layout.py).
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.cpu import layout

CSRC = Path(__file__).parent / "csrc"
TRAINING_SOURCES = (
    "adamw8bit.c",
    "attention.c",
    "dropout.c",
    "favor.c",
    "linear.c",
    "linear_attention.c",
    "linear_grad_weight.c",
    "loss.c",
    "lsh_attention.c",
    "norm.c",
    "training_layout.c",
)
DECODE_SOURCES = ("decode_step.c", "topk.c", "int8.c")
DECODE_FUNCTIONS = (
    "decode_step",
    "dequantize",
    "dequantize_rows",
    "int8_linear",
    "quantize_rows",
    "quantized_linear",
    "topk_logprobs",
)

FLAGS = ("-O3", "-march=native", "-fno-trapping-math", "-fno-math-errno", "-shared", "-fPIC")
# Sums may be taken in any order; -ffast-math would also turn subnormal numbers off in the whole process.
REASSOCIATION_FLAGS = ("-fassociative-math", "-freciprocal-math", "-fno-signed-zeros")
COMPILE_TIMEOUT = 120  # seconds
DIGEST_SIZE = hashlib.sha256().digest_size

_failures: list[str] = []  # why a library could not be compiled or loaded, one per line


# ------------------------------------------------------------------------------------------------------- two libraries


@lru_cache(maxsize=1)
def training_library() -> ctypes.CDLL | None:
    """The training kernels, or None where this machine cannot have them."""
    library = load_library(CSRC, sources=TRAINING_SOURCES)
    if library is not None:
        layout.check_layout(layout.read_layout(library), layout.TRAINING_STRUCTS, layout.TRAINING_CONSTANTS)
    return library


@lru_cache(maxsize=1)
def decode_library() -> ctypes.CDLL | None:
    """The decoding step, or None where this machine cannot have it (unavailable_reason() says why)."""
    library = load_library(CSRC, *REASSOCIATION_FLAGS, sources=DECODE_SOURCES)
    if library is not None:
        layout.check_layout(layout.read_layout(library), layout.DECODE_STRUCTS, layout.DECODE_CONSTANTS)
        for name in DECODE_FUNCTIONS:
            getattr(library, name).restype = None
    return library


@lru_cache(maxsize=1)
def training_constants() -> Mapping[str, int]:
    """Block sizes of the training kernels, as compiled: K_BLOCK, M_BLOCK, ROW_BLOCK …"""
    library = training_library()
    assert library is not None
    return layout.read_layout(library).constants


@lru_cache(maxsize=1)
def decode_constants() -> Mapping[str, int]:
    """Block sizes of the decoding step, as compiled: PANEL_ROWS, TILE_ROWS, MAX_GEMV_ROWS …"""
    library = decode_library()
    assert library is not None
    return layout.read_layout(library).constants


def supported(*tensors: Tensor) -> bool:
    """Whether the training kernels take these tensors: float32 on the CPU, and torch neither compiles nor traces."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return False
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            return False
    return training_library() is not None


def bind(name: str, restype: Any, *argtypes: Any) -> Any:
    """A function of the training library with the types of its result and arguments."""
    function = getattr(training_library(), name)
    function.restype = restype
    function.argtypes = argtypes
    return function


# ---------------------------------------------------------------------------------------------------- compile and load


@lru_cache
def load_library(folder: Path, *extra_flags: str, sources: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The compiled library of a folder's sources (all *.c by default), or None; unavailable_reason() says why.

    The caller has imported torch: both then share one OpenMP runtime, and one set of threads.
    """
    if _disabled_reason():
        return None
    flags = (*FLAGS, *extra_flags, *shlex.split(os.environ.get("HEADWATER_CFLAGS", "")))
    try:
        return _dlopen(_compile(folder, sources, flags))
    except (OSError, subprocess.SubprocessError) as error:
        label = sources[0] if len(sources) == 1 else folder.name
        _failures.append(f"{label} could not be compiled: {' '.join(str(error).split())[:300]}")
        return None


def unavailable_reason() -> str:
    """Why there are no C kernels here, in plain words; empty where they are or could be compiled."""
    return _disabled_reason() or "; ".join(_failures)


def _disabled_reason() -> str:
    if os.environ.get("HEADWATER_FAST") == "0":
        return "HEADWATER_FAST=0 turns it off"
    if find_compiler() is None:
        return "it needs a C compiler, and there is no cc, gcc or clang; install one (apt-get install gcc)"
    return ""


@lru_cache(maxsize=1)
def find_compiler() -> str | None:
    """The path of the C compiler: CC of the environment, else cc, gcc or clang."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    return None


def _dlopen(path: Path) -> ctypes.CDLL:
    """Load a library. OpenMP threads spin briefly before they sleep: long spins starve a busy machine."""
    before = os.environ.get("GOMP_SPINCOUNT")
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # OpenMP reads it once, when it is loaded
    library = ctypes.CDLL(str(path))
    if before is None:
        del os.environ["GOMP_SPINCOUNT"]
    return library


def _compile(folder: Path, sources: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    """The path of the compiled library in the cache; compiled now if it is not there or damaged."""
    files = [folder / name for name in sources] or sorted(folder.glob("*.c"))

    # the cache key: sources, headers, flags and processor
    contents = [path.read_bytes() for path in (*files, *sorted(folder.glob("*.h")))]
    key = [*contents, *(flag.encode() for flag in flags), _cpu_flags()]
    name = hashlib.sha256(b"\0".join(key)).hexdigest()[:24] + ".so"
    target = _cache_dir() / name
    if _is_intact(target):
        return target

    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        output = Path(temporary) / name
        command = [str(find_compiler()), *flags, *map(str, files), "-o", str(output), "-lm"]
        message = ""
        for openmp in (["-fopenmp"], []):  # some compilers have no OpenMP: one thread is still right
            run = subprocess.run(command + openmp, capture_output=True, timeout=COMPILE_TIMEOUT, check=False)
            if run.returncode == 0:
                _append_digest(output)
                output.replace(target)  # atomic, whoever else compiles at the same time
                return target
            lines = run.stderr.decode(errors="replace").splitlines()
            message = message or next((line for line in lines if "error" in line), f"it ended with {run.returncode}")
    raise OSError(f"{find_compiler()} says {message}")


def _is_intact(path: Path) -> bool:
    """Whether the file ends with its own hash: a library that is cut short ends the process with a bus error."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST_SIZE]).digest() == content[-DIGEST_SIZE:]


def _append_digest(path: Path) -> None:
    """Append the hash of the file, and flush all of it to the disk before it is renamed."""
    with path.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


@lru_cache(maxsize=1)
def _cache_dir() -> Path:
    """The user's cache folder, if no one else may write to it (a library is code); else one for this process alone."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "headwater"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o022:
            return folder
    except OSError:
        pass
    temporary = tempfile.mkdtemp(prefix="headwater-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


def _cpu_flags() -> bytes:
    """The processor's feature flags: -march=native compiles for them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("flags")).encode()
    except (OSError, StopIteration):
        return platform.processor().encode()


# --------------------------------------------------------------------------------------------------
# Checked tensor pointers for ctypes: dtype, shape, strides and device are verified before an address is passed to C.
#
# C reads and writes as many bytes as its arguments say, whatever is there. So the caller states the shape that C will
# read or write, and a tensor that does not have it is refused.


class TensorMismatch(ValueError):
    """A tensor that is not what C would read: an error of the caller, raised before memory is touched."""


def checked_ptr(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Address of a contiguous tensor of this dtype and shape in CPU memory."""
    _check_tensor(tensor, dtype, shape)
    if not tensor.is_contiguous():
        raise TensorMismatch(f"C needs a contiguous tensor {list(shape)}, its strides are {list(tensor.stride())}")
    return tensor.data_ptr()


def strided_ptr(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Address of a tensor whose strides are passed to C."""
    _check_tensor(tensor, dtype, shape)
    return tensor.data_ptr()


def optional_ptr(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """Address of a contiguous tensor, or None for a tensor that is left out."""
    return None if tensor is None else checked_ptr(tensor, dtype, *shape)


def float_ptr(tensor: Tensor | None, *shape: int) -> int | None:
    """Address of a contiguous float32 tensor, or None."""
    return optional_ptr(tensor, torch.float32, *shape)


def _check_tensor(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device.type != "cpu" or tensor.is_neg():
        got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device.type}"
        raise TensorMismatch(f"C needs {dtype} {list(shape)} on the CPU, got {got}")
