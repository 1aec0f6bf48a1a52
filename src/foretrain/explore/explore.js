"use strict";
// The explorer's page: controls and the URL hold the question; answers that are no longer asked for are dropped.
const $ = id => document.getElementById(id), form = $("controls");
const OF_ANSWER = ["copy-command", "copy-python", "save", "perfetto"];
const NAMES = ["model", "gpu", "rate", "hosts", "gpus", "batch", "engine", "schedule", "compression", "fabric"];
let asked = 0, answer = null, tab = "schedule", fabric = "star", waiting = null, loaded = {}, results = [];
let answering = Promise.resolve(), late = null;
const MOMENT = 300;  // ms: what takes longer leaves time to read, and to copy, what is no longer true

const control = name => form.elements[name];
function question() {
  const found = new URLSearchParams();
  for (const name of NAMES) found.set(name, name === "fabric" ? fabric : control(name).value);
  return found;
}
function fill(select, options) {
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
}
function restore() {
  const found = new URLSearchParams(location.search);
  for (const name of NAMES) if (found.has(name)) {
    if (name === "fabric") fabric = $("fabric").value = found.get(name);
    else {
      const field = control(name), value = found.get(name);
      if (field.tagName === "SELECT" && ![...field.options].some(one => one.value === value)) field.add(new Option(value, value));
      field.value = value;
    }
  }
  tab = location.hash.slice(1) || "schedule";
  slide();
}
// Controls without effect on a recorded workload.
function mute() {
  const recorded = control("model").value === "file";
  for (const name of ["gpu", "batch"]) {
    control(name).disabled = recorded;
    control(name).title = recorded ? "no effect: a recorded workload has the GPU and the batch that it was recorded with" : "";
  }
}
function slide() {
  mute();
  $("slider").value = Math.log10(+control("rate").value || 1);
  $("slider").setAttribute("aria-valuetext", control("rate").value + " Gb/s");
}
async function get(path, signal) {
  const response = await fetch(path, {signal}), found = await response.json();
  if (response.status === 409) throw new DOMException("superseded", "AbortError");
  if (!response.ok || found.error) throw new Error(found.error);
  return found;
}
// Dim what belongs to an earlier question, and let nobody copy it.
function outdate() {
  for (const node of document.querySelectorAll(".of-answer, .of-tab")) node.setAttribute("aria-busy", "true");
  for (const id of OF_ANSWER) $(id).disabled = true;
}
function renew() {
  clearTimeout(late);
  late = null;
  for (const node of document.querySelectorAll(".of-answer")) node.removeAttribute("aria-busy");
  for (const id of OF_ANSWER) $(id).disabled = false;
}

// A change: the URL, the untuned answer, then the tuned one, which replaces it.
async function ask() {
  const mine = ++asked, began = performance.now(), query = question().toString();
  waiting?.abort();
  waiting = new AbortController();
  const {signal} = waiting;
  loaded = {};
  let fresh = false;
  late ??= setTimeout(() => {
    outdate();
    $("state").textContent = answer ? "Being simulated; what is shown is of the scenario before." : "Being simulated …";
  }, MOMENT);
  try {
    // One after the other: the server would compute what nobody waits for any more beside the newest.
    const coming = answering.then(() => mine === asked ? get("/answer?" + query) : null);
    answering = coming.catch(() => {});
    history.replaceState(null, "", `?${query}#${tab}`);
    const found = await coming;
    if (mine !== asked) return;
    show(found);
    fresh = true;
    requestAnimationFrame(() => {
      document.body.dataset.ms = (performance.now() - began).toFixed(1);
      document.body.dataset.shown = query;
    });
    if (tab !== "schedule") load(signal, query, mine);
    $("state").textContent = "With the schedules' defaults; their knobs are being searched …";
    const better = await get("/tuned?" + query, signal);
    if (mine !== asked) return;
    show(better, true);
    $("state").textContent = `Tuned: ${better.schedules.join(", ")}`;
    document.body.dataset.tuned = query;
  } catch (error) {
    if (error.name === "AbortError" || mine !== asked) return;
    complain(error);
    $("state").textContent = fresh || !answer ? "" : "What is shown is of the scenario before.";
    clearTimeout(late);
    late = null;
    if (!fresh) outdate();
  }
}
function text(node, value) { if (node.textContent !== value) node.textContent = value; }
function show(found, stay) {
  answer = found;
  renew();
  $("error").hidden = true;
  document.body.style.setProperty("--verdict", found.good ? "var(--good)" : "var(--fair)");
  text($("verdict"), found.verdict);
  text($("reasons"), found.reasons);
  text($("workload"), found.workload);
  text($("command"), found.command);
  $("cards").replaceChildren(...found.cards.map(card => {
    const node = document.createElement("div");
    node.className = "card";
    for (const [name, value] of [["label", card.label], ["value" + (card.value.length > 11 ? " long" : ""), card.value], ["note", card.note]]) {
      const line = document.createElement("div");
      line.className = name;
      line.textContent = value;
      node.append(line);
    }
    return node;
  }));
  $("parts").replaceChildren(...found.parts.map(part => {
    const node = document.createElement("span"), bold = document.createElement("b");
    bold.textContent = part.time;
    node.append(bold, " " + part.label);
    return node;
  }));
  $("rows").replaceChildren(...found.rows.map(row => {
    const node = document.createElement("tr");
    const name = row.name + (row.marks.length ? ` (${row.marks.join(", ")})` : "");
    for (const value of [name, row.iteration, row.rate, row.speedup, row.ratio, row.exposed, row.idle, row.knobs.join(" ")])
      node.insertCell().textContent = value;
    return node;
  }));
  Charts.show($("bars"), found.figures.bars);
  Charts.show($("lanes"), found.figures.lanes, stay);
}
async function load(signal, query, mine) {
  const here = tab, status = $(here + "-text"), panel = $("panel-" + here);
  if (!status || loaded[here] === query) return;
  const slow = setTimeout(() => panel.setAttribute("aria-busy", "true"), MOMENT);
  status.textContent = "Being simulated; the first time the simulator is compiled …";
  try {
    const found = await get(`/${here}?${query}`, signal);
    if (mine !== asked) return;
    loaded[here] = query;
    for (const [id, figure] of Object.entries(found.figures)) Charts.show($(id + "-figure"), figure);
    status.textContent = found.text;
    document.body.dataset[here] = query;
    panel.removeAttribute("aria-busy");
  } catch (error) {
    if (error.name === "AbortError") return;
    status.textContent = error.message;
    panel.setAttribute("aria-busy", "true");
  } finally {
    clearTimeout(slow);
  }
}
function select(name, focus) {
  const all = [...$("tabs").children];
  if (!all.some(one => one.dataset.tab === name)) name = "schedule";
  tab = name;
  for (const one of all) {
    const on = one.dataset.tab === name;
    one.setAttribute("aria-selected", String(on));
    one.tabIndex = on ? 0 : -1;
    $("panel-" + one.dataset.tab).hidden = !on;
    if (on && focus) one.focus();
  }
  document.body.classList.toggle("result", results.includes(tab));
  history.replaceState(null, "", location.search + "#" + tab);
  if (answer) load(waiting?.signal, question().toString(), asked);
}
function addTab(name, title) {
  const node = document.createElement("button");
  Object.assign(node, {type: "button", id: "tab-" + name, textContent: title});
  node.dataset.tab = name;
  node.setAttribute("role", "tab");
  node.setAttribute("aria-controls", "panel-" + name);
  node.addEventListener("click", () => select(name));
  $("tabs").append(node);
}
$("tabs").addEventListener("keydown", event => {
  const all = [...$("tabs").children], now = all.findIndex(one => one.dataset.tab === tab);
  const next = {ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: -1}[event.key];
  if (next === undefined) return;
  select(all.at(next % all.length).dataset.tab, true);
  event.preventDefault();
});
async function addResults(kinds) {
  if (!kinds.length) return;
  const found = await get("/results");
  for (const [kind, result] of Object.entries(found)) {
    addTab(kind, kind);
    const panel = document.createElement("section");
    Object.assign(panel, {id: "panel-" + kind, hidden: true});
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", "tab-" + kind);
    const head = document.createElement("h2");
    head.textContent = result.title;
    panel.append(head);
    if ("trace" in result) {
      const button = document.createElement("button");
      Object.assign(button, {type: "button", className: "button", id: "perfetto-" + kind, textContent: "open in Perfetto"});
      button.disabled = !result.trace;
      button.title = result.trace ? "" : "no trace: simulate with --json and --trace together";
      button.addEventListener("click", () => perfetto(result.title, () => fetched("/results/trace")));
      panel.append(button);
    }
    $("results").append(panel);
    for (const [name, figure] of Object.entries(result.figures)) {
      const title = document.createElement("h3"), node = document.createElement("div");
      title.textContent = name;
      panel.append(title, node);
      Charts.show(node, figure);
    }
  }
}
async function copy(button, value) {
  button.dataset.label ??= button.textContent;  // of a second click, too
  try { await navigator.clipboard.writeText(value); button.textContent = "copied"; }
  catch { button.textContent = "not allowed here"; }
  setTimeout(() => { button.textContent = button.dataset.label; }, 1500);
}
$("copy-command").addEventListener("click", event => copy(event.target, answer.command));
$("copy-python").addEventListener("click", event => copy(event.target, answer.python));
$("link").addEventListener("click", event => copy(event.target, location.href));
// Page or trace of the answer that is shown, tuned or not.
const made = what => fetched(`${answer.tuned ? "/tuned" : ""}/${what}?${answer.query}`);
async function fetched(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error((await response.json()).error);
  return response;
}
function complain(error) {
  $("error").textContent = error.message;
  $("error").hidden = false;
}
$("save").addEventListener("click", async () => {
  let page;
  try { page = await (await made("page")).blob(); } catch (error) { return complain(error); }
  const link = document.createElement("a");
  link.href = URL.createObjectURL(page);
  link.download = `${control("model").value}.html`;
  link.click();
  URL.revokeObjectURL(link.href);
});
// Perfetto takes a trace from another window once it has answered PONG: https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui
async function perfetto(title, trace) {
  const place = "https://ui.perfetto.dev", there = window.open(place);
  if (!there) { $("state").textContent = "The browser does not let this page open a window."; return; }
  let buffer;
  try { buffer = await (await trace()).arrayBuffer(); } catch (error) { return complain(error); }
  const asking = setInterval(() => there.postMessage("PING", place), 100);
  const stop = setTimeout(() => clearInterval(asking), 60000);
  addEventListener("message", function answered(event) {
    if (event.source !== there || event.data !== "PONG") return;
    clearInterval(asking);
    clearTimeout(stop);
    removeEventListener("message", answered);
    there.postMessage({perfetto: {buffer, title}}, place);
  });
}
$("perfetto").addEventListener("click",
  () => perfetto(`${answer.workload}: ${answer.schedules.join(", ")}`, () => made("trace")));
$("slider").addEventListener("input", () => {
  control("rate").value = Number((10 ** +$("slider").value).toPrecision(3));
  slide();
  ask();
});
form.addEventListener("input", event => { if (event.target !== $("slider") && event.target.value !== "") { slide(); ask(); } });
form.addEventListener("submit", event => event.preventDefault());
$("fabric").addEventListener("change", () => { fabric = $("fabric").value; ask(); });
addEventListener("popstate", () => { restore(); select(tab); ask(); });
(async () => {
  const choices = await get("/choices");
  for (const name of ["model", "gpu", "engine", "schedule", "compression"]) fill(control(name), choices[name]);
  fill($("fabric"), choices.fabric);
  addTab("schedule", "schedule");
  addTab("curves", "what if");
  addTab("network", "network");
  await addResults(results = choices.results);
  restore();
  select(tab);
  ask();
})();
