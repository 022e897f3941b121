"""Regions: which GEMMs of which linears and layers run in which precision. Frozen data and its JSON form."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mpbridge.common.errors import BadValue
from mpbridge.common.formats import DType
from mpbridge.precision.globs import matches
from mpbridge.precision.scalings import ELEMENTS, Scaling, bits_of, scaling

Attention = Literal["none", "dot_product", "multi_head"]
Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
Spans = tuple[tuple[int, int], ...]
"""Inclusive ranges of 0-based layers; a negative number counts from the end (-1: the last layer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quant:
    """How a GEMM's operands are quantized."""

    format: str
    """"hybrid": E4M3 forward, E5M2 for gradients; the others: one format everywhere. A key of scalings.ELEMENTS."""
    scaling: str
    """A key of scalings.SCALINGS; any other name is refused."""
    stored: bool = False
    """Weights are stored and gathered in this format."""
    margin: int = 0
    """Delayed scaling: the scale is divided by 2**margin."""
    amax_history: int = 1
    """Delayed scaling: length of the amax history."""
    amax_algo: Literal["most_recent", "max"] = "most_recent"
    wgrad: bool = True
    """Delayed scaling; False has no effect under Transformer Engine 2.9 to 2.12, which drop the argument."""
    attention: Attention = "none"
    factory: str | None = None
    """Import path of the quantizer factory; "custom" only."""
    options: tuple[tuple[str, Any], ...] = ()
    """(name, value) of the scaling's options that the recipe sets, by name; the others follow the environment (scalings.Option)."""

    def __post_init__(self) -> None:
        if self.format not in scaling(self.scaling).formats:
            raise BadValue(
                f"{self.scaling} scaling of format {self.format!r}: expected one of {', '.join(self.row.formats)}"
            )

    @property
    def row(self) -> Scaling:
        """The scaling's row."""
        return scaling(self.scaling)

    @property
    def bits(self) -> int:
        """Bits of an operand's element: 8 or 4."""
        return bits_of(self.format)

    def element(self, *, gradient: bool) -> str:
        """Name of the element format of an operand, a key of formats.FORMATS."""
        return ELEMENTS[self.format][gradient]

    def option(self, name: str, environment: Mapping[str, str] | None = None) -> Any:
        """The value of an option: from the recipe, else from `environment`, else its default. Raises UnknownName, BadValue."""
        stated = dict(self.options)
        return stated[name] if name in stated else self.row.option(name).read(environment or {})

    @property
    def by_factory(self) -> bool:
        """Whether it has an option that nothing but a quantizer factory sets: one without a variable."""
        stated = ((self.row.option(name), value) for name, value in self.options)
        return any(not option.variable and value != option.default for option, value in stated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemms:
    """A rule for each of a linear's three GEMMs; None: in the compute dtype."""

    fprop: Quant | None
    dgrad: Quant | None
    wgrad: Quant | None

    def __iter__(self) -> Any:
        return iter((self.fprop, self.dgrad, self.wgrad))

    @property
    def one(self) -> bool:
        """Whether all three have the same rule."""
        return self.fprop == self.dgrad == self.wgrad

    @property
    def first(self) -> Quant | None:
        """The first rule in use; None: high precision."""
        return next((quant for quant in self if quant is not None), None)

    @property
    def distinct(self) -> tuple[Quant, ...]:
        """The rules in use, each once."""
        return tuple(dict.fromkeys(quant for quant in self if quant is not None))


@dataclass(frozen=True, kw_only=True)
class Region:
    """Modules of some layers and the precision of their GEMMs. The first region that covers a module decides."""

    modules: str = "*"
    """Glob over the module's path below its layer ('mlp.linear_fc2'), or over its whole path ('decoder.layers.3.mlp.linear_fc2', 'mtp.*')."""
    first: int | None = None
    """Only the first N layers of the whole model (not of a pipeline stage)."""
    last: int | None = None
    quant: Quant | None = None
    """None: stays in the compute dtype. If `gemms` is set, the first of its rules."""
    layers: Spans | None = None
    """Only these layers; None: all. Layers of multi-token prediction have no number and belong to regions without one."""
    gemms: Gemms | None = None
    """One rule per GEMM; None: `quant` for all three."""

    @functools.cached_property
    def rules(self) -> Gemms:
        """The rule of each GEMM."""
        return self.gemms or Gemms(fprop=self.quant, dgrad=self.quant, wgrad=self.quant)

    @property
    def by_factory(self) -> bool:
        """Whether its linears need quantizers of their own: a rule for each GEMM, or an option that only a factory sets."""
        return self.gemms is not None or (self.quant is not None and self.quant.by_factory)

    @property
    def ends(self) -> bool:
        """Whether this is the region of the edge-layer switch."""
        return self.modules == "*" and self.quant is None and (self.first is not None or self.last is not None)

    def covers(self, module: str, layer: int | None, layers: int, path: str = "") -> bool:
        """Whether this region covers `module` of 0-based `layer` out of `layers`; layer None: multi-token prediction. path: the full one."""
        return self.about(layer, layers) and matches(self.modules, module, path)

    def about(self, layer: int | None, layers: int) -> bool:
        """Whether this region covers a layer, regardless of the module."""
        if self.first is None and self.last is None and self.layers is None:
            return True
        if layer is None:
            return False
        at_start = self.first is not None and layer < self.first
        at_end = self.last is not None and layer >= layers - self.last
        return at_start or at_end or any(a <= layer <= b for a, b in counted(self.layers or (), layers))


def counted(spans: Spans, layers: int) -> Spans:
    """`spans` as 0-based numbers, for a model with that many layers. Layers outside it are dropped; `outside` returns them."""
    return tuple((n + layers if n < 0 else n, m + layers if m < 0 else m) for n, m in spans)


def spans_of(layers: Iterable[int]) -> Spans:
    """The ranges of 0-based layers, in order: {0, 1, 4} is 0-1 and 4."""
    found: list[tuple[int, int]] = []
    for layer in sorted(set(layers)):
        if found and found[-1][1] == layer - 1:
            found[-1] = (found[-1][0], layer)
        else:
            found.append((layer, layer))
    return tuple(found)


def outside(spans: Spans, layers: int) -> Spans:
    """Those of `spans` that a model with that many layers does not fully have, or that are reversed in it ('5 to -2' of four layers)."""
    ranges = zip(spans, counted(spans, layers), strict=True)
    return tuple(span for span, (low, high) in ranges if not 0 <= low <= high < layers)


_LATER: Mapping[str, Any] = {"layers": None, "gemms": None, "options": ()}
"""Fields that schema 1 lacks: a policy that does not use them is written as before, so its fingerprint is unchanged."""


def as_plain(value: Any) -> Any:
    """A policy's dataclasses as JSON types."""
    if isinstance(value, DType):
        return value.short
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        unused = {name for name, default in _LATER.items() if name in own and own[name] == default}
        return {name: as_plain(item) for name, item in own.items() if name not in unused}
    return [as_plain(item) for item in value] if isinstance(value, tuple) else value


def uses_later_fields(regions: tuple[Region, ...]) -> bool:
    """Whether any region uses fields that schema 1 lacks."""
    own = any(region.layers is not None or region.gemms is not None for region in regions)
    return own or any(quant.options for region in regions for quant in region.rules.distinct)


def region_from(data: Mapping[str, Any]) -> Region:
    """The region from `as_plain`'s data. Raises BadValue, UnknownName."""
    gemms, layers = data.get("gemms"), data.get("layers")
    return Region(
        modules=data["modules"],
        first=data["first"],
        last=data["last"],
        quant=_quant_from(data["quant"]),
        layers=None if layers is None else tuple((a, b) for a, b in layers),
        gemms=None if gemms is None else Gemms(**{name: _quant_from(gemms[name]) for name in GEMMS}),
    )


def _quant_from(data: Mapping[str, Any] | None) -> Quant | None:
    if not data:
        return None
    return Quant(**{**data, "options": tuple((name, value) for name, value in data.get("options", ()))})
