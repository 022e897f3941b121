"""The types that make up a row of the table of scalings. Imports no framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from mpbridge.common.errors import BadValue, UnknownName
from mpbridge.common.formats import FORMATS, DType, say
from mpbridge.common.machines import Arch
from mpbridge.common.versions import at_least

Library = Literal["transformer_engine", "torchao"]

ELEMENTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"e4m3": ("e4m3", "e4m3"), "hybrid": ("e4m3", "e5m2"), "e2m1": ("e2m1", "e2m1")}
)
"""A format that an author can choose -> element formats of (activations and weights, gradients), keys of formats.FORMATS."""


def bits_of(format: str) -> int:
    """Bits per element of an operand under such a format."""
    return FORMATS[ELEMENTS[format][0]].bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The block that shares one scale, in elements: `along` the contraction axis of the GEMM, `across` the other axis. 0 means the whole axis."""

    across: int
    along: int
    scale: str
    """Format of the scale: 'fp32', 'e8m0' (powers of two only) or 'e4m3' (under a second, per-tensor fp32 scale)."""

    @property
    def square(self) -> bool:
        """Whether the block is square, so that rowwise and columnwise copies have the same codes."""
        return self.across > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What one scaling requires."""

    low: Arch
    """Lowest compute capability."""
    high: Arch | None = None
    """First compute capability above `low` that is refused; None: no upper limit."""
    library: Library = "transformer_engine"
    """The library whose kernels run it: a field of facts.Versions."""
    engine: str
    """Lowest version of that library; for Transformer Engine as required by megatron-core 0.16.1 (fp8_utils.py get_fp8_recipe, fp4_utils.py
    get_fp4_recipe)."""
    cuda: str | None = None
    """Lowest CUDA version that torch is built for."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Multiples that one scaling requires of a GEMM with backward: tokens, in and out features of the local shard."""

    tokens: int
    inner: int
    outer: int
    shard: int
    """For tokens and in features of an operand that is all-gathered in low precision; 1: any size."""
    expert: int
    """The multiple to which megatron-core pads each expert's tokens."""
    tokens_untransposed: int | None = None
    """`tokens` if the hardware supports every operand layout; None: the same."""
    tile: int = 1
    """For a shard's tokens under communication overlap (tp_comm_overlap); 1: the same as `shard`."""
    gains_above: tuple[int, int] | None = None
    """(in, out) features up to which the GEMM is too small to gain; None: unknown."""
    source: str
    shard_source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForm:
    """A weight in low precision, as its library keeps it: as the stored parameter, and as the copy of a step."""

    tensor: str
    """Class of the tensor."""
    both_copies: bool
    """True: rowwise and columnwise copies are quantized differently, so both are kept on every GPU. False: a transposed copy only where GEMMs support one layout."""
    through_grads: bool = False
    """Whether megatron-core can gather it through the gradient buffer (reuse_grad_buf_for_mxfp8_param_ag); it is then stored outside the parameter buffer."""
    scale_bytes: int = 4
    lines: int = 1
    """Lines of scales are padded to a multiple of this, and"""
    count: int = 1
    """the scales of a line to a multiple of this."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What Transformer Engine requires of another option if this one has one of `values`."""

    values: tuple[Any, ...]
    option: str
    legal: tuple[Any, ...]
    until: str | None = None
    """First release that no longer requires it; None: all do."""
    beside: tuple[str, Any] | None = None
    """(option, value) of a third option without which it is not required; None: it always is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A choice that a scaling leaves open, made by the recipe (fp8_options, fp4_options) or an environment variable."""

    name: str
    choices: tuple[Any, ...]
    """Legal values; the first is the default."""
    variable: str
    """Environment variable that Transformer Engine reads; megatron-core does not pass these options on. '': none, so only a quantizer factory of ours can set it."""
    spelled: tuple[tuple[str, Any], ...]
    """(text of the variable, value); any other text means the default if `strict` is false, and is an error of the library if it is true."""
    strict: bool = False
    since: str
    """First Transformer Engine release with it."""
    needs: tuple[Need, ...] = ()
    """Requirements on other options for certain values."""
    meaning: str
    source: str

    @property
    def default(self) -> Any:
        """The value if neither the recipe nor the environment sets it."""
        return self.choices[0]

    def read(self, environment: Mapping[str, str]) -> Any:
        """The value that Transformer Engine reads from its variable. Raises BadValue for a text that it rejects."""
        text, known = environment.get(self.variable), dict(self.spelled)
        if text is None:
            return self.default
        if text not in known and self.strict:
            raise BadValue(
                f"{self.variable}={text!r}: Transformer Engine accepts {', '.join(known)}, or the variable unset"
            )
        return known.get(text, self.default)

    def setting(self, value: Any) -> str:
        """'VARIABLE=text' that makes Transformer Engine use `value`; 'VARIABLE unset' for a default without a text."""
        if not self.variable:
            return f"no variable sets {self.name}"
        text = next((s for s, v in self.spelled if v == value), None)
        return f"{self.variable} unset" if text is None else f"{self.variable}={text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Everything known about one scaling."""

    name: str
    words: str
    """Its name in a sentence: 'FP8 with delayed scaling'."""
    formats: tuple[str, ...]
    """Formats that it supports, keys of ELEMENTS."""
    blocks: tuple[Block, Block] | None
    """(activations and gradients, weights); None: decided by the factory."""
    square: Block | None = None
    """Of weights under the option square_weights, where that is not the default."""
    high: tuple[str, ...] = ()
    """GEMMs that stay in high precision under it: 'fprop', 'dgrad', 'wgrad'."""
    history: bool = False
    """Whether scales come from amaxes of earlier steps. They are updated once for the whole transformer block, so no layer or module can differ from its block."""
    stored: StoredForm
    hardware: Hardware
    sizes: Sizes
    emulation: str | None
    """Name of the rule in mpbridge.numerics.quantizer, or of the library that emulates itself; None: it cannot be emulated."""
    recipes: tuple[tuple[str, str], ...]
    """(first version, class) of the library's recipe object, oldest first; the last one at or below the installed version is in use."""
    core: str | None
    """megatron-core's name for it in fp8_recipe, fp4_recipe and quant_recipe; None: megatron-core does not support it."""
    attention: tuple[str, ...] = ()
    """The parts of attention that it can quantize: 'dot_product', 'multi_head'."""
    computed_as: str = ""
    """How it is computed on Blackwell; empty: as on other GPUs."""
    compute: tuple[DType, ...] = (DType.BF16, DType.FP16, DType.FP32)
    """Legal dtypes of the surrounding computation."""
    options: tuple[Option, ...] = ()
    quantizer: str = ""
    """Class of Transformer Engine's quantizers that write it."""
    made_by: str = ""
    """What makes one that a linear may mix with those of other scalings (hybrid quantizers, since 2.19): its function in Transformer Engine's pytorch/custom_recipes/quantizer_factories.py."""
    entry: str | None = None
    """bf16_with_<entry>_mixed is its plain recipe."""
    substitutes: tuple[str, ...] = ()
    """Replacements where it does not run, best first: a block scaling is replaced by another block scaling."""
    preference: int
    """Rank among equals in `mpbridge recommend`: finer scales first; four bits last, for lack of evidence outside the published runs."""

    @property
    def per_tensor(self) -> bool:
        """Whether there is one scale for the whole tensor."""
        return self.blocks is not None and self.blocks[0].along == 0 and self.blocks[0].across == 0

    @property
    def factory(self) -> bool:
        """Whether the author's own factory decides the numerics."""
        return self.blocks is None

    def block(self, *, weight: bool, square: bool = True) -> Block | None:
        """The extent of one scale. square: what square_weights says, where the scaling has it."""
        if self.blocks is None or not weight or (self.has("square_weights") and not square):
            return None if self.blocks is None else self.blocks[0]
        return self.square or self.blocks[1]

    def has(self, option: str) -> bool:
        """Whether the scaling leaves that choice open."""
        return any(known.name == option for known in self.options)

    def option(self, name: str) -> Option:
        """The option of that name. Raises UnknownName."""
        for option in self.options:
            if option.name == name:
                return option
        raise UnknownName(f"option of {self.name} scaling", name, [option.name for option in self.options])

    def clashes(self, options: Mapping[str, Any], version: str | None = None) -> list[str]:
        """Which of the options' values exclude each other under Transformer Engine `version` (None: the newest), as text."""
        faults = []
        for option in self.options:
            value = options.get(option.name, option.default)
            for need in option.needs:
                ended = need.until is not None and (version is None or at_least(version, need.until))
                other = options.get(need.option, self.option(need.option).default)
                asked = need.beside is None or options.get(need.beside[0]) == need.beside[1]
                if value in need.values and asked and not ended and other not in need.legal:
                    window = f" before Transformer Engine {need.until}" if need.until else ""
                    faults.append(
                        f"{option.name}={say(value)} with {need.option}={say(other)}{window} (expected {need.option}="
                        f"{' or '.join(say(legal) for legal in need.legal)})"
                    )
        return faults

    def keeps_transposed(self, arch: Arch | None) -> bool:
        """Whether a low-precision weight has a second, transposed or columnwise copy on that GPU; None (unknown) counts as Hopper."""
        return self.stored.both_copies or needs_transpose(arch)

    def recipe_class(self, version: str | None = None) -> str:
        """Class of the library's recipe object under `version`; None: the newest."""
        fitting = [name for since, name in self.recipes if version is None or at_least(version, since)]
        return fitting[-1] if fitting else self.recipes[0][1]


def needs_transpose(arch: Arch | None) -> bool:
    """Whether FP8 GEMMs support only one operand layout on that GPU. None (unknown) counts as Hopper.

    Transformer Engine 2.11 common/transformer_engine.cpp: other layouts at compute capability 10.0 to 12.0 and from 13.0 on."""
    return arch is None or not ((10, 0) <= arch < (12, 0) or arch >= (13, 0))
