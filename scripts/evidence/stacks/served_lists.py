"""Which modules engines keep in high precision by a list of names: their own matchers, beside what `contract --engine` says that they do.

`VLLM_SOURCE=FOLDER SGLANG_SOURCE=FOLDER python scripts/evidence/stacks/served_lists.py` writes the rows of scripts/evidence/data/served.json. Each folder is a checkout or unpacked
wheel; neither's requirements are needed: the matchers are taken from their files and run alone.

The modules are those of full-sized models: Llama, Qwen3 with experts, DeepSeek-V3, and a hybrid of linear and full attention as Qwen3-Next has it. For each the
list is the one that `convert` writes, full names of what stays in high precision; then lists as other tools write them.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, Optional

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from served_data import record, version

from mpbridge.settings.huggingface.kept import full_names, fused, list_faults

PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}
"""What the engines' models say of their fused linears (packed_modules_mapping; vLLM's deepseek_v2.py, llama.py)."""
LATENT = "fused_qkv_a_proj_with_mqa"
"""SGLang's name of vLLM's fused_qkv_a_proj."""
EXPERT = tuple(f".0.{part}_proj" for part in ("gate", "up", "down"))
"""What compressed-tensors' configs in both engines look up for a set of experts (get_moe_method, get_moe_scheme)."""
Matcher = Callable[[Sequence[str], str], bool]
"""(list, the engine's name of a module): whether it is kept in high precision. ValueError: the engine refuses the list."""


def modules(name: str) -> dict[str, bool]:
    """Full name of every linear in the folder of a full-sized model -> whether a recipe that quantizes all of a layer's linears quantizes it."""
    found = {"lm_head": False}

    def add(stem: str, *parts: str, low: bool = True) -> None:
        found.update({f"{stem}.{part}": low for part in parts})

    layers, experts = {
        "Llama": (32, 0),
        "Qwen3 with experts": (48, 128),
        "DeepSeek-V3": (61, 256),
        "hybrid": (48, 512),
    }[name]
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

    made = {}
    for title, stored in (
        ("as convert writes it", found),
        ("as convert writes it, first and last layer in BF16", edges(found)),
    ):
        made[title] = stored, full_names(name for name, low in stored.items() if not low)
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


def looked_up(prefix: str) -> list[str]:
    return [prefix + part for part in EXPERT] if prefix.endswith(".experts") else [prefix]


def alike(hits: Iterable[object]) -> bool:
    found = {bool(hit) for hit in hits}
    if len(found) > 1:
        raise ValueError("some of the experts' projections are listed")
    return found.pop()


def taken(path: Path, *names: str, **others: Any) -> SimpleNamespace:
    """Functions and constants of a source file, run without the rest of it. others: what they import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted: list[Any] = []  # a class's methods too
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            wanted.append(node)
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        wanted += [node] if any(getattr(target, "id", None) in names for target in targets) else []
    for node in wanted:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    given = {
        "Iterable": Iterable,
        "Mapping": Mapping,
        "MappingProxyType": MappingProxyType,
        "Optional": Optional,
        "Literal": Literal,
    }
    space: dict[str, Any] = given | {"re": re, "fnmatch": fnmatch, "List": list} | others
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(body=[*future, *wanted], type_ignores=[]), str(path), "exec"), space)
    return SimpleNamespace(**space)


def by_vllm(root: Path) -> dict[str, Matcher]:
    """quant_method -> vLLM's own rule."""
    folder = root / "vllm" / "model_executor" / "layers" / "quantization"
    skipped = taken(folder / "utils" / "quant_utils.py", "is_layer_skipped").is_layer_skipped
    match = taken(folder / "utils" / "config_utils.py", "find_matching_patterns", "is_equal_or_regex_match")
    ct = taken(
        folder / "compressed_tensors" / "utils.py",
        "should_ignore_layer",
        find_matching_patterns=match.find_matching_patterns,
    )
    excluded = taken(folder / "modelopt.py", "is_layer_excluded", is_layer_skipped=skipped).is_layer_excluded

    def modelopt(entries: Sequence[str], prefix: str) -> bool:
        return bool(excluded(SimpleNamespace(exclude_modules=[*entries], packed_modules_mapping=PACKED), prefix))

    def fp8(entries: Sequence[str], prefix: str) -> bool:
        return bool(skipped(prefix, [*entries], PACKED))

    def compressed(entries: Sequence[str], prefix: str) -> bool:
        return alike(ct.should_ignore_layer(name, [*entries], PACKED) for name in looked_up(prefix))

    return {"modelopt": modelopt, "fp8": fp8, "compressed-tensors": compressed}


def by_sglang(root: Path) -> dict[str, Matcher]:
    """quant_method -> SGLang's own rule."""
    folder = root / "sglang" / "srt" / "layers" / "quantization"
    common = taken(folder / "utils.py", "is_layer_skipped", "_module_path_match", "_FALLBACK_FUSED_SHARDS")
    ct = taken(
        folder / "compressed_tensors" / "utils.py",
        "should_ignore_layer", "check_equal_or_regex_match", "_match_regex", "_is_equal_or_regex_match",
    )  # fmt: skip
    excluded = taken(folder / "modelopt_quant.py", "is_layer_excluded", "_compile_exclusion_pattern").is_layer_excluded

    packed = {**PACKED, LATENT: PACKED["fused_qkv_a_proj"]}

    def skipped(entries: Sequence[str], prefix: str) -> bool:
        return bool(common.is_layer_skipped(prefix, [*entries], packed))

    def modelopt(entries: Sequence[str], prefix: str) -> bool:
        own = bool(excluded(SimpleNamespace(exclude_modules=[*entries], packed_modules_mapping=packed), prefix))
        return own or (not prefix.endswith(".experts") and skipped(entries, prefix))

    def compressed(entries: Sequence[str], prefix: str) -> bool:
        return alike(ct.should_ignore_layer(name, [*entries], packed) for name in looked_up(prefix))

    rules: dict[str, Matcher] = {
        "modelopt": modelopt,
        "fp8": skipped,
        "mxfp8": skipped,
        "compressed-tensors": compressed,
    }

    def named(rule: Matcher) -> Matcher:
        return lambda entries, prefix: rule(entries, prefix.replace("fused_qkv_a_proj", LATENT))

    return {method: named(rule) for method, rule in rules.items()}


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
    apart = set(list_faults(entries, found, method))
    return {name for name, text in list_faults(entries, found, method, [engine]) if (name, text) not in apart}


def measured(engines: Mapping[str, Mapping[str, Matcher]]) -> list[dict[str, Any]]:
    rows = []
    for model in ("Llama", "Qwen3 with experts", "DeepSeek-V3", "hybrid"):
        found = modules(model)
        for title, (stored, entries) in lists(found).items():
            for engine, rules in engines.items():
                for method, matcher in rules.items():
                    theirs, ours = faulty(matcher, entries, stored), said(engine, method, entries, stored)
                    row: dict[str, Any] = {
                        "model": model,
                        "list": title,
                        "engine": engine,
                        "method": method,
                        "modules": len({fused(m) for m in stored}),
                    }
                    rows.append(
                        row | {"wrong": len(theirs), "other": sorted(theirs ^ ours)[:3], "differ": len(theirs ^ ours)}
                    )
    return rows


def main() -> None:
    roots = {engine: Path(os.environ.get(f"{engine.upper()}_SOURCE", "")) for engine in ("vllm", "sglang")}
    for engine, root in roots.items():
        if not (root / engine / "__init__.py").is_file():
            raise SystemExit(
                f"{engine.upper()}_SOURCE: expected a folder with {engine}'s Python files, a checkout or an unpacked wheel; got {str(root)!r}"
            )
    rows = measured({"vllm": by_vllm(roots["vllm"]), "sglang": by_sglang(roots["sglang"])})
    own = [row for row in rows if row["list"].startswith("as convert")]
    print(
        f"convert's lists: {len(own)}, resolved to exactly the modules in high precision: {sum(not row['wrong'] for row in own)}"
    )
    print(f"lists: {len(rows)}, of which contract says what the engine does: {sum(not row['differ'] for row in rows)}")
    for row in rows:
        if row["differ"] or (row in own and row["wrong"]):
            print(row)
    record(lists={"releases": {engine: version(root / engine) for engine, root in roots.items()}, "rows": rows})


if __name__ == "__main__":
    main()
