"""Rules about what the optimizer keeps, and who keeps it."""

from __future__ import annotations

from mpbridge.formats import DType, say
from mpbridge.hardware.versions import Window
from mpbridge.rules.quant import ARGUMENTS, CORE_016
from mpbridge.rules.table import Case, Rule

_CONFIG = "megatron-core 0.16.1 optimizer_config.py __post_init__"
_STATES = ("main_params", "main_grads", "exp_avg", "exp_avg_sq")


def _low_states(case: Case) -> list[str]:
    return [
        f"{name}={getattr(case.policy, name).short}"
        for name in _STATES
        if getattr(case.policy, name) not in (None, DType.FP32)
    ]


def _low_moments(case: Case) -> bool:
    return any(getattr(case.policy, name) is not DType.FP32 for name in ("main_params", "exp_avg", "exp_avg_sq"))


def _unread_states(case: Case) -> str | None:
    if case.aware or case.policy.main_params_owner == "params":
        return None
    low = _low_states(case)
    return f"{', '.join(low)} without a precision-aware optimizer" if low else None


def _section_states(case: Case) -> str | None:
    """Fields of the optimizer's section that megatron-core insists on being FP32 when the optimizer is not precision-aware."""
    if case.opt("use_precision_aware_optimizer", False) or case.run.engine == "fsdp2":
        return None
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    low = [
        f"{name}={say(case.opt(name))}" for name in names if say(case.opt(name, DType.FP32)) not in ("fp32", "float32")
    ]
    return f"optimizer.{', optimizer.'.join(low)} without use_precision_aware_optimizer" if low else None


def _no_fused_adam(case: Case) -> bool:
    machine = case.run.machine
    return machine is not None and machine.gpu and case.run.versions.transformer_engine is None


def _aware_fp8(case: Case) -> str | None:
    fp8 = case.policy.fp8
    if not (case.aware and case.core and fp8 is not None):
        return None
    if fp8.row.history:
        return (
            "a precision-aware optimizer with 16-bit moments over delayed scaling's stored weights"
            if fp8.stored and _low_moments(case)
            else None
        )
    return f"a precision-aware optimizer with {fp8.scaling} scaling"


def _pointless(case: Case) -> bool:
    fp8 = case.policy.fp8
    return case.core and case.aware and fp8 is not None and not fp8.row.history and not _low_moments(case)


def _unmet_by_overlapped_step(case: Case) -> list[str]:
    met = {
        "engine mcore": case.core,
        "the distributed optimizer": case.run.optimizer.distributed,
        "overlap_param_gather": case.ddp("overlap_param_gather", False),
        "virtual pipeline stages": (case.run.parallel.virtual_pipeline or 1) > 1,
    }
    return [name for name, holds in met.items() if not holds]


RULES: tuple[Rule, ...] = (
    Rule(
        id="precision-aware-needs-adam",
        about="aware",
        found=lambda c: (
            c.aware
            and c.run.optimizer.name not in ("adam", "torch_adamw")
            and f"optimizer={c.run.optimizer.name} with use_precision_aware_optimizer"
        ),
        expected="adam: FusedAdam alone keeps states in chosen dtypes",
        cure="optimizer.optimizer=adam, or mixed_precision.use_precision_aware_optimizer=false",
        source=_CONFIG,
    ),
    Rule(
        id="precision-aware-needs-distributed-optimizer",
        about="aware",
        found=lambda c: (
            c.aware and c.core and not c.run.optimizer.distributed and "use_precision_aware_optimizer with plain DDP"
        ),
        expected="a distributed optimizer",
        cure="ddp.use_distributed_optimizer=true",
        source=_CONFIG,
        holds=(CORE_016,),
    ),
    Rule(
        id="precision-aware-needs-fused-adam",
        about="aware",
        found=lambda c: (
            c.aware
            and _no_fused_adam(c)
            and not c.run.optimizer.cpu_offload
            and "use_precision_aware_optimizer on a GPU without Transformer Engine"
        ),
        expected="Transformer Engine's FusedAdam (on a CPU mpbridge brings a stand-in)",
        cure="install mpbridge[te]",
        source=_CONFIG,
    ),
    Rule(
        id="states-need-precision-aware",
        found=_unread_states,
        expected="FP32 states, or a precision-aware optimizer",
        cure="mixed_precision.use_precision_aware_optimizer=true",
        source=_CONFIG,
    ),
    Rule(
        id="optimizer-section-states-need-precision-aware",
        found=_section_states,
        expected="FP32 in all four fields",
        cure="optimizer.use_precision_aware_optimizer=true, or drop them",
        source=_CONFIG,
    ),
    Rule(
        id="precision-aware-with-fp8",
        about="fp8",
        found=_aware_fp8,
        expected="plain 16-bit or delayed scaling with FP32 moments: the others failed (illegal memory access, asserts) on several releases",
        cure="mixed_precision.use_precision_aware_optimizer=false",
        source="Megatron-Bridge#1707, ms-swift#8001, NVIDIA/cloudai#593",
        severity="warning",
        holds=(CORE_016,),
    ),
    Rule(
        id="precision-aware-does-nothing",
        about="fp8",
        found=lambda c: (
            _pointless(c)
            and f"use_precision_aware_optimizer with {c.policy.fp8.scaling if c.policy.fp8 else ''} scaling and FP32 states"
        ),
        expected="lower states: with this scaling megatron-core keeps FP32 main weights itself, so nothing is saved",
        cure="mixed_precision.use_precision_aware_optimizer=false, or bf16 moments",
        source=f"{_CONFIG}: use_precision_aware_optimizer_no_fp8_or_ds_fp8",
        severity="warning",
    ),
    Rule(
        id="fp8-recipe-leaks-into-the-optimizer",
        about="aware",
        found=lambda c: (
            c.aware
            and c.policy.fp8 is None
            and c.opt("fp8_recipe") not in (None, "delayed")
            and f"optimizer.fp8_recipe={c.opt('fp8_recipe')!r} with FP8 off"
        ),
        expected="none: it disarms the precision-aware optimizer (FP32 main weights come back)",
        cure="optimizer.fp8_recipe=null",
        source=f"{_CONFIG}; Megatron-Bridge#2764",
    ),
    Rule(
        id="main-gradients-that-nothing-reads",
        found=lambda c: (
            c.policy.main_grads not in (None, DType.FP32, c.policy.reduce)
            and c.policy.main_grads is not None
            and f"main_grads_dtype={c.policy.main_grads.short} with {c.policy.reduce.short} gradient buffers"
        ),
        expected="the dtype of the gradient buffers: megatron-core only validates the field and reads the buffers",
        cure="mixed_precision.grad_reduce_in_fp32=false, or drop main_grads_dtype",
        source="megatron-core 0.16.1: main_grads_dtype is read in optimizer_config.py only",
        severity="warning",
    ),
    Rule(
        id="remainders-need-newer-engine",
        about="aware",
        found=lambda c: (
            c.aware
            and c.policy.remainders
            and c.te_before("2.1")
            and f"store_param_remainders with Transformer Engine {c.run.versions.transformer_engine}"
        ),
        expected="2.1 or later: megatron-core switches them off before, two bytes a parameter more",
        cure="upgrade Transformer Engine, or mixed_precision.store_param_remainders=false",
        source=_CONFIG,
        severity="warning",
    ),
    Rule(
        id="duplicate-main-weights",
        about="fp32_storage",
        found=lambda c: (
            c.core  # the sharded engines leave the copy out
            and c.aware
            and c.policy.params is DType.FP32
            and c.policy.main_params is DType.FP32
            and "FP32 parameters under a FusedAdam with FP32 main weights"
        ),
        expected="one of them: the FP32 branch never reads the copy, four bytes a parameter for nothing",
        cure="mixed_precision.use_precision_aware_optimizer=false, or params_dtype=bf16",
        source="Transformer Engine 2.11 pytorch/optimizers/fused_adam.py; NeMo-RL#2865",
        severity="warning",
    ),
    Rule(
        id="moments-follow-16-bit-parameters",
        about="fsdp2",
        found=lambda c: (
            c.run.engine == "fsdp2"
            and c.run.optimizer.name == "torch_adamw"
            and c.policy.params is not DType.FP32
            and f"torch AdamW over {c.policy.params.short} parameters"
        ),
        expected="FP32 storage, or FusedAdam: torch keeps moments in the parameters' dtype and small updates round away",
        cure="recipe fp32_params_bf16_compute or bf16_params_fp32_states",
        source="NeMo AutoModel PR 2248; AReaL#1292",
        severity="warning",
    ),
    Rule(
        id="offload-needs-precision-aware",
        found=lambda c: (
            c.run.optimizer.cpu_offload
            and not c.aware
            and "optimizer_cpu_offload without use_precision_aware_optimizer"
        ),
        expected="both",
        cure="mixed_precision.use_precision_aware_optimizer=true",
        source=ARGUMENTS,
    ),
    Rule(
        id="offload-with-stored-weights",
        about="stored",
        found=lambda c: (
            c.run.optimizer.cpu_offload
            and any(not q.row.history for q in c.stored)
            and f"optimizer_cpu_offload with {c.stored[0].scaling} weights at rest"
        ),
        expected="delayed scaling, or 16-bit weights at rest",
        cure="mixed_precision.fp8_param_gather=false",
        source=f"{ARGUMENTS}; Megatron-LM#2788",
    ),
    Rule(
        id="distributed-optimizer-is-adam-only",
        found=lambda c: (
            c.core
            and c.run.optimizer.distributed
            and c.run.optimizer.name != "adam"
            and f"optimizer={c.run.optimizer.name} with the distributed optimizer"
        ),
        expected="adam",
        cure="ddp.use_distributed_optimizer=false, or optimizer.optimizer=adam",
        source="megatron-core 0.16.1 distrib_optimizer.py DistributedOptimizer.__init__",
    ),
    Rule(
        id="overlapped-gather-needs-distributed-optimizer",
        found=lambda c: (
            c.core
            and not c.run.optimizer.distributed
            and c.ddp("overlap_param_gather")
            and "overlap_param_gather with plain DDP"
        ),
        expected="a distributed optimizer: plain DDP gathers nothing",
        cure="ddp.use_distributed_optimizer=true, or ddp.overlap_param_gather=false",
        source="megatron-core 0.16.1 param_and_grad_buffer.py start_param_sync (a bare assertion)",
    ),
    Rule(
        id="overlapped-step-needs-interleaving",
        found=lambda c: (
            c.run.optimizer.overlap_param_gather_with_step
            and (lacks := _unmet_by_overlapped_step(c))
            and f"overlap_param_gather_with_optimizer_step without {', '.join(lacks)}"
        ),
        expected="all of them: the first model chunk's gather starts while the others are updated",
        cure="optimizer.overlap_param_gather_with_optimizer_step=false",
        source="megatron-core 0.16.1 optimizer.py ChainedOptimizer.step_with_ready_grads (attributes that plain optimizers lack); "
        + ARGUMENTS,
    ),
    Rule(
        id="muon-is-not-built",
        found=lambda c: c.run.optimizer.name == "muon" and "optimizer.optimizer=muon",
        expected="adam or sgd: 0.16 makes Muon apart from its other optimizers, and no engine here asks for it",
        cure="optimizer.optimizer=adam",
        source="megatron-core 0.16.1 optimizer/muon.py; mpbridge/engines/mcore.py, shard_optimizer.py",
    ),
    Rule(
        id="torch-adamw-cannot-keep-states",
        about="fsdp2",
        found=lambda c: (
            c.run.optimizer.settings.get("optimizer") == "torch_adamw"
            and (
                f"optimizer.optimizer=torch_adamw on engine {c.run.engine}"
                if c.run.engine != "fsdp2"
                else not c.policy.torch_adam_suffices
                and f"torch's AdamW under a recipe whose states are not {c.policy.params.short}, as its parameters"
            )
        ),
        expected="engine=fsdp2 and states in the parameters' dtype: that is all torch's AdamW can hold",
        cure="optimizer.optimizer=adam (FusedAdam where states need it), or recipe fp32_params_bf16_compute on engine=fsdp2",
        source="torch.optim.AdamW; NeMo AutoModel PR 2248",
    ),
    Rule(
        id="fsdp2-sgd-keeps-no-main-weights",
        about="fsdp2",
        found=lambda c: (
            c.run.engine == "fsdp2"
            and c.run.optimizer.name == "sgd"
            and {c.policy.main_params or DType.FP32, c.policy.exp_avg or DType.FP32} != {c.policy.params}
            and f"optimizer=sgd on {c.policy.params.short} parameters under a recipe whose main weights or momentum are not"
        ),
        expected="storage in the dtype of both: torch's SGD updates the parameters themselves, its momentum has their dtype",
        cure="mixed_precision.params_dtype=fp32 (recipe fp32_params_bf16_compute), optimizer.optimizer=adam, or engine=mcore",
        source="torch.optim.SGD; mpbridge/engines/shard_optimizer.py",
    ),
    Rule(
        id="megatron-fsdp-optimizers",
        about="megatron_fsdp",
        found=lambda c: (
            c.run.engine == "megatron_fsdp"
            and c.run.optimizer.name not in ("adam", "sgd")
            and f"optimizer={c.run.optimizer.name} on Megatron-FSDP"
        ),
        expected="adam or sgd",
        cure="optimizer.optimizer=adam",
        source=ARGUMENTS,
    ),
    Rule(
        id="megatron-fsdp-main-weights",
        about="megatron_fsdp",
        found=lambda c: (
            c.run.engine == "megatron_fsdp"
            and c.policy.main_params not in (None, DType.FP32, c.policy.params)
            and f"main_params_dtype={say(c.policy.main_params)} on Megatron-FSDP"
        ),
        expected="fp32, or the parameters' own dtype: 0.16 knows preserve_fp32_weights, a switch",
        cure="mixed_precision.main_params_dtype=fp32",
        source="megatron-core 0.16.1 distributed_data_parallel_config.py",
        holds=(CORE_016,),
    ),
    Rule(
        id="muon-under-mxfp8",
        about="mxfp8",
        found=lambda c: c.run.optimizer.name == "muon" and "mxfp8" in c.scalings and "muon with MXFP8",
        expected="adam: the updates did not reach the forward pass (a flat loss)",
        cure="optimizer.optimizer=adam, or another recipe",
        source="Megatron-LM#4987, #5707, #6754",
    ),
    Rule(
        id="moments-with-custom-scale-need-newer-engine",
        about="aware",
        found=lambda c: (
            c.aware and DType.UINT8 in (c.policy.exp_avg, c.policy.exp_avg_sq) and c.te_before("2.0") and "FP8 moments"
        ),
        expected="Transformer Engine 2.0 or later",
        cure="upgrade Transformer Engine, or bf16 moments",
        source="Transformer Engine pytorch/optimizers/fused_adam.py",
        holds=(Window(package="transformer_engine", until="2.0"),),
    ),
)
