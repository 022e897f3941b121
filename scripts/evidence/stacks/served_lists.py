"""Which modules engines keep in high precision by a list of names: their own matchers, beside what `contract --engine` says that they do.

`VLLM_SOURCE=FOLDER SGLANG_SOURCE=FOLDER python scripts/evidence/stacks/served_lists.py` writes the rows of scripts/evidence/data/served.json. Each folder is a checkout or unpacked
wheel; vLLM's Python requirements are needed, SGLang's are not: its matchers are taken from their files and run alone.

The modules are those of full-sized models: Llama, Qwen3 with experts, DeepSeek-V3, and a hybrid of linear and full attention as Qwen3-Next has it. For each the
list is the one that `convert` writes, full names of what stays in high precision; then lists as other tools write them.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, List, Optional  # noqa: UP035  (SGLang's annotations)

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from served_data import record, vllm

from mpbridge.settings.huggingface.kept import fused, list_faults

PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}
"""What the engines' models say of their fused linears (packed_modules_mapping; vLLM's deepseek_v2.py, llama.py)."""
Matcher = Callable[[Sequence[str], str], bool]
"""(list, the engine's name of a module): whether it is kept in high precision. ValueError: the engine refuses the list."""


def modules(name: str) -> dict[str, bool]:
    """Full name of every linear in the folder of a full-sized model -> whether a recipe that quantizes all of a layer's linears quantizes it."""
    found = {"lm_head": False}

    def add(stem: str, *parts: str, low: bool = True) -> None:
        found.update({f"{stem}.{part}": low for part in parts})

    layers, experts = {"Llama": (32, 0), "Qwen3 with experts": (48, 128), "DeepSeek-V3": (61, 256), "hybrid": (48, 512)}[name]
    mlp = ("gate_proj", "up_proj", "down_proj")
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        if name == "DeepSeek-V3":
            add(f"{stem}.self_attn", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
        elif name == "hybrid" and layer % 4 != 3:
            add(f"{stem}.linear_attn", "in_proj_qkvz", "out_proj")
            add(f"{stem}.linear_attn", "in_proj_ba", low=False)
        else:
            add(f"{stem}.self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
        if not experts or (name == "DeepSeek-V3" and layer < 3):
            add(f"{stem}.mlp", *mlp)
            continue
        add(f"{stem}.mlp", "gate", low=False)
        # one expert stands for all: engines decide about a layer's experts as a whole
        add(f"{stem}.mlp.experts.0", *mlp)
        if name == "DeepSeek-V3":
            add(f"{stem}.mlp.shared_experts", *mlp)
        if name == "hybrid":
            add(f"{stem}.mlp.shared_expert", *mlp)
            add(f"{stem}.mlp", "shared_expert_gate", low=False)
    return found


def edges(found: Mapping[str, bool]) -> dict[str, bool]:
    """The same with the first and the last layer in high precision."""
    last = max(int(name.split(".")[2]) for name in found if name.startswith("model.layers."))
    ends = (f"model.layers.{0}.", f"model.layers.{last}.")
    return {name: low and not name.startswith(ends) for name, low in found.items()}


def lists(found: Mapping[str, bool]) -> dict[str, tuple[Mapping[str, bool], list[str]]]:
    """Name of a list -> (what the folder stores quantized, the list)."""
    some = next(name for name in found if name.endswith(("q_proj", "q_a_proj", "in_proj_qkvz")))
    group = some.rpartition(".")[0]
    made = {
        "as convert writes it": (found, sorted(name for name, low in found.items() if not low)),
        "as convert writes it, two layers in BF16": (edges(found), sorted(name for name, low in edges(found).items() if not low)),
    }
    kept = made["as convert writes it"][1]
    others = {
        "model.layers.1": ["model.layers.1"], "model.layers.1*": ["model.layers.1*"], "model.layers.1.*": ["model.layers.1.*"],
        "re:.*layers\\.1\\..*": ["re:.*layers\\.1\\..*"], "mlp.gate": ["mlp.gate"], "*mlp.gate": ["*mlp.gate"], "re:.*mlp\\.gate$": ["re:.*mlp\\.gate$"],
        "model.layers.0.mlp.gate": ["model.layers.0.mlp.gate"], "one linear of a fused group": [some], "its whole group": [
            name for name in found if name.startswith(f"{group}.") and fused(name) == fused(some)
        ],
        "a whole module": [group], "all linears": ["Linear"],
    }  # fmt: skip
    return made | {name: (found, [*kept, *extra]) for name, extra in others.items()}


def by_vllm() -> dict[str, Matcher]:
    """quant_method -> vLLM's own rule."""
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    def modelopt(entries: Sequence[str], prefix: str) -> bool:
        config: Any = ModelOptMxFp8Config.from_config({"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": [*entries]})
        config.packed_modules_mapping = PACKED
        return bool(config.is_layer_excluded(prefix))

    def fp8(entries: Sequence[str], prefix: str) -> bool:
        config: Any = Fp8Config.from_config(
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": [*entries]}
        )
        return bool(is_layer_skipped(prefix, config.ignored_layers, PACKED))

    def compressed(entries: Sequence[str], prefix: str) -> bool:
        return bool(should_ignore_layer(prefix, [*entries], PACKED))

    return {"modelopt": modelopt, "fp8": fp8, "compressed-tensors": compressed}


def taken(path: Path, *names: str) -> SimpleNamespace:
    """Functions and constants of a source file, run without the rest of it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted: list[Any] = []  # a class's methods too
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            wanted.append(node)
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        wanted += [node] if any(getattr(target, "id", None) in names for target in targets) else []
    for node in wanted:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    given = {"re": re, "Iterable": Iterable, "Mapping": Mapping, "MappingProxyType": MappingProxyType, "List": List, "Optional": Optional}
    space: dict[str, Any] = dict(given)
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(body=[*future, *wanted], type_ignores=[]), str(path), "exec"), space)
    return SimpleNamespace(**space)


def by_sglang(root: Path) -> dict[str, Matcher]:
    """quant_method -> SGLang's own rule."""
    folder = root / "sglang" / "srt" / "layers" / "quantization"
    common = taken(folder / "utils.py", "is_layer_skipped", "_module_path_match", "_FALLBACK_FUSED_SHARDS")
    ct = taken(
        folder / "compressed_tensors" / "utils.py",
        "should_ignore_layer", "check_equal_or_regex_match", "_match_regex", "_is_equal_or_regex_match",
    )  # fmt: skip
    excluded = taken(folder / "modelopt_quant.py", "is_layer_excluded", "_compile_exclusion_pattern").is_layer_excluded

    def skipped(entries: Sequence[str], prefix: str) -> bool:
        return bool(common.is_layer_skipped(prefix, [*entries], PACKED))

    def modelopt(entries: Sequence[str], prefix: str) -> bool:
        own = bool(excluded(SimpleNamespace(exclude_modules=[*entries], packed_modules_mapping=PACKED), prefix))
        return own or (not prefix.endswith(".experts") and skipped(entries, prefix))

    def compressed(entries: Sequence[str], prefix: str) -> bool:
        return bool(ct.should_ignore_layer(prefix, [*entries], PACKED))

    return {"modelopt": modelopt, "fp8": skipped, "mxfp8": skipped, "compressed-tensors": compressed}


def faulty(matcher: Matcher, entries: Sequence[str], found: Mapping[str, bool]) -> set[str]:
    """The engine's modules that its matcher refuses, or resolves otherwise than the folder stores them."""
    whole: dict[str, list[str]] = {}
    for module in found:
        whole.setdefault(fused(module), []).append(module)
    wrong = set()
    for name, parts in whole.items():
        try:
            if matcher(entries, name) == found[parts[0]]:
                wrong.add(name)
        except ValueError:
            wrong.add(name)
    return wrong


def said(engine: str, method: str, entries: Sequence[str], found: Mapping[str, bool]) -> set[str]:
    """The modules of which `contract --engine` says so."""
    apart = {text for text in list_faults(entries, found, method)}
    return {name for name, text in list_faults(entries, found, method, [engine]) if (name, text) not in apart}


def measured(engines: Mapping[str, Mapping[str, Matcher]]) -> list[dict[str, Any]]:
    rows = []
    for model in ("Llama", "Qwen3 with experts", "DeepSeek-V3", "hybrid"):
        found = modules(model)
        for title, (stored, entries) in lists(found).items():
            for engine, rules in engines.items():
                for method, matcher in rules.items():
                    theirs, ours = faulty(matcher, entries, stored), said(engine, method, entries, stored)
                    row: dict[str, Any] = {"model": model, "list": title, "engine": engine, "method": method, "modules": len({fused(m) for m in stored})}
                    rows.append(row | {"wrong": len(theirs), "other": sorted(theirs ^ ours)[:3], "differ": len(theirs ^ ours)})
    return rows


def main() -> None:
    warnings.filterwarnings("ignore")
    root, release = Path(os.environ.get("SGLANG_SOURCE", "")), vllm()
    if not release or not (root / "sglang" / "srt").is_dir():
        raise SystemExit("VLLM_SOURCE and SGLANG_SOURCE: expected folders with the Python files of vLLM and SGLang")
    logging.disable(logging.ERROR)
    rows = measured({"vllm": by_vllm(), "sglang": by_sglang(root)})
    own = [row for row in rows if row["list"].startswith("as convert")]
    print(f"convert's lists: {len(own)}, resolved to exactly the modules in high precision: {sum(not row['wrong'] for row in own)}")
    print(f"lists: {len(rows)}, of which contract says what the engine does: {sum(not row['differ'] for row in rows)}")
    for row in rows:
        if row["differ"] or (row in own and row["wrong"]):
            print(row)
    record(lists={"releases": {"vllm": release, "sglang": sglang_release(root)}, "rows": rows})


def sglang_release(root: Path) -> str:
    """The release that the sources' metadata name."""
    names = [path.name for path in root.glob("sglang-*.dist-info")]
    return names[0].removeprefix("sglang-").removesuffix(".dist-info") if names else "of a checkout"


if __name__ == "__main__":
    main()
