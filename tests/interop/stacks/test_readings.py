"""What settings of each stack mean, one row per reading: what a translator gets wrong unless it knows. Each was seen in the stack's own parser or source.

A row is (stack, settings, what must hold ...). Settings are arguments, or YAML where they have ': '; 'py: ...' are converters in a function of torchtitan.
What must hold: 'wire=bf16' (a fact of the meaning; '~': contains), 'fields.fp8=e4m3' ('-': absent), 'recipe=...' (the answer), 'inert: a & b' (a line of that kind
has these words; 'apart': where the answer differs), '!inert: a' (none has), '!inert' (there is none), 'same: settings' (equal meaning), 'error: ...' (refused with these words).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Imported
from mpbridge.interop.stacks.importers import read_args, read_python, read_text
from mpbridge.interop.stacks.nearest import Answer, answer, apart

LM, MB, TT, AM, AC, LI, DS, TR = "megatron-lm", "megatron-bridge", "torchtitan", "automodel", "accelerate", "lightning", "deepspeed", "transformers"  # fmt: skip
PYTHON = (
    "from torchtitan.components.quantization import Float8LinearConverter\ndef one():\n"
    "    return Trainer.Config(training=TrainingConfig(), model_spec=model_registry('8B', converters=[{}]))\n"
)
KINDS = ("inert", "contradicts", "cannot_express", "unknown", "other", "in_force", "undecided", "assumed")


def read(stack: str, text: str) -> Imported:
    if text.startswith("py: "):
        return read_python(PYTHON.format(text[4:]), None, "one", stack=stack)
    if ": " in text or text.startswith("{"):
        return read_text(text, stack=stack, name="x.yaml")
    return read_args(text, stack=stack)


def nearest(found: Imported) -> Answer:
    return answer(found.fields, engine=found.engine, meaning=found.meaning)


def shown(value: Any) -> str:
    return value.short if isinstance(value, DType) else str(value).lower() if value is None or isinstance(value, bool) else str(value)  # fmt: skip


def holds(found: Imported, stack: str, claim: str) -> bool:
    kind, colon, words = claim.lstrip("!").partition(": ")
    if kind == "same":
        return found.meaning == read(stack, words).meaning
    if kind in KINDS or kind == "apart":
        lines = getattr(found, kind) if kind in KINDS else apart(nearest(found), found.meaning, engine=found.engine)
        there = any(all(word in line for word in words.split(" & ")) for line in lines) if colon else bool(lines)
        return there is not claim.startswith("!")
    at = min(at for at in (claim.find("="), claim.find("~")) if at > 0)
    path, wanted = claim[:at], claim[at + 1 :]
    if path.startswith("fields."):
        value = shown(found.fields[path[7:]]) if path[7:] in found.fields else "-"
    elif path == "recipe":
        value = str(nearest(found))
    elif path == "ends":
        value = f"{found.meaning.regions[0].first},{found.meaning.regions[0].last}"
    else:
        value = shown(functools.reduce(getattr, path.split("."), found.meaning))
    return wanted in value if claim[at] == "~" else wanted == value


ZERO1 = '"zero_optimization": {"stage": 1}'
BF16 = '{"bf16": {"enabled": true}'
FSDP = "{distributed_type: FSDP, mixed_precision: bf16, fsdp_config: {"
WIRED = "model: {torch_dtype: float32}, distributed: {strategy: fsdp2"
EXPERTS = "{step_scheduler: {}, model: {torch_dtype: bfloat16, backend: {"
FILTER = "py: Float8LinearConverter.Config(filter_fqns=['lm_head', 'router.gate'])"
NOT_LAST = "{model: {torch_dtype: float32}, fp8: {enabled: true, recipe_name: tensorwise, filter_fqns: [%s]}, distributed: {strategy: fsdp2, mp_policy: {param_dtype: bfloat16, reduce_dtype: float32, output_dtype: float32}}}"  # fmt: skip
HOOK = "{trainer: {precision: %s, strategy: {class_path: lightning.pytorch.strategies.DDPStrategy, init_args: {ddp_comm_hook: %s}}}}"
ZERO = "{trainer: {precision: %s, strategy: {class_path: lightning.pytorch.strategies.DeepSpeedStrategy, init_args: {%s}}}}"
TE = "{trainer: {plugins: [{class_path: lightning.pytorch.plugins.precision.TransformerEnginePrecision, init_args: {weights_dtype: torch.bfloat16, recipe: {fp8_format: E4M3, amax_history_len: 16, amax_compute_algo: most_recent}}}]}}"  # fmt: skip
ROWS: list[tuple[str, ...]] = [
    # the base, and which reduction flag wins
    (LM, "--bf16", "wire=fp32", "loss_scale=none"),
    (LM, "--bf16 --grad-reduce-in-bf16", "recipe=bf16_mixed, grad_reduce_in_fp32=false", "wire=bf16"),
    (LM, "--bf16 --grad-reduce-in-bf16 --use-distributed-optimizer", "recipe=bf16_mixed, grad_reduce_in_fp32=false"),
    (LM, "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "wire=bf16"),
    (LM, "--fp16", "wire=fp16", "loss_scale.initial=4294967296.0"),
    (LM, "--fp16 --accumulate-allreduce-grads-in-fp32", "wire=fp32"),
    (LM, "--bf16 --use-torch-fsdp2 --accumulate-allreduce-grads-in-fp32", "wire=bf16", "inert: does not read it"),
    (LM, "--bf16 --use-megatron-fsdp --accumulate-allreduce-grads-in-fp32", "wire=bf16"),
    (LM, "--bf16 --use-megatron-fsdp --megatron-fsdp-main-grads-dtype fp32", "wire=fp32"),
    (LM, "--bf16 --main-grads-dtype bf16", "contradicts"),
    (LM, "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16", "wire=bf16"),
    (LM, "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32", "contradicts"),
    # quantization
    # alone, one word means delayed scaling there and tensorwise here
    (LM, "--bf16 --fp8-format hybrid", "fields.fp8_recipe=delayed", "in_force: --fp8-recipe delayed", "in_force: --fp8-amax-history-len 1", "in_force: --optimizer adam",
     "in_force: --accumulate-allreduce-grads-in-fp32 (its parser"),
    (MB, "mixed_precision: {bf16: true, fp8: hybrid}", "fields.fp8_recipe=tensorwise", "in_force: mixed_precision.fp8_recipe=tensorwise", "in_force: optimizer.optimizer=adam"),
    (LM, "--bf16 --fp8-recipe mxfp8", "fields.fp8=-", "inert: nothing is quantized"),
    (LM, "--bf16 --use-precision-aware-optimizer --fp8-recipe mxfp8", "inert: moves the main weights", "quantization=none"),
    *((LM, f"--bf16 --fp8-format e4m3 --fp8-recipe {word}", "fields.fp8=e4m3", f"quantization~{word}") for word in ("delayed", "tensorwise", "blockwise")),
    (LM, "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", "fields.fp8=e4m3", "quantization~mxfp8", "!contradicts"),
    (LM, "--bf16 --fp8-format hybrid --first-last-layers-bf16", "contradicts"),
    (LM, "--bf16 --fp8-format hybrid --transformer-impl local", "contradicts: nothing is quantized"),
    (LM, "--bf16 --num-layers-at-start-in-bf16 3", "inert: without --first-last-layers-bf16"),
    (LM, "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-amax-history-len 16", "inert: only under delayed scaling"),
    (LM, "--bf16 --fp4-format e2m1 --fp4-param-gather --use-distributed-optimizer", "fields.fp4_param=true"),
    (LM, "--bf16 --fp8-format e4m3 --fp8-recipe rowwise", "contradicts: --fp8-recipe rowwise: the parser has no such recipe"),
    (LM, "--bf16 --fp4-format e2m1 --fp4-recipe mxfp9", "contradicts: --fp4-recipe mxfp9: the parser has no such recipe"),
    # what else the parser, or what runs behind it, does with a flag
    (LM, "--bf16 --attention-softmax-in-fp32", "inert: does not read it", "fields.attention_softmax_in_fp32=-"),
    # where it is read, no flag means off, and megatron-core's class, which a recipe leaves alone, has it on
    (LM, "--bf16 --transformer-impl local", "fields.attention_softmax_in_fp32=false"),
    (LM, "--bf16 --transformer-impl local --attention-softmax-in-fp32", "fields.attention_softmax_in_fp32=-"),
    (LM, "--bf16 --transformer-impl local --apply-query-key-layer-scaling", "fields.attention_softmax_in_fp32=-"),
    (LM, "--bf16 --hysteresis 3", "inert: without --fp16"),
    (LM, "--bf16 --loss-scale 8192", "loss_scale.static=8192.0"),
    (LM, "--fp16 --loss-scale 0", "same: --fp16", "!contradicts"),
    (LM, "--bf16=true", "error: --bf16=true: it takes no value"),
    (LM, "--bf16 --hysteresis x --fp8-recipe", "error: --hysteresis x", "error: --fp8-recipe has no value"),
    (LM, "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy zero3", "error: expected no_shard, optim"),
    (LM, "--yaml-cfg x.yaml", "undecided: x.yaml: that file decides"),
    (LM, "--bf16 --use-torch-fsdp2", "apart: bytes"),
    (LM, "--bf16 --use-torch-fsdp2 --use-megatron-fsdp", "contradicts: --use-torch-fsdp2 with --use-megatron-fsdp"),
    *((LM, f"--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy {word}", f"sharded={sharded}") for word, sharded in
      {"no_shard": "nothing", "optim": "optimizer", "optim_grads": "gradients", "optim_grads_params": "everything"}.items()),
    (LM, "--bf16 --use-precision-aware-optimizer --optimizer sgd", "contradicts: without --use-distributed-optimizer", "contradicts: takes only adam"),
    (LM, "--bf16 --use-precision-aware-optimizer --use-distributed-optimizer", "in_force: --exp-avg-dtype fp32", "in_force: --main-params-dtype fp32", "!contradicts", "recipe=bf16_mixed, use_precision_aware_optimizer=true", "!apart"),
    (LM, "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype fp8", "recipe=bf16_mixed, exp_avg_dtype=uint8", "!apart"),
    (LM, "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", "recipe=bf16_mixed_bf16_moments", "!apart"),
    # HybridDeviceOptimizer is given no dtypes, and the parser's fraction is not that of megatron-core's class
    (LM, "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --optimizer-cpu-offload", "exp_avg=fp32", "main=fp32", "remainders=false",
     "inert: --exp-avg-*-dtype & HybridDeviceOptimizer", "in_force: --optimizer-offload-fraction 1", "cannot_express: optimizer_offload_fraction=1.0", "!contradicts"),
    (LM, "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5", "remainders=false", "!inert",
     "cannot_express: optimizer_offload_fraction=0.5", "!in_force: --optimizer-offload-fraction"),
    (LM, "--bf16 --use-distributed-optimizer --optimizer-cpu-offload", "contradicts: without --use-precision-aware-optimizer", "main=fp32"),
    (MB, "{mixed_precision: bf16_mixed, optimizer: {use_precision_aware_optimizer: true, exp_avg_dtype: torch.bfloat16, optimizer_cpu_offload: true}}", "exp_avg=fp32", "main=fp32", "remainders=false",
     "inert: 16-bit optimizer states & HybridDeviceOptimizer", "!inert: copies fp8_recipe", "cannot_express: optimizer_offload_fraction=0.0"),
    # Transformer Engine's recipe state takes E5M2 for the backward quantizers of a hybrid format, with blocks of 32 too
    (LM, "--bf16 --fp8-format hybrid --fp8-recipe mxfp8", "contradicts: E5M2", "quantization~hybrid", "recipe=bf16_with_mxfp8_mixed, fp8=hybrid, fp8_param_gather=false, reuse_grad_buf_for_mxfp8_param_ag=false", "!apart"),
    (LM, "--bf16 --fp8-format e4m3 --fp8-recipe blockwise", "recipe=bf16_with_fp8_subchannel_scaling_mixed, fp8=e4m3", "!apart"),
    # unknown and stray words
    *((LM, f"--bf16 {word}", "unknown") for word in
      ("--store-param-remainders", "--fp8-dot-product-attention", "--fp8-multi-head-attention", "--params-dtype", "--pipeline-dtype")),
    (LM, "--bf16 --grad-reduce-in-fp32 --swiglu --hidden-size 64", "unknown: nearest: --grad-reduce-in-bf16", "other: --swiglu", "other: --hidden-size", "!unknown: --swiglu"),
    (LM, "--bf16 true --fp8-format hybrid", "unknown: true (a stray word)"),
    (LM, "--bf16 fp8-format hybrid", "unknown: fp8-format (a stray word; nearest: --fp8-format)"),
    (LM, "bf16 --micro-batch-size 1", "unknown: bf16 (a stray word; nearest: --bf16)"),
    (TR, "--bf16 true more", "unknown: more (a stray word)"),
    (LM, "torchrun pretrain_gpt.py --bf16", "fields.bf16=true"),
    *((TT, text, "error: training") for text in ("--training.dtype", "training.dtype bfloat16", "--training.dtype --training.steps 3")),
    (LM, BF16 + ", " + ZERO1 + "}", "error: no option of Megatron-LM is in it"),
    # what resolve refuses is described, with what is left out
    (LM, "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather --use-distributed-optimizer --reuse-grad-buf-for-mxfp8-param-ag", "quantization~blockwise", "contradicts: described & reuse_grad_buf"),
    (LM, "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --loss-scale -1", "quantization~tensorwise", "contradicts: described & loss_scale"),
    (LM, "--fp16 --hysteresis 0", "quantization~none", "contradicts: described & hysteresis"),
    (LM, "--bf16 --fp8-format e5m2", "quantization~none", "contradicts: described & fp8=e5m2"),
    (LM, "--fp8-format hybrid", "quantization~none", "contradicts: described & fp8=hybrid"),
    (LM, "--bf16 --output-logit-dtype fp64", "error: --output-logit-dtype fp64: expected bf16, fp32"),  # argparse's own refusal
    (LM, "--bf16 --fp8-format hybrid --fp4-format e2m1", "contradicts: described & fp8"),
    (MB, "mixed_precision.bf16=true mixed_precision.fp8=hybrid mixed_precision.params_dtype=torch.float16", "quantization~tensorwise", "contradicts: described & params_dtype"),
    (MB, "mixed_precision.bf16=true mixed_precision.fp16=true", "quantization~none", "contradicts: only storage and communication are described"),
    # Megatron Bridge
    (MB, "mixed_precision=bf16_mixed mixed_precision.fp8=hybrid", "error: OverridesError"),
    (MB, "mixed_precision: {bf16: true, fp8: hybrid, fp8_param: true, fp8_param_gather: false}", "contradicts: gather spelling wins there", "fields.fp8_param_gather=false"),
    (MB, "{mixed_precision: bf16_mixed, ddp: {grad_reduce_in_fp32: false}, model: {fp8_param: true, fp8: hybrid}}", "wire=fp32", "quantization=none",
     "inert: ddp.grad_reduce_in_fp32 & takes precedence", "inert: model.fp8_param & takes precedence", "inert: model.fp8= & takes precedence"),
    (MB, "{mixed_precision: {bf16: true, fp8: e4m3, fp8_recipe: mxfp8}, model: {fp8: hybrid, fp8_recipe: delayed, fp8_margin: 0}}", "inert: model.fp8=hybrid",
     "inert: model.fp8_recipe=delayed", "!inert: fp8_margin"),
    (MB, "mixed_precision: {bf16: true, fp8: hybrid, first_last_layers_bf16: true}", "fields.num_layers_at_start_in_bf16=0"),
    (MB, "mixed_precision: {_target_: os.system, bf16: true, params_dtype: {_target_: torch.bfloat16, _call_: false}}", "recipe=bf16_mixed", "contradicts: mixed_precision._target_="),
    (MB, "{mixed_precision: {_target_: megatron.bridge.training.mixed_precision.MixedPrecisionConfig, bf16: true}, ddp: {}}", "!contradicts"),
    (MB, "mixed_precision: {bf16: true, fp8_recip: mxfp8}", "unknown: nearest: fp8_recipe"),
    (MB, "mixed_precision: bf16_mixd", "error: nearest: bf16_mixed"),
    (MB, "mixed_precision: bf16-with-nvfp4-mixed", "recipe=bf16_with_nvfp4_mixed, fp4_param_gather=true"),  # its own value of that name
    (MB, "{mixed_precision: bf16_mixed, model: {quant_recipe: {matchers: [], config_dict: {}}}}", "cannot_express: model.quant_recipe: rules by module", "!other: quant_recipe", "!assumed: quant_recipe"),
    # what runs: megatron-core compares the word, Bridge's setup and its Megatron-FSDP change settings
    *((MB, f"{{mixed_precision: bf16_mixed, model: {{moe_router_dtype: {word}}}}}", f"router={dtype}", f"{no}inert: moe_router_dtype") for word, dtype, no in
      (("fp32", "fp32", "!"), ("torch.float32", "none", ""), ("{_target_: torch.float32, _call_: false}", "none", ""))),
    (MB, "{mixed_precision: bf16_mixed, optimizer: {use_precision_aware_optimizer: true}}", "main=fp32", "remainders=false", "inert: copies fp8_recipe"),
    (MB, "{mixed_precision: null, model: {bf16: true}, optimizer: {use_precision_aware_optimizer: true}}", "remainders=true", "!inert: copies fp8_recipe"),
    (MB, "{mixed_precision: bf16_mixed, optimizer: {use_precision_aware_optimizer: true, main_params_dtype: torch.float16, store_param_remainders: false}}", "main=fp16", "!inert: copies fp8_recipe"),
    (MB, "{mixed_precision: bf16_with_mxfp8_mixed, ddp: {use_megatron_fsdp: true}}", "reuse_grad_buffer=false", "inert: switches it off under Megatron-FSDP"),
    # without mixed_precision its other sections say it, with megatron-core's defaults
    (MB, "{mixed_precision: null, ddp: {grad_reduce_in_fp32: true}, model: {bf16: true, fp4: e2m1, fp4_recipe: nvfp4}}", "recipe=bf16_with_nvfp4_mixed", "!assumed: decides nothing"),
    (MB, "{mixed_precision: null, ddp: {grad_reduce_in_fp32: true}, model: {bf16: true, params_dtype: torch.bfloat16, fp8: hybrid, fp8_param: true, fp8_amax_history_len: 1024, fp8_amax_compute_algo: max}}",
     "recipe=bf16_with_fp8_delayed_scaling_mixed", "in_force: model.fp8_recipe=delayed", "!assumed: decides nothing"),
    (MB, "{mixed_precision: null, ddp: {grad_reduce_in_fp32: true}, model: {bf16: true, fp8: hybrid, fp8_param: true, fp8_margin: 2, fp8_amax_history_len: 16, fp8_amax_compute_algo: max}}",
     "quantization~history 16 (max), margin 2"),
    (MB, "{mixed_precision: null, ddp: {grad_reduce_in_fp32: true}, optimizer: {initial_loss_scale: 1024, hysteresis: 1}, model: {fp16: true, fp8: hybrid, fp8_recipe: tensorwise, first_last_layers_bf16: true, num_layers_at_end_in_bf16: 3}}",
     "ends=1,3", "loss_scale.initial=1024.0", "loss_scale.hysteresis=1"),
    # torchtitan
    (TT, "--training.steps 10", "recipe=fp32_params_bf16_compute", "autocast=none", "assumed: every sharding degree"),
    (TT, "--training.mixed_precision_reduce bfloat16", "contradicts: float32 only"),
    (TT, "--training.dtype bfloat16 --training.mixed_precision_param float32", "fields.bf16=-", "storage=bf16", "compute=fp32", "cannot_express: narrower"),
    (TT, "--training.dtype bfloat16", "wire=fp32", "accumulator=bf16", "exp_avg=bf16", "bytes_text=8/N"),
    (TT, "--module llama3 --config llama3_8b_mxfp8", "quantization~mxfp8", "assumed: mxfp8"),
    # its Float8 section had `recipe_name: ... | None = None`, which is torchao's Float8LinearConfig(): tensorwise
    (TT, "--model.converters float8", "quantization~tensorwise", "in_force: float8.recipe_name=tensorwise"),
    (TT, "--model.converters float8 --float8.filter_fqns output,layers.0.,layers.1.", "ends=2,0", "!cannot_express"),
    (TT, "--model.converters quantize,lora", "cannot_express: model.converters=quantize", "cannot_express: model.converters=lora"),
    *((TT, f"--parallelism.data_parallel_shard_degree {degree}", f"sharded={sharded}") for degree, sharded in {"1": "nothing", "8": "everything", "-1": "everything"}.items()),
    (TT, 'py: Float8LinearConverter.Config(recipe_name="rowwise", emulate=True)', "cannot_express: emulate=True & tensorwise"),
    (TT, "py: MXFP8LinearConverter.Config()", "cannot_express: lm_head"),
    (TT, "py: Float8LinearConverter.Config(filter_fqns=['lm_head', name_of(3)])", "cannot_express: left out by substring: name_of(...)"),
    (TT, 'py: MXFP8LinearConverter.Config(filter_fqns=["lm_head"])', "!cannot_express: lm_head"),
    (TT, FILTER, "assumed: a dense model"),
    (TT, f"{FILTER}, Float8GroupedExpertsConverter.Config()", "recipe=bf16_with_fp8_rowwise", "!cannot_express", "!assumed: dense"),
    (TT, "py: MXFP8LinearConverter.Config(fqns=['attention', 'shared_experts', 'feed_forward']), MXFP8GroupedExpertsConverter.Config()", "!cannot_express"),
    (TT, f"{FILTER}, MXFP8GroupedExpertsConverter.Config()", "cannot_express: grouped GEMMs run in mxfp8; the linears have rowwise"),
    (TT, "py: Float8GroupedExpertsConverter.Config()", "cannot_express: the linears are not quantized"),
    (TT, "py: Float8LinearConverter.Config(filter_fqns=['lm_head']), Float8GroupedExpertsConverter.Config()", "cannot_express: router (router.gate) is quantized too"),
    (TT, "py: MXFP8LinearConverter.Config(fqns=['layers']), MXFP8GroupedExpertsConverter.Config()", "cannot_express: router (router.gate) is quantized too"),
    (TT, "py: MXFP8LinearConverter.Config(fqns=['attention'])", "cannot_express: only linears whose names contain attention"),
    # AutoModel
    (AM, f"{{{WIRED}}}}}", "wire=fp32"),
    (AM, f"{{{WIRED}, mp_policy: {{param_dtype: bfloat16}}}}}}", "wire=bf16"),
    (AM, "{model: {torch_dtype: float32}, distributed: {mp_policy: {param_dtype: bfloat16}}}", "wire=bf16", "assumed: since then in the parameters' own dtype (fp32)"),
    (AM, "{model: {torch_dtype: float32}, distributed: {mp_policy: {param_dtype: bfloat16, reduce_dtype: bfloat16}}}", "wire=bf16", "!assumed: since then"),
    (AM, "{distributed: {mp_policy: null}}", "wire=fp32"),
    (AM, "{model: {torch_dtype: bfloat16}, optimizer: {_target_: torch.optim.AdamW}}", "main=none", "exp_avg=bf16", "bytes_text=8/N"),
    (AM, "{model: {torch_dtype: bfloat16}, optimizer: {_target_: a.b.FusedAdam, lr: 1}}", "main=none"),
    (AM, "{model: {torch_dtype: bfloat16}, optimizer: {_target_: a.b.FusedAdam, master_weights: true, store_param_remainders: true}}", "main=fp32", "remainders=true"),
    (AM, "{model: {torch_dtype: bfloat16}, optimizer: {_target_: a.b.FusedAdam, master_weights: true, exp_avg_dtype: torch.bfloat16}}", "main=fp32", "exp_avg=bf16", "exp_avg_sq=fp32",
     "fields.exp_avg_dtype=bf16", "fields.main_params_dtype=fp32"),
    (AM, "{fp8: {enabled: true, recipe_name: rowwise, emulate: true, enable_fsdp_float8_all_gather: true}}", "inert: fp8.emulate", "inert: enable_fsdp_float8_all_gather"),
    (AM, "{distributed: {autocast_dtype: bfloat16}}", "inert: autocast_dtype", "autocast=none"),
    *((AM, f"model: {{torch_dtype: {word}}}", f"storage={dtype}") for word, dtype in
      {"bf16": "bf16", "HALF": "fp16", "torch.float32": "fp32", "16": "bf16", "32": "bf16", "null": "bf16"}.items()),
    *((AM, f"model: {{torch_dtype: {word}}}", f"error: {word}") for word in ("fp32", "fp16", "fp8")),
    *((AM, f"distributed: {{strategy: {word}, mp_policy: {{param_dtype: bfloat16}}}}", "contradicts") for word in ("ddp", "megatron_fsdp")),
    (AM, NOT_LAST % "lm_head, layers.0., layers.1., layers.10., layers.11.", "quantization~linears of the first 2 and last 2 layers: not quantized", "output=fp32", "storage=fp32",
     "fields.output_dtype=fp32", "assumed: 10 to 11"),
    (AM, NOT_LAST % "layers.3., layers.7.", "cannot_express: the output layer", "cannot_express: excludes layers"),
    # recipes of other kinds read other sections
    (AM, "{model: {torch_dtype: bfloat16}, dllm: {mode: dflash}, distributed: {mp_policy: {param_dtype: bfloat16, reduce_dtype: float32}, autocast_dtype: bfloat16}}", "autocast=bf16", "!inert"),
    (AM, "{model: {mode: finetune}, fsdp: {reduce_dtype: bfloat16, dp_size: 8}, flow_matching: {}}", "wire=bf16", "storage=bf16", "compute=bf16", "!unknown"),
    (AM, "{model: {torch_dtype: float32}, fsdp: {dp_size: 8}, flow_matching: {}}", "wire=fp32", "storage=fp32", "compute=bf16", "recipe=fp32_params_bf16_compute"),
    (AM, "{model: {torch_dtype: float32}, peft: {dim: 8}, fsdp: {dp_size: 8}}", "compute=fp32", "contradicts: AutoModel raises ValueError"),
    (AM, EXPERTS + "experts: torch_mm_mxfp8, gate_precision: float32}}}", "cannot_express: grouped GEMMs run in MXFP8", "router=fp32", "fields.moe_router_dtype=fp32"),
    (AM, EXPERTS + "linear: torch, te_fp8: {recipe: current}}}}", "contradicts: AutoModel raises ValueError"),
    (AM, EXPERTS + "linear: torch, experts: te, te_fp8: {recipe: mxfp8}}}}", "!contradicts", "cannot_express: only the experts are quantized"),
    (AM, EXPERTS + "linear: torch, experts: te, dispatcher: torch, te_fp8: {recipe: mxfp8}}}}", "inert: AutoModel runs them with torch_mm", "contradicts: AutoModel raises ValueError"),
    # accelerate
    (AC, "{distributed_type: FSDP, mixed_precision: bf16}", "wire=bf16", "autocast=bf16", "assumed: differs between versions", "!assumed: silently"),
    (AC, "{distributed_type: MULTI_GPU, mixed_precision: bf16}", "wire=fp32", "autocast=bf16"),
    *((AC, f"{FSDP}fsdp_version: {version}}}}}", f"autocast={autocast}", "wire=bf16") for version, autocast in {"1": "bf16", "'1'": "bf16", "2": "none", "'2'": "none", "2.0": "none"}.items()),
    *((AC, f"{FSDP}{key}: NO_SHARD}}}}", "sharded=nothing", "wire=bf16", "bytes_text=16") for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")),
    *((AC, f"{FSDP}{key}: SHARD_GRAD_OP}}}}", "sharded=everything") for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")),
    (AC, "{mixed_precision: fp8}", "quantization~amax history 1024 (max)", "undecided: the first of torchao, Transformer Engine and MS-AMP that is installed"),
    (AC, "{mixed_precision: fp8, fp8_config: {backend: AO}}", "quantization~tensorwise", "!undecided"),
    (AC, "{mixed_precision: fp8, fp8_config: {backend: TE, amax_compute_algo: most_recent}}", "quantization~amax history 1024 (max)"),
    (AC, "{mixed_precision: fp8, fp8_config: {backend: TE, use_mxfp8_block_scaling: true}}", "quantization~mxfp8"),
    (AC, "{mixed_precision: fp8, distributed_type: MULTI_GPU, fp8_config: {backend: TE, margin: 2, amax_history_length: 16, amax_compute_algorithm: max}}", "fields.fp8_margin=2",
     "fields.fp8_amax_history_len=1024", "inert: fp8_config.amax_history_length", "inert: fp8_config.amax_compute_algorithm", "!assumed: margin", "!unknown"),
    *((AC, f"{{distributed_type: FSDP, mixed_precision: fp8, fp8_config: {{backend: TE, override_linear_precision: [false, false, {high}]}}}}", f"regions~wgrad={not_}",
       f"fields.fp8_wgrad={field}") for high, not_, field in (("true", "False", "false"), ("false", "True", "-"))),
    (AC, "{mixed_precision: fp8, fp8_config: {backend: TE, override_linear_precision: [true, false, false]}}", "error: override_linear_precision"),
    (AC, "{distributed_type: FSDP, mixed_precision: fp16}", "assumed: on a CPU accelerate silently trains in FP32"),
    (AC, "{distributed_type: FSDP, mixed_precision: fp8}", "compute=bf16", "wire=bf16", "assumed: silently trains in FP16 under fp8"),
    (AC, "{distributed_type: FSDP, mixed_precision: fp8, fp8_config: {backend: AO}}", "quantization~tensorwise", "cannot_express: are gathered in FP8", "wire=bf16", "compute=bf16"),
    (AC, "{distributed_type: FSDP, mixed_precision: fp8, fp8_config: {backend: AO, enable_fsdp_float8_all_gather: false}}", "!cannot_express: are gathered in FP8"),
    (AC, "{distributed_type: DEEPSPEED, mixed_precision: fp8}", "undecided: that is installed", "storage=bf16", "main=fp32", "quantization~delayed", "fields.fp8_recipe=delayed"),
    (AC, "{distributed_type: MEGATRON_LM, mixed_precision: bf16}", "error: Megatron-LM trains, and its own arguments decide"),
    (AC, "distributed_type: MULTI_GPUS", "contradicts: MULTI_GPUS & nearest: MULTI_GPU"),
    (AC, "{mixed_precision: no, dynamo_config: {dynamo_backend: INDUCTOR}}", "cannot_express: TF32"),
    (AC, "{mixed_precision: no, dynamo_config: {dynamo_backend: 'NO'}}", "!cannot_express"),
    (AC, "{mixed_precision: bf16, dynamo_config: {dynamo_backend: INDUCTOR}}", "!cannot_express"),
    *((AC, f"{{distributed_type: {kind}, use_cpu: true, mixed_precision: fp16}}", "compute=fp32", "autocast=none", "loss_scale=none",
       "inert: on a CPU (use_cpu) accelerate silently trains in FP32", "!assumed: a GPU:") for kind in ("'NO'", "MULTI_CPU")),
    *((AC, f"{{distributed_type: {kind}, use_cpu: true, mixed_precision: bf16}}", "autocast=bf16", "!inert") for kind in ("'NO'", "MULTI_CPU")),
    *((AC, f"{{distributed_type: {kind}, use_cpu: true, mixed_precision: fp16}}", "compute=fp16", "inert: use_cpu:") for kind in ("FSDP", "MULTI_GPU", "DEEPSPEED")),
    (AC, "distributed_type: MULTI_CPU", "inert: uses a GPU"),
    (AC, "{distributed_type: 'NO', use_cpu: true, mixed_precision: fp8}", "contradicts: runs only on GPUs"),
    (AC, "{distributed_type: 'NO', use_cpu: true, mixed_precision: fp8, fp8_config: {backend: AO}}", "!contradicts", "cannot_express: the first and the last linear"),
    # Lightning
    (LI, "precision=bf16", "same: precision=bf16-mixed"),
    (LI, "precision=16", "assumed: on a CPU Lightning trains BF16"),
    (LI, "precision=16-mixed strategy=lightning.pytorch.strategies.ModelParallelStrategy", "contradicts: 16-mixed: ModelParallelStrategy refuses it", "assumed: configure_model"),
    (LI, "precision=bf16-true strategy=ModelParallelStrategy", "!contradicts", "assumed: configure_model", "same: precision=bf16-true strategy=model_parallel", "sharded=everything"),
    (LI, "precision=bf16-mixed strategy=fsdpp", "contradicts: nearest: fsdp", "sharded=nothing"),
    (LI, "precision=bf16-mixed strategy=deepspeed", "same: precision=bf16-true strategy=deepspeed", "loss_scale=none"),
    (LI, "precision=bf16-true strategy=fsdp", "bytes_text=8/N"),
    (LI, "precision=bf16-mixed strategy=fsdp", "wire=bf16"),
    (LI, "precision=bf16-mixed strategy=ddp", "wire=fp32"),
    (LI, "{trainer: {precision: bf16-mixed, strategy: {class_path: FSDPStrategy, init_args: {mixed_precision: {reduce_dtype: torch.float32}}}}}", "wire=fp32"),
    # DeepSpeedStrategy's own arguments: 2**16, a window of 1000, a hysteresis of 2, at least 1
    *((LI, f"precision={word} strategy=deepspeed_stage_2", "loss_scale=LossScale(static=None, initial=65536.0, minimum=1, window=1000, hysteresis=2)", "fields.initial_loss_scale=65536.0")
      for word in ("16-mixed", "16-true")),
    *((LI, ZERO % (word, "stage: 2, initial_scale_power: 12, hysteresis: 4"), "loss_scale=LossScale(static=None, initial=4096.0, minimum=1, window=1000, hysteresis=4)")
      for word in ("16-mixed", "16-true")),
    (LI, "precision=16-mixed", "fields.initial_loss_scale=65536.0", "fields.loss_scale_window=2000.0", "fields.hysteresis=1"),
    (LI, "--trainer.precision bf16-mixed --trainer.strategy fsdp", "same: precision=bf16-mixed strategy=fsdp"),
    *((LI, text, "error: expected name=value or --name value") for text in ("--trainer.precision", "--trainer.precision --trainer.strategy ddp", "precision bf16-mixed")),
    *((LI, HOOK % (word, hook), f"wire={wire}") for word in ("32-true", "bf16-mixed") for hook, wire in
      {"fp16_compress_hook": "fp16", "default_hooks.bf16_compress_hook": "bf16"}.items()),
    (LI, HOOK % ("bf16-mixed", "powerSGD_hook"), "cannot_express: powerSGD_hook", "wire=fp32"),
    (LI, ZERO % ("bf16-mixed", "config: {zero_optimization: {stage: 3}, communication_data_type: fp32}"), "storage=bf16", "wire=fp32", "sharded=everything", "fields.grad_reduce_in_fp32=true",
     "fields.grad_accumulation_dtype=bf16"),
    # its own section counts, whatever the word of the precision
    (LI, ZERO % ("16-mixed", "config: {fp16: {enabled: true, loss_scale: 8}}"), "loss_scale.static=8.0"),
    (LI, ZERO % ("bf16-mixed", "config: ds.json"), "undecided: ds.json decides"),
    *((LI, f"trainer: {{precision: bf16-mixed, strategy: {strategy}}}", f"bytes_text={size}") for strategy, size in {
        "deepspeed_stage_1": "4 + 16/N", "deepspeed": "2 + 18/N", "deepspeed_stage_2": "2 + 18/N", "deepspeed_stage_3": "20/N", "deepspeed_stage_3_offload": "20/N",
        "{class_path: lightning.pytorch.strategies.DeepSpeedStrategy, init_args: {stage: 3}}": "20/N"}.items()),
    *((LI, f"precision={word} strategy={name}", "contradicts: Lightning refuses") for word in ("64-true", "transformer-engine") for name in ("fsdp", "deepspeed_stage_3")),
    *((LI, f"precision={word} strategy=ddp", "!contradicts") for word in ("64-true", "transformer-engine")),
    (LI, TE, "quantization=all linears: e4m3, delayed scaling, amax history 16 (most_recent), margin 0", "storage=bf16", "!other"),
    (LI, "{trainer: {plugins: {class_path: lightning.pytorch.plugins.precision.HalfPrecision, init_args: {precision: bf16-true}}}}", "storage=bf16"),
    (LI, "{trainer: {precision: 16-mixed, plugins: {class_path: lightning.pytorch.plugins.precision.HalfPrecision, init_args: {precision: bf16-true}}}}", "contradicts"),
    (LI, "trainer: {precision: null}", "fields.fp32=true", "same: {trainer: {}}"),
    (LI, "trainer: {precision: 64}", "bytes_text=32"),
    (LI, "trainer: {precision: 64-true}", "fields.fp32=-"),
    (LI, "trainer: {precision: bf16-mixed, strategy: blabla}", "contradicts: blabla"),
    *((LI, f"trainer: {{precision: bf16-mixed, strategy: {name}}}", "!contradicts") for name in
      ("ddp_find_unused_parameters_true", "fsdp_cpu_offload", "deepspeed_stage_3_offload", "single_device", "xla")),
    *((LI, f"precision={word} accelerator=cpu", "same: precision=bf16-mixed accelerator=cpu", "inert: trains bf16-mixed") for word in ("16", "16-mixed")),
    *((LI, f"precision={word} accelerator=gpu", "compute=fp16") for word in ("16", "16-mixed")),
    (LI, "precision=16-true accelerator=cpu", "storage=fp16"),
    *((LI, f"trainer: {{precision: {word}, accelerator: {{class_path: lightning.pytorch.accelerators.CPUAccelerator}}}}", "compute=fp32", "autocast=none", "loss_scale=none", "inert: CPUAccelerator")
      for word in ("16-mixed", "bf16-mixed")),
    *((LI, f"precision=16-mixed accelerator=cpu strategy={name}", "contradicts: it needs a GPU") for name in ("fsdp", "deepspeed_stage_2")),
    # DeepSpeed
    *((DS, f'{BF16}, "zero_optimization": {{"stage": {stage}}}}}', "recipe~bf16_mixed, grad_reduce_in_fp32=false") for stage in (1, 2, 3)),
    *((DS, f'{BF16}, "zero_optimization": {{"stage": {stage}}}}}', "error: expected 0, 1, 2 or 3") for stage in (7, -1, 1.5)),
    (DS, f"{BF16}, {ZERO1}}}", "wire=bf16", "accumulator=bf16", "bytes_text=4 + 16/N", "assumed: check_grad_overflow & skipped, as in mpbridge", "!cannot_express"),
    (DS, f'{BF16}, {ZERO1}, "data_types": {{"grad_accum_dtype": "fp32"}}}}', "wire=bf16", "accumulator=fp32", "recipe=bf16_mixed, grad_reduce_in_fp32=false, grad_accumulation_dtype=fp32"),
    (DS, f'{BF16}, "data_types": {{"grad_accum_dtype": "fp32"}}}}', "contradicts: without ZeRO"),
    (DS, f'{{"bf16": {{"enabled": true, "bf16_optimizer_states": true}}, {ZERO1}}}', "contradicts"),
    (DS, '{"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}', "contradicts"),
    (DS, f'{BF16}, "fp16": {{"enabled": true}}}}', "contradicts"),
    (DS, f'{BF16}, {ZERO1}, "data_types": {{"param_dtype": "fp32"}}}}', "contradicts: data_types.param_dtype=fp32"),
    (DS, f'{BF16}, {ZERO1}, "data_types": {{"param_dtype": "bf16"}}}}', "!contradicts"),
    (DS, '{"amp": {"enabled": true, "opt_level": "O2"}, "train_batch_size": 1}', "contradicts: amp: removed & FP16", "!unknown"),
    (DS, '{"fp16": {"enabled": true}, "grad_accum_dtype": "fp32"}', "loss_scale.initial=65536.0", "inert: grad_accum_dtype & ignored", "!contradicts"),
    (DS, '{"fp16": {"enabled": true, "init_scale": 3}}', "contradicts: fp16.init_scale & refuses"),
    (DS, '{"fp16": {"enabled": true, "loss_scale": 128}}', "loss_scale.static=128.0", "fields.loss_scale=128.0", "!apart: loss_scale"),
    (DS, f'{{"bf16": {{"enabled": true, "check_grad_overflow": false}}, {ZERO1}}}', "cannot_express: is applied; mpbridge skips it", "!contradicts"),
    *((DS, f'{BF16}, "communication_data_type": "{word}"}}', f"contradicts: communication_data_type={word}: DeepSpeed refuses", f"wire={wire}") for word, wire in
      {"fp8": "bf16", "float32": "fp32", "uint8": "bf16"}.items()),
    (DS, f'{BF16}, "zero_optimization": {{"stage": 3, "zero_quantized_weights": true, "zero_quantized_gradients": true}}}}', "cannot_express: zero_optimization.zero_quantized_weights",
     "cannot_express: zero_optimization.zero_quantized_gradients"),
    (DS, f'{BF16}, "optimizer": {{"type": "OneBitAdam"}}}}', "cannot_express: 1 bit"),
    (DS, f'{BF16}, "optimizer": {{"type": "AdamW"}}, "zero_optimization": {{"stage": 2}}}}', "!cannot_express"),
    (DS, '{"fp16": {"enabled": true, "fp16_master_weights_and_grads": true}, "zero_optimization": {"stage": 2}}', "main=none", "exp_avg=fp32", "bytes_text=2 + 10/N"),
    (DS, '{"fp16": {"enabled": true, "fp16_master_weights_and_grads": true}}', "contradicts"),
    (DS, '{"torch_autocast": {"enabled": true, "dtype": "float16"}, "zero_optimization": {"stage": 1}}', "autocast=fp16", "compute=fp16", "wire=fp16", "loss_scale.window=2000.0"),
    (DS, '{"torch_autocast": {"enabled": true}, "bf16": {"enabled": true}}', "contradicts"),
    (DS, f'{BF16}, "communication_data_typ": "fp32"}}', "unknown: communication_data_typ (nearest: communication_data_type)"),
    (DS, "{}", "assumed: it is empty: every setting of deepspeed is at its default"),
    # transformers
    (TR, "--bf16 --dtype bfloat16", "storage=bf16", "main=none", "exp_avg=bf16"),
    (TR, "--bf16", "undecided: the checkpoint", "!assumed: the checkpoint"),
    (TR, "--bf16 --fsdp full_shard --dtype bfloat16", "storage=fp32"),
    (TR, "--fp16", "fields.initial_loss_scale=65536.0", "fields.loss_scale_window=2000.0", "fields.hysteresis=1"),
    (TR, "--fp16 --use_cpu", "compute=fp32", "loss_scale=none", "inert: fp16:"),
    (TR, "--bf16 --use_cpu --fsdp full_shard", "sharded=nothing", "contradicts: fsdp with use_cpu"),
    *((TR, f"{{output_dir: x, bf16: true, fsdp: true, fsdp_config: {config}}}", f"autocast={autocast}") for config, autocast in
      {"null": "none", "{version: 2}": "none", "fsdp.json": "none", "{version: 1}": "bf16", "{fsdp_version: '1'}": "bf16"}.items()),
    *((TR, text, "cannot_express: TF32 on CUDA") for text in ("--tf32 True", "--torch_compile True", "--torch_compile_backend inductor --bf16")),
    *((TR, text, "!cannot_express: TF32 on CUDA") for text in ("--tf32 False --torch_compile True", "--torch_compile True --fp16", "--bf16", "--tf32 True --use_cpu")),
    (TR, "--bf16 --fsdp no_shard", "contradicts: Transformers refuses it", "sharded=nothing"),
    (TR, "{bf16: true, fsdp: no_shard auto_wrap, fsdp_config: {version: 1}}", "sharded=nothing", "!contradicts"),
    (TR, "{bf16: true, fsdp: [hybrid_shard], fsdp_config: {version: 1}}", "sharded=everything"),
    *((TR, f"{{bf16: true, optim: {word}}}", "cannot_express: 8-bit moments") for word in ("adamw_bnb_8bit", "adamw_torch_8bit")),
    (AM, "{model: {torch_dtype: bf16}, optimizer: {_target_: bitsandbytes.optim.AdamW8bit}}", "cannot_express: 8-bit moments"),
    # a value of the wrong kind is a fault and never off
    (DS, '{"bf16": {"enabled": "yess"}}', "error: bf16.enabled='yess': expected true or false"),
    (DS, '{"bf16": true}', "error: bf16=True: expected a mapping"),
    (DS, '{"zero_optimization": 2, "bf16": {"enabled": true}}', "error: zero_optimization=2: expected a mapping"),
    (TR, '{"bf16": "ture"}', "error: bf16='ture': expected true or false"),
    (MB, "{mixed_precision: bf16_mixed, ddp: {grad_reduce_in_fp32: flase}}", "error: expected true or false"),
    (MB, "{mixed_precision: bf16_mixed, optimizer: {use_precision_aware_optimizer: 3}}", "error: expected true or false"),
    (AM, "distributed: {strategy: [fsdp2]}", "error: distributed.strategy=['fsdp2']: expected a word"),
    (AM, "fp8: on_please", "error: fp8='on_please': expected a mapping"),
    (AC, "mixed_precision: [bf16]", "error: mixed_precision=['bf16']: expected a word"),
    (LI, "trainer: bf16", "error: trainer='bf16': expected a mapping"),
    # the moments are those of the optimizer that is named: (first, second, bytes per parameter), by hand from what each stack stores; it is no difference between recipes
    *((stack, text, f"optimizer.exp_avg={first}", f"optimizer.exp_avg_sq={second}", f"bytes_text={size}", "!assumed: no optimizer stands in it", "!apart: exp_avg", "!apart: bytes")
      for stack, text, first, second, size in (
          (LM, "--bf16 --optimizer lion", "true", "false", "14"),
          (LM, "--bf16 --optimizer sgd", "true", "false", "14"),
          (LM, "--bf16 --optimizer sgd --sgd-momentum 0", "false", "false", "10"),
          (MB, "{mixed_precision: bf16_mixed, optimizer: {optimizer: sgd}}", "true", "false", "6 + 8/N"),
          (AM, "{model: {torch_dtype: bf16}, optimizer: {_target_: dion.Muon}}", "true", "false", "6/N"),
          (DS, '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}, "optimizer": {"type": "Lion"}}', "true", "false", "4 + 12/N"),
          (DS, '{"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}', "true", "false", "12"),
          (LI, "{trainer: {precision: bf16-mixed}, optimizer: {class_path: torch.optim.SGD, init_args: {lr: 1}}}", "false", "false", "8"),
          (TR, "--bf16 --optim adafactor", "false", "false", "8"),
          (TR, "--bf16 --optim sgd --optim_args momentum=0.9", "true", "false", "12"),
          (TT, "{optimizer: {name: Lion}, training: {steps: 1}}", "true", "false", "12/N"))),
    *((stack, text, "assumed: no optimizer stands in it", "optimizer.name=Adam") for stack, text in (
        (AC, "{compute_environment: X, mixed_precision: bf16}"), (AC, "{compute_environment: X, distributed_type: DEEPSPEED, mixed_precision: bf16}"),
        (AM, "{model: {torch_dtype: bf16}}"), (DS, '{"bf16": {"enabled": true}}'), (LI, "precision=bf16-mixed"), (TT, "--training.steps 1"))),
    (AM, "{model: {torch_dtype: bf16}, optimizer: {_target_: mine.Sophia}}", "cannot_express: mine.Sophia: its states are not known here", "optimizer.name=mine.Sophia"),
    # what each stack's own source has as the default of a setting that decides a fact, where nothing is said
    *((stack, text, *(f"in_force: {line}" for line in lines.split("; "))) for stack, text, lines in (
        (LM, "--fp16", "--initial-loss-scale 2**32; --loss-scale-window 1000; gradients are reduced in FP16"),
        (LM, "--bf16 --use-megatron-fsdp", "--megatron-fsdp-main-grads-dtype auto; --data-parallel-sharding-strategy optim_grads_params"),
        (DS, '{"bf16": {"enabled": true}}', "communication_data_type=bf16; data_types.grad_accum_dtype=bf16; zero_optimization.stage=0"),
        (AM, "{model: {torch_dtype: bf16}}", "distributed.strategy=fsdp2; distributed.mp_policy.reduce_dtype=fp32"),
        (AM, "{distributed: {mp_policy: {param_dtype: bfloat16}}}", "distributed.mp_policy.reduce_dtype=bf16"),
        (AC, "{compute_environment: X, distributed_type: FSDP, mixed_precision: fp8}", "fsdp_config.fsdp_version=1"),
        (LI, "{trainer: {max_epochs: 1}}", "trainer.precision=32-true; trainer.strategy=auto"),
        (LI, "{trainer: {precision: 16-mixed, strategy: deepspeed}}", "trainer.strategy.stage=2; trainer.strategy.initial_scale_power=16"),
        (TR, "{bf16: true, fsdp: full_shard}", "optim=adamw_torch_fused; fsdp_config.version=2"),
        (TT, "{training: {steps: 1}}", "training.dtype=fp32; training.mixed_precision_reduce=fp32"))),
    (LM, "--bf16 --fp8-format hybrid --fp8-recipe delayed", "!in_force: --fp8-recipe"),
    (DS, '{"bf16": {"enabled": true}, "communication_data_type": "fp32", "zero_optimization": {"stage": 2}}', "!in_force: communication_data_type", "!in_force: stage", "in_force: off: & fp16.enabled"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}"[:90])
def test_settings_mean_what_the_stack_makes_of_them(row: tuple[str, ...]) -> None:
    stack, text, *claims = row
    if claims[0].startswith("error: "):
        with pytest.raises(MpbridgeError) as error:
            read(stack, text)
        assert [claim for claim in claims if claim.partition(": ")[2] not in str(error.value)] == []
        return
    found = read(stack, text)
    assert [claim for claim in claims if not holds(found, stack, claim)] == [], found


def test_a_claim_of_this_table_can_fail() -> None:
    found = read(LM, "--bf16 --hysteresis 3")
    for claim in ("wire=bf16", "wire~b", "fields.bf16=-", "recipe=fp32", "inert: --bf16", "!inert: --fp16", "!inert", "contradicts", "same: --fp16", "ends=1,1"):  # fmt: skip
        assert not holds(found, LM, claim), claim


@pytest.mark.parametrize("version", ["0.16", "0.20"])
def test_megatron_fsdp_divides_nothing_by_default_before_it_had_flags_for_dtypes(version: str) -> None:
    found = read_args("--bf16 --use-megatron-fsdp", version=version)
    assert found.meaning.sharded == {"0.16": "nothing", "0.20": "everything"}[version]
