"""What a linear layer does under emulation, and the front end for plain `torch.nn.Linear` modules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from mpbridge.emulation.gemm import Plug, QuantizedLinear, check_shapes

if TYPE_CHECKING:
    from mpbridge.emulation.emulation import Emulation
    from mpbridge.precision.policy import PrecisionPolicy, Quant


def apply(
    plug: Plug,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    expert: bool = False,
    recompute: bool = False,
) -> torch.Tensor:
    """x Wt + b through quantized GEMMs; x: [..., in features]. Raises BadValue for sizes that Transformer Engine refuses.

    expert: token counts vary, so they are padded with zeros as megatron-core does; recompute: this forward pass may be run again in
    backward.
    """
    emulation: Emulation = plug.emulation
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    if emulation.is_paused or x.numel() == 0:
        # an expert without tokens: Transformer Engine's GEMMs see nothing, its amaxes stay 0
        return F.linear(x, weight.to(x.dtype), bias)
    tokens = x.numel() // x.shape[-1]
    filled = x
    if expert:
        missing = -tokens % math.lcm(*(quant.row.sizes.expert for quant in plug.gemms.distinct))
        filled = F.pad(x.reshape(tokens, -1), (0, 0, 0, missing))
    for quant in plug.gemms.distinct:
        check_shapes(plug.slot, quant.row, filled.numel() // filled.shape[-1], weight.shape)
    wanted = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    first, replay = _run(plug, recompute, wanted)
    y: torch.Tensor = QuantizedLinear.apply(filled, weight, bias, plug, first, replay)  # type: ignore[no-untyped-call]
    return y[:tokens].view(*x.shape[:-1], -1) if expert else y


def _run(plug: Plug, recompute: bool, wanted: bool) -> tuple[bool, bool]:
    """(this run opened its context, this run repeats an earlier one). wanted: a backward pass will come through here."""
    grad = torch.is_grad_enabled()
    if grad and plug.waiting:
        return plug.waiting.popleft(), True
    # without gradients nothing looks wanted, though a recomputation may follow
    first = plug.emulation.opens() if (wanted if grad else recompute) else False
    if recompute and not grad:
        plug.waiting.append(first)
        plug.quantizer.stash(plug.slot)
    return first, False


class EmulatedLinear(torch.nn.Linear):
    """A `torch.nn.Linear` whose forward goes through a plug; same parameters, same state dict."""

    plug: Plug

    @property
    def quant(self) -> Quant:
        """The rule that this linear's GEMMs run under."""
        return self.plug.quantizer.quant

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input Wt + b with quantized operands."""
        return apply(self.plug, input, self.weight, self.bias)


def emulate_linears(module: torch.nn.Module, policy: PrecisionPolicy, **options: Any) -> Emulation:
    """Makes every `torch.nn.Linear` inside the layers of `module` run under `policy`; `Emulation.detach` undoes it.

    A layer is a member of a `ModuleList` (the outermost one on the path); linears outside of all of them, such as an output head, stay in
    high precision. In a module without any `ModuleList` every linear is a layer of its own. options: those of `Emulation`.
    """
    from mpbridge.emulation.emulation import Emulation

    emulation = Emulation(policy, **options)
    places = list(_places(module))
    found = [
        (name, linear, below, layer, layers)
        for name, linear, below, layer, layers in places
        if type(linear) is torch.nn.Linear
    ]
    for name, linear, below, layer, layers in found:
        emulation.add(linear, name, below, policy.gemms_at(below, layer, layers, name), layer, layers)
    emulation.freeze()
    emulation.dress()
    # containers without a forward of their own are called member by member
    for context in module if isinstance(module, torch.nn.ModuleList) else [module]:
        emulation.context_of(context)
    return emulation


def _places(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear, str, int, int]]:
    """(global name, linear, name below its layer, 0-based layer, layers) of the linears that a policy speaks about."""
    named = dict(module.named_modules())
    linears = [(name, child) for name, child in named.items() if isinstance(child, torch.nn.Linear)]
    lists = [name for name, child in named.items() if isinstance(child, torch.nn.ModuleList)]
    if not lists:
        yield from ((name, linear, name, i, len(linears)) for i, (name, linear) in enumerate(linears))
        return
    for name, linear in linears:
        # the list may be the module itself, whose name is empty
        owner = next((path for path in lists if not path or name.startswith(f"{path}.")), None)
        if owner is not None:
            number, _, below = name[len(owner) + 1 if owner else 0 :].partition(".")
            yield name, linear, below or number, int(number), len(named[owner])
