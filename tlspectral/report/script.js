"use strict";
{
const data = JSON.parse(document.getElementById("data").textContent);
const part = (id) => document.getElementById(id);
const [grid, plane, legend, card, select] = ["grid", "plane", "legend", "card", "column"].map(part);
part("explorer").hidden = false;  // its room decides how wide the drawings are
const { layer: layers, head: heads, name: names } = data.identity;
const count = layers.length;
const values = Object.fromEntries(Object.entries(data.values).map(([name, column]) =>
  [name, column.map((value) => typeof value === "string" ? Number(value) : value)]));
const columns = Object.fromEntries(data.columns.map((column) => [column.name, column]));
const whole = new Set(Object.keys(values).filter((name) => values[name].every((value) => value === null || Number.isInteger(value))));
const all = [...layers.keys()];
const key = (index) => `L${layers[index]}H${heads[index]}`;
const places = new Map(all.map((index) => [key(index), index]));
const dark = matchMedia("(prefers-color-scheme: dark)");

/* Viridis without its palest end, which vanishes on the page. Blue and orange differ in lightness too. */
const viridis = ["#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151", "#bddf26", "#fde725"];
const palettes = {
  light: { plain: viridis.slice(0, 10), signed: ["#0b3c6b", "#1b5e9b", "#7fabd3", "#e3e6ea", "#f1bd7c", "#e07b00", "#8a4800"] },
  dark: { plain: viridis.slice(1), signed: ["#a5d3fb", "#5b9edb", "#2d5478", "#3a4149", "#7a5420", "#d98017", "#ffc06b"] },
};

let chosen = null, scale = null, pointed = -1, pinned = -1;

/* ---- numbers as text ---- */

/* All numbers of a column are scientific if its largest number would read as 0 or has eight digits. */
const scientific = new Set(Object.keys(values).filter((name) => !whole.has(name) && (({ length, [length - 1]: largest }) =>
  length && largest > 0 && (largest < 5e-4 || largest >= 1e7))(values[name].filter(Number.isFinite).map(Math.abs).sort((one, other) => one - other))));

function text(value, name) {
  if (value === null || value === undefined) return "not computed";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const written = whole.has(name) ? String(value) : scientific.has(name) ? value.toExponential(1)
    : size === 0 || size >= 5e-4 ? value.toFixed(size < 1 ? 3 : size < 10 ? 2 : size < 100 ? 1 : 0) : short(value, 3);
  return written.replace(/-/g, "−");
}

/* A tiny number with some significant digits and no zeros behind them, such as 2e-6. */
function short(value, digits) {
  return Number(value.toPrecision(digits)).toExponential();
}

const inColumn = (name, index) => text(values[name][index], name);
const reachText = (value) => value < 1e-3 ? value.toExponential(1).replace("-", "−") : value.toPrecision(2);

function niceTicks(low, high, wanted) {
  const rough = (high - low) / wanted || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step); tick * step <= high + step * 1e-9; tick++) ticks.push(tick * step);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return ticks.map((value) => [value, value.toFixed(digits).replace("-", "−")]);
}

/* ---- elements ---- */

function draw(parent, name, attributes, content) {
  const element = document.createElementNS(grid.namespaceURI, name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  if (content !== undefined) element.textContent = content;
  return parent.appendChild(element);
}

function add(parent, name, content, className) {
  const element = document.createElement(name);
  if (content !== undefined) element.textContent = content;
  if (className) element.className = className;
  return parent.appendChild(element);
}

function size(svg, width, height) {
  for (const [name, value] of [["width", width], ["height", height], ["viewBox", `0 0 ${width} ${height}`]]) svg.setAttribute(name, value);
}

/* ---- the colour scale ---- */

function mix(stops, share) {
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1), start = Math.min(Math.floor(place), stops.length - 2);
  return `color-mix(in srgb, ${stops[start + 1]} ${(100 * (place - start)).toFixed(1)}%, ${stops[start]})`;
}

function makeScale(column) {
  const found = values[column.name].filter(Number.isFinite).sort((one, other) => one - other);
  const edge = column.unbounded ? 0.02 : 0;
  const quantile = (share) => found[Math.round(share * (found.length - 1))];
  let [low, high] = found.length ? [quantile(edge), quantile(1 - edge)] : [0, 1];
  if (column.signed) [low, high] = [-1, 1].map((side) => side * Math.max(Math.abs(low), Math.abs(high), 1e-12));
  const stops = palettes[dark.matches ? "dark" : "light"][column.signed ? "signed" : "plain"];
  const share = (value) => high > low ? (value - low) / (high - low) : 0.5;
  return { low, high, stops, share, beyond: [found[0] < low, found[found.length - 1] > high],
    colour: (value) => value === null ? "url(#missing)" : mix(stops, share(value)) };
}

function drawLegend(column) {
  const width = 300, left = 8, right = 292, bars = 10, base = 22;
  legend.replaceChildren();
  size(legend, width, 68);
  const across = (value) => left + Math.min(Math.max(scale.share(value), 0), 1) * (right - left);
  const mark = column.mark;
  if (mark && mark.reach) {
    const [from, to] = [across(mark.value - mark.reach), across(mark.value + mark.reach)];
    draw(legend, "rect", { class: "band", x: from, y: base - bars, width: Math.max(to - from, 1), height: bars });
  }
  const gradient = draw(draw(legend, "defs", {}), "linearGradient", { id: "ramp" });
  scale.stops.forEach((colour, stop) => draw(gradient, "stop", { offset: stop / (scale.stops.length - 1), "stop-color": colour }));
  draw(legend, "rect", { x: left, y: base + 2, width: right - left, height: 8, fill: scale.high > scale.low ? "url(#ramp)" : mix(scale.stops, 0.5) });
  const marked = mark && mark.value >= scale.low && mark.value <= scale.high;
  if (marked) draw(legend, "path", { class: "mean", d: `M${across(mark.value)} ${base - bars - 4}V${base + 14}` });
  const ends = scale.high > scale.low ? [[left, "start", scale.low, scale.beyond[0] ? "≤ " : ""], [right, "end", scale.high, scale.beyond[1] ? "≥ " : ""]]
    : [[(left + right) / 2, "middle", scale.low, ""]];
  for (const [x, anchor, value, sign] of ends) draw(legend, "text", { x, y: base + 26, "text-anchor": anchor }, sign + text(Math.abs(value) < 1e-4 * scale.high ? 0 : value, column.name));
  if (mark) {
    const reach = mark.reach ? ` ± ${reachText(mark.reach)} (2 sd)` : "";
    const said = `${mark.label} ${mark.value === 0 ? "0" : text(mark.value, column.name)}${reach}${marked ? "" : ", off this scale"}`;
    const x = across(mark.value), [place, anchor] = x < 100 ? [left, "start"] : x > width - 100 ? [right, "end"] : [x, "middle"];
    draw(legend, "text", { x: place, y: base + 42, "text-anchor": anchor, class: "title" }, said);
  }
  const missing = count - values[column.name].filter((value) => value !== null).length;
  legend.setAttribute("aria-label", `Colour scale of ${column.title} from ${text(scale.low, column.name)} to ${text(scale.high, column.name)}`
    + (mark ? `, ${mark.label} at ${text(mark.value, column.name)}` : "") + (missing ? `, ${missing} not computed` : ""));
}

/* ---- the grid ---- */

const layerOrder = [...new Set(layers)].sort((one, other) => one - other), headOrder = [...new Set(heads)].sort((one, other) => one - other);
const width = Math.max(330, Math.min(780, part("chooser").clientWidth)), gridLeft = 44, gridTop = 4;
/* Layers run across, or down on a telephone, where cells must be large enough for a finger. */
const upright = width < 500;
const [sideways, downwards] = [[layerOrder, layers, "layer"], [headOrder, heads, "head"]][upright ? "reverse" : "slice"]();
const [[acrossOrder, acrossOf], [downOrder, downOf]] = [sideways, downwards];
const column = new Map(acrossOrder.map((number, place) => [number, place])), row = new Map(downOrder.map((number, place) => [number, place]));
const cell = Math.max(5, Math.min(34, Math.floor((width - gridLeft - 2) / acrossOrder.length), Math.floor(600 / downOrder.length)));
const gap = cell > 12 ? 2 : 1;
const cellPlace = (index) => [gridLeft + cell * column.get(acrossOf[index]), gridTop + cell * row.get(downOf[index])];
const headAt = (x, y) => places.get(upright ? `L${y}H${x}` : `L${x}H${y}`);
let cells, cellRings;

function drawGrid() {
  const bottom = gridTop + cell * downOrder.length;
  size(grid, width, bottom + 40);
  const hatch = draw(draw(grid, "defs", {}), "pattern", { id: "missing", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  draw(hatch, "path", { class: "hatch", d: "M0 0V5" });
  const every = (room) => [1, 2, 4, 5, 8, 10, 16, 20, 40, 80].find((step) => step * cell >= room) || 100;
  acrossOrder.forEach((number, place) => place % every(26) === 0
    && draw(grid, "text", { x: gridLeft + cell * (place + 0.5) - gap / 2, y: bottom + 14, "text-anchor": "middle" }, number));
  downOrder.forEach((number, place) => place % every(15) === 0
    && draw(grid, "text", { x: gridLeft - 7, y: gridTop + cell * (place + 0.5) + 4, "text-anchor": "end" }, number));
  draw(grid, "text", { class: "title", x: gridLeft, y: bottom + 33 }, sideways[2]);
  draw(grid, "text", { class: "title", x: 0, y: 0, transform: `translate(11 ${gridTop + 1}) rotate(-90)`, "text-anchor": "end" }, downwards[2]);
  cells = all.map((index) => {
    const [x, y] = cellPlace(index);
    return draw(grid, "rect", { id: `cell-${index}`, role: "option", "aria-label": names[index], "aria-selected": "false",
      x, y, width: cell - gap, height: cell - gap, rx: cell > 12 ? 2 : 0 });
  });
  const around = Math.max(cell - gap + 3, 11), inset = (cell - gap - around) / 2;
  cellRings = ["pointed", "pinned"].map((kind) => draw(grid, "rect", { class: `ring ${kind}`, x: inset, y: inset, width: around, height: around, rx: 3 }));
}

/* ---- the plane ---- */

const frame = { left: 58, right: width - 10, top: 26, bottom: 420 };
const planeX = values.dir_frac, planeY = values.D_head;
const placed = all.filter((index) => Number.isFinite(planeX[index]) && Number.isFinite(planeY[index]));
const nulls = Object.fromEntries(["dir_frac", "D_head"].map((name) => [name, columns[name].mark]));
let dots = [], dotLayer, dotRings, across, up;

/* dir_frac and D_head are shares, so a wide band ends at 0 and 1. */
function extent(column, mark) {
  const found = placed.map((index) => column[index]);
  if (mark) found.push(Math.max(0, mark.value - mark.reach), Math.min(1, mark.value + mark.reach));
  const low = found.length ? found.reduce((one, other) => Math.min(one, other)) : 0;
  const high = found.length ? found.reduce((one, other) => Math.max(one, other)) : 1;
  const room = (high - low) * 0.05 || 0.05;
  return [Math.max(0, low - room), Math.min(1, high + room)];
}

function drawPlane() {
  size(plane, width, frame.bottom + 50);
  const [lowX, highX] = extent(planeX, nulls.dir_frac), [lowY, highY] = extent(planeY, nulls.D_head);
  across = (value) => frame.left + (value - lowX) / (highX - lowX) * (frame.right - frame.left);
  up = (value) => frame.bottom - (value - lowY) / (highY - lowY) * (frame.bottom - frame.top);
  for (const [value, label] of niceTicks(lowX, highX, 7)) {
    draw(plane, "path", { class: "gridline", d: `M${across(value)} ${frame.top}V${frame.bottom}` });
    draw(plane, "text", { x: across(value), y: frame.bottom + 17, "text-anchor": "middle" }, label);
  }
  for (const [value, label] of niceTicks(lowY, highY, 6)) {
    draw(plane, "path", { class: "gridline", d: `M${frame.left} ${up(value)}H${frame.right}` });
    draw(plane, "text", { x: frame.left - 8, y: up(value) + 4, "text-anchor": "end" }, label);
  }
  const { dir_frac: x, D_head: y } = nulls;
  const ends = (mark, low, high) => [Math.max(low, mark.value - mark.reach), Math.min(high, mark.value + mark.reach)];
  if (x) {
    const [left, right] = ends(x, lowX, highX).map(across);
    draw(plane, "rect", { class: "band", x: left, y: frame.top, width: Math.max(1, right - left), height: frame.bottom - frame.top });
  }
  if (y) {
    const [lower, upper] = ends(y, lowY, highY).map(up);
    draw(plane, "rect", { class: "band", x: frame.left, y: upper, width: frame.right - frame.left, height: Math.max(1, lower - upper) });
  }
  if (x) draw(plane, "path", { class: "mean", d: `M${across(x.value)} ${frame.top}V${frame.bottom}` });
  if (y) draw(plane, "path", { class: "mean", d: `M${frame.left} ${up(y.value)}H${frame.right}` });
  draw(plane, "path", { class: "axis", d: `M${frame.left} ${frame.top}V${frame.bottom}H${frame.right}` });
  draw(plane, "text", { class: "title", x: frame.left, y: frame.bottom + 40 }, `${columns.dir_frac.title} = ‖M_A‖ / ‖M‖${width > 500 ? "  (0 symmetric, 1 antisymmetric)" : ""}`);
  draw(plane, "text", { class: "title", transform: `translate(13 ${frame.bottom}) rotate(-90)` }, `${columns.D_head.title} = Σ |Im λ| / Σ |λ|${width > 500 ? "  (0 real spectrum, 1 imaginary)" : ""}`);
  if (x) draw(plane, "text", { x: Math.min(across(x.value), frame.right - 60), y: frame.top - 8, "text-anchor": "middle" }, `null ${text(x.value)} ± ${reachText(x.reach)}`);
  dotLayer = draw(plane, "g", { class: placed.length > 1000 ? "dots crowded" : "dots" });
  const radius = Math.max(2, Math.min(5, 90 / Math.sqrt(count + 60)));
  for (const index of placed) dots[index] = draw(dotLayer, "circle", { cx: across(planeX[index]).toFixed(1), cy: up(planeY[index]).toFixed(1), r: radius.toFixed(1) });
  if (y) draw(plane, "text", { class: "over", x: frame.left + 8, y: Math.max(up(y.value + y.reach) - 6, frame.top + 14) }, `null ${text(y.value)} ± ${reachText(y.reach)}`);
  if (placed.length < count) draw(plane, "text", { x: frame.right, y: frame.bottom + 40, "text-anchor": "end" }, `${count - placed.length} not computed`);
  dotRings = ["pointed", "pinned"].map((kind) => ({
    own: draw(plane, "path", { class: `own ${kind}` }),
    ring: draw(plane, "circle", { class: `ring ${kind}`, r: radius + 4 }),
    label: draw(plane, "text", { class: `marked ${kind}` }),
  }));
}

function nearest(event) {
  const box = plane.getBoundingClientRect(), zoom = width / box.width;
  const x = (event.clientX - box.left) * zoom, y = (event.clientY - box.top) * zoom;
  let best = -1, distance = 18 ** 2;
  for (const index of placed) {
    const apart = (across(planeX[index]) - x) ** 2 + (up(planeY[index]) - y) ** 2;
    if (apart < distance) [best, distance] = [index, apart];
  }
  return best;
}

/* ---- marking heads ---- */

function show(element, shown) { element.toggleAttribute("display", false); if (!shown) element.setAttribute("display", "none"); }

function ownNull(index) {
  const [x, xs, y, ys] = ["dir_frac_null_mean", "dir_frac_null_std", "D_head_null_mean", "D_head_null_std"].map((name) => values[name]?.[index]);
  if (![x, xs, y, ys].every(Number.isFinite)) return "";
  const reachX = Math.max(across(x + 2 * xs) - across(x), 4), reachY = Math.max(up(y) - up(y + 2 * ys), 4);
  return `M${across(x) - reachX} ${up(y)}h${2 * reachX}M${across(x)} ${up(y) - reachY}v${2 * reachY}`;
}

function mark() {
  [pointed, pinned].forEach((index, kind) => {
    const repeated = kind === 0 && index === pinned;
    show(cellRings[kind], index >= 0 && !repeated);
    const { ring, own, label } = dotRings[kind], inPlane = index >= 0 && !repeated && index in dots;
    for (const element of [ring, own, label]) show(element, inPlane);
    if (index < 0) return;
    const [x, y] = cellPlace(index);
    cellRings[kind].setAttribute("transform", `translate(${x} ${y})`);
    if (!inPlane) return;
    const [cx, cy] = [across(planeX[index]), up(planeY[index])], onLeft = cx > width - 110;
    ring.setAttribute("transform", `translate(${cx} ${cy})`);
    own.setAttribute("d", ownNull(index));
    label.setAttribute("x", cx + (onLeft ? -12 : 12));
    label.setAttribute("y", cy - 9);
    label.setAttribute("text-anchor", onLeft ? "end" : "start");
    label.textContent = names[index];
  });
  fillCard(pointed >= 0 ? pointed : resting());
}

function point(index) {
  if (index === pointed) return;
  pointed = index;
  mark();
}

function pin(index) {
  if (pinned >= 0) cells[pinned].setAttribute("aria-selected", "false");
  pinned = index;
  if (index >= 0) cells[index].setAttribute("aria-selected", "true");
  mark();
  fillOpened();
}

function pinByHand(index) {
  pin(index === pinned ? -1 : index);
  try {
    history.replaceState(null, "", pinned >= 0 ? `#${key(pinned)}` : location.pathname + location.search);
  } catch { /* a page inside a frame may have no address to change */ }
}

/* ---- the card ---- */

const first = (() => {
  const by = ["prev", "D_head_z"].find((name) => columns[name]?.computed);
  return by ? all.reduce((best, index) => Math.abs(values[by][index] ?? -1) > Math.abs(values[by][best] ?? -1) ? index : best, 0) : 0;
})();
const resting = () => pinned >= 0 ? pinned : first;  // the head that is shown while none is pointed at

function cellOf(line, value, className) {
  add(line, "td", value, className + (value === "not computed" ? " none" : ""));
}

function fillCard(index) {
  card.classList.toggle("pinned", index === pinned);
  card.dataset.head = key(index);
  part("unpin").hidden = pinned < 0;
  part("unpin").textContent = index === pinned || pinned < 0 ? "Unpin" : `Unpin ${names[pinned]}`;
  part("head").textContent = names[index];
  const { kv_head: shared, status, bilinear } = data.identity;
  part("place").textContent = [`layer ${layers[index]}, head ${heads[index]}`, shared && `key/value head ${shared[index]}`,
    status && `status ${status[index]}`, bilinear && `bilinear ${bilinear[index]}`].filter(Boolean).join("; ");
  part("public").hidden = data.page === null;
  if (data.page !== null) part("public").href = data.page.replace("{layer}", layers[index]).replace("{head}", heads[index]);
  const numbers = part("numbers");
  numbers.replaceChildren();
  const metrics = add(numbers, "table"), title = add(add(metrics, "thead"), "tr"), body = add(metrics, "tbody");
  for (const name of ["metric", "head", "null", "z", "at or below"]) add(title, "th", name, name === "metric" ? "" : "number").scope = "col";
  for (const name of data.nullMetrics) {
    const line = add(body, "tr", undefined, chosen === name ? "chosen" : "");
    add(line, "th", columns[name].title).scope = "row";
    const own = [name, `${name}_null_mean`, `${name}_z`, `${name}_null_pct`].map((column) => values[column]?.[index] ?? null);
    own.forEach((value, place) => cellOf(line, value === null && place > 0 ? "–" : place === 2 ? value.toFixed(1).replace("-", "−") : text(value), "number"));
  }
  const inFirst = new Set(data.nullMetrics.flatMap((name) => [name, `${name}_z`, `${name}_null_pct`]));
  const list = add(add(numbers, "table"), "tbody");
  for (const { name, title, meaning } of data.columns) {
    if (inFirst.has(name)) continue;
    const line = add(list, "tr", undefined, chosen === name ? "chosen" : ""), label = add(line, "th", title);
    label.scope = "row";
    label.title = meaning;
    const deviation = values[`${name}_se`]?.[index];
    cellOf(line, inColumn(name, index), "number");
    if (data.detectors.includes(name) && typeof deviation === "number") add(line.lastChild, "small", ` ± ${deviation > 0 && deviation < 5e-5 ? short(deviation, 1).replace("-", "−") : deviation.toFixed(4)}`);
  }
}

/* ---- the card of the pinned head, from HTML that is parsed when the first one is opened ---- */

let bodies;

function fillOpened() {
  const opened = part("opened"), within = opened.contains(document.activeElement);
  if (pinned >= 0) bodies ??= JSON.parse(part("cards")?.textContent ?? "{}");
  const body = pinned < 0 ? undefined : bodies[key(pinned)];
  opened.hidden = part("open").hidden = body === undefined;
  part("evidence").innerHTML = body ?? "";
  part("openedhead").textContent = body === undefined ? "" : names[pinned];
  if (body !== undefined) part("open").textContent = `Open the card of ${names[pinned]}`;
  if (body === undefined && within) grid.focus();
}

function goTo(element) {
  element.focus({ preventScroll: true });
  element.scrollIntoView();
}

/* ---- actions of the reader ---- */

function choose(name) {
  chosen = name;
  const column = columns[name];
  scale = makeScale(column);
  part("meaning").textContent = column.meaning + (column.unit ? ` Unit: ${column.unit}.` : "");
  drawLegend(column);
  all.forEach((index) => cells[index].setAttribute("fill", scale.colour(values[name][index])));
  /* Draw extreme heads last, because thousands of other dots would cover them. */
  const height = (index) => { const value = values[name][index]; return value === null ? -1 : column.signed ? Math.abs(value) : value; };
  for (const index of placed.slice().sort((one, other) => height(one) - height(other))) {
    dots[index].setAttribute("fill", scale.colour(values[name][index]));
    dotLayer.append(dots[index]);
  }
  mark();
}

function fillSelect() {
  for (const { name, title, computed } of data.columns) {
    const option = add(select, "option", computed ? title : `${title} (not computed)`);
    option.value = name;
    option.disabled = !computed;
  }
}

function step(index, right, down) {
  const at = (order, place) => order[Math.min(Math.max(place, 0), order.length - 1)];
  return headAt(at(acrossOrder, column.get(acrossOf[index]) + right), at(downOrder, row.get(downOf[index]) + down)) ?? index;
}

function onKey(event) {
  const from = pointed >= 0 ? pointed : resting();
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (event.key in moves) point(pointed < 0 ? from : step(from, ...moves[event.key]));
  else if (event.key === "Home" || event.key === "End") point(step(from, event.key === "Home" ? -1e6 : 1e6, 0));
  else if (event.key === "Enter" || event.key === " ") pinByHand(from);
  else return;
  event.preventDefault();
  grid.setAttribute("aria-activedescendant", `cell-${from}`);
  if (pointed >= 0) {
    grid.setAttribute("aria-activedescendant", `cell-${pointed}`);
    part("spoken").textContent = `${names[pointed]}, ${columns[chosen].title} ${inColumn(chosen, pointed)}${pointed === pinned ? ", pinned" : ""}`;
  }
}

function lead(index) {
  if (index === undefined) return;
  pin(index);
  part(part("opened").hidden ? "explorer" : "opened").scrollIntoView();
}

function listen() {
  const cellAt = (event) => {
    const box = grid.getBoundingClientRect(), zoom = width / box.width;
    const [x, y] = [(event.clientX - box.left) * zoom - gridLeft, (event.clientY - box.top) * zoom - gridTop];
    return headAt(acrossOrder[Math.floor(x / cell)], downOrder[Math.floor(y / cell)]) ?? -1;
  };
  for (const [drawing, found] of [[grid, cellAt], [plane, nearest]]) {
    drawing.addEventListener("pointermove", (event) => point(found(event)));
    drawing.addEventListener("pointerleave", () => point(-1));
    drawing.addEventListener("click", (event) => found(event) >= 0 && pinByHand(found(event)));
  }
  grid.addEventListener("focus", () => grid.matches(":focus-visible") && point(resting()));
  grid.addEventListener("blur", () => point(-1));
  grid.addEventListener("keydown", onKey);
  document.addEventListener("keydown", (event) => event.key === "Escape" && pinned >= 0 && pinByHand(pinned));
  part("unpin").addEventListener("click", () => pinByHand(pinned));
  part("open").addEventListener("click", () => goTo(part("opened")));
  part("back").addEventListener("click", () => goTo(grid));
  select.addEventListener("change", () => choose(select.value));
  dark.addEventListener("change", () => choose(chosen));
  const byAddress = () => lead(places.get(location.hash.slice(1)));
  addEventListener("hashchange", byAddress);
  for (const link of document.querySelectorAll("main a[href^='#L']")) link.addEventListener("click", (event) => {
    if (location.protocol === "about:") event.preventDefault(); // In a frame of a notebook it would open the notebook.
    lead(places.get(link.hash.slice(1)));
  });
  addEventListener("beforeprint", () => { for (const details of document.querySelectorAll("details")) details.open = true; });
  byAddress();
}

part("bands").hidden = !nulls.dir_frac && !nulls.D_head;
fillSelect();
drawGrid();
drawPlane();
select.value = columns.D_head.computed ? "D_head" : (data.columns.find(({ computed }) => computed) ?? columns.D_head).name;
choose(select.value);
listen();
}
