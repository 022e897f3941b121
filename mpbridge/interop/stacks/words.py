"""What one word means in each stack: same spelling, different tensors. The meaning is what `import` reads of the settings in a row."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mpbridge.common.errors import UnknownName
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.importers import read_args, read_text
from mpbridge.interop.stacks.meaning import Meaning, of_policy
from mpbridge.precision.registry import describe, get_mixed_precision_config
from mpbridge.precision.resolve import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class StackWord:
    """One word in one stack."""

    words: tuple[str, ...]
    """The spellings, as that stack takes them."""
    stack: str
    where: str
    """The context: a strategy, a wrapper, a default."""
    meaning: Meaning
    source: str


def _row(words: str, stack: str, where: str, source: str, settings: str | Meaning, version: str | None = None) -> StackWord:  # fmt: skip
    """A row. settings: as `import` reads them, arguments or YAML; a meaning, where what decides stands in Python."""
    if isinstance(settings, Meaning):
        meaning = settings
    elif settings.startswith("{"):
        meaning = read_text(settings, stack=stack, name="x.yaml").meaning
    else:
        meaning = read_args(settings, stack=stack, version=version).meaning
    meaning = dataclasses.replace(meaning, loss_scale=None)
    return StackWord(words=tuple(words.split(" | ")), stack=stack, where=where, meaning=meaning, source=source)


_B, _F = DType.BF16, DType.FP32
_IN_BF16 = Meaning(storage=_B, compute=_B, wire=_B, accumulator=_B, exp_avg=_B, exp_avg_sq=_B)
"""A module that its author loaded in BF16."""


def _ours(words: str, where: str, recipe: str, source: str = "precision/recipes.py", **said: str) -> StackWord:
    """A row of mpbridge's own: a recipe, with fields that are said beside it, on its engine."""
    policy = resolve(get_mixed_precision_config(recipe).derive(**said))
    meaning = of_policy(policy, engine=describe(recipe).engine or DEFAULT)
    return StackWord(words=tuple(words.split(" | ")), stack="mpbridge", where=where, meaning=meaning, source=source)


TABLE: tuple[StackWord, ...] = (
    _ours("bf16_mixed | bf16-mixed | bf16", "megatron-core, distributed optimizer", "bf16_mixed"),
    _row("--bf16 | bf16", "megatron-lm", "DDP", "training/arguments.py, validate_args", "--bf16"),
    _row("--bf16 | --bf16 --use-distributed-optimizer | bf16", "megatron-lm", "--use-distributed-optimizer", "training/arguments.py, validate_args", "--bf16 --use-distributed-optimizer"),
    _row("--bf16 | --bf16 --use-torch-fsdp2 | bf16", "megatron-lm", "--use-torch-fsdp2", "training/training.py, get_megatron_ddp_config: the reduction flag is not passed on", "--bf16 --use-torch-fsdp2"),
    _row("--bf16 | --bf16 --use-megatron-fsdp | bf16", "megatron-lm", "--use-megatron-fsdp", "training/arguments.py: --megatron-fsdp-main-grads-dtype auto; fsdp/src/megatron_fsdp/param_and_grad_buffer.py casts them for FP32 main weights", "--bf16 --use-megatron-fsdp"),
    _row("--bf16 | --bf16 --use-megatron-fsdp | bf16", "megatron-lm", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params, megatron-core 0.16 (whose default divides nothing)", "ddp.grad_reduce_in_fp32, which --bf16 switches on, is read there", "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", version="0.16"),
    _row("bf16_mixed | bf16-mixed", "megatron-bridge", "its recipes", "training/mixed_precision.py", "{mixed_precision: bf16_mixed}"),
    _row("bf16", "megatron-bridge", "its performance recipes", "perf_recipes/_common.py", "{mixed_precision: {bf16: true, grad_reduce_in_fp32: false}}"),
    _row("defaults | bf16", "torchtitan", "nothing said", "config/configs.py", "--training.steps 1"),
    _row("training.dtype=bfloat16 | bfloat16 | bf16", "torchtitan", "training.dtype=bfloat16", "config/configs.py", "--training.dtype bfloat16"),
    _row("torch_dtype: bfloat16 | bfloat16 | bf16", "automodel", "torch_dtype with torch's AdamW, fsdp2", "components/distributed/config.py", "{model: {torch_dtype: bfloat16}, optimizer: {_target_: torch.optim.AdamW}}"),
    _row("bfloat16 | bf16", "automodel", "torch_dtype with FusedAdam(master_weights, remainders)", "components/distributed/config.py", "{model: {torch_dtype: bfloat16}, optimizer: {_target_: te.FusedAdam, master_weights: true, store_param_remainders: true}}"),
    _row("strategy: megatron_fsdp | megatron_fsdp | bfloat16 | bf16", "automodel", "strategy megatron_fsdp, its defaults", "components/distributed/config.py", "{model: {torch_dtype: bfloat16}, distributed: {strategy: megatron_fsdp}}"),
    _row("param_dtype=bf16 | bf16", "fsdp2", "MixedPrecisionPolicy with nothing else said, module in FP32", "torch fsdp/_fully_shard/_fsdp_collectives.py", dataclasses.replace(_IN_BF16, storage=_F, accumulator=_F, exp_avg=_F, exp_avg_sq=_F, sharded="everything")),
    _row("mixed_precision=bf16 | bf16", "accelerate", "one GPU or DDP, module in FP32", "accelerator.py", "{distributed_type: MULTI_GPU, mixed_precision: bf16}"),
    _row("bf16", "accelerate", "one GPU or DDP, module loaded in BF16", "accelerator.py", dataclasses.replace(_IN_BF16, autocast=_B)),
    _row("bf16", "accelerate", "FSDP2", "accelerator.py, _prepare_fsdp2: the forward pass is not wrapped in autocast", "{distributed_type: FSDP, mixed_precision: bf16, fsdp_config: {fsdp_version: 2}}"),
    _row("bf16", "accelerate", "FSDP1", "utils/dataclasses.py, utils/fsdp_utils.py", "{distributed_type: FSDP, mixed_precision: bf16}"),
    _row("bf16", "accelerate", "DeepSpeed, ZeRO 1", "utils/dataclasses.py", "{distributed_type: DEEPSPEED, mixed_precision: bf16, deepspeed_config: {zero_stage: 1}}"),
    _row("bf16=True | bf16", "transformers", "DDP, checkpoint in FP32", "training_args.py, modeling_utils.py", "--bf16 --dtype float32"),
    _row("bf16=True | bf16", "transformers", "DDP, checkpoint in BF16 (its dtype is kept)", "modeling_utils.py", "--bf16 --dtype bfloat16"),
    _row("bf16-mixed | bf16 | bf16_mixed", "lightning", "one GPU or DDP", "plugins/precision/amp.py", "precision=bf16-mixed"),
    _row("bf16-mixed | bf16 | bf16_mixed", "lightning", "FSDP", "plugins/precision/fsdp.py", "precision=bf16-mixed strategy=fsdp"),
    _row("bf16-mixed | bf16 | bf16-true | bf16_mixed | bf16_true", "lightning", "DeepSpeed, ZeRO 2 by its default: both words alike", "strategies/deepspeed.py", "precision=bf16-mixed strategy=deepspeed"),
    _row("bf16-true | bf16_true", "lightning", "one GPU or DDP", "plugins/precision/half.py", "precision=bf16-true"),
    _row("bf16-true | bf16_true", "lightning", "FSDP", "plugins/precision/fsdp.py", "precision=bf16-true strategy=fsdp"),
    _ours("bf16_true | full_bf16 | bf16-true", "megatron-core, without the distributed optimizer", "full_bf16"),
    _row("bf16.enabled | bf16", "deepspeed", "ZeRO 1", "runtime/engine.py", "{bf16: {enabled: true}, zero_optimization: {stage: 1}}"),
    _row("bf16.enabled | bf16", "deepspeed", "ZeRO 2", "runtime/engine.py", "{bf16: {enabled: true}, zero_optimization: {stage: 2}}"),
    _row("bf16.enabled | bf16", "deepspeed", "ZeRO 3", "runtime/engine.py", "{bf16: {enabled: true}, zero_optimization: {stage: 3}}"),
    _row("bf16.enabled | bf16", "deepspeed", "ZeRO 1, data_types.grad_accum_dtype fp32", "runtime/engine.py", "{bf16: {enabled: true}, zero_optimization: {stage: 1}, data_types: {grad_accum_dtype: fp32}}"),
    _row("bf16.enabled | bf16", "deepspeed", "ZeRO 1, data_types.grad_accum_dtype fp32, release 0.18.4: without ZeRO", "runtime/constants.py: BFLOAT16 and DDP_BFLOAT16 are one word", "{bf16: {enabled: true}}"),
    _row("torch_autocast.enabled | torch_autocast | autocast", "deepspeed", "torch_autocast.enabled", "runtime/torch_autocast.py", "{torch_autocast: {enabled: true}, zero_optimization: {stage: 3}}"),
    _ours("fp16_mixed | fp16 | 16-mixed", "megatron-core, distributed optimizer", "fp16_mixed"),
    _row("--fp16 | fp16", "megatron-lm", "DDP", "training/arguments.py, validate_args", "--fp16"),
    _row("16-mixed | 16 | fp16", "lightning", "one GPU or DDP", "plugins/precision/amp.py", "precision=16-mixed"),
    _row("fp16.enabled | fp16", "deepspeed", "ZeRO 1", "runtime/engine.py", "{fp16: {enabled: true}, zero_optimization: {stage: 1}}"),
    _row("32-true | 32 | fp32", "lightning", "everywhere", "plugins/precision/precision.py", "precision=32-true"),
    _ours("fp32 | 32-true", "megatron-core, distributed optimizer", "fp32"),
    _row("no | fp32", "accelerate", "module in FP32", "accelerator.py", "{distributed_type: MULTI_GPU, mixed_precision: 'no'}"),
    _row("no", "accelerate", "module loaded in BF16", "accelerator.py", _IN_BF16),
    _row("fp16", "accelerate", "one GPU or DDP, module in FP32 (on a CPU it trains FP32)", "accelerator.py", "{distributed_type: MULTI_GPU, mixed_precision: fp16}"),
    _row("16-true", "lightning", "one GPU or DDP: no loss scale", "plugins/precision/half.py", "precision=16-true"),
    _row("16-true | 16-mixed | 16", "lightning", "DeepSpeed, ZeRO 2 by its default: both words alike", "strategies/deepspeed.py", "precision=16-mixed strategy=deepspeed"),
    _row("16-mixed | 16", "lightning", "FSDP", "plugins/precision/fsdp.py", "precision=16-mixed strategy=fsdp"),
    _row("--fp8-format hybrid | hybrid | fp8", "megatron-lm", "--bf16, nothing else said: delayed scaling", "transformer_config.py, fp8_recipe", "--bf16 --fp8-format hybrid"),
    _row("fp8=hybrid | hybrid | fp8", "megatron-bridge", "bf16_mixed's object, nothing else said: tensorwise", "training/mixed_precision.py", "{mixed_precision: {bf16: true, fp8: hybrid}}"),
    _row("fp8", "accelerate", "Transformer Engine, DDP: HYBRID, history 1024, max", "utils/dataclasses.py, TERecipeKwargs", "{distributed_type: MULTI_GPU, mixed_precision: fp8, fp8_config: {backend: TE}}"),
    _row("fp8", "accelerate", "torchao (AORecipeKwargs), FSDP2: tensorwise, FP8 all-gather", "utils/dataclasses.py, AORecipeKwargs", "{distributed_type: FSDP, mixed_precision: fp8, fp8_config: {backend: AO}, fsdp_config: {fsdp_version: 2}}"),
    _row("hybrid | HYBRID", "accelerate", "fp8_format, the default: E4M3 forward, E5M2 for gradients, delayed", "utils/dataclasses.py, TERecipeKwargs", "{distributed_type: MULTI_GPU, mixed_precision: fp8, fp8_config: {backend: TE}}"),
    _row("transformer-engine | fp8 | te", "lightning", "weights in BF16, no copy in FP32; DelayedScaling's own values", "plugins/precision/transformer_engine.py", "precision=transformer-engine"),
    _row("transformer-engine-float16", "lightning", "weights in FP16, no copy in FP32; DelayedScaling's own values", "plugins/precision/transformer_engine.py", "precision=transformer-engine-float16"),
    _row("transformer_engine | te", "megatron-lm", "--transformer-impl, the default: who computes; no quantization", "training/arguments.py", "--bf16 --transformer-impl transformer_engine"),
    _row("Float8LinearConverter | float8 | rowwise | fp8", "torchtitan", "its default recipe: rowwise, E4M3 everywhere", "components/quantization/float8.py", "--config llama3_8b_float8"),
    _row("rowwise_with_gw_hp", "torchtitan", "Float8LinearConverter: weight gradients in high precision", "components/quantization/float8.py", "--config llama3_8b_float8 --float8.recipe_name rowwise_with_gw_hp"),
    _row("fp8.recipe_name=tensorwise | tensorwise | fp8 | float8", "automodel", "the default of fp8.enabled, model in BF16", "components/quantization/fp8.py", "{model: {torch_dtype: bfloat16}, fp8: {enabled: true}}"),
    _row("fp8.recipe_name=rowwise | rowwise", "automodel", "model in BF16", "components/quantization/fp8.py", "{model: {torch_dtype: bfloat16}, fp8: {enabled: true, recipe_name: rowwise}}"),
    _ours("bf16_with_fp8_rowwise | rowwise | float8", "torch FSDP2 with torchao", "bf16_with_fp8_rowwise"),
    _ours("fp8=hybrid | hybrid | fp8", "bf16_mixed with nothing else said: tensorwise", "bf16_mixed", "precision/quants.py", fp8="hybrid"),
    _row("strategy: ddp | ddp", "automodel", "model in BF16: no policy is read", "components/distributed/config.py", "{model: {torch_dtype: bfloat16}, distributed: {strategy: ddp}}"),
    _row("delayed", "megatron-lm", "--fp8-format hybrid --fp8-recipe delayed, history 1 (most_recent)", "transformer_config.py", "--bf16 --fp8-format hybrid --fp8-recipe delayed"),
    _row("delayed", "accelerate", "Transformer Engine: history 1024 (max)", "utils/dataclasses.py, TERecipeKwargs", "{distributed_type: MULTI_GPU, mixed_precision: fp8, fp8_config: {backend: TE}}"),
    _row("mxfp8", "megatron-lm", "--fp8-format e4m3 --fp8-recipe mxfp8", "transformer_config.py", "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8"),
    _row("MXFP8LinearConverter | mxfp8", "torchtitan", "torchao", "components/quantization/mx.py", "--config llama3_8b_mxfp8"),
    _row("use_mxfp8_block_scaling | mxfp8", "accelerate", "Transformer Engine", "utils/dataclasses.py, TERecipeKwargs", "{distributed_type: MULTI_GPU, mixed_precision: fp8, fp8_config: {backend: TE, use_mxfp8_block_scaling: true}}"),
    _row("nvfp4", "megatron-lm", "--fp4-format e2m1 --fp4-recipe nvfp4", "transformer_config.py", "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4"),
    _row("NVFP4LinearConverter | nvfp4", "torchtitan", "torchao", "components/quantization/nvfp4.py", "--config llama3_8b_nvfp4"),
)  # fmt: skip


def meanings(word: str) -> tuple[StackWord, ...]:
    """Every row with this spelling, ignoring case and hyphens. Raises UnknownName with the nearest spellings."""
    wanted = _key(word)
    found = tuple(row for row in TABLE if any(_key(spelling) == wanted for spelling in row.words))
    if not found:
        raise UnknownName("word", word, [spelling for row in TABLE for spelling in row.words])
    return found


def _key(word: str) -> str:
    return word.strip().lower().lstrip("-").replace("-", "_")
