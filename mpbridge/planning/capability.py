"""Whether a policy runs on a machine natively, only emulated, or not at all, and why. Pure functions; the machine need not be the local one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mpbridge.common.errors import MpbridgeError, Refused
from mpbridge.common.facts import Versions
from mpbridge.common.formats import DType
from mpbridge.common.machines import Machine, machines
from mpbridge.common.probe import is_played
from mpbridge.common.versions import at_least
from mpbridge.precision.policy import PrecisionPolicy, Quant
from mpbridge.precision.registry import recipe
from mpbridge.precision.resolve import resolve
from mpbridge.precision.scalings import SCALINGS, Arch, Hardware

How = Literal["native", "emulated", "no"]
QuantizedBy = Literal["transformer_engine", "emulation"]

LIBRARIES: Mapping[str, str] = MappingProxyType({"transformer_engine": "Transformer Engine", "torchao": "torchao"})
"""Field of Versions -> the library's usual name."""
ASSUMED = Versions(
    torch="2.11.0", megatron_core="0.16.1", transformer_engine="2.11.0", torchao="0.18.0", cuda="13.0", python="3.12"
)
"""Versions assumed by default for another machine; shown wherever they were assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """The answer. True if it runs at all; `native` if it runs as on the recipe's own hardware."""

    how: How
    """"emulated": not natively, but with `emulate: true` its rounding is applied in the compute dtype, without a gain in speed."""
    reason: str
    """What is needed and what was found, in full sentences; for "native", anything special about it."""
    nearest: str | None = None
    """The recipe closest to the requested one that runs natively; None if the requested one does, or none does."""
    proven: bool = True
    """False: the library reports it as supported, but no evidence of it is known."""

    @property
    def native(self) -> bool:
        """Whether it runs as on the recipe's own hardware."""
        return self.how == "native"

    def __bool__(self) -> bool:
        return self.how != "no"


NAMES: Mapping[Arch, str] = MappingProxyType(
    {(8, 0): "Ampere", (8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell", (12, 0): "Blackwell RTX"}
)


def can_run(
    policy: PrecisionPolicy, machine: Machine, versions: Versions, *, quantized_by: QuantizedBy = "transformer_engine"
) -> Capability:
    """Whether `machine` with `versions` runs `policy`.

    quantized_by: "emulation" means mpbridge's own rounding, for which any machine that runs the 16-bit part is sufficient."""
    base = _base_fault(policy, machine)
    if base:
        return Capability(how="no", reason=base, nearest=_nearest(policy, machine, versions))
    if not policy.quantized:
        return Capability(how="native", reason=f"{policy.compute.short} runs on {machine.label}")
    custom = any(quant.row.emulation is None for quant in policy.quants)
    if quantized_by == "emulation" and not custom:
        words = "its rounding is emulated around GEMMs in the compute dtype: the numbers, not the speed"
        return Capability(how="emulated", reason=words)
    faults = tuple(dict.fromkeys(fault for quant in policy.quants for fault in quant_faults(quant, machine, versions)))
    if not faults:
        notes = tuple(dict.fromkeys(note for quant in policy.quants for note in _notes(quant, machine)))
        libraries = dict.fromkeys(quant.row.hardware.library for quant in policy.quants)
        using = " and ".join(f"{LIBRARIES[name]} {versions.of(name)}" for name in libraries)
        runs = f"runs natively on {machine.label} with {using}"
        return Capability(how="native", reason="; ".join((runs, *notes)), proven=not _unproven(machine))
    how: How = "no" if custom else "emulated"
    return Capability(how=how, reason="; ".join(faults), nearest=_nearest(policy, machine, versions))


def refuse_unless_native(policy: PrecisionPolicy, machine: Machine, versions: Versions) -> Capability:
    """The capability, if it is native; otherwise raises Refused with one paragraph: why not, and what would work."""
    answer = can_run(policy, machine, versions)
    if answer.native:
        return answer
    ways = []
    if is_played() and (
        other := next((name for name, row in machines.items() if can_run(policy, row, versions).native), None)
    ):
        ways.append(f"--target {other} plays a machine that does")
    if answer.nearest:
        ways.append(f"--recipe {answer.nearest} runs here")
    if answer.how == "emulated":
        ways.append("--emulate runs this recipe's rounding anywhere, without a gain in speed")
    ways.append("`mpbridge doctor` lists what runs where")
    raise Refused(f"{machine.label} cannot run this recipe: {answer.reason}. What works: {'; '.join(ways)}.")


def quant_faults(quant: Quant, machine: Machine, versions: Versions) -> list[str]:
    """Every reason why `quant` does not run natively on that machine."""
    need, word, arch = quant.row.hardware, quant.row.words, machine.arch
    low = f"{_dotted(need.low)} or later ({NAMES.get(need.low, _dotted(need.low))})"
    if arch is None:
        return [f"{word} needs a GPU of compute capability {low}, and {machine.name} is not a GPU"]
    return [
        *(f"{fault}, {machine.name} has {_dotted(arch)}" for fault in _arch_faults(quant, arch, low)),
        *_option_faults(quant, versions),
        *_software_faults(need, word, machine, versions),
    ]


def _arch_faults(quant: Quant, arch: Arch, low: str) -> Iterator[str]:
    need, word = quant.row.hardware, quant.row.words
    if arch < need.low:
        yield f"{word} needs compute capability {low}"
    if need.high is not None and arch >= need.high:
        yield f"{LIBRARIES[need.library]} refuses {word} at compute capability {_dotted(need.high)} and later (not all GEMM layouts exist there)"
    if quant.attention != "none" and arch < (9, 0):
        yield "FP8 attention needs compute capability 9.0 or later"


def _option_faults(quant: Quant, versions: Versions) -> Iterator[str]:
    """Options set by the recipe that the installed Transformer Engine does not have; a missing Transformer Engine is another fault."""
    have = versions.transformer_engine
    for name, value in quant.options:
        option = quant.row.option(name)
        if have is not None and value != option.default and not at_least(have, option.since):
            yield f"{name} of {quant.row.words} needs Transformer Engine {option.since} or later, found {have}"


def _software_faults(need: Hardware, word: str, machine: Machine, versions: Versions) -> Iterator[str]:
    library, have = f"{LIBRARIES[need.library]} {need.engine} or later", versions.of(need.library)
    ada = machine.arch == (8, 9)
    if have is None:
        silent = " (megatron-core would silently train in 16 bits)" if need.library == "transformer_engine" else ""
        yield f"{word} needs {library}, and it is not installed{silent}"
    elif not at_least(have, need.engine):
        yield f"{word} needs {library}, found {have}"
    wanted = need.cuda or ("12.1" if ada else None)
    if wanted is None:
        return
    if versions.cuda is None:
        yield f"{word} needs CUDA {wanted} or later, and torch is a build without CUDA (or its CUDA version is unknown)"
    elif not at_least(versions.cuda, wanted):
        yield f"{word} needs CUDA {wanted} or later, torch was built for {versions.cuda}"
    # on Ada, FP8 GEMMs need cublasLt 12.1.3 (check_fp8_support)
    if ada and versions.cublaslt is not None and not at_least(versions.cublaslt, "12.1.3"):
        yield f"FP8 on compute capability 8.9 needs cublasLt 12.1.3 or later, found {versions.cublaslt}"


def _base_fault(policy: PrecisionPolicy, machine: Machine) -> str | None:
    if machine.arch is None:
        return None
    if DType.BF16 in (policy.compute, policy.params) and machine.arch < (8, 0):
        return f"BF16 needs compute capability 8.0 or later (Ampere), {machine.name} has {_dotted(machine.arch)}"
    if policy.compute is DType.FP16 and machine.arch < (7, 0):
        return f"FP16 tensor cores need compute capability 7.0 or later, {machine.name} has {_dotted(machine.arch)}"
    return None


def _notes(quant: Quant, machine: Machine) -> list[str]:
    notes = []
    if quant.row.computed_as and machine.arch is not None and machine.arch >= (10, 0):
        notes.append(quant.row.computed_as)
    if _unproven(machine):
        library = LIBRARIES[quant.row.hardware.library]
        notes.append(f"reported by {library} as supported at compute capability 12.x, unproven")
        if quant.row.has("stochastic_rounding"):
            notes.append(
                "its stochastic rounding uses an instruction of sm_100a and sm_103a only (Transformer Engine 2.11 ptx.cuh): set "
                + quant.row.option("stochastic_rounding").setting(False)
            )
    return notes


def _unproven(machine: Machine) -> bool:
    return machine.arch is not None and machine.arch >= (12, 0)


def _nearest(policy: PrecisionPolicy, machine: Machine, versions: Versions) -> str | None:
    """The first recipe, among the substitutes and then the plain ones, that runs natively there."""
    base = "fp16" if policy.compute is DType.FP16 else "bf16"
    wanted = [SCALINGS[name] for quant in policy.quants[-1:] for name in quant.row.substitutes]
    names = [f"{base}_with_{row.entry}_mixed" for row in wanted] + [f"{base}_mixed", "fp16_mixed", "fp32"]
    for name in names:
        try:
            candidate = resolve(recipe(name).make())
        except MpbridgeError:  # fp16 has no NVFP4 recipe
            continue
        faults = [_base_fault(candidate, machine), *(quant_faults(q, machine, versions) for q in candidate.quants)]
        if candidate != policy and not any(faults):
            return name
    return None


def _dotted(arch: Arch) -> str:
    return f"{arch[0]}.{arch[1]}"
