"""Uses torchtitan's own configuration class to verify `export --to torchtitan` and `import --from torchtitan`.

    python scripts/stacks/torchtitan.py CHECKOUT

The `--training.*` arguments of every export are parsed into its TrainingConfig by tyro, as its ConfigManager does, and values that its literals refuse
must be those that the import names as contradictions. Needs torch and tyro.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def training_config(checkout: Path) -> type:
    """Its TrainingConfig, loaded from its file, because the package around it imports data loaders."""
    spec = importlib.util.spec_from_file_location(
        "torchtitan_configs", checkout / "torchtitan" / "config" / "configs.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: type = module.TrainingConfig
    return found


def parsed(config: type, words: list[str]) -> Any:
    """Its TrainingConfig from the `--training.*` arguments, or its error message."""
    import tyro

    pairs = zip(words[::2], words[1::2], strict=True)
    mine = [part for name, value in pairs if name.startswith("--training.") for part in (f"--{name[11:]}", value)]
    log = io.StringIO()
    try:
        with contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
            return tyro.cli(
                config, args=[*mine, "--num_tokens_per_microbatch_per_dp_rank", "64", "--max_context_length", "64"]
            )
    except SystemExit:
        return " ".join(log.getvalue().split())[-200:]


def main() -> int:
    """The command line of this script."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("checkout", type=Path)
    args = arguments.parse_args()
    config = training_config(args.checkout.resolve())
    from mpbridge import recipes
    from mpbridge.stacks.exporters import export
    from mpbridge.stacks.importers import read_args

    wrong = said = 0
    for name in recipes:
        made = export(name, "torchtitan")
        if made.fidelity == "impossible":
            continue
        said += 1
        text = made.pieces[0].text.replace("\\\n", " ")
        got, meant = parsed(config, shlex.split(text)), made.meaning
        back = read_args(text, stack="torchtitan").meaning
        wanted = (meant.storage.value, meant.compute.value, meant.wire.value)
        found = got if isinstance(got, str) else (got.dtype, got.mixed_precision_param, got.mixed_precision_reduce)
        if found != wanted or (back.storage, back.compute, back.wire) != (meant.storage, meant.compute, meant.wire):
            print(f"{name}: parsed as {found}, intended {wanted}")
            wrong += 1
    traps = [
        "--training.mixed_precision_reduce bfloat16",
        "--training.dtype float16",
        "--training.mixed_precision_param float16",
    ]
    agreed = sum(
        isinstance(parsed(config, shlex.split(trap)), str) and bool(read_args(trap, stack="torchtitan").contradicts)
        for trap in traps
    )
    print(
        f"exports parsed there: {said}, as intended: {said - wrong}; refused there and named by import: {agreed} of {len(traps)}"
    )
    return 0 if not wrong and agreed == len(traps) else 1


if __name__ == "__main__":
    raise SystemExit(main())
