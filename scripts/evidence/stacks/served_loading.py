"""vLLM's own models, configs and weight loaders on a CPU: they read folders that `convert --quantization` wrote, and every parameter is compared with the file.

`VLLM_SOURCE=FOLDER python scripts/evidence/stacks/served_loading.py [MODEL ...]` writes the rows of scripts/evidence/data/served.json. FOLDER is a checkout or unpacked wheel of
vLLM, which stands first on PYTHONPATH with its Python requirements, because vLLM looks at models in a process of its own. Only the choice of kernels is replaced,
since none runs here; what a kernel does to weights after loading is not part of the comparison. The same models tell which modules vLLM keeps in high precision
by the folder's list.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import torch
from safetensors.torch import load_file
from served_data import record, vllm

from mpbridge.settings.huggingface.served import FORMATS, ServedFormat
from tests.training.serving import models
from tests.training.serving.test_mixtures import DEEPSEEK, QWEN3, checkpoint

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3 with experts": {**QWEN3, "num_hidden_layers": 3},
    "DeepSeek-V3": {**DEEPSEEK, "num_hidden_layers": 3, "num_nextn_predict_layers": 0, "topk_method": "noaux_tc"},
    # last: vLLM makes its groups of processes for the first model, those of experts only for one that has some
    "Llama": models.CONFIG,
}
OWN = ("q_scale", "k_scale", "v_scale", "prob_scale", "zero_point", "input_scale", "input_global_scale")
"""Ends of names of parameters for which a folder without static activation scales has no tensor."""
SCALINGS = {"channel": "tensorwise", "blocks": "blockwise", "lines": "mxfp8"}
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""vLLM's fused linears -> the folder's."""


def scaling_of(row: ServedFormat) -> str:
    return "nvfp4" if row.second else SCALINGS[row.layout]


def stand_in() -> None:
    """Replaces the choice of kernels, and nothing else."""
    import vllm.model_executor.kernels.linear as kernels
    from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp8, nvfp4, unquantized

    for name in [name for name in dir(kernels) if name.startswith("init_") and name.endswith("_kernel")]:
        setattr(kernels, name, lambda *args, **kwargs: MagicMock())
    for module in (fp8, mxfp8, nvfp4, unquantized):
        for name in [n for n in dir(module) if n.startswith("select_") and n.endswith("_moe_backend")]:
            setattr(module, name, lambda *args, **kwargs: (MagicMock(), MagicMock()))


_STARTED: list[bool] = []


def built(folder: Path) -> torch.nn.Module:
    """vLLM's model of a folder on the CPU, with its weights through vLLM's loaders."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments: dict[str, Any] = {"enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 64}
    config = EngineArgs(model=str(folder), dtype="bfloat16", **arguments).create_engine_config()
    with set_current_vllm_config(config):
        if not _STARTED:
            rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
            init_distributed_environment(1, 0, distributed_init_method=rendezvous, local_rank=0, backend="gloo")
            initialize_model_parallel(1, 1)
            _STARTED.append(True)
        with set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
            model: Any = initialize_model(vllm_config=config)
        model.load_weights(get_model_loader(config.load_config).get_all_weights(config.model_config, model))
    found: torch.nn.Module = model
    return found


def expected(name: str, file: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """What a parameter of vLLM's should hold: the file's tensors that it fuses, one under another; None: the file has none."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            found = [file.get(name.replace(f".{fused}.", f".{part}.")) for part in parts]
            return (
                None
                if any(t is None for t in found)
                else torch.cat([t.reshape(1) if t.dim() == 0 else t for t in found])
            )  # type: ignore[union-attr]
    base, among, leaf = name.partition(".experts.")
    leaf = leaf.removeprefix("routed_experts.")
    numbers = sorted({int(n.split(".experts.")[1].split(".")[0]) for n in file if n.startswith(f"{base}.experts.")})
    for merged, parts in (("w13_", ("gate_proj", "up_proj")), ("w2_", ("down_proj",))):
        if among and leaf.startswith(merged):
            names = [[f"{base}.experts.{i}.{part}.{leaf.removeprefix(merged)}" for part in parts] for i in numbers]
            if not all(one in file for row in names for one in row):
                return None
            return torch.stack([torch.cat([file[one].reshape(-1) if file[one].dim() < 2 else file[one] for one in row]) for row in names])  # fmt: skip
    return file.get(name)


def compared(model: torch.nn.Module, file: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Number of parameters that are the file's bytes, and those that are not."""
    equal, wrong = 0, []
    for name, parameter in model.named_parameters():
        want, have = expected(name, file), parameter.data
        if want is None:
            wrong += [] if name.endswith(OWN) else [f"{name}: not in the file"]
            continue
        want = want.reshape(have.shape) if want.numel() == have.numel() else want
        if have.shape == want.shape and have.dtype == want.dtype and torch.equal(raw(have), raw(want)):
            equal += 1
        else:
            wrong.append(f"{name}: {have.dtype} {list(have.shape)}, file {want.dtype} {list(want.shape)}")
    return {"equal": equal, "different": wrong}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def kept_by(model: torch.nn.Module) -> tuple[set[str], set[str]]:
    """(modules that vLLM built in high precision, quantized), of those that a quantization method decides."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    high, low = set(), set()
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or not (isinstance(module, LinearBase | ParallelLMHead) or ".experts" in name):
            continue
        plain = type(method).__name__.startswith("Unquantized")
        (high if plain else low).add(name.partition(".experts.")[0] + (".experts" if ".experts." in name else ""))
    return high, low


def meant(kept: list[str]) -> set[str]:
    """The engine's modules that a list of full names stands for."""
    found = set()
    for name in kept:
        stem, _, last = name.rpartition(".")
        fused = next((whole for whole, parts in FUSED.items() if last in parts), last)
        found.add(f"{stem}.{fused}" if stem else fused)
    return found


def folders(root: Path, wanted: set[str]) -> Iterator[tuple[str, ServedFormat, Path | str]]:
    """(model, format, folder or why there is none), from the weights of one checkpoint for each model."""
    from mpbridge.common.errors import MpbridgeError

    for name, config in CONFIGS.items():
        if wanted and name not in wanted:
            continue
        place = root / name.split("-")[0].split()[0].lower()
        place.mkdir()
        path = models.checkpoint(place) if name == "Llama" else checkpoint(dict(config), place)
        for row in FORMATS:
            if "vllm" not in row.engines:
                continue
            scaling = scaling_of(row)
            try:
                yield (
                    name,
                    row,
                    models.serve(path, place / row.name.replace(" ", "-"), row.method, models.RECIPES[scaling]),
                )
            except MpbridgeError as error:
                reason = str(error).partition(": ")[2].partition(" (")[0].partition("; ")[0]
                yield name, row, re.sub(r"model\.layers\.\d+\.", "", reason)


def loaded(folder: Path, row: ServedFormat) -> dict[str, Any]:
    """What vLLM makes of a folder: its parameters beside the file's tensors, and its list."""
    kept = json.loads((folder / "config.json").read_text())["quantization_config"][row.kept]
    try:
        model = built(folder)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    high, low = kept_by(model)
    wanted = {one for one in meant(kept) if one in high | low}
    return {**compared(model, load_file(folder / "model.safetensors")), "list": sorted(high ^ wanted)}


def main() -> None:
    warnings.filterwarnings("ignore")
    release = vllm()
    if not release:
        raise SystemExit(
            "VLLM_SOURCE names no folder with vLLM's Python files: expected a checkout, or an unpacked wheel"
        )
    stand_in()
    logging.disable(logging.ERROR)
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for name, row, folder in folders(Path(root), set(sys.argv[1:])):
            result: dict[str, Any] = {"model": name, "format": row.name}
            if isinstance(folder, str):
                result["refused"] = f"not written: {folder}"
            elif "vllm" not in row.read_by(load_file(folder / "model.safetensors")):
                result["refused"] = "not read: one scale per tensor for sets of experts, as contract --engine vllm says"
            else:
                result |= loaded(folder, row)
            rows.append(result)
            print(json.dumps(result), flush=True)
    if not sys.argv[1:]:
        record(loading={"release": release, "rows": rows})


if __name__ == "__main__":
    main()
