"""Emulation: the state shared by all quantized linears of a run, and the engine's interface to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from mpbridge.common.errors import BadValue, CheckpointError, Refused
from mpbridge.numerics.gemm import Observer, Plug
from mpbridge.numerics.kernels import compiler
from mpbridge.numerics.linear import EmulatedLinear, Listener, Pausable, unrounded
from mpbridge.numerics.quantizer import Quantizer, Randomness
from mpbridge.numerics.scales import Release, options_of, release_of, rules_for
from mpbridge.precision.modules import layers_text
from mpbridge.precision.regions import outside
from mpbridge.precision.wording import region_text

if TYPE_CHECKING:
    from mpbridge.precision.policy import Gemms, PrecisionPolicy, Quant
    from mpbridge.precision.regions import Region

ALWAYS = (
    "accumulation order: products are exact and summed in fp32, whereas tensor cores sum in their own order (with fewer bits under fast accumulation)",
    "casts fused with a norm read its fp32 result: emulated under delayed scaling, whose norm kernel casts, but not for cuDNN's norms (NVTE_NORM_FWD_USE_CUDNN=1, MXFP8)",
    "each micro-batch's weight gradient is rounded to its parameter's dtype before it is added; on the GPU, accumulation fused into the GEMM stays in fp32",
)
STEP = "step"


class _Placed(NamedTuple):
    """A linear, its place in the model, and the rules of its GEMMs."""

    linear: Any
    name: str
    below: str
    layer: int | None
    layers: int
    gemms: Gemms


class Emulation(Pausable):
    """Quantizers, contexts and hooks of one model.

    policy: what to emulate. seed: for stochastic rounding. release: the Transformer Engine release whose rules apply ('2.14' or a pair). compiled:
    False keeps the quantize kernels out of torch.compile. device: where the state is kept. environment: the variables that set what a recipe does not,
    as for Transformer Engine; None: this process's. Raises BadValue for a release without rules, Refused for 'custom', for options that exclude
    each other or that the release does not have, and for FP16 compute with a scaling that does not support it.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        *,
        seed: int = 1234,
        release: str | Release | None = None,
        compiled: bool = True,
        device: torch.device | str = "cpu",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.seed, self.compiled, self.device = seed, compiled, torch.device(device)
        self._rule(policy, release, environment)
        self.randomness = Randomness(seed, self.device)
        self.observer: Observer | None = None
        self.listener: Listener | None = None
        """Called with the high-precision products; see `listening`."""
        self.quantizers: dict[Quant, Quantizer] = {}
        self.plugs: dict[str, Plug] = {}
        self.high: list[str] = []
        """Linears that the policy keeps in high precision, by global name."""
        self._placed: list[_Placed] = []
        self._hooks: list[Any] = []
        self._depth, self._unopened = 0, False
        self.group: Any = None
        """The process group over which delayed scaling reduces its amaxes."""

    def _rule(
        self, policy: PrecisionPolicy, release: str | Release | None, environment: Mapping[str, str] | None
    ) -> None:
        """Sets the policy, after all checks have passed."""
        number = release_of(release)
        rules_for(number)
        read = dict(os.environ if environment is None else environment)
        options = {quant: options_of(quant, number, read) for quant in policy.quants if quant.row.emulation}
        odd = [quant.row.words for quant in policy.quants if policy.compute not in quant.row.compute]
        if odd:
            why = "Transformer Engine supports bf16 only (Hadamard transform, stochastic rounding, no FP16 output of the GEMM)"
            raise Refused(f"{', '.join(odd)} with {policy.compute.short} compute: {why}")
        self.policy, self.release, self.environment, self.options = policy, number, read, options

    def switch(self, policy: PrecisionPolicy, *, release: str | Release | None = None) -> None:
        """Switches to another policy on the same, built model, as if it had been built with it: scales, histories and random bits start afresh.

        Weights, optimizer and hooks stay. release: None: the current one. Call it between steps. Raises what the constructor and `attach` raise, and
        Refused for another compute dtype; after an error the current policy stays in force.
        """
        own, other = self.policy.compute, policy.compute
        if own is not other:
            what = f"a policy that computes in {other.short} needs a model built for it"
            raise Refused(f"the model computes in {own.short}; {what}")
        before = (self.policy, self.release, self.environment)
        self._rule(policy, self.release if release is None else release, self.environment)
        placed = self._placed
        self._placed = [p._replace(gemms=policy.gemms_at(p.below, p.layer, p.layers, p.name)) for p in placed]
        try:
            self._check_regions()
        except BadValue:
            self._placed = placed
            self._rule(*before)
            raise
        for place in placed:
            if place.name in self.plugs:
                del place.linear.plug
        self.plugs.clear()
        self.quantizers.clear()
        self.high.clear()
        self.randomness = Randomness(self.seed, self.device)
        self.freeze()
        self.dress()

    def dress(self) -> None:
        """Sets the class of plain linears according to their plug; megatron-core's have the right class from the start."""
        for place in self._placed:
            if type(place.linear) in (torch.nn.Linear, EmulatedLinear):
                place.linear.__class__ = EmulatedLinear if place.name in self.plugs else torch.nn.Linear

    # --- building ------------------------------------------------------------------------------------------------------------------------
    def add(self, linear: Any, name: str, below: str, gemms: Gemms, layer: int | None, layers: int) -> None:
        """Registers a linear (global name, name below its layer, 0-based layer, number of layers) and its rules; `freeze` makes the quantizers once all are registered."""
        self._placed.append(_Placed(linear, name, below, layer, layers, gemms))

    def freeze(self) -> None:
        """Makes one quantizer for each rule and attaches it to the registered linears."""
        self._check_regions()
        slots: dict[Quant, list[str]] = {}
        for place in self._placed:
            for quant in place.gemms.distinct:
                slots.setdefault(quant, []).append(place.name)
        for quant, names in slots.items():
            how: dict[str, Any] = {"release": self.release, "compiled": self.compiled, "environment": self.environment}
            self.quantizers[quant] = Quantizer(quant, names, randomness=self.randomness, device=self.device, **how)
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
        far = [
            f"{region_text(region)}: {layers_text(wrong)} of {layers} layers"
            for layers in sorted({place.layers for place in self._placed if place.layer is not None})
            for region in self.policy.module_regions
            if (wrong := outside(region.layers or (), layers))
        ]
        if far:
            raise BadValue(f"layers that the model does not have: {'; '.join(far)}")
        idle = [
            region_text(region)
            for region in self.policy.module_regions
            if not self.elsewhere(region)
            and not any(region.covers(place.below, place.layer, place.layers, place.name) for place in self._placed)
        ]
        # a pipeline stage need not have every module; for a model without linears the region is not at fault
        if idle and names and not _split():
            there = f"linears of a layer: {', '.join(sorted(names))}"
            raise BadValue(f"no linear of this model matches {'; '.join(idle)} ({there})")

    def elsewhere(self, region: Region) -> bool:
        """Whether the region is about another kind of model, so that it may match nothing here."""
        return False

    def plugged(self) -> list[Any]:
        """The linears that are quantized."""
        return [place.linear for place in self._placed if place.name in self.plugs]

    def fuse(self, norm: torch.nn.Module, linear: Any) -> None:
        """Hands the norm's unrounded output to the linear, as Transformer Engine's module of both does."""
        self._hooks.append(norm.register_forward_hook(partial(self._keep_unrounded, linear)))

    def _keep_unrounded(self, linear: Any, norm: Any, args: Any, output: Any) -> None:
        """Hook of a norm before a linear whose input is quantized in the norm's kernel, before it is rounded."""
        plug: Plug | None = linear.plug
        if plug is None or self.is_paused or plug.fprop is None or not plug.fprop.quant.row.history:
            return
        linear.unrounded = unrounded(norm, args[0])

    def context_of(self, module: torch.nn.Module) -> None:
        """Hooks `module` as the outermost quantization context."""
        self._hooks.append(module.register_forward_pre_hook(self._enter))
        self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    # --- running -------------------------------------------------------------------------------------------------------------------------
    def step_begin(self) -> None:
        """Call before the first micro-batch of a training step: weights are quantized anew, once per step, and new random bits are drawn."""
        self.step_at(self.randomness.step + 1)

    def step_at(self, step: int) -> None:
        """As `step_begin`, with the random bits of that step, so that two policies can be compared with the same bits."""
        self.randomness.begin(step)
        self.eval_begin()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """An evaluation: weights are quantized anew, and behind it scales and histories are as they were."""
        before = self.state()
        self.eval_begin()
        try:
            yield
        finally:
            self.load_state(before)

    def eval_begin(self) -> None:
        """Call before the first micro-batch of an evaluation: weights are quantized anew; the random bits of training are not affected."""
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
                quantizer.end_forward(self.group)

    def opens(self) -> bool:
        """True for the first quantized linear of a context: the end of its backward pass ends the context's."""
        first, self._unopened = self._unopened, False
        return first

    def end_backward(self) -> None:
        """Updates the gradient scales of delayed scaling."""
        for quantizer in self.quantizers.values():
            quantizer.end_backward(self.group)

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """High precision in the block; `listener` is called with every product of the linears that are otherwise quantized."""
        self.listener = listener
        try:
            with self.paused():
                yield
        finally:
            self.listener = None

    def linears(self) -> Iterator[tuple[Any, str, str, int | None, int]]:
        """(linear, global name, name below its layer, 0-based layer, layers) of the quantized linears of this rank."""
        for place in self._placed:
            if place.name in self.plugs:
                yield place.linear, place.name, place.below, place.layer, place.layers

    # --- state ---------------------------------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, torch.Tensor]:
        """The state that the next step depends on: scales and amax histories by global name, and the step counter of the random bits."""
        tensors = {name: tensor for quantizer in self.quantizers.values() for name, tensor in quantizer.state().items()}
        return tensors | {STEP: torch.tensor([self.randomness.step])}

    def load_state(self, state: Mapping[str, torch.Tensor], prefix: str = "emulation.") -> None:
        """Loads `state`, or what a checkpoint returned for `megatron`'s sharded state of it; raises CheckpointError if it does not fit."""
        plain = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        if STEP not in plain:
            what = "no emulation state here: 'step' is missing"
            raise CheckpointError(f"{what} (was the checkpoint written without emulation?)")
        for quantizer in self.quantizers.values():
            quantizer.load_state(plain)
        self.randomness.begin(int(plain[STEP]))

    def detach(self) -> None:
        """Removes every hook and plug."""
        for hook in self._hooks:
            hook.remove()
        for linear in self.plugged():
            del linear.plug
        self.plugs.clear()
        self.dress()
        self._hooks, self._placed = [], []

    # --- notes ---------------------------------------------------------------------------------------------------------------------------
    def notes(self) -> tuple[str, ...]:
        """What differs from the GPU, one sentence each; shown with every result."""
        quants = self.policy.quants
        release = ".".join(map(str, self.release))
        count = f"{len(self.plugs)} linear{'s' if len(self.plugs) != 1 else ''} quantized"
        kept = f"{len(self.high)} kept in high precision{' on this rank' if _split() else ''}"
        notes = [f"emulated with the rules of Transformer Engine {release}: {count}, {kept}"]
        notes += dict.fromkeys(note for one in self.options.values() for note in one.notes)
        notes += ALWAYS
        options = self.options.values()
        notes += [text for holds, text in (
            (any(quant.attention != "none" for quant in quants), "FP8 attention: attention runs in the compute dtype"),
            (any(quant.stored for quant in quants), "weights stored in low precision: here they are stored in the parameters' dtype and quantized from it each step"),
            (any(one.get("fast_math") for one in options), "fast math: reciprocals are exact here and approximate on the GPU"),
            (any(one.get("stochastic_rounding") for one in options), "stochastic rounding: same distribution as on the GPU, but different random bits"),
            (any(not quant.wgrad for quant in quants), "fp8_wgrad=False: Transformer Engine 2.9 to 2.12 ignore it, so wgrad is quantized here too"),
        ) if holds]  # fmt: skip
        if self.compiled and (why := compiler()) is not None:
            notes.append(why)
        return tuple(notes)


def _split() -> bool:
    """Whether other processes may have other parts of the model."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
