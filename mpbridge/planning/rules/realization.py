"""Rules about what performs a quantization: the library, its version, the layers and the machine."""

from __future__ import annotations

from mpbridge.common.formats import DType
from mpbridge.common.shipped import install
from mpbridge.common.transformer_engine import RELEASES
from mpbridge.common.versions import at_least
from mpbridge.common.versions import release as numbers
from mpbridge.planning.capability import QuantizedBy, can_run
from mpbridge.planning.rules.base import Case, Rule, warning
from mpbridge.precision.policy import Quant


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
_RANGE = f"{_READ} to {'.'.join(map(str, max(RELEASES)))}"


def _untested(case: Case) -> bool:
    have = case.run.versions.transformer_engine
    return have is not None and not (at_least(have, _READ) and numbers(have)[:2] <= max(RELEASES))


_AMPERE = (8, 0)
"""The first GPUs with TF32."""


RULES: tuple[Rule, ...] = (
    Rule(
        id="quantization-without-transformer-engine",
        about="quantized",
        when=lambda c: _by_engine(c) and c.run.versions.transformer_engine is None,
        found="no Transformer Engine is installed",
        expected=f"Transformer Engine {_RANGE} (without it megatron-core's FP8 context does nothing and the run trains in 16 bits)",
        cure=f"{install('te')}, or emulate=true",
        source="megatron-core 0.16.1 fp8_utils.py get_fp8_context",
        emulated="silent",
    ),
    Rule(
        id="quantization-with-local-layers",
        about="quantized",
        when=lambda c: _by_engine(c) and c.model("transformer_impl") == "local",
        found="transformer_impl='local'",
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
    warning(
        id="transformer-engine-untested",
        about="quantized",
        when=lambda c: _by_engine(c) and _untested(c),
        found="Transformer Engine {c.run.versions.transformer_engine}",
        expected=f"{_RANGE}: older releases were not reviewed, newer ones have not been run under mpbridge",
        cure="install a version in that range (megatron-core 0.16 itself declares versions below 2.12)",
        source="tests/te_cpu, which run Transformer Engine's own Python code of each of those releases from 2.11 on; megatron-core 0.16.1 package metadata, extra dev",
        emulated="silent",
    ),
    warning(
        id="fp32-products-in-tf32",
        when=lambda c: (
            c.native
            and c.policy.compute is DType.FP32
            and c.run.versions.transformer_engine is not None
            and c.arch >= _AMPERE
            and c.variable("NVIDIA_TF32_OVERRIDE") != "0"
        ),
        found="FP32 products in Transformer Engine's linears",
        expected="products of FP32 factors: Transformer Engine asks cuBLAS for TF32 (10 bits of mantissa) whatever torch's settings say, on Ampere and later",
        cure="export NVIDIA_TF32_OVERRIDE=0 before Python starts, for FP32 products at a fraction of the speed",
        source="Transformer Engine 2.11 and main d0067d0d common/gemm/cublaslt_gemm.cu (CUBLAS_COMPUTE_32F_FAST_TF32)",
        emulated="silent",
    ),
)
