"use strict";
(() => {
  const doc = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("main");
  const state = { layer: null, watchers: [] };
  const make = (tag, values = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(values)) {
      if (name === "class") node.className = value;
      else if (name === "text") node.textContent = value;
      else if (name === "style") node.style.cssText = value; // the page's policy allows no style attribute
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== undefined && value !== null) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const choose = (layer) => { state.layer = state.layer === layer ? null : layer; show(); };
  const show = () => {
    const place = document.getElementById("chosen");
    place.hidden = state.layer === null;
    place.replaceChildren(`layer ${state.layer} only `, make("button", { type: "button", text: "all layers", onclick: () => { state.layer = null; show(); } }));
    state.watchers.forEach((watcher) => watcher());
  };

  // numbers: one unit per column, with the significant digits
  const number = (value, unit) => {
    if (value === null || value === undefined) return "";
    if (typeof value !== "number") return String(value);
    if (unit === "percent") { const part = 100 * value; return part === 0 ? "0 %" : part < 0.01 ? "<0.01 %" : `${part >= 10 ? part.toFixed(1) : part.toFixed(2)} %`; }
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
    return String(+value.toPrecision(4));
  };
  // ticks of one axis: all or none with an exponent, and no more labels than there is room for
  const ticked = (ticks) => {
    const sizes = ticks.filter((tick) => tick).map(Math.abs);
    const wide = sizes.some((size) => size < 1e-3 || size >= 1e6);
    const every = Math.ceil(ticks.filter((tick) => tick !== null).length / 10);
    let seen = -1;
    return ticks.map((tick) => (tick === null || (seen += 1) % every ? "" : wide && tick !== 0 ? (+tick.toPrecision(4)).toExponential() : number(tick)));
  };
  const key = (cell) => (cell !== null && typeof cell === "object" ? cell.text : cell);

  // tooltips
  const tip = document.getElementById("tip");
  document.addEventListener("pointermove", (event) => {
    const at = event.target.closest ? event.target.closest("[data-tip]") : null;
    tip.hidden = !at;
    if (!at) return;
    tip.textContent = at.dataset.tip;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
  });

  const palette = ["#3b7dd8", "#d9822b", "#2e9e5b", "#c23b4b", "#8a63d2", "#1aa3a3", "#b5651d", "#d15fa8", "#7d8a2e", "#5b7083", "#e0b400", "#7fb2f0"];
  // steps and powers of two are whole numbers
  const whole = [...Array(13).keys()].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));
  const charts = [];
  const chart = (block) => {
    const box = make("div", { class: "chart" });
    const layered = block.series.some((line) => line.layer !== "");
    let plot = null, wanted = "", first = 0;
    const count = make("span", { class: "dim" });
    const turn = (label, name, by) => make("button", { type: "button", text: label, "aria-label": name, onclick: () => { first += by; draw(); } });
    const [back, on] = [turn("‹", "curves before these", -block.shown), turn("›", "more curves", block.shown)];
    const tools = block.series.length > block.shown ? make("div", { class: "tools" }, make("input", { type: "search", placeholder: "filter curves", "aria-label": "filter curves", oninput: (event) => { wanted = event.target.value.toLowerCase(); first = 0; draw(); } }), back, on, count) : null;
    const place = make("div");
    const draw = () => {
      if (plot) plot.destroy();
      plot = null;
      const found = block.series.filter((line) => (state.layer === null || !layered || line.layer === state.layer) && line.name.toLowerCase().includes(wanted));
      first = Math.max(0, Math.min(first, found.length - 1));
      const lines = found.slice(first, first + block.shown);
      back.disabled = first === 0;
      on.disabled = first + block.shown >= found.length;
      count.textContent = found.length > block.shown ? `curves ${first + 1} to ${first + lines.length} of ${found.length}, ${block.order}` : `${found.length} of ${block.series.length} curves`;
      place.replaceChildren();
      if (!lines.length && (state.layer !== null || wanted)) {
        const sought = state.layer === null ? `no curve's name contains '${wanted}'` : block.whole > block.series.length ? `no curve of layer ${state.layer} is on this page: ${block.series.length} of ${block.whole} are included` : `no curve here belongs to layer ${state.layer}${wanted ? ` and contains '${wanted}'` : ""}`;
        place.append(make("p", { class: "dim", text: sought }));
        return;
      }
      const xs = [...new Set([...block.reach, ...lines.flatMap((line) => block.xs[line.x])])].sort((a, b) => a - b);
      const at = new Map(xs.map((x, i) => [x, i]));
      // undefined: not measured, the line continues; null: not finite, the line breaks
      const data = [xs, ...lines.map((line) => {
        const values = new Array(xs.length).fill(undefined);
        block.xs[line.x].forEach((x, i) => { const y = line.y[i], good = typeof y === "number" && (!block.log || y > 0); values[at.get(x)] = good ? y : null; });
        return values;
      })];
      const axis = { stroke: css("--fg"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
      const narrow = box.clientWidth < 520;
      const marks = { hooks: { draw: [(u) => {
        const context = u.ctx;
        context.save();
        context.strokeStyle = context.fillStyle = css("--bad");
        context.font = `${11 * devicePixelRatio}px system-ui`;
        context.textAlign = "left";
        context.setLineDash([4, 4]);
        const words = [], edge = u.bbox.left + u.bbox.width, lefts = block.marks.map(([x]) => u.valToPos(x, "x", true));
        block.marks.forEach(([, word], i) => {
          const left = lefts[i];
          if (left < u.bbox.left || left > edge) return;
          context.beginPath(); context.moveTo(left, u.bbox.top); context.lineTo(left, u.bbox.top + u.bbox.height); context.stroke();
          // beside its line where there is room, preferably where no other mark's line passes, and below labels that are in the way
          const wide = context.measureText(word).width, clear = (from) => !lefts.some((one) => one > from - 3 && one < from + wide + 3);
          const places = [left + 4, left - 4 - wide].filter((from) => from >= u.bbox.left && from + wide <= edge);
          const from = places.find(clear) ?? places[0] ?? Math.max(u.bbox.left, edge - wide);
          let row = 0;
          while (words.some((one) => one.row === row && from < one.from + one.wide + 6 && one.from < from + wide + 6)) row += 1;
          words.push({ word, from, wide, row, down: u.bbox.top + (12 + 13 * row) * devicePixelRatio });
        });
        // above all lines, on the page's own colour, so that a nearby mark or a curve does not cross them out
        words.forEach(({ word, from, down, wide }) => {
          context.fillStyle = css("--bg"); context.globalAlpha = 0.8;
          context.fillRect(from - 1, down - 10 * devicePixelRatio, wide + 2, 13 * devicePixelRatio);
          context.fillStyle = css("--bad"); context.globalAlpha = 1;
          context.fillText(word, from, down);
        });
        context.restore();
      }] } };
      plot = new uPlot({
        width: Math.max(260, box.clientWidth - 14), height: Math.max(narrow ? 220 : 280, 60 + 8 * block.y.length), scales: { x: { time: false }, y: { distr: block.log ? 3 : 1 } },
        axes: [{ ...axis, label: block.x, labelSize: 20, incrs: whole }, { ...axis, label: block.y, labelSize: 20, size: 66, values: (u, ticks) => ticked(ticks) }],
        cursor: { focus: { prox: 24 } }, focus: { alpha: 0.25 }, legend: { live: true, isolate: true },
        series: [{ label: block.x, value: (u, x) => (x === null || x === undefined ? "–" : number(x)) }, ...lines.map((line, i) => ({ label: line.name, stroke: palette[i % palette.length], width: 1.5, spanGaps: false, fill: block.bars ? `${palette[i % palette.length]}66` : undefined, paths: block.bars ? uPlot.paths.bars({ size: [0.9, 60] }) : undefined, points: { show: block.xs[line.x].length < 40 && !block.bars, size: block.xs[line.x].length < 3 ? 8 : 5, fill: palette[i % palette.length] }, value: (u, value) => (value === null || value === undefined ? "–" : number(value)) }))],
        plugins: block.marks.length ? [marks] : [],
      }, data, place);
    };
    box.append(...(tools ? [tools, place] : [place]));
    charts.push(draw);
    state.watchers.push(() => { if (layered) { first = 0; draw(); } });
    return box;
  };

  const table = (block) => {
    const body = make("tbody");
    let sorted = -1, down = true, wanted = "";
    const count = make("span", { class: "dim" });
    const at = block.columns.findIndex((column) => column.layer);
    const fill = () => {
      let rows = block.rows.filter((row) => (wanted === "" || row.some((cell) => String(key(cell)).toLowerCase().includes(wanted))) && (state.layer === null || at < 0 || String(key(row[at])) === state.layer));
      if (sorted >= 0) {
        const value = (row) => { const cell = key(row[sorted]); return typeof cell === "string" && cell !== "" && !Number.isNaN(Number(cell)) ? Number(cell) : cell; };
        rows = [...rows].sort((one, two) => {
          const [a, b] = [value(one), value(two)];
          if (a === null || a === undefined || a === "") return 1;
          if (b === null || b === undefined || b === "") return -1;
          const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
          return down ? -order : order;
        });
      }
      body.replaceChildren(...rows.map((row) => make("tr", {}, ...row.map((cell, i) => {
        const column = block.columns[i];
        const rich = cell !== null && typeof cell === "object" ? cell : {};
        const text = number(key(cell), column.unit);
        const node = make("td", { class: `${column.number ? "" : "text"} ${rich.tone || ""} ${column.layer ? "layer" : ""}`, "data-tip": column.layer ? "click: only this layer" : rich.tip });
        node.append(rich.href ? make("a", { href: `#${rich.href}`, text }) : text);
        if (column.layer) node.addEventListener("click", () => choose(String(key(cell))));
        return node;
      }))));
      count.textContent = `${rows.length} of ${block.rows.length} rows`;
    };
    const heads = block.columns.map((column, i) => make("th", {
      class: column.number ? "" : "text", text: column.name, "data-tip": `${column.help || column.name} (click: sort)`, tabindex: "0",
      onclick: (event) => {
        down = sorted === i ? !down : column.number; sorted = i;
        heads.forEach((head) => head.removeAttribute("aria-sort"));
        event.currentTarget.setAttribute("aria-sort", down ? "descending" : "ascending");
        fill();
      },
    }));
    const tools = block.rows.length > 8 ? make("div", { class: "tools" }, make("input", { type: "search", placeholder: "filter rows", "aria-label": "filter rows", oninput: (event) => { wanted = event.target.value.toLowerCase(); fill(); } }), count) : null;
    state.watchers.push(fill);
    fill();
    const whole = make("div", {}, tools, make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body)));
    return block.folded ? make("details", {}, make("summary", { text: `${block.title} (${block.rows.length})` }), whole) : whole;
  };

  const stops = [[13, 8, 135], [126, 3, 168], [204, 71, 120], [248, 149, 64], [240, 249, 33]];
  const colour = (part) => {
    const place = Math.max(0, Math.min(1, part)) * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
    return `rgb(${stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (place - low))).join(",")})`;
  };
  const heat = (block) => {
    const span = Math.log(block.high / block.low), dense = block.layers.length > 40, percent = block.unit === "percent";
    const said = (value) => (typeof value !== "number" ? String(value) : percent ? number(value, "percent") : `${number(value)} times`);
    const short = (value) => (typeof value !== "number" ? value : percent ? (100 * value >= 10 ? (100 * value).toFixed(0) : (100 * value).toFixed(1)) : value >= 1e4 ? value.toExponential(0) : String(+value.toPrecision(value >= 100 ? 3 : 2)));
    const cells = [];
    const rows = block.kinds.map((kind, i) => make("tr", {}, make("th", { class: "text", text: kind }), ...block.layers.map((layer, j) => {
      const value = block.grid[i][j];
      if (value === null || value === undefined) return make("td", { class: "none" });
      const part = typeof value === "number" ? Math.log(Math.max(value, block.low) / block.low) / span : 1;
      const cell = make("td", { class: part < 0.55 ? "lit" : "", style: `background:${colour(part)}`, "data-tip": `layer ${layer || "–"}, ${kind}: ${said(value)} (click: only this layer)`, text: dense ? "" : short(value), onclick: () => choose(layer) });
      cells.push([layer, cell]);
      return cell;
    })));
    state.watchers.push(() => cells.forEach(([layer, cell]) => cell.classList.toggle("chosen", layer === state.layer)));
    const gradient = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map(colour).join(",")})`;
    // narrow cells have no room for a number each
    const wide = dense ? 10 : 1;
    const heads = block.layers.map((layer, j) => (j % wide ? null : make("th", { text: layer || "–", colspan: Math.min(wide, block.layers.length - j) })));
    return make("div", { class: dense ? "heat dense" : "heat" },
      make("div", { class: "scale" }, said(block.low), make("i", { style: `background:${gradient}` }), said(block.high), percent && !dense ? " (logarithmic; cells in percent)" : " (logarithmic)"),
      make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, make("th", { class: "text", text: "layer" }), ...heads.filter((head) => head !== null))), make("tbody", {}, ...rows))));
  };

  const item = (one) => make("li", {}, one.word ? make("span", { class: `word ${one.tone || ""}`, text: one.word }) : null, one.word ? " " : null, one.href ? make("a", { href: `#${one.href}`, text: one.text }) : one.text, one.more && one.more.length ? make("ul", {}, ...one.more.map((line) => make("li", { text: line }))) : null);
  const kinds = {
    heading: (block) => make("h2", {}, block.title, " ", block.word ? make("span", { class: `word ${block.tone}`, text: block.word }) : ""),
    text: (block) => make("p", { class: block.dim ? "dim" : "", text: block.text }),
    verdicts: (block) => make("ul", { class: "verdicts" }, ...block.items.map(item)),
    chart, table, heat,
  };
  document.getElementById("title").textContent = doc.title;
  document.getElementById("made").append(...Object.entries(doc.made).flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: String(value) })]));
  main.replaceChildren(...doc.blocks.map((block) => make("section", { id: block.id },
    block.title && block.kind !== "heading" && !block.folded ? make("h3", { text: block.title }) : null,
    kinds[block.kind](block),
    block.note ? make("p", { class: "dim", text: block.note }) : null,
    block.kept ? make("p", { class: "dim warn", text: block.kept }) : null,
    block.sampled ? make("p", { class: "dim warn", text: `Sampled: ${block.sampled}.` }) : null)));
  const glossary = Object.entries(doc.glossary);
  document.getElementById("glossary").hidden = !glossary.length;
  document.querySelector("#glossary dl").append(...glossary.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]));
  const redraw = () => charts.forEach((draw) => draw());
  redraw(); // a chart is as wide as its place on the page, which it has by now
  document.getElementById("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 120); });
})();
