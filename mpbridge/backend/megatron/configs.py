"""Builds megatron-core's config objects from a Run: fills in what a CPU needs, then constructs them once."""

from __future__ import annotations

import logging
import os
import shutil
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpbridge.backend.megatron.targets import Targets, build
from mpbridge.common.machines import machine
from mpbridge.common.probe import installed, this_machine

if TYPE_CHECKING:
    from mpbridge.settings.container import Run

log = logging.getLogger("mpbridge")


CPU_DEFAULTS: Mapping[str, Any] = types.MappingProxyType(
    {
        # its kernel needs CUDA; megatron-core's own default is True
        "masked_softmax_fusion": False,
        # the full weight is drawn and then sliced, so that initialisation does not depend on tensor parallelism
        "use_cpu_initialization": True,
    }
)
"""Model fields that a CPU run sets if the author has not."""

COMPILED = ("bias_dropout_fusion", "bias_activation_fusion", "cross_entropy_loss_fusion")
"""Model fields that use torch.compile, which needs a C++ compiler on a CPU."""


def sections(run: Run, *, cuda: bool) -> dict[str, dict[str, Any]]:
    """The run's inputs; on a CPU with the CPU defaults below the author's values."""
    inputs = {name: dict(run.inputs[name]) for name in ("model", "optimizer", "ddp")}
    if not cuda:
        inputs["model"] = dict(CPU_DEFAULTS) | inputs["model"]
        _drop_compiled(inputs["model"])
    return inputs


def _drop_compiled(model: dict[str, Any]) -> None:
    """Switches fusions off if there is no compiler for them. On a CPU they save too little to justify a refusal: 343 against 344 ms per step of gpt_tiny."""
    wanted = [field for field in COMPILED if model.get(field)]
    if wanted and not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        log.warning(
            "no C++ compiler (g++, clang++ or $CXX) for torch.compile: model.%s left off", ", model.".join(wanted)
        )
        model.update(dict.fromkeys(wanted, False))


def build_targets(run: Run, *, cuda: bool, inputs: Mapping[str, dict[str, Any]] | None = None) -> Targets:
    """megatron-core's configs and GPTModel's own arguments, with the run's plan written into them once.

    inputs: what to build from; None: `sections`. Raises Refused if this machine would run the recipe as something else: a run may
    have been resolved for another machine.
    """
    here = this_machine() if cuda else machine("cpu")
    return build(sections(run, cuda=cuda) if inputs is None else inputs, run.plan, machine=here, versions=installed())
