"""The traits of `Fsdp2Engine`."""

from __future__ import annotations

from mpbridge.common.traits import EngineTraits
from mpbridge.planning.memory.keeps import MOMENTS

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
    refuses={"gradient_accumulation_fusion": "it writes into megatron-core's own gradient buffers, and FSDP2 has none"},
    rules="mpbridge.backend.engines.fsdp2_rules:RULES",
)
