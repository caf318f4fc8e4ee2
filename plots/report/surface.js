// The loss surface: WebGL2 where there is one, else a rasteriser in plain script; contours, a slice, a path.

const VERTEX = `#version 300 es
in vec3 place; uniform vec4 turn; uniform vec2 size; out vec3 at;
void main() {
  at = place;
  float x = place.x * turn.x - place.y * turn.y, y = place.x * turn.y + place.y * turn.x;
  float depth = y * turn.w - place.z * turn.z, near = 1.0 / (1.0 + 0.18 * depth);
  gl_Position = vec4(size * vec2(x, place.z * turn.w + y * turn.z) * near, depth * 0.2, 1.0);
}`;
const FRAGMENT = `#version 300 es
precision highp float; in vec3 at; uniform vec3 palette[9]; out vec4 color;
void main() {
  float h = clamp(at.z + 0.5, 0.0, 1.0) * 7.999;
  int i = int(h);
  vec3 normal = normalize(cross(dFdx(at), dFdy(at)));
  color = vec4(mix(palette[i], palette[i + 1], h - float(i)) * (0.62 + 0.38 * abs(dot(normal, vec3(0.42, -0.36, 0.83)))), 1.0);
}`;

/**
 * Draws triangles by WebGL2; null where there is none, or one without a graphics card, which is slower than the other
 * renderer. `?renderer=webgl2` or `?renderer=2d` in the address asks for one of them.
 */
function webgl() {
  const canvas = make("canvas"), ask = location.search;
  const gl = !ask.includes("2d") && canvas.getContext("webgl2");
  const software = () => gl.getExtension("WEBGL_debug_renderer_info") && /swift|llvmpipe/i.test(gl.getParameter(0x9246));
  if (!gl || (!ask.includes("webgl2") && software())) return null;
  const program = gl.createProgram();
  [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]].forEach(([kind, source]) => {
    const shader = gl.createShader(kind);
    gl.shaderSource(shader, source);
    gl.compileShader(shader);
    gl.attachShader(program, shader);
  });
  gl.linkProgram(program);
  if (!gl.getProgramParameter(program, gl.LINK_STATUS)) return null;
  gl.useProgram(program);
  const at = (name) => gl.getUniformLocation(program, name), place = gl.getAttribLocation(program, "place");
  gl.uniform3fv(at("palette"), VIRIDIS.flat().map((v) => v / 255));
  gl.bindBuffer(gl.ARRAY_BUFFER, gl.createBuffer());
  gl.bindBuffer(gl.ELEMENT_ARRAY_BUFFER, gl.createBuffer());
  gl.enableVertexAttribArray(place);
  gl.vertexAttribPointer(place, 3, gl.FLOAT, false, 0, 0);
  gl.enable(gl.DEPTH_TEST);
  let last = null;
  return (mesh, turn, size, width, height) => {
    if (gl.isContextLost()) return null;
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    if (mesh !== last) {
      gl.bufferData(gl.ARRAY_BUFFER, mesh.places, gl.STATIC_DRAW);
      gl.bufferData(gl.ELEMENT_ARRAY_BUFFER, mesh.triangles, gl.STATIC_DRAW);
      last = mesh;
    }
    gl.viewport(0, 0, width, height);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
    gl.uniform4fv(at("turn"), turn);
    gl.uniform2f(at("size"), size / (width / 2), size / (height / 2));
    gl.drawElements(gl.TRIANGLES, mesh.triangles.length, gl.UNSIGNED_INT, 0);
    return canvas;
  };
}

/** Draws triangles into an image with a depth buffer; one colour per triangle. */
function rasteriser() {
  const canvas = make("canvas"), pen = canvas.getContext("2d");
  let image, pixels, buffer, colors, last;
  const paint = (mesh) => {
    const { places: p, triangles: t } = mesh;
    colors = new Uint32Array(t.length / 3);
    for (let k = 0; k < colors.length; k++) {
      const [a, b, c] = [3 * t[3 * k], 3 * t[3 * k + 1], 3 * t[3 * k + 2]];
      const u = [p[b] - p[a], p[b + 1] - p[a + 1], p[b + 2] - p[a + 2]], v = [p[c] - p[a], p[c + 1] - p[a + 1], p[c + 2] - p[a + 2]];
      const n = [u[1] * v[2] - u[2] * v[1], u[2] * v[0] - u[0] * v[2], u[0] * v[1] - u[1] * v[0]];
      const light = 0.62 + (0.38 * Math.abs(0.42 * n[0] - 0.36 * n[1] + 0.83 * n[2])) / (Math.hypot(...n) || 1);
      const [red, green, blue] = viridis((p[a + 2] + p[b + 2] + p[c + 2]) / 3 + 0.5);
      colors[k] = 0xff000000 | ((blue * light) << 16) | ((green * light) << 8) | (red * light);
    }
    last = mesh;
  };
  return (mesh, width, height, projected) => {
    if (mesh !== last) paint(mesh);
    if (canvas.width !== width || canvas.height !== height || !image) {
      [canvas.width, canvas.height] = [width, height];
      image = pen.createImageData(width, height);
      pixels = new Uint32Array(image.data.buffer);
      buffer = new Float32Array(width * height);
    }
    pixels.fill(0);
    buffer.fill(Infinity);
    const t = mesh.triangles;
    for (let k = 0; k < colors.length; k++) {
      const a = 3 * t[3 * k], b = 3 * t[3 * k + 1], c = 3 * t[3 * k + 2];
      const ax = projected[a], ay = projected[a + 1], bx = projected[b], by = projected[b + 1], cx = projected[c], cy = projected[c + 1];
      const area = (bx - ax) * (cy - ay) - (by - ay) * (cx - ax);
      if (!area) continue;
      const x0 = Math.max(0, Math.ceil(Math.min(ax, bx, cx))), x1 = Math.min(width - 1, Math.floor(Math.max(ax, bx, cx)));
      const y0 = Math.max(0, Math.ceil(Math.min(ay, by, cy))), y1 = Math.min(height - 1, Math.floor(Math.max(ay, by, cy)));
      const za = projected[a + 2], zb = (projected[b + 2] - za) / area, zc = (projected[c + 2] - za) / area, color = colors[k];
      for (let y = y0; y <= y1; y++) for (let x = x0; x <= x1; x++) {
        const v = (x - ax) * (cy - ay) - (y - ay) * (cx - ax), w = (bx - ax) * (y - ay) - (by - ay) * (x - ax), u = area - v - w;
        if (area > 0 ? u < 0 || v < 0 || w < 0 : u > 0 || v > 0 || w > 0) continue;
        const depth = za + v * zb + w * zc, at = y * width + x;
        if (depth < buffer[at]) { buffer[at] = depth; pixels[at] = color; }
      }
    }
    pen.putImageData(image, 0, 0);
    return canvas;
  };
}

function surfacePart(host) {
  const all = DATA.surface.map((panel) => {
    const s = { ...panel };
    for (const key of ["x", "y", "loss", "half"]) s[key] = decode(panel[key]);
    Object.assign(s, { columns: s.x.length, rows: s.y.length, x0: s.x[0], y0: s.y[0], wide: s.x.at(-1) - s.x[0] || 1, high: s.y.at(-1) - s.y[0] || 1 });
    Object.assign(s, { reach: Math.hypot(s.wide, s.high) / 2, middle: [s.x0 + s.wide / 2, s.y0 + s.high / 2] });
    if (s.path) s.path = { ...s.path, x: decode(s.path.x), y: decode(s.path.y) };
    return s;
  });
  const low = Math.min(...all.map((s) => extent(s.loss)[0])), top = Math.max(...all.map((s) => extent(s.loss)[1]));
  const start = quantile(all.map((s) => quantile(s.loss, 0.9)), 0.5);
  const state = { at: 0, az: 0.6, tilt: 0.55, zoom: 1, log: low > 0 && start > 30 * low, cap: start, angle: 0, shift: 0, step: 0, spot: null };
  const solid = make("canvas", { tabindex: 0, role: "img", class: "turn" }), flat = make("canvas", { role: "img" });
  const info = make("p", { class: "note", "aria-live": "polite" }), base = make("canvas");
  const gl = webgl(), raster = rasteriser();
  let s, mesh, projected, profile, queued = false, stale = true, frames = 0;

  /** The height of a loss in the box, 0 to 1; NaN where it is unknown. */
  const height = (loss) => {
    const f = state.log && low > 0 ? Math.log : (v) => v, floor = f(low);
    return ok(loss) ? between((f(Math.min(loss, state.cap)) - floor) / (f(state.cap) - floor || 1), 0, 1) : NaN;
  };
  const inBox = (px, py) => [(2 * (px - s.x0)) / s.wide - 1, (2 * (py - s.y0)) / s.high - 1];
  const build = () => {
    const { loss, columns, rows } = s, places = new Float32Array(3 * loss.length), triangles = [];
    s.heights = Float32Array.from(loss, height);
    for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) {
      const k = i * columns + j, known = (...t) => { if (t.every((v) => ok(loss[v]))) triangles.push(...t); };
      places.set([...inBox(s.x[j], s.y[i]), (s.heights[k] || 0) - 0.5], 3 * k);
      if (i && j) {
        known(k - columns - 1, k - columns, k - 1);
        known(k - columns, k, k - 1);
      }
    }
    mesh = { places, triangles: Uint32Array.from(triangles) };
    stale = true;
  };
  /** The eye: cosine and sine of the turn, sine and cosine of the tilt, pixels per unit, and the canvas. */
  const eye = () => {
    const width = solid.clientWidth, high = solid.clientHeight;
    return { turn: [Math.cos(state.az), Math.sin(state.az), Math.sin(state.tilt), Math.cos(state.tilt)], unit: state.zoom * Math.min(0.33 * width, 0.34 * high), width, high };
  };
  /** Pixels and depth of points of the box [-1, 1]^2 x [-0.5, 0.5], as the vertex shader places them. */
  const project = (p, { turn, unit, width, high }, into = []) => {
    for (let k = 0; k < p.length; k += 3) {
      const x = p[k] * turn[0] - p[k + 1] * turn[1], y = p[k] * turn[1] + p[k + 1] * turn[0];
      const depth = y * turn[3] - p[k + 2] * turn[2], near = unit / (1 + 0.18 * depth);
      into[k] = width / 2 + x * near;
      into[k + 1] = high / 2 - (p[k + 2] * turn[3] + y * turn[2]) * near;
      into[k + 2] = depth;
    }
    return into;
  };
  const places = (view) => {
    if (projected?.length !== mesh.places.length) projected = new Float32Array(mesh.places.length);
    return project(mesh.places, view, projected);
  };
  const cell = (axis, v) => {
    let i = 0;
    while (i < axis.length - 2 && v > axis[i + 1]) i++;
    return [i, axis.length > 1 ? (v - axis[i]) / (axis[i + 1] - axis[i]) : 0];
  };
  const bilinear = (t, values, px, py) => {
    const [j, a] = cell(t.x, px), [i, b] = cell(t.y, py), k = i * t.columns + j, right = t.columns > 1 ? 1 : 0, up = t.rows > 1 ? t.columns : 0;
    if (Math.min(a, b) < -1e-6 || Math.max(a, b) > 1 + 1e-6) return NaN;
    return (1 - b) * ((1 - a) * values[k] + a * values[k + right]) + b * ((1 - a) * values[k + up] + a * values[k + up + right]);
  };
  /** Points of the slice that lie on the grid, with their distance from its middle. */
  const slice = (t) => {
    if (t.loss.length < 2) return [[t.x0, t.y0, 0]];
    const cos = Math.cos(state.angle), sin = Math.sin(state.angle), shift = state.shift * t.reach * 0.7, found = [];
    for (let i = -75; i <= 75; i++) {
      const at = (t.reach * i) / 75, px = t.middle[0] + at * cos - shift * sin, py = t.middle[1] + at * sin + shift * cos;
      if (Math.abs(px - t.middle[0]) <= t.wide * 0.50001 && Math.abs(py - t.middle[1]) <= t.high * 0.50001) found.push([px, py, at]);
    }
    return found;
  };
  const line = (pen, points, color, thick) => {
    pen.beginPath();
    points.forEach((p) => (ok(p[1]) ? pen.lineTo(p[0], p[1]) : 0));
    Object.assign(pen, { strokeStyle: color, lineWidth: thick }).stroke();
  };
  const dot = (pen, p, color, radius) => {
    pen.beginPath();
    pen.arc(p[0], p[1], radius, 0, 7);
    Object.assign(pen, { fillStyle: color, strokeStyle: "#000", lineWidth: 1 }).fill();
    pen.stroke();
  };
  /** The slice, the path and the point under the pointer, on either canvas. */
  const overlay = (pen, place) => {
    line(pen, slice(s).map((p) => place(p[0], p[1])), "#f33", 2);
    if (s.path) {
      const points = Array.from(s.path.x, (px, i) => place(px, s.path.y[i]));
      if (s.path.joined) [["#000", 3.5], ["#fff", 1.8]].forEach((look) => line(pen, points, ...look));
      points.forEach((p, i) => ok(p[1]) && dot(pen, p, i === state.step ? "#f80" : "#fff", i === state.step ? 6 : 2.5));
    }
    if (state.spot) dot(pen, place(...state.spot), "#fff", 4.5);
  };
  const drawSolid = () => {
    const view = eye(), { width, high } = view, pen = solid.getContext("2d"), muted = css("--muted");
    if (!width || !high) return;
    [solid.width, solid.height] = [width, high]; // clears it too
    const at = (...p) => project(p, view), corners = [[-1, -1], [1, -1], [1, 1], [-1, 1]], floor = corners.map((c) => at(...c, -0.5));
    line(pen, [...floor, floor[0]], muted, 1);
    pen.drawImage(gl?.(mesh, view.turn, view.unit, width, high) || raster(mesh, width, high, places(view)), 0, 0);
    const left = corners[floor.reduce((best, p, i) => (p[0] < floor[best][0] ? i : best), 0)];
    line(pen, [at(...left, -0.5), at(...left, 0.5)], muted, 1);
    Object.assign(pen, { fillStyle: css("--text"), font: "11px system-ui, sans-serif", textAlign: "right" });
    for (const v of scale(state.log ? "log" : "linear", [low, state.cap], [0, 1]).ticks(5)) {
      const p = at(...left, height(v) - 0.5);
      pen.fillText(`${text(v)} –`, p[0] + 3, p[1] + 4);
    }
    pen.textAlign = "center";
    for (const [name, a, b] of [["x", 0, 1.15], ["y", 1.15, 0]]) {
      const [one, other] = [at(a, b, -0.5), at(-a, -b, -0.5)];
      pen.fillText(name, ...(one[1] > other[1] ? one : other).slice(0, 2));
    }
    overlay(pen, (px, py) => at(...inBox(px, py), height(bilinear(s, s.loss, px, py)) - 0.49));
    frames++;
  };
  const drawBase = (width, high) => {
    [base.width, base.height] = [width, high];
    const pen = base.getContext("2d"), image = pen.createImageData(width, high), levels = new Int16Array(width * high).fill(-1);
    for (let i = 0; i < high; i++) for (let j = 0; j < width; j++) {
      const at = i * width + j, h = bilinear(s, s.heights, s.x0 + (s.wide * (j + 0.5)) / width, s.y0 + s.high * (1 - (i + 0.5) / high));
      if (ok(h)) {
        levels[at] = h * 13.999;
        const edge = (other) => levels[other] >= 0 && levels[other] !== levels[at];
        const shade = (j && edge(at - 1)) || (i && edge(at - width)) ? 0.5 : 1;
        image.data.set([...viridis(h).map((v) => v * shade), 255], 4 * at);
      } else image.data.set([140, 140, 140, (i + j) % 8 < 2 ? 255 : 70], 4 * at);
    }
    pen.putImageData(image, 0, 0);
  };
  const drawFlat = () => {
    const width = flat.clientWidth, high = Math.round(width * between(s.high / s.wide, 0.33, 1.5)), pen = flat.getContext("2d");
    if (!width) return;
    if (stale || base.width !== width) drawBase(width, high);
    stale = false;
    [flat.width, flat.height] = [width, high];
    pen.drawImage(base, 0, 0);
    const place = (px, py) => [((px - s.x0) / s.wide) * width, (1 - (py - s.y0) / s.high) * high], [x, y] = place(0, 0);
    line(pen, [[x - 5, y], [x + 5, y], [x, y], [x, y - 5], [x, y + 5]], "#fff", 1.5);
    overlay(pen, place);
  };
  let both = false;
  const schedule = (flatToo = true) => {
    both ||= flatToo;
    if (!queued) requestAnimationFrame(() => {
      queued = false;
      drawSolid();
      if (both) drawFlat();
      both = false;
    });
    queued = true;
  };
  const resliced = () => { if (profile) { schedule(); profile.redraw(); } };
  const rebuild = () => { if (profile) { build(); resliced(); } };
  const show = (i) => {
    s = all[state.at = i];
    state.spot = null;
    info.textContent = (s.loss.length > 1 ? "" : `One point: loss ${text(s.loss[0])}${plusMinus(s.half?.[0])}. `) + `x: ${s.labels[0]}; y: ${s.labels[1]}; height: loss${s.unit ? ` (${s.unit})` : ""}, one scale for all, cut at the cap.${lacking(s)}` +
      (s.missing ? " Holes and hatching mark them." : "") + (s.lost ? ` In ${s.lost} cells the loss is not finite.` : "") + (s.thinned ? ` Drawn: ${s.thinned} points.` : "");
    solid.setAttribute("aria-label", `Loss surface of ${s.name}; arrow keys turn it`);
    flat.setAttribute("aria-label", `Contours of the loss of ${s.name}`);
    solid.closest(".grid2").hidden = s.loss.length < 2;
    scrub.node.hidden = !s.path;
    if (s.path) scrub.set(scrub.input.max = s.path.x.length - 1);
    rebuild();
  };
  const spot = (k, event) => {
    const j = k % s.columns, i = Math.floor(k / s.columns);
    state.spot = k < 0 ? null : [s.x[j], s.y[i]];
    tell(event, ...(k < 0 ? [] : [`x ${text(s.x[j])}, y ${text(s.y[i])}`, `loss ${text(s.loss[k])}${plusMinus(s.half?.[k])}`]));
    schedule();
  };

  const span = Math.log1p(1e3);
  const names = choice("Network", all.map((t) => t.name), show);
  const cap = slider("Cap of the loss", 0, 100, 0.5, (100 * Math.log1p(((start - low) / (top - low || 1)) * 1e3)) / span, (v) => {
    state.cap = low + ((top - low) * Math.expm1((v / 100) * span)) / 1e3;
    rebuild();
    return text(state.cap);
  });
  const angle = slider("Slice: angle", 0, 180, 1, 0, (v) => { state.angle = (v * Math.PI) / 180; resliced(); return `${v}°`; });
  const shift = slider("Slice: offset", -1, 1, 0.02, 0, (v) => { state.shift = v; resliced(); return text(v); });
  const scrub = slider("Snapshot", 0, 1, 1, 0, (v) => { state.step = v; if (profile) schedule(); return s.path ? s.path.name[v] : ""; });
  const turn = (change) => { Object.assign(state, change); state.tilt = between(state.tilt, 0.05, 1.57); state.zoom = between(state.zoom, 0.4, 3); schedule(false); noted(); };
  for (const key of ["az", "tilt", "zoom"]) remember(key, () => +state[key].toFixed(3), (to) => { if (ok(+to)) turn({ [key]: +to }); });
  const reset = make("button", { type: "button", onclick: () => turn({ az: 0.6, tilt: 0.55, zoom: 1 }) }, "Reset the view");
  const logarithmic = checkbox("logarithmic height", state.log, (on) => { state.log = on; rebuild(); });
  const closer = (by) => make("button", { type: "button", "aria-label": by > 0 ? "Closer" : "Farther", onclick: () => turn({ zoom: state.zoom + by }) }, by > 0 ? "+" : "−");
  const figure = (canvas, caption) => make("figure", {}, canvas,
    make("figcaption", {}, caption, saving({ PNG: () => saveCanvas(`surface of ${s.name}`, canvas) })));
  host.append(make("div", { class: "controls" }, names.node, cap.node, logarithmic, angle.node, shift.node, scrub.node, make("span", {}, closer(0.2), closer(-0.2), reset)),
    make("div", { class: "grid2" }, figure(solid, "Drag or arrow keys turn; +, −, two fingers or Ctrl and the wheel zoom."), figure(flat, "Contours; drag to lay the slice.")), info);
  for (const canvas of [solid, flat]) resized.observe(canvas);
  legend(host, all, () => profile.redraw());

  let drag = null, from = null;
  const press = (canvas, start, stop) => {
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); start(event); });
    canvas.addEventListener("pointerup", stop);
    canvas.addEventListener("pointerleave", (event) => spot(-1, event));
  };
  press(solid, (event) => { drag = [event.offsetX, event.offsetY, state.az, state.tilt]; }, () => { drag = null; });
  solid.addEventListener("pointermove", (event) => {
    const { offsetX: ex, offsetY: ey } = event;
    if (fingers.size === 2) {
      const before = apart();
      fingers.set(event.pointerId, event);
      return turn({ zoom: state.zoom * (apart() / before || 1) });
    }
    if (drag) return turn({ az: drag[2] + (ex - drag[0]) * 0.01, tilt: drag[3] + (ey - drag[1]) * 0.01 });
    const p = places(eye());
    let best = -1, least = Infinity;
    s.loss.forEach((loss, k) => {
      const distance = (p[3 * k] - ex) ** 2 + (p[3 * k + 1] - ey) ** 2, score = distance + 300 * p[3 * k + 2];
      if (distance < 250 && score < least && ok(loss)) [best, least] = [k, score];
    });
    spot(best, event);
  });
  solid.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== solid) return; // else the page scrolls
    event.preventDefault();
    turn({ zoom: state.zoom * Math.exp(-event.deltaY / 400) });
  }, { passive: false });
  const fingers = new Map();
  const apart = () => { const [a, b] = [...fingers.values()]; return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY); };
  const lifted = (event) => fingers.delete(event.pointerId);
  solid.addEventListener("pointerdown", (event) => { fingers.set(event.pointerId, event); if (fingers.size === 2) drag = null; });
  for (const end of ["pointerup", "pointercancel"]) solid.addEventListener(end, lifted);
  solid.addEventListener("keydown", (event) => {
    const { az, tilt, zoom } = state;
    const change = { ArrowLeft: { az: az - 0.1 }, ArrowRight: { az: az + 0.1 }, ArrowUp: { tilt: tilt - 0.1 }, ArrowDown: { tilt: tilt + 0.1 }, "+": { zoom: zoom + 0.1 }, "-": { zoom: zoom - 0.1 } }[event.key];
    if (change) { event.preventDefault(); turn(change); }
  });
  const onPlane = (event) => [s.x0 + (event.offsetX / flat.clientWidth) * s.wide, s.y0 + (1 - event.offsetY / flat.clientHeight) * s.high];
  press(flat, (event) => { from = onPlane(event); }, () => { from = null; });
  flat.addEventListener("pointermove", (event) => {
    const to = onPlane(event), near = (axis, v) => { const [i, part] = cell(axis, v); return between(Math.round(i + part), 0, axis.length - 1); };
    if (!from) return spot(near(s.y, to[1]) * s.columns + near(s.x, to[0]), event);
    if (Math.hypot(to[0] - from[0], to[1] - from[1]) < 0.01 * s.reach) return;
    const along = (Math.atan2(to[1] - from[1], to[0] - from[0]) + Math.PI) % Math.PI;
    angle.set(Math.round((along * 180) / Math.PI));
    shift.set(between(((s.middle[0] - from[0]) * Math.sin(along) + (from[1] - s.middle[1]) * Math.cos(along)) / (0.7 * s.reach), -1, 1));
  });

  s = all[0];
  for (const control of [cap, angle, shift]) control.update();
  profile = { redraw() {} };
  show(0);
  profile = chart(host, "Loss along the slice; band: 95 %", () => ({
    series: all.filter(visible).map((t) => ({ name: t.name, color: t.color, marks: t.loss.length < 2, area: true, points: slice(t).map(([px, py, x]) => {
      const y = bilinear(t, t.loss, px, py), error = t.half ? bilinear(t, t.half, px, py) : 0;
      return { x, y: y > state.cap ? NaN : y, error: error || 0, note: `at ${text(x)}: ${text(y)}${plusMinus(error)}` };
    }) })),
    x: { label: "distance along the slice" }, y: { label: `loss${s.unit ? ` (${s.unit})` : ""}`, scale: state.log ? "log" : "linear" },
  }));
  redraws.push(() => schedule());
  return { state, draw: drawSolid, frames: () => frames, renderer: () => (gl ? "webgl2" : "2d") };
}
