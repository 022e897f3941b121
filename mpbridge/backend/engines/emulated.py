"""Wraps any engine whose linears are ours (emulated, or torchao's): informs them of each step and saves their state in its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, cast

from mpbridge.backend.engines.contract import Batch, Engine, StepResult
from mpbridge.backend.megatron.emulated_linears import emulation_for

if TYPE_CHECKING:
    from mpbridge.settings.container import Run

LIBRARY = "torchao"
"""The library whose scalings are computed by its own code, native or emulated."""
PART = "emulation"
"""Key in the engine state of scales, amax histories and the step counter of the random bits."""


def build_emulated(kind: type[Engine], run: Run) -> Engine:
    """An engine of `kind` for `run`, with emulated linears if the run asks for emulation and its recipe quantizes anything, or with torchao's linears if a
    scaling needs them."""
    emulation = _linears_for(run)
    if emulation is None:
        return kind.build(run)
    return cast("Engine", EmulatedEngine.build_around(kind, run, emulation))


def _linears_for(run: Run) -> Any:
    if any(quant.row.hardware.library == LIBRARY for quant in run.policy.quants):
        from mpbridge.backend.models.torchao_linears import TorchaoLinears

        return TorchaoLinears(run.policy, emulate=run.emulate)
    return emulation_for(run)


class EmulatedEngine:
    """An engine whose linears are emulated; everything not defined here is the wrapped engine's."""

    def __init__(self, engine: Any, emulation: Any) -> None:
        self.engine, self.emulation = engine, emulation

    @classmethod
    def build_around(cls, kind: Any, run: Run, emulation: Any) -> Self:
        """Builds an engine of class `kind` with the linears of `emulation`, and attaches the emulation."""
        from mpbridge.backend.models.local_spec import CpuSpecProvider

        # megatron-core's local modules on CUDA too: Transformer Engine's modules cannot take other GEMMs
        engine = kind.build(run, backend=lambda config: emulation.backend(CpuSpecProvider(config)))
        try:
            emulation.attach(engine.model)
        except BaseException:
            engine.close()
            raise
        return cls(engine, emulation)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train_step(self, batches: Iterator[Batch], *, microbatches: int) -> StepResult:
        """The engine's step; weights are quantized anew."""
        self.emulation.step_begin()
        return cast("StepResult", self.engine.train_step(batches, microbatches=microbatches))

    def evaluate(self, batches: Iterator[Batch], *, microbatches: int) -> float:
        """The engine's evaluation, quantized as training is."""
        self.emulation.eval_begin()
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
