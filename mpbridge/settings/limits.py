"""Ranges and choices of settings whose type alone is too permissive: other values are meaningless, or fail too late."""

from __future__ import annotations

from dataclasses import dataclass

from mpbridge.common.facts import OPTIMIZERS
from mpbridge.settings.sections import Parallelism


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
    },
    FRACTION: {
        "model": "hidden_dropout attention_dropout",
        "optimizer": "adam_beta1 adam_beta2 sgd_momentum",
    },
    COUNT: {
        "model": "mtp_num_layers moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps yarn_mscale "
        "yarn_mscale_all_dim",
        "train": "train_iters eval_iters seed timeout_minutes",
        "scheduler": "lr_warmup_iters start_weight_decay end_weight_decay",
        "audit": "every",
        "logger": "precision_every",
        "optimizer": "weight_decay clip_grad",
    },
    Range(above=0, most=1): {"model": "rotary_percent"},
    SHARE: {
        "scheduler": "lr_warmup_fraction",
        "optimizer": "optimizer_offload_fraction",
    },
    RATE: {
        "scheduler": "lr_warmup_init",
        "optimizer": "lr min_lr decoupled_lr decoupled_min_lr",
    },
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
