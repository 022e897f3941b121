"""MixedPrecisionConfig: the user-facing config. Familiar names, mutable, and free of torch until a dtype is read."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, overload

from mpbridge.common.errors import BadValue, Contradiction, UnknownName, cut
from mpbridge.common.formats import DType, dtype, plain
from mpbridge.precision.fields import FieldRow, option
from mpbridge.precision.scalings import choices, formats

if TYPE_CHECKING:
    import torch


class DTypeField:
    """A dataclass field that stores a DType and reads back as a torch.dtype; the first read imports torch. row: of `fields.FieldRow`."""

    def __init__(self, **row: Any) -> None:
        self.row = FieldRow(**row)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> None: ...
    @overload
    def __get__(self, instance: object, owner: type) -> torch.dtype | None: ...
    def __get__(self, instance: object | None, owner: type) -> torch.dtype | None:
        if instance is None:
            return None  # the default that @dataclass sees
        stored: DType | None = instance.__dict__.get(self.name)
        return None if stored is None else stored.torch()

    def __set__(self, instance: object, value: torch.dtype | DType | str | None) -> None:
        try:
            instance.__dict__[self.name] = None if value is None else dtype(value)
        except BadValue as error:
            raise BadValue(f"{self.name}: {error}") from None


TWINS = (("fp8_param", "fp8_param_gather"), ("fp4_param", "fp4_param_gather"))
"""One fact under two names: Megatron Bridge syncs them by assignment order; here they must agree, and a later assignment sets both."""
_MOMENTS = (DType.FP32, DType.FP16, DType.BF16, DType.UINT8)
_DYNAMIC = "fp16 and no static loss_scale"
_EDGES = "first_last_layers_bf16=true"
GLOBS = ("keep_fp32", "frozen")
"""Fields that are globs over parameter names."""
_TWIN_OF = dict(TWINS) | {b: a for a, b in TWINS}


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class MixedPrecisionConfig:
    """The 31 fields of Megatron Bridge, followed by mpbridge's own. None means "derive it".

    The meaning (`precision.resolve.resolve`) depends only on the values, so a copy, a pickle or a dump means the same.
    dtypes are accepted in any spelling and read back as torch dtypes. An unknown attribute raises with the nearest name."""

    fp32: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: DTypeField = DTypeField(state=True)
    """Resident parameters; None: the 16-bit type set by the flags."""
    pipeline_dtype: DTypeField = DTypeField(state=True)
    """Activations between pipeline stages; None: the output dtype."""
    autocast_dtype: DTypeField = DTypeField(read_with="autocast_enabled=true")
    autocast_enabled: bool = False
    """torch autocast around the model; megatron-core calls it enable_autocast."""
    grad_reduce_in_fp32: bool = option(True, state=True)
    """Gradient buckets and their all-reduce or reduce-scatter in FP32."""
    fp8: str | None = option(None, legal=formats(8))
    """"e4m3", "hybrid" (E5M2 for gradients) or None."""
    fp8_recipe: str | None = option(None, legal=choices(8), read_with="fp8", usual="delayed")
    """"tensorwise", "delayed", "blockwise", "mxfp8" or "custom"; None: "tensorwise"."""
    first_last_layers_bf16: bool = option(False, read_with="fp8 or fp4")
    fp8_margin: int = option(0, read_with="fp8")
    fp8_amax_history_len: int = option(1, read_with="fp8")
    fp8_amax_compute_algo: str = option("most_recent", legal=("most_recent", "max"), read_with="fp8")
    fp8_wgrad: bool = option(True, read_with="fp8")
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    fp8_param: bool | None = option(None, state=True)
    """Weights of the quantized linears kept, and gathered, in FP8. The same fact as fp8_param_gather."""
    fp8_param_gather: bool | None = option(None, state=True)
    fp4: str | None = option(None, legal=formats(4))
    """"e2m1" or None."""
    fp4_recipe: str | None = option(None, legal=choices(4), read_with="fp4", usual="nvfp4")
    """"nvfp4" or "custom"; None: "nvfp4"."""
    fp4_param: bool | None = option(None, state=True)
    fp4_param_gather: bool | None = option(None, state=True)
    loss_scale: float | None = None
    """A static scale; None: dynamic under FP16, none otherwise."""
    initial_loss_scale: float = option(4294967296, read_with=_DYNAMIC)
    min_loss_scale: float = option(1.0, read_with=_DYNAMIC)
    loss_scale_window: float = option(1000, read_with=_DYNAMIC)
    hysteresis: int = option(2, read_with=_DYNAMIC)
    num_layers_at_start_in_bf16: int | None = option(None, read_with=_EDGES)
    """None: 1 when first_last_layers_bf16 is on."""
    num_layers_at_end_in_bf16: int | None = option(None, read_with=_EDGES)
    reuse_grad_buf_for_mxfp8_param_ag: bool = option(False, fact="reuse_grad_buffer", state=True)

    # What those 31 cannot express. None: derived, or left to the model's or optimizer's own section.
    compute_dtype: DTypeField = DTypeField()
    """16/32-bit GEMMs and activations; None: set by the flags. Differs from params_dtype only on FSDP engines."""
    output_dtype: DTypeField = DTypeField()
    """What the wrapped module returns between units and stages; None: compute_dtype. Only torch FSDP2 casts it."""
    use_precision_aware_optimizer: bool | None = option(None, state=True)
    """FusedAdam owns the main weights and keeps its states in the dtypes below."""
    store_param_remainders: bool | None = option(None, fact="remainders", state=True)
    """Main weights of BF16 parameters as 16 extra bits instead of a full FP32 copy."""
    main_params_dtype: DTypeField = DTypeField(
        legal=(DType.FP32, DType.FP16, DType.BF16), fact="main_params", state=True, fused=True
    )
    main_grads_dtype: DTypeField = DTypeField(fact="main_grads", state=True)
    grad_accumulation_dtype: DTypeField = DTypeField(state=True)
    """Gradients while micro-batches accumulate; None: as they are reduced. Only Megatron-FSDP since megatron-core 0.17 distinguishes the two."""
    exp_avg_dtype: DTypeField = DTypeField(legal=_MOMENTS, fact="exp_avg", state=True, fused=True)
    """First Adam moment; uint8 ("fp8") means FP8 with a scale."""
    exp_avg_sq_dtype: DTypeField = DTypeField(legal=_MOMENTS, fact="exp_avg_sq", state=True, fused=True)
    keep_fp32: tuple[str, ...] | None = option(None, state=True)
    """Globs over parameter names that stay FP32 in storage and compute; one that matches nothing is an error."""
    frozen: tuple[str, ...] | None = option(None, state=True)
    """Globs over parameter names that are not trained: no gradient, main weight or optimizer state. Adapters (model.lora_rank) are never among them."""
    lora_dtype: DTypeField = DTypeField(state=True)
    """Storage and compute of adapters: params_dtype, or fp32; None: params_dtype."""
    modules: Mapping[str, Any] | None = None
    """Glob over linears, below their layer ('mlp.linear_fc2') or with their full path ('decoder.layers.3.*', 'mtp.*') -> a rule, or a list of rules.

    A rule is "bf16" (high precision), a scaling ("mxfp8"), or a mapping: fields of a quantization ({fp8: hybrid, fp8_recipe: tensorwise}), or one rule
    a GEMM ({fprop: nvfp4, dgrad: mxfp8, wgrad: bf16}); both may be combined with `layers` ("2-29", "first 2", [0, -1]); {layers: last 2, precision: bf16} means
    high precision. The first rule that matches a linear decides; first_last_layers_bf16 precedes all of them."""
    moe_router_dtype: str | None = option(None, fact="router", shown="router")
    """"fp32" or "fp64"."""
    logit_dtype: DTypeField = DTypeField(fact="logits", shown="logits")
    """dtype of the output projection's result; applied by mpbridge's model builder."""
    fp32_residual_connection: bool | None = option(None, fact="residual_fp32", shown="residual stream in fp32")
    attention_softmax_in_fp32: bool | None = option(None, fact="softmax_fp32", shown="softmax in fp32")
    fp8_options: Mapping[str, Any] | None = None
    """Options of the scaling (scalings.Option) that the recipe sets: {power_of_two: true}. Transformer Engine reads them from environment variables."""
    fp4_options: Mapping[str, Any] | None = None
    """Like fp8_options: {stochastic_rounding: false}."""
    fp8_quantizer_factory: str | None = option(None, read_with="fp8")
    """Import path; only with fp8_recipe="custom"."""
    fp4_quantizer_factory: str | None = option(None, read_with="fp4")

    def __post_init__(self) -> None:
        refuse_twins(self.__dict__)
        for a, b in TWINS:
            value = self.__dict__[a] if self.__dict__[a] is not None else self.__dict__[b]
            self.__dict__[a] = self.__dict__[b] = value
        self.__dict__["_made"] = True

    if not TYPE_CHECKING:  # hidden from mypy, for which these would accept any name

        def __new__(cls, *values: Any, **given: Any) -> Self:
            """Refuses an unknown field with the nearest name, and values without one, instead of Python's bare TypeError."""
            if values:
                raise BadValue(f"MixedPrecisionConfig got {cut(', '.join(map(repr, values)))}, expected fields by name: bf16=True; a recipe's name or a config is for get_mixed_precision_config, a mapping for MixedPrecisionConfig.from_data")  # fmt: skip
            for name in given:
                if name not in cls.__dataclass_fields__:
                    raise UnknownName("field of MixedPrecisionConfig", name, cls.__dataclass_fields__)
            return super().__new__(cls)

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self.__dataclass_fields__:
                raise UnknownName("field of MixedPrecisionConfig", name, self.__dataclass_fields__)
            whole = str(self.__dataclass_fields__[name].type).startswith("int")
            if whole and isinstance(value, float) and value.is_integer():
                value = int(value)  # YAML reads 1e3 as a float, and 2.0 is accepted as 2
            if name == "moe_router_dtype" and not isinstance(value, (str, type(None))):
                with contextlib.suppress(BadValue):
                    value = dtype(value).short  # a torch.dtype too; what is none is a fault of its type
            kept = _kept(value)
            object.__setattr__(self, name, tuple(kept) if name in GLOBS and isinstance(kept, list) else kept)
            if name in _TWIN_OF and "_made" in self.__dict__:
                self.__dict__[_TWIN_OF[name]] = value  # a later assignment sets both

        def __getattr__(self, name: str) -> Any:
            # only reached when normal lookup failed; dunders and private names are left to Python (copy and pickle probe them)
            if name.startswith("_"):
                raise AttributeError(name)
            raise UnknownName("field of MixedPrecisionConfig", name, type(self).__dataclass_fields__)

    def stored(self) -> dict[str, Any]:
        """Every value as data, dtypes as DType, for comparing, printing and dumping; loads no torch."""
        return {field.name: self.__dict__[field.name] for field in dataclasses.fields(self)}

    def given(self) -> dict[str, Any]:
        """The values that differ from the class's defaults."""
        usual = {name: field.default for name, field in self.__dataclass_fields__.items()}
        return {name: value for name, value in self.stored().items() if value != usual[name]}

    def as_data(self) -> dict[str, Any]:
        """`given()` in plain YAML types; `MixedPrecisionConfig.from_data` reads it back to an equal config."""
        return {name: plain(value) for name, value in self.given().items()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any], base: Self | None = None) -> Self:
        """The config from plain values; base: the one that they change. Raises UnknownName, BadValue or Contradiction."""
        return (base or cls()).derive(**{str(name): value for name, value in data.items()})

    def derive(self, **changes: Any) -> Self:
        """A changed copy; an unknown field is refused with the nearest name; duplicate fields given together must agree."""
        fields = self.__dataclass_fields__
        for name in changes:
            if name not in fields:
                raise UnknownName("field of MixedPrecisionConfig", name, fields)
        refuse_twins(changes)
        new = copy.copy(self)
        # None for one of two duplicate fields is ignored if the other is given
        for name, value in changes.items():
            if value is not None or changes.get(_TWIN_OF.get(name, "")) is None:
                setattr(new, name, value)
        return new

    def __copy__(self) -> Self:
        new = object.__new__(type(self))
        own = {name: _kept(value) for name, value in self.__dict__.items() if isinstance(value, (dict, list))}
        new.__dict__.update(self.__dict__, **own)
        return new

    def __eq__(self, other: object) -> bool:
        return self.stored() == other.stored() if isinstance(other, MixedPrecisionConfig) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        from mpbridge.common.tables import facts

        return facts(type(self).__name__, self.as_data()).html()

    def __repr__(self) -> str:
        return f"MixedPrecisionConfig({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"


def _kept(value: Any) -> Any:
    """A value as a config keeps it: mappings and lists of its own, so that nobody else's change, and text as plain `str`, not megatron-core's enumerations."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_kept(name): _kept(item) for name, item in value.items()}
    return [_kept(item) for item in value] if isinstance(value, (list, tuple)) else value


def refuse_twins(given: Mapping[str, Any]) -> None:
    """Raises Contradiction for duplicate fields that the same constructor, mapping or override list sets to different values, one fault for each pair."""
    faults = [
        f"{a}={given[a]} and {b}={given[b]} are the same setting: set only one of them, or both to the same value"
        " (after dataclasses.replace, which passes both: assign it)"
        for a, b in TWINS
        if given.get(a) is not None and given.get(b) is not None and given[a] != given[b]
    ]
    if faults:
        raise Contradiction(faults)


_DTYPES = {name: field.row for name, field in vars(MixedPrecisionConfig).items() if isinstance(field, DTypeField)}
ROWS: Mapping[str, FieldRow] = MappingProxyType(
    {
        name: field.metadata.get("row") or _DTYPES.get(name, FieldRow())
        for name, field in MixedPrecisionConfig.__dataclass_fields__.items()
    }
)
"""Field -> its row."""
FUSED: Mapping[str, str] = MappingProxyType({name: row.fact for name, row in ROWS.items() if row.fused})
"""Field that is the dtype of a state that FusedAdam keeps -> the fact of PrecisionPolicy, which is also the state's role."""


def plain_states() -> dict[str, Any]:
    """The fields about states at their defaults: for measurements of arithmetic, whatever a recipe keeps."""
    return {name: MixedPrecisionConfig.__dataclass_fields__[name].default for name, row in ROWS.items() if row.state}
