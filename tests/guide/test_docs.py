"""The README and the pages: links lead somewhere, code is code of this version, commands exist, shown output is what comes out."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpbridge.cli.main import main, parser_of, verbs, with_way
from mpbridge.common.errors import MpbridgeError
from mpbridge.common.probe import installed
from mpbridge.precision.megatron_spec.versions import BEFORE_017
from mpbridge.precision.yaml_loader import load_yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("CONTRIBUTING.md")), *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
LIGHT = frozenset(verbs()) - {"train", "rehearse", "init", "convert", "data", "certify", "contract", "mismatch"}
"""Verbs that load no framework, quick enough to run here, and write nothing."""


def blocks(*kinds: str) -> Iterator[Any]:
    for page in PAGES:
        for found in FENCE.finditer(page.read_text(encoding="utf-8")):
            if found["kind"] in kinds:
                line = page.read_text(encoding="utf-8")[: found.start()].count("\n") + 1
                yield pytest.param(found["body"], id=f"{page.relative_to(ROOT)}:{line}")


@functools.cache
def anchors(page: Path) -> set[str]:
    """The ids that Markdown gives the page's headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head.replace("`", "")).strip().lower()) for head in heads}


def test_every_link_leads_somewhere() -> None:
    wrong = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("https://", "http://")):
                continue
            name, _, anchor = target.partition("#")
            found = (page.parent / name).resolve() if name else page
            if not found.is_file() or (anchor and anchor not in anchors(found)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
    assert wrong == []


def test_every_page_is_in_the_navigation() -> None:
    def files(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values() if isinstance(entry, dict) else entry:
                yield from files(value)

    nav = load_yaml((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(files(nav)) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_home_page_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w/]+\.md)", (DOCS / "index.md").read_text(encoding="utf-8")))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"}
    assert {page for page in pages - linked if not page.startswith("stacks/")} == set()


def test_names_in_tables_are_not_broken_in_the_middle_of_a_word() -> None:
    sheets = load_yaml((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["extra_css"]
    rules = "".join((DOCS / sheet).read_text(encoding="utf-8") for sheet in sheets)
    assert re.search(r"table:not\(\[class\]\) code \{ word-break: normal; overflow-wrap: normal; \}", rules)


def test_python_compiles_and_its_imports_exist() -> None:
    for node in (node for block in blocks("python") for node in ast.walk(ast.parse(block.values[0], block.id))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpbridge"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("text", list(blocks("yaml")))
def test_yaml_is_a_recipe_or_a_configuration(text: str, tmp_path: Path) -> None:
    from mpbridge.precision.registry import get_mixed_precision_config
    from mpbridge.settings.container import ConfigContainer
    from mpbridge.settings.schema import SECTIONS

    path = tmp_path / "page.yaml"
    path.write_text(text, encoding="utf-8")
    if "extends" in load_yaml(text) and not set(load_yaml(text)) & set(SECTIONS):
        get_mixed_precision_config(str(path))
    else:
        ConfigContainer.load(path)


def commands(kinds: tuple[str, ...]) -> Iterator[str]:
    for block in blocks(*kinds):
        for line in block.values[0].replace("\\\n", " ").splitlines():
            shown = line.removeprefix("$ ") if line.startswith("$ ") else line if kinds == ("bash",) else ""
            if shown.strip():
                yield shown


def test_every_command_exists_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wrong = []
    for command in sorted({*commands(("bash",)), *commands(("console", "text"))}):
        try:
            check(command)
        except (AssertionError, KeyError, MpbridgeError, SystemExit) as error:
            wrong.append(f"{command}: {error!r}")
    assert wrong == []


def check(command: str) -> None:
    """Raises where a script, a verb or one of its arguments does not exist."""
    words = shlex.split(command, comments=True)
    if "..." in words:
        words = [word for word in words if word != "..."]
    if ">" in words:
        words = words[: words.index(">")]
    for word in words:
        if re.match(r"(scripts|configs|tests)/\S+\.\w+$", word):
            assert Path(word).is_file(), word
    if words[:2] == ["mpbridge", "help"]:
        assert words[2] in {*verbs(), "--all"}
        return
    if "-m" in words and words[words.index("-m") + 1] == "mpbridge":  # torchrun, or python
        words = words[words.index("-m") + 1 :]
    if "scripts/pretrain.py" in words:
        parser_of("train").parse_intermixed_args(with_way(words[words.index("scripts/pretrain.py") + 1 :]))
    elif words[:1] == ["mpbridge"] and words[1] != "--version":
        parser_of(words[1]).parse_intermixed_args(with_way(words[2:]))


@pytest.mark.parametrize("block", list(blocks("console")))
def test_shown_output_is_what_comes_out(
    block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of a torch-free verb is run; '...' stands for any text, and at the end of a line for the rest of it."""
    monkeypatch.chdir(ROOT)
    if "published runs on" in block and not BEFORE_017.holds(installed().megatron_core):
        pytest.skip(
            "no published run with the installed megatron-core was fitted, so a step's band is wider than the one shown"
        )
    runs = 0
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        words = shlex.split(command)
        if words[0] != "mpbridge" or words[1] not in LIGHT:
            continue
        runs += 1
        main(words[1:])
        captured = capsys.readouterr()
        pattern = r"[\s\S]*?".join(re.escape(piece.strip("\n")) for piece in shown.strip("\n").split("..."))
        assert re.fullmatch(rf"\s*{pattern}\s*", captured.out + captured.err), captured.out + captured.err
    assert runs or "mpbridge train" in block or "mpbridge convert" in block
