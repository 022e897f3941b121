"""Finds an engine's class by name; imported on demand."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, cast

from mpbridge.backend.engines.contract import Engine
from mpbridge.backend.megatron.cpu import is_core
from mpbridge.common.errors import MpbridgeError, UpstreamRefused
from mpbridge.common.traits import attribute, traits

if TYPE_CHECKING:
    from mpbridge.settings.container import Run


def engine_class(name: str) -> type[Engine]:
    """The class of the engine called `name`; raises UnknownName."""
    return cast("type[Engine]", attribute(traits(name).engine))


def build_engine(run: Run) -> Engine:
    """Builds the engine that `run` names. Raises UnknownName, Refused if engine or machine cannot run it, and UpstreamRefused with megatron-core's own
    message (sometimes a bare assertion) if megatron-core refuses it.

    Requires an active device layer (`mpbridge.backend.devices.device_layer`) and an initialised process group (`parallel.start_process_group`).
    """
    from mpbridge.backend.engines.emulated import build_emulated

    try:
        return build_emulated(engine_class(run.facts.engine), run)
    except Exception as fault:
        if (place := _in_megatron(fault)) is None or isinstance(fault, MpbridgeError):
            raise
        raise UpstreamRefused(
            f"megatron-core cannot build this run: {str(fault) or 'a bare assertion'} ({type(fault).__name__} in {place})"
        ) from fault


def _in_megatron(fault: Exception) -> str | None:
    """'megatron.core.optimizer, get_megatron_optimizer': the function that raised, if it is megatron-core's; otherwise None."""
    *_, (frame, _) = traceback.walk_tb(fault.__traceback__)
    module = str(frame.f_globals.get("__name__", ""))
    return f"{module}, {frame.f_code.co_name}" if is_core(module) else None
