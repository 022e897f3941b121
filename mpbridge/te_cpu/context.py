"""`transformer_engine_on_cpu`: Transformer Engine's own Python on a machine without a GPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from os import PathLike
from typing import TYPE_CHECKING

import torch
import torch._dynamo

from mpbridge.backend.devices.mamba import mamba_on_cpu
from mpbridge.common.errors import Refused, UnknownName
from mpbridge.common.machines import Machine, machines
from mpbridge.common.machines import machine as machine_of
from mpbridge.common.probe import installed, playing
from mpbridge.common.transformer_engine import choose, played_versions
from mpbridge.common.upstream import replaced
from mpbridge.common.versions import release as numbers
from mpbridge.te_cpu import played as stage
from mpbridge.te_cpu.autocast import cuda_lists
from mpbridge.te_cpu.cuda_names import played_patches
from mpbridge.te_cpu.loading import environment, loaded

if TYPE_CHECKING:
    import types

    from mpbridge.settings.container import Run

_UNDER: list[str] = []
"""The Transformer Engine version under which megatron was first imported here; at import megatron decides whether it has one."""


@contextmanager
def transformer_engine_on_cpu(
    machine: str | Machine = "h100",
    *,
    te: str | None = None,
    where: Iterable[PathLike[str] | str] = (),
    beside_a_gpu: bool = False,
) -> Iterator[types.ModuleType]:
    """In the block, `transformer_engine`, `mamba_ssm` and `causal_conv1d` are importable and compute on the CPU, and torch's CUDA names answer for `machine`.

    machine: a name of the table (`mpbridge doctor --machines`), or a Machine. te: '2.11', '2.20.2'; None: the installed one.
    where: folders made by `pip install --target`, searched first (then MPBRIDGE_TE_PATH, then the import path).
    beside_a_gpu: play a machine although torch sees a real one.
    Enter it before megatron is imported. Megatron modules keep what they imported; everything else is restored, also after an
    exception. Raises Refused, UnknownName.
    """
    wanted = _machine(machine)
    if stage._now:
        yield _again(wanted, te)
        return
    if not beside_a_gpu and torch.cuda.is_available():
        raise Refused(
            f"this machine has a GPU ({torch.cuda.get_device_name()}): run Transformer Engine itself, or pass beside_a_gpu=True to play {wanted.name} on the CPU"
        )
    package = choose(te, where)
    _refuse_after_megatron(package.version)
    versions = played_versions(installed(), package)
    with ExitStack() as stack:
        played = stack.enter_context(stage.playing(wanted, package.release))
        talkers = ((logging.getLogger(name), "disabled", True) for name in _TALKERS)
        stack.enter_context(replaced(*played_patches(played), *talkers))
        stack.enter_context(cuda_lists())
        # on a CPU torch.compile takes seconds per function
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        stack.enter_context(environment())
        stack.enter_context(playing(wanted, versions))
        stack.enter_context(mamba_on_cpu())
        found = stack.enter_context(loaded(package))
        stack.callback(_note_megatron, package.version)
        yield found


def stage_of(run: Run) -> AbstractContextManager[types.ModuleType | None]:
    """The context that a run is trained in: `transformer_engine_on_cpu` if it asks for it, else a null context."""
    return nullcontext() if run.played is None else transformer_engine_on_cpu(run.played, te=run.te)


def _again(wanted: Machine, te: str | None) -> types.ModuleType:
    """The package that is already loaded; raises Refused if another machine or release is requested."""
    played = stage.now()
    asked = None if te is None else numbers(te)
    if played.machine != wanted or (asked is not None and played.release[: len(asked)] != asked):
        raise Refused(
            f"Transformer Engine {played.text} already plays {played.machine.name}, but {wanted.name} was requested with {te or 'any release'}: leave that context first"
        )
    return sys.modules["transformer_engine"]


def _machine(given: str | Machine) -> Machine:
    found = machine_of(given) if isinstance(given, str) else given
    if found.arch is None:
        raise UnknownName("GPU", found.name, [name for name, row in machines.items() if row.gpu])
    return found


def _megatron_is_imported() -> bool:
    return any(name.startswith("megatron.core") for name in sys.modules)


def _refuse_after_megatron(version: str) -> None:
    """Raises Refused if megatron has been imported without this Transformer Engine."""
    if not _megatron_is_imported():
        return
    if not _UNDER:
        raise Refused(
            "megatron is already imported, and at import it found no Transformer Engine: enter mpbridge.transformer_engine_on_cpu() first"
        )
    if _UNDER[0] != version:
        raise Refused(f"megatron was imported under Transformer Engine {_UNDER[0]}: {version} needs a separate process")


def _note_megatron(version: str) -> None:
    if not _UNDER and _megatron_is_imported():
        _UNDER.append(version)


_TALKERS = (
    # "CPU RNG state changed within GPU RNG context": both are the same generator
    "megatron.core.tensor_parallel.random",
    # install FlashAttention
    "DotProductAttention",
)
"""Loggers whose warnings always apply here."""
