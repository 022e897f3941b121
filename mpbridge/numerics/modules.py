"""The front end for plain `torch.nn.Linear` modules of any model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mpbridge.common.errors import BadValue, Refused
from mpbridge.numerics.emulation import Emulation
from mpbridge.numerics.linear import EmulatedLinear
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve


def emulate(module: torch.nn.Module, recipe: str | Path | MixedPrecisionConfig, **options: Any) -> Emulation:
    """Runs the linears inside `module`'s layers under `recipe`, emulated: call `step_begin()` of the returned Emulation before each training step, and
    `detach()` to undo it.

    recipe: a name, a YAML file (such as one that `tune_module` wrote), or a config; its `modules:` name the module's own linears. options: those of
    Emulation. Raises Refused for a module without linears in its layers, BadValue for a rule that matches none of them.
    """
    policy = resolve(get_mixed_precision_config(recipe))
    refuse_without_linears(module)
    return emulate_linears(module, policy, **options)


def emulate_linears(module: torch.nn.Module, policy: PrecisionPolicy, **options: Any) -> Emulation:
    """Runs every `torch.nn.Linear` inside the layers of `module` under `policy`; `Emulation.detach` undoes it.

    A layer is a member of a `ModuleList` (the outermost one on the path); linears outside of all of them, such as an output head, stay in
    high precision. In a module without any `ModuleList` every linear counts as a layer. options: those of `Emulation`. Raises Refused for a
    module that is emulated already.
    """
    held = [name for name, child in module.named_modules() if isinstance(child, EmulatedLinear)]
    if held:
        what = f"{type(module).__name__} is emulated already ({len(held)} linears, as {held[0] or 'itself'})"
        raise Refused(f"{what}: first call detach() on the object that mpbridge.emulate returned")
    emulation = Emulation(policy, **options)
    for name, linear, below, layer, layers in _places(module):
        if type(linear) is torch.nn.Linear:
            emulation.add(linear, name, below, policy.gemms_at(below, layer, layers, name), layer, layers)
    emulation.freeze()
    emulation.dress()
    # a ModuleList has no forward: its members are called one by one
    for context in module if isinstance(module, torch.nn.ModuleList) else [module]:
        emulation.context_of(context)
    return emulation


def _places(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear, str, int, int]]:
    """(global name, linear, name below its layer, 0-based layer, layers) of the linears that a policy covers."""
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


def refuse_without_linears(module: torch.nn.Module) -> None:
    """Raises BadValue for anything but a module, Refused for a module without a linear in its layers."""
    if not isinstance(module, torch.nn.Module):
        raise BadValue(f"got a {type(module).__name__}, expected a torch.nn.Module")
    if any(True for _ in _places(module)):
        return
    kinds = sorted({type(child).__name__ for child in module.modules()} - {type(module).__name__})
    outside = [name for name, child in module.named_modules() if isinstance(child, torch.nn.Linear)]
    where = f" in its layers ({', '.join(outside)} lies outside of them and stays in high precision)" if outside else ""
    raise Refused(
        f"{type(module).__name__} has no torch.nn.Linear{where}, so nothing can be quantized (modules: {', '.join(kinds[:8]) or 'none'}): "
        "pass the model that contains them, or replace its own projection classes with torch.nn.Linear"
    )
