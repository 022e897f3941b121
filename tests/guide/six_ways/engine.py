"""An engine whose main weights are of a kind that no other has: kept, counted, checked and found like the others."""

from pathlib import Path

import mpbridge
from mpbridge import get_mixed_precision_config, resolve
from mpbridge.common.facts import ModelShape, OptimizerFacts, Parallel, RunFacts
from mpbridge.common.formats import DType
from mpbridge.common.traits import engine_names, traits
from mpbridge.interop.stacks.meaning import of_policy
from mpbridge.planning.estimate.build import shares, update
from mpbridge.planning.memory.by_role import memory
from mpbridge.planning.memory.keeps import keeps
from mpbridge.planning.memory.ranks import Coordinates
from mpbridge.planning.rules.cards import main_weights
from mpbridge.planning.rules.table import broken

SHAPE = ModelShape(
    num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, num_query_groups=4, kv_channels=16, vocab_size=128, seq_length=32
)  # fmt: skip
NAME = "swapped"
policy, kind = resolve(get_mixed_precision_config("bf16_mixed")), traits(NAME)
run = RunFacts(shape=SHAPE, engine=NAME, parallel=Parallel(world_size=2))
assert NAME in engine_names()
held = keeps(policy.settled(), kind, OptimizerFacts())
assert {role: one.dtype for role, one in held.items()} == {
    "params": DType.BF16, "grads": DType.BF16, "main_params": DType.FP32, "exp_avg": DType.BF16, "exp_avg_sq": DType.BF16,
}  # fmt: skip
assert {one.sharding for one in held.values()} == {"rows"}
roles = memory(policy, run).roles
assert roles["main_params"] == 2 * roles["exp_avg"] > 0
assert update(policy, run, shares(policy, run, Coordinates.of(0, run.parallel))) > 0
assert main_weights(policy, kind) == "fp32 kept by swapped"
assert of_policy(policy, engine=NAME).main is DType.FP32
found = {violation.rule for violation in broken(policy, run)}
alone = {violation.rule for violation in broken(policy, RunFacts(shape=SHAPE, engine=NAME))}
assert "swapped-needs-two-ranks" in alone - found
assert "swapped-needs-two-ranks" not in {violation.rule for violation in broken(policy, RunFacts(shape=SHAPE))}

from mpbridge.backend.engines.registry import engine_class  # noqa: E402

assert engine_class(NAME).name == NAME
print(Path(mpbridge.__file__).parent)
