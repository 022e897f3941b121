"""From a Run to megatron-core's config objects: what a CPU needs is filled in, what it cannot do is refused, then they are built once."""

from __future__ import annotations

import logging
import os
import shutil
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpbridge.checks.machines import machine
from mpbridge.checks.probe import installed, this_machine
from mpbridge.engines.targets import Targets, build
from mpbridge.errors import Refused

if TYPE_CHECKING:
    from mpbridge.config.container import Run

log = logging.getLogger("mpbridge")

Section = dict[str, Any]

CPU_DEFAULTS: Mapping[str, Any] = types.MappingProxyType(
    {
        # its kernel is CUDA's; megatron-core's own default is True
        "masked_softmax_fusion": False,
        # the full weight is drawn and then sliced, so that the start does not depend on tensor parallelism
        "use_cpu_initialization": True,
    }
)
"""Model fields that a CPU run sets where the author has not."""

COMPILED = ("bias_dropout_fusion", "bias_activation_fusion", "cross_entropy_loss_fusion")
"""Model fields that run through torch.compile, which wants a C++ compiler on a CPU."""

CUDA_ONLY: tuple[tuple[str, str, Any], ...] = (
    ("model", "masked_softmax_fusion", True),
    ("model", "gradient_accumulation_fusion", True),
    ("model", "persist_layer_norm", True),
    ("model", "memory_efficient_layer_norm", True),
    ("model", "layernorm_zero_centered_gamma", True),
    ("model", "apply_rope_fusion", True),
    ("model", "moe_grouped_gemm", True),
    ("model", "moe_permute_fusion", True),
    ("model", "moe_router_fusion", True),
    ("model", "tp_comm_overlap", True),
    ("model", "cpu_offloading", True),
    ("model", "enable_cuda_graph", True),
    ("model", "external_cuda_graph", True),
    ("model", "transformer_impl", "inference_optimized"),
    ("optimizer", "optimizer_cpu_offload", True),
    ("ddp", "nccl_ub", True),
)
"""(section, field, value): needs a CUDA kernel, stream or communicator."""


def sections(run: Run, *, cuda: bool) -> dict[str, Section]:
    """The run's inputs; on a CPU with its defaults under the author's values. Raises Refused with every reason why a CPU cannot run them."""
    inputs = {name: dict(run.inputs[name]) for name in ("model", "optimizer", "ddp")}
    if not cuda:
        inputs["model"] = dict(CPU_DEFAULTS) | inputs["model"]
        _drop_compiled(inputs["model"])
        _refuse_cuda_only(inputs)
    return inputs


def _drop_compiled(model: Section) -> None:
    """Switches fusions off where nothing can compile them. On a CPU they save nothing worth a refusal: 343 against 344 ms a step of gpt_tiny."""
    wanted = [field for field in COMPILED if model.get(field)]
    if wanted and not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        log.warning("no C++ compiler (g++, clang++ or $CXX) for torch.compile: model.%s left off", ", model.".join(wanted))
        model.update(dict.fromkeys(wanted, False))


def _refuse_cuda_only(inputs: Mapping[str, Section]) -> None:
    faults = [
        f"{section}.{field}={inputs[section][field]!r} needs CUDA: drop it"
        for section, field, value in CUDA_ONLY
        if inputs[section].get(field) == value and inputs[section].get(field) is not None
    ]
    model = inputs["model"]
    if (model.get("virtual_pipeline_model_parallel_size") or 1) > 1 and (
        model.get("batch_p2p_comm", True) or not model.get("overlap_p2p_comm")
    ):
        faults.append(
            "an interleaved pipeline (parallel.virtual_pipeline_model_parallel_size) with batched point-to-point messages diverges silently on gloo: "
            "set model.overlap_p2p_comm=true and model.batch_p2p_comm=false, or drop interleaving"
        )
    if (model.get("context_parallel_size") or 1) > 1:
        faults.append("parallel.context_parallel_size above 1 needs Transformer Engine's attention: set it to 1")
    if model.get("multi_latent_attention") and model.get("attention_softmax_in_fp32") is False:
        faults.append(
            "model.attention_softmax_in_fp32=false with latent attention: megatron-core's local attention cannot do MLA; leave the softmax in FP32"
        )
    if inputs["optimizer"].get("optimizer", "adam") == "sgd" and inputs["ddp"].get("use_distributed_optimizer"):
        faults.append(
            "optimizer.optimizer=sgd with the distributed optimizer: megatron-core's shards Adam only; set ddp.use_distributed_optimizer=false"
        )
    if faults:
        raise Refused("\n".join(["this run cannot go on a CPU with gloo:", *(f"  - {fault}" for fault in faults)]))


def build_targets(run: Run, *, cuda: bool, inputs: Mapping[str, Section] | None = None) -> Targets:
    """megatron-core's configs and GPTModel's own arguments, the run's plan written into them once.

    inputs: what to build from; None: `sections`. Raises Refused when what computes here would run the recipe as something else: a run may
    have been resolved for another machine.
    """
    here = this_machine() if cuda else machine("cpu")
    return build(sections(run, cuda=cuda) if inputs is None else inputs, run.plan, machine=here, versions=installed())
