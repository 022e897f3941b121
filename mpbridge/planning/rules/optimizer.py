"""Rules about which states are kept, in which dtype, and who keeps them."""

from __future__ import annotations

from mpbridge.common.facts import ADAMS, BESIDE_ADAM, MUONS
from mpbridge.common.formats import DType, say
from mpbridge.common.shipped import install
from mpbridge.common.versions import Window
from mpbridge.planning.memory.keeps import fused, moments, resident
from mpbridge.planning.rules.base import ARGUMENTS, PLAIN_WEIGHTS, Case, Rule, faults, row, warning
from mpbridge.precision.config import FUSED

_CONFIG = "megatron-core 0.16.1 optimizer_config.py __post_init__"
_HYBRID = "megatron-core 0.16.1 and d98e8a64: optimizer/__init__.py, cpu_offloading/hybrid_optimizer.py"
_ON_THE_GPU = "optimizer.optimizer_cpu_offload=false"
_AWARE_OFFLOAD = "mixed_precision.use_precision_aware_optimizer=true mixed_precision.store_param_remainders=false"


def _low_moments(case: Case) -> bool:
    return any(getattr(case.policy, name) not in (None, DType.FP32) for name in FUSED.values())


def _unread_states(case: Case) -> str | None:
    """States whose configured dtype differs from the one that the engine's optimizer keeps."""
    if case.core and case.policy.narrow_alone and case.run.optimizer.distributed:
        return None  # reported by full-16-bit-with-distributed-optimizer: no optimizer setting fixes it
    kept, found = case.kept, []
    # megatron-core rejects 16-bit main gradients without a precision-aware optimizer; with one it reads its own buffers regardless (a warning below)
    grads = [] if case.aware or case.offloaded or not case.core or case.policy.narrow_alone else ["main_grads"]
    for name in (*FUSED.values(), *grads):
        stated, held = getattr(case.policy, name), kept.get(name)
        if name == "main_params" and _bf16_beside(case) and not case.offloaded:
            continue  # a precision-aware optimizer cannot keep such weights either, see fused-adam-keeps-no-bf16-main-weights
        if stated is None or (held is None and name != "main_params"):
            continue
        is_ = case.policy.params if held is None else DType.FP32 if held.dtype is DType.INT16 else held.dtype
        if is_ is not stated:
            found.append(f"{name}={stated.short} (kept: {is_.short})")
    keeper = "HybridDeviceOptimizer" if case.offloaded else case.run.optimizer.name
    return f"{', '.join(found)} by {keeper} on {case.traits.full_name}" if found else None


def _remainders(case: Case) -> bool:
    """Whether FusedAdam is told to store main weights as remainders. HybridDeviceOptimizer does not read the field."""
    return bool(case.aware and case.policy.remainders) and not case.offloaded


def _bf16_main(case: Case) -> bool:
    held = case.kept.get("main_params")
    return (_bf16_beside(case) and not case.offloaded) or (
        held is not None and held.owner == "optimizer" and held.dtype is DType.BF16
    )


def _bf16_beside(case: Case) -> bool:
    """Whether BF16 main weights are requested from megatron-core next to parameters of another format. Only FusedAdam could keep them, and it does not."""
    return case.core and case.policy.main_params is DType.BF16 and not case.policy.narrow_alone


def _section_states(case: Case) -> str:
    """Fields of the optimizer section that megatron-core requires to be FP32 when the optimizer is not precision-aware."""
    given = {name: say(case.opt(name, DType.FP32)) for name in ("main_grads_dtype", *FUSED)}
    low = [f"optimizer.{name}={value}" for name, value in given.items() if value not in ("fp32", "float32")]
    return f"{', '.join(low)} without use_precision_aware_optimizer" if low else ""


def _aware_fp8(case: Case) -> str:
    fp8 = case.policy.fp8
    if fp8 is None:
        return ""
    if not fp8.row.history:
        return f"a precision-aware optimizer with {fp8.scaling} scaling"
    low = fp8.stored and _low_moments(case)
    return "a precision-aware optimizer with 16-bit moments and weights stored under delayed scaling" if low else ""


def _pointless(case: Case) -> str:
    fp8 = case.policy.fp8
    if fp8 is None or fp8.row.history:
        return ""
    return f"use_precision_aware_optimizer with {fp8.scaling} scaling and FP32 states"


def _unread_grads(case: Case) -> str:
    asked, held = case.policy.main_grads, case.kept.get("main_grads")
    if asked is None or asked is DType.FP32 or held is None or held.dtype is asked:
        return ""
    return f"main_grads_dtype={asked.short}, but the optimizer reads {held.dtype.short}"


def _narrow_moments(case: Case) -> str:
    """torch's Adam over 16-bit tensors: what a wrapper keeps as main weights, or the parameters."""
    name, keeper = case.run.optimizer.name, case.traits.main_weights
    wrapped = keeper == "wrapper"
    updated = (case.policy.main_params or DType.FP32) if wrapped else case.policy.params
    # beside a wrapper it is called adam, and is torch's unless FusedAdam is needed; Muon on shards leaves all but hidden matrices to torch's
    plain = wrapped and name == "adam" and not fused(case.policy, case.traits)
    torchs = name == "torch_adamw" or plain or (keeper == "optimizer" and name in MUONS)
    what = "main weights" if wrapped else "parameters"
    return f"torch AdamW over {updated.short} {what}" if torchs and updated is not DType.FP32 else ""


def _unmet_by_overlapped_step(case: Case) -> str:
    return faults(
        "overlap_param_gather_with_optimizer_step without ",
        ("engine mcore", not case.core),
        ("the distributed optimizer", not case.run.optimizer.distributed),
        ("overlap_param_gather", not case.ddp("overlap_param_gather", False)),
        ("virtual pipeline stages", (case.run.parallel.virtual_pipeline or 1) <= 1),
    )


RULES: tuple[Rule, ...] = (
    row("precision-aware-needs-adam", "optimizer={c.run.optimizer.name} with use_precision_aware_optimizer",
        "adam: only FusedAdam keeps states in configurable dtypes",
        "optimizer.optimizer=adam, or mixed_precision.use_precision_aware_optimizer=false", _CONFIG,
        about="aware", when=lambda c: c.aware and c.run.optimizer.name not in ADAMS, cure_here=lambda c: f"optimizer.optimizer=adam, or {c.plain_states}"),
    row("precision-aware-needs-distributed-optimizer", "use_precision_aware_optimizer with plain DDP",
        "a distributed optimizer",
        "ddp.use_distributed_optimizer=true", f"{_CONFIG}; Megatron-LM core/optimizer/__init__.py get_megatron_optimizer (d98e8a64)",
        about="aware", when=lambda c: c.aware and c.core and not c.run.optimizer.distributed),
    row("precision-aware-needs-fused-adam", "use_precision_aware_optimizer on a GPU without Transformer Engine",
        "Transformer Engine's FusedAdam (on a CPU mpbridge provides a replacement)",
        install("te"), _CONFIG,
        about="aware", when=lambda c: c.aware and c.gpu and c.run.versions.transformer_engine is None and not c.run.optimizer.cpu_offload),
    row("states-need-precision-aware", _unread_states,
        "FP32 states, or a precision-aware optimizer",
        "mixed_precision.use_precision_aware_optimizer=true", _CONFIG,
        when=lambda c: not c.offloaded, cure_here=lambda c: "" if c.run.optimizer.name == "adam" else c.plain_states),
    row("fused-adam-keeps-no-bf16-main-weights", "main_params_dtype=bf16 kept by FusedAdam",
        "fp32 or fp16 main weights, or no precision-aware optimizer and 16-bit parameters that serve as their own main weights",
        "mixed_precision.main_params_dtype=fp32", "Transformer Engine 2.11 pytorch/optimizers/fused_adam.py: master_weight_dtype",
        when=_bf16_main),
    row("optimizer-section-states-need-precision-aware", _section_states,
        "FP32 in all four fields",
        "optimizer.use_precision_aware_optimizer=true, or drop them", _CONFIG,
        when=lambda c: c.core and not c.opt("use_precision_aware_optimizer", False)),
    warning("precision-aware-with-fp8", _aware_fp8,
        "plain 16-bit or delayed scaling with FP32 moments: other combinations failed (illegal memory access, asserts) on several releases",
        "mixed_precision.use_precision_aware_optimizer=false, and no 16-bit states", "Megatron-Bridge#1707, ms-swift#8001, NVIDIA/cloudai#593",
        about="fp8", when=lambda c: c.aware and c.core and not c.offloaded, cure_here=lambda c: c.plain_states),
    warning("precision-aware-does-nothing", _pointless,
        "states below FP32: with this scaling megatron-core keeps FP32 main weights itself, so nothing is saved",
        "mixed_precision.use_precision_aware_optimizer=false, or bf16 moments", f"{_CONFIG}: use_precision_aware_optimizer_no_fp8_or_ds_fp8",
        about="fp8", when=lambda c: c.core and c.aware and not c.offloaded and not _low_moments(c)),
    row("fp8-recipe-leaks-into-the-optimizer", lambda c: f"optimizer.fp8_recipe={c.opt('fp8_recipe')!r} with FP8 off",
        "null: with any other value megatron-core ignores the precision-aware optimizer and keeps FP32 main weights",
        "optimizer.fp8_recipe=null", f"{_CONFIG}; Megatron-Bridge#2764",
        about="aware", when=lambda c: c.aware and not c.offloaded and c.policy.fp8 is None and c.opt("fp8_recipe") not in (None, "delayed")),
    warning("main-gradients-that-nothing-reads", _unread_grads,
        "the dtype that the optimizer reads: megatron-core only validates the field, then passes its own buffers, cast to FP32 if it keeps FP32 main weights itself",
        "mixed_precision.grad_reduce_in_fp32=false, or drop main_grads_dtype", "megatron-core 0.16.1: main_grads_dtype is read in optimizer_config.py only"),
    warning("remainders-have-no-effect",
        lambda c: f"store_param_remainders=true with {(c.policy.main_params or DType.FP32).short} main weights of {c.policy.params.short} parameters",
        "a precision-aware optimizer with FP32 main weights of BF16 parameters: remainders are the other half of the FP32 bits",
        "mixed_precision.store_param_remainders=false", "Transformer Engine 2.11 pytorch/optimizers/fused_adam.py initialize_state",
        about="aware", when=lambda c: _remainders(c) and (c.policy.main_params not in (None, DType.FP32) or c.policy.params is not DType.BF16)),
    row("remainders-of-fp8-weights", "16-bit remainders as the main weights of FP8 weights under delayed scaling",
        "full FP32 main weights: FusedAdam's kernel for FP8 weights checks for them, and an 8-bit code is not the upper half of an FP32 number",
        f"mixed_precision.store_param_remainders=false, or {PLAIN_WEIGHTS}",
        "Transformer Engine 2.11 to 2.20: pytorch/optimizers/fused_adam.py step, common/multi_tensor/adam.cu multi_tensor_adam_fp8_cuda",
        about="aware fp8",
        when=lambda c: _remainders(c) and c.core and c.policy.main_params in (None, DType.FP32) and (fp8 := c.policy.fp8) and fp8.row.history and fp8.stored,
        emulated="silent"),
    warning("remainders-need-newer-engine", "store_param_remainders with Transformer Engine {c.run.versions.transformer_engine}",
        "2.1 or later: with earlier versions megatron-core turns remainders off, which costs two more bytes per parameter",
        "upgrade Transformer Engine, or mixed_precision.store_param_remainders=false", _CONFIG,
        about="aware", when=lambda c: _remainders(c) and c.te_before("2.1")),
    # megatron-core's engine alone: the sharded ones do not keep the copy
    warning("duplicate-main-weights", "FP32 parameters with a FusedAdam that keeps FP32 main weights",
        "one of them: the FP32 branch never reads the copy, which wastes four bytes per parameter",
        "mixed_precision.use_precision_aware_optimizer=false", "Transformer Engine 2.11 pytorch/optimizers/fused_adam.py; NeMo-RL#2865",
        about="fp32_storage", when=lambda c: c.core and c.aware and c.policy.params is DType.FP32 and c.policy.main_params is DType.FP32,
        cure_here=lambda c: c.plain_states),
    row("offload-needs-precision-aware", "optimizer_cpu_offload without use_precision_aware_optimizer",
        "both, or neither",
        f"{_AWARE_OFFLOAD}, or {_ON_THE_GPU}", ARGUMENTS,
        when=lambda c: c.offloaded and not c.aware,
        cure_here=lambda c: _ON_THE_GPU if c.policy.narrow_alone or c.run.optimizer.name not in ADAMS else f"{_AWARE_OFFLOAD}, or {_ON_THE_GPU}"),
    warning("offload-moves-nothing", "optimizer_cpu_offload with optimizer_offload_fraction=0.0",
        "a fraction above 0: megatron-core's class has 0.0 by default (Megatron-LM's command line has 1.0), and every state stays on the GPU, in FP32",
        f"optimizer.optimizer_offload_fraction=1.0, or {_ON_THE_GPU}",
        "megatron-core 0.16.1 and d98e8a64: optimizer_config.py; Megatron-LM training/arguments.py --optimizer-offload-fraction (d98e8a64)",
        when=lambda c: c.offloaded and resident(c.run) == 1),
    row("offload-on-a-sharded-engine", "optimizer_cpu_offload on {c.traits.full_name}",
        "engine mcore: mpbridge keeps states of sharded engines on the GPU, whatever the field says, and megatron-core cannot pin the shards of Megatron-FSDP",
        _ON_THE_GPU, "mpbridge/backend/engines/shard_optimizer.py; Megatron-LM#1986, hybrid_optimizer.py _get_sub_optimizer_param_groups (0.16.1, d98e8a64)",
        when=lambda c: c.run.optimizer.cpu_offload and c.traits.main_weights in ("optimizer", "wrapper")),
    row("offload-keeps-fp32-states", _unread_states,
        "FP32 main weights and moments: megatron-core passes HybridDeviceOptimizer no state dtypes",
        f"mixed_precision.main_params_dtype=fp32 mixed_precision.exp_avg_dtype=fp32 mixed_precision.exp_avg_sq_dtype=fp32, or {_ON_THE_GPU}",
        _HYBRID, when=lambda c: c.offloaded),
    warning("offload-stores-no-remainders", "store_param_remainders=true with optimizer_cpu_offload",
        "full FP32 main weights, two more bytes per parameter than 16-bit remainders: HybridDeviceOptimizer does not read the field",
        "mixed_precision.store_param_remainders=false", _HYBRID,
        when=lambda c: c.offloaded and c.aware and c.policy.remainders),
    row("offload-with-fp32-parameters", "optimizer_cpu_offload with FP32 parameters",
        "16-bit parameters: HybridDeviceOptimizer takes no views that require gradients, and the distributed optimizer detaches those of 16-bit parameters only",
        f"{_ON_THE_GPU}, or 16-bit parameters without keep_fp32",
        "megatron-core 0.16.1 and d98e8a64: distrib_optimizer.py _build_model_and_main_param_groups; torch.optim.Optimizer.add_param_group",
        when=lambda c: c.offloaded and c.run.optimizer.distributed and (c.policy.params is DType.FP32 or c.policy.keep_fp32)),
    row("offload-with-stored-weights", lambda c: f"optimizer_cpu_offload with stored {c.stored[0].scaling} weights",
        "delayed scaling, or weights stored in 16 bits",
        PLAIN_WEIGHTS, f"{ARGUMENTS}; Megatron-LM#2788",
        about="stored", when=lambda c: c.run.optimizer.cpu_offload and any(not q.row.history for q in c.stored)),
    # what is beside Adam has a rule of its own: muon-cannot
    row("distributed-optimizer-is-adam-only", "optimizer={c.run.optimizer.name} with the distributed optimizer",
        "adam",
        "ddp.use_distributed_optimizer=false, or optimizer.optimizer=adam", "megatron-core 0.16.1 distrib_optimizer.py DistributedOptimizer.__init__",
        when=lambda c: c.core and c.run.optimizer.distributed and c.run.optimizer.name not in ("adam", *BESIDE_ADAM),
        cure_here=lambda c: f"{c.plain_ddp}, or optimizer.optimizer=adam"),
    # the distributed optimizer does not help with parameters that are their own main weights, or with optimizers other than Adam
    row("overlapped-gather-needs-distributed-optimizer", "overlap_param_gather with plain DDP",
        "a distributed optimizer: plain DDP gathers nothing",
        "ddp.use_distributed_optimizer=true, or ddp.overlap_param_gather=false", "megatron-core 0.16.1 param_and_grad_buffer.py start_param_sync (a bare assertion)",
        when=lambda c: c.core and not c.run.optimizer.distributed and c.ddp("overlap_param_gather"),
        cure_here=lambda c: ("" if c.policy.narrow_alone or c.run.optimizer.name != "adam" else "ddp.use_distributed_optimizer=true, or ") + "ddp.overlap_param_gather=false"),
    row("overlapped-step-needs-interleaving", _unmet_by_overlapped_step,
        "all of them: the first model chunk's gather starts while the others are updated",
        "optimizer.overlap_param_gather_with_optimizer_step=false",
        "megatron-core 0.16.1 optimizer.py ChainedOptimizer.step_with_ready_grads (attributes that plain optimizers lack); " + ARGUMENTS,
        when=lambda c: c.run.optimizer.overlap_param_gather_with_step),
    warning("second-moment-in-fp8", "exp_avg_sq_dtype=fp8",
        "a second moment in bf16 or wider: one scale for a tensor flushes entries below amax x 2^-10/448, and Adam divides by their root (Transformer Engine's "
        "own FusedAdam moves a rare row by 12,100 learning rates, with FP32 and BF16 by 1)",
        "mixed_precision.exp_avg_sq_dtype=bf16", "Transformer Engine 2.11 pytorch/optimizers/fused_adam.py set_scaled_state, run by tests/te_cpu/inside/hopper.py",
        about="aware", when=lambda c: moments(c.policy).get("exp_avg_sq") is DType.UINT8),
    row("moments-with-custom-scale-need-newer-engine", "FP8 moments",
        "Transformer Engine 2.0 or later",
        "upgrade Transformer Engine, or bf16 moments", "Transformer Engine pytorch/optimizers/fused_adam.py",
        about="aware", when=lambda c: c.aware and DType.UINT8 in moments(c.policy).values() and c.te_before("2.0"),
        holds=(Window(package="transformer_engine", until="2.0"),)),
    warning("moments-follow-16-bit-parameters", _narrow_moments,
        "FP32 storage, or FusedAdam: torch keeps moments in the dtype of what it updates, where small updates are rounded away",
        "recipe fp32_params_bf16_compute or bf16_params_fp32_states", "NeMo AutoModel PR 2248; AReaL#1292; scripts/evidence/show_bf16_adam.py",
        cure_here=lambda c: "recipe bf16_megatron_fsdp" if c.traits.main_weights == "wrapper" else "recipe fp32_params_bf16_compute or bf16_params_fp32_states"),
)  # fmt: skip
