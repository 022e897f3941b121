"""What a rank keeps from its forward passes for their backward passes: an estimate, and labelled as one wherever it is shown.

Counted as in arXiv 2205.05198 (Reducing Activation Recomputation), with quantized inputs of linears kept in low precision, and attention scores kept if
attention is not fused. Fragmentation and load imbalance between experts are not included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from mpbridge.common.facts import RunFacts
from mpbridge.common.formats import DType
from mpbridge.planning.memory.identical_layers import layer_kinds
from mpbridge.planning.memory.layers import te_layers
from mpbridge.planning.memory.mixers import MIXERS
from mpbridge.planning.memory.ranks import Chunk, Coordinates, batches, in_flight
from mpbridge.precision.policy import PrecisionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes that one layer keeps for one micro-batch, split into the parts that selective recomputation can drop."""

    entry: float
    """The layer's own input: kept in every mode."""
    between: float
    """The residual stream between a layer's parts, the input of its second norm."""
    norms: float
    """Outputs of norms that are modules of their own: dropped by layernorm."""
    folded: float
    """Outputs of norms that are part of the linear after them, and masks of dropout."""
    attention: float
    scores: float
    """Unfused attention: probabilities, and the mask and result of dropout."""
    up_projections: float
    """Outputs of latent attention's up projections: dropped by recompute_modules mla_up_proj."""
    mixer: float = 0.0
    """Of MIXERS; a Mamba layer keeps the projection, the result of the scan before its gate, and the inputs of the norm and of the second projection; the rest is computed again."""
    mlp: float = 0.0
    """The MLP of a layer without experts; the fields below belong to a layer with experts."""
    activation: float = 0.0
    """What the activation function in experts keeps beside its input, and its output: dropped by moe_act."""
    shared: float = 0.0
    permuted: float = 0.0
    """Permuted tokens, the input of the experts' first linear: offload_modules expert_fc1."""
    gate: float = 0.0
    """Input of the activation function in experts."""
    experts: float = 0.0
    """Everything else that experts and their router keep."""

    @property
    def whole(self) -> float:
        """Total without recomputation."""
        return self.without(frozenset())

    def without(self, parts: frozenset[str]) -> float:
        """Total without `parts`."""
        return float(sum(getattr(self, name) for name in self.__slots__ if name not in parts))


_RECOMPUTED: Mapping[str, tuple[str, ...]] = MappingProxyType({
    # core_attn, megatron-core's default, recomputes the scores
    "core_attn": ("scores",), "layernorm": ("norms",), "mla_up_proj": ("up_projections",), "mlp": ("mlp",), "moe_act": ("activation",),
    "shared_experts": ("shared",), "moe": ("permuted", "gate", "activation", "shared", "experts"),
})  # fmt: skip
"""recompute_modules -> what a layer no longer keeps."""
_ON_HOST: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "attn_norm": ("entry",), "mlp_norm": ("between",), "core_attn": ("attention", "scores", "up_projections"), "expert_fc1": ("permuted",),
    "moe_act": ("gate", "activation"),
})  # fmt: skip
"""offload_modules of fine_grained_activation_offloading -> what a layer keeps on the host. The inputs of qkv_linear and attn_proj are outputs of other modules."""


class Kept(NamedTuple):
    """What a layer of one kind keeps in a run, in bytes per micro-batch."""

    entry: float
    whole: float
    """Without recomputation."""
    each: float
    """With the run's recomputation and offloading of modules."""
    passing: float
    """What is offloaded one module at a time."""
    scores: float


Known = dict[int, Kept]
"""Kind of layer -> what it keeps: the same in runs that differ in pipeline stages and data parallelism alone."""


def activations(policy: PrecisionPolicy, run: RunFacts, at: Coordinates, known: Known | None = None) -> int:
    """Estimated peak bytes on that rank. known: filled with what was computed of layers, and read."""
    made = {} if known is None else known
    kinds, chunks = layer_kinds(policy, run), at.chunks(run)
    layers = [kinds[layer] for chunk in chunks for layer in chunk.built(run.shape)]
    here = [kept(policy, run, kind, made) for kind in set(layers)]
    full = run.model.get("recompute_granularity") == "full"
    away = _away(run, len(layers))
    stage, again, left = [], [0.0], away
    for chunk in chunks:
        own = [made[kinds[layer]] for layer in chunk.built(run.shape)]
        held, besides = _recomputed(run, chunk, own) if full else (sum(layer.each for layer in own[left:]), 0.0)
        stage.append(held)
        again.append(besides)
        left = max(0, left - len(own))
    # the gradient of the scores too, in the layer being computed
    extra = max(again) + max((layer.scores for layer in here), default=0.0)
    # offloaded layers pass through two buffers, and so do modules offloaded individually
    extra += 2 * max((made[kind].each for kind in layers[:away]), default=0.0)
    extra += 0.0 if full else 2 * max((layer.passing for layer in here), default=0.0)
    return int(in_flight(run, at.stage, stage) + extra + _head(policy, run, chunks))


def kept(policy: PrecisionPolicy, run: RunFacts, kind: int, known: Known) -> Kept:
    """What a layer of that kind keeps; known: filled and read."""
    if kind not in known:
        layer = _layer(policy, run, kind)
        selected = _selected(run, layer)
        known[kind] = Kept(
            entry=layer.entry,
            whole=layer.whole,
            each=layer.entry if run.model.get("recompute_granularity") == "full" else selected,
            passing=layer.without(_recomputed_parts(run)) - selected,
            scores=layer.scores,
        )
    return known[kind]


def uncertainty(run: RunFacts) -> float:
    """Relative error not exceeded in nine of ten measured cases; `scripts/evidence/check_memory_rows.py` prints it (of hybrids `check_hybrids.py`)."""
    if run.shape.experts or run.shape.hybrid:
        return 0.15
    return 0.1 if attention_kernel(run) == "fused" else 0.15


def basis(run: RunFacts) -> str:
    """How the bytes and their uncertainty are known."""
    if run.shape.hybrid:
        return "measured on 8 of Megatron-LM's test cases with Mamba layers"
    return "measured on Megatron-LM's test cases"


def attention_kernel(run: RunFacts) -> str:
    """The kernel of core attention: 'fused' (includes flash), 'unfused' or 'local'; 'auto' is resolved as Transformer Engine does on a GPU."""
    if run.model.get("transformer_impl") == "local":
        return "local"
    asked = str(run.model.get("attention_backend") or "auto").rpartition(".")[2]
    return asked if asked in ("unfused", "local") else "fused"


def recomputed_modules(run: RunFacts) -> frozenset[str]:
    """The modules that selective recomputation recomputes in each layer; empty without it, core attention if none is named (transformer_config.py)."""
    how, named = run.model.get("recompute_granularity"), run.model.get("recompute_modules")
    asked = frozenset(("core_attn",) if named is None else named)
    if run.model.get("moe_layer_recompute") and how != "full":  # older name for selective recomputation of "moe"
        return asked | {"moe"}
    return asked if how == "selective" else frozenset()


def _away(run: RunFacts, layers: int) -> int:
    """Number of a stage's layers whose activations are kept on the host (cpu_offloading)."""
    if not run.model.get("cpu_offloading") or run.model.get("cpu_offloading_activations") is False:
        return 0
    return min(layers, int(run.model.get("cpu_offloading_num_layers") or 0))


def layers_again(run: RunFacts, chunk: Chunk) -> list[bool]:
    """Whether full recomputation computes each layer that a chunk builds again (transformer_block.py; in blocks no prediction layer: multi_token_prediction.py)."""
    model, built = run.model, chunk.built(run.shape)
    count = len(built) if model.get("recompute_granularity") == "full" else 0
    if model.get("recompute_method") == "block":
        count = min(count, len(chunk.layers), int(model.get("recompute_num_layers") or 1))
    return [place < count for place in range(len(built))]


def _recomputed(run: RunFacts, chunk: Chunk, kept: list[Kept]) -> tuple[float, float]:
    """What a chunk keeps for a micro-batch under full recomputation, and the most that its layers hold besides while they are computed again, all at once that
    share a kept input (transformer_block.py _checkpointed_forward)."""
    each = 1 if run.model.get("recompute_method") == "block" else int(run.model.get("recompute_num_layers") or 1)
    again = sum(layers_again(run, chunk))
    groups = [kept[i : min(i + each, again)] for i in range(0, again, each)]
    held = sum(group[0].entry for group in groups) + sum(layer.whole for layer in kept[again:])
    return held, max((sum(layer.whole for layer in group) for group in groups), default=0.0)


def _recomputed_parts(run: RunFacts) -> frozenset[str]:
    return frozenset(part for name in recomputed_modules(run) for part in _RECOMPUTED.get(name, ()))


def _selected(run: RunFacts, kept: LayerBytes) -> float:
    """What a layer keeps on the GPU under selective recomputation and fine-grained offloading."""
    away: frozenset[str] = frozenset()
    if run.model.get("fine_grained_activation_offloading"):
        away = frozenset(part for name in run.model.get("offload_modules") or () for part in _ON_HOST.get(name, ()))
    return kept.without(_recomputed_parts(run) | away)


def _layer(policy: PrecisionPolicy, run: RunFacts, layer: int) -> LayerBytes:
    shape, parallel = run.shape, run.parallel
    wide = policy.compute.bytes
    parts = shape.parts(layer)
    own = MIXERS.get(parts[-1])
    first = own.first if own else "self_attention.linear_qkv" if parts[-1] == "attention" else "mlp.linear_fc1"
    quant = policy.at(first, layer, shape.num_layers)
    # inputs of quantized linears are kept in the form the backward pass needs: one low-precision copy
    # (torchao keeps the original)
    narrow = quant is not None and quant.row.hardware.library == "transformer_engine" and te_layers(run)
    low = quant.bits / 8 if quant is not None and narrow else wide
    # two linears keep their input as it is where another module keeps it too, except under delayed scaling (megatron-core's set_save_original_input)
    apart = low if quant is not None and narrow and quant.row.history else 0.0
    count = run.tokens
    whole = count / parallel.sequence_width
    residual = (DType.FP32 if policy.residual_fp32 else policy.compute).bytes
    dropout = 1 if run.model.get("hidden_dropout") else 0
    joints = len(parts)  # each part reads a norm and adds to the residual stream
    width = whole * shape.hidden_size
    norms, folded = _normed(run, parts, low, wide, apart)
    attends = "attention" in parts
    attention, ups = _attention(run, count, low, wide, apart) if attends else (0.0, 0.0)
    dense = LayerBytes(
        entry=width * residual,
        between=width * (joints - 1) * residual,
        norms=width * norms,
        folded=width * (folded + joints * dropout),
        attention=attention,
        scores=_scores(policy, run, count) if attends else 0.0,
        mixer=count * own.kept(shape, low, wide) / parallel.tensor if own else 0.0,
        up_projections=ups,
        mlp=_mlp(run, count, shape.ffn_hidden_size, low, wide) if "mlp" in parts else 0.0,
    )
    return _with_experts(dense, run, count, low, wide) if "experts" in parts else dense


def _mlp(run: RunFacts, count: float, width: int, low: float, wide: int) -> float:
    """Inputs of the activation function and of the second linear, for an MLP that processes every token; a gate that is not fused keeps its factors."""
    gates = (2 if _fused(run) else 4) if run.shape.gated else 1
    return count * width / run.parallel.tensor * (gates * wide + low)


def _fused(run: RunFacts) -> bool:
    """Whether the activation function, its gate and in experts the router's weight are one kernel, which keeps its input alone."""
    model = run.model
    return bool(model.get("bias_activation_fusion") or model.get("use_fused_weighted_squared_relu"))


def _normed(run: RunFacts, parts: tuple[str, ...], low: float, wide: int, apart: float) -> tuple[float, float]:
    """Bytes an element of the outputs of a layer's norms, as what reads them keeps them: (of norms that are modules of their own, of the others).

    The router keeps the original, a quantized copy is apart from it where the shared expert does not keep it as well; latent attention's two down
    projections have a copy each."""
    latent, own, folded = run.shape.latent_attention, 0.0, 0.0
    for part in parts:
        if part == "experts":
            own += wide + (apart if run.shape.shared_expert_size else 0)
        elif part == "attention" and latent:
            own += low if low == wide else 2 * low
        elif te_layers(run):
            folded += low
        else:
            own += low
    return own, folded


def _with_experts(layer: LayerBytes, run: RunFacts, count: float, low: float, wide: int) -> LayerBytes:
    """What the MLP of a mixture keeps: each token goes to top-k experts; a balanced router gives every rank an equal share."""
    shape, tensor = run.shape, run.parallel.tensor
    width = run.parallel.expert_width
    routed = count * run.routed * width / tensor
    # the function's result, or the factors of a gate and their product, which the router's weight multiplies
    unfused = 0 if _fused(run) else 3 if shape.gated else 1
    return replace(
        layer,
        permuted=routed * shape.expert_hidden_size * low,
        gate=routed * (2 if shape.gated else 1) * shape.expert_ffn_hidden_size / width * wide,
        experts=count * ((shape.experts or 0) * 4 + shape.sizes.get("moe_latent_size", 0) * low) / tensor,
        activation=routed * shape.expert_ffn_hidden_size / width * (low + unfused * wide),
        shared=_mlp(run, count, shape.shared_expert_size, low, wide),
    )


def _attention(run: RunFacts, count: float, low: float, wide: int, apart: float) -> tuple[float, float]:
    """(queries, keys, values and output; outputs of up-projections) of the attention. apart: bytes of the output's copy for the linear after it."""
    shape, tensor = run.shape, run.parallel.tensor
    sums = count * shape.num_attention_heads / tensor * 4  # FP32 log-sum-exp of fused attention
    if shape.latent_attention is None:
        inner = shape.num_attention_heads * shape.kv_channels
        # an output's gate and its factors before the product (attention.py _apply_output_gate)
        width = (3 if shape.gated_attention else 1) * inner + 2 * shape.num_query_groups * shape.kv_channels
        return count * ((width + inner) * wide + inner * apart) / tensor + sums, 0.0
    latent = shape.latent_attention
    keys = shape.num_attention_heads * (latent["qk_head_dim"] + latent["qk_pos_emb_head_dim"])
    values = shape.num_attention_heads * latent["v_head_dim"]
    # the down projections process a rank's part of the sequence, of which the rotated part of the keys is gathered
    ranks = (latent["q_lora_rank"] + latent["kv_lora_rank"]) / run.parallel.sequence_width
    down = count * (ranks + latent["qk_pos_emb_head_dim"]) * (wide + low)
    return count * values / tensor * (wide + apart) + sums + down, count * (2 * keys + values) / tensor * wide


def _scores(policy: PrecisionPolicy, run: RunFacts, count: float) -> float:
    """What unfused attention keeps: probabilities, and with dropout also the mask (one byte) and the result."""
    if attention_kernel(run) == "fused":
        return 0.0
    each = policy.compute.bytes + (1 + policy.compute.bytes if run.model.get("attention_dropout", 0.1) else 0)
    return count * run.shape.seq_length * run.shape.num_attention_heads / run.parallel.tensor * each


def _head(policy: PrecisionPolicy, run: RunFacts, chunks: Iterable[Chunk]) -> float:
    """Logits with their FP32 softmax on the last stage for one micro-batch; more copies if the loss is fused or the embedding's gradient deferred."""
    model = run.model
    rows = run.tokens * run.shape.vocab_size / run.parallel.tensor
    narrow = (policy.logits or policy.compute).bytes
    each = narrow + 4
    if model.get("cross_entropy_loss_fusion"):
        # native: torch.compile keeps one more FP32 copy; Transformer Engine's kernel overwrites the logits with gradients
        each = 2 * narrow if model.get("cross_entropy_fusion_impl") == "te" else narrow + 8
    if model.get("defer_embedding_wgrad_compute"):
        count = batches(run)
        each += narrow * min(count, int(model.get("wgrad_deferral_limit") or count))
    return rows * each * sum(chunk.heads(run.shape) for chunk in chunks)
