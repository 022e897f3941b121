"""Rules about parameters that are not trained, and about low-rank adapters beside them."""

from __future__ import annotations

from mpbridge.common.traits import DEFAULT
from mpbridge.planning.memory.keeps import is_frozen
from mpbridge.planning.rules.base import PLAIN_WEIGHTS, Case, Rule, faults, warning
from mpbridge.precision.globs import ADAPTERS, is_adapter
from mpbridge.precision.scalings.row import needs_transpose


def _names(case: Case) -> tuple[str, ...]:
    from mpbridge.planning.memory.layers import model_names

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
    Rule(
        id="nothing-is-trained",
        when=_nothing_trains,
        found=lambda c: f"frozen {', '.join(map(repr, c.policy.frozen))} covers every parameter",
        expected="parameters that train: other globs, or adapters, which 'frozen' never covers",
        cure="model.lora_rank=8, or narrower globs in mixed_precision.frozen",
        source="mpbridge/planning/memory/keeps.py is_frozen",
    ),
    Rule(
        id="adapters-do-not-follow",
        when=lambda c: c.run.shape.lora_rank,
        found=_unfollowed,
        expected="targets among the linears of attention, MLPs and Mamba layers, on one tensor-parallel rank",
        cure="data or pipeline parallelism (parallel.tensor_model_parallel_size=1), or other model.lora_targets",
        source="mpbridge/backend/models/adapters.py",
    ),
    Rule(
        id="adapters-dtype-without-adapters",
        when=lambda c: set(ADAPTERS) & set(c.policy.keep_fp32) and not c.run.shape.lora_rank,
        found="lora_dtype=fp32 on a model without adapters",
        expected="adapters, whose dtype it is",
        cure="model.lora_rank=8, or mixed_precision.lora_dtype=null",
        source="mpbridge/precision/globs.py ADAPTERS",
    ),
    Rule(
        id="frozen-tied-embedding-on-two-stages",
        when=lambda c: (
            c.run.shape.tied and c.run.parallel.pipeline > 1 and len({is_frozen(c.policy, one) for one in _TIED}) > 1
        ),
        found=lambda c: (
            f"frozen {', '.join(map(repr, c.policy.frozen))} covers one of {' and '.join(_TIED)}, tied across pipeline stages"
        ),
        expected="both or neither: megatron-core adds up the gradients of both, and a stage waits forever for one that has none",
        cure="model.share_embeddings_and_output_weights=false, parallel.pipeline_model_parallel_size=1, or frozen globs that leave the embedding out",
        source="megatron-core 0.16.1 distributed/finalize_model_grads.py _allreduce_embedding_grad",
    ),
    Rule(
        id="frozen-on-one-engine",
        when=lambda c: (c.policy.frozen or c.run.shape.lora_rank) and c.run.engine != DEFAULT,
        found=lambda c: f"{'frozen parameters' if c.policy.frozen else 'adapters'} on {c.traits.full_name}",
        expected=f"engine={DEFAULT}: the others were not tried with parameters that do not train",
        cure=f"engine={DEFAULT}",
        source="mpbridge/backend/models/adapters.py",
    ),
    warning(
        id="fp32-parameters-in-a-reused-buffer",
        about="stored",
        when=lambda c: c.core and c.policy.reuse_grad_buffer and c.policy.keep_fp32,
        found="FP32 parameters beside MXFP8 weights that are gathered through the gradient buffer",
        expected="parameters of 16 bits in other people's scripts: megatron-core stages only those with main weights of their own, and gathers zeros into FP32 ones. "
        "mpbridge's engine stages all",
        cure=f"mixed_precision.lora_dtype=null and no keep_fp32, or {PLAIN_WEIGHTS}",
        source="megatron-core 0.16.1 and 0.20 optimizer/distrib_optimizer.py _copy_main_params_to_param_buffer",
        emulated="silent",
    ),
    warning(
        id="adapters-beside-a-trained-base",
        when=lambda c: c.run.shape.lora_rank and not any(is_frozen(c.policy, name) for name in _names(c)),
        found="model.lora_rank={c.run.shape.lora_rank}, and every weight trains too",
        expected="a frozen base: adapters save the gradients, main weights and moments of what does not train",
        cure="mixed_precision.frozen=['*']",
        source="arXiv 2106.09685",
    ),
    warning(
        id="stored-base-is-kept-twice",
        about="stored",
        found=_twice_on_hopper,
        expected="1 byte per frozen parameter: before Blackwell the transposed copy for dgrad is kept too, and BF16 takes no more",
        cure=f"{PLAIN_WEIGHTS}, or a Blackwell GPU",
        source="Transformer Engine pytorch/tensor/float8_tensor.py; mpbridge/planning/memory/roles.py",
        emulated="silent",
    ),
)
