// The list of runs. Each run keeps its row; the cells change in place.
"use strict";

const number = (value) => (typeof value === "number" ? value : null);
const rows = new Map(); // name -> its row
let data = { runs: [] };
let wanted = ""; // state

const text = document.getElementById("text");
const body = document.querySelector("#runs tbody");

function set(node, words) {
  const value = String(words ?? "");
  if (node.textContent !== value) node.textContent = value;
}

function cell(label, name) {
  return el("td", { role: name === "name" ? "rowheader" : "cell", "data-label": label, class: name });
}

function newRow(name) {
  const link = el("a", { href: `/run/${encodeURIComponent(name)}` }, name);
  const parts = {
    link, why: el("p", { class: "why" }), state: el("span"),
    since: el("p"), done: el("i"), step: el("span"), left: el("span"),
    loss: cell("Loss", "n"), rate: cell("Samples/s", "n"), size: cell("Nodes × GPUs", "n"),
    attempts: cell("Attempts", "n"), slow: cell("Slow ranks", "n"),
  };
  parts.bar = el("div", { class: "share", role: "progressbar", "aria-label": "steps", "aria-valuemin": 0 }, parts.done);
  const first = cell("Run", "name");
  first.append(link, parts.why);
  const state = cell("State", "is");
  state.append(parts.state, parts.since);
  const progress = cell("Progress", "far");
  progress.append(parts.bar, el("p", { class: "steps" }, parts.step, parts.left));
  const row = el("tr", { role: "row" }, first, state, progress, parts.loss, parts.rate, parts.size, parts.attempts, parts.slow);
  return { row, parts };
}

function update({ row, parts }, run) {
  row.className = kind(run.state);
  set(parts.why, run.reason);
  parts.why.title = run.reason || "";
  set(parts.state, run.state);
  parts.state.className = `chip ${kind(run.state)}`;
  parts.state.title = run.stale ? "last known state: Slurm does not answer" : "";
  parts.state.classList.toggle("stale", run.stale);
  const since = run.since ? Date.parse(run.since) / 1000 : run.created;
  set(parts.since, since ? when(since) : "");
  const total = number(run.total_steps) || 0, step = number(run.step) || 0;
  const share = total ? Math.min(1, step / total) : 0;
  parts.done.style.width = `${100 * share}%`;
  parts.bar.classList.toggle("unknown", !total && !step);
  if (total) parts.bar.setAttribute("aria-valuemax", total);
  parts.bar.setAttribute("aria-valuenow", step);
  parts.bar.setAttribute("aria-valuetext", `step ${count(step)}${total ? ` of ${count(total)}` : ""}`);
  set(parts.step, total ? `${count(step)} / ${count(total)}` : step ? count(step) : "");
  set(parts.left, run.to_go_s !== null ? `${span(run.to_go_s)} to go` : total && share < 1 && step ? percent(share) : "");
  set(parts.loss, num(number(run.loss)));
  set(parts.rate, num(number(run.samples_per_s)));
  set(parts.size, run.nodes ? `${run.nodes} × ${run.gpus_per_node}` : "–");
  parts.size.title = `${size(run.nodes, run.gpus_per_node)}${run.hosts ? `: ${run.hosts}` : ""}`;
  set(parts.attempts, run.attempt || "–");
  set(parts.slow, run.slow || "–");
  parts.slow.classList.toggle("warn", run.slow > 0);
}

function matches(run) {
  const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
  const said = [run.run, run.hosts, run.job_id, run.reason, run.state].join(" ").toLowerCase();
  return (!wanted || run.state === wanted) && words.every((word) => said.includes(word));
}

function showStates() {
  const counts = new Map();
  for (const run of data.runs) counts.set(run.state, (counts.get(run.state) || 0) + 1);
  if (wanted && !counts.has(wanted)) wanted = "";
  const states = document.getElementById("states");
  const key = JSON.stringify([[...counts], wanted]);
  if (states.dataset.key === key) return;
  states.dataset.key = key;
  const focused = states.contains(document.activeElement) ? document.activeElement.dataset.state : null;
  const button = (state, n) => el("button", {
    type: "button", class: `chip ${state ? kind(state) : "calm"}`, "data-state": state,
    "aria-pressed": String(wanted === state), click: () => { wanted = wanted === state ? "" : state; show(); },
  }, `${state || "all"} ${count(n)}`);
  states.replaceChildren(button("", data.runs.length), ...[...counts].map(([state, n]) => button(state, n)));
  if (focused !== null) [...states.children].find((b) => b.dataset.state === focused)?.focus();
}

function show() {
  showStates();
  const found = data.runs.filter(matches);
  const names = new Set(data.runs.map((run) => run.run));
  for (const [name, { row }] of rows) if (!names.has(name)) { row.remove(); rows.delete(name); }
  let at = body.firstElementChild;
  for (const run of data.runs) {
    if (!rows.has(run.run)) rows.set(run.run, newRow(run.run));
    const made = rows.get(run.run);
    update(made, run);
    made.row.hidden = true;
    if (at === made.row) at = at.nextElementSibling;
    else body.insertBefore(made.row, at);
  }
  for (const run of found) rows.get(run.run).row.hidden = false;
  document.getElementById("listed").hidden = !found.length;
  document.getElementById("filter").hidden = !data.runs.length;
  const empty = document.getElementById("empty");
  empty.hidden = found.length > 0;
  set(empty, data.runs.length ? "No run matches the filter."
    : "No runs in this folder yet. `hpcddp submit JOB` starts one; it appears here by itself.");
  const filtered = wanted || text.value.trim();
  set(document.getElementById("found"),
    filtered ? `${found.length} of ${plural(data.runs.length, "run")} shown` : "");
}

function clear(event) {
  if (event.key !== "Escape") return;
  text.value = wanted = "";
  show();
}

text.addEventListener("input", show);
document.getElementById("filter").addEventListener("keydown", clear);
document.getElementById("filter").addEventListener("submit", (event) => event.preventDefault());

follow("/api/runs", (newest) => {
  data = newest;
  set(document.getElementById("folder"), data.folder);
  const running = data.runs.filter((run) => run.state === "RUNNING").length;
  document.title = `${running ? `(${running}) ` : ""}Runs · hpcddp`;
  const outside = document.getElementById("outside");
  const notes = [];
  if (data.away) notes.push(`Slurm does not answer (${data.away}). The states are the last known ones.`);
  if (data.outside) notes.push(`Not shown: ${plural(data.outside, "link")} to runs outside this folder.`);
  outside.hidden = !notes.length;
  set(outside, notes.join(" "));
  show();
});
