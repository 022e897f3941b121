"""The only file that probes the local machine: installed versions, GPUs, memory. Imports no framework."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpbridge.common.facts import Versions
from mpbridge.common.machines import Machine, like, machine
from mpbridge.common.upstream import has_libraries
from mpbridge.common.versions import release, version

WATCHED = (
    "NVTE_", "NVIDIA_TF32_OVERRIDE", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
)  # fmt: skip
"""Environment variables (or prefixes) that contradict or complete a recipe."""
_TIMEOUT = 5.0  # seconds for nvidia-smi: a hung driver must not hang `mpbridge doctor`

_played: list[tuple[Machine, Versions]] = []


@contextmanager
def playing(machine: Machine, versions: Versions) -> Iterator[None]:
    """Within this context the probe returns that machine and those versions: Transformer Engine on a CPU simulates a GPU."""
    _played.append((machine, versions))
    try:
        yield
    finally:
        _played.pop()


def is_played() -> bool:
    """Whether the probe's answers are those of a simulated machine."""
    return bool(_played)


def installed() -> Versions:
    """Versions of the installed packages; None for those that are not installed. Reads metadata and torch's version file without importing anything."""
    return _played[-1][1] if _played else _installed()


def this_machine() -> Machine:
    """The device that training would use: the first visible GPU, or the CPU with its memory if there is none or torch is a build without CUDA."""
    return _played[-1][0] if _played else _this_machine()


@functools.cache
def _installed() -> Versions:
    cuda = _torch_cuda()
    cublas = cuda and (version(f"nvidia-cublas-cu{release(cuda)[0]}") or version("nvidia-cublas"))
    return Versions(
        torch=version("torch"), megatron_core=_megatron_core(), transformer_engine=_transformer_engine(),
        torchao=version("torchao"), cuda=cuda, cublaslt=cublas, python=sys.version.split()[0],
    )  # fmt: skip


@functools.cache
def _this_machine() -> Machine:
    import platform  # slow to import

    versions, found = _installed(), gpus()
    if found and (versions.torch is None or versions.cuda is not None):
        return found[0]
    return dataclasses.replace(machine("cpu"), name=f"CPU ({platform.machine()})", memory_bytes=_host_memory())


@functools.cache
def gpus() -> tuple[Machine, ...]:
    """Every visible GPU as reported by nvidia-smi, with the table's peak rates if the product is known; empty without a driver."""
    text = _nvidia_smi("--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")
    seen = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and re.fullmatch(r"\d+\.\d+", parts[2]):
            seen.append(_gpu(parts[0], parts[1], parts[2]))
    return tuple(_visible(seen))


def environment() -> dict[str, str]:
    """Those of the `WATCHED` variables that are set."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(WATCHED)}


def free_port() -> int:
    """A port for the ranks of a world to meet at. Not one that the kernel gives out: until rank 0 listens, any connection of the machine can take such a one."""
    import random  # here: the two cost `mpbridge list` some milliseconds
    import socket

    low, high = 32768, 60999  # Linux's default
    with suppress(OSError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split())
    others: list[int] = [*range(10_000, low), *range(high + 1, 1 << 16)] or [*range(10_000, 1 << 16)]
    for port in random.SystemRandom().sample(others, min(100, len(others))):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError("none of 100 ports that were tried is free: set MASTER_PORT")


def _gpu(product: str, mebibytes: str, capability: str) -> Machine:
    major, minor = map(int, capability.split("."))
    base = like(product) or Machine(name=product, arch=None)
    # the driver's figures for this card override the table
    memory = int(float(mebibytes)) * 2**20 if re.fullmatch(r"\d+(\.\d+)?", mebibytes) else base.memory_bytes
    source = "as reported by the driver"
    return dataclasses.replace(base, arch=(major, minor), memory_bytes=memory, memory_source=source, note=product)


def _visible(seen: list[Machine]) -> list[Machine]:
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return seen
    chosen: list[Machine] = []
    for item in wanted.split(","):
        # CUDA stops at the first entry that is not an index; a UUID counts as one GPU
        if item.strip().isdigit() and int(item) < len(seen):
            chosen.append(seen[int(item)])
        elif item.strip().lower().startswith(("gpu-", "mig-")) and seen:
            chosen.append(seen[0])
        else:
            break
    return chosen


def _nvidia_smi(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    import subprocess  # slow to import

    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _megatron_core() -> str | None:
    """The version of megatron-core that an import would find: a source tree on the path has no metadata, and shadows the installed package."""
    text = _source("megatron", "core/package_info.py")
    if text is None:
        return None
    numbers = [re.search(rf"^{part}\s*=\s*(\d+)", text, re.MULTILINE) for part in ("MAJOR", "MINOR", "PATCH")]
    if not all(numbers):
        return version("megatron-core")
    ahead = re.search(r"^PRE_RELEASE\s*=\s*['\"](\w*)['\"]", text, re.MULTILINE)
    return ".".join(found[1] for found in numbers if found) + (ahead[1] if ahead else "")


def _source(package: str, name: str) -> str | None:
    """The text of a file of a package that an import would find, '' if there is none; None: what stands in the package's place is no package."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        with suppress(OSError):
            return (Path(folder) / name).read_text(encoding="utf-8")
    return ""


def _transformer_engine() -> str | None:
    found = version("transformer-engine")
    if found is None:
        return None
    # as wheels it is a meta package, a library (_cu12, _cu13) and a torch extension; only a source build has everything in one package
    library = any(version(f"transformer-engine-{cuda}") for cuda in ("cu12", "cu13"))
    if library:
        return found if version("transformer-engine-torch") is not None else None
    import importlib.metadata

    folder = importlib.metadata.distribution("transformer-engine").locate_file("")
    return found if has_libraries(Path(str(folder))) else None


def _torch_cuda() -> str | None:
    """The CUDA version that torch was built with; None for a CPU build."""
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", _source("torch", "version.py") or "", re.MULTILINE)
    return found[1] if found else None


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
