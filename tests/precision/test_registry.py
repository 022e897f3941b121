"""Names to configs: built in, registered, from files and from other packages."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mpbridge import MixedPrecisionConfig, get_mixed_precision_config, recipes, register
from mpbridge.common.errors import BadValue, DuplicateName, RecipeError, UnknownName
from mpbridge.precision import registry


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    len(recipes)  # fills the registry
    names, others = dict(registry._by_name), dict(registry._alias_of)
    yield
    for table, before in ((registry._by_name, names), (registry._alias_of, others)):
        table.clear()
        table.update(before)


@pytest.mark.parametrize("spelling", ["bf16_mixed", "bf16-mixed", "BF16-Mixed", " bf16_mixed ", "bf16", "bfloat16"])
def test_a_name_is_found_in_any_spelling_and_by_its_aliases(spelling: str) -> None:
    wanted = MixedPrecisionConfig(bf16=True, params_dtype="bf16", pipeline_dtype="bf16")
    assert get_mixed_precision_config(spelling) == wanted
    assert spelling in recipes
    assert recipes[spelling].name == "bf16_mixed"


@pytest.mark.parametrize(("typed", "name"), [
    ("16-mixed", "fp16_mixed"), ("32", "fp32"), ("fp8_cs", "bf16_with_fp8_current_scaling_mixed"), ("fp8_mx", "bf16_with_mxfp8_mixed"),
    ("fp8_sc", "bf16_with_fp8_subchannel_scaling_mixed"), ("fp8_ds", "bf16_with_fp8_delayed_scaling_mixed"), ("nvfp4", "bf16_with_nvfp4_mixed"),
    ("nanov2_bf16_with_fp8_subchannel_scaling_mixed", "nanov2_bf16_with_fp8_current_scaling_mixed"),
])  # fmt: skip
def test_names_that_people_type_elsewhere(typed: str, name: str) -> None:
    assert recipes[typed].name == name


def test_every_call_gives_a_fresh_object() -> None:
    first = get_mixed_precision_config("bf16_mixed")
    first.grad_reduce_in_fp32 = False
    assert get_mixed_precision_config("bf16_mixed").grad_reduce_in_fp32 is True
    for name in recipes:
        if rules := get_mixed_precision_config(name).modules:
            meant = registry.resolve(name).fingerprint()
            rules.clear()  # type: ignore[attr-defined]
            assert registry.resolve(name).fingerprint() == meant
            break
    else:
        raise AssertionError("no built-in recipe has rules under modules")
    mine = MixedPrecisionConfig(bf16=True)
    register(name="always_the_same")(lambda: mine)
    get_mixed_precision_config("always_the_same").hysteresis = 9
    assert mine.hysteresis == 2
    copied = get_mixed_precision_config(mine)
    assert copied == mine
    assert copied is not mine


def test_the_window_is_read_only_and_lists_each_recipe_once() -> None:
    with pytest.raises(TypeError):
        recipes["mine"] = recipes["bf16_mixed"]  # type: ignore[index]
    assert len(list(recipes)) == len(recipes) == len(set(recipes))
    assert "bf16" not in list(recipes)


@pytest.mark.parametrize("thing", [5, "bf16_mixed", MixedPrecisionConfig(bf16=True)], ids=repr)
def test_what_cannot_be_called_is_no_recipe(thing: object) -> None:
    with pytest.raises(BadValue, match="expected a function that returns a MixedPrecisionConfig"):
        register(name="never")(thing)  # type: ignore[type-var]
    with pytest.raises(BadValue, match="expected a function"):
        register(thing)  # type: ignore[call-overload]
    assert "never" not in recipes


def test_register_bare_and_with_options() -> None:
    @register
    def my_bare_recipe() -> MixedPrecisionConfig:
        """What it is for."""
        return MixedPrecisionConfig(bf16=True)

    said = {"summary": "s", "status": "validated", "source": "a paper", "engine": "fsdp2", "hints": ("h",)}

    @register(name="My-Other", aliases=("mine_too",), **said)  # type: ignore[call-overload, untyped-decorator]
    def whatever() -> MixedPrecisionConfig:
        return MixedPrecisionConfig(fp16=True)

    assert get_mixed_precision_config("my-bare-recipe").bf16 is True
    assert recipes["my_bare_recipe"].summary == "What it is for."
    assert "test_registry" in recipes["my_bare_recipe"].source
    assert get_mixed_precision_config("MINE-TOO").fp16 is True
    assert {name: getattr(recipes["my_other"], name) for name in said} == said
    assert my_bare_recipe().bf16 is True  # the decorator gives the function back
    assert whatever().fp16 is True
    registry.unregister("my_other")
    assert "mine_too" not in recipes


@pytest.mark.parametrize("names", [{"name": "bf16_mixed"}, {"name": "bf16"}, {"name": "new_one", "aliases": ("16-mixed",)}])  # fmt: skip
def test_a_taken_name_or_alias_is_refused_and_nothing_is_stored(names: dict[str, object]) -> None:
    before = list(recipes)
    with pytest.raises(DuplicateName, match="already exists"):
        register(**names)(MixedPrecisionConfig)  # type: ignore[call-overload]
    assert list(recipes) == before
    assert "new_one" not in recipes


def test_an_engine_that_there_is_not_is_refused_and_nothing_is_stored() -> None:
    with pytest.raises(UnknownName, match=r"no engine named 'fsdp3' \(nearest: fsdp2"):
        register(name="new_one", engine="fsdp3")(MixedPrecisionConfig)
    assert "new_one" not in recipes


def test_a_text_in_place_of_aliases_is_refused() -> None:
    with pytest.raises(BadValue, match=r"aliases='qj': expected a tuple of names, as in \('qj',\)"):
        register(name="fine", aliases="qj")(MixedPrecisionConfig)  # type: ignore[call-overload]
    assert "q" not in recipes


def test_a_cell_whose_new_alias_is_taken_leaves_its_recipe_as_it_was() -> None:
    def cell() -> MixedPrecisionConfig:
        return MixedPrecisionConfig(bf16=True)

    cell.__module__ = "__main__"
    register(name="cell", aliases=("mine",))(cell)
    with pytest.raises(DuplicateName, match="'bf16' already exists"):
        register(name="cell", aliases=("bf16",))(cell)
    assert recipes["mine"].name == "cell"
    register(name="cell", aliases=("mine", "ours"))(cell)
    assert recipes["ours"].name == "cell"
    register(name="cell")(cell)
    assert "mine" not in recipes


def test_what_follows_from_a_recipes_fields_is_asked_anew_and_of_any_factory() -> None:
    class Made:
        fields: ClassVar[dict[str, Any]] = {"bf16": True}
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> MixedPrecisionConfig:
            return MixedPrecisionConfig(**self.fields)

    register(name="made")(Made())
    assert recipes["made"].needs is None
    Made.fields["fp8"] = "hybrid"
    assert recipes["made"].needs == (8, 9)
    built_in = recipes["fp8_cs"]  # fields alone do not change: `mpbridge list` resolves each once
    assert built_in.policy is built_in.policy


class _Installed:
    """An installed package's entry point."""

    value = "package:function"

    def __init__(self, name: str) -> None:
        self.name = name

    def load(self) -> Any:
        return lambda: MixedPrecisionConfig(bf16=True)


def _filled_again(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """An empty registry that finds these names in installed packages, slowly, as a scan of folders is."""
    registry._by_name.clear()
    registry._alias_of.clear()
    monkeypatch.setattr(registry, "_filled", False)
    monkeypatch.setattr(
        registry, "entry_points", lambda group: time.sleep(0.05) or [_Installed(name) for name in names]
    )


def test_every_thread_finds_every_recipe_from_the_first_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _filled_again(monkeypatch, "of_a_package")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: registry.recipe("of_a_package").name, range(8)))
    assert found == ["of_a_package"] * 8


def test_a_package_that_takes_a_name_is_an_error_at_every_call_and_leaves_nothing_half_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _filled_again(monkeypatch, "bf16_mixed", "of_a_package")
    for _ in range(2):
        with pytest.raises(
            DuplicateName,
            match=r"'package:function' provides a recipe named 'bf16_mixed', which already exists: rename it",
        ):
            registry.recipe("bf16_mixed")
        assert not registry._by_name
    _filled_again(monkeypatch, "of_a_package")
    assert registry.recipe("of_a_package").foreign is True


def test_a_cell_that_runs_again_is_found_by_its_alias_at_every_moment() -> None:
    def cell() -> MixedPrecisionConfig:
        return MixedPrecisionConfig(bf16=True)

    class Watched(dict[str, str]):
        def pop(self, name: str, *default: Any) -> Any:  # type: ignore[override]
            popped.append(name)
            return super().pop(name, *default)

    cell.__module__, popped = "__main__", list[str]()
    register(name="cell", aliases=("mine", "old"))(cell)
    entry = recipes["cell"]
    names, others = dict(registry._by_name), Watched(registry._alias_of)
    registry._store(dataclasses.replace(entry, aliases=("mine",)), names, others)
    assert "mine" not in popped
    assert ("mine" in others, "old" in others) == (True, False)


@pytest.mark.parametrize("name", ["", "a:b", "mine.yaml", "mine.py"])
def test_a_name_that_reads_as_a_file_or_function_is_refused(name: str) -> None:
    with pytest.raises(BadValue, match="cannot name a recipe"):
        register(name="fine", aliases=(name,))(lambda: MixedPrecisionConfig())
    assert "fine" not in recipes


def test_one_decorator_on_two_functions_keeps_their_sources_apart() -> None:
    def one() -> MixedPrecisionConfig:
        return MixedPrecisionConfig()

    def other() -> MixedPrecisionConfig:
        return MixedPrecisionConfig()

    enter = register(status="experimental")
    enter(one)
    enter(other)
    assert [recipes[name].source.rpartition(".")[2] for name in ("one", "other")] == ["one", "other"]


def test_a_file_of_functions_asks_which_one(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"mine\.py:my_recipe"):
        get_mixed_precision_config(str(tmp_path / "mine.py"))


def evil(folder: Path) -> str:
    """A file that extends code."""
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    (folder / "evil.yaml").write_text(f"extends: {folder / 'evil.py'}:run\n")
    return str(folder / "evil.yaml")


@pytest.mark.parametrize(("named", "code", "said"), [
    ("evil.py:run", False, "is code that comes with this configuration"),
    ("evil.yaml", False, r"evil\.yaml extends code, .*evil\.py:run"),
    ("evil.yaml", True, r"name it yourself \(--recipe .*evil\.py:run\)"), ("more.yaml", True, r"evil\.yaml extends code"),
])  # fmt: skip
def test_a_file_runs_no_code_and_a_name_only_where_code_may(tmp_path: Path, named: str, code: bool, said: str) -> None:
    evil(tmp_path)
    (tmp_path / "more.yaml").write_text("extends: evil.yaml\n")
    (tmp_path / "good.yaml").write_text("extends: bf16_mixed\n")
    with pytest.raises(RecipeError, match=said):
        get_mixed_precision_config(str(tmp_path / named), code=code)
    assert get_mixed_precision_config(tmp_path / "good.yaml", code=code).bf16


def test_a_recipe_file_on_the_command_line_does_not_run_what_it_extends(tmp_path: Path, cli) -> None:  # type: ignore[no-untyped-def]
    path = evil(tmp_path)
    for words in (["show"], ["check", "--recipe"], ["plan", "--recipe"], ["train", "--recipe"]):
        said = cli(*words, path, code=2)
        assert "extends code" in said
        assert "it ran" not in said


def test_something_without_a_name_asks_for_one() -> None:
    with pytest.raises(BadValue, match=r"register\(name=\.\.\.\)"):
        register(lambda: MixedPrecisionConfig())


def test_a_factory_that_returns_something_else_is_its_own_error() -> None:
    register(name="wrong_type")(lambda: {"bf16": True})  # type: ignore[arg-type,return-value]
    with pytest.raises(RecipeError, match="recipe 'wrong_type' returned dict, expected a MixedPrecisionConfig"):
        get_mixed_precision_config("wrong_type")


@pytest.mark.parametrize("fault", [KeyError("bf16"), ZeroDivisionError("by zero"), AttributeError("no such")])
def test_an_exception_inside_a_factory_is_never_an_unknown_name(fault: Exception) -> None:
    def broken() -> MixedPrecisionConfig:
        raise fault

    register(broken)
    with pytest.raises(RecipeError, match=f"recipe 'broken' raised {type(fault).__name__}") as caught:
        get_mixed_precision_config("broken")
    assert caught.value.__cause__ is fault


def test_a_config_that_a_factory_misspells_is_the_factorys_fault() -> None:
    register(name="misspells")(lambda: MixedPrecisionConfig().derive(bf61=True))
    said = r"recipe 'misspells' failed: no field of MixedPrecisionConfig named 'bf61' .nearest: bf16"
    with pytest.raises(RecipeError, match=said):
        get_mixed_precision_config("misspells")


def test_module_and_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebodys_recipes.py").write_text(
        "from mpbridge import MixedPrecisionConfig\ndef mine():\n    return MixedPrecisionConfig(bf16=True, hysteresis=5)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert get_mixed_precision_config("somebodys_recipes:mine").hysteresis == 5
    with pytest.raises(UnknownName, match=r"no function in somebodys_recipes named 'mien' .nearest: mine"):
        get_mixed_precision_config("somebodys_recipes:mien")
    with pytest.raises(RecipeError, match="recipe module 'nobodys_recipes' cannot be imported: ModuleNotFoundError"):
        get_mixed_precision_config("nobodys_recipes:mine")


def test_file_and_function(tmp_path: Path) -> None:
    path = tmp_path / "my recipes.py"
    path.write_text(
        "from mpbridge import MixedPrecisionConfig, register\n@register\ndef from_a_file():\n    return MixedPrecisionConfig(fp16=True)\n"
        "def bad():\n    return {}['bf16']\n"
    )
    for _ in range(2):  # the file runs once: its @register would fail the second time
        assert get_mixed_precision_config(f"{path}:from_a_file").fp16 is True
    assert get_mixed_precision_config("from_a_file").fp16 is True
    with pytest.raises(RecipeError, match="raised KeyError"):
        get_mixed_precision_config(f"{path}:bad")
    with pytest.raises(RecipeError, match="no such file"):
        get_mixed_precision_config(f"{tmp_path / 'other.py'}:mine")
    (tmp_path / "broken.py").write_text("def (:\n")
    with pytest.raises(RecipeError, match="cannot be executed: SyntaxError"):
        get_mixed_precision_config(f"{tmp_path / 'broken.py'}:mine")


@pytest.mark.parametrize(("text", "said"), [("", "empty, expected fields"), ("{}", "empty, expected fields"), ("[]", "expected a mapping of fields, got list")])  # fmt: skip
def test_a_recipe_file_that_holds_no_fields_says_what_it_should_hold(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(RecipeError, match=said):
        get_mixed_precision_config(str(tmp_path / "own.yaml"))


def test_engines_that_recipes_need() -> None:
    # by their own word, and by what no other engine can do
    rowwise = ("bf16_with_fp8_rowwise", "bf16_with_fp8_rowwise_gw_hp")
    sharded = ("bf16_params_fp32_states", "fp32_params_bf16_compute", *rowwise)
    found = {name: entry.engine for name, entry in recipes.items() if entry.engine}
    assert found == dict.fromkeys(sharded, "fsdp2") | {"bf16_megatron_fsdp": "megatron_fsdp"}


def test_yaml_extends_a_name_or_another_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("extends: fp8-cs\nnum_layers_at_start_in_bf16: 3\n")
    own = "fp8_param: false\ninitial_loss_scale: 1e4\nkeep_fp32: ['*norm*']\n"
    (tmp_path / "mine.yaml").write_text(f"extends: base.yaml\n{own}")
    (tmp_path / "alone.yml").write_text("fp16: true\n")
    config = get_mixed_precision_config(tmp_path / "mine.yaml")
    assert (config.fp8, config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16) == ("hybrid", 3, 1)
    assert (config.fp8_param_gather, config.initial_loss_scale, config.keep_fp32) == (False, 1e4, ("*norm*",))
    assert get_mixed_precision_config(str(tmp_path / "alone.yml")) == MixedPrecisionConfig(fp16=True)


@pytest.mark.parametrize(("text", "words"), [
    ("extends: bf16_mixd\n", "no recipe named 'bf16_mixd' .nearest: bf16_mixed"),
    ("extends: bf16_mixed\ngrad_reduce_in_fp23: false\n", "nearest: grad_reduce_in_fp32"),
    ("- bf16\n", "expected a mapping of fields, got list"),
    ("bf16: true\nbf16: false\n", "key 'bf16' appears twice"),
    ("bf16: [\n", "cannot be read"),
    ("extends: self.yaml\n", "extends itself"),
    ("recipe: bf16_mixed\nfp8: hybrid\n", "no field named 'recipe'; .* named by `extends: bf16_mixed`"),
    ("fp8_param: true\nfp8_param_gather: false\n", "are the same setting"),
    ("params_dtype: b16\n", "params_dtype: 'b16' is not a dtype"),
    ("extends: gone.yaml\n", "gone.yaml cannot be read"),
])  # fmt: skip
def test_a_yaml_recipe_that_cannot_be_used_names_the_file_and_the_fault(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "self.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match="recipe file ") as caught:
        get_mixed_precision_config(path)
    assert caught.match(words)


def _in_a_process(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), root])}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def _package(folder: Path, *lines: str) -> None:
    info = folder / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[mpbridge.recipes]", *lines, ""]))
    (folder / "somebodys.py").write_text(
        "print('loaded')\nfrom mpbridge import MixedPrecisionConfig\ndef mine():\n    return MixedPrecisionConfig(bf16=True, hysteresis=9)\n"
        "def bad():\n    raise KeyError('x')\n"
    )


def test_recipes_of_another_installed_package_are_listed_unloaded_and_loaded_on_use(tmp_path: Path) -> None:
    _package(tmp_path, "their-recipe = somebodys:mine", "bad_one = somebodys:bad")
    code = (
        "import sys\nfrom mpbridge import get_mixed_precision_config as get, recipes\nfrom mpbridge.common.errors import RecipeError\n"
        "assert 'their_recipe' in list(recipes) and 'somebodys' not in sys.modules\n"
        "assert recipes['their_recipe'].source == 'somebodys:mine'\n"
        "assert get('their-recipe').hysteresis == 9 and 'somebodys' in sys.modules\n"
        "try:\n    get('bad_one')\nexcept RecipeError as error:\n    assert 'raised KeyError' in str(error), error\nelse:\n    raise SystemExit('no error')\n"
    )
    done = _in_a_process(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_another_package_cannot_take_a_name(tmp_path: Path) -> None:
    _package(tmp_path, "BF16-mixed = somebodys:mine")
    what = "provides a recipe named 'bf16_mixed', which already exists"
    said = _in_a_process("from mpbridge import recipes\nlist(recipes)\n", tmp_path).stderr
    assert f"DuplicateName: entry point 'somebodys:mine' {what}" in said


def test_the_window_answers_for_an_unknown_name_as_a_mapping_does() -> None:
    assert "custom" not in recipes
    assert recipes.get("custom") is None
    assert recipes.get("custom", 1) == 1
    assert recipes.get("BF16-mixed") is recipes["bf16_mixed"]
