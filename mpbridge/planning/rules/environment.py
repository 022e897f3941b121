"""Rules about a run's environment: what performs a quantization (the library, its version, the layers, the machine), versions, and variables that complete or contradict a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpbridge.common import transformer_engine
from mpbridge.common.errors import BadValue
from mpbridge.common.formats import DType, say
from mpbridge.common.shipped import VERSION, install
from mpbridge.common.versions import at_least, release
from mpbridge.planning.capability import QuantizedBy, can_run
from mpbridge.planning.rules.base import Case, Rule, row, warning
from mpbridge.precision.megatron_spec.versions import RELEASES
from mpbridge.precision.policy import Quant
from mpbridge.precision.scalings import Option


def _by_engine(case: Case) -> list[Quant]:
    """The quantizations that Transformer Engine performs."""
    return [quant for quant in case.policy.quants if quant.row.hardware.library == "transformer_engine"]


def _libraries(case: Case) -> str:
    libraries = {quant.row.hardware.library: quant.scaling for quant in case.policy.quants}
    strange = [f"{scaling} scaling" for library, scaling in libraries.items() if library not in case.traits.quantizers]
    if strange:
        return f"{', '.join(strange)} on {case.traits.full_name}"
    return f"{' and '.join(libraries.values())} scaling in one run" if len(libraries) > 1 else ""


def _capability(case: Case) -> str:
    machine, versions = case.run.machine, case.run.versions
    if machine is None:
        return ""
    by: QuantizedBy = "transformer_engine" if case.native else "emulation"
    answer = can_run(case.policy, machine, versions, quantized_by=by)
    if answer.how != "no" and (answer.native or not case.native):
        return ""
    # a missing library is reported by its own rule, with or without a machine
    absent = versions.transformer_engine is None and machine.gpu and answer.how == "emulated"
    if absent and "; " not in answer.reason and "not installed" in answer.reason:
        return ""
    return f"{answer.reason} (nearest that runs there: {answer.nearest or 'none'})"


def _engine_version(case: Case) -> str:
    have = case.run.versions.transformer_engine
    if have is None or case.run.machine is not None:  # the capability row reports it with the machine's other needs
        return ""
    late = [quant.row for quant in _by_engine(case) if not at_least(have, quant.row.hardware.engine)]
    names = ", ".join(row.name for row in late)
    return f"Transformer Engine {have} with {names} (needs {late[0].hardware.engine} or later)" if late else ""


_READ = "2.9"
"""The oldest release whose sources these rules were checked against; the releases in the table have also been run."""
_RANGE = f"{_READ} to {'.'.join(map(str, max(transformer_engine.RELEASES)))}"


def _untested(case: Case) -> bool:
    have = case.run.versions.transformer_engine
    return have is not None and not (at_least(have, _READ) and release(have)[:2] <= max(transformer_engine.RELEASES))


_AMPERE = (8, 0)
"""The first GPUs with TF32."""

REALIZATION: tuple[Rule, ...] = (
    row("quantization-without-transformer-engine", "no Transformer Engine is installed",
        f"Transformer Engine {_RANGE} (without it megatron-core's FP8 context does nothing and the run trains in 16 bits)",
        f"{install('te')}, or emulate=true", "megatron-core 0.16.1 fp8_utils.py get_fp8_context",
        about="quantized", when=lambda c: _by_engine(c) and c.run.versions.transformer_engine is None, emulated="silent"),
    row("quantization-with-local-layers", "transformer_impl='local'",
        "Transformer Engine's layers: the local ones silently ignore the FP8 context",
        "model.transformer_impl=transformer_engine, or emulate=true", "megatron-core 0.16.1 models/gpt/gpt_layer_specs.py",
        about="quantized", when=lambda c: _by_engine(c) and c.model("transformer_impl") == "local", emulated="silent"),
    row("scaling-of-a-library-that-the-engine-does-not-use", _libraries,
        "scalings of one library that the engine supports in its linears: Transformer Engine's on every engine, torchao's on torch FSDP2",
        "engine=fsdp2 for torchao's scalings, or a recipe with Transformer Engine's (mpbridge list)",
        "EngineTraits.quantizers; mpbridge/backend/models/torchao_linears.py",
        about="quantized"),
    row("machine-cannot-run-it", _capability,
        "a machine, CUDA and Transformer Engine that run it natively",
        "use the recipe named here, another machine (mpbridge doctor), or emulate=true", "Transformer Engine 2.11 pytorch/quantization.py check_*_support",
        about="quantized"),
    row("transformer-engine-too-old", _engine_version,
        "the version that introduced this scaling",
        "upgrade Transformer Engine", "megatron-core 0.16.1 fp8_utils.py get_fp8_recipe, fp4_utils.py get_fp4_recipe",
        about="quantized", emulated="silent"),
    warning("transformer-engine-untested", "Transformer Engine {c.run.versions.transformer_engine}",
        f"{_RANGE}: older releases were not reviewed, newer ones have not been run under mpbridge",
        "install a version in that range (megatron-core 0.16 itself declares versions below 2.12)",
        "tests/te_cpu, which run Transformer Engine's own Python code of each of those releases from 2.11 on; megatron-core 0.16.1 package metadata, extra dev",
        about="quantized", when=lambda c: _by_engine(c) and _untested(c), emulated="silent"),
    warning("fp32-products-in-tf32", "FP32 products in Transformer Engine's linears",
        "products of FP32 factors: Transformer Engine asks cuBLAS for TF32 (10 bits of mantissa) whatever torch's settings say, on Ampere and later",
        "export NVIDIA_TF32_OVERRIDE=0 before Python starts, for FP32 products at a fraction of the speed",
        "Transformer Engine 2.11 and main d0067d0d common/gemm/cublaslt_gemm.cu (CUBLAS_COMPUTE_32F_FAST_TF32)",
        when=lambda c: c.native and c.policy.compute is DType.FP32 and c.run.versions.transformer_engine is not None and c.arch >= _AMPERE and c.variable("NVIDIA_TF32_OVERRIDE") != "0",
        emulated="silent"),
)  # fmt: skip

_CORES = [core.version.rpartition(".")[0] for core in RELEASES]
_TORCH = ("2.6", "2.15")
"""The oldest and the newest torch that the suite was run with (docs/reference/compatibility.md)."""
_RECIPES = "Transformer Engine 2.11 common/recipe/__init__.py (read once, at import)"


def _nvfp4(case: Case) -> str:
    names = [f"NVTE_NVFP4_DISABLE_{what}" for what in ("RHT", "STOCHASTIC_ROUNDING", "2D_QUANTIZATION")]
    if case.arch >= (12, 0):  # the instruction for stochastic rounding does not exist there: switching it off is right
        del names[1]
    seen = [name for name in names if case.set_variable(name)]
    return f"{', '.join(seen)} set" if seen else ""


_OWN_RULE = ("power_of_two", "hadamard", "stochastic_rounding", "square_weights")
"""Options whose variables have their own rules."""


def _options(case: Case) -> Iterator[tuple[Quant, Option, Any]]:
    """Every option of every quantization with its value from the environment; a text that Transformer Engine rejects counts as the default."""
    for quant in case.policy.quants:
        for option in quant.row.options:
            try:
                yield quant, option, option.read(case.run.environment)
            except BadValue:
                yield quant, option, option.default


def _outside(case: Case) -> str:
    found = [
        f"{option.variable}={case.run.environment[option.variable]} ({option.name}={say(value)})"
        for quant, option, value in _options(case)
        if value != option.default and option.name not in (*_OWN_RULE, *dict(quant.options))
    ]
    return ", ".join(dict.fromkeys(found))


def _not_set(case: Case) -> str:
    found = [
        f"{option.name}={say(dict(quant.options)[option.name])} without {option.setting(dict(quant.options)[option.name])}"
        for quant, option, value in _options(case)
        if option.variable and dict(quant.options).get(option.name, value) != value
    ]
    return ", ".join(dict.fromkeys(found))


def _clashes(case: Case) -> str:
    version = case.run.versions.transformer_engine if case.native else None
    found = []
    for quant in case.policy.quants:
        values = {option.name: value for of, option, value in _options(case) if of == quant} | dict(quant.options)
        found += quant.row.clashes(values, version)
    return "; ".join(dict.fromkeys(found))


def _never_tried(case: Case) -> str:
    torch, core = case.run.versions.torch, case.run.versions.megatron_core
    strange = []
    if torch is not None and not (at_least(torch, _TORCH[0]) and release(torch)[:2] <= release(_TORCH[1])):
        strange.append(("torch", torch, _TORCH))
    if core is not None and not any(one.reviewed.holds(core) for one in RELEASES):
        strange.append(("megatron-core", core, (_CORES[0], _CORES[-1])))
    return "; ".join(
        f"{name} {have} has not been tried with mpbridge {VERSION}; the "
        + (f"newest that was is {newest}" if at_least(have, oldest) else f"oldest that was is {oldest}")
        for name, have, (oldest, newest) in strange
    )


RULES: tuple[Rule, ...] = (
    warning("library-versions-untested", _never_tried,
        f"torch {' to '.join(_TORCH)} and megatron-core {' or '.join(_CORES)}, which the rules and the suite were tried on",
        "nothing if the run's audits pass, or install a release that was tried", "docs/reference/compatibility.md"),
    row("fp32-block-scales-on-blackwell", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES set",
        "unset: on Blackwell blockwise FP8 runs as MXFP8, whose scales are powers of two",
        "unset NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "Transformer Engine 2.11 quantize_transpose_square_blockwise.cu, csrc/extensions/gemm.cpp",
        about="blockwise", when=lambda c: c.set_variable("NVTE_FP8_BLOCK_SCALING_FP32_SCALES") and "blockwise" in c.scalings and c.arch >= (10, 0), emulated="warning"),
    warning("fp32-block-scales-elsewhere", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES set",
        "unset: it changes blockwise scales from powers of two to FP32, and conflicts with MXFP8",
        "unset it, unless you train with it deliberately", f"{_RECIPES}; miles#1340",
        about="quantized",
        when=lambda c: c.set_variable("NVTE_FP8_BLOCK_SCALING_FP32_SCALES") and c.policy.quantized and not ("blockwise" in c.scalings and c.arch >= (10, 0))),
    warning("nvfp4-switched-off-from-outside", _nvfp4,
        "unset: the recipe includes the Hadamard transform, stochastic rounding and 2D weight scales",
        "unset them, or record them with the run", _RECIPES,
        about="nvfp4", when=lambda c: "nvfp4" in c.scalings),
    warning("power-of-two-current-scales", "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES set",
        "unset: current scaling uses FP32 scales",
        "unset it, or record it with the run", _RECIPES,
        about="tensorwise", when=lambda c: c.set_variable("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES") and "tensorwise" in c.scalings),
    warning("scaling-switched-from-outside", _outside,
        "unset, or stated in the recipe (mixed_precision.fp8_options, fp4_options)",
        "unset it, or write it into the recipe", _RECIPES,
        about="quantized"),
    row("option-not-in-the-environment", _not_set,
        "the matching environment variable: megatron-core does not pass these options on, and Transformer Engine reads them from the environment",
        "export the variables named here before Python starts", f"{_RECIPES}; megatron-core 0.16.1 fp8_utils.py get_fp8_recipe, fp4_utils.py get_fp4_recipe",
        about="quantized", emulated="silent"),
    row("options-exclude-each-other", _clashes,
        "options that Transformer Engine accepts together",
        "change one of them (mixed_precision.fp8_options, fp4_options, or the variable)",
        "Transformer Engine main d0067d0d pytorch/quantization.py NVFP4BlockScalingRecipeState, pytorch/csrc/quantizer.cpp",
        about="quantized"),
    warning("unfused-scale-update", "NVTE_UNFUSED_FP8_UPDATE set",
        "unset: with it the amax history rolls in zeros, which gives different scales",
        "unset NVTE_UNFUSED_FP8_UPDATE", "Transformer Engine 2.11 pytorch/quantization.py reduce_and_update_fp8_tensors",
        about="delayed", when=lambda c: c.set_variable("NVTE_UNFUSED_FP8_UPDATE") and c.history, emulated="silent"),
    row("fp8-attention-without-its-backend", "FP8 attention with NVTE_FUSED_ATTN=0",
        "the fused backend, which has the FP8 kernels",
        "unset NVTE_FUSED_ATTN, or mixed_precision.fp8_dot_product_attention=false", "Transformer Engine 2.11 pytorch/attention/dot_product_attention/utils.py",
        about="fp8", when=lambda c: any(q.attention != "none" for q in c.policy.quants) and c.variable("NVTE_FUSED_ATTN") == "0", emulated="silent"),
    warning("attention-recipe-without-fp8-attention", "NVTE_DPA_FP8_RECIPE set with FP8 attention off",
        "fp8_dot_product_attention=true, or the variable unset",
        "unset NVTE_DPA_FP8_RECIPE", "Megatron-Bridge#5394",
        about="fp8", when=lambda c: c.run.environment.get("NVTE_DPA_FP8_RECIPE", "") and all(q.attention == "none" for q in c.policy.quants), emulated="silent"),
    row("user-buffers-with-expandable-segments", "ddp.nccl_ub with expandable_segments:True",
        "one of them",
        "PYTORCH_CUDA_ALLOC_CONF without expandable_segments, or ddp.nccl_ub=false", "megatron-core 0.16.1 distributed_data_parallel_config.py __post_init__",
        when=lambda c: c.ddp("nccl_ub") and "expandable_segments:True" in c.run.environment.get("PYTORCH_CUDA_ALLOC_CONF", "").split(",")),
)  # fmt: skip
