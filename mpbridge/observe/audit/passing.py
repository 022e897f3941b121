"""What passes through a linear: its product reads the input that the module was given, and the module returns that product, plus its adapter's result.

And the gradients that autograd delivers to parameters.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch

from mpbridge.numerics.observation.tensors import positions, sample

_INPUT = "another input than its module was given"
_BESIDE = "another input than the linear beside it"
_RESULT = "returns something else than its product"


class Passing:
    """Compares samples of linears in high precision, whose products are whole on this rank and that add no bias."""

    def __init__(self) -> None:
        self.wrong: dict[str, str] = {}
        """Linear or adapter -> what is wrong with it."""
        self._given: dict[str, torch.Tensor] = {}
        self._read: dict[str, torch.Tensor] = {}
        """Linear -> what it was given, until its adapter reads it."""
        self._made: dict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        """Linear -> (elements, sample) of the products of its forward pass."""

    def enters(self, path: str, source: torch.Tensor) -> None:
        """Marks the start of a linear's forward pass."""
        self._made.pop(path, None)
        self._given.pop(path, None)
        if not _is_distributed(source):
            self._given[path] = _sample(source)

    def multiplies(self, path: str, left: torch.Tensor, out: torch.Tensor) -> None:
        """Records the product that its forward pass made of `left`."""
        self._made[path].append((out.numel(), _sample(out)))
        given = self._given.get(path)
        if given is not None and not _is(_sample(left), given):
            self.wrong.setdefault(path, f"reads {_INPUT}")

    def leaves(self, path: str, module: Any, given: torch.Tensor | None, result: torch.Tensor) -> None:
        """Marks the end of its forward pass, before its own hooks: those add an adapter's result."""
        if _is_distributed(result) or _is_distributed(given):
            self._given.pop(path, None)
            self._made.pop(path, None)
            return
        # where it returns the norm's result, the adapter reads that
        if given is not None and not getattr(module, "return_layernorm_output", False):
            self._read[path] = _sample(given)
        self._given.pop(path, None)
        made = self._made.pop(path, [])
        biased = getattr(module, "bias", None) is not None and not getattr(module, "skip_bias_add", False)
        if len(made) != 1 or made[0][0] != result.numel() or biased:
            return
        product, found = made[0][1], _sample(result)
        coarse = max(torch.finfo(one.dtype).eps for one in (product, found))
        room = coarse * product.double().abs() + torch.finfo(found.dtype).tiny
        if bool(((found.double() - product.double()).abs() > room).any()):
            self.wrong.setdefault(path, _RESULT)

    def adapts(self, path: str, source: torch.Tensor | None) -> None:
        """Marks the start of an adapter's forward pass, behind that of the linear that it belongs to."""
        read = self._read.pop(path.rpartition(".")[0], None)
        if read is not None and source is not None and not _is_distributed(source) and not _is(_sample(source), read):
            self.wrong.setdefault(path, f"reads {_BESIDE}")

    def follows(self, path: str, given: list[torch.Tensor], source: torch.Tensor) -> None:
        """Compares what an adapter's first linear reads with what the adapter was given."""
        whole = bool(given) and not _is_distributed(source) and not _is_distributed(given[0])
        if whole and not _is(_sample(source), _sample(given[0])):
            self.wrong.setdefault(path, f"reads {_BESIDE}")


def _is_distributed(tensor: torch.Tensor | None) -> bool:
    """Whether it is a DTensor, whose layout may change within the linear: the product is a rank's part of it."""
    return hasattr(tensor, "to_local")


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, in the tensor's own dtype."""
    return tensor.detach().reshape(-1)[positions(tensor.numel()).to(tensor.device)]


def _is(found: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether one sample is the other in its own dtype; a part of it, as ranks of a sequence have it, is not compared."""
    return found.shape != given.shape or torch.equal(found, given.to(found.dtype)) or bool(found.isnan().any())


class Arrivals:
    """Samples of the gradient that autograd delivers to each parameter in the observed step, summed over micro-batches."""

    def __init__(self) -> None:
        self.gradients: dict[str, dict[int, float]] = {}
        """Parameter -> position in it -> sum."""
        self._asked: dict[str, Any] = {}
        self._handles: list[Any] = []

    def ask(self, name: str, parameter: Any) -> None:
        """Starts recording this parameter's gradients; a later forward pass that reads the same tensor adds no second hook."""
        if not (parameter.requires_grad and torch.is_grad_enabled()) or self._asked.get(name) is parameter:
            return
        self._asked[name] = parameter
        self._handles.append(parameter.register_hook(partial(self._look, name, parameter.shape)))

    def _look(self, name: str, shape: torch.Size, gradient: torch.Tensor) -> None:
        if gradient.shape == shape and not gradient.is_sparse:
            found = self.gradients.setdefault(name, {})
            for where, value in sample(gradient, 0, gradient.numel()).items():
                found[where] = found.get(where, 0.0) + value

    def forget(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._asked.clear()
