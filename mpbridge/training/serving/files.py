"""A folder's tensors. Read one by one on demand, block-wise FP8 widened; several are joined into one parameter, and a parameter is split again. Written in safetensors files whose
layout is known before anything is read: in place, one parameter at a time, and a file that is complete is not written again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from mpbridge.common.errors import BadValue, CheckpointError, Contradiction, Refused
from mpbridge.common.facts import ModelShape
from mpbridge.common.files import Locked, ProgressCallback, lock, read_json, write_whole
from mpbridge.common.shipped import install
from mpbridge.settings.huggingface.folder import BYTES, INDEX, SINGLE, FolderTensor, header
from mpbridge.settings.huggingface.served import BLOCK_SCALE, FP8
from mpbridge.settings.huggingface.tensors import Mapped, PartLayout

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""dtype in safetensors' spelling -> torch's, for weights that need no conversion."""
SPELLED: Mapping[str, torch.dtype] = {**DTYPES, "U8": torch.uint8, FP8: torch.float8_e4m3fn}
"""The same, of every tensor that is written."""
SPELLING: Mapping[torch.dtype, str] = {dtype: name for name, dtype in SPELLED.items()}
_NO_WEIGHTS = ("rotary_emb.inv_freq",)
"""Suffixes of buffers that old folders contain and every program recomputes."""
MOST = 10
"""Maximum number of tensors of a kind that a message lists."""


def library() -> Any:
    """The module safetensors. Raises BadValue that names the extra if it is not installed."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise BadValue(f"weights in Hugging Face's layout need the package safetensors: {install('hf')}") from None
    return safetensors


class FolderReader(ExitStack):
    """The tensors of a folder; a context manager that closes its files."""

    def __init__(self, folder: Path, held: Mapping[str, FolderTensor], config: Mapping[str, Any]) -> None:
        super().__init__()
        self.folder, self.held, self.config = folder, held, config
        quantization = config.get("quantization_config") or {}
        self.block = tuple(quantization.get("weight_block_size") or (128, 128))
        said = str(config.get("dtype") or config.get("torch_dtype"))
        self.dtype = {"float32": torch.float32, "float16": torch.float16}.get(said, torch.bfloat16)
        """What config.json gives the model; BF16 if it gives none."""
        self._open: dict[str, Any] = {}

    def is_quantized(self, name: str) -> bool:
        """Whether the tensor is stored in FP8 with a scale per block."""
        return self.held[name].dtype == FP8

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that `tensor` returns: FP8 becomes the model's dtype in config.json."""
        return self.dtype if self.is_quantized(name) else DTYPES[self.held[name].dtype]

    def tensor(self, name: str, *, wide: bool = False) -> torch.Tensor:
        """The tensor on the CPU. wide: block-wise FP8 as FP32, not yet rounded."""
        raw = self.raw(name)
        if not self.is_quantized(name):
            return raw
        values = widened(raw, self.raw(name + BLOCK_SCALE), (self.block[0], self.block[1]))
        return values if wide else values.to(self.dtype)

    def raw(self, name: str) -> torch.Tensor:
        """The tensor as stored. Raises BadValue for a file that the library refuses: bytes that no tensor covers, or two."""
        file = self.held[name].file
        if file not in self._open:
            try:
                found = library().safe_open(self.folder / file, framework="pt")
            except library().SafetensorError as error:
                raise BadValue(f"{self.folder / file} cannot be read: {error}") from None
            self._open[file] = self.enter_context(found)
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        return tensor


def check(
    held: Mapping[str, FolderTensor], wanted: Sequence[Mapped], copied: Mapping[str, str], block: Sequence[int]
) -> None:
    """Raises Contradiction with every tensor that is missing, has another shape or dtype than in the model of config.json, or is not part of it."""
    shapes = {name: shape for one in wanted for name, shape in one.parts}
    known = shapes | {name: shapes[original] for name, original in copied.items()}
    faults = _several("missing", [name for name in shapes if name not in held])
    scales = {name + BLOCK_SCALE for name, stored in held.items() if stored.dtype == FP8}
    strangers = sorted(name for name in held.keys() - known.keys() - scales if not name.endswith(_NO_WEIGHTS))
    faults += _several("not part of the model that config.json describes", strangers)
    for name, stored in held.items():
        if name in known and stored.shape != known[name]:
            faults.append(f"{name} is {list(stored.shape)}, expected {list(known[name])} by config.json")
        if name in known and stored.dtype not in DTYPES and stored.dtype != FP8:
            faults.append(f"{name} is {stored.dtype}, expected one of {', '.join((*DTYPES, FP8))}")
        if name in known and stored.dtype == FP8:
            faults += _scale_faults(name, stored, held.get(name + BLOCK_SCALE), block)
    if faults:
        more = [f"and {len(faults) - MOST} more"] if len(faults) > MOST else []
        raise Contradiction([*faults[:MOST], *more], subject="the weights do not match config.json's model")


def _scale_faults(name: str, stored: FolderTensor, scale: FolderTensor | None, block: Sequence[int]) -> list[str]:
    if scale is None:
        return [f"{name} is FP8, but {name}{BLOCK_SCALE} is missing"]
    if len(stored.shape) != 2:
        return [f"{name} is FP8, but has {len(stored.shape)} axes, expected 2"]
    blocks = tuple(-(-side // length) for side, length in zip(stored.shape, block, strict=True))
    if scale.shape != blocks:
        return [f"{name}{BLOCK_SCALE} is {list(scale.shape)}, expected {list(blocks)} for blocks of {list(block)}"]
    return []


def _several(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return [f"{what}: {', '.join(names[:MOST])}{more}"]


def joined(parts: Sequence[torch.Tensor], layout: PartLayout, shape: ModelShape) -> torch.Tensor:
    """The parameter made of `parts`.

    qkv: for each query group the rows of its queries, then of its key, then of its value, as in megatron-core's linear_qkv.
    stacked: the gate's rows above the others, as in megatron-core's gated linear_fc1.
    """
    if layout == "whole":
        return parts[0]
    if layout == "stacked":
        return torch.cat(list(parts))
    groups = shape.num_query_groups
    return torch.cat([_grouped(part, groups) for part in parts], dim=1).flatten(0, 1)


def apart(parameter: torch.Tensor, layout: PartLayout, shape: ModelShape) -> list[torch.Tensor]:
    """The inverse of `joined`: the parts."""
    if layout == "whole":
        return [parameter]
    if layout == "stacked":
        return list(parameter.chunk(2))
    keys = shape.kv_channels
    queries = shape.num_attention_heads // shape.num_query_groups * keys
    grouped = _grouped(parameter, shape.num_query_groups)
    return [part.flatten(0, 1) for part in torch.split(grouped, [queries, keys, keys], dim=1)]


def _grouped(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """[groups, rows of a group, ...]"""
    return tensor.view(groups, tensor.shape[0] // groups, *tensor.shape[1:])


def widened(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """FP32 values of block-wise FP8: each code times its block's scale. codes: [rows, columns]; scales: one per block; the last blocks may be partial."""
    rows, columns = codes.shape
    tall = scales.float().repeat_interleave(block[0], 0)[:rows]
    return codes.float() * tall.repeat_interleave(block[1], 1)[:, :columns]


FILE_BYTES = 5_000_000_000
"""Maximum size of a safetensors file in bytes, as in transformers."""
JOURNAL, LOCK = "journal.json", "lock"
"""Beside the files until the folder is complete: what was written of which export, and a lock against a second process."""


def facts_of(tensor: torch.Tensor) -> dict[str, Any]:
    """dtype, shape and SHA-256 of a tensor's bytes."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "sha256": hashlib.sha256(_bytes(tensor)).hexdigest()}


def bad_values(tensor: torch.Tensor) -> str:
    """What makes codes or weights unusable; '' if nothing does."""
    count = 0 if tensor.dtype is torch.uint8 else int((~tensor.float().isfinite()).sum())
    return f"has {count:,} of {tensor.numel():,} values that are not finite" if count else ""


def planned(sizes: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, FolderTensor]:
    """Tensor -> its place. sizes: (name, dtype in safetensors' spelling, shape) in the order of writing."""
    files: list[dict[str, FolderTensor]] = []
    size = 0
    for name, dtype, shape in sizes:
        one = FolderTensor("", dtype, shape)
        if not files or (size + one.bytes > FILE_BYTES and size):
            files.append({})
            size = 0
        files[-1][name], size = one, size + one.bytes
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    return {
        name: FolderTensor(file, one.dtype, one.shape)
        for file, held in zip(names if len(files) > 1 else [SINGLE], files, strict=False)
        for name, one in held.items()
    }


class Shards:
    """The files of `plan` in a folder that is not yet complete; a context manager.

    identity: of what the bytes are made of. Files of an earlier, interrupted export with the same identity are kept if every tensor has its SHA-256. Raises BadValue if another
    process writes there, CheckpointError for a link.
    """

    def __init__(self, folder: Path, plan: Mapping[str, FolderTensor], identity: str, told: ProgressCallback) -> None:
        self.folder, self.plan, self._identity, self._told = folder, plan, identity, told
        self.facts: dict[str, dict[str, Any]] = {}
        """Tensor -> dtype, shape and SHA-256 of its bytes, of everything written so far."""
        self.total, self._done = sum(one.bytes for one in plan.values()), 0
        self.files = list(dict.fromkeys(one.file for one in plan.values()))
        self._complete: list[str] = []
        self._open: dict[str, tuple[int, dict[str, int]]] = {}
        try:
            self._lock = lock(folder / LOCK, wait=False)
        except Locked:
            raise BadValue(
                f"{folder} is being written by another process, or elsewhere in this one: wait for it, or choose another name"
            ) from None

    def __enter__(self) -> Self:
        try:
            journal = self._journal()
            for entry in self.folder.iterdir():
                link = entry.is_symlink()
                if entry.name in (LOCK, JOURNAL):
                    continue
                if entry.name in journal and not link and self._holds(entry.name, journal):
                    continue
                shutil.rmtree(entry) if entry.is_dir() and not link else entry.unlink()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle, _ in self._open.values():
            os.close(handle)
        if error is None:
            for name in (LOCK, JOURNAL):
                (self.folder / name).unlink(missing_ok=True)
        elif isinstance(error, Refused):  # as it will be again: nothing is kept to go on from
            for entry in self.folder.iterdir():
                entry.unlink()
        self._lock.close()

    def wants(self, names: Iterable[str]) -> bool:
        """Whether one of the tensors has not been written."""
        return any(name not in self.facts for name in names)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor to its place, and completes its file with the last one. Raises OSError, and CheckpointError for one that does not fit its place."""
        if name in self.facts:
            return
        one = self.plan[name]
        found = FolderTensor(one.file, SPELLING.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        if found != one:
            said = f"{name} is {found.dtype} {list(found.shape)}, expected {one.dtype} {list(one.shape)}, for which its file has room"
            raise CheckpointError(f"{said}: this is a defect of mpbridge, which its maintainers should know of")
        facts = facts_of(tensor)
        handle, places = self._open.get(one.file) or self._begin(one.file)
        _write(handle, _bytes(tensor), places.pop(name))
        self.facts[name], self._done = facts, self._done + one.bytes
        self._told(self._done, self.total)
        if not places:
            os.fsync(handle)
            os.close(self._open.pop(one.file)[0])
            (self.folder / f".{one.file}").rename(self.folder / one.file)
            self._complete.append(one.file)
            files = {file: {at: self.facts[at] for at in self._of(file)} for file in self._complete}
            write_whole(self.folder / JOURNAL, json.dumps({"identity": self._identity, "files": files}))

    def index(self) -> None:
        """Writes the list of tensors, if there are several files."""
        if len(self.files) > 1:
            places = {name: one.file for name, one in sorted(self.plan.items())}
            text = json.dumps({"metadata": {"total_size": self.total}, "weight_map": places}, indent=2)
            write_whole(self.folder / INDEX, text + "\n")

    def _of(self, file: str) -> list[str]:
        """Tensors of a file in the order of its bytes: wide dtypes first, so that every tensor is aligned."""
        held = [name for name, one in self.plan.items() if one.file == file]
        return sorted(held, key=lambda name: -BYTES[self.plan[name].dtype])

    def _begin(self, file: str) -> tuple[int, dict[str, int]]:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at, starts = 0, {}
        for name in self._of(file):
            one = self.plan[name]
            entries[name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [at, at + one.bytes]}
            starts[name], at = at, at + one.bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        handle = os.open(self.folder / f".{file}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        places = {name: 8 + len(text) + start for name, start in starts.items()}
        self._open[file] = handle, places
        _write(handle, len(text).to_bytes(8, "little") + text, 0)
        return handle, places

    def _journal(self) -> dict[str, Any]:
        """File -> tensor -> facts of what an earlier process completed of the same export."""
        with suppress(CheckpointError, OSError):
            found = read_json(self.folder / JOURNAL)
            files = found.get("files") if isinstance(found, dict) and found.get("identity") == self._identity else None
            return files if isinstance(files, dict) else {}
        return {}

    def _holds(self, file: str, journal: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether a file of the journal is what it was; its tensors are then written."""
        held = {name: one for name, one in self.plan.items() if one.file == file}
        try:
            if header(self.folder, file) != held:
                return False
            with FolderReader(self.folder, held, {}) as reader:
                facts = {name: facts_of(reader.raw(name)) for name in held}
        except (BadValue, OSError):
            return False
        if facts != journal[file]:
            return False
        self.facts |= facts
        self._complete.append(file)
        self._done += sum(one.bytes for one in held.values())
        self._told(self._done, self.total)
        return True


def _bytes(tensor: torch.Tensor) -> memoryview:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(raw)  # type: ignore[arg-type]


def _write(handle: int, data: bytes | memoryview, at: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(handle, rest, at)
        rest, at = rest[count:], at + count
