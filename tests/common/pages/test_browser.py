"""A page in a real browser: it draws, sorts, filters and drills down, light and dark, wide and narrow, and asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpbridge.common.pages.document import Page
from mpbridge.common.tables import Column

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))), None)  # fmt: skip
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")

# what a reader does, in order; what the page then shows goes into the title's place in the dumped document
ACTS = """
<script>
addEventListener("load", () => drawn(() => {
  const seen = { errors: window.faults, marks: structuredClone(window.marks), width: document.documentElement.scrollWidth, inner: innerWidth };
  const rows = () => [...document.querySelectorAll(".scroll table tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
  const heads = [...document.querySelectorAll(".scroll table thead th")];
  const type = (text) => { const box = document.querySelector("input[type=search]"); box.value = text; box.dispatchEvent(new Event("input")); };
  seen.unsorted = rows().map((row) => row[2]);
  heads[2].click(); seen.down = rows().map((row) => row[2]); seen.aria = heads[2].getAttribute("aria-sort");
  heads[2].click(); seen.up = rows().map((row) => row[2]);
  heads[1].click(); seen.words = rows().map((row) => row[1]);
  type("FC2"); seen.filtered = rows().map((row) => row[1]);
  seen.count = document.querySelector(".tools span").textContent;
  type(""); document.querySelector("td.layer").click(); seen.layer = rows().map((row) => row[0]);
  seen.chosen = document.getElementById("chosen").textContent;
  document.querySelector("#chosen button").click(); seen.all = rows().length;
  seen.canvases = document.querySelectorAll("canvas").length;
  seen.legend = [...document.querySelectorAll(".u-legend .u-label")].map((one) => one.textContent);
  const style = getComputedStyle(document.body); seen.background = style.backgroundColor; seen.text = style.color;
  seen.requests = performance.getEntriesByType("resource").map((one) => one.name);
  const out = document.createElement("pre"); out.id = "seen"; out.textContent = JSON.stringify(seen); document.body.append(out);
}));
</script>
"""
# faults of the page, the words and upright lines of marks as they are drawn, and acts that begin once every chart stands, however slow the machine
LISTEN = """
<script>
window.faults = []; addEventListener("error", (event) => window.faults.push(event.message));
addEventListener("securitypolicyviolation", (event) => window.faults.push(`${event.violatedDirective}: ${event.sample}`));
window.marks = { words: [], lines: [] };
const context = CanvasRenderingContext2D.prototype, { fillText, lineTo } = context;
context.fillText = function (word, x, y) { if (word.includes(": step ")) marks.words.push([word, x, y, this.measureText(word).width]); return fillText.call(this, word, x, y); };
context.lineTo = function (x, y) { if (this.getLineDash().length) marks.lines.push(x); return lineTo.call(this, x, y); };
const drawn = (acts) => [...document.querySelectorAll(".chart")].every((one) => one.querySelector("canvas")) ? acts() : setTimeout(drawn, 50, acts);
</script>
"""


def page() -> str:
    made = Page("a run", {"model": "2 layers", "command": "mpbridge diagnose run"}, {"SQNR": "signal to quantization noise"})  # fmt: skip
    marks = [(14, "loss: step 14"), (15, "gradient norm: step 15"), (28, "outlier-channel: step 28")]
    made.chart("amax", [(f"layer {i}", [(x, 1.0 + i * x) for x in range(30)], str(i)) for i in range(2)], y="amax", marks=marks)  # fmt: skip
    columns = [Column(name="layer", layer=True), Column(name="linear", number=False), Column(name="error"), Column(name="flushed", unit="percent")]  # fmt: skip
    rows = [[str(i % 2), f"mlp.linear_fc{1 + i % 3}", (7 * i % 11) / 10, 0.01 * i] for i in range(11)]
    made.table("operands", columns, rows)
    return made.html()


# a hundred curves: the first ones, the next ones, one by its name, one layer's, and what each chart shows of a layer without curves
DRILLING = """
<script>
addEventListener("load", () => drawn(() => {
  const seen = { errors: window.faults };
  const look = () => [...document.querySelectorAll(".chart")].map((one) => ({ text: one.querySelector("p")?.textContent || "", count: one.querySelector(".tools span")?.textContent || "", curves: [...one.querySelectorAll(".u-legend .u-label")].slice(1).map((label) => label.textContent) }));
  const cell = (layer) => [...document.querySelectorAll("td.layer")].find((one) => one.textContent === layer);
  const [back, on] = document.querySelectorAll(".chart button");
  const type = (text) => { const box = document.querySelector(".chart input"); box.value = text; box.dispatchEvent(new Event("input")); };
  seen.all = look();
  seen.ends = [back.disabled, on.disabled];
  seen.reached = new Set(seen.all[0].curves);
  while (!on.disabled) { on.click(); look()[0].curves.forEach((name) => seen.reached.add(name)); }
  seen.reached = seen.reached.size; seen.last = look()[0];
  type("layers.42."); seen.named = look()[0];
  type("nothing"); seen.nowhere = look()[0]; type("");
  cell("80").click(); seen.layer = look();
  document.querySelector("#chosen button").click(); cell("100").click(); seen.missing = look();
  document.querySelector("#chosen button").click(); seen.again = look();
  seen.heads = [...document.querySelectorAll(".heat thead th")].map((one) => one.textContent);
  seen.cells = document.querySelectorAll(".heat tbody td").length;
  seen.tip = document.querySelector(".heat tbody td:nth-of-type(64)").dataset.tip;
  document.querySelector(".heat tbody td:nth-of-type(64)").click(); seen.clicked = look()[0].curves;
  const out = document.createElement("pre"); out.id = "seen"; out.textContent = JSON.stringify(seen); document.body.append(out);
}));
</script>
"""


def deep() -> str:
    made = Page("a deep run", {})
    values = {(str(i), "fc1"): 1.0 + i for i in range(100)}
    made.heat("moves", [str(i) for i in range(100)], ["fc1"], values, low=1.0, high=100.0, unit="times")
    made.chart("amax", [(f"layers.{i}.fc1", [(x, 1.0 + i * x) for x in range(5)], str(i)) for i in range(100)], y="amax", order="those that move most first")  # fmt: skip
    made.chart("loss", [("loss", [(x, 3.0) for x in range(5)], "")], y="loss")
    made.table("operands", [Column(name="layer", number=False, layer=True)], [[str(i)] for i in range(101)])
    return made.html()


def shown(tmp_path: Path, width: int, *, dark: bool = False, made: str = "", acts: str = ACTS) -> dict[str, Any]:
    path = tmp_path / "page.html"
    text = (made or page()).replace("<head>", f"<head>{LISTEN}", 1)
    # the page's policy allows its own scripts only; the first one added here stands before it
    script = acts.strip().removeprefix("<script>").removesuffix("</script>")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = text.replace("script-src ", f"script-src &#39;sha256-{allowed}&#39; ", 1)
    path.write_text(text.replace("</body>", f"{acts}</body>", 1), encoding="utf-8")
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--virtual-time-budget=60000",
        f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-500:] + done.stderr[-1500:]
    return dict(json.loads(html.unescape(found[1])))


@pytest.mark.timeout(1200)
def test_tables_sort_and_filter_and_a_layer_stands_alone(tmp_path: Path) -> None:
    seen = shown(tmp_path, 1400)
    assert seen["errors"] == []
    assert seen["requests"] == [], "one file, nothing asked for"
    numbers = [float(one) for one in seen["unsorted"]]
    assert [float(one) for one in seen["down"]] == sorted(numbers, reverse=True) != numbers
    assert seen["aria"] == "descending"
    assert [float(one) for one in seen["up"]] == sorted(numbers)
    assert seen["words"] == sorted(seen["words"])
    assert seen["filtered"] == ["mlp.linear_fc2"] * 4
    assert seen["count"] == "4 of 11 rows"
    assert len(set(seen["layer"])) == 1
    assert seen["chosen"].startswith(f"layer {seen['layer'][0]} only")
    assert seen["all"] == 11
    assert seen["canvases"] == 1
    assert "layer 1" in seen["legend"]


@pytest.mark.timeout(1200)
def test_each_of_a_hundred_curves_is_reached_a_few_at_once(tmp_path: Path) -> None:
    seen = shown(tmp_path, 1400, made=deep(), acts=DRILLING)
    assert seen["errors"] == []
    amax, loss = seen["all"]
    assert amax["curves"] == [f"layers.{i}.fc1" for i in range(12)]
    assert amax["count"] == "curves 1 to 12 of 100, those that move most first"
    assert loss == {"text": "", "count": "", "curves": ["loss"]}, "nothing to choose from"
    assert seen["ends"] == [True, False]
    assert seen["reached"] == 100
    assert seen["last"]["curves"][-1] == "layers.99.fc1"
    assert (seen["named"]["curves"], seen["named"]["count"]) == (["layers.42.fc1"], "1 of 100 curves")
    assert seen["nowhere"] == {"text": "no curve's name contains 'nothing'", "count": "0 of 100 curves", "curves": []}
    assert seen["layer"][0]["curves"] == ["layers.80.fc1"]
    assert seen["layer"][1]["curves"] == ["loss"], "a chart of the whole run stays"
    assert seen["missing"][0] == {
        "text": "no curve here belongs to layer 100",
        "count": "0 of 100 curves",
        "curves": [],
    }
    assert seen["again"] == seen["all"]
    # the heat map above them chooses a layer
    assert seen["heads"] == ["layer", *(str(i) for i in range(0, 100, 10))]
    assert seen["cells"] == 100
    assert seen["tip"] == "layer 63, fc1: 64 times (click: only this layer)"
    assert seen["clicked"] == ["layers.63.fc1"]


@pytest.mark.timeout(1200)
def test_light_and_dark_wide_and_narrow(tmp_path: Path) -> None:
    def brightness(colour: str) -> float:
        return sum(map(float, re.findall(r"[\d.]+", colour)[:3]))

    for width in (1400, 600):
        light, dark = shown(tmp_path, width), shown(tmp_path, width, dark=True)
        for seen in (light, dark):
            assert seen["inner"] <= width
            assert seen["width"] <= seen["inner"], "nothing to scroll sideways"
            words = {(word, x, y, x + wide) for word, x, y, wide in seen["marks"]["words"]}
            lines = set(seen["marks"]["lines"])
            assert (len(words), len(lines)) == (3, 3)
            for word, left, _, right in words:
                assert not [line for line in lines if left < line < right], f"'{word}' is crossed by a mark's line"
            for (one, left, down, right), (two, left_, down_, right_) in itertools.combinations(words, 2):
                assert abs(down - down_) > 10 or right < left_ or right_ < left, f"'{one}' lies on '{two}'"
        assert brightness(light["background"]) > 600 > 200 > brightness(light["text"])
        assert brightness(dark["text"]) > 500 > 200 > brightness(dark["background"])


HOSTILE = (
    "<!--<script>", "</script><img src=x onerror=faults.push(1)>", "\"'><b id=bold>", "javascript:faults.push(1)",
    "{{ 7 * 7 }}\u2028&lt;",
)  # fmt: skip
LOOKING = """
<script>
addEventListener("load", () => drawn(() => {
  const out = document.createElement("pre"); out.id = "seen";
  out.textContent = JSON.stringify({ errors: window.faults, title: document.title, text: document.body.textContent, odd: document.querySelectorAll("#bold, main img, main script").length, links: [...document.querySelectorAll("a")].map((one) => one.protocol) });
  document.body.append(out);
}));
</script>
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("word", HOSTILE)
def test_no_value_is_anything_but_text(word: str, tmp_path: Path) -> None:
    made = Page(word, {word: word}, {word: word})
    made.heading(word, word, "bad")
    made.text(word)
    made.verdicts(word, [{"text": word, "word": word, "tone": word, "href": word, "more": [word]}])
    made.chart(word, [(word, [(0, 1.0), (1, 2.0)], word)], x=word, y=word, marks=[(1, word)], note=word)
    made.table(word, [Column(name=word, help=word, layer=True), Column(name="b")], [[word, {"text": word, "href": word, "tone": word, "tip": word}]])  # fmt: skip
    made.heat(word, [word], [word], {(word, word): 2.0}, low=1.0, high=4.0, unit=word, note=word)
    seen = shown(tmp_path, 1000, made=made.html(), acts=LOOKING)
    assert (seen["errors"], seen["odd"], seen["title"]) == ([], 0, word)
    assert set(seen["links"]) == {"file:"}
    assert seen["text"].count(word) > 10
