// The attempts: a bar over wall-clock time, the use of the time on the nodes, the cost of each end.

const KINDS = [
  ["wait", "waiting"], ["start", "starting"], ["train", "training"], ["lost", "lost steps, repeated later"],
];

// The pieces of an attempt: [kind, from, to, words].
function pieces(attempt, now) {
  const ended = attempt.ended || now;
  const trains = attempt.last > attempt.first;
  const begun = trains ? Math.min(ended, attempt.began + attempt.started_s) : ended;
  const kept = Math.max(begun, ended - (trains ? attempt.lost_s : 0));
  const name = `attempt ${attempt.attempt}`;
  return [
    ["wait", attempt.began - attempt.waited_s, attempt.began, `waiting for ${name}`],
    ["start", attempt.began, begun, `${name} starting`],
    ["train", begun, kept, `${name} training, steps ${attempt.first + 1} to ${attempt.last}`],
    ["lost", kept, ended, `${name}: ${plural(attempt.lost, "lost step")}, repeated later`],
  ].filter(([, from, to]) => to > from);
}

const bad = (attempt) => attempt.cause !== null && !attempt.calm;

function timeline(run) {
  const all = run.attempts;
  const first = all[0].began - all[0].waited_s;
  const last = Math.max(...all.map((attempt) => attempt.ended || run.now));
  const share = (t) => `${(100 * (t - first)) / Math.max(last - first, 1e-9)}%`;
  const bar = el("div", { class: "bar", role: "img", "aria-label": all.map(attemptInWords).join(" ") });
  for (const attempt of all)
    for (const [kind, from, to, words] of pieces(attempt, run.now)) {
      const part = el("i", { class: kind, title: `${words}: ${span(to - from)}` });
      part.style.left = share(from);
      part.style.width = `calc(${share(to)} - ${share(from)})`;
      bar.append(part);
    }
  const causes = el("div", { class: "causes", "aria-hidden": "true" });
  for (const attempt of all) {
    if (!attempt.ended) continue;
    const mark = el("span", { class: bad(attempt) ? "bad" : "" },
      `${attempt.attempt} ${attempt.cause || "ended"}`);
    mark.style.right = `calc(100% - ${share(attempt.ended)})`;
    causes.append(mark);
  }
  const day = new Date(1000 * first).toDateString() !== new Date(1000 * last).toDateString();
  return el("div", { class: "timeline" }, bar, causes, el("div", { class: "clock" },
    el("span", {}, when(first)), el("span", {}, span(last - first)), el("span", {}, when(last, day))));
}

// Where two causes would overlap, the later one stays.
function uncover(root) {
  for (const causes of root.querySelectorAll(".causes")) {
    let free = Infinity;
    for (const mark of [...causes.children].reverse()) {
      mark.classList.remove("covered", "left");
      let box = mark.getBoundingClientRect();
      if (box.left < causes.getBoundingClientRect().left) {
        mark.classList.add("left");
        box = mark.getBoundingClientRect();
      }
      if (box.right > free) mark.classList.add("covered");
      else free = box.left - 6;
    }
  }
}

function attemptInWords(attempt) {
  const steps = attempt.last > attempt.first ? `steps ${attempt.first + 1} to ${attempt.last}` : "no steps";
  return `Attempt ${attempt.attempt}: waited ${span(attempt.waited_s)}, ${steps}, ` +
    `${attempt.cause ? `ended by ${attempt.cause}` : "running"}.`;
}

// The use of the time on the nodes.
function budget(run) {
  const rest = Math.max(0, run.held_s - run.useful_s - run.started_s - run.lost_s);
  return [
    ["train", "useful steps", run.useful_s], ["start", "starting", run.started_s],
    ["lost", "lost steps", run.lost_s], ["rest", "evaluation, checkpoints, shutdown", rest],
  ];
}

function budgetBar(run) {
  const rows = budget(run).filter(([, , seconds]) => seconds > run.held_s / 500);
  const total = sum(rows.map(([, , seconds]) => seconds)) || 1;
  const bar = el("div", { class: "stack", "aria-hidden": "true" }, rows.map(([kind, words, seconds]) => {
    const part = el("i", { class: kind, title: `${words}: ${span(seconds)}` });
    part.style.flexGrow = String(seconds / total);
    return part;
  }));
  return el("div", {}, bar, el("ul", { class: "legend" }, rows.map(([kind, words, seconds]) =>
    el("li", {}, el("i", { class: kind }), `${words} `, el("b", {}, percent(seconds / total)),
      ` ${span(seconds)}`))));
}

// The cost of the end of each attempt: its lost steps, the wait for the next one, and its start.
function costs(run) {
  return run.attempts.map((attempt, i) => {
    const next = run.attempts[i + 1];
    const waits = next ? next.waited_s + next.started_s : 0;
    return { steps: attempt.lost, seconds: attempt.lost_s + waits, ended: Boolean(next) || attempt.lost > 0 };
  });
}

function attemptTable(run, name) {
  const cost = costs(run);
  const rows = run.attempts.map((attempt, i) => {
    const then = (attempt.action || "") + (attempt.reason ? ` (${attempt.reason})` : "") +
      (attempt.recovered ? ` ${attempt.recovered}` : "");
    return [
      [String(attempt.attempt), "n"], when(attempt.began), [span(attempt.waited_s), "n"],
      [span((attempt.ended || run.now) - attempt.began), "n"],
      [attempt.last > attempt.first ? `${count(attempt.first + 1)}–${count(attempt.last)}` : "–", "n"],
      [(attempt.cause || "running") + (attempt.by ? ` by ${attempt.by}` : ""), bad(attempt) ? "bad" : ""],
      [attempt.safe_s === null ? "–" : span(attempt.safe_s), "n"],
      [cost[i].ended && run.status.step ? count(cost[i].steps) : "–", "n"],
      [cost[i].ended ? span(cost[i].seconds) : "–", "n"],
      then || "–", attempt.hosts || "–",
    ];
  });
  const heads = [["attempt", "n"], "began", ["waited", "n"], ["ran", "n"], ["steps", "n"], "end",
    ["time to save", "n"], ["steps lost", "n"], ["time lost", "n"], "then", "nodes"];
  return table(name, heads, rows, rows.length > 16 ? "scroll tall" : "scroll");
}

const barLegend = () => el("ul", { class: "legend" }, KINDS.map(([kind, words]) =>
  el("li", {}, el("i", { class: kind }), words)));

function attempts(run, name) {
  if (!run.attempts.length) return [el("p", { class: "none" }, "No attempt has started yet.")];
  const errors = run.attempts.filter((attempt) => attempt.error).slice(-3);
  const earlier = run.earlier ? `${plural(run.earlier, "earlier attempt")} not shown.` : "";
  const timed = known(run.efficiency); // some step has recorded how long it took
  return [
    timeline(run),
    el("h3", {}, `Time on the nodes: ${span(run.held_s)}` +
      (timed ? `, ${percent(run.efficiency)} useful` : "")),
    timed ? budgetBar(run) : "", attemptTable(run, name), earlier && el("p", { class: "note" }, earlier),
    errors.map((attempt) => el("details", { class: "error", open: attempt === errors[errors.length - 1] },
      el("summary", {}, `Attempt ${attempt.attempt}: error of ` +
        (known(attempt.error.rank) ? `rank ${attempt.error.rank}` : "a rank") +
        (known(attempt.error.rank) && attempt.error.host ? ` on ${attempt.error.host}` : "")),
      el("pre", { "data-name": `error of attempt ${attempt.attempt}` }, attempt.error.text))),
  ].flat().filter(Boolean);
}
