"""What megatron-core's config classes reject at construction, related to precision or not. Experts and recomputation have a file of their own."""

from __future__ import annotations

from mpbridge.common.formats import say
from mpbridge.common.shipped import install
from mpbridge.common.versions import at_least
from mpbridge.planning.memory.identical_layers import windowed
from mpbridge.planning.memory.layers import te_layers
from mpbridge.planning.memory.ranks import batches
from mpbridge.planning.rules.base import MODEL_CONFIG, NEWER_MODEL_CONFIG, NO_EXPERT_OVERLAP, Case, Rule, faults, row
from mpbridge.precision.megatron_spec.schema import records
from mpbridge.precision.megatron_spec.versions import BEFORE_017, SINCE_017, described

_PARALLEL = "megatron-core 0.16.1 model_parallel_config.py __post_init__"
_WHOLE_STAGES = "parallel.virtual_pipeline_model_parallel_size=null"
_FUSIBLE = ("gelu", "silu", "quick_gelu")


def _said(case: Case, *names: str) -> str:
    return ", ".join(f"model.{name}={say(case.run.model.get(name))}" for name in names)


def _whole_stages(case: Case) -> str:
    also = {  # what is refused without interleaving
        "optimizer.overlap_param_gather_with_optimizer_step=false": case.run.optimizer.overlap_param_gather_with_step,
        NO_EXPERT_OVERLAP: case.run.parallel.pipeline > 1 and case.model("overlap_moe_expert_parallel_comm"),
    }
    return " ".join([_WHOLE_STAGES, *(setting for setting, on in also.items() if on)])


def _deferral(case: Case) -> str:
    return faults(
        "defer_embedding_wgrad_compute with ",
        ("one pipeline stage", case.run.parallel.pipeline == 1),
        ("gradient_accumulation_fusion=false", not case.model("gradient_accumulation_fusion")),
        ("a negative wgrad_deferral_limit", case.model("wgrad_deferral_limit", 0) < 0),
    )


def _pipeline_split(case: Case) -> str | None:
    stages = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    counted = [f"account_for_{what}_in_pipeline_split" for what in ("embedding", "loss")]
    given = [name for name in stages if case.model(name) is not None]
    also = [name for name in counted if case.model(name)]
    if given and also:
        return f"{', '.join(given)} together with {', '.join(also)}"
    if len(given) > case.run.parallel.pipeline:
        return f"{' and '.join(given)} with one pipeline stage"
    below = [f"{name}={case.model(name)}" for name in given if case.model(name) < 1]
    if below:
        return ", ".join(below)
    layers = case.run.shape.num_layers - sum(case.model(name) for name in given)
    stages_left = case.run.parallel.pipeline - len(given)
    if given and bool(layers) != bool(stages_left):
        return f"{', '.join(given)} that leave {layers} layers for {stages_left} stages"
    apart = case.model("pipeline_model_parallel_layout") and given + also
    return f"pipeline_model_parallel_layout together with {', '.join(apart)}" if apart else None


def _clamped(case: Case) -> str:
    limit = case.model("activation_func_clamp_value")
    return faults(
        "activation_func_clamp_value for SwiGLU ",
        (f"at {limit}", limit <= 0),
        ("without experts", not case.run.shape.experts),
        ("with glu_linear_offset", case.model("glu_linear_offset", 0.0) != 0.0),
        ("with use_te_activation_func", case.model("use_te_activation_func")),
    )


def _activation(case: Case) -> str:
    value = case.model("activation_func", "gelu")
    return str(getattr(value, "__name__", value))


def _fused_activation(case: Case) -> str:
    kind, gated = _activation(case), bool(case.model("gated_linear_unit"))
    if case.model("use_te_activation_func") and kind not in ("gelu", "silu", "relu"):
        return f"use_te_activation_func with {kind}"
    if not case.model("bias_activation_fusion"):
        return ""
    what = "bias_activation_fusion with "
    if kind not in _FUSIBLE:
        return f"{what}{kind}"
    return faults(
        what,
        ("gelu without biases", kind == "gelu" and not gated and not case.model("add_bias_linear", True)),
        ("quick_gelu without a gate", kind == "quick_gelu" and not gated),
        (f"glu_linear_offset and {kind}", case.model("glu_linear_offset", 0.0) and kind != "quick_gelu"),
        ("use_te_activation_func", case.model("use_te_activation_func")),
    ) or faults(what, *_unfusible_layers(case, kind, gated))


def _unfusible_layers(case: Case, kind: str, gated: bool) -> tuple[tuple[str, object], ...]:
    """Layers for which megatron-core has no fused kernel; its configs accept them and the first forward pass fails (mlp.py, moe/experts.py)."""
    shape = case.run.shape
    plain = not shape.experts or not all(shape.expert_layers) or shape.shared_expert_size
    experts = f"{'gated ' if gated else ''}{kind} in experts"
    return (
        (f"{kind} in layers without experts", plain and not (kind == "gelu" or (kind == "silu" and gated))),
        (experts, shape.experts and not (gated and kind in ("silu", "quick_gelu"))),
    )


def _rotation(case: Case) -> str:
    fused, narrow = case.model("apply_rope_fusion"), case.model("multi_latent_attention")
    turned, yarn = case.model("rotary_interleaved"), case.model("rope_type", "yarn") == "yarn"
    old = turned and case.te_before("2.3")
    gated = case.model("attention_output_gate") and (narrow or case.model("fused_single_qkv_rope"))
    return faults(
        "",
        ("apply_rope_fusion on latent attention without YaRN", fused and narrow and not yarn),
        ("apply_rope_fusion with rotary_interleaved before Transformer Engine 2.3", fused and not narrow and old),
        ("rotary_interleaved on latent attention", narrow and turned),
        (f"attention_output_gate with {'latent attention' if narrow else 'fused_single_qkv_rope'}", gated),
    )


_KERNELS = {"apply_rope_fusion": "0", "moe_permute_fusion": "2.1", "symmetric_ar_type": "2.3"}
"""Switches of Transformer Engine's kernels -> the release that brought them."""


def _library(case: Case) -> str:
    """What needs Transformer Engine, or a later one, on a GPU; on a CPU another rule rejects most of it."""
    have = case.run.versions.transformer_engine
    later = {name: since for name, since in _KERNELS.items() if case.model(name)}
    if have is None:
        return f"{', '.join(later)} without Transformer Engine" if later else ""
    if case.model("softmax_type", "vanilla") != "vanilla" and te_layers(case.run):
        later["softmax_type"] = "2.8"
    if case.model("delay_wgrad_compute") and case.run.cuda_graphs.implementation == "transformer_engine":
        later["delay_wgrad_compute in CUDA graphs"] = "2.10"
    found = ", ".join(f"{name} (from {since})" for name, since in later.items() if case.te_before(since))
    return f"{found} with Transformer Engine {have}" if found else ""


_RINGS = ("a2a", "all_gather", "p2p", "a2a+p2p")
"""Ways of cp_comm_type."""


def _context_faults(case: Case, ways: tuple[str, ...]) -> str:
    """What an attention over context-parallel ranks that communicate in these ways cannot do (attn_forward_func_with_cp asserts it in the first forward pass)."""
    shape, sizes, model = case.run.shape, case.run.parallel, case.run.model
    heads = shape.num_attention_heads // sizes.tensor
    pairs = heads if shape.latent_attention else max(1, shape.num_query_groups // sizes.tensor)
    window = tuple(case.model("window_size", ())) not in ((), (-1, 0), (-1, -1))
    windows = window and any(windowed(model, layer) for layer in range(shape.num_layers))
    each = dict.fromkeys(ways)
    softmax = case.model("softmax_type", "vanilla")
    able = (
        (f"softmax_type={say(softmax)}", softmax != "vanilla", ("a2a",)),
        ("sliding windows", windows, ("a2a", "all_gather")),
        ("latent attention", shape.latent_attention and case.te_before("2.20"), ("p2p", "a2a+p2p")),
    )
    return faults(
        "",
        (f"cp_comm_type={say(model.get('cp_comm_type'))}: expected one of {', '.join(_RINGS)}", set(each) - set(_RINGS)),
        ("hierarchical groups for a2a+p2p, which mpbridge does not make", "a2a+p2p" in each),
        *((f"{what} by {', '.join(w for w in each if w not in those)}", asked and set(each) - set(those)) for what, asked, those in able),
        (f"a2a with {heads} query and {pairs} key heads per rank", "a2a" in each and (heads % sizes.context or pairs % sizes.context)),
    )  # fmt: skip


def _context_attention(case: Case) -> str:
    if case.run.parallel.context == 1 or case.gpu is False:  # a CPU has none: needs-cuda
        return ""
    if not te_layers(case.run):
        return "megatron-core's own attention, which transformer_impl=local and emulation build"
    if isinstance(case.model("cp_comm_type"), (list, tuple)) and BEFORE_017.holds(case.run.versions.megatron_core):
        return "a list in cp_comm_type, of which a layer before 0.17 reads the entry of the next"
    return _context_faults(case, case.words("cp_comm_type") or ("p2p",))


def _context_cure(case: Case) -> str:
    able = [way for way in _RINGS if not _context_faults(case, (way,))] if te_layers(case.run) else []
    return f"model.cp_comm_type={able[0]}" if able else "parallel.context_parallel_size=1"


def _no_rope(case: Case) -> str | None:
    every, depth = case.model("no_rope_freq"), case.run.shape.num_layers
    if not every:
        return None
    if case.model("flash_decode"):
        return "no_rope_freq with flash_decode"
    wrong = len(every) != depth if isinstance(every, (list, tuple)) else every < 1 or depth % every
    return f"no_rope_freq={say(every)} over {depth} layers" if wrong else None


def _inference(case: Case) -> str:
    return faults(
        "",
        ("model.inference_fuse_tp_communication=true", case.model("inference_fuse_tp_communication")),
        ("model.transformer_impl=inference_optimized", case.model("transformer_impl") == "inference_optimized"),
    )


def _backend(case: Case) -> str:
    backend = case.model("attention_backend", "auto")
    return str(getattr(backend, "name", backend))


def _newer(case: Case) -> str | None:
    """Settings, and values of settings, that the oldest described version does not have, apart from those that the plan writes."""
    from mpbridge.precision.megatron_spec.fields import TABLE

    handled = {(row.target, row.field) for row in TABLE} | _TRIED
    found = []
    for section, held in (("model", case.run.model), ("optimizer", case.run.optimizer.settings), ("ddp", case.run.ddp)):
        old = records(section, latent=True, version=described()[0])
        for name, record in records(section, latent=True, version=case.run.versions.megatron_core).items():
            value = held.get(name)
            if (section, name) in handled or value is None or say(value) == say(record["default"]):
                continue
            before, now = old.get(name, {}).get("choices"), record.get("choices", ())
            word = bool(before) and isinstance(value, str) and value in now and value not in (before or ())
            if name not in old or word:
                found.append(f"{section}.{name}={say(value)}")
    return ", ".join(found) or None


_TRIED = {("model", "cuda_graph_modules"), ("model", "moe_flex_dispatcher_num_sms"), ("optimizer", "muon_nesterov")}
"""Newer settings, or newer names of old ones, that do not affect what rules, memory and audit look at, or that these read."""


def _broken_groups(case: Case) -> bool:
    """Whether megatron-core cannot interleave the micro-batches: a group, or the last one, has fewer than there are stages."""
    count, stages = batches(case.run), case.run.parallel.pipeline
    group = int(case.model("microbatch_group_size_per_vp_stage") or stages)
    return not stages <= group <= count or 0 < count % group < stages


RULES: tuple[Rule, ...] = (
    row("sequence-parallel-alone", "parallel.sequence_parallel=true with tensor_model_parallel_size=1", "tensor-parallel ranks to split the sequence over",
         "parallel.sequence_parallel=false", _PARALLEL, when=lambda c: c.run.parallel.sequence and c.run.parallel.tensor <= 1),
    row("deferred-embedding-gradient", _deferral, "pipeline stages, fused accumulation and a limit of 0 or more", "model.defer_embedding_wgrad_compute=false", _PARALLEL,
         when=lambda c: c.model("defer_embedding_wgrad_compute")),
    row("overlapped-warmup", lambda c: f"overlap_p2p_comm_warmup_flush with {_said(c, 'overlap_p2p_comm', 'batch_p2p_comm')}", "overlap_p2p_comm=true and batch_p2p_comm=false",
         "model.overlap_p2p_comm_warmup_flush=false", _PARALLEL,
         when=lambda c: c.model("overlap_p2p_comm_warmup_flush") and (not c.model("overlap_p2p_comm") or c.model("batch_p2p_comm"))),
    row("pipeline-split", _pipeline_split, "a single way of splitting the layers, with at least one layer per stage", "drop all but one of them"),
    row("interleaving-alone", "{c.run.parallel.virtual_pipeline} virtual stages in one pipeline stage", "more than one pipeline stage to interleave",
         _WHOLE_STAGES, "megatron-core 0.16.1 parallel_state.py initialize_model_parallel",
         when=lambda c: c.run.parallel.virtual_pipeline is not None and c.run.parallel.pipeline == 1, cure_here=_whole_stages),
    row("interleaved-micro-batches", lambda c: f"{batches(c.run)} micro-batches on {c.run.parallel.pipeline} interleaved pipeline stages",
         "whole groups of as many micro-batches as there are stages, or as model.microbatch_group_size_per_vp_stage says",
         _WHOLE_STAGES, "megatron-core 0.16.1 pipeline_parallel/schedules.py forward_backward_pipelining_with_interleaving",
         when=lambda c: (c.run.parallel.virtual_pipeline or 1) > 1 and _broken_groups(c), cure_here=_whole_stages),
    row("clamped-swiglu", _clamped, "a positive limit, in experts, without an offset", "model.activation_func_clamp_value=null",
         NEWER_MODEL_CONFIG, holds=(SINCE_017,),
         when=lambda c: c.model("activation_func_clamp_value") is not None and _activation(c) == "silu" and c.model("gated_linear_unit")),
    row("fused-activation", _fused_activation, "gated or biased GELU or SwiGLU in dense layers and shared experts, SwiGLU or quick GeGLU in experts", "model.bias_activation_fusion=false"),
    row("rotary-embedding", _rotation, "a combination that these kernels and layers support", "drop the switch"),
    row("l2-norm-on-latent-attention", "qk_l2_norm on latent attention", "another norm, or none: megatron-core's layers of latent attention have no L2 norm",
        "model.qk_l2_norm=false", "megatron-core 0.16.1 models/gpt/gpt_layer_specs.py get_gpt_layer_with_transformer_engine_spec",
        when=lambda c: c.model("qk_l2_norm") and c.model("multi_latent_attention")),
    row("switch-without-transformer-engine", _library, "Transformer Engine, in a release that has these kernels", f"{install('te')}, or drop them",
        f"{MODEL_CONFIG}; extensions/transformer_engine.py TEDotProductAttention.__init__"),
    row("symmetric-all-reduce", lambda c: f"symmetric_ar_type={say(c.model('symmetric_ar_type'))} with torch {c.run.versions.torch}", "torch 2.7 or later", "model.symmetric_ar_type=null",
        when=lambda c: c.model("symmetric_ar_type") is not None and c.run.versions.torch is not None and not at_least(c.run.versions.torch, "2.7")),
    row("layers-without-rotation", _no_rope, "a divisor of the number of layers, or one entry per layer, and no flash_decode", "correct model.no_rope_freq"),
    row("context-communication", lambda c: f"{len(c.model('cp_comm_type'))} entries in cp_comm_type over {c.run.shape.num_layers} layers", "one entry per layer, or one for all",
         "correct model.cp_comm_type",
         when=lambda c: c.run.parallel.context > 1 and isinstance(c.model("cp_comm_type"), (list, tuple)) and len(c.model("cp_comm_type")) != c.run.shape.num_layers),
    row("context-parallel-attention", lambda c: (found := _context_attention(c)) and f"{c.run.parallel.context} context-parallel ranks with {found}",
         "attention sinks by a2a, sliding windows by a2a or all_gather, latent attention by p2p, heads that a2a can divide, in Transformer Engine's layers",
         "model.cp_comm_type=a2a, or parallel.context_parallel_size=1", "Transformer Engine 2.11 and 2.20 (those between were not read) pytorch/attention/dot_product_attention/context_parallel.py; "
         "megatron-core 0.16.1 transformer/dot_product_attention.py, transformer_layer.py", cure_here=_context_cure),
    row("interleaved-communication", "interleaved stages with overlap_p2p_comm and batch_p2p_comm (megatron-core's default) both true", "one of them", "model.batch_p2p_comm=false",
         "megatron-core 0.16.1 pipeline_parallel/schedules.py forward_backward_pipelining_with_interleaving",
         when=lambda c: (c.run.parallel.virtual_pipeline or 1) > 1 and c.model("overlap_p2p_comm") and c.model("batch_p2p_comm", True)),
    row("average-in-collective-per-token", "ddp.average_in_collective=true with calculate_per_token_loss", "one of them: a loss per token is divided by the tokens of all ranks at the end",
         "ddp.average_in_collective=false", "megatron-core 0.16.1 distributed_data_parallel.py __init__",
         when=lambda c: c.ddp("average_in_collective") and c.model("calculate_per_token_loss")),
    row("deterministic-attention", "deterministic_mode without NVTE_ALLOW_NONDETERMINISTIC_ALGO=0", "0: Transformer Engine's attention reads the variable",
         "export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 before Python starts", "megatron-core 0.16.1 extensions/transformer_engine.py TEDotProductAttention.__init__",
         when=lambda c: c.model("deterministic_mode") and te_layers(c.run) and c.variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO") != "0"),
    row("inference-layers", _inference, "layers that can be trained", "model.transformer_impl=transformer_engine model.inference_fuse_tp_communication=false"),
    row("batch-invariance-backend", lambda c: f"batch_invariant_mode with attention_backend={_backend(c)}", "flash", "model.attention_backend=flash, or model.batch_invariant_mode=false",
         when=lambda c: c.model("batch_invariant_mode") and _backend(c) != "flash"),
    row("settings-not-known-here", _newer, "settings that megatron-core 0.16.1 also has: rules, memory and audit do not know these", "drop them",
         "mpbridge/precision/megatron_spec/schema", holds=(SINCE_017,)),
)  # fmt: skip
