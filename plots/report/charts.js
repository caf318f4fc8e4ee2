// Charts in SVG: points and lines with errors, spectra, trajectories, layers, and matrices of layers on a canvas.

const MARKS = {
  conv: "M-4 0L0-4 4 0 0 4z", msa: "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z", mlp: "M-3-3H3V3H-3z",
  other: "M-3.5 3L0-4 3.5 3z", tick: "M-.6 0V-11H.6V0z",
};
const mark = (kind) => MARKS[kind] || MARKS.other;

/**
 * A chart that fits the width of its place. `spec()` returns its series, {name, color, points: [{x, y, error, note,
 * key, kind}], line, dash, marks, area, faint}, with labels and scales of the axes. Hovering finds the nearest point.
 */
function chart(host, title, spec, hover = () => {}) {
  const svg = draw("svg", { role: "img", tabindex: -1 });
  const drawing = () => standalone(svg, title, spec().series);
  const save = saving({ SVG: () => download(`${title}.svg`, "image/svg+xml", drawing()), PNG: () => savePicture(title, drawing()) });
  const figure = make("figure", { class: "chart" }, make("figcaption", {}, title, save), svg);
  host.append(figure);
  let placed = [];
  const redraw = () => {
    const { series, x, y, height = 240 } = spec();
    drawn.set(figure, figure.clientWidth);
    const width = Math.max(figure.clientWidth, 220), left = 64, right = 8, top = 8, bottom = 34;
    svg.replaceChildren();
    fill(svg, { viewBox: `0 0 ${width} ${height}`, width, height, "aria-label": `${title}: ${series.map((s) => s.name).join(", ")}` }, []);
    const points = series.flatMap((s) => s.points);
    const good = (v, axis) => ok(v) && (axis.scale !== "log" || v > 0);
    const range = (axis, key, errors) => {
      const values = points.flatMap((p) => (errors && p.error ? [p[key], p[key] - p.error, p[key] + p.error] : [p[key]]));
      const [low, high] = axis.domain || extent(values.filter((v) => good(v, axis)));
      if (axis.scale === "log") return low > 0 ? [low / 1.15, high * 1.15] : [1e-3, 1];
      const pad = axis.domain ? 0 : 0.05 * (high - low) || Math.abs(low) * 0.1 || 0.5;
      return [low - pad, high + pad];
    };
    const sx = scale(x.scale || "linear", range(x, "x"), [left, width - right], x.width);
    const sy = scale(y.scale || "linear", range(y, "y", true), [height - bottom, top], y.width);
    const grid = draw("g", { class: "grid" });
    for (const v of sx.ticks(width < 420 ? 4 : 7)) {
      grid.append(draw("path", { d: `M${sx(v)} ${top}V${height - bottom}` }));
      grid.append(draw("text", { x: sx(v), y: height - bottom + 13, "text-anchor": "middle" }, text(v)));
    }
    for (const v of sy.ticks(5)) {
      grid.append(draw("path", { d: `M${left} ${sy(v)}H${width - right}` }));
      grid.append(draw("text", { x: left - 5, y: sy(v) + 4, "text-anchor": "end" }, text(v)));
    }
    grid.append(draw("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, x.label));
    grid.append(draw("text", { transform: `translate(10 ${(height - bottom) / 2})rotate(-90)`, "text-anchor": "middle" }, y.label));
    svg.append(grid);
    placed = [];
    for (const s of series) drawSeries(svg, s, sx, sy, good, x, y, placed, height - bottom);
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    let best = null, least = 900;
    for (const point of placed) {
      const distance = (point.px - event.clientX + box.left) ** 2 + (point.py - event.clientY + box.top) ** 2;
      if (distance < least) [best, least] = [point, distance];
    }
    return best;
  };
  svg.addEventListener("pointermove", (event) => {
    const found = nearest(event);
    hover(found);
    tell(event, ...(found ? [found.series, found.note] : []));
  });
  svg.addEventListener("pointerleave", (event) => { tell(event); hover(null); });
  svg.addEventListener("click", (event) => hover(nearest(event), true));
  always(redraw);
  resized.observe(figure);
  return { redraw, placed: () => placed, figure };
}

function drawSeries(svg, s, sx, sy, good, x, y, placed, floor) {
  const color = ink(s.color), group = draw("g", { class: s.faint ? "faint" : "" });
  const usable = s.points.map((p) => good(p.x, x) && good(p.y, y));
  let path = "", band = "", back = "", pen = "M";
  s.points.forEach((p, i) => {
    if (!usable[i]) { pen = "M"; return; }
    path += `${pen}${sx(p.x).toFixed(1)} ${sy(p.y).toFixed(1)}`;
    pen = "L";
    if (s.area && p.error) {
      const low = p.y - p.error;
      band += `${band ? "L" : "M"}${sx(p.x).toFixed(1)} ${sy(p.y + p.error).toFixed(1)}`;
      back = `L${sx(p.x).toFixed(1)} ${(good(low, y) ? sy(low) : floor).toFixed(1)}${back}`;
    }
  });
  if (band) group.append(draw("path", { d: `${band}${back}z`, fill: color, opacity: 0.18 }));
  if (s.line !== false) group.append(draw("path", { d: path, fill: "none", stroke: color, "stroke-width": 1.6, "stroke-dasharray": s.dash }));
  s.points.forEach((p, i) => {
    if (!usable[i]) return;
    const px = sx(p.x), py = sy(p.y);
    if (s.bars) group.append(draw("path", { d: `M${px} ${between(sy(0), 0, floor)}V${py}`, stroke: color, "stroke-width": 3, opacity: 0.5 }));
    if (p.error && !s.area) {
      const low = good(p.y - p.error, y) ? sy(p.y - p.error) : floor;
      group.append(draw("path", { d: `M${px} ${low}V${sy(p.y + p.error)}`, stroke: color }));
    }
    let shape = null;
    if (s.marks !== false || p.kind === "tick") {
      shape = draw("path", { d: mark(p.kind), fill: color, class: "mark" });
      group.append(draw("g", { transform: `translate(${px} ${py})` }, shape)); // a mark is scaled about its own place
    }
    placed.push({ px, py, key: p.key, series: s.name, note: p.note ?? `${text(p.x)}: ${text(p.y)}`, shape, index: i });
  });
  svg.append(group);
}

// --- spectra ---

const bell = (z) => Math.exp(-0.5 * z * z) / Math.sqrt(2 * Math.PI);
const sampled = (from, to, f) => Array.from({ length: 301 }, (_, i) => f(from + ((to - from) * i) / 300));

/** Silverman's robust bandwidth. */
function bandwidth(values) {
  const n = values.length, mean = values.reduce((a, b) => a + b, 0) / n;
  const deviation = Math.hypot(...values.map((v) => v - mean)) / Math.sqrt(n - 1);
  const spread = (quantile(values, 0.75) - quantile(values, 0.25)) / 1.34;
  return 0.9 * (Math.min(deviation, spread) || deviation) * n ** -0.2 || 0.1 * extent(values.map(Math.abs))[1];
}

/** Kernel density; each side of zero by itself, its kernels reflected: the areas are NEP and 1 - NEP. Ticks of `few`. */
function density(values, low, high, factor, few) {
  return [values.filter((v) => v < 0), values.filter((v) => v >= 0)].flatMap((side, positive) => {
    const [from, to] = positive ? [0, high] : [low, 0], end = { x: NaN, y: NaN };
    if (side.length < few) {
      return side.filter((x) => from <= x && x <= to).flatMap((x) => [{ x, y: 0, kind: "tick", note: text(x) }, end]);
    }
    const width = factor * bandwidth(side) || 1;
    return [...sampled(from, to, (x) => {
      const sum = side.reduce((a, v) => a + bell((x - v) / width) + bell((x + v) / width), 0);
      return { x, y: sum / (values.length * width) };
    }), end];
  });
}

function spectraPart(host) {
  const panels = DATA.spectra.map((p) => ({ ...p, v: Array.from(decode(p.values)) }));
  const nodes = DATA.densities.map((p) => ({ ...p, v: Array.from(decode(p.values)), w: decode(p.weights) }));
  let factor = 1, logarithmic = true;
  const charts = [], update = () => charts.forEach((c) => c.redraw());
  const bar = make("div", { class: "controls" });
  bar.append(slider("Bandwidth", -2, 2, 0.1, 0, (v) => { factor = 2 ** v; update(); return `× ${text(factor)}`; }).node);
  bar.append(checkbox("logarithmic density", true, (on) => { logarithmic = on; update(); }));
  host.append(bar);
  legend(host, [...panels, ...nodes], update);
  const place = make("div", { class: "grid2" });
  host.append(place);
  const shown = (all) => all.filter(visible);
  if (panels.length) {
    const all = panels.flatMap((p) => p.v), negative = all.filter((v) => v < 0);
    const low = negative.length ? 1.15 * quantile(negative, 0.01) : 0, high = 1.15 * Math.max(quantile(all, 0.99), 0) || -low || 1;
    charts.push(chart(place, "Max-eigenvalue spectra of mini-batches", () => {
      const series = shown(panels).map((p) => ({ ...p, marks: false, points: density(p.v, low, high, factor, p.few) }));
      const top = extent(series.flatMap((s) => s.points.map((p) => p.y)))[1] || 1;
      const axis = logarithmic ? { scale: "log", domain: [1e-4 * top, top] } : { domain: [0, 1.05 * top] };
      if (logarithmic) for (const s of series) s.points = s.points.map((p) => (p.y >= 1e-4 * top ? p : { ...p, y: p.kind ? 1e-4 * top : NaN }));
      return { series, x: { label: "Hessian eigenvalue", domain: [low, high] }, y: { label: "density", ...axis } };
    }));
    for (const p of panels.filter((p) => p.unsure || p.missing)) {
      host.append(make("p", { class: "partial" }, `${p.name}:${p.unsure ? ` ${p.unsure} eigenvalues not converged.` : ""}${lacking(p)}`));
    }
  }
  if (nodes.length) {
    const [low, high] = extent(nodes.flatMap((p) => p.v)), width = nodes[0].linear; // axis and kernel of the figure
    charts.push(chart(place, "Density of all eigenvalues per unit of this axis", () => {
      const from = Math.asinh((1.3 * low) / width), to = Math.asinh((1.3 * high) / width), sigma = nodes[0].kernel * factor;
      const series = shown(nodes).map((p) => {
        const points = sampled(from, to, (at) => {
          const y = p.v.reduce((a, v, k) => a + p.w[k] * bell((at - Math.asinh(v / width)) / sigma), 0) / sigma;
          return { x: width * Math.sinh(at), y: logarithmic && y < 1e-7 ? NaN : y };
        });
        return { ...p, marks: false, points };
      });
      const axis = logarithmic ? { scale: "log" } : {};
      return { series, x: { label: "Hessian eigenvalue", scale: "asinh", width, domain: [1.3 * low, 1.3 * high] }, y: { label: "density", ...axis } };
    }));
  }
}

// --- trajectories ---

function trajectoryPart(host) {
  const runs = DATA.trajectory.map((p) => ({ ...p, ...Object.fromEntries(
    ["epoch", "pc1", "pc2", "radius", "angle", "loss", "loss_half", "plane_loss", "off_plane", "accuracy"].map((k) => [k, decode(p[k])])) }));
  const charts = [], said = make("ul", { class: "plain" });
  const last = extent(runs.flatMap((r) => Array.from(r.epoch)))[1];
  let epoch = last;
  const nearest = (run) => run.epoch.reduce((best, e, i) => (Math.abs(e - epoch) < Math.abs(run.epoch[best] - epoch) ? i : best), 0);
  const mark = () => {
    for (const c of charts) for (const p of c.placed()) {
      const run = runs.find((r) => p.series.startsWith(r.name));
      p.shape?.classList.toggle("on", !!run && p.index === nearest(run));
    }
    said.replaceChildren(...runs.filter(visible).map((r) => {
      const i = nearest(r), say = (k, word) => (r[k] && ok(r[k][i]) ? `, ${word} ${text(r[k][i])}` : "");
      return make("li", {}, make("b", {}, r.name), `: epoch ${text(r.epoch[i])}${say("loss", "loss")}${say("accuracy", "accuracy")}` +
        `${say("plane_loss", "loss on the plane")}${say("off_plane", "distance from the plane")}${say("radius", "distance to the end")}.${lacking(r)}`);
    }));
  };
  const update = () => { charts.forEach((c) => c.redraw()); mark(); };
  const bar = make("div", { class: "controls" });
  bar.append(slider("Epoch", 0, last, last / 200 || 1, last, (v) => { epoch = v; mark(); return text(v); }).node);
  host.append(bar);
  legend(host, runs, update);
  const place = make("div", { class: "grid2" });
  host.append(place, said);
  const shown = () => runs.filter(visible);
  charts.push(chart(place, "Principal plane of each run, ending at the origin", () => ({
    series: shown().map((r) => ({ name: r.name, color: r.color, points: Array.from(r.pc1, (x, i) => ({ x, y: r.pc2[i], note: `epoch ${text(r.epoch[i])}` })) })),
    x: { label: "first principal coordinate" }, y: { label: "second principal coordinate" },
  })));
  if (runs.some((r) => r.loss)) charts.push(chart(place, "Loss: own (solid), on the plane (dashed)", () => ({
    series: shown().flatMap((r) => ["loss", "plane_loss"].filter((k) => r[k]).map((k) => ({
      name: k === "loss" ? r.name : `${r.name}, on the plane`, color: r.color, dash: k === "loss" ? null : "5 4",
      points: Array.from(r[k], (y, i) => ({ x: r.epoch[i], y, error: k === "loss" && r.loss_half ? r.loss_half[i] || 0 : 0 })),
    }))),
    x: { label: "epoch" }, y: { label: "loss", scale: "log" },
  })));
  always(mark);
}

// --- layers ---

function layersPart(host) {
  const charts = [], matrices = [];
  const panels = DATA.layers.flatMap((plot) => plot.series).concat(DATA.similarity);
  const plots = DATA.layers.filter((plot) => plot.series.length).map((plot) => ({ ...plot, series: plot.series.map((s) => ({
    ...s, d: decode(s.depth), v: decode(s.values), e: decode(s.halves), h: decode(s.heads) })) }));
  const said = make("div", { id: "layer-said", "aria-live": "polite" });
  const key = (panel, layer) => `${panel.who}\n${layer}`;
  const keys = [...new Set(panels.flatMap((p) => p.layers.map((layer) => key(p, layer))))];
  let marked = null, pinned = null;
  const select = choice("Layer", ["none", ...keys.map((k) => k.replace("\n", ": "))], (i) => { pinned = keys[i - 1] || null; show(pinned); });
  const show = (to) => {
    marked = to;
    for (const c of charts) for (const p of c.placed()) p.shape?.classList.toggle("on", p.key === to);
    for (const m of matrices) m(to);
    const lines = !to ? [] : plots.flatMap((plot) => plot.series.flatMap((s) => s.layers.flatMap((layer, i) => (key(s, layer) === to && ok(s.v[i])
      ? [make("li", {}, `${plot.title}: ${text(s.v[i])}${plusMinus(s.e?.[i])} ${plot.unit}`)] : []))));
    said.replaceChildren(...(to ? [make("b", {}, to.replace("\n", ": ")), make("ul", { class: "plain" }, ...lines)] : ["Point at a layer or choose one: every plot marks it."]));
  };
  const hover = (found, click) => {
    if (click && found) { pinned = pinned === found.key ? null : found.key; select.select.value = keys.indexOf(pinned) + 1; }
    const to = found?.key || pinned;
    if (to !== marked) show(to);
  };
  const update = () => { charts.forEach((c) => c.redraw()); show(marked); };
  host.append(make("div", { class: "controls" }, select.node));
  legend(host, panels, update);
  const place = make("div", { class: "grid2" });
  host.append(place, said); // below: nothing that is pointed at moves when the words change
  for (const plot of plots) {
    const shown = () => plot.series.filter(visible);
    charts.push(chart(place, plot.title, () => ({
      series: shown().flatMap((s) => {
        const heads = s.h ? s.h.length / s.v.length : 0, point = (i) => ({ x: s.d[i], kind: s.kinds[i], key: key(s, s.layers[i]) });
        const dots = { name: s.name, color: s.color, line: false, faint: true, points: Array.from(s.h || [], (y, i) => {
          const layer = Math.floor(i / heads);
          return { ...point(layer), y, note: `${s.layers[layer]}, head ${i % heads}: ${text(y)}` };
        }) };
        return [dots, { name: s.name, color: s.color, line: !plot.bars, bars: plot.bars, points: Array.from(s.v, (y, i) => ({
          ...point(i), y, error: s.e ? s.e[i] || 0 : 0, note: `${s.layers[i]} (${s.kinds[i]}): ${text(y)}${plusMinus(s.e?.[i])}` })) }];
      }),
      x: { label: "normalised depth", domain: [-0.02, 1.02] }, y: { label: plot.unit, scale: plot.log ? "log" : "linear" },
    }), hover));
    for (const s of plot.series.filter((s) => s.missing)) charts.at(-1).figure.append(make("p", { class: "partial" }, `${s.name}:${lacking(s)}`));
  }
  for (const panel of DATA.similarity) matrices.push(matrix(place, panel, key, hover));
  host.append(make("p", { class: "note" }, "● self-attention, ■ MLP, ◆ convolution, ▲ other; bars and ±: 95 % over samples."));
  always(() => show(marked));
}

/** Similarity of all pairs of layers as a picture; returns the function that marks a layer in it. */
function matrix(host, panel, key, hover) {
  const values = decode(panel.cka), errors = decode(panel.half), rows = panel.layers.length, columns = panel.others.length;
  const canvas = make("canvas", { role: "img", "aria-label": `Similarity of the layers of ${panel.name}` });
  const title = `Similarity (CKA): ${panel.name}`;
  const figure = make("figure", { class: "chart" }, make("figcaption", {}, `${title}.${lacking(panel)}`, saving({ PNG: () => saveCanvas(title, canvas) })), canvas);
  choosers.push(() => { figure.hidden = !visible(panel); });
  host.append(figure);
  resized.observe(figure);
  const small = make("canvas", { width: columns, height: rows }), pixels = new ImageData(columns, rows);
  values.forEach((v, i) => pixels.data.set(ok(v) ? [...viridis(v), 255] : [128, 128, 128, 90], 4 * i));
  small.getContext("2d").putImageData(pixels, 0, 0);
  let on = null;
  const redraw = () => {
    const side = Math.min(canvas.parentNode.clientWidth, 280), high = (side * rows) / columns, pen = canvas.getContext("2d");
    [canvas.width, canvas.height] = [side, high];
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, 0, 0, side, high);
    pen.strokeStyle = "#f22";
    pen.lineWidth = 2;
    panel.layers.forEach((layer, i) => { if (key(panel, layer) === on) pen.strokeRect(1, (i * high) / rows, side - 2, high / rows); });
    panel.others.forEach((layer, i) => { if (key(panel, layer) === on) pen.strokeRect((i * side) / columns, 1, side / columns, high - 2); });
  };
  canvas.addEventListener("pointermove", (event) => {
    const i = between(Math.floor((event.offsetY / canvas.clientHeight) * rows), 0, rows - 1);
    const j = between(Math.floor((event.offsetX / canvas.clientWidth) * columns), 0, columns - 1), at = i * columns + j;
    hover({ key: key(panel, panel.layers[i]) });
    tell(event, `${panel.layers[i]} with ${panel.others[j]}`, `CKA ${text(values[at])}${plusMinus(errors?.[at])}`);
  });
  canvas.addEventListener("pointerleave", (event) => { tell(event); hover(null); });
  always(redraw);
  return (to) => { on = to; redraw(); };
}
