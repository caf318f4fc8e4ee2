// The loss surface: WebGL2 where there is one, else a rasteriser; contours, a slice, a path.

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
  const all = DATA.surface;
  for (const s of all) {
    const [x0] = s.x, [y0] = s.y, wide = s.x.at(-1) - x0 || 1, high = s.y.at(-1) - y0 || 1;
    Object.assign(s, { columns: s.x.length, rows: s.y.length, x0, y0, wide, high, reach: Math.hypot(wide, high) / 2, middle: [x0 + wide / 2, y0 + high / 2] });
  }
  const low = Math.min(...all.map((s) => extent(s.loss)[0])), top = Math.max(...all.map((s) => extent(s.loss)[1]));
  const start = quantile(all.map((s) => quantile(s.loss, 0.9)), 0.5);
  const state = { az: 0.6, tilt: 0.55, zoom: 1, log: low > 0 && start > 30 * low, cap: start, angle: 0, shift: 0, step: 0, spot: null };
  const solid = make("canvas", { tabindex: 0, role: "img", class: "turn" });
  const info = make("p", { class: "note", "aria-live": "polite" }), base = make("canvas");
  const gl = webgl(), raster = rasteriser();
  let s, mesh, projected, profile, flat, picture, queued = false, stale = true, frames = 0;

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
    for (const p of points) pen.lineTo(p[0], p[1]);
    Object.assign(pen, { strokeStyle: color, lineWidth: thick }).stroke();
  };
  const dot = (pen, p, color) => {
    pen.beginPath();
    pen.arc(p[0], p[1], 3.5, 0, 7);
    Object.assign(pen, { fillStyle: color, strokeStyle: "#000", lineWidth: 1 }).fill();
    pen.stroke();
  };
  /** What lies on the surface: the slice, the path, the checkpoint, and the point under the pointer. */
  const overlay = () => {
    const { path } = s, nodes = path ? Array.from(path.x, (x, i) => [x, path.y[i]]) : [], thick = path?.joined;
    const over = (name, color, points, width, marks = false) => ({ name, color, points, width, line: !!width, marks, edge: "#000" });
    return [over("slice", "#ff3333", slice(s), 2), ...(path ? [over("path", "#000000", nodes, thick && 3.5), over("path", "#ffffff", nodes, thick && 1.8, true),
      over(path.name[state.step], "#ff8800", [nodes[state.step]], 0, true)] : [over("checkpoint", "#ffffff", [[0, 0]], 0, true)]),
      ...(state.spot ? [over("here", "#ffffff", [state.spot], 0, true)] : [])];
  };
  const drawSolid = (pen = solid.getContext("2d")) => {
    const view = eye(), { width, high } = view, muted = css("--muted");
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
    for (const o of overlay()) {
      const points = o.points.map(([px, py]) => at(...inBox(px, py), height(bilinear(s, s.loss, px, py)) - 0.49)).filter((p) => ok(p[1]));
      if (o.line) line(pen, points, o.color, o.width);
      if (o.marks) for (const p of points) dot(pen, p, o.color);
    }
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
  const contours = (width) => {
    const wide = width - 72, high = Math.round(wide * between(s.high / s.wide, 0.33, 1.5)), x = [s.x0, s.x0 + s.wide], y = [s.y0, s.y0 + s.high];
    if (stale || base.width !== wide) { drawBase(wide, high); picture = base.toDataURL(); }
    stale = false;
    const place = ([px, py]) => ({ x: px, y: ok(bilinear(s, s.loss, px, py)) ? py : NaN, kind: "msa" });
    return { name: `Contours of ${s.name}`, image: picture, height: high + 42, x: { label: s.labels[0], domain: x },
      y: { label: s.labels[1], domain: y }, series: overlay().map((o) => ({ ...o, points: o.points.map(place) })) };
  };
  let both = false;
  const schedule = (flatToo = true) => {
    both ||= flatToo;
    if (!queued) requestAnimationFrame(() => {
      queued = false;
      drawSolid();
      if (both) flat?.redraw();
      both = false;
    });
    queued = true;
  };
  const resliced = () => { if (profile) { schedule(); profile.redraw(); } };
  const rebuild = () => { if (profile) { build(); resliced(); } };
  const show = (i) => {
    s = all[i];
    state.spot = null;
    info.textContent = (s.loss.length > 1 ? "" : `One point: loss ${text(s.loss[0])}${plusMinus(s.half?.[0])}. `) + `x: ${s.labels[0]}; y: ${s.labels[1]}; height: ${s.labels[2]}, one scale for all, cut at the cap.${lacking(s)}` +
      (s.missing ? " Holes and hatching mark them." : "") + (s.lost ? ` In ${s.lost} cells the loss is not finite.` : "") + (s.thinned ? ` Drawn: ${s.thinned} points.` : "");
    solid.setAttribute("aria-label", `${title()}; arrow keys turn it`);
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
  const closer = (by) => make("button", { type: "button", "aria-label": by > 0 ? "Closer" : "Farther", onclick: () => turn({ zoom: state.zoom + by }) }, by > 0 ? "+" : "−");
  const title = () => `Loss surface of ${s.name}`, drawing = (pen = vectors(solid.clientWidth, solid.clientHeight)) => {
    drawSolid(pen);
    drawSolid();
    return standalone(pen.svg, title(), []);
  };
  const pair = make("div", { class: "grid2" }, make("figure", {}, solid, make("figcaption", {}, "Drag or arrow keys turn; +, −, two fingers or Ctrl and the wheel zoom.", saved(title, () => drawing()))));
  host.append(make("div", { class: "controls" }, names.node, cap.node, checkbox("logarithmic height", state.log, (on) => { state.log = on; rebuild(); }), angle.node, shift.node, scrub.node, make("span", {}, closer(0.2), closer(-0.2), make("button", { type: "button", onclick: () => turn({ az: 0.6, tilt: 0.55, zoom: 1 }) }, "Reset the view"))),
    pair, info);
  resized.observe(solid);
  legend(host, all, () => profile.redraw());

  const fingers = new Map(), lifted = ({ pointerId }) => fingers.delete(pointerId); // that press
  const apart = () => { const [a, b] = fingers.values(); return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY); };
  const pressed = (event) => { solid.setPointerCapture(event.pointerId); fingers.set(event.pointerId, event); };
  fill(solid, { onpointerdown: pressed, onpointerup: lifted, onpointercancel: lifted, onpointerleave: (event) => spot(-1, event), onpointermove: (event) => {
    const { offsetX: ex, offsetY: ey, clientX, clientY, pointerId } = event, before = fingers.get(pointerId), far = fingers.size > 1 && apart();
    if (before) {
      fingers.set(pointerId, event);
      return turn(far ? { zoom: state.zoom * (apart() / far) } : { az: state.az + (clientX - before.clientX) * 0.01, tilt: state.tilt + (clientY - before.clientY) * 0.01 });
    }
    const p = places(eye());
    let best = -1, least = Infinity;
    s.loss.forEach((loss, k) => {
      const distance = (p[3 * k] - ex) ** 2 + (p[3 * k + 1] - ey) ** 2, score = distance + 300 * p[3 * k + 2];
      if (distance < 250 && score < least && ok(loss)) [best, least] = [k, score];
    });
    spot(best, event);
  }, onkeydown: (event) => {
    const [key, by] = { ArrowLeft: ["az", -0.1], ArrowRight: ["az", 0.1], ArrowUp: ["tilt", -0.1], ArrowDown: ["tilt", 0.1], "+": ["zoom", 0.1], "-": ["zoom", -0.1] }[event.key] ?? [];
    if (key) { event.preventDefault(); turn({ [key]: state[key] + by }); }
  } });
  solid.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== solid) return; // else the page scrolls
    event.preventDefault();
    turn({ zoom: state.zoom * Math.exp(-event.deltaY / 400) });
  }, { passive: false });
  s = all[0];
  for (const control of [cap, angle, shift]) control.update();
  profile = { redraw() {} };
  show(0);
  flat = chart(pair, "Contours; drag to lay the slice", contours);
  let from = null;
  fill(flat.svg, { onpointerdown: (event) => { flat.svg.setPointerCapture(event.pointerId); from = flat.where(event); }, onpointerup: () => { from = null; }, onpointerleave: (event) => spot(-1, event), onpointermove: (event) => {
    const to = flat.where(event), near = (axis, v) => { const [i, part] = cell(axis, v); return between(Math.round(i + part), 0, axis.length - 1); };
    if (!from) return spot(near(s.y, to[1]) * s.columns + near(s.x, to[0]), event);
    if (Math.hypot(to[0] - from[0], to[1] - from[1]) < 0.01 * s.reach) return;
    const along = (Math.atan2(to[1] - from[1], to[0] - from[0]) + Math.PI) % Math.PI;
    angle.set(Math.round((along * 180) / Math.PI));
    shift.set(between(((s.middle[0] - from[0]) * Math.sin(along) + (from[1] - s.middle[1]) * Math.cos(along)) / (0.7 * s.reach), -1, 1));
  } });

  profile = chart(host, "Loss along the slice; band: 95 %", () => ({
    series: all.filter(visible).map((t) => ({ name: t.name, color: t.color, marks: t.loss.length < 2, area: true, points: slice(t).map(([px, py, x]) => {
      const y = bilinear(t, t.loss, px, py), error = t.half ? bilinear(t, t.half, px, py) : 0;
      return { x, y: y > state.cap ? NaN : y, error: error || 0, note: `at ${text(x)}: ${text(y)}${plusMinus(error)}` };
    }) })),
    x: { label: s.labels[3] }, y: { label: s.labels[2], scale: state.log ? "log" : "linear" },
  }));
  redraws.push(() => schedule(false));
  return { state, draw: drawSolid, frames: () => frames, renderer: () => (gl ? "webgl2" : "2d") };
}
