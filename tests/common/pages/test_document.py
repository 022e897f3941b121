"""A page is one file that loads nothing, and stays within its size by sampling, which it says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mpbridge.common.errors import BadValue
from mpbridge.common.pages.document import LARGEST, Page, writable
from mpbridge.common.tables import Column


def data_of(text: str) -> dict[str, Any]:
    return json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])  # type: ignore[no-any-return]


def test_nothing_is_loaded_and_nothing_ends_the_data_early() -> None:
    page = Page("</script><b>x</b>", {"command": "</script>"}, {"term": "sentence"})
    page.text("</script><script>alert(1)</script>")
    text = page.html()
    assert not re.search(r"""(src|href)=["']?[a-z]+:|url\(|@import|fetch\(|XMLHttpRequest|import\(""", text)
    assert "alert(1)" in data_of(text)["blocks"][0]["text"]
    assert text.count("</script>") == 3
    page.text("<!--<script>")  # inside a script element it makes the next end tag a part of the script
    assert "<!--<script>" not in page.html().split("<main")[1]
    assert data_of(text)["title"] == "</script><b>x</b>"


def test_half_of_a_surrogate_pair_is_written_as_its_escape() -> None:
    page = Page("half \ud800", {})
    page.text("\udfff too")
    text = page.html().encode().decode()
    assert data_of(text)["blocks"][0]["text"] == "\udfff too"
    assert "half \\ud800" in text


def test_a_column_without_a_value_is_left_out() -> None:
    page = Page("t", {})
    heads = [Column(name=name) for name in "abcd"]
    page.table("rows", heads, [[0, None, "", {"text": "x"}], [None, "", None, False]])
    page.table("none", heads, [])
    rows, none = data_of(page.html())["blocks"]
    assert [head["name"] for head in rows["columns"]] == ["a", "d"]
    assert rows["rows"] == [[0, {"text": "x"}], [None, False]]
    assert len(none["columns"]) == 4


def test_a_hundred_layers_stay_within_the_size_and_the_page_says_so() -> None:
    page = Page("large", {})
    names = [f"decoder.layers.{i}.self_attention.linear_{j}" for i in range(100) for j in range(8)]
    layers, kinds = [str(i) for i in range(100)], [f"linear_{j}" for j in range(24)]
    columns = [Column(name="layer", layer=True), Column(name="tensor", number=False), *(Column(name=f"n{k}") for k in range(10))]  # fmt: skip
    for _ in range(6):  # recipes
        page.heat("errors", layers, kinds, {(i, j): 0.05 for i in layers for j in kinds}, low=0.01, high=1.0)
        rows = [[i // 24, names[i % 800], *(0.012345 * k for k in range(10))] for i in range(2400)]
        page.table("operands", columns, rows, order=[7, *(i for i in range(2400) if i != 7)])
        page.chart("amax", [(name, [(x, x * 1.234567) for x in range(2000)], "1") for name in names[:64]], y="amax")
    text = page.html()
    assert len(text.encode()) <= LARGEST
    blocks = data_of(text)["blocks"]
    table = next(block for block in blocks if block["kind"] == "table")
    assert "of 2,400 rows" in table["sampled"]
    assert [0, names[7]] in [row[:2] for row in table["rows"]], "the most important row stays"
    chart = next(block for block in blocks if block["kind"] == "chart")
    said = r"each curve drawn with the extremes of its stretches, at most (\d+) of 2,000 points"
    assert re.fullmatch(said, chart["sampled"])
    assert chart["kept"] == f"{len(chart['series'])} of 64 curves are on this page, most important first."


def test_curves_lose_points_before_any_of_them_is_left_out() -> None:
    page = Page("t", {})
    many = [(f"layers.{i}.fc1", [(x, 1e9 if x == 71 * i else x * 1.234567 * i) for x in range(400)], str(i)) for i in range(500)]  # fmt: skip
    page.chart("amax", many, y="amax")
    page.table("rows", [Column(name="n")], [[i] for i in range(300)])
    chart, table = data_of(page.html(largest=700_000))["blocks"]
    assert len(chart["series"]) == 500
    assert len(table["rows"]) == 300
    assert "kept" not in chart
    assert "points" in chart["sampled"]
    assert max(chart["series"][5]["y"]) == 1e9, "no spike is lost"


def test_curves_that_were_measured_together_share_their_steps() -> None:
    page = Page("t", {})
    page.chart("amax", [*((f"l{i}", [(5, 1.0), (10, 2.0)], "") for i in range(9)), ("late", [(10, 7.0)], "")], y="amax")
    block = data_of(page.html())["blocks"][0]
    assert block["xs"] == [[5, 10], [10]]
    assert [line["x"] for line in block["series"]] == [0] * 9 + [1]
    assert (block["series"][0]["y"], block["series"][9]["y"]) == ([1.0, 2.0], [7.0])


def test_a_spike_survives_the_thinning_of_a_curve() -> None:
    page = Page("t", {})
    page.chart("loss", [("loss", [(x, 100.0 if x == 54321 else 1.0) for x in range(100_000)], "")], y="loss")
    block = data_of(page.html())["blocks"][0]
    points = list(zip(block["xs"][0], block["series"][0]["y"], strict=True))
    assert len(points) <= 700
    assert (54321, 100.0) in points


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writable(tmp_path / "new" / "deeper", folder=True)
    writable(tmp_path / "page.html")
    for path, folder, said in (
        (tmp_path / "file", True, "is a file"),
        (tmp_path / "file" / "below", True, "is a file"),
        (tmp_path, False, "is a folder"),
        (tmp_path / "nowhere" / "page.html", False, "does not exist"),
    ):
        with pytest.raises(BadValue, match=said):
            writable(path, folder=folder)


class _Elements(HTMLParser):
    """What a browser is told: the policy, and the text of each script and style element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.policy, self.inside, self.found = "", "", []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.inside = tag if tag in ("script", "style") and "type" not in found else ""
        self.policy = found.get("content") or "" if found.get("http-equiv") else self.policy
        assert not [name for name in found if name.startswith("on") or name == "style"]

    def handle_data(self, text: str) -> None:
        if self.inside:
            self.found.append((self.inside, text))
            self.inside = ""


def test_the_policy_allows_the_page_s_own_scripts_by_hash_and_no_other() -> None:
    seen = _Elements(Page("t", {}).html())
    rules = dict(rule.strip().split(" ", 1) for rule in seen.policy.split(";"))
    assert (rules["default-src"], rules["base-uri"], rules["form-action"]) == ("'none'", "'none'", "'none'")
    for kind in ("script", "style"):
        own = [hashlib.sha256(text.encode()).digest() for found, text in seen.found if found == kind]
        assert rules[f"{kind}-src"].split() == [f"'sha256-{base64.b64encode(one).decode()}'" for one in own]
        assert len(own) == 2


def test_a_page_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "page.html").symlink_to(tmp_path / "victim")
    with pytest.raises(BadValue, match="symbolic link"):
        writable(tmp_path / "page.html")
