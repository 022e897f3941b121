"""Rules about how parameters are trained: by Muon, which orthogonalizes the updates of matrices by Newton-Schulz iterations, or by SOAP and Lion, which share
a model with Adam as it does; or not at all, and low-rank adapters beside those."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mpbridge.common.facts import BESIDE_ADAM, EMERGING, MUONS, OWN_SETTINGS, reads
from mpbridge.common.formats import DType, say
from mpbridge.common.traits import DEFAULT
from mpbridge.planning.memory.keeps import is_frozen
from mpbridge.planning.memory.layers import model_names
from mpbridge.planning.rules.base import PLAIN_WEIGHTS, Case, Rule, faults, row, warning
from mpbridge.precision.globs import ADAPTERS, is_adapter
from mpbridge.precision.megatron_spec.schema import records
from mpbridge.precision.megatron_spec.versions import BEFORE_018
from mpbridge.precision.scalings.row import needs_transpose

NEWTON_SCHULZ = {"medium": "BF16", "high": "TF32 on a GPU", "highest": "FP32"}
"""Value of muon_fp32_matmul_prec -> in what Muon's Newton-Schulz iteration multiplies its FP32 matrices."""

WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "muon_scale_mode": ("spectral", "shape_scaling", "unit_rms_norm"), "muon_tp_mode": ("blockwise", "duplicated", "distributed"),
    "muon_scalar_optimizer": ("adam", "lion"),
})  # fmt: skip
"""Setting of Muon's -> the words for which megatron-core has a meaning."""


def _muon(case: Case, *names: str) -> bool:
    """Whether one of these, or any of megatron-core's optimizers that share a model with Adam, would train the run."""
    return case.core and case.run.optimizer.name in (names or BESIDE_ADAM)


def _muon_cannot(case: Case) -> str:
    """What megatron-core refuses beside Muon and its like with a bare exception or assertion."""
    return faults(
        f"{case.run.optimizer.name} with ",
        ("FP16 parameters", case.policy.params is DType.FP16),
        ("the distributed optimizer", case.run.optimizer.distributed),
        ("16-bit parameters as their own main weights", case.policy.narrow_alone),
    )


def _impossible(case: Case) -> str:
    """Settings of Muon's own that its code knows no meaning for."""
    words = {name: case.opt(name, known[0]) for name, known in WORDS.items()} | {"muon_tp_mode": _mode(case)}
    steps, momentum = case.opt("muon_num_ns_steps", 5), case.opt("muon_momentum", 0.95)
    extra = case.opt("muon_extra_scale_factor", 1.0)
    odd = [(f"{name}={say(words[name])} ({', '.join(WORDS[name])})", words[name] not in WORDS[name]) for name in WORDS]
    return faults(
        "",
        *odd,
        (f"muon_num_ns_steps={steps} (1 or more)", steps < 1),
        (f"muon_momentum={momentum} (0 to below 1)", not 0 <= momentum < 1),
        (f"muon_extra_scale_factor={say(extra)} (above 0)", not extra > 0),
    )


def _mode(case: Case) -> str:
    """muon_tp_mode; where it is the installed release's default, that of the release that is asked about."""
    there = records("optimizer", version=case.run.versions.megatron_core)["muon_tp_mode"]["default"]
    own = _own("muon_tp_mode")
    said = case.opt("muon_tp_mode", own)
    return str(there if said == own else said)


def _unread(case: Case) -> str:
    """Settings of another optimizer that are not at their defaults, and so were given."""
    name, section = case.run.optimizer.name, case.run.optimizer.settings
    usual = records("optimizer", version=case.run.versions.megatron_core)
    given = [one for one in section if one.startswith(OWN_SETTINGS) and not reads(name, one, section)]
    odd = [one for one in given if one in usual and section[one] not in (usual[one]["default"], _own(one))]
    return f"optimizer={name} with {', '.join(f'{one}={say(section[one])}' for one in odd)}" if odd else ""


def _own(name: str) -> Any:
    """The default of a setting in the installed megatron-core, which a run that says nothing has."""
    return records("optimizer").get(name, {}).get("default")


def _apart_in_a_gather(case: Case) -> str:
    low = [f"stored {quant.scaling} weights" for quant in case.stored if not quant.row.history][:1]
    found = [*low, *(["keep_fp32"] if case.policy.keep_fp32 else [])]
    return f"dist_muon with {' and '.join(found)}" if found else ""


_MUON: tuple[Rule, ...] = (
    row("muon-under-mxfp8", "{c.run.optimizer.name} with MXFP8",
        "adam: the updates did not reach the forward pass (a flat loss)",
        "optimizer.optimizer=adam, or another recipe", "Megatron-LM#4987, #5707, #6754",
        about="mxfp8", when=lambda c: _muon(c) and "mxfp8" in c.scalings),
    row("muon-cannot", _muon_cannot,
        "BF16 or FP32 parameters with FP32 main weights, and a Muon without the distributed optimizer (dist_muon shards by itself)",
        "a bf16 recipe with ddp.use_distributed_optimizer=false (optimizer.optimizer=dist_muon divides Muon's states), or optimizer.optimizer=adam",
        "megatron-core 0.16.1 optimizer/muon.py get_megatron_muon_optimizer",
        when=_muon),
    row("muon-gathers-one-dtype", _apart_in_a_gather,
        "parameters of one dtype: dist_muon gathers each rank's updated parameters in one buffer",
        f"optimizer.optimizer=muon, or {PLAIN_WEIGHTS} and no keep_fp32",
        "megatron-core 0.16.1 optimizer/layer_wise_optimizer.py; stored MXFP8 on two ranks failed in the gather",
        when=lambda c: _muon(c, "dist_muon")),
    row("newton-schulz-precision-unknown", lambda c: f"muon_fp32_matmul_prec={say(c.opt('muon_fp32_matmul_prec'))}",
        ", ".join(f"{word} ({kind})" for word, kind in NEWTON_SCHULZ.items()) + ": torch knows no other word, warns, and multiplies in FP32 (megatron-core offers 'low')",
        "optimizer.muon_fp32_matmul_prec=medium, or high, or highest",
        "torch.set_float32_matmul_precision; Megatron-LM training/arguments.py --muon-fp32-matmul-prec (0.16.1 and d98e8a64)",
        when=lambda c: c.run.optimizer.name in MUONS and c.opt("muon_fp32_matmul_prec", "medium") not in NEWTON_SCHULZ),
    row("muon-settings-unknown", _impossible,
        "what stands in parentheses: megatron-core raises for other words and steps in its first update, and a momentum of 1 or more never forgets a gradient",
        "optimizer.muon_scale_mode=spectral optimizer.muon_tp_mode=duplicated optimizer.muon_num_ns_steps=5 optimizer.muon_momentum=0.95",
        "Emerging-Optimizers v0.1.0 orthogonalized_optimizers/muon.py; megatron-core 0.16.1 optimizer/muon.py",
        when=lambda c: c.run.optimizer.name in MUONS),
    warning("weight-decay-of-two-kinds", "decoupled_weight_decay=false with {c.run.optimizer.name}",
        "true: only the Adam beside it reads it; hidden matrices decay decoupled from their gradients regardless",
        "optimizer.decoupled_weight_decay=true, or optimizer.optimizer=adam",
        "megatron-core 0.16.1 optimizer/muon.py muon_kwargs, 0.20 optimizer/emerging_optimizers.py: use_decoupled_weight_decay is not passed; torch 2.13 optim/_muon.py",
        when=lambda c: c.run.optimizer.name in BESIDE_ADAM and not c.opt("decoupled_weight_decay", True) and c.opt("weight_decay", 0.01)),
    warning("muon-from-stored-weights", lambda c: f"{c.run.optimizer.name} with stored {c.stored[0].scaling} weights",
        "weights stored in 16 bits: main weights start from dequantized ones, since only the distributed optimizer asks for the initial values in high precision",
        PLAIN_WEIGHTS, "megatron-core 0.16.1 optimizer.py Float16OptimizerWithFloat16Params, distrib_optimizer.py get_high_precision_init_val",
        about="stored", when=lambda c: _muon(c) and c.stored),
    warning("muon-by-tensor-parallel-blocks", "muon_tp_mode=blockwise with {c.run.parallel.tensor} tensor-parallel ranks",
        "a mode that orthogonalizes whole matrices: each rank's block by itself gives updates that depend on the number of ranks",
        "optimizer.muon_tp_mode=duplicated, or distributed", "megatron-core 0.16.1 optimizer/muon.py TensorParallelMuon",
        when=lambda c: _muon(c, *MUONS) and c.run.parallel.tensor > 1 and _mode(c) == "blockwise"),
    warning("soap-by-tensor-parallel-blocks", "soap with {c.run.parallel.tensor} tensor-parallel ranks",
        "whole matrices: each rank has factors of its own block, so updates and checkpoints depend on the number of ranks",
        "parallel.tensor_model_parallel_size=1, or optimizer.optimizer=muon with optimizer.muon_tp_mode=duplicated",
        "Emerging-Optimizers 0.3.0 soap/soap.py; megatron-core 0.20 optimizer/emerging_optimizers.py",
        when=lambda c: _muon(c, "soap") and c.run.parallel.tensor > 1),
    row("optimizer-newer-than-megatron-core", "optimizer={c.run.optimizer.name} with megatron-core {c.run.versions.megatron_core}",
        "megatron-core 0.18 or later, which has it by Emerging-Optimizers",
        "install megatron-core 0.18 or later and 'emerging-optimizers>=0.2' (Python 3.12 or later), or optimizer.optimizer=adam",
        "megatron-core 0.18 and 0.20 optimizer/emerging_optimizers.py; 0.17.1 has none",
        when=lambda c: _muon(c, *EMERGING) and c.run.versions.megatron_core, holds=(BEFORE_018,)),
    warning("optimizer-settings-unread", _unread,
        "the settings that this optimizer reads: muon_* are Muon's, soap_* SOAP's, sgd_momentum SGD's; lion_beta1 and lion_beta2 are read for the Lion beside "
        "Muon (muon_scalar_optimizer=lion), while optimizer=lion gets Adam's betas",
        "drop them, or the optimizer that reads them (for optimizer=lion: optimizer.adam_beta1 and optimizer.adam_beta2)",
        "megatron-core 0.16.1 optimizer/__init__.py and muon.py, 0.20 optimizer/emerging_optimizers.py; torch.optim"),
)  # fmt: skip


def _names(case: Case) -> tuple[str, ...]:
    return model_names(case.run) if case.policy.frozen or case.run.shape.lora_rank else ()


def _nothing_trains(case: Case) -> bool:
    lost = case.run.shape.lora_rank and not any(map(is_adapter, _names(case)))  # which has a rule of its own
    return bool(case.policy.frozen) and not lost and all(is_frozen(case.policy, name) for name in _names(case))


def _unfollowed(case: Case) -> str:
    shape, ranks = case.run.shape, case.run.parallel.tensor
    adapters = [name for name in _names(case) if is_adapter(name)]
    return faults(
        f"model.lora_rank={shape.lora_rank} with ",
        (f"lora_targets {', '.join(map(repr, shape.lora_targets))} match no linear", not adapters),
        (f"{ranks} tensor-parallel ranks", ranks > 1),
        ("multi-token prediction", shape.mtp_layers),
        ("adapters of experts", any(".experts." in name for name in adapters)),
    )


def _twice_on_hopper(case: Case) -> str:
    copied = [quant for quant in case.stored if not quant.row.stored.both_copies]
    if not (case.run.machine and copied and case.policy.frozen and case.arch > (0, 0) and needs_transpose(case.arch)):
        return ""
    return f"a frozen base in stored {copied[0].scaling} weights on {case.run.machine.name}"


_TIED = ("embedding.word_embeddings.weight", "output_layer.weight")

RULES: tuple[Rule, ...] = (
    *_MUON,
    row("nothing-is-trained", lambda c: f"frozen {', '.join(map(repr, c.policy.frozen))} covers every parameter",
        "parameters that train: other globs, or adapters, which 'frozen' never covers",
        "model.lora_rank=8, or narrower globs in mixed_precision.frozen", "mpbridge/planning/memory/keeps.py is_frozen",
        when=_nothing_trains),
    row("adapters-do-not-follow", _unfollowed,
        "targets among the linears of attention, MLPs and Mamba layers, on one tensor-parallel rank",
        "data or pipeline parallelism (parallel.tensor_model_parallel_size=1), or other model.lora_targets", "mpbridge/backend/models/adapters.py",
        when=lambda c: c.run.shape.lora_rank),
    row("adapters-dtype-without-adapters", "lora_dtype=fp32 on a model without adapters",
        "adapters, whose dtype it is",
        "model.lora_rank=8, or mixed_precision.lora_dtype=null", "mpbridge/precision/globs.py ADAPTERS",
        when=lambda c: set(ADAPTERS) & set(c.policy.keep_fp32) and not c.run.shape.lora_rank),
    row("frozen-tied-embedding-on-two-stages",
        lambda c: f"frozen {', '.join(map(repr, c.policy.frozen))} covers one of {' and '.join(_TIED)}, tied across pipeline stages",
        "both or neither: megatron-core adds up the gradients of both, and a stage waits forever for one that has none",
        "model.share_embeddings_and_output_weights=false, parallel.pipeline_model_parallel_size=1, or frozen globs that leave the embedding out",
        "megatron-core 0.16.1 distributed/finalize_model_grads.py _allreduce_embedding_grad",
        when=lambda c: c.run.shape.tied and c.run.parallel.pipeline > 1 and len({is_frozen(c.policy, one) for one in _TIED}) > 1),
    row("frozen-on-one-engine", lambda c: f"{'frozen parameters' if c.policy.frozen else 'adapters'} on {c.traits.full_name}",
        f"engine={DEFAULT}: the others were not tried with parameters that do not train",
        f"engine={DEFAULT}", "mpbridge/backend/models/adapters.py",
        when=lambda c: (c.policy.frozen or c.run.shape.lora_rank) and c.run.engine != DEFAULT),
    warning("fp32-parameters-in-a-reused-buffer", "FP32 parameters beside MXFP8 weights that are gathered through the gradient buffer",
        "parameters of 16 bits in other people's scripts: megatron-core stages only those with main weights of their own, and gathers zeros into FP32 ones. mpbridge's engine stages all",
        f"mixed_precision.lora_dtype=null and no keep_fp32, or {PLAIN_WEIGHTS}",
        "megatron-core 0.16.1 and 0.20 optimizer/distrib_optimizer.py _copy_main_params_to_param_buffer",
        about="stored", when=lambda c: c.core and c.policy.reuse_grad_buffer and c.policy.keep_fp32, emulated="silent"),
    warning("adapters-beside-a-trained-base", "model.lora_rank={c.run.shape.lora_rank}, and every weight trains too",
        "a frozen base: adapters save the gradients, main weights and moments of what does not train",
        "mixed_precision.frozen=['*']", "arXiv 2106.09685",
        when=lambda c: c.run.shape.lora_rank and not any(is_frozen(c.policy, name) for name in _names(c))),
    warning("stored-base-is-kept-twice", _twice_on_hopper,
        "1 byte per frozen parameter: before Blackwell the transposed copy for dgrad is kept too, and BF16 takes no more",
        f"{PLAIN_WEIGHTS}, or a Blackwell GPU", "Transformer Engine pytorch/tensor/float8_tensor.py; mpbridge/planning/memory/roles.py",
        about="stored", emulated="silent"),
)  # fmt: skip
