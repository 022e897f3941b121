"""A recipe with the new scaling resolves, runs nowhere natively and everywhere emulated, and its operands follow the definition."""

import math
from pathlib import Path

import torch

import mpbridge
from mpbridge import get_mixed_precision_config, resolve
from mpbridge.common.facts import Versions
from mpbridge.common.machines import machine
from mpbridge.numerics.quantizer import Quantizer, Randomness
from mpbridge.planning.capability import can_run
from mpbridge.precision.scalings import choices
from mpbridge.precision.sync.plan import plan

policy = resolve(get_mixed_precision_config("bf16_with_ceiling64_mixed"))
assert "ceiling64" in choices(8)
assert policy.quant is not None
assert can_run(policy, machine("b200"), Versions(transformer_engine="2.11.0", cuda="12.9")).how == "emulated"
assert plan(policy, model={}).of("model").get("fp8") is None, "megatron-core cannot say it"

cpu = torch.device("cpu")
x = torch.randn(64, 192, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 3).repeat_interleave(64)
x[0, :64] = 0
x = x.to(torch.bfloat16)
made = Quantizer(policy.quant, ["fc"], randomness=Randomness(1, cpu), device=cpu, compiled=False)
for side in ("x", "w"):
    found = made.operand(x, slot="fc", gemm="fprop", side=side).values.float().reshape(64, 3, 64)
    for row in (0, 1, 63):
        for block, values in enumerate(x.float().reshape(64, 3, 64)[row]):
            amax = float(values.abs().max())
            scale = 2.0 ** math.ceil(math.log2(amax / 448)) if amax else 1.0
            expected = (values / scale).to(torch.float8_e4m3fn).float() * scale
            assert torch.equal(found[row, block], expected), (side, row, block)
print(Path(mpbridge.__file__).parent)
