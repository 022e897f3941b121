"""What one word means in each stack: same spelling, different tensors. Each row was read or run at the version in its stack's module."""

from __future__ import annotations

from dataclasses import dataclass

from mpbridge.common.errors import UnknownName
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.meaning import Meaning, Sharded, of_policy
from mpbridge.precision.regions import Quant, Region
from mpbridge.precision.registry import describe, get_mixed_precision_config
from mpbridge.precision.resolve import resolve

_OWN = Quant(format="hybrid", scaling="delayed", amax_history=1024, amax_algo="max")
"""Transformer Engine's DelayedScaling with its defaults."""
_F, _B, _H = DType.FP32, DType.BF16, DType.FP16


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


def _row(
    words: str, stack: str, where: str, source: str, *, storage: DType, compute: DType, wire: DType, accumulator: DType,
    main: DType | None = None, autocast: DType | None = None, reads: DType | None = None, moments: DType = _F,
    sharded: Sharded = "nothing", remainders: bool = False, quant: Quant | None = None,
) -> StackWord:  # fmt: skip
    meaning = Meaning(
        storage=storage, compute=compute, autocast=autocast, main=main, remainders=remainders, wire=wire, accumulator=accumulator,
        optimizer_reads=reads, exp_avg=moments, exp_avg_sq=moments, sharded=sharded,
        regions=(Region(quant=quant),),
    )  # fmt: skip
    return StackWord(words=tuple(words.split(" | ")), stack=stack, where=where, meaning=meaning, source=source)


def _ours(words: str, where: str, recipe: str, source: str = "precision/recipes.py", **said: str) -> StackWord:
    """A row of mpbridge's own: a recipe, with fields that are said beside it, on its engine."""
    policy = resolve(get_mixed_precision_config(recipe).derive(**said))
    meaning = of_policy(policy, engine=describe(recipe).engine or DEFAULT)
    return StackWord(words=tuple(words.split(" | ")), stack="mpbridge", where=where, meaning=meaning, source=source)


TABLE: tuple[StackWord, ...] = (
    _ours("bf16_mixed | bf16-mixed | bf16", "megatron-core, distributed optimizer", "bf16_mixed"),
    _row("--bf16 | bf16", "megatron-lm", "DDP", "training/arguments.py, validate_args",
         storage=_B, compute=_B, main=_F, wire=_F, accumulator=_F),
    _row("--bf16 | --bf16 --use-distributed-optimizer | bf16", "megatron-lm", "--use-distributed-optimizer", "training/arguments.py, validate_args",
         storage=_B, compute=_B, main=_F, wire=_F, accumulator=_F, sharded="optimizer"),
    _row("--bf16 | --bf16 --use-torch-fsdp2 | bf16", "megatron-lm", "--use-torch-fsdp2", "training/training.py, get_megatron_ddp_config: the reduction flag is not passed on",
         storage=_B, compute=_B, main=_F, wire=_B, accumulator=_B, reads=_F, sharded="everything"),
    _row("--bf16 | --bf16 --use-megatron-fsdp | bf16", "megatron-lm", "--use-megatron-fsdp", "training/arguments.py: --megatron-fsdp-main-grads-dtype auto; fsdp/src/megatron_fsdp/param_and_grad_buffer.py casts them for FP32 main weights",
         storage=_B, compute=_B, main=_F, wire=_B, accumulator=_B, reads=_F, sharded="everything"),
    _row("--bf16 | --bf16 --use-megatron-fsdp | bf16", "megatron-lm", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params, megatron-core 0.16 (whose default divides nothing)", "ddp.grad_reduce_in_fp32, which --bf16 switches on, is read there",
         storage=_B, compute=_B, main=_F, wire=_F, accumulator=_F, sharded="everything"),
    _row("bf16_mixed | bf16-mixed", "megatron-bridge", "its recipes", "training/mixed_precision.py",
         storage=_B, compute=_B, main=_F, wire=_F, accumulator=_F, sharded="optimizer"),
    _row("bf16", "megatron-bridge", "its performance recipes", "perf_recipes/_common.py",
         storage=_B, compute=_B, main=_F, wire=_B, accumulator=_B, reads=_F, sharded="optimizer"),
    _row("defaults | bf16", "torchtitan", "nothing said", "config/configs.py",
         storage=_F, compute=_B, wire=_F, accumulator=_F, sharded="everything"),
    _row("training.dtype=bfloat16 | bfloat16 | bf16", "torchtitan", "training.dtype=bfloat16", "config/configs.py",
         storage=_B, compute=_B, wire=_F, accumulator=_B, moments=_B, sharded="everything"),
    _row("torch_dtype: bfloat16 | bfloat16 | bf16", "automodel", "torch_dtype with torch's AdamW, fsdp2", "components/distributed/config.py",
         storage=_B, compute=_B, wire=_F, accumulator=_B, moments=_B, sharded="everything"),
    _row("bfloat16 | bf16", "automodel", "torch_dtype with FusedAdam(master_weights, remainders)", "components/distributed/config.py",
         storage=_B, compute=_B, main=_F, remainders=True, wire=_F, accumulator=_B, sharded="everything"),
    _row("strategy: megatron_fsdp | megatron_fsdp | bfloat16 | bf16", "automodel", "strategy megatron_fsdp, its defaults", "components/distributed/config.py",
         storage=_B, compute=_B, wire=_B, accumulator=_B, moments=_B, sharded="everything"),
    _row("param_dtype=bf16 | bf16", "fsdp2", "MixedPrecisionPolicy with nothing else said, module in FP32", "torch fsdp/_fully_shard/_fsdp_collectives.py",
         storage=_F, compute=_B, wire=_B, accumulator=_F, sharded="everything"),
    _row("mixed_precision=bf16 | bf16", "accelerate", "one GPU or DDP, module in FP32", "accelerator.py",
         storage=_F, compute=_B, autocast=_B, wire=_F, accumulator=_F),
    _row("bf16", "accelerate", "one GPU or DDP, module loaded in BF16", "accelerator.py",
         storage=_B, compute=_B, autocast=_B, wire=_B, accumulator=_B, moments=_B),
    _row("bf16", "accelerate", "FSDP2", "accelerator.py, _prepare_fsdp2: the forward pass is not wrapped in autocast",
         storage=_F, compute=_B, wire=_B, accumulator=_F, sharded="everything"),
    _row("bf16", "accelerate", "FSDP1", "utils/dataclasses.py, utils/fsdp_utils.py",
         storage=_F, compute=_B, autocast=_B, wire=_B, accumulator=_F, sharded="everything"),
    _row("bf16", "accelerate", "DeepSpeed, ZeRO 1", "utils/dataclasses.py",
         storage=_B, compute=_B, main=_F, wire=_B, accumulator=_B, reads=_F, sharded="optimizer"),
    _row("bf16=True | bf16", "transformers", "DDP, checkpoint in FP32", "training_args.py, modeling_utils.py",
         storage=_F, compute=_B, autocast=_B, wire=_F, accumulator=_F),
    _row("bf16=True | bf16", "transformers", "DDP, checkpoint in BF16 (its dtype is kept)", "modeling_utils.py",
         storage=_B, compute=_B, autocast=_B, wire=_B, accumulator=_B, moments=_B),
    _row("bf16-mixed | bf16 | bf16_mixed", "lightning", "one GPU or DDP", "plugins/precision/amp.py",
         storage=_F, compute=_B, autocast=_B, wire=_F, accumulator=_F),
    _row("bf16-mixed | bf16 | bf16_mixed", "lightning", "FSDP", "plugins/precision/fsdp.py",
         storage=_F, compute=_B, autocast=_B, wire=_B, accumulator=_F, sharded="everything"),
    _row("bf16-mixed | bf16 | bf16-true | bf16_mixed | bf16_true", "lightning", "DeepSpeed, ZeRO 2 by its default: both words alike", "strategies/deepspeed.py",
         storage=_B, compute=_B, main=_F, wire=_B, accumulator=_B, reads=_F, sharded="gradients"),
    _row("bf16-true | bf16_true", "lightning", "one GPU or DDP", "plugins/precision/half.py",
         storage=_B, compute=_B, wire=_B, accumulator=_B, moments=_B),
    _row("bf16-true | bf16_true", "lightning", "FSDP", "plugins/precision/fsdp.py",
         storage=_B, compute=_B, wire=_B, accumulator=_B, moments=_B, sharded="everything"),
    _ours("bf16_true | full_bf16 | bf16-true", "megatron-core, without the distributed optimizer", "full_bf16"),
    _row("bf16.enabled | bf16", "deepspeed", "ZeRO 1", "runtime/engine.py",
         storage=_B, compute=_B, main=_F, wire=_B, accumulator=_B, reads=_F, sharded="optimizer"),
    _row("bf16.enabled | bf16", "deepspeed", "ZeRO 2", "runtime/engine.py",
         storage=_B, compute=_B, main=_F, wire=_B, accumulator=_B, reads=_F, sharded="gradients"),
    _row("bf16.enabled | bf16", "deepspeed", "ZeRO 3", "runtime/engine.py",
         storage=_B, compute=_B, main=_F, wire=_B, accumulator=_B, reads=_F, sharded="everything"),
    _row("bf16.enabled | bf16", "deepspeed", "ZeRO 1, data_types.grad_accum_dtype fp32", "runtime/engine.py",
         storage=_B, compute=_B, main=_F, wire=_B, accumulator=_F, sharded="optimizer"),
    _row("torch_autocast.enabled | torch_autocast | autocast", "deepspeed", "torch_autocast.enabled", "runtime/torch_autocast.py",
         storage=_F, compute=_B, autocast=_B, main=_F, wire=_B, accumulator=_F, sharded="everything"),
    _ours("fp16_mixed | fp16 | 16-mixed", "megatron-core, distributed optimizer", "fp16_mixed"),
    _row("--fp16 | fp16", "megatron-lm", "DDP", "training/arguments.py, validate_args",
         storage=_H, compute=_H, main=_F, wire=_H, accumulator=_H, reads=_F),
    _row("16-mixed | 16 | fp16", "lightning", "one GPU or DDP", "plugins/precision/amp.py",
         storage=_F, compute=_H, autocast=_H, wire=_F, accumulator=_F),
    _row("fp16.enabled | fp16", "deepspeed", "ZeRO 1", "runtime/engine.py",
         storage=_H, compute=_H, main=_F, wire=_H, accumulator=_H, reads=_F, sharded="optimizer"),
    _row("32-true | 32 | fp32", "lightning", "everywhere", "plugins/precision/precision.py",
         storage=_F, compute=_F, wire=_F, accumulator=_F),
    _ours("fp32 | 32-true", "megatron-core, distributed optimizer", "fp32"),
    _row("no | fp32", "accelerate", "module in FP32", "accelerator.py",
         storage=_F, compute=_F, wire=_F, accumulator=_F),
    _row("no", "accelerate", "module loaded in BF16", "accelerator.py",
         storage=_B, compute=_B, wire=_B, accumulator=_B, moments=_B),
    _row("fp16", "accelerate", "one GPU or DDP, module in FP32 (on a CPU it trains FP32)", "accelerator.py",
         storage=_F, compute=_H, autocast=_H, wire=_F, accumulator=_F),
    _row("16-true", "lightning", "one GPU or DDP: no loss scale", "plugins/precision/half.py",
         storage=_H, compute=_H, wire=_H, accumulator=_H, moments=_H),
    _row("16-true | 16-mixed | 16", "lightning", "DeepSpeed, ZeRO 2 by its default: both words alike", "strategies/deepspeed.py",
         storage=_H, compute=_H, main=_F, wire=_H, accumulator=_H, reads=_F, sharded="gradients"),
    _row("16-mixed | 16", "lightning", "FSDP", "plugins/precision/fsdp.py",
         storage=_F, compute=_H, autocast=_H, wire=_H, accumulator=_F, sharded="everything"),
    _row("--fp8-format hybrid | hybrid | fp8", "megatron-lm", "--bf16, nothing else said: delayed scaling", "transformer_config.py, fp8_recipe",
         storage=_B, compute=_B, main=_F, wire=_F, accumulator=_F, quant=Quant(format="hybrid", scaling="delayed")),
    _row("fp8=hybrid | hybrid | fp8", "megatron-bridge", "bf16_mixed's object, nothing else said: tensorwise", "training/mixed_precision.py",
         storage=_B, compute=_B, main=_F, wire=_F, accumulator=_F, sharded="optimizer", quant=Quant(format="hybrid", scaling="tensorwise")),
    _row("fp8", "accelerate", "Transformer Engine, DDP: HYBRID, history 1024, max", "utils/dataclasses.py, TERecipeKwargs",
         storage=_F, compute=_B, autocast=_B, wire=_F, accumulator=_F, quant=_OWN),
    _row("fp8", "accelerate", "torchao (AORecipeKwargs), FSDP2: tensorwise, FP8 all-gather", "utils/dataclasses.py, AORecipeKwargs",
         storage=_F, compute=_B, wire=_B, accumulator=_F, sharded="everything", quant=Quant(format="hybrid", scaling="tensorwise")),
    _row("hybrid | HYBRID", "accelerate", "fp8_format, the default: E4M3 forward, E5M2 for gradients, delayed", "utils/dataclasses.py, TERecipeKwargs",
         storage=_F, compute=_B, autocast=_B, wire=_F, accumulator=_F, quant=_OWN),
    _row("transformer-engine | fp8 | te", "lightning", "weights in BF16, no copy in FP32; DelayedScaling's own values", "plugins/precision/transformer_engine.py",
         storage=_B, compute=_B, autocast=_B, wire=_B, accumulator=_B, moments=_B, quant=_OWN),
    _row("transformer-engine-float16", "lightning", "weights in FP16, no copy in FP32; DelayedScaling's own values", "plugins/precision/transformer_engine.py",
         storage=_H, compute=_H, autocast=_H, wire=_H, accumulator=_H, moments=_H, quant=_OWN),
    _row("transformer_engine | te", "megatron-lm", "--transformer-impl, the default: who computes; no quantization", "training/arguments.py",
         storage=_B, compute=_B, main=_F, wire=_F, accumulator=_F),
    _row("Float8LinearConverter | float8 | rowwise | fp8", "torchtitan", "its default recipe: rowwise, E4M3 everywhere", "components/quantization/float8.py",
         storage=_F, compute=_B, wire=_F, accumulator=_F, sharded="everything", quant=Quant(format="e4m3", scaling="rowwise")),
    _row("rowwise_with_gw_hp", "torchtitan", "Float8LinearConverter: weight gradients in high precision", "components/quantization/float8.py",
         storage=_F, compute=_B, wire=_F, accumulator=_F, sharded="everything", quant=Quant(format="e4m3", scaling="rowwise_gw_hp")),
    _row("fp8.recipe_name=tensorwise | tensorwise | fp8 | float8", "automodel", "the default of fp8.enabled, model in BF16", "components/quantization/fp8.py",
         storage=_B, compute=_B, wire=_F, accumulator=_B, moments=_B, sharded="everything", quant=Quant(format="hybrid", scaling="tensorwise")),
    _row("fp8.recipe_name=rowwise | rowwise", "automodel", "model in BF16", "components/quantization/fp8.py",
         storage=_B, compute=_B, wire=_F, accumulator=_B, moments=_B, sharded="everything", quant=Quant(format="e4m3", scaling="rowwise")),
    _ours("bf16_with_fp8_rowwise | rowwise | float8", "torch FSDP2 with torchao", "bf16_with_fp8_rowwise"),
    _ours("fp8=hybrid | hybrid | fp8", "bf16_mixed with nothing else said: tensorwise", "bf16_mixed", "precision/quants.py", fp8="hybrid"),
    _row("strategy: ddp | ddp", "automodel", "model in BF16: no policy is read", "components/distributed/config.py",
         storage=_B, compute=_B, wire=_B, accumulator=_B, moments=_B),
    _row("delayed", "megatron-lm", "--fp8-format hybrid --fp8-recipe delayed, history 1 (most_recent)", "transformer_config.py",
         storage=_B, compute=_B, main=_F, wire=_F, accumulator=_F, quant=Quant(format="hybrid", scaling="delayed")),
    _row("delayed", "accelerate", "Transformer Engine: history 1024 (max)", "utils/dataclasses.py, TERecipeKwargs",
         storage=_F, compute=_B, autocast=_B, wire=_F, accumulator=_F, quant=_OWN),
    _row("mxfp8", "megatron-lm", "--fp8-format e4m3 --fp8-recipe mxfp8", "transformer_config.py",
         storage=_B, compute=_B, main=_F, wire=_F, accumulator=_F, quant=Quant(format="e4m3", scaling="mxfp8")),
    _row("MXFP8LinearConverter | mxfp8", "torchtitan", "torchao", "components/quantization/mx.py",
         storage=_F, compute=_B, wire=_F, accumulator=_F, sharded="everything", quant=Quant(format="e4m3", scaling="mxfp8")),
    _row("use_mxfp8_block_scaling | mxfp8", "accelerate", "Transformer Engine", "utils/dataclasses.py, TERecipeKwargs",
         storage=_F, compute=_B, autocast=_B, wire=_F, accumulator=_F, quant=Quant(format="e4m3", scaling="mxfp8")),
    _row("nvfp4", "megatron-lm", "--fp4-format e2m1 --fp4-recipe nvfp4", "transformer_config.py",
         storage=_B, compute=_B, main=_F, wire=_F, accumulator=_F, quant=Quant(format="e2m1", scaling="nvfp4")),
    _row("NVFP4LinearConverter | nvfp4", "torchtitan", "torchao", "components/quantization/nvfp4.py",
         storage=_F, compute=_B, wire=_F, accumulator=_F, sharded="everything", quant=Quant(format="e2m1", scaling="nvfp4")),
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
