"""The GEMMs of linear layers in an observed step: their dtypes, whether they read the weight itself, the quantized operands, and the gradients
they produce."""

from __future__ import annotations

import os
import random
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mpbridge.common.formats import FORMATS
from mpbridge.numerics.observation.tensors import is_narrow, sample, storage
from mpbridge.observe.audit import operands
from mpbridge.observe.audit.library import leaving
from mpbridge.observe.audit.passing import Passing
from mpbridge.precision.policy import Gemms, Quant

_ROWS = 64
"""Number of neighbouring tokens whose inputs are kept until backward, to compare the copy that wgrad reads."""
_Source = tuple[torch.Tensor, float, int]
"""An operand's tensor in high precision, or rows of it; the whole tensor's largest element; the first row's index."""
_DETACHED = "values from which no gradient reaches the embedding"


@dataclass
class Quantized:
    """What was seen of one quantized linear."""

    gemms: Counter[str] = field(default_factory=Counter)
    """'fprop', 'dgrad', 'wgrad' -> number of GEMMs."""
    bad: dict[str, str] = field(default_factory=dict)
    """'wgrad dy' -> what that operand was, if not as promised."""
    strays: tuple[float, float] | None = None
    """Of gradient elements (operands.strays)."""
    amax: dict[str, float] = field(default_factory=dict)
    """'x', 'dy' -> absolute maximum in the last micro-batch."""
    looked: int = 0
    """Number of elements that were judged of an operand, at most."""
    left: dict[str, float] = field(default_factory=dict)
    """'x', 'dy' -> the amax history entry that the last micro-batch's update drops."""

    def note_leaving(self, module: Any, name: str) -> None:
        """Records that entry, if the history has one; call before the update."""
        entry = leaving(module, name)
        if entry is not None:
            self.left[name] = entry


class Products:
    """Observes GEMMs; `Watch` attributes them to modules."""

    def __init__(self, gemms_of: Callable[[str], Gemms | None], seed: int = 0) -> None:
        self.gemms_of = gemms_of
        self.seed = seed
        """Draws the sampled part of every operand."""
        self.modules: dict[str, Any] = {}
        self.embeddings: dict[str, Any] = {}
        """Path -> embedding: a linear without a weight of its own, a tied output layer, multiplies by one of theirs."""
        self.dtypes: dict[str, Counter[str]] = defaultdict(Counter)
        """Module -> dtype of both factors (forward and backward) -> number of GEMMs."""
        self.other: dict[str, str] = {}
        """Linear -> what its GEMM read instead of its weight."""
        self.passing = Passing()
        self.quantized: dict[str, Quantized] = {}
        self.gradients: dict[str, dict[int, float]] = {}
        """Linear -> position in its weight -> sum of the weight-gradient GEMM's output over micro-batches."""
        self.narrow: set[str] = set()
        """Linears whose FP32 output gradients all had 10 or fewer mantissa bits."""
        self._reached: set[str] = set()
        """Tied linears of which a call sends gradients to the embedding."""
        self._tokens: dict[str, int] = {}
        self._backward: Counter[tuple[str, str]] = Counter()
        """(linear, 'dgrad' or 'wgrad') -> number so far, quantized or not."""
        self._shapes: dict[str, torch.Size] = {}
        self._dy: dict[str, torch.Tensor] = {}
        self._x: dict[str, torch.Tensor] = {}
        """Linear -> its input in the forward pass."""
        self._xs: dict[str, deque[_Source]] = defaultdict(deque)
        """Linear -> rows of its input, for every micro-batch whose backward pass is pending."""
        self._largest: dict[tuple[str, str], float] = {}
        """(linear, 'x', 'dy' or 'w') -> largest element of that tensor."""

    def forget(self) -> None:
        """Drops the state kept from forward to backward."""
        for one in (self._dy, self._x, self._xs, self._largest):
            one.clear()

    # --- forward -------------------------------------------------------------------------------------------------------------------------
    def enters(self, path: str, source: torch.Tensor) -> None:
        """Marks the start of a linear's forward pass with this input."""
        quants = self._quants(path)
        if not quants:
            self.passing.enters(path, source)
            return
        history = any(quant.row.history for quant in quants)
        self._x[path] = source.detach().reshape(-1, source.shape[-1])
        if source.numel():
            self._largest[path, "x"] = largest = float(self._x[path].abs().amax())
            if torch.is_grad_enabled():
                # rows drawn anew in each audit
                x, draw = self._x[path], random.Random(self.seed + len(self._xs[path]))
                first = draw.randrange(-(-x.shape[0] // _ROWS)) * _ROWS
                self._xs[path].append((x[first : first + _ROWS].clone(), largest, first))
            seen = self.quantized.setdefault(path, Quantized())
            if history:
                seen.amax["x"] = largest
        # a forward pass recomputed during backward does not end an interval
        if history and path in self.quantized and torch._C._current_autograd_node() is None:
            self.quantized[path].note_leaving(self.modules.get(path), "x")

    def leaves(self, path: str, nodes: list[Any]) -> None:
        """Marks the end of a linear's forward pass; `nodes` of the graph belong to it."""
        if not self._quants(path):
            return
        self._x.pop(path, None)
        for node in nodes:
            if node.name() == "QuantizedLinearBackward":
                node.register_prehook(partial(self._arrives, path))
                node.register_hook(partial(self._made, path))

    def _arrives(self, path: str, grads: Any) -> None:
        """Records the gradient of an emulated linear's result."""
        if grads[0] is None:
            return
        self._dy[path] = grads[0].detach().reshape(-1, grads[0].shape[-1])
        seen = self.quantized.get(path)
        if seen is not None:
            seen.note_leaving(self.modules.get(path), "dy")
            if self._dy[path].numel():
                seen.amax["dy"] = self._largest[path, "dy"] = float(self._dy[path].abs().amax())

    def _made(self, path: str, made: Any, grads: Any) -> None:
        """Records the weight gradient that it returns: its GEMM's result times a factor, rounded to the weight's dtype."""
        if len(made) > 1 and made[1] is not None:
            self._follow(path, made[1].shape, made[1].detach())

    def forward(self, path: str, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """Records a two-dimensional product in the forward pass of `path`."""
        if not left.numel():
            return  # an expert without tokens
        module = self.modules.get(path)
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and right.shape != weight.shape[::-1]:
            # a product before the linear's own: a rotation, or Transformer Engine building its Hadamard matrix (FP32, on first use)
            return
        self.dtypes[path][_both(left, right)] += 1
        if module is None or _cut(left, right):
            return
        if isinstance(weight, torch.Tensor):
            self._shapes[path] = weight.shape
        self._tokens[path] = left.shape[0]
        quant = self._quant(path, "fprop")
        if quant is None:
            if not self._quants(path):
                self.passing.multiplies(path, left, out)
            if weight is None:  # it should multiply by an embedding's
                lent = (getattr(module, "weight", None) for module in self.embeddings.values())
                weight = next((one for one in lent if one is not None and one.shape == right.shape[::-1]), None)
            self._compare(path, weight, right)
            return
        self._operands(path, "fprop", quant, left, right)

    def attached(self, path: str, nodes: list[Any]) -> None:
        """Records a linear that multiplies by an embedding's parameter, of which its part of the graph knows nothing: no gradient reaches it from here."""
        module = self.modules.get(path)
        own = getattr(module, "parameters", lambda **_: ())(recurse=False)
        # a grouped linear has weight0, weight1 ...
        if getattr(module, "weight", module) is not None or any(one.dim() > 1 for one in own):
            return
        leaves = [leaf for node in nodes for one, _ in node.next_functions if (leaf := getattr(one, "variable", None)) is not None]  # fmt: skip
        owners = [module.weight for module in self.embeddings.values() if getattr(module, "weight", None) is not None]
        if any(leaf is one for leaf in leaves for one in owners):
            self._reached.add(path)
            if self.other.get(path) == _DETACHED:
                del self.other[path]  # another call of this layer: a head that is detached on purpose
        elif owners and all(one.requires_grad for one in owners) and path not in self._reached:
            self.other.setdefault(path, _DETACHED)

    def _compare(self, path: str, weight: Any, right: torch.Tensor) -> None:
        """Checks that the right factor is the weight, in the product's dtype."""
        if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.dim() != 2 or path in self.other:
            return
        turned = weight.detach().t()
        if right.shape != turned.shape or right.data_ptr() == weight.data_ptr():
            return
        if not torch.equal(right, turned.to(right.dtype)):
            self.other[path] = f"{storage(right)} values that are not its weight's"

    def batched(self, path: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """Records a batched product of a linear, forward or backward; only its dtype is checked."""
        if left.numel():
            self.dtypes[path][_both(left, right)] += 1

    # --- backward ------------------------------------------------------------------------------------------------------------------------
    def backward(self, path: str, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """Records a two-dimensional product in the backward pass of `path`."""
        if not (left.numel() and right.numel()):
            return
        self.dtypes[path][_both(left, right)] += 1
        shape = self._shapes.get(path)
        if path not in self.modules or shape is None or _cut(left, right):
            return
        if right.shape != shape and out.shape not in (shape, shape[::-1]):
            return
        role = self._role(path, shape, left, right, out)
        self._backward[path, role] += 1
        if role == "dgrad" and left.dtype is torch.float32 and is_narrow(left):
            self.narrow.add(path)
        quant = self._quant(path, role)
        if quant is not None and operands.backward_is_quantized(quant):
            self._operands(path, role, quant, left, right)
        if role == "wgrad" and not self._quants(path):
            self._follow(path, shape, out)

    def _role(self, path: str, shape: torch.Size, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> str:
        tokens = self._tokens.get(path, 0)
        if tokens in shape:  # ambiguous by shape
            if not has_trained_weight(self.modules[path]):
                return "dgrad"
            seen = self.quantized.get(path)
            if seen is not None:
                return "dgrad" if self._backward[path, "dgrad"] <= self._backward[path, "wgrad"] else "wgrad"
            return "dgrad" if any(_is(factor, self.modules[path].weight) for factor in (left, right)) else "wgrad"
        return "wgrad" if out.shape in (shape, shape[::-1]) else "dgrad"

    def _follow(self, path: str, shape: torch.Size, out: torch.Tensor) -> None:
        whole = out if out.shape == shape else out.t()
        found = self.gradients.setdefault(path, {})
        for where, value in sample(whole, 0, shape.numel()).items():
            found[where] = found.get(where, 0.0) + value

    def _quants(self, path: str) -> tuple[Quant, ...]:
        gemms = self.gemms_of(path)
        return () if gemms is None else gemms.distinct

    def _quant(self, path: str, role: str) -> Quant | None:
        gemms = self.gemms_of(path)
        quant: Quant | None = None if gemms is None else getattr(gemms, role)
        return None if quant is None or role in quant.row.high else quant

    # --- quantization --------------------------------------------------------------------------------------------------------------------
    def _operands(self, path: str, role: str, quant: Quant, left: torch.Tensor, right: torch.Tensor) -> None:
        seen = self.quantized.setdefault(path, Quantized())
        seen.gemms[role] += 1
        names = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}[role]
        for name, lines in zip(names, (left.detach(), right.detach().t()), strict=True):
            found = self._source(path, role, name)
            if (role, name) == ("wgrad", "x") and getattr(self.modules.get(path), "sequence_parallel", False):
                found = None  # gathered from the ranks of a sequence, of which this one saw its own tokens
            seed = zlib.crc32(f"{path} {role} {name}".encode()) + self.seed
            patch = operands.patch_of(lines, across=operands.together(quant, name), seed=seed)
            part = patch.of(lines)
            seen.looked = max(seen.looked, part.numel())
            wanted = quant.element(gradient=name == "dy")
            grid = operands.grid_of(part, fours=quant.bits == 4)
            if not self._fits(grid, quant, name, part):
                seen.bad.setdefault(f"{role} {name}", f"{grid.text()}, promised {wanted.upper()} ({quant.scaling})")
            elif found is None:
                continue
            elif what := self._strange(role, name, quant, lines, found, patch, seed):
                seen.bad.setdefault(f"{role} {name}", what)
            elif (role, name, quant.bits) == ("dgrad", "dy", 4) and found[0].shape == lines.shape and not seen.strays:
                # NVFP4 promises stochastic rounding of gradients
                seen.strays = operands.strays(part, patch.of(found[0]), found[1])

    def _strange(
        self, role: str, name: str, quant: Quant, lines: torch.Tensor, of: _Source, patch: operands.Patch, seed: int
    ) -> str:
        """'' if an operand is its source tensor, rounded once, or what it is not. lines: the operand with the contraction along the columns."""
        source, largest, first = of
        turned = role == "wgrad"
        source = source.t() if turned or (role, name) == ("dgrad", "w") else source
        if (role, name) == ("wgrad", "x"):
            lines = lines[:, first : first + source.shape[1]]
        if lines.shape != source.shape and not (turned and quant.bits == 4):
            return ""
        if lines.shape[0] != source.shape[0]:
            return ""
        if lines.shape != source.shape or (role, name) == ("wgrad", "x"):
            patch = operands.patch_of(source, across=operands.together(quant, name), seed=seed)
        part, own = patch.of(lines), patch.of(source)
        if turned and quant.bits == 4:
            rotated, nearest = operands.asked(quant, "hadamard"), operands.is_nearest(quant, name)
            return operands.turned_fault(part.t(), own.t(), rotated=rotated, nearest=nearest)
        return "" if self._is_rounded(part, own, largest, quant, name, turned=turned) else operands.STRANGE

    def _is_rounded(
        self, lines: torch.Tensor, source: torch.Tensor, largest: float, quant: Quant, name: str, *, turned: bool
    ) -> bool:
        number = FORMATS[quant.element(gradient=name == "dy")]
        if quant.row.per_tensor:
            return operands.is_rounded_with(lines, source, number, amax=largest, current=not quant.row.history)
        block = None if turned or name == "w" or quant.row.blocks is None else quant.row.blocks[0]
        along = block.along or None if block is not None and block.across == 1 else None
        if not operands.is_rounded_from(lines, source, number, amax=largest, along=along, fitted=quant.bits == 4):
            return False
        across = operands.across_of(quant, name)
        return not operands.is_nearest(quant, name) or operands.is_nearest_e2m1(lines, source, across=across)

    def _source(self, path: str, role: str, name: str) -> _Source | None:
        """What an operand was made of; None if it is not available."""
        if (role, name) == ("wgrad", "x"):
            return self._xs[path].popleft() if self._xs[path] else None
        weight = getattr(self.modules.get(path), "weight", None)
        held: Any = {"x": self._x.get(path), "dy": self._dy.get(path), "w": weight}[name]
        if type(held) not in (torch.Tensor, torch.nn.Parameter) or held.dim() != 2 or not held.numel():
            return None
        largest = self._largest.get((path, name))
        if largest is None:
            largest = float(held.detach().abs().amax())
        if name == "w":  # the same in every micro-batch
            self._largest[path, name] = largest
        return held.detach(), largest, 0

    def _fits(self, grid: operands.Grid, quant: Quant, name: str, lines: torch.Tensor) -> bool:
        wanted = quant.element(gradient=name == "dy")
        if grid.fits(wanted, per_tensor=quant.row.per_tensor):
            return True
        blocks = quant.row.blocks
        if blocks is None or not quant.row.has("power_of_two") or quant.option("power_of_two", os.environ):
            return False
        block = blocks[name == "w"]
        if not block.along:  # a per-tensor factor, which some output dtypes include in the values
            return False
        return operands.fits_blocks(lines, FORMATS[wanted], across=block.across, along=block.along)


def has_trained_weight(module: Any) -> bool:
    """Whether a linear's own weight gets a gradient, so that its backward pass has a wgrad; a grouped linear has weight0, weight1 ..., and others may hold an adapter's."""
    named = module.named_parameters(recurse=False)
    return any(one.requires_grad for name, one in named if name.startswith("weight"))


def _is(factor: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a factor is the weight, possibly widened. A weight gradient sums over tokens and reads only activations and gradients."""
    if factor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr():
        return True
    return factor.shape == weight.shape and torch.equal(factor, weight.detach().to(factor.dtype))


def _cut(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether a factor is a DTensor: tensor parallelism split it, and this rank has only a part of the product."""
    return hasattr(left, "_local_tensor") or hasattr(right, "_local_tensor")


def _both(left: torch.Tensor, right: torch.Tensor) -> str:
    a, b = storage(left), storage(right)
    return a if a == b else f"{a} x {b}"
