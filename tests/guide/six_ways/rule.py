"""The new rule is found, and is silent on its neighbour."""

from pathlib import Path

import mpbridge
from mpbridge import get_mixed_precision_config, resolve
from mpbridge.common.facts import ModelShape, Parallel, RunFacts
from mpbridge.planning.rules.table import broken, rules

SHAPE = ModelShape(
    num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, num_query_groups=4, kv_channels=16, vocab_size=128, seq_length=32
)  # fmt: skip
NAME = "sixteen-bit-reduction-over-many-ranks"


def ids(ranks: int, *, fp32: bool) -> set[str]:
    policy = resolve(get_mixed_precision_config("bf16_mixed").derive(grad_reduce_in_fp32=fp32))
    return {violation.rule for violation in broken(policy, RunFacts(shape=SHAPE, parallel=Parallel(world_size=ranks)))}


assert len({rule.id for rule in rules()}) == len(rules())
assert NAME in ids(512, fp32=False)
assert NAME not in ids(256, fp32=False) | ids(512, fp32=True)
print(Path(mpbridge.__file__).parent)
