"""What each recipe writes, and what each error says, pinned word for word. `python tests/precision/sync/test_goldens.py` rewrites both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpbridge import MixedPrecisionConfig, get_mixed_precision_config, plan, resolve
from mpbridge.common.errors import MpbridgeError
from mpbridge.precision.recipes import BUILT_IN

FOLDER = Path(__file__).parents[2] / "golden"
ERRORS = FOLDER / "errors.json"
NAMES = [entry.name for entry in BUILT_IN]

AUTHOR: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 32, "bf16": False, "moe_router_dtype": "torch.float32", "activation_func_fp8_input_store": True},
    "optimizer": {"lr": 3e-4, "bf16": False, "loss_scale": 128, "initial_loss_scale": 65536.0, "exp_avg_dtype": "fp16"},
    "ddp": {"grad_reduce_in_fp32": False, "check_for_nan_in_grad": True, "reduce_scatter_with_fp32_accumulation": True},
}  # fmt: skip
"""An author who has said things that recipes decide, as people do (the neighbour's guide sets bf16=False by hand)."""
ORIGIN = {"ddp.grad_reduce_in_fp32": "command line"}


def text(name: str) -> str:
    policy = resolve(get_mixed_precision_config(name), layers=32)
    here = "tests/precision/sync/test_goldens.py"
    parts = [f"# what {name} writes over the inputs of {here}; rewritten by: python {here}"]
    for realization in ("native", "emulated") if policy.quantized else ("native",):
        parts += [f"\n[{realization}]", str(plan(policy, **AUTHOR, origin=ORIGIN, realization=realization))]  # type: ignore[arg-type]
    return "\n".join(parts) + "\n"


CASES: dict[str, Callable[[], Any]] = {
    "unknown recipe, near": lambda: get_mixed_precision_config("bf16_mxfp8_mixd"),
    "unknown recipe, far": lambda: get_mixed_precision_config("qqq"),
    "unknown field": lambda: MixedPrecisionConfig().derive(fp8_recipes="mxfp8"),
    "no dtype": lambda: MixedPrecisionConfig(params_dtype="b16"),
    "twins": lambda: MixedPrecisionConfig(fp8_param=True, fp8_param_gather=False),
    "wrong types": lambda: resolve(MixedPrecisionConfig(bf16="yes", fp8=1, loss_scale="big")),  # type: ignore[arg-type]
    "contradictions": lambda: resolve(
        MixedPrecisionConfig(bf16=True, fp16=True, fp8="foo", fp4="e2m1", fp8_recipe="current", hysteresis=0)
    ),
    "half against dtype": lambda: resolve(MixedPrecisionConfig(bf16=True, params_dtype="fp16")),
    "too many edges": lambda: resolve(get_mixed_precision_config("nemotron_3_super_bf16_with_nvfp4_mixed"), layers=8),
    "module rule": lambda: resolve(
        MixedPrecisionConfig(bf16=True, fp8="hybrid", modules={"mlp.*": {"fp8": "hybrid", "fp8_recipe": "delayed"}})
    ),
    "live object without a field": lambda: plan(resolve(MixedPrecisionConfig(bf16=True)), ddp=type("Bag", (), {})()),
    "no dtype in a section": lambda: plan(resolve(MixedPrecisionConfig()), optimizer={"exp_avg_dtype": "f32"}),
    "quantized on a CPU": lambda: _refused(),
}


def _refused() -> None:
    from mpbridge import build
    from mpbridge.common.facts import Versions
    from mpbridge.common.machines import machine

    made = plan(resolve(get_mixed_precision_config("bf16_with_mxfp8_mixed")), model={})
    build({"model": {}}, made, machine=machine("cpu"), versions=Versions(torch="2.13.0", megatron_core="0.16.1"))


def said(case: str) -> dict[str, Any]:
    try:
        CASES[case]()
    except MpbridgeError as error:
        return {"error": type(error).__name__, "exit_code": error.exit_code, "text": str(error).splitlines()}
    return {"error": None}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_plan_is_pinned(name: str) -> None:
    assert text(name) == (FOLDER / f"plan_{name}.txt").read_text(encoding="utf-8")


def test_no_plan_is_pinned_that_belongs_to_no_recipe() -> None:
    assert {path.stem for path in FOLDER.glob("plan_*.txt")} == {f"plan_{name}" for name in NAMES}


@pytest.mark.parametrize("case", CASES)
def test_an_errors_words_are_pinned(case: str) -> None:
    assert said(case) == json.loads(ERRORS.read_text(encoding="utf-8"))["errors"][case]


if __name__ == "__main__":
    for recipe_name in NAMES:
        (FOLDER / f"plan_{recipe_name}.txt").write_text(text(recipe_name), encoding="utf-8")
    pinned = {"made_by": "python tests/precision/sync/test_goldens.py", "errors": {case: said(case) for case in CASES}}
    ERRORS.write_text(json.dumps(pinned, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
