"""The sections that are ours, as dataclasses: field, type, default. megatron-core's own sections are in the generated schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class GPT:
    """Arguments of megatron-core's GPTModel that its config classes do not have; they stand in the model section beside the config's fields."""

    vocab_size: int | None = None
    """As embedded, padding included. None: the tokenizer's size, padded as data.vocab_divisible_by says."""
    max_sequence_length: int | None = None
    """None: data.seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    """yarn: rotary embeddings scaled as yarn_* say; latent attention has rope_type instead."""
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    seq_len_interpolation_factor: float | None = None
    yarn_rotary_scaling_factor: float | None = None
    """By how much YaRN stretches the positions that the model was first trained on."""
    yarn_original_max_position_embeddings: int | None = None
    """Positions that the model was first trained on."""
    yarn_beta_fast: float = 32.0
    """Turns over those positions from which a frequency stays as it is."""
    yarn_beta_slow: float = 1.0
    """Turns up to which a frequency is divided by the whole factor."""
    yarn_mscale: float | None = None
    """Sines and cosines are multiplied by (0.1 yarn_mscale ln factor + 1) / (0.1 yarn_mscale_all_dim ln factor + 1); None: by 0.1 ln factor + 1."""
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool = True
    """Channels between which beta_fast and beta_slow lie, rounded to whole ones."""
    share_embeddings_and_output_weights: bool = False
    """Tied embeddings."""
    fp16_lm_cross_entropy: bool = False


YARN = tuple(name for name in GPT.__dataclass_fields__ if name.startswith("yarn_"))
"""YaRN of attention that is not latent: no arguments of GPTModel, which reads them off the config object, and no fields of the config's class."""


@dataclass(kw_only=True)
class Parallelism:
    """Parallel sizes; data parallelism is what remains of the world. Copied into the model's config."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    """None: as tensor_model_parallel_size."""
    sequence_parallel: bool = False


@dataclass(kw_only=True)
class Train:
    """How long, in which batches, and what to do about failures."""

    micro_batch_size: int | None = 4
    """Samples of one forward and backward pass on one data-parallel rank; None: the rank's whole share of global_batch_size."""
    global_batch_size: int = 8
    """Samples of one optimizer step over all ranks."""
    train_iters: int | None = None
    """Steps of the run, whatever the length of the data."""
    eval_interval: int | None = 100
    """Steps between two evaluations on held-out data; null: none."""
    eval_iters: int = 8
    seed: int = 1234
    log_interval: int = 10
    threads: int | None = None
    """torch's threads on a CPU; None: torch's own choice."""
    deterministic: bool = False
    """The same losses to the bit, at some cost in speed."""
    exit_interval: int | None = None
    """Stop (and save) when the step is a multiple of this one."""
    timeout_minutes: float = 60
    """How long ranks wait for each other before the run ends; long, since rank 0 may be preparing a large corpus meanwhile."""
    nonfinite: str = "skip"
    """After a step whose loss or gradients are not finite (it is never applied): "skip" it, "stop", or "rollback N": back to the newest checkpoint
    and on after the samples that led there, at most N times."""
    audit: Literal["stop", "warn"] = "stop"
    """What happens when the live tensors are not what the policy promised."""


@dataclass(kw_only=True)
class Data:
    """The text and how it is read."""

    corpus: str | list[str] = "stdlib"
    """"stdlib": the Python standard library's own sources. Or text, JSON lines, Parquet and Arrow files, folders and globs of them, data sets
    (hf:owner/name), prefixes of .bin/.idx pairs."""
    weights: list[float] | None = None
    """How often each entry of corpus is read, relative to the others; None: as often as it is long."""
    valid: str | list[str] | None = None
    """Text of its own for evaluation, spelled as corpus; None: the split's share of corpus."""
    tokenizer: str = "byte"
    """"byte", a folder with tokenizer.json, a tokenizer's file (tokenizer.json, SentencePiece, tiktoken), the id of a repository in the Hugging Face
    cache, or package.module:function."""
    end_of_text: str | int | None = None
    """The token after each document, or its number; None: as the tokenizer's files say."""
    vocab_divisible_by: int = 64
    """Where model.vocab_size is not given: the tokenizer's size, padded to a multiple of this times tensor_model_parallel_size."""
    seq_length: int | None = None
    """Tokens in a sample; None: model.max_sequence_length."""
    split: str = "98,1,1"
    """Weights of train, valid and test."""
    cache_dir: str | None = None
    """Where preprocessed corpora are kept; None: the user's cache folder."""
    json_key: str = "text"
    """Field or column that holds the text."""
    workers: int | None = None
    """Processes that preprocess; None: by the size of the corpus, at most 8."""


@dataclass(kw_only=True)
class Scheduler:
    """megatron-core's OptimizerParamScheduler in iterations."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_decay_iters: int | None = None
    """None: train.train_iters."""
    lr_warmup_iters: int = 0
    lr_warmup_fraction: float | None = None
    """Of train.train_iters, in place of lr_warmup_iters."""
    lr_warmup_init: float = 0.0
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    lr_wsd_decay_iters: int | None = None
    start_weight_decay: float | None = None
    """None: optimizer.weight_decay, as for end_weight_decay."""
    end_weight_decay: float | None = None
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    override_opt_param_scheduler: bool = False
    """After a resume, this section instead of the checkpoint's schedule."""
    use_checkpoint_opt_param_scheduler: bool = False


@dataclass(kw_only=True)
class Checkpoint:
    """Where a run is kept and what it starts from."""

    save: str | None = None
    load: str | None = None
    save_interval: int | None = None
    """Steps between two checkpoints; None: only at the end, where `save` is given."""
    keep_last: int | None = None
    """How many of the newest checkpoints are kept; None: all."""
    keep_every: int | None = None
    """Checkpoints of steps that are multiples of this one are always kept."""
    async_save: bool = False
    """Write checkpoints in the background while training goes on."""
    reset_optimizer: bool = False
    """Load the weights alone; optimizer states start fresh."""
    pretrained_checkpoint: str | None = None
    """Weights to begin with, where `load` holds nothing yet: steps count from 0, optimizer states start fresh."""


@dataclass(kw_only=True)
class Logger:
    """What is written beside the run."""

    log_dir: str | None = None
    """The run's folder: metrics as JSON lines, precision.json, TensorBoard's files; None: nothing is written."""
    tensorboard: bool = False
    """The same as "tensorboard" among the trackers."""
    trackers: list[Literal["csv", "tensorboard", "wandb", "mlflow", "jsonl"]] | None = None
    """Where metrics go besides metrics.jsonl: "csv", "tensorboard", "wandb", "mlflow"."""
    project: str = "mpbridge"
    """The project of W&B, the experiment of MLflow."""
    name: str | None = None
    """The run's name there; None: the recipe's and the folder's."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """offline: files under log_dir/wandb, for `wandb sync`."""
    mlflow_uri: str | None = None
    """None: a SQLite file in log_dir (mlflow.db)."""
    precision_every: int = 100
    """Steps between two measurements of what low precision does to tensors (statistics.jsonl); 0: none."""
    progress: bool = True
    """The progress line on the terminal."""


@dataclass(kw_only=True)
class Audit:
    """When the audit looks again after its first time."""

    every: int | None = None
    """Steps between two audits; null: so many that they cost less than half a percent of the run; 0: only where something begins anew."""


OWN: dict[str, type] = {
    "parallel": Parallelism,
    "train": Train,
    "data": Data,
    "scheduler": Scheduler,
    "checkpoint": Checkpoint,
    "logger": Logger,
    "audit": Audit,
}
"""Section -> its dataclass; model, optimizer and ddp are megatron-core's."""
