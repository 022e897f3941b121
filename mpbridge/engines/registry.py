"""Engines by name, imported on demand."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from mpbridge.engines.contract import Engine
from mpbridge.errors import UnknownName

if TYPE_CHECKING:
    from mpbridge.config.container import Run

ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "mcore": "mpbridge.engines.mcore:McoreEngine",
        "fsdp2": "mpbridge.engines.fsdp2:Fsdp2Engine",
        "megatron_fsdp": "mpbridge.engines.megatron_fsdp:MegatronFsdpEngine",
    }
)
"""Name -> 'module:class'."""


def engine_class(name: str) -> type[Engine]:
    """The class of the engine called `name`; raises UnknownName."""
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
    module, _, attribute = ENGINES[name].partition(":")
    return cast("type[Engine]", getattr(importlib.import_module(module), attribute))


def build_engine(run: Run) -> Engine:
    """The engine that `run` names, built; raises UnknownName, and Refused where engine or machine cannot run it.

    Wanted: an active device layer (`mpbridge.devices.device_layer`) and an initialised process group (`parallel.start_process_group`).
    """
    from mpbridge.engines.emulated import build_emulated

    return build_emulated(engine_class(run.facts.engine), run)
