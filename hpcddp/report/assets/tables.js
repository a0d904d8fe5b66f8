// Runs in figures, configuration side by side, records in words, the script and the log.

const chip = ({ state }) => el("span", { class: `chip ${kind(state)}` }, state);

const evals = (run) => Object.keys(run.curves).filter((name) => name.startsWith("eval/"));

// Seconds from the submission to the end, or to now.
function taken(run) {
  const last = run.attempts[run.attempts.length - 1];
  if (!last) return null;
  return (last.ended || run.now) - run.status.created;
}

// The cost of the interruptions; the steps that the newest attempt lost do not count. A plain program
// records no steps.
function price(run) {
  const last = run.attempts[run.attempts.length - 1];
  const lost = run.lost_steps - (last ? last.lost : 0);
  return [run.status.step ? plural(lost, "step") : "", span(run.interrupted_s)].filter(Boolean);
}

// The progress of a run in words.
function progress({ status, attempts }) {
  const { state, step, total_steps: total } = status;
  if (!attempts.length) return state === "RENDERED" ? "Not submitted" : "Not started yet";
  if (!step) return state === "RUNNING" ? "Started, no step recorded yet" : "No step recorded";
  if (state === "COMPLETED" && step >= total) return `Completed ${total ? "all " : ""}${plural(step, "step")}`;
  const steps = `step ${count(step)}${total ? ` of ${count(total)}` : ""}`;
  return state === "RUNNING" ? `At ${steps}` : `Reached ${steps}`;
}

// The outcome of a run in two or three sentences.
function story(run) {
  const { status } = run;
  const words = [progress(run)];
  const started = run.attempts.length > 0;
  if (started) words[0] += `: ${plural(run.attempts.length + run.earlier, "attempt")}, ` +
    `${span(taken(run))} since the submission`;
  if (run.to_go_s) words[0] += `, about ${span(run.to_go_s)} to go`;
  if (run.interruptions)
    words.push(`${plural(run.interruptions, "interruption")} (${run.causes.join(", ")}) cost ` +
      price(run).join(" and "));
  else if (started) words.push("No interruptions");
  if (status.reason) words.push(`${status.state}: ${status.reason}`);
  if (status.stale) words.push("This is the last known state: Slurm did not answer");
  return `${words.map((w) => w.replace(/\.$/, "")).join(". ")}.`;
}

const unwell = ({ ranks }) => ["dead", "slow"].filter((state) => ranks[state])
  .map((state) => `${ranks[state]} ${state}`).join(", ");

function tile(name, value, note, look) {
  return el("div", { class: `tile ${look || ""}` }, el("dt", {}, name), el("dd", {}, value),
    note ? el("dd", { class: "small" }, note) : null);
}

function tiles(run) {
  const { status, curves } = run;
  const loss = ends(curves.loss);
  const total = status.total_steps;
  const made = [tile("steps", status.step || total ? count(status.step) : "–",
    total ? `of ${count(total)}` : status.step ? "" : "none recorded")];
  if (total) {
    const bar = el("i", { class: "progress", "aria-hidden": "true" }, el("i"));
    bar.firstChild.style.width = `${Math.min(100, (100 * status.step) / total)}%`;
    made[0].lastChild.append(bar);
  }
  if (loss.low) made.push(tile("loss", newest(run, "loss"),
    `lowest ${num(loss.low.value)} at step ${count(loss.low.step)}`));
  for (const name of evals(run).filter((n) => n !== "eval/loss").slice(0, 2)) {
    const { low, high } = ends(curves[name]);
    if (high) made.push(tile(name.slice(5), newest(run, name),
      `${num(low.value)} to ${num(high.value)}`));
  }
  if (curves.samples_per_s) made.push(tile("samples/s", num(run.medians.samples_per_s),
    `median, ${span(run.medians.step_s)} per step`));
  if (run.attempts.length) made.push(
    tile("useful time", percent(run.efficiency), `of ${span(run.held_s)} on the nodes`),
    tile("interruptions", count(run.interruptions),
      run.interruptions ? price(run).join(", ") : "none"));
  if (run.ranks.count) made.push(tile("ranks", count(run.ranks.count),
    unwell(run) || (run.ranks.count > 1 ? "none slow" : ""), unwell(run) ? "warn" : ""));
  return el("dl", { class: "tiles" }, made);
}

function facts(run) {
  const { status } = run;
  const ended = (run.attempts[run.attempts.length - 1] || {}).ended;
  const rows = [
    ["job", status.job_id ? `${status.job_id} on ${status.backend}` : ""],
    ["size", size(status.nodes, status.gpus_per_node)], ["nodes", status.hosts],
    ["global batch", run.global_batch ? plural(run.global_batch, "sample") : ""],
    ["epoch", run.steps_per_epoch ? plural(run.steps_per_epoch, "step") : ""],
    [status.state === "RENDERED" ? "created" : "submitted", when(status.created)],
    ["ended", ended ? when(ended) : ""],
    ["as of", status.state === "RUNNING" || status.state === "PENDING" ? when(run.now) : ""],
    ["requeue", status.policy], ["run folder", status.path],
  ];
  return el("dl", { class: "facts" }, rows.filter(([, value]) => value).map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function single(run) {
  return [el("div", { class: "title" }, el("h1", {}, run.status.run), chip(run.status)),
    el("p", { class: "story" }, story(run)), tiles(run), facts(run)];
}

// Several runs: a row for each.
function several(runs) {
  const names = [...new Set(runs.flatMap(evals))].slice(0, 4);
  const heads = ["run", "state", ["steps", "n"], ["loss", "n"],
    ...names.map((name) => [name === "eval/loss" ? "eval loss" : name.slice(5), "n"]),
    ["samples/s", "n"], ["time per step", "n"], ["useful time", "n"], ["time on nodes", "n"],
    ["attempts", "n"], ["lost", "n"], ["ranks", "n"]];
  const rows = runs.map((run, i) => {
    const { status, medians } = run;
    const total = status.total_steps;
    const steps = total ? `${count(status.step)} / ${count(total)}` : count(status.step || null);
    return [[el("span", { class: "run" }, swatch(i), status.run), "head"], [chip(status), ""],
      [steps, "n"], [newest(run, "loss"), "n"],
      ...names.map((name) => [newest(run, name), "n"]),
      [num(medians.samples_per_s), "n"], [span(medians.step_s), "n"],
      [percent(run.efficiency), "n"], [span(run.held_s), "n"],
      [count(run.attempts.length + run.earlier), "n"],
      [status.step ? plural(run.lost_steps, "step") : "–", "n"],
      [[count(run.ranks.count), unwell(run)].filter(Boolean).join(": "), unwell(run) ? "n bad" : "n"]];
  });
  return [el("div", { class: "title" }, el("h1", {}, plural(runs.length, "run"))),
    table("runs", heads, rows),
    el("ul", { class: "stories" }, runs.map((run, i) =>
      el("li", {}, swatch(i), el("b", {}, `${run.status.run}: `), story(run))))];
}

const FIRST = ["python", "torch", "numpy", "hpcddp", "executable"]; // of most interest
const NONE = {
  config: "No configuration recorded.",
  versions: "No versions recorded yet: the first attempt records them.",
};

// A row of a list of names and values. Its parts have roles: in columns it is no table for a browser.
function pair(key, value) {
  return el("tr", { role: "row" }, el("th", { scope: "row", role: "rowheader" }, key),
    el("td", { role: "cell" }, value));
}

// Names and their values in each run. Values that differ stand first; those of one run that were
// set or matter most.
function compared(runs, name) {
  const of = runs.map((run) => run[name]);
  const given = new Set(of.flatMap(Object.keys));
  const first = name === "config" ? [] : FIRST.filter((key) => given.has(key));
  const names = [...new Set([...first, ...[...given].sort()])];
  if (!names.length) return [el("p", { class: "none" }, NONE[name])];
  const value = (values, key) => (known(values[key]) ? values[key] || '""' : "–");
  const row = (key) => el("tr", { class: "differs" },
    el("th", { scope: "row" }, el("span", { title: "differs" }, "≠ "), key),
    of.map((values) => el("td", {}, value(values, key))));
  const list = (some, title) => (!some.length ? "" : el("div", { class: "columns" },
    el("table", { role: "table", "aria-label": title }, el("tbody", { role: "rowgroup" },
      some.map((key) => pair(key, value(of[0], key)))))));
  const folded = (some, title) => (some.length
    ? [el("details", {}, el("summary", {}, title), list(some, title))] : []);
  if (runs.length === 1) {
    const plain = new Set(name === "config" ? runs[0].defaults : names.slice(first.length));
    const rest = names.filter((key) => plain.has(key));
    const words = name === "config" ? ["values set", "default value"] : ["versions", "more package"];
    return [list(names.filter((key) => !plain.has(key)), words[0]),
      ...folded(rest, plural(rest.length, words[1]))];
  }
  const differs = (key) => new Set(of.map((values) => values[key])).size > 1;
  const heads = [name === "config" ? "key" : "package", ...runs.map((run, i) => [el("span", { class: "run" }, swatch(i), run.status.run), "head"])];
  const [unlike, same] = [names.filter(differs), names.filter((key) => !differs(key))];
  const what = name === "config" ? "configuration" : "versions";
  const shown = unlike.length ? table(`differences of the ${what}`, heads, unlike.map(row))
    : el("p", { class: "note" }, "No differences.");
  return [shown, ...folded(same, `${plural(same.length, "value")} shared by all runs`)];
}

function events(runs) {
  const rows = runs.flatMap((run, i) => run.events.map((event) => [...event, i]))
    .sort((a, b) => a[0] - b[0]);
  if (!rows.length) return [el("p", { class: "none" }, "No events yet.")];
  const heads = ["time", runs.length > 1 ? "run" : null, ["attempt", "n"], ["step", "n"], "event"];
  const cells = ([time, attempt, step, text, warns, i]) => [when(time),
    runs.length > 1 ? [[swatch(i), runs[i].status.run], "of"] : null,
    [String(attempt), "n"], [count(step), "n"],
    [text.replace(/^step \d+ {2}(epoch \d+ {2})?/, ""), warns ? "words warn" : "words"]];
  const whole = (row) => row.filter((cell) => cell !== null);
  return [table("events", whole(heads), rows.map((row) => whole(cells(row))), "scroll tall")];
}

function texts(runs, name, title, open) {
  return runs.map((run, i) => {
    const text = Array.isArray(run[name]) ? run[name].join("\n") : run[name];
    if (!text) return null;
    return el("details", { open: open && runs.length === 1 },
      el("summary", {}, runs.length > 1 ? [swatch(i), ` ${title} of ${run.status.run}`] : title),
      el("pre", { "data-name": title, class: "tall" }, text));
  }).filter(Boolean);
}
