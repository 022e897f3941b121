"""A look into a checkpoint before megatron-core opens it: no file in it can make code run.

torch's reader of distributed checkpoints unpickles `.metadata` without limits, and its load planner does the same with every stored object. So both are
read here first: `.metadata` through an unpickler that knows a list of harmless names, objects and tensors' headers with `weights_only=True`.
Transformer Engine's extra state is a pickle inside of a byte tensor, which its modules unpickle: that one goes through the same list.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mpbridge.checkpoint.store import MANIFEST
from mpbridge.errors import CheckpointError

METADATA = ".metadata"
COMMON = "common.pt"

_DCP = "torch.distributed.checkpoint"
_METADATA_NAMES = frozenset(
    {
        (f"{_DCP}.metadata", "Metadata"),
        (f"{_DCP}.metadata", "MetadataIndex"),
        (f"{_DCP}.metadata", "TensorStorageMetadata"),
        (f"{_DCP}.metadata", "BytesStorageMetadata"),
        (f"{_DCP}.metadata", "ChunkStorageMetadata"),
        (f"{_DCP}.metadata", "TensorProperties"),
        (f"{_DCP}.metadata", "StorageMeta"),
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        (f"{_DCP}.filesystem", "_StoragePrefix"),
        (f"{_DCP}.planner", "SavePlan"),
        (f"{_DCP}.planner", "WriteItem"),
        (f"{_DCP}.planner", "WriteItemType"),
        (f"{_DCP}.planner", "TensorWriteData"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),  # takes a name, looks it up in a table
        ("collections", "OrderedDict"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
    }
)
"""What torch's and megatron-core's writers put into `.metadata`: records, enumerations, sizes and paths. No callable that acts."""

_EXTRA_STATE_NAMES = frozenset(
    {
        ("collections", "OrderedDict"),
        ("collections", "deque"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "_load_from_bytes"),
        ("torch", "Size"),
        ("torch", "device"),
        ("transformer_engine.common.recipe", "DelayedScaling"),
        ("transformer_engine.common.recipe", "Float8CurrentScaling"),
        ("transformer_engine.common.recipe", "Float8BlockScaling"),
        ("transformer_engine.common.recipe", "MXFP8BlockScaling"),
        ("transformer_engine.common.recipe", "NVFP4BlockScaling"),
        ("transformer_engine.common.recipe", "Format"),
        ("transformer_engine.common.recipe", "_FormatHelper"),
        ("transformer_engine.common.recipe", "MMParams"),
        ("transformer_engine.common.recipe", "QParams"),
    }
)


class _ListedOnly(pickle.Unpickler):
    """Knows the names on its list, dtypes, and nothing else."""

    def __init__(self, stream: Any, names: frozenset[tuple[str, str]]) -> None:
        super().__init__(stream)
        self.names = names

    def find_class(self, module: str, name: str) -> Any:
        """The listed object; torch's dtypes are listed by what they are. Raises UnpicklingError."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in self.names:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no writer of checkpoints needs")
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage_from_bytes
        # by attribute of exactly this module: a dotted name would walk on into what the module imported
        return getattr(importlib.import_module(module), name)


def read_metadata(folder: Path) -> Any:
    """torch's Metadata of a distributed checkpoint, read through the allow-list; raises CheckpointError that names the file."""
    file = folder / METADATA
    try:
        with file.open("rb") as stream:
            data = _ListedOnly(stream, _METADATA_NAMES).load()
        entries = dict(data.storage_data)
        names = {str(info.relative_path) for info in entries.values()}
        described = isinstance(data.state_dict_metadata, dict)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: the checkpoint cannot be read") from error
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{file} is refused: {error}") from error
    strange = sorted(name for name in names if "/" in name or "\\" in name or name in ("", ".", "..") or "\0" in name)
    if strange or not described:
        raise CheckpointError(
            f"{file} is refused: it points outside of its folder ({', '.join(strange)})"
            if strange
            else f"{file} is refused: no table"
        )
    return data


def inspect(folder: Path) -> Any:
    """The Metadata of the checkpoint in `folder`, after a look into every file that a loader would unpickle.

    Raises CheckpointError naming the first file that holds more than data, or that is missing.
    """
    metadata = read_metadata(folder)
    if (folder / COMMON).exists():
        _weights_only(folder / COMMON, None, COMMON)
    by_file: dict[str, list[tuple[Any, Any]]] = {}
    for index, info in metadata.storage_data.items():
        by_file.setdefault(str(info.relative_path), []).append((index, info))
    kinds = {name: type(entry).__name__ for name, entry in metadata.state_dict_metadata.items()}
    for name, entries in sorted(by_file.items()):
        file = folder / name
        if not file.is_file() or file.is_symlink():
            raise CheckpointError(f"{file} is missing: the checkpoint is not whole")
        with file.open("rb") as stream:
            for index, info in entries:
                # tensors are read with weights_only=True by torch's reader itself
                if kinds.get(index.fqn) != "TensorStorageMetadata":
                    stream.seek(info.offset)
                    loaded = _weights_only(file, io.BytesIO(stream.read(info.length)), index.fqn)
                    _check_extra_state(file, index.fqn, loaded)
    for stray in _object_files(folder):
        _weights_only(stray, None, stray.name)
    return metadata


def _object_files(folder: Path) -> Iterator[Path]:
    """Objects stored in files of their own (`shard_0_1.pt` in a folder), which megatron-core's common strategy would read."""
    yield from sorted(file for file in folder.rglob("*.pt") if file.name != COMMON and file.name != MANIFEST)


def _weights_only(file: Path, stream: io.BytesIO | None, what: str) -> Any:
    try:
        return torch.load(stream if stream is not None else file, map_location="cpu", weights_only=True)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{file} is refused: {what} is damaged, or holds more than tensors and plain values ({text})"
        ) from error


def _check_extra_state(file: Path, key: str, loaded: Any) -> None:
    for item in loaded if isinstance(loaded, (list, tuple)) else [loaded]:
        raw: bytes | None = None
        if "_extra_state" in key and isinstance(item, torch.Tensor) and item.dtype is torch.uint8:
            raw = item.numpy().tobytes()
        elif isinstance(item, io.BytesIO):
            raw = item.getvalue()
        if raw:
            try:
                _ListedOnly(io.BytesIO(raw), _EXTRA_STATE_NAMES).load()
            except Exception as error:
                raise CheckpointError(
                    f"{file} is refused: {key} is no extra state of Transformer Engine ({error})"
                ) from error


def _storage_from_bytes(data: bytes) -> Any:
    """torch.storage._load_from_bytes without its right to run code."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
