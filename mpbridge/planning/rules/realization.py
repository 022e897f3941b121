"""Rules about what performs a quantization: the library, its version, the layers and the machine."""

from __future__ import annotations

from mpbridge.common.formats import DType
from mpbridge.common.shipped import install
from mpbridge.common.transformer_engine import RELEASES
from mpbridge.common.versions import at_least
from mpbridge.common.versions import release as numbers
from mpbridge.planning.hardware.capability import can_run
from mpbridge.planning.rules.base import Case, Rule
from mpbridge.precision.policy import Quant


def _library(case: Case) -> str | bool:
    return (
        bool(_by_engine(case)) and case.run.versions.transformer_engine is None and "no Transformer Engine is installed"
    )


def _by_engine(case: Case) -> list[Quant]:
    """The quantizations that Transformer Engine performs."""
    return [quant for quant in case.policy.quants if quant.row.hardware.library == "transformer_engine"]


def _libraries(case: Case) -> str | None:
    libraries = {quant.row.hardware.library: quant.scaling for quant in case.policy.quants}
    strange = [f"{scaling} scaling" for library, scaling in libraries.items() if library not in case.traits.quantizers]
    if strange:
        return f"{', '.join(strange)} on {case.traits.full_name}"
    return f"{' and '.join(libraries.values())} scaling in one run" if len(libraries) > 1 else None


def _capability(case: Case) -> str | None:
    machine = case.run.machine
    if machine is None:
        return None
    answer = can_run(
        case.policy, machine, case.run.versions, quantized_by="transformer_engine" if case.native else "emulation"
    )
    refused = answer.how == "no" or (case.native and not answer.native)
    # a missing library is reported by its own rule, with or without a machine
    only_library = (
        case.run.versions.transformer_engine is None
        and machine.gpu
        and answer.how == "emulated"
        and "; " not in answer.reason
        and "not installed" in answer.reason
    )
    return (
        f"{answer.reason} (nearest that runs there: {answer.nearest or 'none'})"
        if refused and not only_library
        else None
    )


def _engine_version(case: Case) -> str | None:
    have = case.run.versions.transformer_engine
    if have is None or case.run.machine is not None:  # the capability row reports it with the machine's other needs
        return None
    late = [quant.row for quant in _by_engine(case) if not at_least(have, quant.row.hardware.engine)]
    return (
        f"Transformer Engine {have} with {', '.join(row.name for row in late)} (needs {late[0].hardware.engine} or later)"
        if late
        else None
    )


_READ = "2.9"
"""The oldest release whose sources these rules were checked against; the releases in the table have also been run."""
_RANGE = f"{_READ} to {'.'.join(map(str, max(RELEASES)))}"


def _untested(case: Case) -> str | None:
    have = case.run.versions.transformer_engine
    outside = have is not None and not (at_least(have, _READ) and numbers(have)[:2] <= max(RELEASES))
    return f"Transformer Engine {have}" if _by_engine(case) and outside else None


def _tf32(case: Case) -> str | None:
    arch = case.run.machine.arch if case.run.machine is not None else None
    rounded = (
        case.native
        and case.policy.compute is DType.FP32
        and case.run.versions.transformer_engine is not None
        and arch is not None
        and arch >= _AMPERE
        and case.run.environment.get("NVIDIA_TF32_OVERRIDE", "").strip() != "0"
    )
    return "FP32 products in Transformer Engine's linears" if rounded else None


_AMPERE = (8, 0)
"""The first GPUs with TF32."""


RULES: tuple[Rule, ...] = (
    Rule(
        id="quantization-without-transformer-engine",
        about="quantized",
        found=_library,
        expected=f"Transformer Engine {_RANGE} (without it megatron-core's FP8 context does nothing and the run trains in 16 bits)",
        cure=f"{install('te')}, or emulate=true",
        source="megatron-core 0.16.1 fp8_utils.py get_fp8_context",
        emulated="silent",
    ),
    Rule(
        id="quantization-with-local-layers",
        about="quantized",
        found=lambda c: _by_engine(c) and c.model("transformer_impl") == "local" and "transformer_impl='local'",
        expected="Transformer Engine's layers: the local ones silently ignore the FP8 context",
        cure="model.transformer_impl=transformer_engine, or emulate=true",
        source="megatron-core 0.16.1 models/gpt/gpt_layer_specs.py",
        emulated="silent",
    ),
    Rule(
        id="scaling-of-a-library-that-the-engine-does-not-use",
        about="quantized",
        found=_libraries,
        expected="scalings of one library that the engine supports in its linears: Transformer Engine's on every engine, torchao's on torch FSDP2",
        cure="engine=fsdp2 for torchao's scalings, or a recipe with Transformer Engine's (mpbridge list)",
        source="EngineTraits.quantizers; mpbridge/backend/models/torchao_linears.py",
    ),
    Rule(
        id="machine-cannot-run-it",
        about="quantized",
        found=_capability,
        expected="a machine, CUDA and Transformer Engine that run it natively",
        cure="use the recipe named here, another machine (mpbridge doctor), or emulate=true",
        source="Transformer Engine 2.11 pytorch/quantization.py check_*_support",
    ),
    Rule(
        id="transformer-engine-too-old",
        about="quantized",
        found=_engine_version,
        expected="the version that introduced this scaling",
        cure="upgrade Transformer Engine",
        source="megatron-core 0.16.1 fp8_utils.py get_fp8_recipe, fp4_utils.py get_fp4_recipe",
        emulated="silent",
    ),
    Rule(
        id="transformer-engine-untested",
        about="quantized",
        found=_untested,
        expected=f"{_RANGE}: older releases were not reviewed, newer ones have not been run under mpbridge",
        cure="install a version in that range (megatron-core 0.16 itself declares versions below 2.12)",
        source="tests/te_cpu, which run Transformer Engine's own Python code of each of those releases from 2.11 on; megatron-core 0.16.1 package metadata, extra dev",
        severity="warning",
        emulated="silent",
    ),
    Rule(
        id="fp32-products-in-tf32",
        found=_tf32,
        expected="products of FP32 factors: Transformer Engine asks cuBLAS for TF32 (10 bits of mantissa) whatever torch's settings say, on Ampere and later",
        cure="export NVIDIA_TF32_OVERRIDE=0 before Python starts, for FP32 products at a fraction of the speed",
        source="Transformer Engine 2.11 and main d0067d0d common/gemm/cublaslt_gemm.cu (CUBLAS_COMPUTE_32F_FAST_TF32)",
        severity="warning",
        emulated="silent",
    ),
)
