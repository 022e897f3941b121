"""A folder in Hugging Face's layout, read as data: config.json, and the contents of its safetensors files from their headers. Code and pickles are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue, Contradiction
from mpbridge.common.files import LIMITS, bytes_of, regular, why

PREFIX = "hf:"
"""How such a folder is named where a file is also accepted: hf:models/llama."""
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""dtype in the safetensors format's spelling -> bytes per element."""


@dataclass(frozen=True, slots=True)
class FolderTensor:
    """One tensor, from its file's header."""

    file: str
    dtype: str
    """In the format's spelling: 'BF16'."""
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * BYTES[self.dtype]


def is_reference(text: object) -> bool:
    """Whether `text` names a folder in this layout."""
    return isinstance(text, str) and text.startswith(PREFIX)


def folder_of(reference: str) -> Path:
    """The folder that 'hf:DIR' means. Raises BadValue if there is none."""
    name = reference.removeprefix(PREFIX)
    path = Path(name).expanduser()
    if not name or not path.is_dir():
        found = "a file" if path.is_file() else "no such folder"
        raise BadValue(f"{reference}: {found}, expected {PREFIX}DIR with a folder that contains {CONFIG}")
    return path


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it is. Raises BadValue for anything but JSON, Contradiction for a model that requires running its own code."""
    data = read_json_file(folder / CONFIG)
    if not isinstance(data, dict):
        raise BadValue(f"{folder / CONFIG}: expected an object, got {type(data).__name__}")
    code = [f"{name}={_short(data[name])}" for name in ("auto_map", "trust_remote_code") if data.get(name)]
    cure = "remove it (a model of a known model_type needs none)"
    faults = [f"{said}: it names Python code to run, which mpbridge never does: {cure}" for said in code]
    if faults:
        raise Contradiction(faults, subject=f"{folder / CONFIG} is refused")
    return data


def tensors(folder: Path) -> dict[str, FolderTensor]:
    """Every tensor of the folder by name; empty if it has no weights. Reads headers only.

    Raises BadValue, naming the file, for damage, for pickled weights without safetensors, and for an index that points outside of the folder.
    """
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, read_json_file(index))
    if (folder / SINGLE).is_file():
        return header(folder, SINGLE)
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return _together(folder, others)
    pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickled:
        raise BadValue(
            f"{folder} contains pickled weights ({', '.join(pickled[:3])}), which can run code when they are opened: "
            "expected safetensors (its author can write them, or transformers in an isolated environment)"
        )
    return {}


def _indexed(folder: Path, index: Any) -> dict[str, FolderTensor]:
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise BadValue(f"{folder / INDEX}: expected weight_map, from names of tensors to names of files")
    files = sorted(set(places.values()))
    strange = [name for name in files if not name.endswith(".safetensors") or "/" in name or "\\" in name]
    if strange:
        raise BadValue(f"{folder / INDEX} names {_short(strange[0])}: expected safetensors files in the same folder")
    found = _together(folder, files)
    absent = sorted(places.keys() - found.keys())
    if absent:
        raise BadValue(f"{folder / INDEX} lists {_few(absent)}, which {places[absent[0]]} does not contain")
    return found


def _together(folder: Path, files: list[str]) -> dict[str, FolderTensor]:
    found: dict[str, FolderTensor] = {}
    for name in files:
        here = header(folder, name)
        twice = sorted(found.keys() & here.keys())
        if twice:
            raise BadValue(f"{folder / name} contains {_few(twice)} again: {found[twice[0]].file} also has it")
        found |= here
    return found


def header(folder: Path, name: str) -> dict[str, FolderTensor]:
    """Tensors of one safetensors file. Raises BadValue. The format: 8 bytes little-endian n, n bytes of JSON, data (https://huggingface.co/docs/safetensors)."""
    file = folder / name
    try:
        with regular(file) as stream:
            size = int.from_bytes(stream.read(8), "little")
            text = stream.read(min(size, LIMITS["safetensors header"].size + 1))
            room = file.stat().st_size - 8 - size
    except OSError as error:
        raise BadValue(f"{file} cannot be read: {why(error)}") from None
    data = _parsed(text, file) if 0 < size <= LIMITS["safetensors header"].size and len(text) == size else None
    if not isinstance(data, dict):
        raise BadValue(f"{file} is not a safetensors file, or is truncated")
    found = {}
    for key, entry in data.items():
        if key == "__metadata__":
            continue
        try:
            shape = tuple(entry["shape"])
            stored = FolderTensor(name, entry["dtype"], shape)
            start, end = entry["data_offsets"]
            whole = all(type(side) is int and side >= 0 for side in (*shape, start, end))
            sound = whole and stored.bytes == end - start and end <= room
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise BadValue(f"{file}: the header gives {_short(entry)} for {_short(key)}, which does not fit the file")
        found[key] = stored
    return found


def read_json_file(file: Path, *, kind: str = "json") -> Any:
    """The JSON value in `file`, at most as large as files of that kind may be (`common.files.LIMITS`). Raises BadValue that names it."""
    try:
        text = bytes_of(file, kind=kind)
    except FileNotFoundError:
        folder = file.parent
        there = sorted(one.name for one in folder.iterdir())[:4] if folder.is_dir() else ["it is none"]
        found = f"no {file.name} in it (found: {', '.join(there) or 'nothing'})"
        raise BadValue(f"{folder}: {found}, expected a model's folder in Hugging Face's format") from None
    except OSError as error:
        raise BadValue(f"{file} cannot be read: {why(error)}") from None
    return _parsed(text, file)


def _parsed(text: bytes, file: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadValue(f"{file} is not JSON: {said}") from None


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
