"""Quantizer: makes GEMM operands by one rule of a policy, with the state that the rule keeps between steps.

Transformer Engine quantizes each tensor once or twice: a row copy with blocks along the features and a column copy with blocks along the
tokens (or along the output features, for a weight), both from the high-precision tensor. Which GEMM reads which copy:

    fprop  Y = X Wt     X row      W row
    dgrad  dX = dY W    dY row     W column
    wgrad  dW = dYt X   dY column  X column
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from mpbridge.common.errors import Refused
from mpbridge.common.formats import FORMATS, NumberFormat
from mpbridge.numerics import kernels, operands
from mpbridge.numerics.codes import random_bytes
from mpbridge.numerics.nvfp4 import Nvfp4
from mpbridge.numerics.operands import COPY_OF, Operand, OperandCopy, Side
from mpbridge.numerics.scales import DEFAULT_RELEASE, AmaxTable, Release, options_of, rules_for
from mpbridge.precision.policy import Quant
from mpbridge.precision.regions import Gemm
from mpbridge.precision.scalings import SCALINGS, Block


class Randomness:
    """Source of random bits for stochastic rounding: a generator seeded anew for every tensor from (seed, step, name, draw).

    So the whole random state is one step counter: a resumed or resharded run draws the same bits, regardless of which rank had what.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.step = seed, 0
        self._generator = torch.Generator(device=device)
        self._draws: dict[str, int] = {}

    def begin(self, step: int) -> None:
        """Starts the draws of a step."""
        self.step = step
        self._draws.clear()

    def bytes(self, shape: torch.Size, name: str) -> torch.Tensor:
        """Uniform uint8 of that shape; a new draw at every call."""
        draw = self._draws[name] = self._draws.get(name, 0) + 1
        low = zlib.crc32(f"{self.seed}/{self.step}/{name}/{draw}".encode())
        high = zlib.crc32(f"{name}/{draw}/{self.step}/{self.seed}".encode())
        return random_bytes(shape, self._generator.manual_seed(high << 32 | low))


class Quantizer(Nvfp4):
    """GEMM operands under one `Quant`; serves megatron-core's linears and plain ones.

    slots: the linears that this quantizer serves, fixed before the first operand (delayed scaling keeps a scale for each).
    release: the Transformer Engine release whose rules apply; environment: variables that set what the recipe does not.
    Raises Refused for a scaling whose rules are in a user's factory, and for options that the release does not have or that exclude each other.
    """

    def __init__(
        self,
        quant: Quant,
        slots: Sequence[str],
        *,
        randomness: Randomness,
        device: torch.device,
        release: Release = DEFAULT_RELEASE,
        compiled: bool = True,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if quant.row.emulation is None:
            known = ", ".join(row.name for row in SCALINGS.values() if row.emulation is not None)
            what = f"its rules are in {quant.factory} (expected one of {known})"
            raise Refused(f"scaling {quant.scaling!r} cannot be emulated: {what}")
        self.rule = quant.row.emulation
        self.quant, self.rules, self.compiled, self._randomness = quant, rules_for(release), compiled, randomness
        self.options = options_of(quant, release, environment)
        self.backward: str = self.options.get("backward", "quantized")
        self._power_of_two: bool = self.options.get("power_of_two", False)
        self._hadamard: bool = self.options.get("hadamard", False)
        self.index = {slot: i for i, slot in enumerate(slots)}
        self.forward_format = FORMATS[quant.element(gradient=False)]
        self.gradient_format = FORMATS[quant.element(gradient=True)]
        self.out = torch.bfloat16
        self.forward_table = self.backward_table = None
        if quant.row.history:
            names, gradients = [f"{slot}.{side}" for slot in slots for side in ("x", "w")], [f"{s}.dy" for s in slots]
            self.forward_table = AmaxTable(names, quant, self.forward_format.largest, device)
            self.backward_table = AmaxTable(gradients, quant, self.gradient_format.largest, device)
        self._stashed: dict[str, deque[torch.Tensor]] = {}

    # --- operands --------------------------------------------------------------------------------------------------------------------
    def block(self, side: Side) -> Block:
        """The extent of one scale on that side."""
        found = self.quant.row.block(weight=side == "w", square=self.options.get("square_weights", True))
        assert found is not None  # a scaling that a factory decides is refused above
        return found

    def shares_copies(self, side: Side) -> bool:
        """True if both copies of that operand are equal: one scale for all of it, or square blocks."""
        # Four Over Six sums errors along the contraction, so the two copies of a square block may choose differently
        return self.quant.row.per_tensor or (side == "w" and self.block("w").square and not self.four_over_six("w"))

    def operand(
        self,
        x: torch.Tensor,
        *,
        slot: str,
        gemm: Gemm,
        side: Side,
        first_microbatch: bool = True,
        replay: bool = False,
        wide: bool | None = None,
    ) -> Operand:
        """`x` (two-dimensional: tokens by features, or a weight) as that GEMM of that linear reads it.

        first_microbatch: a weight is quantized, and its amax counted, on the first micro-batch of a step; later ones reuse the caller's copy.
        replay: activation recomputation; delayed scaling reads the scale of the first run and counts no amax.
        wide: values in fp32, if bf16 cannot represent the smallest block scales times a code (amaxes below 1e-35, which bf16 GEMMs flush anyway);
        None: for fp32 input.
        """
        number = self.format_of(side)
        rule, copy = self.rule, COPY_OF[gemm, side]
        if rule == "current":
            flat = x.reshape(-1)
            codes, alpha = self._kernel(kernels.tensorwise, flat, number, self.out, self._power_of_two)(flat)
            return Operand(codes.view(x.shape), alpha)
        if rule == "history":
            return self._delayed(x, slot, side, observe=first_microbatch or side != "w", replay=replay)
        if rule == "e4m3_blocks":
            return self._nvfp4(x, slot, side, copy)
        return self._blocks(x, side, copy, x.dtype is torch.float32 if wide is None else wide)

    def format_of(self, side: Side) -> NumberFormat:
        """The element format of that side's operands."""
        return self.gradient_format if side == "dy" else self.forward_format

    def explain(
        self, x: torch.Tensor, operand: Operand, *, gemm: Gemm, side: Side
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the fp32 tensor that was rounded: x, or x rotated; fp32 multiplier before the cast, of x's shape or a scalar) for statistics.

        x: the operand's source, or some whole lines of it along the blocks (rows of a row copy, columns of a column copy; all of a weight
        with square blocks). operand: made from the whole source.
        """
        rule, copy = self.rule, COPY_OF[gemm, side]
        if self.quant.row.per_tensor:
            assert operand.alpha is not None  # one scale for all of it
            return x.float(), 1.0 / operand.alpha
        if rule == "e4m3_blocks":
            return self._explain_nvfp4(x, operand, side, copy)
        block, padded, view = self._in_blocks(x, side, copy)
        amax = operands.square_peaks(kernels.peaks(view), block.along) if block.across > 1 else kernels.peaks(view)
        multiplier, _ = self._factors(amax, side, x.dtype)
        if block.across > 1:
            multiplier = operands.spread(multiplier, block.along)
        return x.float(), operands.cropped(multiplier.expand(view.shape).reshape(padded.shape), x.shape)

    def _kernel(self, function: Any, x: torch.Tensor, *fixed: Any) -> Any:
        return kernels.kernel(function, self.compiled, (x.dim(), x.dtype), *fixed)

    def _delayed(self, x: torch.Tensor, slot: str, side: Side, *, observe: bool, replay: bool) -> Operand:
        number = self.format_of(side)
        table, index = self._place(slot, side)
        # a copy, because the table is updated before the backward pass reads this operand's scale
        scale = self._stashed[f"{slot}.{side}"].popleft() if replay else table.scale[index].clone()
        flat = x.reshape(-1)
        codes, amax = self._kernel(kernels.delayed, flat, number, self.out)(flat, scale)
        if observe and not replay:
            table.observe(index, amax)
        return Operand(codes.view(x.shape), 1.0 / scale)

    def _place(self, slot: str, side: Side) -> tuple[AmaxTable, int]:
        assert self.forward_table is not None  # made in __init__ for this scaling
        assert self.backward_table is not None
        if side == "dy":
            return self.backward_table, self.index[slot]
        return self.forward_table, 2 * self.index[slot] + (side == "w")

    def stash(self, slot: str) -> None:
        """Saves the scale of `slot`'s input for the replay of this micro-batch (activation recomputation)."""
        if self.quant.row.history:
            table, index = self._place(slot, "x")
            self._stashed.setdefault(f"{slot}.x", deque()).append(table.scale[index].clone())

    def forget_stashes(self) -> None:
        """Drops scales that no replay used (a forward pass without a backward pass)."""
        self._stashed.clear()

    def _blocks(self, x: torch.Tensor, side: Side, copy: OperandCopy, wide: bool) -> Operand:
        number, (block, padded, view) = self.format_of(side), self._in_blocks(x, side, copy)
        # an fp32 scale times a code has too many bits for bf16, whatever its size
        dtype = torch.float32 if wide or not (block.scale == "e8m0" or self._power_of_two) else self.out
        if block.across > 1:
            amax = operands.square_peaks(self._kernel(kernels.peaks, view)(view), block.along)
            factors = tuple(operands.spread(one, block.along) for one in self._factors(amax, side, x.dtype))
        else:
            fixed = (kernels.BLOCK_RULES[self.rule], number, self._power_of_two, self.rules)
            factors = self._kernel(kernels.block_scales, view, *fixed)(view)
        out = self._kernel(kernels.values, view, number, dtype)(view, *factors)
        return Operand(operands.cropped(out.view(padded.shape), x.shape))

    def _in_blocks(self, x: torch.Tensor, side: Side, copy: OperandCopy) -> tuple[Block, torch.Tensor, torch.Tensor]:
        """(The block, x padded to whole ones, the kernels' view of that.)"""
        block = self.block(side)
        padded = operands.padded_to_blocks(x, block.across if side == "w" else 1, block.along, copy)
        return block, padded, operands.view_of(padded, block.along, "column" if block.across > 1 else copy)

    def _factors(self, amax: torch.Tensor, side: Side, dtype: torch.dtype) -> kernels.TensorPair:
        """(multiplier before the cast, factor after it) of blocks with those amaxes, of an operand of that dtype."""
        largest = torch.finfo(dtype).max
        return kernels.BLOCK_RULES[self.rule](amax, self.format_of(side), largest, self._power_of_two, self.rules)

    # --- delayed scaling -----------------------------------------------------------------------------------------------------------------
    def end_forward(self, group: Any = None) -> None:
        """Ends the outermost context of a forward pass with gradients: new forward scales, amaxes max-reduced over `group`."""
        if self.forward_table is not None:
            self.forward_table.update(group)

    def end_backward(self, group: Any = None) -> None:
        """Ends the backward pass of a context's first linear: new gradient scales."""
        if self.backward_table is not None:
            self.backward_table.update(group)

    def state(self) -> dict[str, torch.Tensor]:
        """name -> fp32 vector of scale and history (delayed scaling; empty for the others, which have no state)."""
        tables = (table for table in (self.forward_table, self.backward_table) if table is not None)
        return {name: tensor for table in tables for name, tensor in table.state().items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads `state`; raises CheckpointError if it does not fit."""
        for table in (self.forward_table, self.backward_table):
            if table is not None:
                table.load_state(state)
