"""Uses Megatron Bridge's own configuration code to verify `export --to megatron-bridge` and its recipes' names.

    python scripts/evidence/stacks/bridge_exports.py CHECKOUT CORE

CHECKOUT: a clone of Megatron Bridge. CORE: a clone of the Megatron-LM that it belongs to. Each exported run_config.yaml is read by Bridge's
instantiate, finalized and set up onto megatron-core's configs by Bridge's MixedPrecisionConfig, and every planned fact is compared, recipe by
recipe; then each of Bridge's own recipes is set up there and, by its name, imported here. Exit code 0 if all facts of exact exports are equal.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))
PARTS = ("model", "optimizer", "ddp")


def configs(classes: tuple[type, type, type]) -> dict[str, Any]:
    """Bridge's deferred configs, as made by a recipe function."""
    model, optimizer, ddp = classes
    return {
        "model": model(num_layers=48, hidden_size=64, num_attention_heads=4),
        "optimizer": optimizer(optimizer="adam", lr=1e-4, use_distributed_optimizer=True),
        "ddp": ddp(use_distributed_optimizer=True),
    }


def set_up(mixed: Any, sections: dict[str, Any], classes: tuple[type, type, type]) -> dict[str, Any]:
    """The three configs after the sections' values, finalize() and setup(), in the order of Bridge's runtime_config_update."""
    made = configs(classes)
    for name in PARTS:
        for field, value in (sections.get(name) or {}).items():
            if not hasattr(made[name], field):
                raise SystemExit(f"{name}.{field}: not a field of Bridge's config")
            setattr(made[name], field, value)
    mixed.finalize()
    mixed.setup(*(made[name] for name in PARTS))
    for name in PARTS:
        made[name].finalize()
    return made


def exports_agree(classes: tuple[type, type, type]) -> bool:
    """Reads every export there; prints a line per recipe; returns whether all exact ones are as planned."""
    import yaml

    from mpbridge import recipes
    from mpbridge.interop.stacks.exporters import export

    read = importlib.import_module("megatron.bridge.utils.instantiate_utils").instantiate
    judge = importlib.import_module("megatron_lm")
    good, total, alike, exact = True, 0, 0, 0
    for name in recipes:
        made = export(name, "megatron-bridge")
        data = yaml.safe_load(made.pieces[0].text)
        try:
            got = set_up(read(data["mixed_precision"]), read({k: data[k] for k in PARTS if k in data}), classes)
        except (ValueError, AssertionError, TypeError) as error:
            print(f"{name}: {made.fidelity}: refused there: {str(error).splitlines()[0][:150]}")
            good = good and made.fidelity != "exact"
            continue
        compared, equal = judge.as_planned(name, got)
        print(f"{name}: {made.fidelity}: planned facts {compared}, equal {equal}")
        if made.fidelity == "exact":
            exact, total, alike = exact + 1, total + compared, alike + equal
    print(f"exact exports: {exact}; planned facts compared: {total}, equal: {alike}")
    return good and total == alike


def names_agree(classes: tuple[type, type, type]) -> None:
    """Compares Bridge's own recipes by name with the import of the name alone; prints differences, with Bridge's values."""
    from mpbridge.interop.stacks.importers import read_data_of
    from mpbridge.interop.stacks.megatron_bridge_import import FIELDS

    theirs = importlib.import_module("megatron.bridge.training.mixed_precision")
    equal = count = 0
    for name in sorted(n for n in theirs.MIXED_PRECISION_RECIPES if "-" not in n):
        said = {field: getattr(theirs.get_mixed_precision_config(name), field) for field in FIELDS}
        said = {field: str(value) if str(value).startswith("torch.") else value for field, value in said.items()}
        by_name, by_value = (read_data_of("megatron-bridge", {"mixed_precision": one}) for one in (name, said))
        count, equal = count + 1, equal + (by_name.meaning == by_value.meaning)
        if by_name.meaning != by_value.meaning:
            print(f"{name}: its name here means {dict(by_name.fields)}, its values there {dict(by_value.fields)}")
    print(f"Bridge's own recipes: {count}, meaning the same by name and by value: {equal}")


def main() -> int:
    """The command line of this script."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("checkout", type=Path)
    arguments.add_argument("core", type=Path)
    args = arguments.parse_args()
    classes = importlib.import_module("megatron_bridge").prepare(args.checkout, args.core, ours=False)
    good = exports_agree(classes)
    names_agree(classes)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
