{
const part = (id) => document.getElementById(id);
const read = (id) => JSON.parse(part(id)?.textContent ?? "null");
const shared = read("walls"), table = read("data");
const bands = part("wallbands"), count = shared.layer.length;
const FULL = 0.5, BAR = 5;  // attention in full colour; pixels of a bar
const names = shared.layer.map((layer, index) => `L${layer}H${shared.head[index]}`);
const layers = [...new Set(shared.layer)], rows = [...new Set(shared.head)].sort((one, other) => one - other);
const at = new Map(names.map((name, index) => [name, index]));
const dark = matchMedia("(prefers-color-scheme: dark)");
const kinds = { prev: "previous", dup: "duplicate", ind: "induction" };
const dashes = { prev: [], dup: [5, 2.5], ind: [1.5, 1.5] };
part("wallplace").hidden = false;

let chosen = 0, asked = -1, sentence, look, drawings = [], largest = 0;

/* ---- texts ---- */

const minus = (text) => text.replace(/-/g, "−");
const number = (value) => minus(value.toFixed(2));
const signed = (value) => (value > 0 ? "+" : "") + (Math.abs(value) >= 0.005 || value === 0 ? number(value) : minus(value.toExponential(0)));
const percent = (value) => value > 0 && value < 0.005 ? "under 1 %" : `${(100 * value).toFixed(0)} %`;
const seen = (token) => token.replace(/\r?\n|\r/g, "⏎").replace(/\t/g, "⇥");
const quoted = (token) => `“${seen(token).replace(/^ | $/g, "\u00a0")}”`;
const plainly = (place) => place === 0 && sentence.special[0] ? "⟨start⟩" : seen(sentence.tokens[place]);

function add(parent, name, content, className) {
  const element = document.createElement(name);
  if (content !== undefined) element.textContent = content;
  if (className) element.className = className;
  return parent.appendChild(element);
}

function draw(parent, name, attributes, content) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  if (content !== undefined) element.textContent = content;
  return parent.appendChild(element);
}

/* ---- a sentence: numbers of all heads ---- */

function open(number) {
  const data = read(`wall${number}`), bytes = atob(data.pattern), n = data.tokens.length;
  const size = data.causal ? n * (n + 1) / 2 : n * n;
  const place = data.causal ? (query, key) => query * (query + 1) / 2 + key : (query, key) => query * n + key;
  return { ...data, n, number, attention: (head, query, key) => data.causal && key > query ? 0 : bytes.charCodeAt(head * size + place(query, key)) / 255 };
}

const sinkOf = (head) => sentence.sinks[shared.layer[head]] ?? [-1, null];

/* ---- the wall: bands of layers, each a canvas that is drawn when it comes into view ---- */

function colours() {
  const style = getComputedStyle(document.documentElement), names = ["raised", "line", "quiet", "mark", "ink", "rule", "prev", "dup", "ind"];
  const found = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  const mixed = (colour) => {
    const [from, to] = [found.raised, colour].map((one) => one.match(/\w\w/g).map((pair) => parseInt(pair, 16)));
    return (share) => from.map((value, channel) => Math.round(value + (to[channel] - value) * share));
  };
  const shades = Object.fromEntries([["shade", "line"], ["sink", "quiet"]].map(([name, colour]) => [name, mixed(found[colour])]));
  return { ...found, ...shades, faint: `rgb(${shades.sink(0.45)})` };
}

function layOut() {
  const width = Math.max(200, bands.clientWidth - 2), left = 38, least = count > 600 ? 22 : 30;
  const fit = Math.max(1, Math.floor((width - left) / least));
  const across = Math.ceil(layers.length / Math.ceil(layers.length / fit));
  const cell = Math.min(84, Math.floor((width - left) / across)), pitch = cell + BAR + 3;
  bands.replaceChildren();
  drawings = [];
  const ring = add(bands, "div", undefined, "wallring");
  for (let first = 0; first < layers.length; first += across) {
    const shown = layers.slice(first, first + across), canvas = add(bands, "canvas");
    const size = { width: left + cell * shown.length + 2, height: Math.max(16 + pitch * rows.length + 2, 48) };
    canvas.style.width = `${size.width}px`;
    canvas.style.height = `${size.height}px`;
    drawings.push({ canvas, shown, size, drawn: false });
    watcher.observe(canvas);
  }
  return { left, cell, pitch, across, ring, side: cell - 3 };
}

const watcher = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    const drawing = drawings.find(({ canvas }) => canvas === target);
    if (isIntersecting && drawing && !drawing.drawn) paint(drawing);
  }
}, { rootMargin: "300px" });

function placeOf(head) {
  const layer = layers.indexOf(shared.layer[head]), drawing = drawings[Math.floor(layer / look.across)];
  return { drawing, x: look.left + look.cell * (layer % look.across) + 1, y: 16 + look.pitch * rows.indexOf(shared.head[head]) + 1 };
}

function paint(drawing) {
  const { canvas, shown, size } = drawing, ratio = devicePixelRatio || 1, palette = colours(), { side, cell, pitch, left } = look;
  drawing.drawn = true;
  canvas.width = Math.round(size.width * ratio);
  canvas.height = Math.round(size.height * ratio);
  const paper = canvas.getContext("2d");
  paper.scale(ratio, ratio);
  paper.font = "11px sans-serif";
  paper.fillStyle = palette.quiet;
  paper.textAlign = "center";
  paper.textAlign = "left";
  paper.fillText("layer", 0, 11);
  paper.save();
  paper.rotate(-Math.PI / 2);
  paper.textAlign = "right";
  paper.fillText("head", -18, 8);
  paper.restore();
  paper.textAlign = "center";
  const every = [1, 2, 4, 5, 10].find((step) => step * cell >= 22) ?? 10;
  shown.forEach((layer, place) => place % every === 0 && paper.fillText(layer, left + cell * place + side / 2 + 1, 11));
  paper.textAlign = "right";
  const down = [1, 2, 4, 5, 10].find((step) => step * pitch >= 13) ?? 10;
  rows.forEach((head, place) => place % down === 0 && paper.fillText(head, left - 6, 16 + pitch * place + side / 2 + 5));
  const wanted = new Set(shown), n = sentence.n, small = document.createElement("canvas");
  small.width = small.height = n - 1;
  const pixels = small.getContext("2d"), image = pixels.createImageData(n - 1, n - 1);
  paper.imageSmoothingEnabled = side * ratio < n;
  for (let head = 0; head < count; head++) {
    if (!wanted.has(shared.layer[head])) continue;
    const { x, y } = placeOf(head), [sink] = sinkOf(head);
    // Lines join the squares of heads that share keys.
    if (head > 0 && shared.layer[head - 1] === shared.layer[head] && shared.kv[head - 1] === shared.kv[head]) {
      paper.fillStyle = palette.faint;
      for (const place of [x - 0.5, x + side - 0.5]) paper.fillRect(place, y - pitch + side, 1, pitch - side);
    }
    for (let query = 1; query < n; query++) for (let key = 1; key < n; key++) {
      const colour = (key === sink ? palette.sink : palette.shade)(Math.min(1, sentence.attention(head, query, key) / FULL));
      image.data.set([...colour, 255], 4 * ((query - 1) * (n - 1) + key - 1));
    }
    pixels.putImageData(image, 0, 0);
    paper.drawImage(small, x, y, side, side);
    const kind = shared.kind[head];
    paper.setLineDash(dashes[kind] ?? []);
    paper.strokeStyle = kind ? palette[kind] : palette.rule;
    paper.lineWidth = kind ? 2.5 : 1;
    paper.strokeRect(x, y, side, side);
    paper.setLineDash([]);
    const share = largest ? sentence.removal.delta[head] / largest : 0, length = Math.abs(share) * side;
    if (length < 0.75) continue;
    paper.fillStyle = paper.strokeStyle = palette.mark;
    paper.lineWidth = 1;
    if (share < 0) paper.fillRect(x, y + side + 2, length, BAR - 1);
    else paper.strokeRect(x + 0.5, y + side + 2.5, Math.max(length - 1, 0.5), BAR - 2);
  }
}

/* ---- legend ---- */

function drawLegend() {
  const place = part("walllegend"), ratio = devicePixelRatio || 1, palette = colours();
  place.replaceChildren();
  const item = (text, width, paintKey) => {
    const entry = add(place, "span"), canvas = add(entry, "canvas");
    canvas.width = width * ratio;
    canvas.height = 14 * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = "14px";
    const paper = canvas.getContext("2d");
    paper.scale(ratio, ratio);
    paintKey(paper);
    entry.append(text);
  };
  item(`attention 0 to ${FULL} and more`, 60, (paper) => {
    for (let step = 0; step < 60; step++) {
      paper.fillStyle = `rgb(${palette.shade(step / 59)})`;
      paper.fillRect(step, 1, 1, 12);
    }
    paper.strokeStyle = palette.rule;
    paper.strokeRect(0.5, 0.5, 59, 13);
  });
  if (Object.keys(sentence.sinks).length) item("attention to a second sink of the layer", 20, (paper) => {
    paper.fillStyle = palette.quiet;
    paper.fillRect(8, 1, 4, 12);
    paper.strokeStyle = palette.rule;
    paper.strokeRect(0.5, 0.5, 19, 13);
  });
  for (const kind of Object.keys(shared.detectors)) {
    const heads = shared.kind.filter((one) => one === kind).length;
    item(`${shared.detectors[kind]}: ${heads} of ${count.toLocaleString("en")} heads`, 18, (paper) => {
      paper.setLineDash(dashes[kind]);
      paper.strokeStyle = palette[kind];
      paper.lineWidth = 2.5;
      paper.strokeRect(3, 1.5, 11, 11);
    });
  }
  add(place, "span", Object.keys(shared.detectors).length ? `frame: the largest score of the head, if ${shared.framed} or more`
    : "no frames: the table has no detector scores");
  if (largest) {
    const unit = sentence.removal.task ? `of ${sentence.removal.measure}` : `of the probability of ${quoted(sentence.removal.watched[0])}`;
    item(`answer loses; a bar as wide as the square: ${largest.toPrecision(2)} ${unit}`, 40, (paper) => {
      paper.fillStyle = palette.mark;
      paper.fillRect(0, 6, 38, BAR - 1);
    });
    if (sentence.removal.delta.some((delta) => delta / largest > 0.02)) item("answer gains", 40, (paper) => {
      paper.strokeStyle = palette.mark;
      paper.strokeRect(0.5, 6.5, 37, BAR - 2);
    });
  }
  if (shared.kv.some((kv, head) => head > 0 && shared.layer[head - 1] === shared.layer[head] && shared.kv[head - 1] === kv)) {
    item("joined squares share keys and values", 12, (paper) => {
      paper.strokeStyle = palette.quiet;
      paper.strokeRect(1.5, 0.5, 9, 13);
      paper.clearRect(2, 5, 8, 4);
      paper.strokeRect(1.5, 0.5, 9, 4);
      paper.strokeRect(1.5, 9.5, 9, 4);
    });
  }
}

/* ---- one head ---- */

function fillWords() {
  const place = part("words"), query = asked < 0 ? sentence.n - 1 : asked, [sink] = sinkOf(chosen);
  const apart = new Set([0, sink]);
  if (place.children.length !== sentence.n) {
    place.replaceChildren();
    sentence.tokens.forEach((token, index) => {
      const word = add(place, "button", plainly(index), "word");
      word.type = "button";
      word.dir = "auto";
      word.addEventListener("pointerenter", () => ask(index));
      word.addEventListener("focus", () => ask(index));
    });
  }
  [...place.children].forEach((word, index) => {
    const visible = !sentence.causal || index <= query, share = sentence.attention(chosen, query, index);
    word.textContent = plainly(index);
    word.tabIndex = index === query ? 0 : -1;
    word.classList.toggle("query", index === query);
    word.classList.toggle("later", !visible);
    word.classList.toggle("apart", apart.has(index));
    word.setAttribute("aria-pressed", index === query);
    word.setAttribute("aria-label", `${plainly(index)}: ${visible ? `${percent(share)} of the attention` : "not seen"}`);
    word.title = visible ? percent(share) : "";
    const colour = apart.has(index) ? "--quiet" : "--line";
    word.style.background = visible ? `color-mix(in srgb, var(${colour}) ${(70 * Math.min(1, share / FULL)).toFixed(0)}%, transparent)` : "";
  });
  part("asked").textContent = `Attention of ${names[chosen]} from ${quoted(plainly(query)).trim()}. Point at another word, or use the arrow keys, to see the attention from there.`;
  const first = `${plainly(0) === "⟨start⟩" ? "start token" : `first token ${quoted(plainly(0))}`}: ${percent(sentence.attention(chosen, query, 0))}`;
  const second = sink < 0 ? "" : query < sink && sentence.causal ? "" : `; ${quoted(plainly(sink))}: ${percent(sentence.attention(chosen, query, sink))} (a second sink: heads of layer ${shared.layer[chosen]} give it ${percent(sinkOf(chosen)[1])} on average)`;
  part("sinks").textContent = `Grey, sinks: ${first}${second}.`;
}

function ask(index) {
  asked = index;
  fillWords();
}

function track(parent, label, value, mark, text, kind) {
  add(parent, "span", label);
  const svg = draw(parent, "svg", { viewBox: "0 0 100 12", preserveAspectRatio: "none", class: "track", "aria-hidden": "true" });
  draw(svg, "rect", { class: "ground", x: 0, y: 1, width: 100, height: 10 });
  if (value !== null) draw(svg, "rect", { class: `bar ${kind}`, x: 0, y: 3, width: Math.max(100 * Math.min(1, value), 0.6), height: 6 });
  if (mark !== null) draw(svg, "path", { class: "tick", "vector-effect": "non-scaling-stroke", d: `M${Math.min(99.5, 100 * mark)} 0V12` });
  add(parent, "span", text, "number");
}

function fillRemoved() {
  const removal = sentence.removal, next = part("next");
  part("removed").hidden = !removal;
  if (!removal) return;
  next.replaceChildren();
  removal.watched.forEach((token, index) => {
    const without = removal.without[chosen][index], intact = removal.intact[index];
    const role = index < removal.correct ? " (answer)" : index < removal.correct + removal.wrong ? " (wrong)" : "";
    track(next, quoted(token) + role, without, intact, `${number(intact)} → ${number(without)}`, index < removal.correct ? "answer" : "");
  });
  const instead = removal.texts[removal.top[chosen]], best = removal.intact.indexOf(Math.max(...removal.intact));
  part("instead").textContent = `Grey line: all heads. Bar: without ${names[chosen]}. ` + (instead === removal.watched[best] ? ""
    : `The model then says ${quoted(instead)} (${number(removal.share[chosen])}).`);
  fillStrip(removal);
}

function fillStrip(removal) {
  const strip = part("strip"), width = 320, delta = removal.delta[chosen], error = removal.delta_se[chosen];
  const low = Math.min(0, ...removal.delta), high = Math.max(0, ...removal.delta), room = (high - low) * 0.06 || 1;
  const across = (value) => 6 + (width - 12) * (value - low + room) / (high - low + 2 * room);
  strip.replaceChildren();
  strip.setAttribute("viewBox", `0 0 ${width} 62`);
  draw(strip, "path", { class: "axis", d: `M6 34H${width - 6}` });
  removal.delta.forEach((value, head) => {
    const own = shared.layer[head] === shared.layer[chosen] && removal.control_p[chosen] !== null;
    draw(strip, "path", { class: own ? "tick own" : "tick", d: `M${across(value).toFixed(1)} ${own ? 24 : 28}V${own ? 44 : 40}` });
  });
  if (error !== null) draw(strip, "path", { class: "error", d: `M${across(delta - error)} 34H${across(delta + error)}` });
  draw(strip, "circle", { class: "dot", cx: across(delta), cy: 34, r: 5 });
  const said = `${signed(delta)}${error === null ? "" : ` ± ${number(error)}`}`;
  draw(strip, "text", { x: across(delta), y: 16, "text-anchor": across(delta) > width / 2 ? "end" : "start" }, `${names[chosen]} ${said}`);
  const ends = low < -high / 50 ? [[low, "start"]] : [];
  for (const [value, anchor] of [...ends, [0, "middle"], ...(high > -low / 6 ? [[high, "end"]] : [])])
    draw(strip, "text", { x: across(value), y: 58, "text-anchor": anchor }, value === 0 ? "0" : signed(value));
  const rank = 1 + removal.delta.filter((value) => Math.abs(value) > Math.abs(delta)).length;
  const layer = shared.layer.filter((one) => one === shared.layer[chosen]).length, p = removal.control_p[chosen];
  const control = p === null ? (layer < 2 ? "Its layer has no other head to compare with."
    : "Only the twelve largest changes are compared with their layer; --control compares all.")
    : `Long ticks: heads of its layer. Another head of the layer changes it by ${signed(removal.control_delta[chosen])} on average. ${Math.round(p * layer)} of ${layer} heads of the layer, this head included, change it at least as much (p ${number(p)}, the smallest possible is ${number(removal.control_p_floor[chosen])}).`;
  const errors = error === null ? (removal.task ? "Too few prompts for a standard error." : "One sentence has no standard error.") : "± is the standard error over prompts.";
  part("amongall").textContent = `Each tick is one of ${count.toLocaleString("en")} heads; ${names[chosen]} is number ${rank} by size. ${control} ${errors}`;
  strip.setAttribute("aria-label", `Change without ${names[chosen]}: ${said}, number ${rank} of ${count} by size`);
}

function fillScores() {
  const scores = part("scores"), row = shared.row[chosen];
  scores.replaceChildren();
  part("scored").hidden = row === null || !Object.keys(shared.detectors).length;
  if (part("scored").hidden) return;
  for (const [name, kind] of Object.entries(shared.detectors)) {
    const value = table.values[name][row], error = table.values[`${name}_se`]?.[row], level = shared.chance[name];
    const chance = level && typeof level === "object" ? level[`L${shared.layer[chosen]}`] ?? null : level;
    const text = value === null ? "not computed" : `${number(value)}${typeof error === "number" ? ` ± ${number(error)}` : ""}${chance === null ? "" : `, chance ${number(chance)}`}`;
    track(scores, kind, value, chance, text, name);
  }
}

/* The largest pairs stand on the head's card, as HTML of the library's own. */
let cards;
function fillTexts() {
  const texts = part("texts"), page = document.createElement("template");
  cards ??= read("cards") ?? {};
  page.innerHTML = cards[names[chosen]] ?? "";
  const found = [...page.content.querySelectorAll("section")].find((one) => one.querySelector("h3")?.textContent === "Where on text");
  const rows = [...found?.querySelectorAll("tbody tr") ?? []].filter((row) => row.cells[0].textContent === "top").slice(0, 6);
  texts.replaceChildren();
  if (!rows.length) add(texts, "p", "No pairs were measured (tls.top_pairs).", "note");
  else add(texts, "p", "Its largest pairs: the key is shaded, the query underlined.", "note");
  for (const row of rows) {
    const line = add(texts, "p", undefined, "evidence");
    line.append(...row.cells[3].childNodes);
    add(line, "small", ` ${row.cells[2].textContent} ${row.cells[1].textContent}`);
  }
}

function kindText(head) {
  const kind = shared.kind[head], known = Object.keys(shared.detectors).map((name) => kinds[name]);
  return kind ? `${shared.detectors[kind]} head` : known.length ? `no score of ${shared.framed} or more` : "";
}

function changeText(head) {
  const removal = sentence.removal;
  if (!removal) return "";
  return removal.task ? `change ${signed(removal.delta[head])}` : `answer ${number(removal.intact[0])} → ${number(removal.without[head][0])}`;
}

const summary = (head) => [names[head], kindText(head), changeText(head)].filter(Boolean).join("; ");

function choose(head, { speak = false, write = false } = {}) {
  chosen = head;
  const kv = shared.kv[head], together = names.filter((_, other) => shared.layer[other] === shared.layer[head] && shared.kv[other] === kv && other !== head);
  part("wallname").textContent = names[head];
  part("wallkind").textContent = [kindText(head), together.length ? `shares keys and values with ${together.length > 8 ? `${together.length} heads` : together.join(", ")}` : ""].filter(Boolean).join("; ");
  part("wallcard").href = `#${names[head]}`;
  part("wallcard").textContent = `The row and card of ${names[head]}`;
  part("wallcard").hidden = shared.row[head] === null;
  fillWords();
  fillRemoved();
  fillScores();
  fillTexts();
  for (const chip of part("wallmost").children) chip.setAttribute("aria-pressed", chip.dataset.head === names[head]);
  ringAt(head);
  bands.dataset.head = names[head];
  if (speak) part("wallspoken").textContent = summary(head);
  if (write) try { history.replaceState(null, "", `#${names[head]}`); } catch { /* a page inside a frame may have no address */ }
}

function ringAt(head, scroll = false) {
  const { drawing, x, y } = placeOf(head), { ring, side } = look, top = drawing.canvas.offsetTop + y;
  Object.assign(ring.style, { left: `${drawing.canvas.offsetLeft + x - 3}px`, top: `${top - 3}px`, width: `${side + 6}px`, height: `${side + BAR + 7}px` });
  if (!scroll) return;
  if (top < bands.scrollTop) bands.scrollTop = top - 24;
  else if (top + look.pitch > bands.scrollTop + bands.clientHeight) bands.scrollTop = top + look.pitch + 8 - bands.clientHeight;
}

/* ---- actions of the reader ---- */

function fillMost() {
  const place = part("wallmost");
  place.replaceChildren();
  place.hidden = !sentence.removal;
  if (!sentence.removal) return;
  const { delta } = sentence.removal, order = [...delta.keys()].sort((one, other) => Math.abs(delta[other]) - Math.abs(delta[one])).slice(0, 12);
  add(place, "span", "Largest changes:");
  for (const head of order) {
    const chip = add(place, "button", `${names[head]} ${signed(delta[head])}`);
    chip.type = "button";
    chip.dataset.head = names[head];
    chip.addEventListener("click", () => { choose(head, { write: true }); ringAt(head, true); });
  }
}

function show(number, head = chosen) {
  sentence = open(number);
  asked = -1;
  largest = sentence.removal ? Math.max(0, ...sentence.removal.delta.map(Math.abs)) : 0;
  part("words").replaceChildren();
  part("wallanswer").textContent = sentence.note;
  [...part("sentences").children].forEach((chip, index) => chip.setAttribute("aria-pressed", index === number));
  redraw();
  fillMost();
  choose(head);
}

function redraw() {
  watcher.disconnect();
  look = layOut();
  drawLegend();
  ringAt(chosen);
}

function headAt(event) {
  const drawing = drawings.find(({ canvas }) => canvas === event.target);
  if (!drawing) return undefined;
  const layer = drawing.shown[Math.floor((event.offsetX - look.left) / look.cell)], head = rows[Math.floor((event.offsetY - 16) / look.pitch)];
  return at.get(`L${layer}H${head}`);
}

function onKey(event) {
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e6, 0], End: [1e6, 0] };
  if (event.key === "Enter" || event.key === " ") part("wallhead").focus();
  else if (event.key in moves) {
    const [right, down] = moves[event.key], clamp = (order, value, by) => order[Math.min(Math.max(order.indexOf(value) + by, 0), order.length - 1)];
    const next = at.get(`L${clamp(layers, shared.layer[chosen], right)}H${clamp(rows, shared.head[chosen], down)}`);
    choose(next ?? chosen, { speak: true, write: true });
    ringAt(chosen, true);
  } else return;
  event.preventDefault();
}

function onWordKey(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const query = asked < 0 ? sentence.n - 1 : asked;
  part("words").children[Math.min(Math.max(query + step, 0), sentence.n - 1)].focus();
}

shared.sentences.forEach((text, index) => {
  const chip = add(part("sentences"), "button", text);
  chip.type = "button";
  chip.dir = "auto";
  chip.addEventListener("click", () => show(index));
});
bands.addEventListener("click", (event) => { const head = headAt(event); if (head !== undefined) choose(head, { write: true }); });
bands.addEventListener("pointermove", (event) => { const head = headAt(event); part("wallover").textContent = head === undefined ? "" : summary(head); });
bands.addEventListener("pointerleave", () => { part("wallover").textContent = ""; });
bands.addEventListener("keydown", onKey);
part("words").addEventListener("keydown", onWordKey);
part("words").addEventListener("pointerleave", () => ask(-1));
addEventListener("hashchange", () => { const head = at.get(location.hash.slice(1)); if (head !== undefined && head !== chosen) choose(head); });
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
dark.addEventListener("change", redraw);
addEventListener("beforeprint", () => drawings.filter(({ drawn }) => !drawn).forEach(paint));

const start = open(0), startDeltas = start.removal?.delta.map(Math.abs);
const first = startDeltas ? startDeltas.indexOf(Math.max(...startDeltas)) : Math.max(0, shared.kind.findIndex(Boolean));
show(0, at.get(location.hash.slice(1)) ?? first);
}
