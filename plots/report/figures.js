"use strict";
// What all figures share: decoded arrays, numbers as text, scales, colours, elements, and one tooltip.
// Labels come from a file that anybody may have written: they only ever become text nodes.

const DATA = JSON.parse(document.getElementById("data").textContent);
const ok = Number.isFinite;
const redraws = [];

/** Run something now, and again when the theme or the width of a place changes. */
const always = (redraw) => { redraws.push(redraw); redraw(); };
const redrawAll = () => redraws.forEach((redraw) => redraw());

/** Draw again where a place got another width than it was drawn at: by the window, or by what came beside it. */
const drawn = new WeakMap();
const resized = new ResizeObserver((all) => {
  const changed = all.map(({ target }) => target).filter((place) => drawn.get(place) !== place.clientWidth);
  for (const place of changed) drawn.set(place, place.clientWidth);
  if (changed.length) redrawAll();
});

/** The values of a stored array: NaN is unfinished, Infinity is finished but not finite. */
function decode(array) {
  if (array.t === "f4") return new Float32Array(bytes(array.b).buffer);
  const { z, lo, hi, log, zero } = array, wide = array.t === "u2", mask = wide ? 65535 : 255, top = mask - 2;
  const size = z.length / (wide ? 2 : 1), columns = array.n.at(-1), codes = new Int32Array(size);
  return Float32Array.from(codes, (_, k) => {
    const rest = z[k] | (wide ? z[k + size] << 8 : 0), up = k >= columns, left = k % columns;
    const near = (left ? codes[k - 1] : 0) + (up ? codes[k - columns] : 0) - (left && up ? codes[k - columns - 1] : 0);
    const code = codes[k] = (near + ((rest >> 1) ^ -(rest & 1))) & mask, value = lo + ((hi - lo) * code) / top;
    if (code > top) return code === mask ? NaN : Infinity;
    return zero && !code ? 0 : log ? Math.exp(value) : value;
  });
}

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

/** Decode the arrays of the data; false where the browser cannot decompress them, and the pictures stay. */
async function unpack() {
  const found = [], look = (v) => { if (v?.z) found.push(v); else if (v && typeof v === "object") Object.values(v).forEach(look); };
  look(DATA);
  if (found.length && !self.DecompressionStream) return false;
  await Promise.all(found.map(async (v) => {
    const stream = new Blob([bytes(v.z)]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    v.z = new Uint8Array(await new Response(stream).arrayBuffer());
  }));
  const put = (v) => { for (const k in v) if (v[k]?.n) v[k] = decode(v[k]); else if (typeof v[k] === "object") put(v[k]); };
  put(DATA);
  return true;
}

function text(value) {
  if (Number.isNaN(value)) return "unfinished";
  if (!ok(value)) return "not finite";
  const size = Math.abs(value);
  return (size && (size < 1e-3 || size >= 1e5) ? value.toExponential(2).replace(/\.?0*e\+?/, "e") : String(+value.toPrecision(4))).replaceAll("-", "−");
}

/** The half width of a 95 % interval in words, from a standard error. */
const plusMinus = (half) => (ok(half) ? ` ± ${text(half)}` : "");
const between = (value, low, high) => Math.min(Math.max(value, low), high);
const finite = (values) => Array.from(values).filter(ok);

function quantile(values, share) {
  const sorted = finite(values).sort((a, b) => a - b);
  return sorted[Math.round(share * (sorted.length - 1))];
}

/** Smallest and largest finite value; a loop, since thousands of arguments would overflow the stack. */
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (ok(v)) { low = Math.min(low, v); high = Math.max(high, v); }
  return low <= high ? [low, high] : [0, 1];
}

// --- elements ---

function fill(node, attributes, children = []) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** A labelled slider; `change` gets its number, and returns what is written beside it. */
function slider(label, low, high, step, value, change) {
  const shown = make("output");
  const input = make("input", { type: "range", min: low, max: high, step, value, "aria-label": label });
  const update = () => {
    shown.textContent = change(+input.value) ?? "";
    input.setAttribute("aria-valuetext", shown.textContent || input.value);
  };
  const set = (to) => { input.value = to; update(); };
  input.addEventListener("input", () => { update(); noted(); });
  remember(label, () => input.value, set);
  const node = make("label", {}, label, input, shown);
  return { node, input, update, set };
}

function checkbox(label, checked, change) {
  const input = make("input", { type: "checkbox", checked, onchange: () => { change(input.checked); noted(); } });
  remember(label, () => input.checked, (to) => { input.checked = to === "true"; change(input.checked); });
  return make("label", {}, input, label);
}

function choice(label, names, change) {
  const select = make("select", { "aria-label": label, onchange: () => { change(+select.value); noted(); } });
  remember(label, () => select.value, (to) => { if (names[to]) change(+(select.value = to)); });
  names.forEach((name, i) => select.append(make("option", { value: i }, name)));
  return { node: make("label", {}, label, select), select };
}

const tooltip = make("div", { id: "tooltip", role: "status", hidden: true });
document.body.append(tooltip);

function tell(event, ...lines) {
  tooltip.hidden = !lines.length;
  if (!lines.length) return;
  tooltip.replaceChildren(...lines.map((line) => make("div", {}, line)));
  const box = tooltip.getBoundingClientRect();
  tooltip.style.left = `${between(event.clientX + 14, 0, innerWidth - box.width - 6)}px`;
  tooltip.style.top = `${between(event.clientY + 14, 0, innerHeight - box.height - 6)}px`;
}

// --- scales and colours ---

/** From values to pixels: linear, logarithmic, or linear around zero and logarithmic beyond `width`. */
function scale(kind, [low, high], [from, to], width = 1) {
  const f = { linear: (v) => v, log: Math.log, asinh: (v) => Math.asinh(v / width) }[kind];
  const a = f(low), b = f(high);
  const at = (v) => from + ((f(v) - a) / (b - a || 1)) * (to - from);
  at.back = (p) => low + ((p - from) / (to - from)) * (high - low); // where it is linear
  at.ticks = (count) => {
    if (kind === "linear" || (kind === "log" && high < 30 * low)) {
      const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
      const step = [1, 2, 5, 10].find((s) => s * power >= raw) * power, found = [];
      for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(+(i * step).toPrecision(12));
      return found;
    }
    const found = [], edge = kind === "asinh" ? width : low, steps = kind === "log" && high < 100 * low ? [1, 2, 5] : [1];
    const largest = Math.max(Math.abs(low), Math.abs(high));
    const decades = Math.max(1, Math.ceil((Math.log10(largest) - Math.log10(edge)) / count));
    for (let d = Math.ceil(Math.log10(edge) - 1e-9) - !!steps[1]; 10 ** d <= largest * 1.0001; d += decades) found.push(...steps.map((k) => k * 10 ** d));
    const all = kind === "asinh" ? [...found.map((v) => -v).reverse(), 0, ...found] : found;
    return all.filter((v) => v >= low && v <= high);
  };
  return at;
}

const VIRIDIS = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"]
  .map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));

function viridis(share) {
  const at = between(share, 0, 1) * 8, i = Math.min(Math.floor(at), 7);
  return VIRIDIS[i].map((part, k) => part + (at - i) * (VIRIDIS[i + 1][k] - part));
}

const dark = () =>
  (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A network's colour, lighter on a dark page where it would be hard to see. */
function ink(hex) {
  const parts = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const light = (0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2]) / 255;
  if (!dark() || light > 0.5) return hex;
  return `rgb(${parts.map((part) => Math.round(part + 0.45 * (255 - part)))})`;
}

/** What a panel lacks, in words. */
const lacking = (panel) => (panel.missing ? ` ◐ ${panel.missing}.` : "");
