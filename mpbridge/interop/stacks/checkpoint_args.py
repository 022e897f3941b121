"""The `args` of a Megatron-LM checkpoint, read from the pickle's opcodes: no object is created, nothing is imported or run."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from mpbridge.common.errors import CheckpointError, DataError, brief, cut
from mpbridge.common.files import LIMITS, Limit, regular, text_of
from mpbridge.common.safe_unpickler import LEGACY_MAGIC, Budget, Name, UnpickledCall, any_call, read
from mpbridge.precision.megatron_spec.versions import COMMON_OBJECTS
from mpbridge.precision.yaml_loader import MOST_BITS

METADATA = ".metadata"
"""torch's table of a checkpoint: file, first byte and bytes of each tensor and object."""
_ARGS = "args"
"""The object of that table with the arguments alone (torch_dcp, fsdp_dtensor); in the common state they stand beside the rest."""
_LIMIT, _TABLE, _VALUES = LIMITS["arguments"], LIMITS["pickle"], LIMITS["argument values"].steps


def read_arguments(path: Path) -> Mapping[str, Any]:
    """Name -> value of the namespace stored under 'args', plain values only: dtypes as 'torch.bfloat16', enums as their value.

    path: `common.pt` of a distributed checkpoint, its `.metadata` where it has no such file, or `model_optim_rng.pt`. Raises DataError.
    """
    try:
        with regular(path) as file:
            found = _beside(path, file) if path.name == METADATA else _unpickled(file)
        args = found.get("args") if isinstance(found, dict) else None
        state = args.state if isinstance(args, UnpickledCall) else None
        if not isinstance(state, dict):
            raise DataError(f"{path} has no 'args': expected Megatron-LM's common.pt, .metadata or model_optim_rng.pt")
        return _plain(state)
    except (DataError, CheckpointError) as error:
        raise DataError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except Exception as error:
        raise DataError(f"{path}: not a readable checkpoint: {type(error).__name__}: {error}") from None


def arguments_file(folder: Path) -> Path:
    """The file in a checkpoint's folder that records how it was trained: in its root, in one iteration, or next to the shards. Raises DataError.

    Bridge's run_config.yaml where there is one; Megatron-LM's common.pt, mp_rank_*/model_optim_rng.pt or .metadata. In a root, of the iteration that
    latest_checkpointed_iteration.txt names.
    """
    latest = folder / "latest_checkpointed_iteration.txt"
    inside = folder
    if latest.is_file():
        text = text_of(latest, errors="replace", kind="note")[:40].strip()
        if text != "release" and not (text.isascii() and text.isdigit()):
            raise DataError(f"{latest} contains {brief(text)}, expected an iteration's number or 'release'")
        inside = folder / (text if text == "release" else f"iter_{int(text):07d}")
        if not inside.is_dir():
            raise DataError(f"{latest} names {text}, but {inside} does not exist")
    ranks = sorted(inside.glob("mp_rank_*/model_optim_rng.pt"))
    for file in (inside / "run_config.yaml", inside / "common.pt", *ranks[:1], inside / METADATA):
        if file.is_file():
            return file
    found = ", ".join(sorted(one.name for one in inside.iterdir())[:6]) or "nothing"
    files = "common.pt, .metadata, run_config.yaml or mp_rank_*/model_optim_rng.pt"
    expected = f"latest_checkpointed_iteration.txt, {files}"
    raise DataError(f"{inside}: not a Megatron-LM or Bridge checkpoint: expected {expected}, found {found}")


def _beside(metadata: Path, file: IO[bytes]) -> Any:
    """What the file that holds the arguments, or everything that no rank shards, says of them: {'args': ...}. Found by torch's table."""
    table, _ = _read(file.read(_TABLE.size), _TABLE)
    stored = _state(table, "storage_data")
    places = {_state(index, "fqn"): info for index, info in stored.items()} if isinstance(stored, dict) else {}
    key = next((key for key in (*COMMON_OBJECTS, _ARGS) if key in places), None)
    if key is None:
        raise DataError("names neither an object 'common_state' nor 'args', where Megatron-LM keeps its arguments")
    name, start, size = (_state(places[key], field) for field in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or "/" in name or not (metadata.parent / name).is_file():
        raise DataError(f"names no file beside it that holds the object {key}")
    if type(start) is not int or start < 0 or type(size) is not int or not 0 < size <= _LIMIT.size:
        raise DataError(f"gives the object {key} no place in {name}, or more than {_LIMIT.size} bytes of it")
    with regular(metadata.parent / name) as beside:
        beside.seek(start)
        found = _unpickled(io.BytesIO(beside.read(size)))
    if key == _ARGS:
        return {"args": found}
    return found[0] if isinstance(found, list) and found else found  # a list of the shards that a rank holds


def _state(value: Any, field: str) -> Any:
    """A field of what a pickle would have made; None where it has none."""
    return value.state.get(field) if isinstance(value, UnpickledCall) and isinstance(value.state, dict) else None


def _unpickled(file: IO[bytes]) -> Any:
    """The object in a file of torch's, or in a plain pickle: the first one, or the fourth of torch's earlier format. Raises DataError."""
    data = _pickle_in(file).read(_LIMIT.size)  # tensors may follow
    first, at = _read(data, _LIMIT)
    for _ in range(3 if first == LEGACY_MAGIC else 0):
        first, at = _read(data, _LIMIT, at)
    return first


def _read(data: bytes, limit: Limit, start: int = 0) -> tuple[Any, int]:
    storage = UnpickledCall(Name("torch", "storage"), ())
    return read(data, any_call, lambda key: storage, start, budget=Budget(limit.steps))


def _pickle_in(file: IO[bytes]) -> IO[bytes]:
    """The pickle of a file: inside torch's archive, or the file itself. Raises DataError for formats without arguments."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        start = file.read(512)
        file.seek(0)
        if start[257:262] == b"ustar":
            raise DataError("a tar archive (torch before 0.1.10): load and save it again with a later torch")
        if not start.startswith((b"\x80", b"(", b"}", b"c", b"]")):
            raise DataError(f"neither torch's archive nor a pickle: it begins with {start[:8]!r}")
        return file
    with zipfile.ZipFile(file) as archive:
        inside = [entry for entry in archive.infolist() if entry.filename.endswith("data.pkl")]
        if len(inside) != 1 or inside[0].file_size > _LIMIT.size:
            raise DataError(f"expected one data.pkl of at most {_LIMIT.size} bytes")
        return io.BytesIO(archive.read(inside[0]))


def _plain(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Name -> plain value. Raises DataError for values without an end: a pickle of a hundred bytes can name 2**50 elements."""
    left = _VALUES

    def plain(value: Any, depth: int = 0) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > 50:
            raise DataError(f"its arguments have more than {_VALUES} values, or are nested too deeply")
        if isinstance(value, UnpickledCall):  # of an enum: its value
            first = value.args[0] if len(value.args) == 1 else None
            if value.name.module != "torch" and isinstance(first, (str, int, float)):
                return plain(first, depth + 1)
            value = value.name
        if isinstance(value, Name):
            return f"{cut(value.module)}.{cut(value.name)}"
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise DataError(f"its arguments have a whole number of more than {MOST_BITS:,} bits")
        if isinstance(value, (list, tuple)):
            return [plain(item, depth + 1) for item in value]
        return value if isinstance(value, (type(None), bool, int, float, str)) else str(type(value).__name__)

    return {name: plain(value) for name, value in state.items() if isinstance(name, str)}
