"""The Transformer Engine releases known here, and where one is installed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.facts import Versions
from mpbridge.common.shipped import install
from mpbridge.common.upstream import has_libraries
from mpbridge.common.versions import release as numbers

VARIABLE = "MPBRIDGE_TE_PATH"
"""Environment variable with folders made by `pip install --target`, one per release (separated as in PATH)."""
CUDA_VERSION = "13.0"
"""The CUDA version that a simulated machine reports: new enough for every recipe."""
INSTALL = install("te-cpu")

RELEASES: Mapping[tuple[int, int], str] = MappingProxyType(
    {
        # what each release changed for the kernel module; enumerations and argument lists are in `enums` and `moe`
        (2, 11): "the release that megatron-core 0.16.1 accepts; blockwise scales compact or ready for a GEMM",
        (2, 12): "no Float8BlockScaleTensorFormat; swizzled scales (optimize_for_gemm)",
        (2, 13): "gated sigmoid; router gradients are written in place; MXFP8's exponent bytes 0 and 254",
        (2, 14): "NVFP4 block scale amax * (S/6); stored NVFP4 weights; grouped tensors",
        (2, 15): "BHSD attention formats",
        (2, 16): "empty quantized tensors are created by the extension; no fused attention for 512 tokens",
        (2, 17): "routing maps in bits; NVFP4 4over6",
        (2, 18): "dense indices in the router; extra states are not unpickled",
        (2, 19): "scaled activations",
        (2, 20): "cross entropy keeps its input and two statistics per token",
    }
)
"""Release (major, minor) -> what it changed. Releases without a row are refused."""
OLDEST = (2, 9)
"""The first release whose rules of rounding are known; those before the table's are emulated without its Python."""
GEMM_ENTRIES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "generic_gemm": (2, 11),
        "te_general_grouped_gemm": (2, 11),
        "te_general_grouped_gemm_for_grouped_tensor": (2, 14),
        "te_general_grouped_gemm_for_discrete_in": (2, 14),
        "te_general_grouped_gemm_for_discrete_out": (2, 14),
    }
)
"""Functions of `transformer_engine_torch` that multiply -> the first release known here that calls them. Each takes (A, transA, B, transB, output, ...); an
operand is a tensor, a list of them, or a grouped tensor. The kernels, the statistics and whoever counts products read this list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An installed Transformer Engine."""

    version: str
    folder: Path
    """The folder with `transformer_engine` and its metadata."""
    complete: bool
    """Whether the CUDA parts are installed too."""

    @property
    def release(self) -> tuple[int, ...]:
        """(2, 11, 0)."""
        return numbers(self.version)


def folders() -> list[Path]:
    """The folders named by MPBRIDGE_TE_PATH."""
    return [Path(part) for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]


def packages(where: Iterable[os.PathLike[str] | str] = ()) -> list[Package]:
    """Every Transformer Engine in `where`, in MPBRIDGE_TE_PATH and on the import path, in that order."""
    import importlib.metadata  # slow, and few verbs ask

    found: list[Package] = []
    for place in [*map(Path, where), *folders(), None]:
        path: dict[str, Any] = {"path": [str(place)]} if place is not None else {}
        for found_here in importlib.metadata.distributions(name="transformer-engine", **path):
            folder = Path(str(found_here.locate_file("")))
            if (folder / "transformer_engine").is_dir() and all(known.folder != folder for known in found):
                found.append(Package(version=found_here.version, folder=folder, complete=has_libraries(folder)))
    return found


def choose(wanted: str | None, where: Iterable[os.PathLike[str] | str] = ()) -> Package:
    """The package of version `wanted` ('2.14', '2.20.2'; None: the first one).

    Raises Refused if there is none, or its release is not in the table."""
    there = packages(where)
    if not there:
        raise Refused(
            f"Transformer Engine's Python package is not installed: {INSTALL} (or pip install --target FOLDER --no-deps transformer-engine==2.11.0, and {VARIABLE}=FOLDER)"
        )
    if wanted is None:
        chosen = there[0]
    else:
        asked = numbers(wanted)
        fitting = [package for package in there if package.release[: len(asked)] == asked]
        if not fitting:
            _refuse_unknown(wanted, asked)
            raise Refused(
                f"Transformer Engine {wanted} is not installed (found {', '.join(package.version for package in there)}): "
                f"pip install --target FOLDER --no-deps 'transformer-engine=={wanted}{'' if len(asked) > 2 else '.*'}', and add FOLDER to {VARIABLE}"
            )
        chosen = fitting[0]
    _refuse_unknown(chosen.version, chosen.release)
    return chosen


def _refuse_unknown(version: str, release: tuple[int, ...]) -> None:
    if release[:2] not in RELEASES:
        low, high = min(RELEASES), max(RELEASES)
        raise Refused(
            f"Transformer Engine {version} is not in the table of releases (expected {low[0]}.{low[1]} to {high[0]}.{high[1]}): "
            f"install one of those alongside it, in a folder named by {VARIABLE}"
        )


def tried(text: str) -> tuple[int, ...]:
    """The numbers of a release whose rules are asked for. Raises BadValue for one that mpbridge has not been tried with: its rules are not known."""
    asked, newest = numbers(text), max(RELEASES)
    if not OLDEST <= asked[:2] <= newest:
        raise BadValue(
            f"te={text}: that release of Transformer Engine has not been tried (expected {OLDEST[0]}.{OLDEST[1]} to {newest[0]}.{newest[1]}): "
            "its rules of rounding are not known; name the nearest one"
        )
    return asked


def played_versions(here: Versions, package: Package) -> Versions:
    """The versions on a machine that `package` simulates: its own version, and a CUDA version that every recipe runs with."""
    return dataclasses.replace(here, transformer_engine=package.version, cuda=CUDA_VERSION, cublaslt="13.1.0")
