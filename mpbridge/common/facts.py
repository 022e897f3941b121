"""RunFacts: everything besides the policy that determines whether and how a run works. Frozen, and independent of any framework."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mpbridge.common.errors import BadValue
from mpbridge.common.traits import DEFAULT, EngineTraits, traits
from mpbridge.common.versions import at_least

Realization = Literal["native", "emulated"]

ADAMS = ("adam", "torch_adamw")
"""Values of optimizer.optimizer with Adam's two moments for every parameter."""
MUONS = ("muon", "dist_muon")
"""Values under which hidden matrices get orthogonalized momentum and everything else Adam; dist_muon is megatron-core's layer-wise sharded one."""
EMERGING = ("soap", "lion")
"""Others that megatron-core has since 0.18, by Emerging-Optimizers; they too share a model with Adam (optimizer/emerging_optimizers.py)."""
BESIDE_ADAM = (*MUONS, *EMERGING)
"""Values whose optimizer trains hidden matrices alone."""
FACTORS = ("L", "R", "Q_L", "Q_R")
"""SOAP's Kronecker factors of a matrix and their eigenvectors: square, of its rows and of its columns (Emerging-Optimizers 0.3.0 soap/soap.py)."""
OPTIMIZERS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    dict.fromkeys(ADAMS, ("exp_avg", "exp_avg_sq"))
    | dict.fromkeys(("sgd", *MUONS), ("momentum_buffer",))
    | {"soap": ("exp_avg", "exp_avg_sq", *FACTORS), "lion": ("exp_avg",)}
)
"""Value of optimizer.optimizer -> keys of the states that it keeps for each parameter (BESIDE_ADAM: for each hidden matrix)."""
STATE_ROLES: Mapping[str, str] = types.MappingProxyType(
    {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "exp_avg", "master_param": "main_params"}
    | dict.fromkeys(FACTORS, "factors")
)
"""Key of a tensor in an optimizer's state -> its role."""
_READ: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {"sgd": ("sgd_",), "soap": ("soap_",), "adaptive_muon": ("muon_", "adaptive_muon_")}
    | dict.fromkeys(MUONS, ("muon_",))
)
"""Value of optimizer.optimizer -> how the settings begin that it reads and Adam does not. Lion itself gets Adam's betas."""
OWN_SETTINGS = ("sgd_", "muon_", "soap_", "lion_", "adaptive_muon_")
"""How settings of megatron-core's optimizer section begin that only some optimizers read."""


def reads(optimizer: str, setting: str, settings: Mapping[str, Any]) -> bool:
    """Whether that optimizer reads one of OWN_SETTINGS. settings: the section, of which muon_scalar_optimizer decides whether Muon reads Lion's."""
    lion = "muon" in optimizer and settings.get("muon_scalar_optimizer") == "lion"
    return setting.startswith((*_READ.get(optimizer, ()), *(("lion_",) if lion else ())))


def least_left(beta2: float, steps: int = 1) -> float:
    """The share of a second moment that so many steps of Adam leave at least: v' = beta2 v + (1 - beta2) g^2, and g^2 is never negative."""
    return beta2**steps


PARTS: Mapping[str, str] = types.MappingProxyType({"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"})
"""Symbol of a hybrid's pattern -> the part that such a layer consists of (megatron-core 0.16.1 ssm/mamba_hybrid_layer_allocation.py)."""
SIZES: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {"mamba": ("mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim")}
)
"""Part -> settings of the model section that are sizes of its own."""
MOST = 10_000
"""Maximum number of layers or experts: more is a typo, and would take minutes to process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A GPT's or a hybrid's shape, in megatron-core's names; sizes are global (before tensor parallelism)."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    """Rows of the embedding, including padding."""
    seq_length: int
    gated: bool = False
    """gated_linear_unit: fc1 has twice the rows."""
    tied: bool = True
    """share_embeddings_and_output_weights."""
    learned_positions: bool = False
    linear_bias: bool = True
    qkv_bias: bool = False
    norm_bias: bool = True
    """LayerNorm has a bias, RMSNorm has none."""
    qk_layernorm: bool = False
    gated_attention: bool = False
    """attention_output_gate: queries' projection also makes a gate for each channel of the output."""
    experts: int | None = None
    """num_moe_experts; None: dense."""
    expert_ffn_hidden_size: int = 0
    expert_layers: tuple[bool, ...] = ()
    """Whether each layer is a mixture of experts; empty if the model is dense."""
    expert_topk: int = 0
    shared_expert_size: int = 0
    """Width of the shared expert; 0: none."""
    expert_bias: bool = False
    """moe_router_enable_expert_bias: a buffer of one FP32 value per expert."""
    grouped_gemm: bool = False
    latent_attention: Mapping[str, int] | None = None
    """MLA: q_lora_rank (0: none), kv_lora_rank, qk_head_dim, qk_pos_emb_head_dim, v_head_dim."""
    mtp_layers: int = 0
    hybrid: bool = False
    """Some layers are Mamba layers; without `pattern` only the names of their linears are known here."""
    pattern: str = ""
    """hybrid_override_pattern: a symbol of PARTS for each layer; empty: every layer has attention and an MLP."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """SIZES of the parts that a hybrid has, and moe_latent_size where experts read and write fewer features than a layer, between two projections."""
    sinks: bool = False
    """softmax_type "learnable": one parameter per head in the denominator of its softmax."""
    lora_rank: int = 0
    """Rank of the adapters; 0: none."""
    lora_targets: tuple[str, ...] = ()
    """Globs over the linears, below their layer, that have one."""

    # a cache's key is this very shape, since its mappings have no hash; in a set equal ones would differ
    __hash__ = object.__hash__

    def __post_init__(self) -> None:
        for name in ("num_layers", "experts", "mtp_layers"):
            value = getattr(self, name) or 0
            if not 0 <= value <= MOST:
                raise BadValue(f"model.{name}={value}: expected 0 to {MOST}")
        # each expert has a row in every table: the limit is thirty times DeepSeek-V3's number
        if self.num_layers * (self.experts or 0) > 50 * MOST:
            raise BadValue(
                f"model.num_layers={self.num_layers} with {self.experts} experts: expected at most {50 * MOST} experts in all"
            )

    def is_expert_layer(self, layer: int) -> bool:
        """Whether 0-based `layer` is a mixture of experts."""
        return bool(self.expert_layers) and self.expert_layers[layer]

    def parts(self, layer: int) -> tuple[str, ...]:
        """What 0-based `layer` consists of: "attention" and "mlp" or "experts"; in a hybrid one of these alone, or "mamba"."""
        if self.pattern:
            return (PARTS[self.pattern[layer]],)
        return ("attention", "experts" if self.is_expert_layer(layer) else "mlp")

    @property
    def expert_hidden_size(self) -> int:
        """Features of a token that is sent to an expert."""
        return self.sizes.get("moe_latent_size") or self.hidden_size

    @property
    def mamba_sizes(self) -> tuple[int, int, int]:
        """(channels of all heads, channels of B and of C over all groups, heads) of a Mamba layer."""
        heads, width, groups, states = (self.sizes[name] for name in SIZES["mamba"])
        return heads * width, groups * states, heads

    @property
    def attention_width(self) -> int:
        """Elements of one position's keys and values, over all query heads: a query costs two FLOPs for each, per position that it attends to."""
        latent = self.latent_attention
        if latent is None:
            return 2 * self.num_attention_heads * self.kv_channels
        return self.num_attention_heads * sum(
            latent[name] for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Parallel sizes; the data-parallel size is the world size divided by the others."""

    world_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """None: the same as `tensor`."""
    sequence: bool = False

    def __post_init__(self) -> None:
        kinds = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}
        experts = {"expert tensor": self.expert_width, "expert": self.expert, "pipeline": self.pipeline}
        for sizes in (kinds, experts):  # parallel_state.py builds a grid of ranks from each
            need = math.prod(sizes.values())
            if self.world_size % need:
                words = " x ".join(f"{kind} {size}" for kind, size in sizes.items())
                raise BadValue(f"{self.world_size} processes cannot be divided into {words} = {need}")

    @property
    def data(self) -> int:
        """Number of replicas that split the batch."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def expert_width(self) -> int:
        """Number of ranks that split each expert's weights."""
        return self.expert_tensor or self.tensor

    @property
    def expert_data(self) -> int:
        """Number of replicas of each expert's weights."""
        return self.world_size // (self.expert_width * self.expert * self.pipeline)

    def replicas(self, *, expert: bool) -> int:
        """Number of replicas of a weight. expert: whether it is an expert's."""
        return self.expert_data if expert and self.expert > 1 else self.data * self.context

    @property
    def sequence_width(self) -> int:
        """Number of ranks that split a sequence outside of tensor-parallel linears, besides context parallelism."""
        return self.tensor if self.sequence else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """Which optimizer updates the weights, and what the optimizer section says about its states."""

    name: str = "adam"
    """megatron-core's `optimizer` setting, or "torch_adamw" for torch's own on FSDP2 (`memory.keeps.updater`)."""
    distributed: bool = False
    cpu_offload: bool = False
    overlap_param_gather_with_step: bool = False
    settings: Mapping[str, Any] = field(default_factory=lambda: types.MappingProxyType({}))
    """The optimizer section's other plain settings, with the plan's writes applied."""

    @property
    def own(self) -> dict[str, Any]:
        """The settings that no other optimizer reads, which decide what an update is."""
        return {name: value for name, value in self.settings.items() if reads(self.name, name, self.settings)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Installed or assumed versions, as strings; None: not installed (for the CUDA ones: or unknown)."""

    torch: str | None = None
    megatron_core: str | None = None
    transformer_engine: str | None = None
    torchao: str | None = None
    cuda: str | None = None
    cublaslt: str | None = None
    python: str | None = None

    def of(self, library: str) -> str | None:
        """The version of a library, by its field name."""
        found: str | None = getattr(self, library)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphs:
    """What CUDA graphs capture of a step."""

    implementation: str = "none"
    """'none', 'local', 'transformer_engine' or, since megatron-core 0.18, 'full_iteration'."""
    parts: tuple[str, ...] = ()
    """The parts of a layer that the scope names, or 'full_iteration'; () is the whole layer. Without an implementation nothing captures them."""

    @property
    def on(self) -> bool:
        """Whether anything is captured."""
        return self.implementation != "none"

    @property
    def whole_step(self) -> bool:
        """Whether one graph is the whole iteration."""
        return self.on and "full_iteration" in self.parts

    def inside_layers(self, part: str) -> bool:
        """Whether that part of a layer is captured, by a graph of its layer."""
        return self.on and (not self.parts or part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Everything besides the policy that rules, shapes, memory and fingerprints depend on."""

    shape: ModelShape
    parallel: Parallel = Parallel()
    engine: str = DEFAULT
    realization: Realization = "native"
    optimizer: OptimizerFacts = OptimizerFacts()
    model: Mapping[str, Any] = field(default_factory=lambda: types.MappingProxyType({}))
    """The model section's other plain settings (transformer_impl, recompute_*, moe_token_dispatcher_type, fusions ...), with the plan's writes applied."""
    ddp: Mapping[str, Any] = field(default_factory=lambda: types.MappingProxyType({}))
    """The ddp section with the plan's writes applied (overlap_grad_reduce, bucket_size, ...)."""
    micro_batch_size: int = 1
    global_batch_size: int = 1
    versions: Versions = Versions()
    machine: Any = None
    """The common.machines.Machine that will run it; None: unknown."""
    played: bool = False
    """Whether that machine is played on a CPU, whose processes talk by gloo."""
    inert: tuple[str, ...] = ()
    """Precision settings by the author that nothing reads, as text (`precision.inert`)."""
    environment: Mapping[str, str] = field(default_factory=lambda: types.MappingProxyType({}))
    """NVTE_* and CUDA_* variables that contradict or complete a recipe."""

    __hash__ = object.__hash__  # as a shape's

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch on one context-parallel rank."""
        return self.shape.seq_length * self.micro_batch_size // self.parallel.context

    @property
    def routed(self) -> float:
        """Rows that a token has at experts of a balanced router: its top-k, times a capacity factor that drops some, or to which all are padded."""
        factor, topk = self.model.get("moe_expert_capacity_factor"), self.shape.expert_topk
        if factor is None or factor < 0:
            return topk
        return topk * float(factor if self.model.get("moe_pad_expert_input_to_capacity") else min(1, factor))

    @property
    def dispatcher(self) -> str:
        """What sends tokens to their experts; megatron-core's default gathers those of all ranks, and counts them by values."""
        return str(self.model.get("moe_token_dispatcher_type") or "allgather")

    @property
    def cuda_graphs(self) -> CudaGraphs:
        """What its settings capture, in all the spellings that megatron-core reads (transformer_config.py __post_init__)."""
        model = self.model
        switched = {"local": "enable_cuda_graph", "transformer_engine": "external_cuda_graph"}  # before cuda_graph_impl
        chosen = next((name for name, switch in switched.items() if model.get(switch)), model.get("cuda_graph_impl"))
        # since 0.18 the scope is called cuda_graph_modules; the old name wins if it is set
        given = model.get("cuda_graph_scope") or model.get("cuda_graph_modules") or ()
        given = getattr(given, "name", given)
        names = given.split(",") if isinstance(given, str) else [getattr(item, "name", item) for item in given]
        parts, step = tuple(map(str, names)), "full_iteration"
        parts = () if parts == ("full",) else parts
        # until 0.17 one of the parts, since then an implementation that the part stands for (but for none by Transformer Engine)
        stands = step in parts and chosen != "transformer_engine" and at_least(self.versions.megatron_core, "0.18")
        if chosen == step or stands:
            return CudaGraphs(implementation=step, parts=(step, *(part for part in parts if part != step)))
        routing = ("moe_router", "moe_preprocess")
        if chosen == "local" and set(routing) & set(parts):  # its graphs do not tell the two apart
            parts += tuple(part for part in routing if part not in parts)
        return CudaGraphs(implementation=str(chosen or "none"), parts=parts)

    @property
    def instances(self) -> int:
        """Groups of data-parallel ranks, each of which shares a whole optimizer state."""
        return int(self.ddp.get("num_distributed_optimizer_instances") or 1)

    def sharers(self, *, expert: bool) -> int:
        """Number of ranks that share the optimizer state of a weight: its replicas, in as many groups as the distributed optimizer has instances."""
        # more instances than ranks: `optimizer-instances-without-ranks` refuses them
        return max(1, self.parallel.replicas(expert=expert) // self.instances)

    def sharded(self, role: str) -> bool:
        """Whether the engine divides that role among data-parallel ranks, as the ddp section asks it to."""
        return self.traits.sharded(role, distributed=self.optimizer.distributed, ddp=self.ddp) != "whole"

    @property
    def traits(self) -> EngineTraits:
        """Traits of the engine. Raises UnknownName."""
        return traits(self.engine)
