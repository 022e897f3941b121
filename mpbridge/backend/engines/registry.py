"""Finds an engine's class by name, imported on demand; and wraps any engine whose linears are ours (emulated, or torchao's)."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from mpbridge.backend.engines.contract import Batch, Engine, StepResult
from mpbridge.backend.megatron.emulated_linears import emulation_for
from mpbridge.backend.megatron.process import is_core
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
    try:
        kind = engine_class(run.facts.engine)
        emulation = _linears_for(run)
        return kind.build(run) if emulation is None else _built_around(kind, run, emulation)
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


# --- linears of ours: they are told of each step, and their state is in the engine's checkpoints ---------------------------------------------
LIBRARY = "torchao"
"""The library whose scalings are computed by its own code, native or emulated."""
PART = "emulation"
"""Key in the engine state of scales, amax histories and the step counter of the random bits."""


def _linears_for(run: Run) -> Any:
    """What makes emulated linears if the run asks for emulation and its recipe quantizes anything, or torchao's if a scaling needs them; otherwise None."""
    if any(quant.row.hardware.library == LIBRARY for quant in run.policy.quants):
        from mpbridge.backend.models.torchao_linears import TorchaoLinears

        return TorchaoLinears(run.policy, emulate=run.emulate)
    return emulation_for(run)


def _built_around(kind: Any, run: Run, emulation: Any) -> Any:
    """An engine of class `kind` with the linears of `emulation`, which is attached."""
    from mpbridge.backend.models.local_spec import CpuSpecProvider

    # megatron-core's local modules on CUDA too: Transformer Engine's modules cannot take other GEMMs
    engine = kind.build(run, backend=partial(CpuSpecProvider, linears=emulation.parallel_linears))
    try:
        emulation.attach(engine.model)
    except BaseException:
        engine.close()
        raise
    return EmulatedEngine(engine, emulation)


class EmulatedEngine:
    """An engine whose linears are emulated; everything not defined here is the wrapped engine's."""

    def __init__(self, engine: Any, emulation: Any) -> None:
        self.engine, self.emulation = engine, emulation

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train_step(self, batches: Iterator[Batch], *, microbatches: int) -> StepResult:
        """The engine's step; weights are quantized anew."""
        self.emulation.step_begin()
        return cast("StepResult", self.engine.train_step(batches, microbatches=microbatches))

    def evaluate(self, batches: Iterator[Batch], *, microbatches: int) -> float:
        """The engine's evaluation, quantized as training is; the scales and histories of training stay as they are."""
        with self.emulation.evaluating():
            return float(self.engine.evaluate(batches, microbatches=microbatches))

    def state(self, *, loading: bool = False) -> dict[str, Any]:
        """The engine's state, plus 'emulation'."""
        return {**self.engine.state(loading=loading), PART: self.emulation.sharded_state(f"{PART}.")}

    def load_state(self, state: Mapping[str, Any], *, optimizer: bool = True) -> None:
        """Loads both; with a checkpoint that has no emulation state, or with weights only, the emulation state stays fresh."""
        self.engine.load_state({name: part for name, part in state.items() if name != PART}, optimizer=optimizer)
        if optimizer and state.get(PART):
            self.emulation.load_state(state[PART], f"{PART}.")

    def close(self) -> None:
        """Detaches the emulation and closes the engine."""
        self.emulation.detach()
        self.engine.close()
