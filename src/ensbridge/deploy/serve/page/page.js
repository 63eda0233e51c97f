"use strict";
const $ = (id) => document.getElementById(id);
const PREDICTORS = { source: "One network", model: "Model", ensemble: "True ensemble" };
const CLASSES = 6, LINES = 4, LEAST = 0.0005;
let model = null, token = "", current = null, asked = 0;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function drawn(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

const percent = (p) => p >= 0.9995 ? "> 99.9 %" : p < 0.0005 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`;
const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const millions = (n) => n >= 1e9 ? `${(n / 1e9).toPrecision(3)} G` : n >= 1e6 ? `${(n / 1e6).toPrecision(3)} M` : `${(n / 1e3).toPrecision(3)} k`;

async function ask(path, options = {}) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The server cannot be reached.");
  }
  const answer = await response.json().catch(() => ({ error: `The server answered ${response.status}.` }));
  $("token-form").hidden = response.status !== 401;
  if (response.status === 401) $("token").focus();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function complain(error) {
  $("status").textContent = error.message;
  $("status").classList.add("bad");
  $("status").hidden = false;
}

async function describe(name) {
  model = await ask("v1/model" + (name ? `?model=${encodeURIComponent(name)}` : ""));
  $("title").textContent = model.name;
  const bridges = model.bridges ? ` and ${count(model.bridges, "small bridge")}` : "";
  $("about").textContent = `One network${bridges} in place of ${count(model.members, "network")}: ` +
    `×${model.cost.model.ratio.toFixed(2)} the cost of one. ${count(model.classes.length, "class").replace("classs", "classes")}, ` +
    `images of ${model.image_shape.join(" × ")}, back end ${model.backend}.`;
  const choice = $("model");
  choice.replaceChildren(...model.models.map((each) => make("option", { value: each }, each)));
  choice.value = model.name;
  $("model-choice").hidden = model.models.length < 2;
}

async function predict(blob, name) {
  current = { blob, name };
  const number = ++asked;
  const preview = $("preview");
  if (preview.src) URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(blob);
  preview.alt = `The chosen image, ${name}`;
  preview.hidden = false;
  $("status").textContent = "Looking …";
  $("status").classList.remove("bad");
  $("status").hidden = false;
  try {
    if (!model) await describe();
    const body = new FormData();
    body.append("images", blob, name);
    const query = new URLSearchParams({
      model: model.name, top: Math.min(model.classes.length, 1000), steps: true, ensemble: model.has_ensemble,
    });
    const answer = await ask(`v1/predict?${query}`, { method: "POST", body });
    if (number === asked) show(answer.predictions[0]);
  } catch (error) {
    if (number !== asked) return;
    for (const id of ["result", "bars-card", "path-card"]) $(id).hidden = true;
    complain(error);
  }
}

function show(prediction) {
  $("status").hidden = true;
  const { words, entropy, msp, disagreement } = prediction.uncertainty;
  $("words").replaceChildren(make("strong", {}, prediction.label), words.replaceAll(" %", "\u00a0%"));
  const scores = [
    ["Probability of another class (1 − MSP)", percent(msp)],
    ["Entropy", `${entropy.toFixed(3)} nats`],
    ["Changed by the bridge (total variation)", disagreement.toFixed(3)],
  ];
  $("scores").replaceChildren(...scores.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  $("result").hidden = false;
  const said = { source: prediction.source, model: prediction };
  if (prediction.ensemble) said.ensemble = prediction.ensemble;
  showBars(said);
  showPath(prediction);
}

const byClass = (entries) => new Map(entries.map((entry) => [entry.class_index, entry.probability]));

function showBars(said) {
  $("legend").replaceChildren(...Object.keys(said).map((name) => {
    const cost = model.cost[name];
    return make("li", {}, make("span", { class: `swatch ${name}` }), PREDICTORS[name],
      make("small", {}, `×${cost.ratio.toFixed(2)} · ${millions(cost.macs)} MACs · ${millions(cost.parameters)} params`));
  }));
  const tables = Object.fromEntries(Object.entries(said).map(([name, opinion]) => [name, byClass(opinion.probabilities)]));
  const largest = new Map();
  for (const table of Object.values(tables))
    for (const [index, p] of table) largest.set(index, Math.max(p, largest.get(index) ?? 0));
  const chosen = [...largest.keys()].sort((a, b) =>
    (tables.model.get(b) ?? 0) - (tables.model.get(a) ?? 0) || largest.get(b) - largest.get(a))
    .filter((index, at) => at < 2 || largest.get(index) >= LEAST).slice(0, CLASSES);
  $("bars").replaceChildren(...chosen.map((index) => {
    const name = model.classes[index];
    const bars = Object.keys(said).map((who) => {
      const p = tables[who].get(index) ?? 0;
      const fill = make("div", { class: `fill ${who}` });
      fill.style.width = `${100 * p}%`;
      return make("div", { class: "bar", role: "img", "aria-label": `${PREDICTORS[who]}: ${name} ${percent(p)}` },
        make("div", { class: "track" }, fill), make("span", { class: "number" }, percent(p)));
    });
    const best = index === said.model.class_index ? " best" : "";
    return make("div", { class: "class" }, make("div", { class: `name${best}` }, name), make("div", {}, ...bars));
  }));
  $("no-ensemble").hidden = model.has_ensemble;
  $("bars-card").hidden = false;
}

function pathStates(prediction) {
  const states = [{ name: "one network", table: byClass(prediction.source.probabilities) }];
  const paths = prediction.steps ?? [];
  const alike = paths.every((path) => path.times.join() === paths[0].times.join());
  const shown = alike ? paths : paths.slice(0, 1);
  (shown[0]?.times ?? []).forEach((time, at) => {
    const table = new Map();
    for (const path of shown)
      for (const { class_index, probability } of path.states[at])
        table.set(class_index, (table.get(class_index) ?? 0) + probability / shown.length);
    const last = at === shown[0].times.length - 1;
    states.push({ name: at === 0 ? "start, t = 1" : last ? "end, t = 0" : `t = ${time.toFixed(2)}`, table });
  });
  states.push({ name: "model", table: byClass(prediction.probabilities) });
  return states;
}

function showPath(prediction) {
  $("path-card").hidden = !(prediction.steps ?? []).length;
  if ($("path-card").hidden) return;
  const states = pathStates(prediction);
  const chosen = prediction.probabilities.map((entry) => entry.class_index)
    .sort((a, b) => Math.max(...states.map((s) => s.table.get(b) ?? 0)) - Math.max(...states.map((s) => s.table.get(a) ?? 0)))
    .slice(0, LINES);
  const narrow = window.innerWidth < 600;
  const width = narrow ? 380 : 860, height = 250, left = 46, right = narrow ? 20 : 130, top = 14, bottom = 40;
  const x = (at) => left + at * (width - left - right) / (states.length - 1);
  const y = (p) => top + (1 - p) * (height - top - bottom);
  const said = chosen.map((index) => `${model.classes[index]} ${states.map((s) => percent(s.table.get(index) ?? 0)).join(", ")}`);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height + (narrow ? 22 * chosen.length : 0)}`, role: "img",
    "aria-label": `Probabilities from one network along the bridge to the model: ${said.join("; ")}` });
  for (const p of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(drawn("line", { class: "grid", x1: left, x2: width - right, y1: y(p), y2: y(p) }));
    svg.append(drawn("text", { x: left - 8, y: y(p) + 4, "text-anchor": "end" }, `${100 * p} %`));
  }
  states.forEach((state, at) => {
    const anchor = at === 0 ? "start" : at === states.length - 1 ? "end" : "middle";
    svg.append(drawn("text", { x: x(at) + (at === 0 ? -left + 14 : at === states.length - 1 ? 16 : 0), y: height - 14, "text-anchor": anchor }, state.name));
  });
  let lowest = -Infinity;
  const order = [...chosen].sort((a, b) => states.at(-1).table.get(b) - states.at(-1).table.get(a));
  const labels = new Map(order.map((index) => {
    lowest = Math.max(lowest + 16, y(states.at(-1).table.get(index) ?? 0));
    return [index, lowest];
  }));
  const over = Math.max(0, lowest - y(0));  // names at the bottom move up rather than over the axis
  chosen.forEach((index, line) => {
    const points = states.map((state, at) => [x(at), y(state.table.get(index) ?? 0)]);
    svg.append(drawn("polyline", { class: `walk s${line}`, points: points.map((point) => point.join()).join(" ") }));
    for (const [cx, cy] of points) svg.append(drawn("circle", { class: `f${line}`, cx, cy, r: 4 }));
    const [tx, ty] = narrow ? [left + 14, height + 14 + 20 * line] : [width - right + 12, labels.get(index) + 4 - (labels.get(index) > y(0.15) ? over : 0)];
    if (narrow) svg.append(drawn("circle", { class: `f${line}`, cx: left, cy: ty - 4, r: 5 }));
    const name = drawn("text", { x: tx, y: ty, class: narrow ? "" : `f${line}` }, model.classes[index]);
    svg.append(name);
  });
  $("path-words").textContent = "How the most probable classes move: from one network's prediction, tempered at the start, step by step to the model's.";
  $("path").replaceChildren(svg);
}

async function showExamples() {
  const names = await (await fetch("examples/")).json();
  $("examples").replaceChildren(...names.map((name) => {
    const image = make("img", { src: `examples/${name}.png`, alt: name, width: 64, height: 64 });
    const button = make("button", { type: "button", "aria-pressed": "false", title: name }, image);
    button.addEventListener("click", async () => {
      const blob = await (await fetch(image.src)).blob();
      press(button);
      predict(blob, `${name}.png`);
    });
    return button;
  }));
}

function press(chosen) {
  for (const button of $("examples").children) button.setAttribute("aria-pressed", String(button === chosen));
}

function take(files) {
  const file = [...files].find((each) => each.type.startsWith("image/")) ?? files[0];
  if (!file) return;
  press(null);
  predict(file, file.name || "pasted.png");
}

$("pick").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", (event) => { take(event.target.files); event.target.value = ""; });
document.addEventListener("paste", (event) => { if (event.clipboardData?.files.length) take(event.clipboardData.files); });
for (const kind of ["dragover", "dragenter"])
  document.addEventListener(kind, (event) => { event.preventDefault(); $("drop").classList.add("over"); });
for (const kind of ["dragleave", "drop"])
  document.addEventListener(kind, (event) => { event.preventDefault(); $("drop").classList.remove("over"); });
document.addEventListener("drop", (event) => take(event.dataTransfer.files));
$("model").addEventListener("change", async (event) => {
  try {
    await describe(event.target.value);
    if (current) await predict(current.blob, current.name);
  } catch (error) { complain(error); }
});
$("token-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  token = $("token").value;
  try {
    await describe();
    $("status").textContent = "Choose an image to see what each predictor makes of it.";
    $("status").classList.remove("bad");
    if (current) await predict(current.blob, current.name);
  } catch (error) { complain(error); }
});
describe().catch(complain);
showExamples().catch(() => {});
