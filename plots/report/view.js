// What of a study is shown: one choice of networks for the page, its address, and what can be saved.

const view = { names: [], hidden: new Set(), filter: "", fits: () => true };
const visible = (panel) => !view.hidden.has(panel.name) && view.fits(panel.name);
const choosers = []; // called when other networks are chosen

function chosen() {
  for (const row of document.querySelectorAll("table.sortable tbody tr")) {
    const name = row.querySelector("th")?.textContent; // none in a table of numbers
    row.hidden = name != null && (view.hidden.has(name) || !view.fits(name));
  }
  for (const change of choosers) change();
  rove();
  noted();
}

/** Hide or show a network, or show it alone; of one that is alone, show all again. */
function choose(name, alone) {
  const others = view.names.filter((other) => other !== name);
  if (alone) view.hidden = new Set(others.every((other) => view.hidden.has(other)) ? [] : others);
  else if (!view.hidden.delete(name)) view.hidden.add(name);
  chosen();
}

const groups = [], rove = () => groups.forEach((group) => group());

/** Make controls one stop of the Tab key: arrow keys, Home and End move among them. */
function roving(host, selector) {
  let current = null;
  const group = () => {
    const nodes = [...host.querySelectorAll(selector)].filter((node) => !node.closest("[hidden]"));
    if (!nodes.includes(current)) current = nodes[0];
    for (const node of nodes) node.tabIndex = node === current ? 0 : -1;
    return nodes;
  };
  host.dataset.roving = selector;
  host.addEventListener("focusin", ({ target }) => { if (target.matches(selector)) { current = target; group(); } });
  host.addEventListener("keydown", (event) => {
    const nodes = group(), at = nodes.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
    if (at < 0 || to == null) return;
    event.preventDefault();
    nodes.at(to % nodes.length).focus();
  });
  groups.push(group);
  group();
}

/** Names of the networks with their colours; pressing one hides or shows it on the whole page. */
function legend(host, panels, change) {
  const buttons = [...new Map(panels.map((panel) => [panel.name, panel])).values()].map((panel) => {
    const swatch = make("i"), name = panel.name;
    const button = make("button", {
      type: "button", title: "Hide or show; double click, or Shift: only this one",
      onclick: (event) => choose(name, event.shiftKey || event.detail === 2),
    }, swatch, name);
    if (!view.names.includes(name)) view.names.push(name);
    always(() => { swatch.style.background = ink(panel.color); });
    choosers.push(() => {
      button.setAttribute("aria-pressed", String(!view.hidden.has(name)));
      button.hidden = !view.fits(name);
    });
    button.setAttribute("aria-pressed", "true");
    return button;
  });
  const list = make("div", { class: "legend", role: "toolbar", "aria-label": "Networks; arrow keys move, Shift and Enter show one alone" }, ...buttons);
  roving(list, "button");
  choosers.push(change);
  host.append(list);
}

/** The filter: a part of the names to show, of members too, or a regular expression. */
function networkFilter(host) {
  const said = make("output");
  const input = make("input", { type: "search", placeholder: "part of a name, or a regex", "aria-label": "Show only networks whose name fits" });
  const set = (to) => {
    input.value = view.filter = to;
    let pattern;
    try { pattern = new RegExp(to, "i"); } catch { pattern = new RegExp(to.replace(/\W/g, "\\$&"), "i"); }
    view.fits = (name) => (DATA.groups.find(([group]) => group === name) ?? [name]).some((one) => pattern.test(one));
    chosen();
    said.textContent = to ? `${view.names.filter(view.fits).length} of ${view.names.length} fit` : "";
  };
  input.addEventListener("input", () => set(input.value));
  const all = make("button", { type: "button", onclick: () => { view.hidden.clear(); set(""); } }, "Show all");
  host.append(make("div", { class: "controls networks" }, make("label", {}, "Networks", input, said), all));
  remember("networks", () => view.filter, set);
  remember("hidden", () => JSON.stringify([...view.hidden]), (to) => { view.hidden = new Set(JSON.parse(to)); chosen(); });
}

// --- the address ---

const remembered = new Map(); // by name: what a control says, how it is set, and what it said when the page opened
let waiting = 0;

function remember(name, value, set) { remembered.set(name, { value, set }); }
const settled = () => { for (const one of remembered.values()) one.opened = String(one.value()); };

/** Write what differs from the page as it opened into its address, with the section that is looked at. */
function noted() {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    const said = new URLSearchParams();
    for (const [name, one] of remembered) if (String(one.value()) !== one.opened) said.set(name, one.value());
    const section = [...document.querySelectorAll("main > section")].filter((node) => node.getBoundingClientRect().top < innerHeight / 3).at(-1);
    history.replaceState(null, "", `#${section?.id ?? ""}${said.size ? `?${said}` : ""}`);
  }, 150);
}

/** Set everything that the address says; what it does not know is left as it is. */
function recalled() {
  const [section, said] = location.hash.slice(1).split("?");
  if (!said) return;
  for (const [name, to] of new URLSearchParams(said)) {
    try { remembered.get(name)?.set(to); } catch { /* an address that somebody wrote by hand */ }
  }
  document.getElementById(section)?.scrollIntoView({ behavior: "instant" });
}
addEventListener("hashchange", recalled);

// --- saving ---

function download(name, type, content) {
  const link = make("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name.replace(/[^\w.-]+/g, "_") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** A button that opens to one per format; each is {name: function}. */
function saving(formats) {
  return make("details", { class: "save" }, make("summary", {}, "Save"),
    ...Object.entries(formats).map(([name, save]) => make("button", { type: "button", onclick: save }, name)));
}

/** A chart as a drawing of its own: colours and letters written into it, the names of its series below. */
function standalone(svg, title, series) {
  const copy = svg.cloneNode(true), [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number), line = 15;
  const names = [...new Map(series.map((s) => [s.name, s]).reverse()).values()].reverse(), total = height + line * (names.length + 1) + 4;
  names.forEach((s, i) => {
    const y = height + line * i + 8;
    copy.append(draw("path", { d: `M64 ${y}h18`, stroke: ink(s.color), "stroke-width": 2, "stroke-dasharray": s.dash }), draw("text", { x: 88, y: y + 4 }, s.name));
  });
  copy.append(draw("text", { x: width / 2, y: total - 6, "text-anchor": "middle" }, title));
  for (const text of copy.querySelectorAll("text")) fill(text, { fill: css("--text"), "font-family": "sans-serif", "font-size": 11 });
  for (const path of copy.querySelectorAll(".grid path")) path.setAttribute("stroke", css("--line"));
  for (const group of copy.querySelectorAll(".faint")) group.setAttribute("opacity", 0.35);
  copy.prepend(draw("rect", { width, height: total, fill: css("--back") }));
  fill(copy, { viewBox: `0 0 ${width} ${total}`, width, height: total, xmlns: "http://www.w3.org/2000/svg" });
  return new XMLSerializer().serializeToString(copy);
}

/** Save a drawing or a picture of it. */
const saved = (name, drawing) => saving({ SVG: () => download(`${name()}.svg`, "image/svg+xml", drawing()), PNG: () => savePicture(name(), drawing()) });

/** A pen that writes SVG as that of a canvas paints. */
function vectors(width, height) {
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}` }), put = (...node) => svg.append(draw(...node));
  let d = "";
  return {
    svg, beginPath() { d = ""; }, lineTo(x, y) { d += `${d ? "L" : "M"}${x} ${y}`; },
    arc(x, y, r) { d = `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`; },
    stroke() { put("path", { d, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth }); },
    fill() { put("path", { d, fill: this.fillStyle }); },
    fillText(words, x, y) { put("text", { x, y, "text-anchor": this.textAlign === "right" ? "end" : "middle" }, words); },
    drawImage(canvas) { put("image", { href: canvas.toDataURL(), width, height }); },
  };
}

function savePicture(name, drawing, times = 3) {
  const picture = new Image();
  picture.onload = () => {
    const canvas = make("canvas", { width: picture.width * times, height: picture.height * times });
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => download(`${name}.png`, "image/png", blob));
  };
  picture.src = `data:image/svg+xml;base64,${btoa(Array.from(new TextEncoder().encode(drawing), (c) => String.fromCharCode(c)).join(""))}`;
}

const plain = (node) => { const copy = node.cloneNode(true); copy.querySelectorAll("small, .info").forEach((part) => part.remove()); return copy.textContent.trim(); };
const titled = (head) => plain(head) + (head.querySelector("small a") ? ` (${head.querySelector("small a").textContent})` : "");

/** The shown rows and columns of a table; a number with an interval has three columns where they are `apart`. */
function cells(table, apart) {
  const heads = [...table.tHead.rows[0].cells], rows = [...table.tBodies[0].rows].filter((row) => !row.hidden);
  const shown = heads.flatMap((head, i) => (head.hidden ? [] : [i]));
  const wide = (i) => apart && rows.some((row) => row.cells[i].querySelector(".interval"));
  const value = (cell) => {
    const [low, high] = (cell.querySelector(".interval")?.textContent ?? "").replace(/[[\]]/g, "").split(",").map((part) => part.trim());
    return [cell.dataset.value ?? plain(cell), low ?? "", high ?? ""];
  };
  return [
    shown.flatMap((i) => ["", ...(wide(i) ? [" low", " high"] : [])].map((end) => titled(heads[i]) + end)),
    ...rows.map((row) => shown.flatMap((i) => (wide(i) ? value(row.cells[i]) : [plain(row.cells[i])]))),
  ];
}

const csv = (table) => cells(table, true).map((row) => row.map((cell) => (/[",\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell)).join(",")).join("\n") + "\n";

/** A table for a paper: `booktabs`, a caption and a label. */
function latex(table, title) {
  const escaped = (cell) => cell.replace(/[\\&%$#_{}~^]/g, (c) => ({ "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}" })[c] ?? `\\${c}`)
    .replaceAll("−", "$-$").replaceAll("±", "$\\pm$").replaceAll("◐", "*");
  const [head, ...rows] = cells(table, false).map((row) => `${row.map(escaped).join(" & ")} \\\\`);
  const columns = "l".repeat([...table.tHead.rows[0].cells].filter((cell) => !cell.hidden).length);
  return ["\\begin{table}", "\\centering", `\\begin{tabular}{${columns}}`, "\\toprule", head, "\\midrule", ...rows, "\\bottomrule", "\\end{tabular}",
    `\\caption{${escaped(title)}. In brackets: the 95\\,\\% interval.}`, `\\label{tab:${title.toLowerCase().replace(/\W+/g, "-")}}`, "\\end{table}", ""].join("\n");
}

/** What stands above a table: which of its columns are shown, and how it can be saved. */
function tableControls(table, name) {
  const heads = [...table.tHead.rows[0].cells];
  const set = (i, on) => { for (const row of table.rows) row.cells[i].hidden = !on; rove(); noted(); };
  const boxes = heads.map((head, i) => make("label", {}, make("input", { type: "checkbox", checked: true, onchange: (event) => set(i, event.target.checked) }), titled(head)));
  remember(`columns of ${name}`, () => heads.flatMap((head, i) => (head.hidden ? [i] : [])).join(" "), (to) => {
    const gone = to.split(" ").filter(Boolean).map(Number);
    boxes.forEach((box, i) => { box.firstChild.checked = !gone.includes(i); set(i, !gone.includes(i)); });
  });
  return make("div", { class: "controls" }, make("details", { class: "columns" }, make("summary", {}, "Columns"), ...boxes),
    saving({ CSV: () => download(`${name}.csv`, "text/csv", csv(table)), LaTeX: () => download(`${name}.tex`, "text/x-tex", latex(table, name)) }));
}
