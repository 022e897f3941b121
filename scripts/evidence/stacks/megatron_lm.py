"""Uses Megatron-LM's own parser to verify `export --to megatron-lm` and `import --from megatron-lm`.

    python scripts/evidence/stacks/megatron_lm.py CHECKOUT            every recipe's flags parsed there, compared with the plan; every example script imported
    python scripts/evidence/stacks/megatron_lm.py CHECKOUT --words    rewrites mpbridge/interop/stacks/data/megatron_lm.json from that parser

CHECKOUT: a clone of Megatron-LM. Needs torch, and triton (any build: it is imported, not used). No GPU, no Transformer Engine: the
two places where its parser checks for them are patched. Exit code 0 if every compared fact is equal.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.machinery
import inspect
import io
import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
import types
import typing
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
MODEL = shlex.split(
    "--num-layers 48 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --train-iters 1 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 128 --mock-data"
)
WIDE = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")


def prepare(checkout: Path) -> Any:
    """Megatron-LM's modules (arguments, training) with answers for what only a GPU could tell."""
    sys.path.insert(0, str(checkout))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if not hasattr(typing, "override"):
        from typing_extensions import override

        typing.override = override
    import megatron.core.utils as utils
    import torch
    from packaging.version import Version

    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=10, minor=0, name="B200")

    class FusedAdam:
        """megatron-core only inspects the names of its arguments."""

        def __init__(
            self, params: Any, lr: float = 1e-3, master_weights: bool = False, master_weight_dtype: Any = None,
            exp_avg_dtype: Any = None, exp_avg_sq_dtype: Any = None, use_decoupled_grad: bool = False,
            store_param_remainders: bool = False,
        ) -> None: ...  # fmt: skip

    for name in WIDE:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    sys.modules[WIDE[-1]].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    utils._te_version = Version("2.11.0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.training import arguments, training
    return types.SimpleNamespace(arguments=arguments, training=training)


def parsed(modules: Any, flags: list[str]) -> dict[str, Any]:
    """{'model': config, 'optimizer': config, 'ddp': config} resulting from these flags, or {'error': text}."""
    log, before = io.StringIO(), sys.argv
    sys.argv = ["pretrain", *MODEL, *flags]
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args = modules.arguments.validate_args(modules.arguments.parse_args())
            model = modules.arguments.core_transformer_config_from_args(args)
            optimizer, _ = modules.training.get_megatron_optimizer_config(args)
            return {"model": model, "optimizer": optimizer, "ddp": ddp_config(modules.training, args)}
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error} {log.getvalue()[-300:]}"}
    finally:
        sys.argv = before


def parsed_as_exported(modules: Any, exported: Any) -> dict[str, Any]:
    """What the arguments of an export give, parsed beside the files that they name."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for piece in exported.pieces[1:]:
            Path(piece.name).write_text(piece.text, encoding="utf-8")
        return parsed(modules, shlex.split(exported.pieces[0].text.replace("\\\n", " ")))


def ddp_config(training: Any, args: Any) -> Any:
    """The DDP config of its training loop; in versions without a function for that, from the statement in get_model that makes one."""
    if hasattr(training, "get_megatron_ddp_config"):
        return training.get_megatron_ddp_config(args)
    (maker,) = ast.parse(inspect.getsource(training.get_model)).body
    makes = [
        node
        for node in ast.walk(maker)
        if isinstance(node, ast.If)
        and any(ast.unparse(one).startswith("ddp_config = ") for one in (*node.body, *node.orelse))
    ]
    names = {**vars(training), "args": args, "config": None, "model": []}
    exec(compile(ast.Module(body=makes[-1:], type_ignores=[]), "get_model", "exec"), names)
    return names["ddp_config"]


def recipes_agree(modules: Any, version: str | None = None) -> tuple[int, int]:
    """Number of facts compared and of equal ones, over all recipes that can be expressed; prints each difference."""
    from mpbridge import recipes
    from mpbridge.interop.stacks.exporters import export

    compared = equal = said = 0
    for name in recipes:
        exported = export(name, "megatron-lm", version=version)
        if exported.fidelity == "impossible" or recipes[name].engine == "fsdp2":
            print(f"{name}: {exported.fidelity}: not compared")
            continue
        got = parsed_as_exported(modules, exported)
        if "error" in got:
            print(f"{name}: REFUSED {got['error']}")
            compared += 1
            continue
        said += 1
        more, alike = as_planned(name, got)
        # no recipe states it, and the parser's default is not the class's: the export keeps the value that runs here
        softmax = got["model"].attention_softmax_in_fp32 == type(got["model"]).attention_softmax_in_fp32
        if not softmax:
            print(f"{name}: attention_softmax_in_fp32: {got['model'].attention_softmax_in_fp32} there")
        compared, equal = compared + more + 1, equal + alike + softmax
    print(f"recipes expressed: {said}; planned facts compared: {compared}, equal: {equal}")
    return compared, equal


def as_planned(name: str, got: dict[str, Any]) -> tuple[int, int]:
    """Planned facts of a recipe in the configs `got` (model, optimizer, ddp), and the number of equal ones; prints each difference."""
    from mpbridge import get_mixed_precision_config, recipes, resolve

    return policy_as_planned(name, resolve(get_mixed_precision_config(name)), recipes[name].engine, got)


def policy_as_planned(name: str, policy: Any, engine: str | None, got: dict[str, Any]) -> tuple[int, int]:
    """The same for a policy on an engine; rules by module are checked with megatron-core's matcher, linear by linear."""
    from mpbridge import plan
    from mpbridge.common.formats import say

    compared = equal = 0
    ddp = {"use_megatron_fsdp": True} if engine == "megatron_fsdp" else {}
    for write in plan(policy, model={}, optimizer={}, ddp=ddp).writes:
        if write.field == "quant_recipe":
            more, alike = rules_alike(name, policy, got["model"].quant_recipe)
            compared, equal = compared + more, equal + alike
            continue
        if not hasattr(got[write.target], write.field):
            print(f"{name}: {write.name}: not in this megatron-core")
            continue
        there = getattr(got[write.target], write.field)
        compared += 1
        equal += say(there) == say(write.after)
        if say(there) != say(write.after):
            print(f"{name}: {write.name}: planned {say(write.after)}, found {say(there)}")
    return compared, equal


LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def rules_alike(name: str, policy: Any, recipe: Any) -> tuple[int, int]:
    """Number of linears compared, and of those whose scaling, by the file or by the autocast around their block, matches the policy."""
    from megatron.core.quantization.quant_config import MatchContext

    compared = equal = 0
    for layer in range(LAYERS):
        block = policy.quant if policy.quant is not None and layer not in policy.bf16_layers(LAYERS) else None
        for module in LINEARS:
            found = recipe and recipe.match(MatchContext(f"decoder.layers.{layer}.{module}", None))
            there = block and block.row.core
            if found is not None and (
                block is not None or found.config["training_recipe"].get("override_nonquantized_autocast")
            ):
                own = found.config["training_recipe"]
                there = own.get("fp8_quantization_recipe") or own.get("fp4_quantization_recipe")
            wanted = policy.at(module, layer, LAYERS)
            compared += 1
            equal += there == (wanted and wanted.row.core)
            if there != (wanted and wanted.row.core):
                print(f"{name}: layer {layer} {module}: planned {wanted and wanted.row.core}, found {there}")
    return compared, equal


LAYERS = 48
RUNS: dict[str, dict[str, Any]] = {
    "model facts": {
        "recipe": "bf16_mixed", "grad_reduce_in_fp32": False, "fp32_residual_connection": True, "moe_router_dtype": "fp32",
        "attention_softmax_in_fp32": False,
    },
    "rules and ends": {
        "recipe": "bf16_with_fp8_current_scaling_mixed", "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 3,
        "modules": {"mlp.linear_fc2": "bf16", "self_attention.*": {"layers": "last 6", "precision": "bf16"}},
    },
    "rules in bf16": {"recipe": "bf16_mixed", "modules": {"mlp.*": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}}},
    "loss scale": {"recipe": "fp16_mixed", "initial_loss_scale": 65536.0, "min_loss_scale": 2.0, "loss_scale_window": 500, "hysteresis": 3},
    "static scale": {"recipe": "fp16_mixed", "loss_scale": 1024.0},
    "delayed in detail": {
        "recipe": "bf16_with_fp8_delayed_scaling_mixed", "fp8": "e4m3", "fp8_amax_history_len": 16, "fp8_margin": 1,
        "fp8_amax_compute_algo": "most_recent", "fp8_wgrad": False,
    },
    "fp8 moments": {"recipe": "bf16_mixed_bf16_moments", "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"},
    "two wires": {"recipe": "bf16_megatron_fsdp", "grad_reduce_in_fp32": False, "grad_accumulation_dtype": "fp32"},
}  # fmt: skip
"""Additions to recipes, as in a run's configuration."""


def runs_agree(modules: Any) -> tuple[int, int]:
    """Number of facts compared and of equal ones, over exports of configured runs."""
    from mpbridge import ConfigContainer, recipes
    from mpbridge.interop.stacks.exporters import export

    compared = equal = 0
    model = {"num_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
    for name, fields in RUNS.items():
        engine = recipes[fields["recipe"]].engine
        container = ConfigContainer(mixed_precision=fields, model=model, data={"seq_length": 32})
        if engine:
            container.engine = engine
        run = container.resolved(1, training=False)
        made = export(fields["recipe"], "megatron-lm", run=run)
        got = parsed_as_exported(modules, made)
        if "error" in got:
            print(f"{name}: {made.fidelity}: REFUSED {got['error']}")
            compared += 1
            continue
        more, alike = policy_as_planned(name, run.policy, engine, got)
        print(f"run {name!r}: {made.fidelity}: facts {more}, equal {alike}")
        compared, equal = compared + more, equal + alike
    print(f"configured runs: {len(RUNS)}; facts compared: {compared}, equal: {equal}")
    return compared, equal


READ = (
    "bf16",
    "fp16",
    "fp8",
    "fp4",
    "fp32_residual_connection",
    "first_last_layers_bf16",
    "use_precision_aware_optimizer",
    "fp8_param_gather",
)
"""Names in its namespace that a script decides; the reduction is compared separately, since validate_args decides it."""


def namespace(modules: Any, words: list[str]) -> Any:
    """How its own parser reads a command line, ignoring options of the program itself; None if it refuses it."""
    before, log = sys.argv, io.StringIO()
    sys.argv = ["pretrain", *words]
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            return modules.arguments.parse_args(ignore_unknown_args=True)
    except (Exception, SystemExit):
        return None
    finally:
        sys.argv = before


def examples_agree(modules: Any, checkout: Path) -> tuple[int, int, int]:
    """Number of example scripts imported, of those started by bash whose words its parser accepts, and of those read alike.

    The words are bash's (real_bash.py), not ours: what is compared is our reading of the file with its parser's reading of what bash started.
    """
    from mpbridge.common.errors import DataError
    from mpbridge.interop.stacks.importers import read_file

    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import real_bash

    imported = compared = equal = 0
    with tempfile.TemporaryDirectory() as place:
        work = Path(place).resolve()
        shutil.copytree(checkout / "examples", work / "copy" / "examples", symlinks=True)
        for path in sorted((work / "copy").rglob("*.sh")):
            env = real_bash.given(path, dict(real_bash.MORE.get(path.parent.name, {})))
            try:
                ours = read_file(path, stack="megatron-lm", env=env)
            except DataError as error:  # a file with only variables has no options
                print(f"{path.name}: refused: {error}")
                continue
            imported += 1
            verdict, words, _ = real_bash.compared(path, env, work)
            started = verdict.endswith("alike")
            args = namespace(modules, words) if started else None
            if args is None:
                print(
                    f"{path.name}: not compared: {'its parser refuses the values given here' if started else verdict}"
                )
                continue
            compared += 1
            wrong = read_differently(ours, args)
            equal += not wrong
            if wrong:
                print(f"{path.name}: read as {wrong}")
    print(
        f"example scripts imported: {imported}; started by bash and parsed by its parser: {compared}; read alike: {equal}"
    )
    return imported, compared, equal


SWITCHES = {"use_megatron_fsdp": "megatron_fsdp", "use_torch_fsdp2": "fsdp2"}
"""Flag that selects another engine -> that engine here."""


def read_differently(ours: Any, args: Any) -> dict[str, tuple[Any, Any]]:
    """Name -> (our reading of the file, its parser's), for all that differ."""
    from mpbridge.interop.stacks.optimizers import optimizer_named

    fields = {**ours.fields, "fp8_param_gather": ours.fields.get("fp8_param", False)}
    there = {name: getattr(args, name) for name in READ if hasattr(args, name)}
    pairs = {name: (fields.get(name) or None, value or None) for name, value in there.items()}
    engine = next((mine for theirs, mine in SWITCHES.items() if getattr(args, theirs)), "mcore")
    pairs["engine"] = (ours.engine, engine)
    optimizer = optimizer_named(args.optimizer, momentum=bool(args.sgd_momentum))
    pairs["optimizer"] = (ours.meaning.optimizer.name, optimizer.name)
    if engine == "mcore":
        pairs["reduction"] = (bool(fields["grad_reduce_in_fp32"]), reduces_in_fp32(args))
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def reduces_in_fp32(args: Any) -> bool:
    """The reduction's dtype according to validate_args."""
    if args.bf16 and args.grad_reduce_in_bf16:
        return False
    return bool(
        args.accumulate_allreduce_grads_in_fp32
        or (args.bf16 and str(args.main_grads_dtype) in ("fp32", "torch.float32"))
    )


def write_words(modules: Any, version: str | None) -> None:
    """The options of that parser, how many values each takes and which, of those that are read here; for an earlier version, what it lacks and what differs."""
    from mpbridge.interop.stacks.megatron_lm_arguments import VALUES

    parser = modules.arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found = {
        option: 0 if action.nargs == 0 else 1 if action.nargs is None else action.nargs
        for action in parser._actions
        for option in action.option_strings
    }
    choices = {
        option: " ".join(str(one) for one in action.choices if one is not None)
        for action in parser._actions
        for option in action.option_strings
        if action.choices and option in VALUES
    }
    path = ROOT / "mpbridge/interop/stacks/data/megatron_lm.json"
    data = json.loads(path.read_text())
    if version is None:
        data |= {"options": found, "choices": choices}
    else:
        new = data["options"]
        other = {name: arity for name, arity in found.items() if new.get(name) != arity}
        data["older"][version] = {
            "lacks": sorted(new.keys() - found.keys()),
            "has": other,
            "choices": {option: words for option, words in choices.items() if data["choices"].get(option) != words},
        }
    path.write_text(json.dumps(data, indent=0, sort_keys=True))
    print(f"{len(found)} options written")


def main() -> int:
    """The command line of this script."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("checkout", type=Path)
    arguments.add_argument("--recipes", action="store_true", help="only verify the exports, no example scripts")
    arguments.add_argument("--examples", action="store_true", help="only verify the example scripts, no exports")
    arguments.add_argument("--words", action="store_true", help="rewrite the list of options")
    arguments.add_argument(
        "--stack-version", metavar="V", help="version of an earlier CHECKOUT: its flags and options, no configured runs"
    )
    args = arguments.parse_args()
    modules = prepare(args.checkout)
    logging.disable(logging.INFO)  # megatron-core reports every match
    if args.words:
        write_words(modules, args.stack_version)
        return 0
    if args.stack_version:
        compared, equal = recipes_agree(modules, args.stack_version)
        return 0 if compared == equal else 1
    compared = equal = told = alike = 0
    if not args.examples:
        compared, equal = (a + b for a, b in zip(recipes_agree(modules), runs_agree(modules), strict=True))
    if not args.recipes:
        _, told, alike = examples_agree(modules, args.checkout)
    return 0 if compared == equal and told == alike else 1


if __name__ == "__main__":
    raise SystemExit(main())
