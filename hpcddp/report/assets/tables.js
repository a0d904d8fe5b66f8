// Runs in figures, configuration side by side, records in words, the script and the log.

const STATES = { COMPLETED: "good", RUNNING: "live", PENDING: "wait", STOPPED: "calm",
  CANCELLED: "calm", RENDERED: "calm", PREEMPTED: "wait" };

function chip(status) {
  return el("span", { class: `chip ${STATES[status.state] || "bad"}` },
    String(status.state).toLowerCase().replaceAll("_", " "));
}

const evals = (run) => Object.keys(run.curves).filter((name) => name.startsWith("eval/"));

// Seconds from the submission to the end, or to now.
function taken(run) {
  const last = run.attempts[run.attempts.length - 1];
  if (!last) return null;
  return (last.ended || run.now) - run.status.created;
}

// What the interruptions cost, in words; what the newest attempt lost is not of them.
function price(run) {
  const last = run.attempts[run.attempts.length - 1];
  return [plural(run.lost_steps - (last ? last.lost : 0), "step"), span(run.interrupted_s)];
}

// What became of a run, in two or three sentences.
function story(run) {
  const { status } = run;
  const steps = status.total_steps
    ? `step ${count(status.step)} of ${count(status.total_steps)}` : `step ${count(status.step)}`;
  const whole = status.total_steps && status.step >= status.total_steps;
  const began = run.attempts.length > 0;
  const words = [];
  if (status.state === "COMPLETED" && whole) words.push(`Took all ${count(status.step)} steps`);
  else if (status.state === "RUNNING") words.push(`Is at ${steps}`);
  else if (began) words.push(`Came to ${steps}`);
  else words.push("Has not begun");
  if (began) words[0] += ` in ${plural(run.attempts.length + run.earlier, "attempt")}` +
    ` and ${span(taken(run))} since its submission`;
  if (run.to_go_s) words[0] += `, about ${span(run.to_go_s)} to go`;
  if (run.interruptions)
    words.push(`${plural(run.interruptions, "interruption")} (${run.causes.join(", ")}) cost ` +
      price(run).join(" and "));
  else if (began) words.push("Nothing interrupted it");
  const state = String(status.state).toLowerCase().replaceAll("_", " ");
  if (status.reason) words.push(`${state[0].toUpperCase()}${state.slice(1)}: ${status.reason}`);
  if (status.stale) words.push("This is the last known state: Slurm did not answer");
  return `${words.map((w) => w.replace(/\.$/, "")).join(". ")}.`;
}

const unwell = ({ ranks }) => ["dead", "slow"].filter((state) => ranks[state])
  .map((state) => `${ranks[state]} ${state}`).join(", ");

function tile(name, value, note, kind) {
  return el("div", { class: `tile ${kind || ""}` }, el("span", {}, name), el("b", {}, value),
    el("small", {}, note || ""));
}

function tiles(run) {
  const { status, curves } = run;
  const loss = ends(curves.loss);
  const made = [tile("steps", count(status.step), status.total_steps ? `of ${count(status.total_steps)}` : "")];
  if (status.total_steps) {
    const bar = el("i", { class: "progress", "aria-hidden": "true" }, el("i"));
    bar.firstChild.style.width = `${Math.min(100, (100 * status.step) / status.total_steps)}%`;
    made[0].append(bar);
  }
  if (loss.low) made.push(tile("loss", newest(run, "loss"),
    `least ${num(loss.low.value)} at step ${count(loss.low.step)}`));
  for (const name of evals(run).filter((n) => n !== "eval/loss").slice(0, 2)) {
    const { low, high } = ends(curves[name]);
    if (high) made.push(tile(name.slice(5), newest(run, name),
      `${num(low.value)} to ${num(high.value)}`));
  }
  if (curves.samples_per_s) made.push(tile("samples/s", num(run.medians.samples_per_s),
    `${span(run.medians.step_s)} a step, median`));
  if (run.attempts.length) made.push(
    tile("useful time", percent(run.efficiency), `of ${span(run.held_s)} on the nodes`),
    tile("interruptions", count(run.interruptions),
      run.interruptions ? price(run).join(", ") : "none"));
  if (run.ranks.count) made.push(tile("ranks", count(run.ranks.count),
    unwell(run) || "none slow", unwell(run) ? "warn" : ""));
  return el("div", { class: "tiles" }, made);
}

function facts(run) {
  const { status } = run;
  const ended = (run.attempts[run.attempts.length - 1] || {}).ended;
  const rows = [
    ["job", [status.job_id, status.backend].filter(Boolean).join(" on ")],
    ["size", `${status.nodes} × ${plural(status.gpus_per_node, "GPU")}`],
    ["nodes", status.hosts], ["global batch", run.global_batch ? count(run.global_batch) : ""],
    ["epoch", run.steps_per_epoch ? `${plural(run.steps_per_epoch, "step")}` : ""],
    ["submitted", when(status.created)], ["ended", ended ? when(ended) : ""],
    ["told", status.state === "RUNNING" || status.state === "PENDING" ? when(run.now) : ""],
    ["requeue", status.policy], ["folder", status.path],
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
    ...names.map((name) => [name === "eval/loss" ? "eval loss" : name.slice(5), "n"]), ["samples/s", "n"], ["step", "n"],
    ["useful", "n"], ["on nodes", "n"], ["attempts", "n"], ["lost", "n"], ["ranks", "n"]];
  const rows = runs.map((run, i) => {
    const { status, medians } = run;
    const steps = count(status.step) + (status.total_steps ? ` / ${count(status.total_steps)}` : "");
    return [[el("span", { class: "run" }, swatch(i), status.run), "head"], [chip(status), ""],
      [steps, "n"], [newest(run, "loss"), "n"],
      ...names.map((name) => [newest(run, name), "n"]),
      [num(medians.samples_per_s), "n"], [span(medians.step_s), "n"],
      [percent(run.efficiency), "n"], [span(run.held_s), "n"],
      [count(run.attempts.length + run.earlier), "n"],
      [plural(run.lost_steps, "step"), "n"],
      [[count(run.ranks.count), unwell(run)].filter(Boolean).join(": "), unwell(run) ? "n bad" : "n"]];
  });
  return [el("div", { class: "title" }, el("h1", {}, plural(runs.length, "run"))),
    table(heads, rows, { "aria-label": "runs" }),
    el("ul", { class: "stories" }, runs.map((run, i) =>
      el("li", {}, swatch(i), el("b", {}, `${run.status.run}: `), story(run))))];
}

const FIRST = ["python", "torch", "numpy", "hpcddp", "executable"]; // what everybody asks for

// Names and their values in each run: those that differ first, of one run those that were set or
// matter most.
function compared(runs, name) {
  const of = runs.map((run) => run[name]);
  const given = new Set(of.flatMap(Object.keys));
  const first = name === "config" ? [] : FIRST.filter((key) => given.has(key));
  const names = [...new Set([...first, ...[...given].sort()])];
  if (!names.length) return [el("p", { class: "none" }, "Nothing was written down.")];
  const value = (values, key) => (known(values[key]) ? values[key] || '""' : "–");
  const row = (key, mark, shown) => el("tr", { class: mark ? "differs" : null },
    el("th", { scope: "row" }, mark ? el("span", { title: "differs" }, "≠ ") : null, key),
    shown.map((values) => el("td", {}, value(values, key))));
  const list = (some) => el("div", { class: "columns" },
    el("table", {}, el("tbody", {}, some.map((key) => row(key, false, of.slice(0, 1))))));
  const noun = name === "config" || runs.length > 1 ? "value" : "package";
  const folded = (some, words) => (some.length
    ? [el("details", {}, el("summary", {}, `${plural(some.length, noun)} ${words}`), list(some))] : []);
  if (runs.length === 1) {
    const plain = new Set(name === "config" ? runs[0].defaults : names.slice(first.length));
    const own = names.filter((key) => !plain.has(key));
    const words = name === "config" ? "as by default" : "more";
    return [list(own), ...folded(names.filter((key) => plain.has(key)), words)];
  }
  const differs = (key) => new Set(of.map((values) => values[key])).size > 1;
  const heads = ["", ...runs.map((run, i) => [el("span", { class: "run" }, swatch(i), run.status.run), "head"])];
  const unlike = names.filter(differs);
  const shown = unlike.length
    ? table(heads, unlike.map((key) => row(key, true, of)), { "aria-label": "differences" })
    : el("p", { class: "note" }, "No differences.");
  return [shown, ...folded(names.filter((key) => !differs(key)), "that all have in common")];
}

const WARNS = /\b(slow|bad|NOT saved|diverged|waits? for|back to|crash|left out|could not)\b/;

function events(runs) {
  const rows = runs.flatMap((run, i) => run.events.map((event) => [...event, i]))
    .sort((a, b) => a[0] - b[0]);
  if (!rows.length) return [el("p", { class: "none" }, "Nothing was told yet.")];
  const heads = ["when", runs.length > 1 ? "run" : null, ["attempt", "n"], ["step", "n"], "what"];
  const cells = ([time, attempt, step, text, i]) => [when(time),
    runs.length > 1 ? swatch(i) : null, [String(attempt), "n"], [count(step), "n"],
    [text.replace(/^step \d+ {2}(epoch \d+ {2})?/, ""), WARNS.test(text) ? "words warn" : "words"]];
  const whole = (row) => row.filter((cell) => cell !== null);
  return [table(whole(heads), rows.map((row) => whole(cells(row))),
    { class: "scroll tall", "aria-label": "events" })];
}

function texts(runs, name, title, open) {
  return runs.map((run, i) => {
    const text = Array.isArray(run[name]) ? run[name].join("\n") : run[name];
    if (!text) return null;
    return el("details", { open: open && runs.length === 1 },
      el("summary", {}, runs.length > 1 ? [swatch(i), ` ${title} of ${run.status.run}`] : title),
      el("pre", { tabindex: "0", class: "tall" }, text));
  }).filter(Boolean);
}
