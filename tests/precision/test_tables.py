"""The pages' tables are what the code says."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mpbridge_tables", ROOT / "scripts" / "generate" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TABLES.update({name: functools.cache(make) for name, make in module.TABLES.items()})
    return module


def test_every_table_of_every_page_is_up_to_date(tables: ModuleType) -> None:
    for page in tables.pages():
        text = page.read_text(encoding="utf-8")
        assert tables.filled(text, page.name) == text, f"{page.name}: python scripts/generate/tables.py"


def test_what_the_tables_read_of_the_tests_needs_no_more_than_the_docs_extra_brings() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = project["optional-dependencies"] | {"": project["dependencies"]}
    names = {extra: {Requirement(need).name for need in some} for extra, some in needs.items()}
    others = set().union(*(names[extra] for extra in ("hf", "plot", "te-needs", "dev")))
    absent = {name.replace("-", "_").lower() for name in others - names["docs"] - names[""]}
    read = set(re.findall(r"from (tests[\w.]+) import", (ROOT / "scripts" / "generate" / "tables.py").read_text()))
    assert {"pytest", "tokenizers"} <= absent
    assert read
    hide = f"import sys; sys.modules.update(dict.fromkeys({absent})); import {', '.join(sorted(read))}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", hide], cwd=ROOT, check=True)


def test_a_stale_table_is_rewritten(tables: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "PAGE.md"
    page.write_text("before\n<!-- table:differences -->\nold\n<!-- end of table -->\nafter\n")
    assert tables.main(["--check", str(page)]) == 1
    assert "old" in page.read_text()
    assert tables.main([str(page)]) == 0
    assert page.read_text().startswith("before\n<!-- table:differences -->\n| recipe | field |")
    assert page.read_text().endswith("|\n<!-- end of table -->\nafter\n")
    assert tables.main(["--check", str(page)]) == 0
    assert capsys.readouterr().out == "out of date: PAGE.md\nrewritten: PAGE.md\n"


def test_a_page_that_asks_for_an_unknown_table_is_an_error(tables: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no table named 'recipe'"):
        tables.filled("<!-- table:recipe -->\n<!-- end of table -->\n", "PAGE.md")


def first_column(table: str, *, columns: int = 1) -> list[tuple[str, ...]]:
    return [tuple(cell.strip(" `") for cell in line.split("|")[1 : columns + 1]) for line in table.splitlines()[2:]]


def test_the_tables_name_every_recipe_and_difference(tables: ModuleType) -> None:
    # tests/precision/test_recipes.py holds it against Megatron Bridge's values
    from mpbridge.precision.recipes import DIFFERENCES

    recipes = json.loads((ROOT / "tests" / "golden" / "recipes.json").read_text(encoding="utf-8"))["recipes"]
    for make in (tables.recipe_table, tables.recipe_machine_table, tables.bytes_table):
        assert sorted(name for (name,) in first_column(make())) == sorted(recipes)
    assert sorted(first_column(tables.difference_table(), columns=2)) == sorted(DIFFERENCES)


def test_every_row_of_a_table_has_every_column(tables: ModuleType) -> None:
    for make in tables.TABLES.values():
        text = make()
        assert "|" in text
        for part in text.split("\n\n"):
            widths = {line.replace("\\|", "").count("|") for line in part.splitlines()}
            assert len(widths) == 1
