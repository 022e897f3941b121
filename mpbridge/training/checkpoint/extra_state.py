"""Transformer Engine's extra state as data: scales and amax histories of a module. The package itself keeps it as a pickle inside of a byte tensor.

Saving unpickles what the live module has just made, never a file. Loading makes that pickle anew from data: the tensors are the checkpoint's, the
recipe is an object of one of the classes below, made here.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpbridge.common.errors import CheckpointError
from mpbridge.common.formats import FORMATS
from mpbridge.common.safe_unpickler import Name, UnpickledCall, read
from mpbridge.precision.scalings import ELEMENTS
from mpbridge.training.checkpoint.archive import Tensor, plain_call, spelled

if TYPE_CHECKING:
    from mpbridge.precision.policy import PrecisionPolicy

SUFFIX = "_extra_state"
LONGEST = 1 << 20
"""Steps of amax history, and more than any margin."""
CUSTOM = "CustomRecipe"
RECIPES = (
    "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", CUSTOM,
)  # fmt: skip
_MODULE = "transformer_engine.common.recipe"
_PARTS = ("Format", "_FormatHelper", "MMParams", "QParams")
_STATE = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd", "scale_inv_fwd", "scale_inv_bwd")
"""Tensors of a module's state. Releases before 2.0 wrote the last two; nothing reads them today."""
_VARIABLES: dict[str, Any] = {
    "num_gemms": int, "fp8_checkpoint": bool, "fp8_max_fwd": (int, float), "fp8_max_bwd": (int, float),
}  # fmt: skip
"""What a module's `fp8_meta` takes over from a state. The module updates that dictionary with whatever stands there, its process groups and recipes
included, so a file decides these and no others (base.py, 2.11 to 2.20: `set_extra_state`)."""
_GEMMS = 1 << 14
"""More GEMMs than a grouped linear has experts; the module makes as many scales when it loads."""
_DERIVED = {"megatron.core.extensions.transformer_engine.TEDelayedScaling": "DelayedScaling"}
"""megatron-core's own recipe class -> Transformer Engine's."""
_FIELDS = ("margin", "amax_history_len")
"""Whole numbers of a recipe that shape a module's state; the format follows from the run, and its own recipe decides everything else at the next step."""
_FORMAT_BY_MAXIMA: dict[Any, str] = {
    tuple(FORMATS[element].largest for element in elements): format for format, elements in ELEMENTS.items()
}
"""(fp8_max_fwd, fp8_max_bwd) of a saved state -> the format of its run."""


def is_extra(key: str) -> bool:
    """Whether an object's key names a module's extra state."""
    return key.partition("/")[0].endswith(SUFFIX)


def as_data(live: Any) -> Any:
    """The data in what a live module's `get_extra_state` returned (a byte tensor or None); None where there is none."""
    raw = b"" if live is None else live.detach().cpu().numpy().tobytes()
    if not raw:
        return None
    state = pickle.loads(raw)  # made by this process a moment ago: TransformerEngineBaseModule.get_extra_state
    recipe = state["recipe"]
    fields = {field: getattr(recipe, field) for field in _FIELDS if type(getattr(recipe, field, None)) is int}
    # megatron-core derives classes of its own: what they are is what they derive from
    kinds = [kind.__name__ for kind in type(recipe).__mro__ if kind.__name__ in RECIPES]
    return state | {"recipe": {"class": kinds[0] if kinds else type(recipe).__name__, "fields": fields}}


def format_of(policy: PrecisionPolicy) -> str | None:
    """What a run's linears with delayed scaling quantize to, a key of scalings.ELEMENTS; None where there are none, or several."""
    found = {quant.format for quant in policy.quants if quant.row.history}
    return found.pop() if len(found) == 1 else None


def as_module(data: Any, live: Any, *, format: str | None = None) -> Any:
    """What `set_extra_state` takes, from `as_data`'s data; `live` (the module's own) where there is none, or nothing that this run continues.

    format: `format_of` the run that loads it. A module keeps the quantizers that it makes here (base.py, 2.11 to 2.20: `set_meta_tensor`), so only
    delayed scaling's states, and only under the run's own format, are handed over; all others are made at the first forward pass.
    Raises CheckpointError.
    """
    if data is None:
        return live
    import torch

    if not isinstance(data, Mapping) or not isinstance(data.get("recipe"), Mapping):
        raise CheckpointError("no extra state of Transformer Engine")
    name = data["recipe"].get("class")
    if name not in RECIPES:
        raise CheckpointError(f"an extra state under recipe {str(name)[:40]!r}, expected one of {', '.join(RECIPES)}")
    tensors = {key: data[key] for key in _STATE if key in data}
    if name == CUSTOM and tensors:
        raise CheckpointError(
            f"an extra state under {CUSTOM} with scales of its own, expected quantizers without a state"
        )
    wrong = [key for key, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise CheckpointError(f"an extra state whose {wrong[0]} is not a tensor")
    try:
        import transformer_engine.common.recipe as recipes
    except ImportError:
        return live  # an emulated run: nothing here has such a state, and what it loses is in the verdict
    had_fields = data["recipe"].get("fields")
    fields = had_fields if isinstance(had_fields, Mapping) else {}
    known = {field: fields[field] for field in _FIELDS if type(fields.get(field)) is int}
    if any(not 0 <= value <= LONGEST for value in known.values()):
        raise CheckpointError(f"an extra state whose recipe has {known}")
    variables = _variables(data)
    had = _FORMAT_BY_MAXIMA.get((variables.get("fp8_max_fwd"), variables.get("fp8_max_bwd")))
    if name != "DelayedScaling" or (format and had and format != had):
        return live
    elements = recipes.Format[(format or had or "hybrid").upper()]
    recipe = recipes.DelayedScaling(**known, fp8_format=elements)
    state = tensors | {"recipe": recipe, "extra_fp8_variables": variables}
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def _variables(data: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a state that a module may take over. Raises CheckpointError."""
    had = data.get("extra_fp8_variables")
    if not isinstance(had, Mapping):
        raise CheckpointError("an extra state without extra_fp8_variables")
    taken = {key: had[key] for key in _VARIABLES if key in had}
    for key, value in taken.items():
        # to Python a bool is an int
        if not isinstance(value, _VARIABLES[key]) or isinstance(value, bool) != (_VARIABLES[key] is bool):
            raise CheckpointError(f"an extra state whose {key} is {str(value)[:40]!r}")
    if not 0 < taken.get("num_gemms", 1) <= _GEMMS:
        raise CheckpointError(f"an extra state with {taken['num_gemms']} GEMMs, expected 1 to {_GEMMS}")
    return taken


PICKLES_ALLOWED = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
"""Without it Transformer Engine 2.18 and later refuses every delayed-scaling state (pytorch/_extra_state.py)."""


@contextmanager
def pickled_here() -> Iterator[None]:
    """Inside, Transformer Engine takes the pickles of `as_module`: what it warns of are pickles from a file, and none reaches it from here."""
    before = os.environ.get(PICKLES_ALLOWED)
    os.environ[PICKLES_ALLOWED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PICKLES_ALLOWED]
        else:
            os.environ[PICKLES_ALLOWED] = before


def converted(value: Any) -> Any:
    """The spelling of an extra state that an archive holds as a byte tensor with a pickle in it. Raises CheckpointError."""
    if value is None or (isinstance(value, Tensor) and not value.content()):
        return spelled(None)
    if not isinstance(value, Tensor) or value.dtype != "uint8":
        raise CheckpointError("an extra state that is not a byte tensor")
    state, _ = read(value.content(), plain_call(1, _is_recipe))
    if (
        not isinstance(state, dict)
        or not isinstance(state.get("recipe"), UnpickledCall)
        or _kind(state["recipe"].name) not in RECIPES
    ):
        raise CheckpointError("no extra state of Transformer Engine")
    recipe = state["recipe"]
    had = recipe.state if isinstance(recipe.state, dict) else {}
    fields = {field: had[field] for field in _FIELDS if type(had.get(field)) is int}
    return spelled(state | {"recipe": {"class": _kind(recipe.name), "fields": fields}})


def _is_recipe(name: Name) -> bool:
    return (name.module == _MODULE and name.name in (*RECIPES, *_PARTS)) or str(name) in _DERIVED


def _kind(name: Name) -> str:
    return _DERIVED.get(str(name), name.name)
