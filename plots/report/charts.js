// Charts in SVG: points and lines with errors, spectra, trajectories, layers, and matrices of layers.

const MARKS = {
  conv: "M-4 0L0-4 4 0 0 4z", msa: "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z", mlp: "M-3-3H3V3H-3z",
  other: "M-3.5 3L0-4 3.5 3z", tick: "M-.6 0V-11H.6V0z",
};
const mark = (kind) => MARKS[kind] || MARKS.other;

/**
 * A chart that fits the width of its place. `spec(width)` returns its series, {name, color, points: [{x, y, error, note,
 * key, kind}], line, dash, width, marks, edge, area, faint}, labels and scales of the axes, and an image below it all.
 * Hovering finds the nearest point.
 */
function chart(host, title, spec, hover = () => {}) {
  const svg = draw("svg", { role: "img", tabindex: -1 });
  let placed = [], now = {}, sx, sy;
  const save = saved(() => now.name, () => standalone(svg, now.name, now.series));
  const figure = make("figure", { class: "chart" }, make("figcaption", {}, title, save), svg);
  host.append(figure);
  const redraw = () => {
    drawn.set(figure, figure.clientWidth);
    const width = Math.max(figure.clientWidth, 220);
    now = { name: title, height: 240, ...spec(width) };
    const { series, x, y, height, name, image } = now, left = 64, top = 8, side = width - 8, floor = height - 34;
    svg.replaceChildren();
    figure.classList.toggle("flat", !!image);
    fill(svg, { viewBox: `0 0 ${width} ${height}`, width, height, "aria-label": `${name}: ${series.map((s) => s.name).join(", ")}` });
    const points = series.flatMap((s) => s.points);
    const good = (v, axis) => ok(v) && (axis.scale !== "log" || v > 0);
    const range = (axis, key, errors) => {
      const values = points.flatMap((p) => (errors && p.error ? [p[key], p[key] - p.error, p[key] + p.error] : [p[key]]));
      const [low, high] = axis.domain || extent(values.filter((v) => good(v, axis)));
      if (axis.scale === "log") return low > 0 ? [low / 1.15, high * 1.15] : [1e-3, 1];
      const pad = axis.domain ? 0 : 0.05 * (high - low) || Math.abs(low) * 0.1 || 0.5;
      return [low - pad, high + pad];
    };
    sx = scale(x.scale || "linear", range(x, "x"), [left, side], x.width);
    sy = scale(y.scale || "linear", range(y, "y", true), [floor, top], y.width);
    const grid = draw("g", { class: "grid" }), write = (words, place) => grid.append(draw("text", { "text-anchor": "middle", ...place }, words));
    for (const v of sx.ticks(width < 420 ? 4 : 7)) {
      grid.append(draw("path", { d: `M${sx(v)} ${top}V${floor}` }));
      write(text(v), { x: sx(v), y: floor + 13 });
    }
    for (const v of sy.ticks(5)) {
      grid.append(draw("path", { d: `M${left} ${sy(v)}H${side}` }));
      write(text(v), { x: left - 5, y: sy(v) + 4, "text-anchor": "end" });
    }
    write(x.label, { x: (left + width) / 2, y: height - 4 });
    write(y.label, { transform: `translate(10 ${floor / 2})rotate(-90)` });
    svg.append(grid);
    if (image) svg.append(draw("image", { href: image, x: left, y: top, width: side - left, height: floor - top, preserveAspectRatio: "none", "image-rendering": "pixelated" }));
    placed = [];
    for (const s of series) drawSeries(svg, s, sx, sy, good, x, y, placed, floor);
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
  fill(svg, { onpointermove: (event) => {
    const found = nearest(event);
    hover(found);
    tell(event, ...(found ? [found.series, found.note] : []));
  }, onpointerleave: (event) => { tell(event); hover(null); }, onclick: (event) => hover(nearest(event), true) });
  always(redraw);
  resized.observe(figure);
  const where = ({ clientX, clientY }, box = svg.getBoundingClientRect()) => [sx.back(clientX - box.left), sy.back(clientY - box.top)];
  return { redraw, placed: () => placed, figure, svg, where };
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
  if (s.line !== false) group.append(draw("path", { d: path, fill: "none", stroke: color, "stroke-width": s.width ?? 1.6, "stroke-dasharray": s.dash }));
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
      shape = draw("path", { d: mark(p.kind), fill: color, stroke: s.edge, class: "mark" });
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
  const panels = DATA.spectra, nodes = DATA.densities;
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
    const all = panels.flatMap((p) => [...p.values]), negative = all.filter((v) => v < 0);
    const low = negative.length ? 1.15 * quantile(negative, 0.01) : 0, high = 1.15 * Math.max(quantile(all, 0.99), 0) || -low || 1;
    charts.push(chart(place, "Max-eigenvalue spectra of mini-batches", () => {
      const series = shown(panels).map((p) => ({ ...p, marks: false, points: density([...p.values], low, high, factor, p.few) }));
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
    const [low, high] = extent(nodes.flatMap((p) => [...p.values])), width = nodes[0].linear; // axis and kernel of the figure
    charts.push(chart(place, "Density of all eigenvalues per unit of this axis", () => {
      const from = Math.asinh((1.3 * low) / width), to = Math.asinh((1.3 * high) / width), sigma = nodes[0].kernel * factor;
      const series = shown(nodes).map((p) => {
        const points = sampled(from, to, (at) => {
          const y = p.values.reduce((a, v, k) => a + p.weights[k] * bell((at - Math.asinh(v / width)) / sigma), 0) / sigma;
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
  const runs = DATA.trajectory;
  const shown = () => runs.filter(visible), charts = [], said = make("ul", { class: "plain" });
  const last = extent(runs.flatMap((r) => Array.from(r.epoch)))[1];
  let epoch = last;
  const nearest = (run) => run.epoch.reduce((best, e, i) => (Math.abs(e - epoch) < Math.abs(run.epoch[best] - epoch) ? i : best), 0);
  const mark = () => {
    for (const c of charts) for (const p of c.placed()) {
      const run = runs.find((r) => p.series.startsWith(r.name));
      p.shape?.classList.toggle("on", !!run && p.index === nearest(run));
    }
    said.replaceChildren(...shown().map((r) => {
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
  charts.push(chart(place, "Principal plane of each run, ending at the origin", () => ({
    series: shown().map((r) => ({ name: r.name, color: r.color, points: Array.from(r.pc1, (x, i) => ({ x, y: r.pc2[i], note: `epoch ${text(r.epoch[i])}` })) })),
    x: { label: "first principal coordinate" }, y: { label: "second principal coordinate" },
  })));
  if (runs.some((r) => r.loss)) charts.push(chart(place, "Loss: own (solid), on the plane (dashed)", () => ({
    series: shown().flatMap((r) => ["loss", "plane_loss"].filter((k) => r[k]).map((k) => ({
      name: k === "loss" ? r.name : `${r.name}, on the plane`, color: r.color, dash: k === "loss" ? null : "5 4",
      points: Array.from(r[k], (y, i) => ({ x: r.epoch[i], y, error: k === "loss" && r.loss_half ? r.loss_half[i] || 0 : 0 })),
    }))),
    x: { label: "epoch" }, y: { label: runs[0].label, scale: "log" },
  })));
  always(mark);
}

// --- layers ---

function layersPart(host) {
  const charts = [], matrices = [];
  const panels = DATA.layers.flatMap((plot) => plot.series).concat(DATA.similarity);
  const plots = DATA.layers.filter((plot) => plot.series.length);
  const said = make("div", { id: "layer-said", "aria-live": "polite" });
  const key = (panel, layer) => `${panel.who}\n${layer}`;
  const keys = [...new Set(panels.flatMap((p) => p.layers.map((layer) => key(p, layer))))];
  let marked = null, pinned = null;
  const select = choice("Layer", ["none", ...keys.map((k) => k.replace("\n", ": "))], (i) => { pinned = keys[i - 1] || null; show(pinned); });
  const show = (to) => {
    marked = to;
    for (const c of charts) for (const p of c.placed()) p.shape?.classList.toggle("on", p.key === to);
    for (const m of matrices) m(to);
    const lines = !to ? [] : plots.flatMap((plot) => plot.series.flatMap((s) => s.layers.flatMap((layer, i) => (key(s, layer) === to && ok(s.values[i])
      ? [make("li", {}, `${plot.title}: ${text(s.values[i])}${plusMinus(s.halves?.[i])} ${plot.unit}`)] : []))));
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
        const heads = s.heads ? s.heads.length / s.values.length : 0, point = (i) => ({ x: s.depth[i], kind: s.kinds[i], key: key(s, s.layers[i]) });
        const dots = { name: s.name, color: s.color, line: false, faint: true, points: Array.from(s.heads || [], (y, i) => {
          const layer = Math.floor(i / heads);
          return { ...point(layer), y, note: `${s.layers[layer]}, head ${i % heads}: ${text(y)}` };
        }) };
        return [dots, { name: s.name, color: s.color, line: !plot.bars, bars: plot.bars, points: Array.from(s.values, (y, i) => ({
          ...point(i), y, error: s.halves ? s.halves[i] || 0 : 0, note: `${s.layers[i]} (${s.kinds[i]}): ${text(y)}${plusMinus(s.halves?.[i])}` })) }];
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
  const { cka: values, half: errors, layers, others } = panel, rows = layers.length, columns = others.length;
  const small = make("canvas", { width: columns, height: rows }), pixels = new ImageData(columns, rows);
  values.forEach((v, k) => pixels.data.set(ok(v) ? [...viridis(v), 255] : [128, 128, 128, 90], 4 * ((rows - 1 - Math.floor(k / columns)) * columns + (k % columns))));
  small.getContext("2d").putImageData(pixels, 0, 0);
  let on = null;
  const frame = (x, y, wide, high) => ({ name: on.replace("\n", ": "), color: "#ff2222", marks: false, width: 2, points: [0, 1, 1, 0, 0].map((a, k) => ({ x: x + a * wide - 0.5, y: y + (k % 4 > 1) * high - 0.5 })) });
  const plot = chart(host, `Similarity (CKA): ${panel.name}.${lacking(panel)}`, (width) => ({
    image: small.toDataURL(), height: 42 + ((width - 72) * rows) / columns,
    x: { label: "layer", domain: [-0.5, columns - 0.5] }, y: { label: "layer", domain: [-0.5, rows - 0.5] },
    series: [...layers.flatMap((layer, i) => (key(panel, layer) === on ? [frame(0, i, columns, 1)] : [])), ...others.flatMap((layer, j) => (key(panel, layer) === on ? [frame(j, 0, 1, rows)] : []))],
  }));
  choosers.push(() => { plot.figure.hidden = !visible(panel); });
  fill(plot.svg, { onpointerleave: () => hover(null), onpointermove: (event) => {
    const [j, i] = plot.where(event).map(Math.round), at = i * columns + j;
    if (!layers[i] || !others[j]) return;
    hover({ key: key(panel, layers[i]) });
    tell(event, `${layers[i]} with ${others[j]}`, `CKA ${text(values[at])}${plusMinus(errors?.[at])}`);
  } });
  return (to) => { on = to; plot.redraw(); };
}
