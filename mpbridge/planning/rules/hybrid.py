"""Rules about models of which megatron-core knows more than mpbridge builds: hybrids with Mamba layers. They judge runs, and live configs before a plan is applied to them."""

from __future__ import annotations

from typing import Any

from mpbridge.common.facts import ModelShape, RunFacts, Versions
from mpbridge.common.formats import DType
from mpbridge.planning.memory.limitations import hybrid
from mpbridge.planning.rules.base import Case, Rule
from mpbridge.precision.megatron_spec.versions import BEFORE_017
from mpbridge.precision.policy import PrecisionPolicy

_MIXER = "megatron-core 0.16.1 ssm/mamba_mixer.py MambaMixer.__init__"


def _fp4(case: Case) -> str | None:
    names = dict.fromkeys(quant.scaling for quant in case.policy.quants if quant.bits == 4)
    return f"{', '.join(names)} on a model with Mamba layers" if names and hybrid(case.run.model) else None


def _rows(case: Case) -> str | None:
    """Rows of in_proj (z, x, B, C and dt) on a rank that its scaling cannot take."""
    model, shape, ranks = case.model, case.run.shape, case.run.parallel.tensor
    if not hybrid(case.run.model):
        return None
    width = int(model("mamba_head_dim", 64))
    heads = int(model("mamba_num_heads", 2 * shape.hidden_size // width))
    rows = 2 * heads * width + 2 * int(model("mamba_num_groups", 8)) * int(model("mamba_state_dim", 128)) + heads
    depth = shape.num_layers
    rules = (case.policy.gemms_at("mixer.in_proj", layer, depth) for layer in range(depth))
    needs = {one.scaling: one.row.sizes.outer for gemms in rules for one in gemms.distinct}
    low = [f"{scaling} needs a multiple of {need}" for scaling, need in needs.items() if rows % (need * ranks)]
    each = f"{rows // ranks if rows % ranks == 0 else f'{rows}/{ranks}'} on each of {ranks} tensor-parallel ranks"
    return f"mixer.in_proj has {rows} rows, {each}: {', '.join(low)}" if low else None


RULES: tuple[Rule, ...] = (
    Rule(
        id="fp4-on-a-hybrid",
        about="nvfp4",
        found=_fp4,
        expected="megatron-core 0.17 or later: until 0.16 the stack of a hybrid opens no FP4 context, and every linear runs in the compute dtype without a message",
        cure="a 16-bit or FP8 recipe, or megatron-core's main branch",
        source="megatron-core 0.16.1 ssm/mamba_block.py MambaStack.forward: get_fp8_context only",
        holds=(BEFORE_017,),
        emulated="silent",
    ),
    Rule(
        id="mamba-projection-rows",
        about="quantized",
        found=_rows,
        expected="rows that divide on every rank (megatron-core checks the number before tensor parallelism, for FP8, against 16)",
        cure="another model.mamba_num_heads, mamba_num_groups or mamba_state_dim, fewer tensor-parallel ranks, or mixed_precision.modules={mixer.in_proj: bf16}",
        source=f"{_MIXER}; the table of scalings",
        emulated="silent",
    ),
    Rule(
        id="hybrid-in-fp16",
        about="fp16",
        found=lambda c: (
            hybrid(c.run.model) and c.policy.compute is DType.FP16 and "FP16 compute on a model with Mamba layers"
        ),
        expected="BF16: the scan's states exceed FP16's range (NaN reported for Falcon-H1)",
        cure="a bf16 recipe",
        source="unslothai/unsloth-zoo#212",
        severity="warning",
    ),
)


def silent_on(policy: PrecisionPolicy, model: Any, versions: Versions) -> str | None:
    """Why a live megatron-core model config would train under `policy` as something else, with the cure; None if it would not."""
    rule = RULES[0]
    run = RunFacts(shape=_ANY, model={"is_hybrid_model": getattr(model, "is_hybrid_model", False)}, versions=versions)
    found = rule.applies(run) and rule.found(Case(policy=policy, run=run))
    return f"{rule.id}: {found}; expected {rule.expected}. Cure: {rule.cure}. [{rule.source}]" if found else None


_ANY = ModelShape(
    num_layers=1, hidden_size=64, num_attention_heads=1, ffn_hidden_size=64, num_query_groups=1, kv_channels=64, vocab_size=64, seq_length=64
)  # fmt: skip
