"""Rules about models of which megatron-core knows more than mpbridge builds: hybrids with Mamba layers. They judge runs, and live configs before a plan is applied to them."""

from __future__ import annotations

from typing import Any

from mpbridge.common.facts import ModelShape, RunFacts, Versions
from mpbridge.common.formats import DType, say
from mpbridge.common.traits import DEFAULT
from mpbridge.planning.memory.layers import layer_weights
from mpbridge.planning.memory.mixers import MIXERS
from mpbridge.planning.memory.overheads import hybrid
from mpbridge.planning.rules.base import Case, Rule, row, warning
from mpbridge.precision.megatron_spec.versions import BEFORE_017
from mpbridge.precision.policy import PrecisionPolicy

_MIXER = "megatron-core 0.16.1 ssm/mamba_mixer.py MambaMixer.__init__"


def _fp4(case: Case) -> str:
    names = dict.fromkeys(quant.scaling for quant in case.policy.quants if quant.bits == 4)
    return f"{', '.join(names)} on a model with Mamba layers" if names else ""


def _rows(case: Case) -> str | None:
    """Rows of a mixer's first projection (Mamba's in_proj: z, x, B, C and dt) on a rank that its scaling cannot take."""
    shape, ranks, depth = case.run.shape, case.run.parallel.tensor, case.run.shape.num_layers
    low = []
    for part, mixer in MIXERS.items() if shape.pattern else ():
        layers = [layer for layer in range(depth) if part in shape.parts(layer)]
        if not layers:
            continue
        weights = layer_weights(shape, parts=(part,))
        rows = next(one.shape[0] for one in weights if one.linear and one.module == mixer.first)
        rules = (case.policy.gemms_at(mixer.first, layer, depth) for layer in layers)
        needs = {one.scaling: one.row.sizes.outer for gemms in rules for one in gemms.distinct}
        bad = [f"{scaling} needs a multiple of {need}" for scaling, need in needs.items() if rows % (need * ranks)]
        each = f"{rows // ranks if rows % ranks == 0 else f'{rows}/{ranks}'} on each of {ranks} tensor-parallel ranks"
        low += [f"{mixer.first} has {rows} rows, {each}: {', '.join(bad)}"] if bad else []
    return "; ".join(low) or None


_NONE_OF = {
    "pipeline_model_parallel_layout": "its stack divides layers by their number",
    "account_for_embedding_in_pipeline_split": "its stack divides layers by their number",
    "account_for_loss_in_pipeline_split": "its stack divides layers by their number",
    "mtp_num_layers": "MambaModel predicts one token",
    "multi_latent_attention": "its layers have plain attention",
    "qk_layernorm": "its specification has no such norms, and ignores the setting",
    "qk_l2_norm": "its specification has no such norms, and ignores the setting",
    "rope_scaling": "MambaModel does not take it",
    "cpu_offloading": "its stack opens no context for it",
}
"""Settings of the model section -> why megatron-core's hybrid does not follow them."""


def _unfollowed(case: Case) -> str:
    found = [f"model.{name}={say(case.model(name))} ({why})" for name, why in _NONE_OF.items() if case.model(name)]
    if virtual := case.run.parallel.virtual_pipeline:
        found.append(f"parallel.virtual_pipeline_model_parallel_size={virtual} (its stack asserts that there are none)")
    if case.model("position_embedding_type") == "yarn":
        found.append("model.position_embedding_type=yarn (MambaModel does not take it)")
    if case.model("recompute_granularity") == "full":
        found.append("model.recompute_granularity=full (its stack recomputes no layer, without a message)")
    return "; ".join(found)


RULES: tuple[Rule, ...] = (
    row("fp4-on-a-hybrid", _fp4,
        "megatron-core 0.17 or later: until 0.16 the stack of a hybrid opens no FP4 context, and every linear runs in the compute dtype without a message",
        "a 16-bit or FP8 recipe, or megatron-core's main branch", "megatron-core 0.16.1 ssm/mamba_block.py MambaStack.forward: get_fp8_context only",
        about="nvfp4", when=lambda c: hybrid(c.run.model), holds=(BEFORE_017,), emulated="silent"),
    row("mamba-projection-rows", _rows,
        "rows that divide on every rank (megatron-core checks the number before tensor parallelism, for FP8, against 16)",
        "another model.mamba_num_heads, mamba_num_groups or mamba_state_dim, fewer tensor-parallel ranks, or mixed_precision.modules={mixer.in_proj: bf16}",
        f"{_MIXER}; the table of scalings",
        about="quantized", when=lambda c: c.run.shape.pattern, emulated="silent"),
    row("hybrid-without-a-pattern", "model.is_hybrid_model=true without a pattern of layers",
        "the kind of each layer: without it this would be a GPT with a hybrid's initialisation",
        "model.hybrid_override_pattern=M-M*- (one symbol for each layer), or model.is_hybrid_model=false", "megatron-core 0.16.1 models/mamba/mamba_model.py",
        when=lambda c: hybrid(c.run.model) and not c.run.shape.pattern),
    row("hybrids-do-not-follow", _unfollowed,
        "settings that megatron-core's hybrid model reads",
        "drop them", "megatron-core 0.16.1 models/mamba/mamba_model.py, mamba_layer_specs.py, ssm/mamba_block.py",
        when=lambda c: c.run.shape.pattern),
    row("hybrids-on-one-engine", "a hybrid on {c.traits.full_name}",
        f"engine={DEFAULT}: Mamba layers were not tried on the others",
        f"engine={DEFAULT}", "mpbridge/backend/models/hybrid.py",
        when=lambda c: c.run.shape.pattern and c.run.engine != DEFAULT),
    warning("hybrid-in-fp16", "FP16 compute on a model with Mamba layers",
        "BF16: the scan's states exceed FP16's range (NaN reported for Falcon-H1)",
        "a bf16 recipe", "unslothai/unsloth-zoo#212",
        about="fp16", when=lambda c: hybrid(c.run.model) and c.policy.compute is DType.FP16),
    warning("mamba-states-dtype-unread", lambda c: f"mamba_training_ssm_states_dtype={say(c.model('mamba_training_ssm_states_dtype'))}",
        "null: megatron-core passes it to scans that take state_dtype and refuses to build the layer otherwise; no mamba_ssm up to 2.3.1 does, nor the played one",
        "model.mamba_training_ssm_states_dtype=null, or a mamba_ssm with that argument", "megatron-core 0.20 ssm/mamba_mixer.py MAMBA_HAS_STATE_DTYPE; mamba-ssm 2.3.1",
        when=lambda c: c.run.shape.pattern and c.model("mamba_training_ssm_states_dtype") is not None),
)  # fmt: skip


def silent_on(policy: PrecisionPolicy, model: Any, versions: Versions) -> str | None:
    """Why a live megatron-core model config would train under `policy` as something else, with the cure; None if it would not."""
    rule = RULES[0]
    run = RunFacts(shape=_ANY, model={"is_hybrid_model": getattr(model, "is_hybrid_model", False)}, versions=versions)
    found = rule.applies(run) and rule.fault(Case(policy=policy, run=run))
    return f"{rule.id}: {found}; expected {rule.expected}. Cure: {rule.cure}. [{rule.source}]" if found else None


_ANY = ModelShape(
    num_layers=1, hidden_size=64, num_attention_heads=1, ffn_hidden_size=64, num_query_groups=1, kv_channels=64, vocab_size=64, seq_length=64
)  # fmt: skip
