"""The field is written where the recipe reduces in 16 bits, an author's value is overridden visibly, and no class names it twice."""

from pathlib import Path

import mpbridge
from mpbridge import get_mixed_precision_config, resolve
from mpbridge.precision.megatron_spec.classes import USERS_OWN
from mpbridge.precision.sync.plan import plan

FIELD = "reduce_scatter_with_fp32_accumulation"
config = get_mixed_precision_config("bf16_mixed")
narrow = resolve(config.derive(grad_reduce_in_fp32=False))
assert plan(narrow, ddp={}).of("ddp")[FIELD] is True
assert FIELD not in plan(resolve(config), ddp={}).of("ddp")
overridden = plan(narrow, ddp={FIELD: False}).conflicts
assert [write.field for write in overridden] == [FIELD]
assert ("ddp", FIELD) not in USERS_OWN
print(Path(mpbridge.__file__).parent)
