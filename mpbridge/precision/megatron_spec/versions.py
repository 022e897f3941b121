"""The versions of megatron-core that this package describes, and the windows in which a row or a rule holds."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from mpbridge.common.facts import MUONS
from mpbridge.common.probe import installed
from mpbridge.common.versions import Window, at_least, release

FOLDER = Path(__file__).with_name("schema")
"""One file per version: <version>.json, written by scripts/generate/make_schema.py."""

SINCE_020 = Window(package="megatron_core", since="0.20")
BEFORE_017 = Window(package="megatron_core", until="0.17")
SINCE_017 = Window(package="megatron_core", since="0.17")
BEFORE_018 = Window(package="megatron_core", until="0.18")
"""0.16.1 is the last release reviewed before this boundary, Megatron-LM d98e8a64 (0.20.0) the version reviewed after it; those in between were read for single rows only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What is known of a release of megatron-core besides its schema, which has its version as its name."""

    version: str
    reviewed: Window
    """The releases that the table, the rules and `backend/megatron` were read against with this one; a rule warns of any other."""
    megatron_lm: tuple[str, str] | None = None
    """(version as `mpbridge export megatron-lm` takes it, words) of the Megatron-LM with this megatron-core, if its arguments are described."""
    common_object: str | None = None
    """The object of a checkpoint's table in which its save puts what no rank shards (dist_checkpointing/serialization.py); None: the file common.pt."""
    pickled: frozenset[tuple[str, str]] = frozenset()
    """(module, name) of its own classes that its writers put into a checkpoint's `.metadata`."""


_PLANS = "megatron.core.dist_checkpointing.strategies.torch"
RELEASES: tuple[Release, ...] = (
    Release(
        version="0.16.1",
        reviewed=Window(package="megatron_core", since="0.16", until="0.17"),
        megatron_lm=("0.16", "release core_v0.16"),
        pickled=frozenset({(_PLANS, "MCoreSavePlan"), (_PLANS, "MCoreMetadata")}),
    ),
    Release(
        version="0.20.0",
        reviewed=Window(package="megatron_core", since="0.20", until="0.21"),
        megatron_lm=("0.20", "main, d98e8a64"),
        common_object="common_state/shard_0_1",
    ),
)
"""One record per described release, oldest first."""
COMMON_OBJECTS = tuple(dict.fromkeys(one.common_object for one in RELEASES if one.common_object))
"""Every place of a checkpoint's common state that is not common.pt."""
PICKLED = frozenset[tuple[str, str]]().union(*(one.pickled for one in RELEASES))
"""megatron-core's own classes in a checkpoint's `.metadata`."""

_IMPORTED = ((SINCE_017, "triton"),)
"""Packages that `import megatron.core` needs but does not declare for a CPU."""


def missing(version: str | None) -> tuple[str, ...]:
    """The packages that that version needs to be imported at all and that are not installed."""
    wanted = [package for window, package in _IMPORTED if version is not None and window.holds(version)]
    return tuple(package for package in wanted if importlib.util.find_spec(package) is None)


def emerging(name: str, version: str | None) -> str:
    """The optimizer `name` of megatron-core needs Emerging-Optimizers, in words, and how that is installed."""
    what = _OLD if BEFORE_018.holds(version) else "'emerging-optimizers>=0.2' (Python 3.12 or later)"
    torchs = "; torch's Muon needs nothing: engine=fsdp2 with fp32_params_bf16_compute" if name in MUONS else ""
    return f"optimizer.optimizer={name}: megatron-core's needs Emerging-Optimizers: pip install {what}{torchs}"


_OLD = "triton absl-py 'git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers@v0.1.0' (not on the package index; its folder on PYTHONPATH will do)"


@functools.cache
def described() -> tuple[str, ...]:
    """The versions with a schema, oldest first."""
    return tuple(sorted((path.stem for path in FOLDER.glob("*.json")), key=release))


def nearest(have: str | None) -> str:
    """The described version that represents `have`: the newest that is not newer, otherwise the oldest; also the oldest if none is installed."""
    return next((version for version in reversed(described()) if at_least(have, version)), described()[0])


def current() -> str | None:
    """The version of megatron-core that an import would find; None without one."""
    return installed().megatron_core
