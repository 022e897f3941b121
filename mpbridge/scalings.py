"""One table of quantization scalings: formats, blocks, stored form, hardware, GEMM sizes, libraries. Imports no framework.

A new scaling is a row of `SCALINGS`, its arithmetic in `mpbridge.emulation`, and a recipe that names it. Everything that asks what a scaling is
(resolve, capability, GEMM sizes, memory, rules, emulation, audit, tables) reads the row; a scaling without a row cannot be resolved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from mpbridge.errors import BadValue, UnknownName
from mpbridge.formats import FORMATS

Arch = tuple[int, int]
"""Compute capability of a GPU: (9, 0)."""
Library = Literal["transformer_engine", "torchao"]

ELEMENTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"e4m3": ("e4m3", "e4m3"), "hybrid": ("e4m3", "e5m2"), "e2m1": ("e2m1", "e2m1")}
)
"""An author's format -> element format of (activations and weights, gradients), keys of formats.FORMATS."""


def bits_of(format: str) -> int:
    """Bits of an operand's element under an author's format."""
    return FORMATS[ELEMENTS[format][0]].bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The extent of one shared scale, in elements: `along` the contraction axis of the GEMM, `across` the other. 0 means the whole axis."""

    across: int
    along: int
    scale: str
    """Format of the scale: 'fp32', 'e8m0' (powers of two only) or 'e4m3' (under a second, per-tensor fp32 scale)."""

    @property
    def square(self) -> bool:
        """Whether the block is as wide as it is long, so that row and column copies have the same codes."""
        return self.across > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What one scaling asks for."""

    low: Arch
    """Lowest compute capability."""
    high: Arch | None = None
    """First compute capability that is refused again; None: no end."""
    library: Library = "transformer_engine"
    """Whose kernels run it: a field of facts.Versions."""
    engine: str
    """Lowest version of that library; for Transformer Engine as megatron-core 0.16.1 asks for it (fp8_utils.py get_fp8_recipe, fp4_utils.py
    get_fp4_recipe)."""
    cuda: str | None = None
    """Lowest CUDA that torch is built for."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Multiples that one scaling asks of a GEMM with backward: tokens, in and out features of the local shard."""

    tokens: int
    inner: int
    outer: int
    shard: int
    """Of tokens and in features of an operand that is all-gathered in the low format; 1: anything."""
    expert: int
    """To which megatron-core pads each expert's tokens."""
    tokens_untransposed: int | None = None
    """`tokens` where the hardware takes every operand layout; None: the same."""
    tile: int = 1
    """Of a shard's tokens under communication overlap (tp_comm_overlap); 1: as `shard`."""
    gains_above: tuple[int, int] | None = None
    """(in, out) features up to which the GEMM is too small to gain; None: not known."""
    source: str
    shard_source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A weight in the low format, as its library keeps it: at rest, and as the copy of a step."""

    tensor: str
    """Class of the tensor."""
    both_copies: bool
    """Rows and columns are quantized differently, so both are kept on every GPU; False: a transposed copy only where GEMMs take one layout."""
    through_grads: bool = False
    """megatron-core can gather it through the gradient buffer (reuse_grad_buf_for_mxfp8_param_ag); it then lies beside the parameter buffer."""
    scale_bytes: int = 4
    lines: int = 1
    """Lines of scales are padded to a multiple of this, and"""
    count: int = 1
    """the scales of a line to a multiple of this."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One choice that a scaling leaves open, decided by the recipe (fp8_options, fp4_options) or by an environment variable."""

    name: str
    choices: tuple[Any, ...]
    """Legal values; the first is the default."""
    variable: str
    """Environment variable by which Transformer Engine is told: megatron-core passes none of these on."""
    spelled: tuple[tuple[str, Any], ...]
    """(text of the variable, value); any other text means the default where `strict` is false, and an error of the library where it is true."""
    strict: bool = False
    since: str
    """First Transformer Engine that knows it."""
    meaning: str
    source: str

    @property
    def default(self) -> Any:
        """The value where neither a recipe nor the environment says anything."""
        return self.choices[0]

    def read(self, environment: Mapping[str, str]) -> Any:
        """The value that Transformer Engine takes from its variable. Raises BadValue for a text that it refuses."""
        text, known = environment.get(self.variable), dict(self.spelled)
        if text is None:
            return self.default
        if text not in known and self.strict:
            raise BadValue(
                f"{self.variable}={text!r}: Transformer Engine takes {', '.join(known)}, or the variable unset"
            )
        return known.get(text, self.default)

    def setting(self, value: Any) -> str:
        """'VARIABLE=text' that makes Transformer Engine take `value`; 'VARIABLE unset' for a default without a text."""
        text = next((s for s, v in self.spelled if v == value), None)
        return f"{self.variable} unset" if text is None else f"{self.variable}={text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Everything that is known of one scaling."""

    name: str
    words: str
    """In a sentence: 'FP8 with delayed scaling'."""
    formats: tuple[str, ...]
    """Author's formats that it takes, keys of ELEMENTS."""
    blocks: tuple[Block, Block] | None
    """(activations and gradients, weights); None: the factory decides."""
    history: bool = False
    """Scales come from amaxes of earlier steps, updated once around the whole transformer block: no layer or module can differ from its block."""
    stored: Stored
    hardware: Hardware
    sizes: Sizes
    emulation: str | None
    """Name of the rule in mpbridge.emulation.quantizer; None: it cannot be emulated."""
    recipes: tuple[tuple[str, str], ...]
    """(first version, class) of the library's recipe object, oldest first; the last one at or below the installed version is in use."""
    core: str | None
    """megatron-core's word in fp8_recipe, fp4_recipe and quant_recipe; None: megatron-core does not know it."""
    attention: tuple[str, ...] = ()
    """Which parts of attention it quantizes: 'dot_product', 'multi_head'."""
    computed_as: str = ""
    """What becomes of it on Blackwell; empty: nothing."""
    options: tuple[Option, ...] = ()
    entry: str | None = None
    """bf16_with_<entry>_mixed is its plain recipe."""
    substitutes: tuple[str, ...] = ()
    """What replaces it where it does not run, best first: a block scale by another block scale."""
    preference: int
    """Among equals in `mpbridge recommend`: finer scales first; four bits last, for want of evidence outside of the published runs."""

    @property
    def per_tensor(self) -> bool:
        """Whether one scale serves the whole tensor."""
        return self.blocks is not None and self.blocks[0].along == 0 and self.blocks[0].across == 0

    @property
    def factory(self) -> bool:
        """Whether a factory of the author's decides the numbers."""
        return self.blocks is None

    def has(self, option: str) -> bool:
        """Whether the scaling leaves that choice open."""
        return any(known.name == option for known in self.options)

    def option(self, name: str) -> Option:
        """The option of that name. Raises UnknownName."""
        for option in self.options:
            if option.name == name:
                return option
        raise UnknownName(f"option of {self.name} scaling", name, [option.name for option in self.options])

    def weight_scales(self, rows: int, columns: int) -> int:
        """Number of scales of a weight, both copies together, with the kernels' padding of scale tensors."""
        if self.blocks is None or self.per_tensor:
            return 1
        # one scale a line and block, except where lines share a stored scale: NVFP4 writes the scale of a 16x16 block once a line
        along, across = self.blocks[1].along, self.blocks[1].across if self.stored.lines == 1 else 1

        def one(lines: int, length: int) -> int:
            return _up(-(-lines // across), self.stored.lines) * _up(-(-length // (along or length)), self.stored.count)

        return one(rows, columns) + one(columns, rows)

    def keeps_transposed(self, arch: Arch | None) -> bool:
        """Whether a weight's low-precision form has a second, transposed or column-wise copy on that GPU; None (not known) counts as Hopper."""
        return self.stored.both_copies or needs_transpose(arch)

    def recipe_class(self, version: str | None = None) -> str:
        """Class of the library's recipe object under `version`; None: the newest."""
        fitting = [name for since, name in self.recipes if version is None or _numbers(since) <= _numbers(version)]
        return fitting[-1] if fitting else self.recipes[0][1]


def needs_transpose(arch: Arch | None) -> bool:
    """Whether FP8 GEMMs exist in one operand layout only on that GPU. None (not known) counts as Hopper.

    Transformer Engine 2.11 common/transformer_engine.cpp: other layouts at compute capability 10.0 to 12.0 and from 13.0 on.
    """
    return arch is None or not ((10, 0) <= arch < (12, 0) or arch >= (13, 0))


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())


_TE = "Transformer Engine 2.11"
_CHECKS = f"{_TE} pytorch/quantization.py"
_BASE = f"{_TE} pytorch/utils.py assert_dim_for_fp8_exec"
_SHARD = f"{_TE} pytorch/utils.py, is_quantizable of each tensor class"
_RECIPES = "Transformer Engine common/recipe/__init__.py (read once, at import)"


def _switch(name: str, variable: str, *, set_means: bool, since: str, meaning: str) -> Option:
    """A switch that the text '1' turns from its default."""
    return Option(
        name=name, choices=(not set_means, set_means), variable=variable, spelled=(("1", set_means),), since=since,
        meaning=meaning, source=_RECIPES,
    )  # fmt: skip


_BACKWARD = Option(
    name="backward", choices=("quantized", "high_precision", "dequantized"), variable="NVTE_BACKWARD_OVERRIDE",
    spelled=(("high_precision", "high_precision"), ("dequantized", "dequantized")), strict=True, since="2.15",
    meaning="operands of dgrad and wgrad: quantized, the high-precision originals, or what the forward's copies dequantize to", source=_RECIPES,
)  # fmt: skip
_WHOLE = Block(across=0, along=0, scale="fp32")
_FP8 = ("e4m3", "hybrid")
_PER_TENSOR = Sizes(
    tokens=16, inner=16, outer=16, shard=1, expert=16,
    tokens_untransposed=8,  # the weight gradient then needs no transposed operand, whose leading dimension the tokens would be
    gains_above=(4096, 1024), source=f"{_BASE}; common/gemm/cublaslt_gemm.cu: leading dimensions", shard_source=_SHARD,
)  # fmt: skip
_FLOAT8 = Stored(tensor="Float8Tensor", both_copies=False, source=f"{_TE} tensor/storage/float8_tensor_storage.py")

_ROWS: tuple[Scaling, ...] = (
    Scaling(
        name="tensorwise", words="FP8 with current (tensorwise) scaling", formats=_FP8, blocks=(_WHOLE, _WHOLE), stored=_FLOAT8,
        hardware=Hardware(low=(8, 9), engine="2.2", source=f"{_CHECKS} check_fp8_support"),
        sizes=_PER_TENSOR, emulation="current", recipes=(("2.2", "Float8CurrentScaling"),), core="tensorwise", attention=("dot_product",),
        options=(
            _switch("power_of_two", "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", set_means=True, since="2.2", meaning="scales rounded down to powers of two"),
            _BACKWARD,
        ),
        entry="fp8_current_scaling", substitutes=("delayed",), preference=2,
    ),
    Scaling(
        name="delayed", words="FP8 with delayed scaling", formats=_FP8, blocks=(_WHOLE, _WHOLE), history=True, stored=_FLOAT8,
        hardware=Hardware(low=(8, 9), engine="1.0", source=f"{_CHECKS} check_fp8_support"),
        sizes=_PER_TENSOR, emulation="history", recipes=(("1.0", "DelayedScaling"),), core="delayed", attention=("dot_product", "multi_head"),
        entry="fp8_delayed_scaling", substitutes=("tensorwise",), preference=3,
    ),
    Scaling(
        name="blockwise", words="FP8 with blockwise scaling", formats=_FP8,
        blocks=(Block(across=1, along=128, scale="fp32"), Block(across=128, along=128, scale="fp32")),
        # one FP32 for a block of 128x128, the inner count padded to 4
        stored=Stored(tensor="Float8BlockwiseQTensor", both_copies=True, count=4, source=f"{_TE} tensor/float8_blockwise_tensor.py"),
        hardware=Hardware(low=(9, 0), engine="2.3", cuda="12.9", source=f"{_CHECKS} check_fp8_block_scaling_support"),
        sizes=Sizes(tokens=16, inner=16, outer=16, shard=128, expert=16, source=f"{_BASE}; common/gemm/cublaslt_gemm.cu",
                    shard_source=f"{_SHARD}: float8_blockwise_tensor.py"),
        emulation="fp32_blocks", recipes=(("2.3", "Float8BlockScaling"),), core="blockwise",
        computed_as="on Blackwell its blocks are computed as MXFP8, with power-of-two scales (Transformer Engine 2.11 csrc/extensions/gemm.cpp)",
        options=(
            _switch("power_of_two", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", set_means=False, since="2.3", meaning="block scales are powers of two"),
            _BACKWARD,
        ),
        entry="fp8_subchannel_scaling", substitutes=("mxfp8", "tensorwise"), preference=1,
    ),
    Scaling(
        name="mxfp8", words="MXFP8", formats=_FP8, blocks=(Block(across=1, along=32, scale="e8m0"),) * 2,
        # rows padded to 128 and blocks to 4, in both directions
        stored=Stored(tensor="MXFP8Tensor", both_copies=True, through_grads=True, scale_bytes=1, lines=128, count=4, source=f"{_TE} tensor/mxfp8_tensor.py"),
        hardware=Hardware(low=(10, 0), high=(12, 0), engine="2.1", cuda="12.8", source=f"{_CHECKS} check_mxfp8_support"),
        sizes=Sizes(tokens=32, inner=32, outer=32, shard=32, expert=32, tile=128, source=f"{_TE} csrc/quantizer.cpp, tensor/mxfp8_tensor.py",
                    shard_source=f"{_SHARD}: mxfp8_tensor.py"),
        emulation="e8m0_blocks", recipes=(("2.0", "MXFP8BlockScaling"),), core="mxfp8", options=(_BACKWARD,),
        entry="mxfp8", substitutes=("blockwise", "tensorwise"), preference=0,
    ),
    Scaling(
        name="nvfp4", words="NVFP4", formats=("e2m1",), blocks=(Block(across=1, along=16, scale="e4m3"), Block(across=16, along=16, scale="e4m3")),
        stored=Stored(tensor="NVFP4Tensor", both_copies=True, scale_bytes=1, lines=128, count=4, source=f"{_TE} tensor/nvfp4_tensor.py"),
        hardware=Hardware(low=(10, 0), engine="2.7", cuda="12.8", source=f"{_CHECKS} check_nvfp4_support"),
        sizes=Sizes(tokens=16, inner=16, outer=16, shard=16, expert=128, source=f"{_TE} csrc/quantizer.cpp, tensor/nvfp4_tensor.py",
                    shard_source=f"{_SHARD}: nvfp4_tensor.py"),
        emulation="e4m3_blocks", recipes=(("2.7", "NVFP4BlockScaling"),), core="nvfp4",
        options=(
            _switch("hadamard", "NVTE_NVFP4_DISABLE_RHT", set_means=False, since="2.7",
                    meaning="wgrad's operands are rotated by a random Hadamard transform"),
            _switch("stochastic_rounding", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", set_means=False, since="2.7",
                    meaning="gradients are rounded stochastically"),
            _switch("square_weights", "NVTE_NVFP4_DISABLE_2D_QUANTIZATION", set_means=False, since="2.7",
                    meaning="weights have one scale for 16x16 elements"),
            _switch("fast_math", "NVTE_USE_FAST_MATH", set_means=True, since="2.14", meaning="approximate division, and no rounding after the transform"),
            _BACKWARD,
        ),
        entry="nvfp4", substitutes=("mxfp8", "blockwise", "tensorwise"), preference=4,
    ),
    Scaling(
        name="custom", words="a custom FP8 recipe", formats=(*_FP8, "e2m1"), blocks=None, stored=Stored(tensor="a quantized tensor", both_copies=False),
        hardware=Hardware(low=(8, 9), engine="2.9", source=f"{_CHECKS} autocast_enter: a custom recipe needs FP8 support only"),
        sizes=Sizes(tokens=8, inner=16, outer=8, shard=1, expert=16, source=_BASE, shard_source=_SHARD),
        emulation=None, recipes=(("2.9", "CustomRecipe"),), core="custom", substitutes=("tensorwise",), preference=5,
    ),
)  # fmt: skip

SCALINGS: Mapping[str, Scaling] = MappingProxyType({row.name: row for row in _ROWS})
"""Every scaling by name."""
DEFAULTS: Mapping[int, str] = MappingProxyType({8: "tensorwise", 4: "nvfp4"})
"""Bits of the element -> the scaling of a recipe that names a format only."""


def scaling(name: str) -> Scaling:
    """The row of that name. Raises UnknownName."""
    if name not in SCALINGS:
        raise UnknownName("scaling", name, SCALINGS)
    return SCALINGS[name]


def choices(bits: int) -> tuple[str, ...]:
    """Names of the scalings that take elements of so many bits: what fp8_recipe and fp4_recipe may say."""
    return tuple(row.name for row in _ROWS if any(bits_of(format) == bits for format in row.formats))


def formats(bits: int) -> tuple[str, ...]:
    """The author's formats of so many bits: what fp8 and fp4 may say."""
    return tuple(format for format in ELEMENTS if bits_of(format) == bits)


def scaling_of_recipe(class_name: str) -> str | None:
    """Our name for a library's recipe class; None: not one of the table."""
    return next((row.name for row in _ROWS if any(name == class_name for _, name in row.recipes)), None)
