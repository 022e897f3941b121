"""How a run is realized without its recipe's hardware: by the fast emulation, or by Transformer Engine's own Python code on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.facts import Versions
from mpbridge.common.machines import Machine, machine
from mpbridge.common.probe import installed
from mpbridge.common.transformer_engine import Package, choose, played_versions, tried

WAYS = (False, True, "fast", "te")
DEFAULT_TARGET = "h100"


def is_fast(emulate: Any) -> bool:
    """Whether mpbridge.numerics does the rounding."""
    return emulate in (True, "fast")


def is_played(emulate: Any) -> bool:
    """Whether Transformer Engine simulates a machine on the CPU."""
    return bool(emulate == "te")


def emulation_faults(emulate: Any, target: Any, te: Any) -> Iterator[str]:
    """Faults of the three top-level settings."""
    if not any(emulate is way or (isinstance(way, str) and emulate == way) for way in WAYS):
        yield f"emulate={emulate!r}: expected true, false, fast or te"
    if target is not None and not is_played(emulate):
        yield f"target={target} without emulate=te: a target machine applies only when Transformer Engine runs on the CPU"
    if te is not None and not emulate:
        yield f"te={te} without emulate: a release can be chosen for emulated runs only; a GPU run uses the installed one"
    if te is not None and not isinstance(te, str):
        yield f"te={te}: expected a string, because 2.20 and 2.2 are the same number: write it in quotes, as in te=\"'2.20'\""
        return
    try:
        if te is not None:
            tried(te)
        if target is not None and machine(str(target)).arch is None:
            yield f"target={target}: expected a GPU, as in h100 or b200"
    except MpbridgeError as error:
        yield str(error)


@functools.cache
def package(te: str | None) -> Package:
    """The Transformer Engine package of a simulated run. Raises Refused, UnknownName."""
    return choose(te)


def played(target: str | None, te: str | None) -> tuple[Machine, Versions]:
    """The machine and the versions for which such a run is resolved."""
    return machine(target or DEFAULT_TARGET), played_versions(installed(), package(te))
