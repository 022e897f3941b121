"""Ranges and choices of settings whose type alone is too permissive: other values are meaningless, or fail too late."""

from __future__ import annotations

from dataclasses import dataclass

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

LIMITS: dict[str, Range] = {
    **dict.fromkeys(
        (
            f"{section}.{name}"
            for section in ("parallel", "model")
            for name in Parallelism.__dataclass_fields__
            if name.endswith("_size")
        ),
        SIZE,
    ),
    "model.num_layers": SIZE,
    "model.hidden_size": SIZE,
    "model.num_attention_heads": SIZE,
    "model.num_query_groups": SIZE,
    "model.ffn_hidden_size": SIZE,
    "model.kv_channels": SIZE,
    "model.num_moe_experts": SIZE,
    "model.moe_ffn_hidden_size": SIZE,
    "model.moe_router_topk": SIZE,
    "model.moe_shared_expert_intermediate_size": SIZE,
    "model.vocab_size": SIZE,
    "model.max_sequence_length": SIZE,
    "model.layernorm_epsilon": POSITIVE,
    "model.hidden_dropout": FRACTION,
    "model.attention_dropout": FRACTION,
    "model.init_method_std": POSITIVE,
    "model.embedding_init_method_std": POSITIVE,
    "model.mtp_num_layers": COUNT,
    "model.moe_latent_size": SIZE,
    "model.moe_router_num_groups": SIZE,
    "model.moe_router_group_topk": SIZE,
    "model.moe_router_topk_limited_devices": SIZE,
    "model.moe_aux_loss_coeff": COUNT,
    "model.moe_z_loss_coeff": COUNT,
    "model.moe_input_jitter_eps": COUNT,
    "model.q_lora_rank": SIZE,
    "model.kv_lora_rank": SIZE,
    "model.qk_head_dim": SIZE,
    "model.qk_pos_emb_head_dim": SIZE,
    "model.v_head_dim": SIZE,
    "model.rotary_scaling_factor": POSITIVE,
    "model.rotary_base": POSITIVE,
    "model.yarn_rotary_scaling_factor": SIZE,
    "model.yarn_original_max_position_embeddings": SIZE,
    "model.yarn_beta_fast": POSITIVE,
    "model.yarn_beta_slow": POSITIVE,
    "model.yarn_mscale": COUNT,
    "model.yarn_mscale_all_dim": COUNT,
    "model.rotary_percent": Range(above=0, most=1),
    "train.micro_batch_size": SIZE,
    "train.global_batch_size": SIZE,
    "train.train_iters": COUNT,
    "train.eval_interval": SIZE,
    "train.eval_iters": COUNT,
    "train.seed": COUNT,
    "train.log_interval": SIZE,
    "train.threads": SIZE,
    "train.exit_interval": SIZE,
    "train.timeout_minutes": COUNT,
    "data.seq_length": SIZE,
    "data.vocab_divisible_by": SIZE,
    "data.workers": SIZE,
    "scheduler.lr_decay_iters": SIZE,
    "scheduler.lr_warmup_iters": COUNT,
    "scheduler.lr_warmup_fraction": SHARE,
    "scheduler.lr_warmup_init": RATE,
    "scheduler.lr_wsd_decay_iters": SIZE,
    "scheduler.start_weight_decay": COUNT,
    "scheduler.end_weight_decay": COUNT,
    "audit.every": COUNT,
    "logger.precision_every": COUNT,
    "checkpoint.save_interval": SIZE,
    "checkpoint.keep_last": SIZE,
    "checkpoint.keep_every": SIZE,
    "optimizer.lr": RATE,
    "optimizer.min_lr": RATE,
    "optimizer.decoupled_lr": RATE,
    "optimizer.decoupled_min_lr": RATE,
    "optimizer.adam_beta1": FRACTION,
    "optimizer.adam_beta2": FRACTION,
    "optimizer.adam_eps": POSITIVE,  # with a gradient of zero it is the divisor
    "optimizer.weight_decay": COUNT,
    "optimizer.clip_grad": COUNT,
    "optimizer.sgd_momentum": FRACTION,
    "optimizer.optimizer_offload_fraction": SHARE,
    "ddp.num_distributed_optimizer_instances": SIZE,
    "ddp.bucket_size": SIZE,
}

SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WORDS: dict[str, tuple[str, ...]] = {
    "optimizer.optimizer": ("adam", "sgd", "muon", "torch_adamw"),
    "ddp.data_parallel_sharding_strategy": SHARDING,
    "ddp.outer_dp_sharding_strategy": ("no_shard", "optim"),
    "model.moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    "model.normalization": ("LayerNorm", "RMSNorm"),
    "model.rope_type": ("yarn", "rope"),
}
"""megatron-core declares these as plain strings and checks the values later, in a constructor, or never."""
