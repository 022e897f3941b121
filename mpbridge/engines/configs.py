"""From a Run to megatron-core's config objects: sections joined, what a CPU needs filled in, what it cannot do refused, then built once."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpbridge.engines.model import GPT_ARGUMENTS
from mpbridge.errors import BadValue, Refused

if TYPE_CHECKING:
    from mpbridge.config.container import Run

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
    """The run's inputs with parallel sizes copied in, ddp and optimizer agreed with each other, and the device's defaults under the author's values.

    Raises Refused with every fault where this device cannot run them.
    """
    inputs = {name: dict(run.inputs[name]) for name in ("model", "optimizer", "ddp")}
    sizes = run.facts.parallel
    inputs["model"] |= {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        "sequence_parallel": sizes.sequence,
    }
    for field in ("use_distributed_optimizer", "overlap_param_gather"):
        _agree(inputs["ddp"], inputs["optimizer"], field)
    if not cuda:
        inputs["model"] = dict(CPU_DEFAULTS) | inputs["model"]
        _refuse_cuda_only(inputs)
    return inputs


def _agree(ddp: Section, optimizer: Section, field: str) -> None:
    """One fact that megatron-core asks for in two configs: either side may say it."""
    said = {section[field] for section in (ddp, optimizer) if section.get(field) is not None}
    if len(said) > 1:
        raise BadValue(
            f"ddp.{field} is {ddp[field]} and optimizer.{field} is {optimizer[field]}: they are one fact, expected equal; drop one"
        )
    ddp[field] = optimizer[field] = said.pop() if said else False


def _refuse_cuda_only(inputs: Mapping[str, Section]) -> None:
    faults = [
        f"{section}.{field}={inputs[section][field]!r} needs CUDA: drop it"
        for section, field, value in CUDA_ONLY
        if inputs[section].get(field) == value and inputs[section].get(field) is not None
    ]
    model = inputs["model"]
    if (model["virtual_pipeline_model_parallel_size"] or 1) > 1 and (
        model.get("batch_p2p_comm", True) or not model.get("overlap_p2p_comm")
    ):
        faults.append(
            "an interleaved pipeline (parallel.virtual_pipeline_model_parallel_size) with batched point-to-point messages diverges silently on gloo: "
            "set model.overlap_p2p_comm=true and model.batch_p2p_comm=false, or drop interleaving"
        )
    if model["context_parallel_size"] > 1:
        faults.append("parallel.context_parallel_size above 1 needs Transformer Engine's attention: set it to 1")
    if inputs["optimizer"].get("optimizer", "adam") == "sgd" and inputs["ddp"]["use_distributed_optimizer"]:
        faults.append(
            "optimizer.optimizer=sgd with the distributed optimizer: megatron-core's shards Adam only; set ddp.use_distributed_optimizer=false"
        )
    if faults:
        raise Refused("\n".join(["this run cannot go on a CPU with gloo:", *(f"  - {fault}" for fault in faults)]))


def build_targets(run: Run, *, cuda: bool) -> tuple[Any, dict[str, Any]]:
    """(megatron-core's configs as .model, .optimizer, .ddp; GPTModel's own arguments), the run's plan written into them."""
    inputs = sections(run, cuda=cuda)
    arguments = {key: value for key, value in inputs["model"].items() if key in GPT_ARGUMENTS}
    arguments |= {"vocab_size": run.facts.shape.vocab_size, "max_sequence_length": run.facts.shape.seq_length}
    latent = bool(inputs["model"].get("multi_latent_attention"))
    # MLA's config has rotary_base and rotary_percent as fields of its own
    own = GPT_ARGUMENTS - {"rotary_base", "rotary_percent"} if latent else GPT_ARGUMENTS
    inputs["model"] = {key: value for key, value in inputs["model"].items() if key not in own}
    return _construct(inputs, run.plan), arguments


ACTIVATIONS: Mapping[str, str] = types.MappingProxyType({"silu": "silu", "swiglu": "silu", "gelu": "gelu", "relu": "relu"})
"""Spellings of model.activation_func -> name in torch.nn.functional."""


def _construct(inputs: dict[str, Section], plan: Any) -> Any:
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    for write in plan or ():
        inputs[write.target][write.field] = write.after
    model = inputs["model"]
    if isinstance(model.get("activation_func"), str):
        model["activation_func"] = getattr(torch.nn.functional, ACTIVATIONS[model["activation_func"]])
    config = MLATransformerConfig if model.get("multi_latent_attention") else TransformerConfig
    return types.SimpleNamespace(
        model=config(**model), optimizer=OptimizerConfig(**inputs["optimizer"]), ddp=DistributedDataParallelConfig(**inputs["ddp"])
    )
