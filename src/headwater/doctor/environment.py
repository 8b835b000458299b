"""The environment: package versions, hardware, threads, back ends, measured speed. Works without torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.i18n import _

if TYPE_CHECKING:
    import torch

GB = 1e9
CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
IMPORTED = _("imported")  # what the facts say of torch, unless importing it fails
PACKAGES = ("torch", "numpy", "tokenizers", "pydantic", "rich", "matplotlib", "xformers")


def collect_facts() -> dict[str, Any]:
    """All facts but the measured speed; a value is a number, a text, a bool, or None if it is unknown."""
    return {
        "versions": package_versions(),
        "machine": hardware(),
        "threads": thread_settings(),
        "backends": backends(),
        "terminal": terminal_settings(),
    }


def package_versions() -> dict[str, str | None]:
    versions = {name: installed_version(name) for name in ("headwater", *PACKAGES)}
    return {"python": platform.python_version(), **versions}


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_import_error() -> str | None:
    """Why torch cannot be imported; None if it can."""
    try:
        import torch  # noqa: F401
    except Exception as error:  # a broken shared library may raise any exception
        return f"{type(error).__name__}: {error}"
    return None


# ---------------------------------------------------------------------------------------------------------- hardware


def hardware() -> dict[str, Any]:
    """Processor, cores, memory, disk and load."""
    total, free = memory_gb()
    shared_memory = Path("/dev/shm")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": cpuinfo_field("model name") or platform.processor() or None,
        "cores": os.cpu_count(),
        "usable cores": usable_cores(),
        "features": cpu_features(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "memory GB": total,
        "memory free GB": free,
        "disk free GB": round(shutil.disk_usage(Path.cwd()).free / GB, 1),
        "shared memory GB": round(shutil.disk_usage(shared_memory).total / GB, 2) if shared_memory.is_dir() else None,
    }


def cpuinfo_field(name: str) -> str | None:
    """The first field of that name in /proc/cpuinfo; None on other systems."""
    for line in (read_text("/proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def cpu_features() -> list[str]:
    flags = (cpuinfo_field("flags") or cpuinfo_field("Features") or "").split()
    return [name for name in CPU_FEATURES if name in flags]


def usable_cores() -> float:
    """CPU cores that this process may use: limited by its CPU affinity and by the container's quota."""
    allowed: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (read_text("/sys/fs/cgroup/cpu.max") or "max 1").partition(" ")
    return allowed if quota == "max" else min(allowed, round(int(quota) / int(period), 2))


def memory_gb() -> tuple[float | None, float | None]:
    """Total and available memory in GB, within the container's limit."""
    lines = (line.split() for line in (read_text("/proc/meminfo") or "").splitlines())
    sizes = {words[0]: int(words[1]) * 1024 for words in lines}
    if "MemTotal:" not in sizes:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
        return (round(pages / GB, 1) or None), None
    total = sizes["MemTotal:"]
    free = sizes.get("MemAvailable:", 0)
    limit = read_text("/sys/fs/cgroup/memory.max") or "max"
    if limit.isdigit() and int(limit) < total:
        used = int(read_text("/sys/fs/cgroup/memory.current") or 0)
        total = int(limit)
        free = min(free, int(limit) - used)
    return round(total / GB, 1), round(free / GB, 1)


def read_text(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace").strip()
    return None


def thread_settings() -> dict[str, Any]:
    """The numbers of threads in effect, and the environment variables that set them."""
    settings = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    if torch_import_error():
        return settings
    import torch

    return {"torch": torch.get_num_threads(), "torch inter-op threads": torch.get_num_interop_threads(), **settings}


def terminal_settings() -> dict[str, Any]:
    """Encodings, locale and width of the terminal."""
    names = ("HEADWATER_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
    return {
        "encoding": getattr(sys.stdout, "encoding", None),
        "file names": sys.getfilesystemencoding(),
        "locale": next((os.environ[name] for name in names if os.environ.get(name)), None),
        "terminal": sys.stdout.isatty(),
        "columns": shutil.get_terminal_size().columns,
    }


# ------------------------------------------------------------------------------------------------------- back ends


def backends() -> dict[str, Any]:
    """torch and its back ends, xFormers, and the requirements of torch.compile."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++", "cl")), None)
    headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    facts: dict[str, Any] = {"torch": torch_import_error() or IMPORTED}
    if facts["torch"] == IMPORTED:
        facts |= torch_backends()
    return facts | {
        "xFormers": importlib.util.find_spec("xformers") is not None,
        "C++ compiler": compiler,
        "Python headers": headers,
    }


def torch_backends() -> dict[str, Any]:
    """Devices and CPU back ends of torch."""
    import torch

    mps = getattr(torch.backends, "mps", None)
    return {
        "fused attention": sdpa_backends(),
        "vector width": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": torch.backends.mkldnn.is_available(),
        "CUDA": torch.cuda.get_device_name(0) if torch.cuda.is_available() else False,
        "Apple GPU": bool(mps and mps.is_available()),
    }


def sdpa_backends() -> list[str]:
    """The back ends of scaled_dot_product_attention that run here, each tried alone on a tiny input."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.zeros(1, 1, 8, 16, device=device, dtype=torch.bfloat16)
    running = []
    for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        with contextlib.suppress(RuntimeError, AttributeError), sdpa_kernel(getattr(SDPBackend, backend)):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
            running.append(backend.removesuffix("_ATTENTION").lower())
    return running


# ----------------------------------------------------------------------------------------------------------- speed


def measure_speed(seconds: float = 0.3) -> dict[str, Any]:
    """GFLOP/s of matrix products and GB/s of copying: the best of the repeats within `seconds` each."""
    if torch_import_error():
        return {}
    import torch

    block = torch.zeros(2**24)  # 64 MB: much larger than the caches
    copy = torch.empty_like(block)
    return {
        "matmul fp32 GFLOP/s": matmul_gflops(torch.float32, seconds),
        "matmul bf16 GFLOP/s": matmul_gflops(torch.bfloat16, seconds),
        "memory GB/s": round(2 * block.nbytes / best_time(lambda: copy.copy_(block), seconds) / 1e9, 1),
    }


def matmul_gflops(dtype: torch.dtype, seconds: float) -> float:
    """GFLOP/s of a matrix product: a large one, unless a small one already takes long."""
    import torch

    for n in (256, 1024):
        a = torch.randn(n, n).to(dtype)
        duration = best_time(lambda a=a: a @ a, seconds / 3 if n == 256 else seconds)  # type: ignore[misc]
        if duration > 0.02:
            break
    return float(f"{2 * n**3 / duration / GB:.3g}")


def best_time(function: Callable[[], Any], seconds: float) -> float:
    """The shortest time of one call, after a warm-up call."""
    function()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
