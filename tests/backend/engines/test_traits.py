"""Engines are what their traits say, and nobody else names them; another package's engine trains like a built-in one."""

import ast
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpbridge
from mpbridge.backend.engines.contract import Engine
from mpbridge.backend.engines.registry import engine_class
from mpbridge.common import traits as registry
from mpbridge.common.errors import Contradiction, DuplicateName, Refused, UnknownName
from mpbridge.common.traits import BUILT_IN, EngineTraits, engine_names, traits
from tests.backend.engines import tiny

ROOT = Path(mpbridge.__file__).parent
ALLOWED = {
    "common/traits.py",  # the list itself
    "backend/engines/mcore_traits.py", "backend/engines/fsdp2_traits.py", "backend/engines/megatron_fsdp_traits.py",
    "precision/recipes.py",  # what a recipe prefers where several could run it
    "backend/megatron/bridge_container.py",  # what Megatron Bridge's switches mean here
    "cli/_target.py",  # --mcore is a version of megatron-core
    "observe/witnessing/plain.py", "observe/witnessing/core.py", "observe/witnessing/sharded.py",  # the engine of ours whose traits a loop that is not ours shares
}  # fmt: skip


def _names(file: Path) -> list[str]:
    """Literals that are an engine's name, docstrings aside."""
    text = file.read_text(encoding="utf-8")
    if not any(name in text for name in BUILT_IN):  # most files: nothing to parse
        return []
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in tuple(BUILT_IN) and id(node) not in prose
    ]


def test_no_engine_is_named_outside_of_its_traits() -> None:
    # in stacks they are other stacks' words: Megatron-LM's switches, AutoModel's strategies
    every = [file for file in ROOT.rglob("*.py") if not file.is_relative_to(ROOT / "interop")]
    files = [file for file in every if file.relative_to(ROOT).as_posix() not in ALLOWED]
    assert len(files) > 150
    assert not [place for file in files for place in _names(file)]
    assert all(_names(ROOT / file) for file in ALLOWED), "an exception that is no longer needed"


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_engine_is_a_class_of_that_name_with_rules_of_its_own_kind(name: str) -> None:
    from mpbridge.planning.rules.table import rules

    found = traits(name)
    assert issubclass(engine_class(name), object)
    assert engine_class(name).name == name
    assert found.summary
    own = [rule for rule in rules() if rule.engine == name]
    assert bool(own) is bool(found.rules)


FOREIGN = """
from dataclasses import replace
from mpbridge.backend.engines.mcore import McoreEngine
from mpbridge.planning.rules.table import Rule
from mpbridge.common.traits import EngineTraits, traits

RULES = (Rule(id="foreign-trains-in-bf16", found=lambda c: c.policy.compute.short != "bf16" and "another compute dtype", expected="bf16", cure="bf16_mixed",
              source="the package"),)
TRAITS = replace(traits("mcore"), name="foreign", engine="foreign_engine:ForeignEngine", parallelisms=frozenset(), optimizers=("adam",),
                 rules="foreign_engine:RULES", label="the foreign engine")


class ForeignEngine(McoreEngine):
    name = "foreign"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with an entry point, as pip leaves it behind."""
    (tmp_path / "foreign_engine.py").write_text(FOREIGN)
    info = tmp_path / "foreign_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mpbridge.engines]\nforeign = foreign_engine:TRAITS\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield from _forgotten()
    sys.modules.pop("foreign_engine", None)


def _forgotten() -> Iterator[None]:
    from mpbridge.planning.rules.table import rules

    for cached in (registry._installed, registry._load, rules):
        cached.cache_clear()
    yield
    for cached in (registry._installed, registry._load, rules):
        cached.cache_clear()


def test_an_engine_of_another_package_is_listed_checked_and_trains(installed: None, layer: None) -> None:
    from mpbridge.backend.engines.registry import build_engine
    from mpbridge.planning.rules.table import broken

    assert engine_names() == (*BUILT_IN, "foreign")
    run = tiny.run("bf16", engine="foreign")
    engine = build_engine(run)
    try:
        assert isinstance(engine, Engine)
        losses = [engine.train_step(tiny.batches(), microbatches=2).loss for _ in range(4)]
    finally:
        engine.close()
    assert losses[-1] < losses[0]
    with pytest.raises(Refused, match="foreign-trains-in-bf16"):
        build_engine(tiny.run("fp32", engine="foreign"))
    sgd = tiny.run("bf16", engine="foreign", optimizer={"optimizer": "sgd"})
    assert {found.rule for found in broken(sgd.policy, sgd.facts)} == {"optimizer-that-the-engine-does-not-build"}
    assert "foreign-trains-in-bf16" not in {found.rule for found in broken(*_facts("fp32"))}


def _facts(kind: str) -> tuple[Any, Any]:
    run = tiny.run(kind)
    return run.policy, run.facts


def test_an_entry_point_that_takes_a_built_in_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint(name="mcore", value="theirs:TRAITS", group=registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "_installed", lambda: (point,))
    with pytest.raises(DuplicateName, match="already exists"):
        engine_names()


def test_an_unknown_engine_gets_the_nearest_name_and_an_unused_switch_is_said() -> None:
    with pytest.raises(UnknownName, match="nearest: fsdp2"):
        traits("fsdp")
    with pytest.raises(Contradiction, match="set engine=megatron_fsdp"):
        tiny.run("bf16", engine="fsdp2", ddp={"use_megatron_fsdp": True})
    assert isinstance(traits("fsdp2"), EngineTraits)


@pytest.mark.parametrize("engine", ["fsdp2", "megatron_fsdp"])
def test_a_fused_accumulation_is_refused_where_it_used_to_be_switched_off_silently(engine: str) -> None:
    from mpbridge.planning.rules.table import broken

    run = tiny.run("bf16", engine=engine, model={"gradient_accumulation_fusion": True})
    found = {one.rule: one.found for one in broken(run.policy, run.facts) if one.severity == "error"}
    assert "gradient_accumulation_fusion=true" in found["switch-that-the-engine-cannot-use"]
