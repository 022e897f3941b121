"""The traits of `Fsdp2Engine`, and the rules that are checked for its runs only."""

from mpbridge.common.facts import ADAMS, MUONS
from mpbridge.common.formats import DType, say
from mpbridge.common.traits import EngineTraits
from mpbridge.planning.memory.keeps import MOMENTS, fused
from mpbridge.planning.rules.base import Case, Rule


def _torch_muon_cannot(case: Case) -> str | None:
    if case.run.optimizer.name not in MUONS:
        return None
    able = {"muon_fp32_matmul_prec": ("medium",), "muon_scale_mode": ("spectral", "shape_scaling")}
    given = {name: value for name, words in able.items() if (value := case.opt(name, words[0])) not in words}
    return ", ".join(f"{name}={say(value)}" for name, value in given.items()) or None


_CURE = "mixed_precision.params_dtype=fp32 (recipe fp32_params_bf16_compute), or optimizer.optimizer=adam"


def _cure(case: Case) -> str:
    return f"{case.plain_states}, or optimizer.optimizer=adam"


RULES: tuple[Rule, ...] = (
    Rule(
        id="fsdp2-shards-by-itself",
        when=lambda c: c.run.optimizer.distributed,
        found="ddp.use_distributed_optimizer=true on torch FSDP2",
        expected="no distributed optimizer: FSDP2 shards the optimizer state itself",
        cure="ddp.use_distributed_optimizer=false",
        source="mpbridge/backend/engines/fsdp2.py",
    ),
    Rule(
        id="fsdp2-casts-by-itself",
        when=lambda c: c.policy.autocast is not None,
        found="autocast_enabled=true on torch FSDP2",
        expected="only FSDP2's own casts",
        cure="mixed_precision.autocast_enabled=false",
        source="mpbridge/backend/engines/fsdp2.py",
    ),
    Rule(
        id="fsdp2-storage-under-wider-compute",
        when=lambda c: c.policy.params.bytes < c.policy.compute.bytes,
        found="{c.policy.params.short} storage under {c.policy.compute.short} compute",
        expected="storage at least as wide as compute: otherwise gradients and states are narrow while compute costs its full price",
        cure="mixed_precision.params_dtype=null, or a recipe that computes in 16 bits",
        source="torchtitan refuses the same; mpbridge/backend/engines/fsdp2.py",
    ),
    Rule(
        id="torch-adamw-cannot-keep-states",
        when=lambda c: c.opt("optimizer") == "torch_adamw" and fused(c.policy, c.traits),
        found="torch's AdamW under a recipe whose states are not {c.policy.params.short}, unlike its parameters",
        expected="states in the parameters' dtype: torch's AdamW can hold no others",
        cure=_CURE,
        cure_here=_cure,
        source="torch.optim.AdamW; NeMo AutoModel PR 2248",
    ),
    Rule(
        id="torch-muon-keeps-no-main-weights",
        when=lambda c: c.run.optimizer.name in MUONS and fused(c.policy, c.traits),
        found="optimizer={c.run.optimizer.name} on {c.policy.params.short} parameters, under a recipe whose main weights or states have another dtype",
        expected="storage in the dtype of main weights and states: torch's Muon and the AdamW beside it update the parameters themselves",
        cure=_CURE,
        cure_here=_cure,
        source="torch.optim.Muon; mpbridge/backend/engines/muon.py",
    ),
    Rule(
        id="torch-muon-cannot",
        found=_torch_muon_cannot,
        expected="what torch.optim.Muon has: Newton-Schulz in BF16 (medium), and updates scaled as spectral or shape_scaling",
        cure="drop them",
        source="torch 2.13 optim/_muon.py; mpbridge/backend/engines/muon.py",
    ),
    Rule(
        id="torch-optimizer-keeps-no-main-weights",
        when=lambda c: (
            c.run.optimizer.name not in (*ADAMS, *MUONS)
            and {c.policy.main_params or DType.FP32, c.policy.exp_avg or DType.FP32} != {c.policy.params}
        ),
        found="optimizer={c.run.optimizer.name} on {c.policy.params.short} parameters, under a recipe whose main weights or momentum have another dtype",
        expected="storage in the dtype of both: torch's SGD and its like update the parameters themselves, and their states have the parameters' dtype",
        cure=_CURE,
        cure_here=_cure,
        source="torch.optim.SGD; mpbridge/backend/engines/shard_optimizer.py",
    ),
)


TRAITS = EngineTraits(
    name="fsdp2",
    engine="mpbridge.backend.engines.fsdp2:Fsdp2Engine",
    summary="torch's fully_shard around megatron-core's model, updated by torch's AdamW or FusedAdam",
    label="torch FSDP2",
    layout="rows",
    shards=frozenset({"params", "grads", "main_params", *MOMENTS}),
    distributed_optimizer="never",
    main_weights="optimizer",
    optimizers=("adam", "torch_adamw", "sgd", "muon"),
    wide_storage=True,
    quantizers=frozenset({"transformer_engine", "torchao"}),
    checkpoints="shards",
    casts_outputs=True,
    refuses={"gradient_accumulation_fusion": "it writes into megatron-core's own gradient buffers, and FSDP2 has none"},
    rules="mpbridge.backend.engines.fsdp2_traits:RULES",
)
