"""The front end for plain `torch.nn.Linear` modules of any model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mpbridge.emulation.emulation import Emulation
from mpbridge.precision.policy import PrecisionPolicy


def emulate_linears(module: torch.nn.Module, policy: PrecisionPolicy, **options: Any) -> Emulation:
    """Makes every `torch.nn.Linear` inside the layers of `module` run under `policy`; `Emulation.detach` undoes it.

    A layer is a member of a `ModuleList` (the outermost one on the path); linears outside of all of them, such as an output head, stay in
    high precision. In a module without any `ModuleList` every linear is a layer of its own. options: those of `Emulation`.
    """
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
