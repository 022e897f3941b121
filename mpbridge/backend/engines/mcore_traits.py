"""The traits of `McoreEngine`."""

from mpbridge.common.facts import BESIDE_ADAM
from mpbridge.common.traits import EngineTraits
from mpbridge.planning.memory.keeps import STATES

TRAITS = EngineTraits(
    name="mcore",
    engine="mpbridge.backend.engines.mcore:McoreEngine",
    summary="megatron-core's DistributedDataParallel, with or without its distributed optimizer",
    label="megatron-core's DDP",
    layout="buffers",
    shards=frozenset(STATES),
    distributed_optimizer="optional",
    main_weights="megatron_core",
    optimizers=("adam", "sgd", *BESIDE_ADAM),
    parallelisms=frozenset({"tensor", "pipeline", "context", "expert"}),
    stored_weights=True,
    per_token_loss=True,
    checkpoints="mcore",
)
