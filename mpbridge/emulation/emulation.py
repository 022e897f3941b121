"""Emulation: everything that one run's quantized linears share, and the engine's handle on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpbridge.emulation.gemm import Observer, Plug
from mpbridge.emulation.kernels import compiler
from mpbridge.emulation.quantizer import Quantizer, Randomness
from mpbridge.emulation.scales import DEFAULT_RELEASE, rules_for
from mpbridge.errors import BadValue, CheckpointError
from mpbridge.precision.words import region_text

if TYPE_CHECKING:
    from mpbridge.config.container import Run
    from mpbridge.precision.policy import Gemms, PrecisionPolicy, Quant

ALWAYS = (
    "accumulation order: products are exact and summed in fp32, tensor cores sum in their own order (fast accumulation: with fewer bits)",
    "casts fused with a norm or an activation see its fp32 result on the GPU and its rounded one here",
)
STEP = "step"


def emulation_for(run: Run) -> Emulation | None:
    """The emulation that a run asks for; None when it is not emulated or its recipe quantizes nothing."""
    if not run.emulate or not run.policy.quantized:
        return None
    return Emulation(run.policy, seed=int(run.train.get("seed", 1234)))


class _Placed(NamedTuple):
    """A linear, where it stands, and what it is to run in."""

    linear: Any
    name: str
    below: str
    layer: int | None
    layers: int
    gemms: Gemms


class Emulation:
    """Quantizers, contexts and hooks of one model.

    policy: what to emulate. seed: of stochastic rounding. release: the Transformer Engine release whose rules apply. compiled: False keeps
    the quantize kernels out of torch.compile. device: where the state lives. Raises BadValue for a release without rules, Refused for
    'custom'.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        *,
        seed: int = 1234,
        release: tuple[int, int] = DEFAULT_RELEASE,
        compiled: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        rules_for(release)
        self.policy, self.release, self.compiled, self.device = policy, release, compiled, torch.device(device)
        self.randomness = Randomness(seed, self.device)
        self.observer: Observer | None = None
        self.is_paused = False
        self.quantizers: dict[Quant, Quantizer] = {}
        self.plugs: dict[str, Plug] = {}
        self.high: list[str] = []
        """Linears that the policy keeps in high precision, by global name."""
        self.restore: list[torch.nn.Linear] = []
        self._placed: list[_Placed] = []
        self._hooks: list[Any] = []
        self._depth, self._unopened, self._group = 0, False, None

    # --- building ------------------------------------------------------------------------------------------------------------------------
    def backend(self, base: Any) -> Any:
        """A BackendSpecProvider whose linears are emulated; the rest comes from `base` (a provider instance)."""
        from mpbridge.emulation.mcore import EmulatedBackend

        return EmulatedBackend(base)

    def attach(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Gives the linears of built model chunks their quantizers, and hooks delayed scaling's contexts. Raises BadValue for a region that
        names no module of the whole model.
        """
        from mpbridge.emulation.mcore import amax_group, blocks, places

        chunks = list(chunks)
        for chunk in chunks:
            for linear, name, below, layer, layers in places(chunk):
                self.add(linear, name, below, self.policy.gemms_at(below, layer, layers, name), layer, layers)
        self.freeze()
        self._group = amax_group(chunks[0])
        for chunk in chunks:
            for block in blocks(chunk):
                self.context_of(block)

    def add(self, linear: Any, name: str, below: str, gemms: Gemms, layer: int | None, layers: int) -> None:
        """Notes a linear (global name, name below its layer, 0-based layer of so many) and its rules; `freeze` makes the quantizers once all are
        known.
        """
        self._placed.append(_Placed(linear, name, below, layer, layers, gemms))

    def freeze(self) -> None:
        """Makes one quantizer for each rule and attaches the noted linears."""
        self._check_regions()
        slots: dict[Quant, list[str]] = {}
        for place in self._placed:
            for quant in place.gemms.distinct:
                slots.setdefault(quant, []).append(place.name)
        for quant, names in slots.items():
            self.quantizers[quant] = Quantizer(
                quant,
                names,
                randomness=self.randomness,
                device=self.device,
                release=self.release,
                compiled=self.compiled,
            )
        for place in self._placed:
            if not place.gemms.distinct:
                self.high.append(place.name)
                continue
            fprop, dgrad, wgrad = (None if quant is None else self.quantizers[quant] for quant in place.gemms)
            place.linear.plug = self.plugs[place.name] = Plug(
                slot=place.name, gemms=place.gemms, fprop=fprop, dgrad=dgrad, wgrad=wgrad, emulation=self
            )

    def _check_regions(self) -> None:
        names = {place.below for place in self._placed}
        idle = [
            region_text(region)
            for region in self.policy.module_regions
            if not any(region.covers(place.below, place.layer, place.layers, place.name) for place in self._placed)
        ]
        # a pipeline stage need not hold every module; a model without any linear is not the region's fault
        if idle and names and not _split():
            raise BadValue(
                f"no linear of this model is named by {'; '.join(idle)} (linears of a layer: {', '.join(sorted(names))})"
            )

    def plugged(self) -> list[Any]:
        """The linears that are quantized."""
        return [place.linear for place in self._placed if place.name in self.plugs]

    def context_of(self, module: torch.nn.Module) -> None:
        """Hooks `module` as the outermost quantization context."""
        self._hooks.append(module.register_forward_pre_hook(self._enter))
        self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    # --- running -------------------------------------------------------------------------------------------------------------------------
    def step_begin(self) -> None:
        """Call before the first micro-batch of a training step: weights are quantized again, once, and new random bits are drawn."""
        self.randomness.begin(self.randomness.step + 1)
        self.eval_begin()

    def eval_begin(self) -> None:
        """To be called before the first micro-batch of an evaluation: weights are quantized anew, and training's random bits stay what
        they are."""
        for plug in self.plugs.values():
            plug.first_microbatch = True
            plug.weight_row = plug.weight_column = None
            plug.waiting.clear()
        for quantizer in self.quantizers.values():
            quantizer.forget_stashes()

    def _enter(self, *_: Any) -> None:
        self._depth += 1
        self._unopened = True

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and torch.is_grad_enabled() and not self.is_paused:
            for quantizer in self.quantizers.values():
                quantizer.end_forward(self._group)

    def opens(self) -> bool:
        """True for the first quantized linear of a context: the end of its backward pass is the end of the context's."""
        first, self._unopened = self._unopened, False
        return first

    def end_backward(self) -> None:
        """Updates the gradient scales of delayed scaling."""
        for quantizer in self.quantizers.values():
            quantizer.end_backward(self._group)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """High precision inside, nothing observed, nothing counted."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    # --- state ---------------------------------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, torch.Tensor]:
        """What the next step depends on: scales and amax histories by global name, and the step counter of the random bits."""
        tensors = {name: tensor for quantizer in self.quantizers.values() for name, tensor in quantizer.state().items()}
        return tensors | {STEP: torch.tensor([self.randomness.step])}

    def sharded_state(self, prefix: str = "emulation.") -> dict[str, Any]:
        """`state` as entries of a sharded state dict of megatron-core's dist_checkpointing; independent of the parallel layout."""
        from mpbridge.emulation.mcore import sharded

        tensors = self.state()
        return sharded(tensors, {STEP: tensors.pop(STEP)}, prefix)

    def load_state(self, state: Mapping[str, torch.Tensor], prefix: str = "emulation.") -> None:
        """Takes back `state` or what a checkpoint returned for `sharded_state`; raises CheckpointError for what does not fit."""
        plain = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        if STEP not in plain:
            raise CheckpointError(
                "no emulation state here: 'step' is missing (was the checkpoint written without emulation?)"
            )
        for quantizer in self.quantizers.values():
            quantizer.load_state(plain)
        self.randomness.begin(int(plain[STEP]))

    def detach(self) -> None:
        """Removes every hook and plug."""
        for hook in self._hooks:
            hook.remove()
        for linear in self.restore:
            linear.__class__ = torch.nn.Linear
        for linear in self.plugged():
            del linear.plug
        self._hooks, self.restore, self._placed = [], [], []
        self.plugs.clear()

    # --- words ---------------------------------------------------------------------------------------------------------------------------
    def notes(self) -> tuple[str, ...]:
        """What differs from the GPU, one sentence each; shown with every result."""
        quants = self.policy.quants
        release = ".".join(map(str, self.release))
        count = f"{len(self.plugs)} linears quantized, {len(self.high)} kept high" + (
            " on this rank" if _split() else ""
        )
        notes = [
            f"emulated with the rules of Transformer Engine {release}: {count}",
            *ALWAYS,
        ]
        if any(quant.attention != "none" for quant in quants):
            notes.append("FP8 attention: attention runs in the compute dtype")
        if any(quant.stored for quant in quants):
            notes.append(
                "low-precision parameters at rest: weights rest in the parameters' dtype and are quantized from it each step"
            )
        if any(quant.row.has("stochastic_rounding") for quant in quants):
            notes.append("the GPU's random stream: stochastic rounding has the same distribution, other bits")
        if any(not quant.wgrad for quant in quants):
            notes.append("fp8_wgrad=False: Transformer Engine 2.9 to 2.12 ignore it, so wgrad is quantized here too")
        if self.compiled and (why := compiler()) is not None:
            notes.append(why)
        return tuple(notes)


def _split() -> bool:
    """Whether other processes may hold other parts of the model."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
