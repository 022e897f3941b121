"""Uses NeMo AutoModel's own parser to verify `export --to automodel` and `import --from automodel`.

    python scripts/evidence/stacks/automodel.py CHECKOUT

Its distributed section parser, its diffusion recipe's use of the sections fsdp and ddp, dtype words and FSDP2/Megatron-FSDP/DDP configs are real; no model is loaded. Every example YAML is imported
and compared with the configs that result there, and every export is parsed there. Exit code 0 if all are equal. Needs torch and PyYAML.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))


def prepare(checkout: Path) -> tuple[Any, Any]:
    """(strategy_of, dtype): a file's strategy as its recipe's parser has it, and its reader of dtype words."""
    logging.disable(logging.WARNING)
    sys.path.insert(0, str(checkout))
    from nemo_automodel.shared.utils import dtype_from_str

    path = checkout / "nemo_automodel" / "recipes" / "_dist_utils.py"
    spec = importlib.util.spec_from_file_location("am_dist_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    diffusion = diffusion_arguments(checkout, module.parse_distributed_section, dtype_from_str)

    def strategy_of(data: dict[str, Any]) -> Any:
        if "distributed" in data or not {"fsdp", "ddp", "flow_matching"} & data.keys():
            return getattr(
                module.parse_distributed_section(dict(data.get("distributed") or {}))["strategy_config"],
                "mp_policy",
                None,
            )
        model = data.get("model") or {}
        made = diffusion(
            fsdp_cfg=data.get("fsdp"), ddp_cfg=data.get("ddp"), world_size=8, lora_enabled="peft" in data,
            dtype=dtype_from_str(model.get("torch_dtype")), compute_dtype=dtype_from_str(model.get("compute_dtype")),
        )  # fmt: skip
        return made.get("mp_policy")

    return strategy_of, dtype_from_str


def diffusion_arguments(checkout: Path, parse: Any, dtype: Any) -> Any:
    """The function by which its diffusion recipe reads the sections fsdp and ddp, without that module's imports (diffusers)."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    name = "_build_diffusion_parallel_manager_args"
    source = (checkout / "nemo_automodel/recipes/diffusion/train.py").read_text(encoding="utf-8")
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    names: dict[str, Any] = {
        "torch": torch, "Dict": dict, "Any": Any, "CPUOffloadPolicy": CPUOffloadPolicy, "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "parse_distributed_section": parse, "dtype_from_str": dtype,
    }  # fmt: skip
    exec(compile(ast.Module(body=list(found), type_ignores=[]), name, "exec"), names)
    return names[name]


def theirs(data: dict[str, Any], strategy_of: Any, dtype: Any) -> dict[str, str | None]:
    """Storage, compute and reduction according to their classes."""
    model = data.get("model") or {}
    word = model.get("torch_dtype", model.get("dtype"))
    policy = strategy_of(data)
    facts: dict[str, str | None] = {"storage": None if word in (None, "auto") else str(dtype(word))}
    if policy is not None:
        facts |= {"compute": str(policy.param_dtype), "wire": str(policy.reduce_dtype)}
    return facts


def differs(imported: Any, facts: dict[str, str | None]) -> dict[str, tuple[str, str]]:
    """Facts that our reading has differently; there, a reduction of None is the compute dtype."""
    found = {}
    for name, value in facts.items():
        if value in (None, "None"):
            continue
        mine = f"torch.{getattr(imported.meaning, name).value}"
        if mine != value:
            found[name] = (mine, value)
    return found


def main() -> int:
    """The command line of this script."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("checkout", type=Path)
    args = arguments.parse_args()
    strategy_of, dtype = prepare(args.checkout)
    said, meant = exports_agree(strategy_of, dtype)
    print(f"exports parsed there: {said}, as intended: {meant}")
    imported, compared, alike = examples_agree(args.checkout, strategy_of, dtype)
    print(f"example files imported: {imported}; compared with the parser: {compared}; read alike: {alike}")
    return 0 if said == meant and compared == alike else 1


def exports_agree(strategy_of: Any, dtype: Any) -> tuple[int, int]:
    """Number of recipes exported and parsed there, and of those parsed as intended."""
    import yaml

    from mpbridge import recipes
    from mpbridge.interop.stacks.exporters import export

    said = meant = 0
    for name in recipes:
        made = export(name, "automodel")
        facts = theirs(yaml.safe_load(made.pieces[0].text), strategy_of, dtype)
        bad = {k: v for k, v in facts.items() if v and v != f"torch.{getattr(made.meaning, k).value}"}
        meant, said = meant + (not bad), said + 1
        if bad:
            print(f"export {name}: parsed as {bad}")
    return said, meant


def examples_agree(checkout: Path, strategy_of: Any, dtype: Any) -> tuple[int, int, int]:
    """Number of example files imported, of those that its parser accepts, and of those read alike."""
    import yaml

    from mpbridge.common.errors import MpbridgeError
    from mpbridge.interop.stacks.importers import read_text

    imported = compared = alike = 0
    for path in sorted((checkout / "examples").rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if not isinstance(data, dict):
            continue
        try:
            mine = read_text(text, stack="automodel", name=path.name)
            imported += 1
        except MpbridgeError as error:
            print(f"{path.name}: {error}")
            continue
        try:
            facts = theirs(data, strategy_of, dtype)
        except Exception as error:  # there is nothing to compare with if their own parser refuses a file
            print(f"{path.name}: its own parser: {type(error).__name__}: {str(error)[:100]}")
            continue
        compared += 1
        bad = differs(mine, facts)
        alike += not bad
        if bad:
            print(f"{path.name}: {bad}")
    return imported, compared, alike


if __name__ == "__main__":
    raise SystemExit(main())
