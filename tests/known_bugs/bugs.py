"""Public precision bugs, one row each: what happened, which play repeats it here, and what mpbridge must say. Plain data: the docs' page is made of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """One thread on GitHub."""

    number: str
    """owner/name#number."""
    what: str
    play: str = ""
    """module of this folder : name in its PLAYS; '' if nothing here repeats it."""
    says: str = ""
    """Part of what mpbridge then says; '' if it says nothing."""
    when: str = ""
    """Instrument and moment; where nothing is said, the reason."""
    again: bool = False
    """Whether the thread itself was read for this row; otherwise the facts come from notes on it."""


CHECK, PLAN = "`mpbridge check`, before the run", "`mpbridge plan`, before the run"
STATIC, FIRST, EVAL = "audit, before step 1", "audit of step 1", "audit of that evaluation"
NEXT = "audit of the next observed step"
WITNESS, LOAD = "witness, in the first observed step", "on loading, before a step"
RESUMED = "witness with `since=`, in the first step after the resume"
NOT = "not caught: "
ADAM, ROTARY, STATES = "loops:sixteen_bits_under_adam", "loops:rounded_frequencies", "loops:moments_after_a_resume"
CACHE, MICRO = "loops:cache_after_no_grad", "loops:only_the_last_micro_batch"
MUON, GLOB = "configs:muon-under-mxfp8", "configs:module-rule-matches-nothing"
NO_MAIN = "main weights: promised FP32 under Adam, found none, for weights of 16 bits"
FREQUENCIES = "rotary frequencies: promised FP32, found 16 bits"
WERE = "first moment: fp32, were bf16"
UNMOVED = "weights moved: promised all that have gradients, found 3 of 8"
BACKWARD = "differs from what its backward pass produced"
STALE = "weights as read: promised main weights, rounded, found different"

BUGS = (
    # --- configurations
    Bug("NVIDIA/Megatron-LM#2272", "NaN from the second step on: MXFP8 weights gathered without overlap", "configs:mxfp8-gather-without-overlap-gives-nan",
        "error mxfp8-gather-without-overlap-gives-nan", CHECK),
    Bug("NVIDIA-NeMo/Megatron-Bridge#638", "the MXFP8 recipe used E5M2 gradients; loss diverged, MMLU fell", "configs:mxfp8-with-e5m2-gradients",
        "warning mxfp8-with-e5m2-gradients", CHECK, again=True),
    Bug("NVIDIA-NeMo/Megatron-Bridge#450", "MXFP8 gather without the reused gradient buffer started", "configs:mxfp8-gather-without-reused-buffer",
        "error mxfp8-gather-without-reused-buffer", CHECK),
    Bug("NVIDIA/Megatron-LM#3007", "a bucket's table of offsets lacks the buffer's padding: after a gather through it `dt_bias` holds values of `A_log`",
        "configs:gather-misplaces-what-follows-odd-sizes", "warning gather-misplaces-what-follows-odd-sizes", CHECK),
    Bug("NVIDIA/Megatron-LM#4987", "Muon's main weights and gather started from quantized values under MXFP8", MUON, "error muon-under-mxfp8", CHECK, again=True),
    Bug("NVIDIA/Megatron-LM#5707", "loss stayed flat: the layer-wise optimizer skipped the copy from main weights", MUON, "error muon-under-mxfp8", CHECK),
    Bug("NVIDIA/Megatron-LM#6754", "layer-wise optimizer: no high-precision initial values, no staging copy", MUON, "error muon-under-mxfp8", CHECK),
    Bug("NVIDIA/Model-Optimizer#1877", "a glob written for another layout left a hybrid's routed experts in BF16", GLOB, "error module-rule-matches-nothing", CHECK),
    Bug("NVIDIA/Model-Optimizer#2411", "`local_experts.N` in between: 99.2 % of the intended quantization disappeared", GLOB, "error module-rule-matches-nothing", CHECK),
    Bug("NVIDIA-NeMo/RL#3654", "layers stored in FP8 and layers kept in BF16 mixed up; FP8 bytes reached BF16 weights", "configs:module-rule-in-stored-layer",
        "error module-rule-in-stored-layer", CHECK),
    Bug("pytorch/torchtitan#1646", "BF16 weights with no FP32 copy: the loss falls to 8 instead of 7 in 100 steps", "configs:full-16-bit-with-distributed-optimizer",
        "error full-16-bit-with-distributed-optimizer", CHECK),
    Bug("NVIDIA-NeMo/Megatron-Bridge#5365", "the recipe overrode `grad_reduce_in_fp32=false` in silence", "configs:override",
        "the command line mixed_precision.grad_reduce_in_fp32=false", PLAN),
    # --- loops around torch
    *(Bug(number, what, CACHE, UNMOVED, WITNESS, again=read) for number, what, read in (
        ("pytorch/pytorch#65766", "a forward pass under no_grad inside of autocast: linears get no gradient afterwards", True),
        ("pytorch/pytorch#112583", "the same, parts of the graph are lost", True),
        ("pytorch/pytorch#105211", "the same after an inference pass of a frozen part", True),
        ("NVIDIA/apex#132", "a cast that an evaluation caches survives into training", False),
        ("Lightning-AI/pytorch-lightning#20644", "a validation pass freezes weights under autocast", False),
    )),
    *(Bug(number, what, ADAM, NO_MAIN, WITNESS, again=read) for number, what, read in (
        ("areal-project/AReaL#1292", "torch's AdamW over BF16 parameters: the final loss is three times higher", True),
        ("verl-project/verl#5308", "full fine-tuning in BF16 is worse than LoRA", False),
        ("NVIDIA-NeMo/Nemotron#208", "moments in BF16 with BF16 parameters", False),
        ("NVIDIA/apex#1728", "FusedAdam allocates no main weights for BF16, though asked to", True),
        ("NVIDIA-NeMo/Automodel#3444", "at a rate of 6e-6 most updates of BF16 weights round back to the same value", True),
        ("huggingface/accelerate#3979", "a BF16 model is said to be upcast to FP32 under FSDP2, and is not", False),
    )),
    *(Bug(number, what, STATES, WERE, RESUMED, again=read) for number, what, read in (
        ("pytorch/torchtitan#4615", "BF16 moments become FP32 in a resume; memory doubles, updates change", True),
        ("pytorch/pytorch#43706", "loading gives states their parameter's dtype", True),
        ("TensorAuto/OpenTau#184", "a resume turns BF16 moments into FP32 ones without a word", True),
        ("deepspeedai/DeepSpeed#7746", "momentum has another dtype after a resume", False),
    )),
    Bug("deepspeedai/DeepSpeed#7839", "gradients divided by a loss scale of 65,536 that the loss was never multiplied by", "loops:divided_by_a_scale",
        "1.52588e-05 times its expected value: divided by a loss scale", WITNESS, again=True),
    *(Bug(number, what, ROTARY, FREQUENCIES, WITNESS, again=True) for number, what in (
        ("huggingface/transformers#25681", "model.to(bfloat16) rounds `inv_freq`; angles are wrong at long positions"),
        ("huggingface/transformers#29285", "RoPE of Llama and Gemma loses precision in BF16"),
        ("huggingface/transformers#29496", "Mistral's tables, made anew in training, come from a BF16 `inv_freq`"),
        ("NVIDIA-NeMo/Automodel#2549", "a cast of the whole model rounds the frequencies of seven model families"),
        ("NVIDIA/Megatron-LM#744", "`.to(torch.bfloat16)` on the model changes `inv_freq`"),
    )),
    Bug("huggingface/transformers#30709", "`model.to(bfloat16)` for evaluation: it differs from training", "loops:cast_to_evaluate", "stored parameters: bf16, were fp32",
        "witness, in that evaluation"),
    *(Bug(number, what, MICRO, BACKWARD, WITNESS, again=True) for number, what in (
        ("ServiceNow/Fast-LLM#550", "a shared buffer is overwritten: only the last micro-batch's gradient is left"),
        ("allenai/open-instruct#1498", "ZeRO 2 resets its accumulator after each backward pass"),
        ("NVIDIA/Megatron-LM#7186", "Megatron-FSDP v2 with hybrid sharding drops accumulated gradients"),
        ("pytorch/torchtitan#3575", "zero_grad in forward_backward instead of after the update"),
        ("bytetriper/RAE#67", "zero_grad in every micro-batch"),
    )),
    Bug("deepspeedai/DeepSpeed#7985", "the last micro-batch is added after the all-reduce; ranks drift apart", "ranks:last micro-batch", "replicas: promised equal on every rank",
        WITNESS, again=True),
    Bug("deepspeedai/DeepSpeed#5154", "BF16 without ZeRO: what is reduced is not what the optimizer reads", "ranks:never reduced", "replicas: promised equal on every rank",
        WITNESS, again=True),
    Bug("pytorch/pytorch#190626", "FSDP2 sums gradients over tensor-parallel ranks in BF16 although `reduce_dtype` is FP32 (in torch 2.13 too, not in 2.15)", "ranks:tensor parallel",
        "norm.weight: summed over 2 tensor-parallel ranks in bf16, reduce_dtype is fp32", WITNESS, again=True),
    Bug("huggingface/transformers#34191", "the mean of micro-batches' means is not the mean over tokens", "loops:unequal_micro_batches",
        when=NOT + "a loop may weight its micro-batches as it likes; in mpbridge's own loop `model.calculate_per_token_loss` decides"),
    Bug("pytorch/torchtitan#4135", "gradient norms are rounded to BF16, and with them the clipping factor", "loops:norm_in_bf16",
        when=NOT + "the factor by which a loop clips is its own; the report shows it"),
    # --- megatron-core's stack
    Bug("NVIDIA/Megatron-LM#1482", "`expert_bias` becomes BF16 with the model; small updates are lost", "engines:expert bias",
        "buffers: promised fp32, found bf16", STATIC, again=True),
    Bug("NVIDIA/Megatron-LM#4609", "gathered weights stay in the gradient buffer, and backward adds to them", "engines:stale gather", BACKWARD, FIRST, again=True),
    Bug("NVIDIA-NeMo/Megatron-Bridge#2134", "main weights are copied into the gradient buffer in steps without overlap", "engines:stale gather", BACKWARD, FIRST),
    Bug("AMD-AGI/Primus#1046", "a flag cleared once a step gates every micro-batch: 1 of 32 gradients counts", "engines:one micro-batch", BACKWARD, FIRST),
    Bug("NVIDIA/Megatron-LM#6336", "Megatron-FSDP v2 no longer copies updated weights to what the forward pass reads", "engines:never refreshed", STALE, FIRST, again=True),
    Bug("NVIDIA/Megatron-LM#4562", "evaluation reads weights of an earlier step", "engines:evaluation behind", STALE, EVAL, again=True),
    Bug("NVIDIA-NeMo/Megatron-Bridge#3727", "main weights are not staged before the gather of an evaluation: it is one step behind", "engines:evaluation behind", STALE, EVAL, again=True),
    Bug("NVIDIA/Megatron-LM#6745", "modules that a file kept in BF16 ran in FP8: matchers were never applied", "engines:quantized in spite of its rule", "linears: promised", STATIC),
    Bug("NVIDIA/Megatron-LM#4560", "after an evaluation a training step works on stale weights (column copies of MXFP8's: `tests/te_cpu`)", "engines:after evaluation", "(before the update)", NEXT, again=True),
    Bug("NovaSky-AI/SkyRL#2149", "weights are loaded, main weights are not: the next update copies the old ones back", "engines:weights only", "(before the update)", NEXT, again=True),
    Bug("NVIDIA/Megatron-LM#5071", "with optimizer offload, the first update after a weights-only load starts from random weights", "engines:weights only",
        "(before the update)", NEXT, again=True),
    Bug("stanford-futuredata/Megatron-LM#5", "main weights are not reset to the pretrained BF16 weights", "engines:weights only", "(before the update)", NEXT, again=True),
    Bug("NVIDIA-NeMo/RL#2633", "main weights are made from parameters that were quantized first", "engines:quantized main weights",
        "bits of main weights: promised as wide as their dtype, found values of 8-bit codes in FP32", STATIC),
    Bug("deepspeedai/DeepSpeed#8461", "Muon's orthogonalization is skipped for flat partitions", "engines:not orthogonalized",
        "newton-schulz: promised bf16, found not the orthogonalized momentum", FIRST),
    # --- loading
    Bug("NVIDIA/Megatron-LM#1359", "main weights are BF16 after a load", "resumes:main weights rounded", "tensors are not in the run as they were loaded", LOAD),
    Bug("NVIDIA-NeMo/Megatron-Bridge#1730", "NaN in the first step after a resume: amax histories were not restored", "resumes:amax history lost",
        "tensors are not in the run as they were loaded", LOAD),
    Bug("NVIDIA-NeMo/Automodel#2682", "a cast makes a copy, the loader fills it, and the key counts as loaded", "resumes:moments left behind",
        "tensors are not in the run as they were loaded", LOAD),
    # --- not repeated here
    Bug("NVIDIA/TransformerEngine#982", "FP8 with empty amax histories on a BF16 checkpoint: the loss explodes", when=NOT + "such a resume needs `checkpoint.accept`"),
    Bug("NVIDIA/TransformerEngine#1047", "`is_first_microbatch` with a cached weight: error 1.7 instead of 0.07", when=NOT + "inside of a GPU kernel"),
    Bug("pytorch/pytorch#189581", "RMSNorm in BF16 returns values that are too small", when=NOT + "does not happen on a CPU"),
    Bug("verl-project/verl#7918", "an `ignore` entry is taken as a prefix: 56 weights of the rollout are not quantized", when=NOT + "happens in the inference engine"),
    Bug("pytorch/pytorch#196996", "BF16 and FP32 gradients meet in one FSDP2 group", when=NOT + "the run ends with an assertion of torch's, no wrong number results"),
)  # fmt: skip
