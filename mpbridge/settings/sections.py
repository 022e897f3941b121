"""mpbridge's own sections as dataclasses: field, type, default. megatron-core's sections are in the generated schema.

LIMITS and WORDS are the ranges and choices of settings whose type alone is too permissive: other values are meaningless, or fail too late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpbridge.common.facts import OPTIMIZERS


@dataclass(kw_only=True)
class GPT:
    """Arguments of megatron-core's GPTModel and MambaModel that its config classes do not have; they belong to the model section, next to the config's fields."""

    vocab_size: int | None = None
    """Rows of the embedding, including padding. None: the tokenizer's size, padded according to data.vocab_divisible_by."""
    max_sequence_length: int | None = None
    """None: data.seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    """yarn: rotary embeddings scaled by the yarn_* settings; latent attention uses rope_type instead."""
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    seq_len_interpolation_factor: float | None = None
    yarn_rotary_scaling_factor: float | None = None
    """Factor by which YaRN extends the original context length."""
    yarn_original_max_position_embeddings: int | None = None
    """The context length that the model was originally trained with."""
    yarn_beta_fast: float = 32.0
    """Number of rotations over the original context above which a frequency is left unchanged."""
    yarn_beta_slow: float = 1.0
    """Number of rotations over the original context below which a frequency is divided by the full factor."""
    yarn_mscale: float | None = None
    """Sines and cosines are multiplied by (0.1 yarn_mscale ln factor + 1) / (0.1 yarn_mscale_all_dim ln factor + 1); None: by 0.1 ln factor + 1."""
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool = True
    """Whether the channel range between beta_fast and beta_slow is rounded to whole channels."""
    share_embeddings_and_output_weights: bool = False
    """Tied embeddings."""
    fp16_lm_cross_entropy: bool = False
    hybrid_override_pattern: str | None = None
    """A hybrid's layers, one symbol each (megatron-core's MambaModel): M a Mamba layer, * attention, - an MLP, E a mixture of experts, as in 'M-M*-'."""
    lora_rank: int | None = None
    """Rank of low-rank adapters (LoRA) beside the linears of lora_targets; None: there are none. mixed_precision.frozen says what is not trained."""
    lora_alpha: float | None = None
    """An adapter's result is multiplied by lora_alpha / lora_rank; None: by 1."""
    lora_targets: list[str] | None = None
    """Globs over linears below their layer ('self_attention.*'); None: attention's and the MLP's."""


YARN = tuple(name for name in GPT.__dataclass_fields__ if name.startswith("yarn_"))
"""YaRN settings of attention that is not latent. They are neither arguments of GPTModel, which reads them from the config object, nor fields of the config class."""

LORA = tuple(name for name in GPT.__dataclass_fields__ if name.startswith("lora_"))
"""Settings of adapters, which no class of megatron-core has."""
LORA_TARGETS = ("self_attention.linear_*", "mlp.linear_fc*")
"""The linears with adapters where lora_targets is None: attention's and the MLP's; Mamba's projections and experts by name only."""


@dataclass(kw_only=True)
class Parallelism:
    """Parallel sizes; the data-parallel size is the world size divided by the others. Copied into the model config."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    """None: the same as tensor_model_parallel_size."""
    sequence_parallel: bool = False


@dataclass(kw_only=True)
class Train:
    """How long to train, with which batches, and how to handle failures."""

    micro_batch_size: int | None = 4
    """Samples per forward and backward pass on one data-parallel rank; None: the rank's whole share of global_batch_size."""
    global_batch_size: int = 8
    """Samples per optimizer step over all ranks; if it is not set, at least 8, and a multiple of what the ranks can divide."""
    train_iters: int | None = None
    """Number of training steps, regardless of the length of the data."""
    eval_interval: int | None = 100
    """Steps between evaluations on held-out data; null: never."""
    eval_iters: int = 8
    seed: int = 1234
    log_interval: int = 10
    threads: int | None = None
    """Number of torch threads on a CPU; None: torch's default."""
    deterministic: bool = False
    """Bitwise reproducible losses, at some cost in speed."""
    exit_interval: int | None = None
    """Save and stop at the first step that is a multiple of this number."""
    timeout_minutes: float = 60
    """How long ranks wait for each other before the run is ended; long by default, because rank 0 may be preparing a large corpus."""
    nonfinite: str = "skip"
    """What to do after a step with a non-finite loss or gradients (it is never applied): "skip" it, "stop", or "rollback N": return to the newest checkpoint
    and continue after the samples that led to it, at most N times."""
    audit: Literal["stop", "warn"] = "stop"
    """What happens if the live tensors are not what the policy promised."""


@dataclass(kw_only=True)
class Data:
    """The training text and how it is read."""

    corpus: str | list[str] = "stdlib"
    """"stdlib": the sources of the Python standard library. Otherwise text and JSON lines, folders and globs of them, prefixes of .bin/.idx pairs."""
    weights: list[float] | None = None
    """How often each entry of corpus is read, relative to the others; None: in proportion to its length."""
    valid: str | list[str] | None = None
    """Separate text for evaluation, in the same form as corpus; None: the validation share of corpus according to split."""
    tokenizer: str = "byte"
    """"byte", a tokenizer.json or a folder with one, the id of a repository in the Hugging Face cache, or package.module:function."""
    end_of_text: str | int | None = None
    """The token that ends each document, or its id; None: taken from the tokenizer's files."""
    vocab_divisible_by: int = 64
    """If model.vocab_size is not set, it is the tokenizer's size padded to a multiple of this number times tensor_model_parallel_size."""
    seq_length: int | None = None
    """Tokens per sample; None: model.max_sequence_length."""
    split: str = "98,1,1"
    """Weights of the train, valid and test parts."""
    cache_dir: str | None = None
    """Folder for preprocessed corpora; None: the user's cache folder."""
    json_key: str = "text"
    """Field that holds the text."""


@dataclass(kw_only=True)
class Scheduler:
    """megatron-core's OptimizerParamScheduler, in iterations."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_decay_iters: int | None = None
    """None: train.train_iters."""
    lr_warmup_iters: int = 0
    lr_warmup_fraction: float | None = None
    """Fraction of train.train_iters, instead of lr_warmup_iters."""
    lr_warmup_init: float = 0.0
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    lr_wsd_decay_iters: int | None = None
    start_weight_decay: float | None = None
    """None: optimizer.weight_decay; the same holds for end_weight_decay."""
    end_weight_decay: float | None = None
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    override_opt_param_scheduler: bool = False
    """Whether a resumed run uses this section instead of the checkpoint's schedule."""
    use_checkpoint_opt_param_scheduler: bool = False


@dataclass(kw_only=True)
class Checkpoint:
    """Where a run is saved and what it starts from."""

    save: str | None = None
    load: str | None = None
    save_interval: int | None = None
    """Steps between checkpoints; None: only at the end, if `save` is set."""
    keep_last: int | None = None
    """Number of most recent checkpoints to keep; None: all."""
    keep_every: int | None = None
    """Checkpoints at steps that are multiples of this number are always kept."""
    async_save: bool = False
    """Write checkpoints in the background while training continues."""
    accept: str | None = None
    """The recipe under which `load` was saved, if this run's changes what is learned from there on: without this word, such a resume is refused."""
    reset_optimizer: bool = False
    """Load only the weights; optimizer states start fresh."""
    pretrained_checkpoint: str | None = None
    """Weights to start from if `load` has no checkpoint yet: steps count from 0, optimizer states start fresh."""


@dataclass(kw_only=True)
class Logger:
    """What is logged about the run."""

    log_dir: str | None = None
    """The run's folder: metrics as JSON lines, precision.json, TensorBoard files; None: nothing is written."""
    tensorboard: bool = False
    """Equivalent to "tensorboard" in `trackers`."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "jsonl"]] | None = None
    """Where metrics are logged in addition to metrics.jsonl: "tensorboard", "wandb", "mlflow"."""
    project: str = "mpbridge"
    """The W&B project, or the MLflow experiment."""
    name: str | None = None
    """The run's name in W&B and MLflow; None: made from the names of the recipe and the folder."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """offline: files under log_dir/wandb, for `wandb sync`."""
    mlflow_uri: str | None = None
    """None: a SQLite file in log_dir (mlflow.db)."""
    precision_every: int = 100
    """Steps between measurements of the effect of low precision on tensors (statistics.jsonl); 0: never."""
    progress: bool = True
    """The progress line on the terminal."""


@dataclass(kw_only=True)
class Audit:
    """When the audit is repeated after its first run."""

    every: int | None = None
    """Steps between audits; null: chosen so that they cost less than half a percent of the run; 0: only after the start, a resume, a rollback and a change of recipe."""


OWN: dict[str, type] = {
    "parallel": Parallelism, "train": Train, "data": Data, "scheduler": Scheduler, "checkpoint": Checkpoint, "logger": Logger, "audit": Audit,
}  # fmt: skip
"""Section -> its dataclass; model, optimizer and ddp are megatron-core's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds on a number; None: no bound on that side."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether `value` lies within."""
        low = (self.least is None or value >= self.least) and (self.above is None or value > self.above)
        return low and (self.most is None or value <= self.most) and (self.below is None or value < self.below)

    def __str__(self) -> str:
        words = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {bound:g}" for word, bound in words if bound is not None)


POSITIVE, COUNT, SIZE = Range(above=0), Range(least=0), Range(least=1)
SHARE, FRACTION = Range(least=0, most=1), Range(least=0, below=1)
RATE = Range(least=0, below=1000)
"""A learning rate: far above any useful one."""

_PARALLEL = " ".join(name for name in Parallelism.__dataclass_fields__ if name.endswith("_size"))
_BOUNDS: dict[Range, dict[str, str]] = {
    SIZE: {
        "parallel": _PARALLEL,
        "model": f"{_PARALLEL} "
        "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels "
        "num_moe_experts moe_ffn_hidden_size moe_router_topk moe_shared_expert_intermediate_size "
        "vocab_size max_sequence_length moe_latent_size moe_router_num_groups moe_router_group_topk "
        "moe_router_topk_limited_devices q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim "
        "v_head_dim yarn_rotary_scaling_factor yarn_original_max_position_embeddings",
        "train": "micro_batch_size global_batch_size eval_interval log_interval threads exit_interval",
        "data": "seq_length vocab_divisible_by",
        "scheduler": "lr_decay_iters lr_wsd_decay_iters",
        "checkpoint": "save_interval keep_last keep_every",
        "ddp": "num_distributed_optimizer_instances bucket_size",
    },
    POSITIVE: {
        "model": "layernorm_epsilon init_method_std embedding_init_method_std rotary_scaling_factor rotary_base "
        "yarn_beta_fast yarn_beta_slow",
        "optimizer": "adam_eps",
        "train": "timeout_minutes",
    },
    FRACTION: {"model": "hidden_dropout attention_dropout", "optimizer": "adam_beta1 adam_beta2 sgd_momentum"},
    COUNT: {
        "model": "mtp_num_layers moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps yarn_mscale yarn_mscale_all_dim",
        "train": "train_iters eval_iters seed",
        "scheduler": "lr_warmup_iters start_weight_decay end_weight_decay",
        "audit": "every",
        "logger": "precision_every",
        "optimizer": "weight_decay clip_grad",
    },
    Range(above=0, most=1): {"model": "rotary_percent"},
    SHARE: {"scheduler": "lr_warmup_fraction", "optimizer": "optimizer_offload_fraction"},
    RATE: {"scheduler": "lr_warmup_init", "optimizer": "lr min_lr decoupled_lr decoupled_min_lr"},
}
"""Bound -> section -> names of its settings."""
LIMITS: dict[str, Range] = {
    f"{section}.{name}": bound
    for bound, sections in _BOUNDS.items()
    for section, names in sections.items()
    for name in names.split()
}

SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WORDS: dict[str, tuple[str, ...]] = {
    "optimizer.optimizer": tuple(OPTIMIZERS),
    "ddp.data_parallel_sharding_strategy": SHARDING,
    "ddp.outer_dp_sharding_strategy": ("no_shard", "optim"),
    "model.moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    "model.normalization": ("LayerNorm", "RMSNorm"),
    "model.rope_type": ("yarn", "rope"),
}
"""megatron-core declares these as plain strings and checks the values later, in a constructor, or never."""
