// The attempts: a bar by wall clock, what the time on the nodes went into, and what each end cost.

const KINDS = [
  ["wait", "waiting"], ["start", "starting"], ["train", "training"], ["lost", "taken again"],
];

// The pieces of an attempt: [kind, from, to, words].
function pieces(life, now) {
  const ended = life.ended || now;
  const trains = life.last > life.first;
  const begun = trains ? Math.min(ended, life.began + life.started_s) : ended;
  const kept = Math.max(begun, ended - (trains ? life.lost_s : 0));
  const name = `attempt ${life.attempt}`;
  return [
    ["wait", life.began - life.waited_s, life.began, `waiting for ${name}`],
    ["start", life.began, begun, `${name} starting`],
    ["train", begun, kept, `${name} training, steps ${life.first + 1} to ${life.last}`],
    ["lost", kept, ended, `${plural(life.lost, "step")} of ${name} taken again`],
  ].filter(([, from, to]) => to > from);
}

const bad = (life) => life.cause !== null && !life.calm;

function timeline(run) {
  const lives = run.attempts;
  const first = lives[0].began - lives[0].waited_s;
  const last = Math.max(...lives.map((life) => life.ended || run.now));
  const share = (t) => `${(100 * (t - first)) / Math.max(last - first, 1e-9)}%`;
  const bar = el("div", { class: "bar", role: "img", "aria-label": lives.map(lifeInWords).join(" ") });
  for (const life of lives)
    for (const [kind, from, to, words] of pieces(life, run.now)) {
      const part = el("i", { class: kind, title: `${words}: ${span(to - from)}` });
      part.style.left = share(from);
      part.style.width = `calc(${share(to)} - ${share(from)})`;
      bar.append(part);
    }
  const causes = el("div", { class: "causes", "aria-hidden": "true" });
  for (const life of lives) {
    if (!life.ended) continue;
    const mark = el("span", { class: bad(life) ? "bad" : "" },
      `${life.attempt} ${life.cause || "ended"}`);
    mark.style.right = `calc(100% - ${share(life.ended)})`;
    causes.append(mark);
  }
  const day = new Date(1000 * first).toDateString() !== new Date(1000 * last).toDateString();
  return el("div", { class: "timeline" }, bar, causes, el("div", { class: "clock" },
    el("span", {}, when(first)), el("span", {}, span(last - first)), el("span", {}, when(last, day))));
}

// Of causes that would lie over each other, the later one stays.
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

function lifeInWords(life) {
  const how = life.cause ? `ended: ${life.cause}` : "works";
  return `Attempt ${life.attempt} waited ${span(life.waited_s)}, took the steps ` +
    `${life.first + 1} to ${life.last} and ${how}.`;
}

// What the time on the nodes went into.
function budget(run) {
  const rest = Math.max(0, run.held_s - run.useful_s - run.started_s - run.lost_s);
  return [
    ["train", "steps that count", run.useful_s], ["start", "starting", run.started_s],
    ["lost", "steps taken again", run.lost_s], ["rest", "evaluating, saving, ending", rest],
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

// What the end of each attempt cost: its steps again, the wait for the next, and its start.
function costs(run) {
  return run.attempts.map((life, i) => {
    const next = run.attempts[i + 1];
    const waits = next ? next.waited_s + next.started_s : 0;
    return { steps: life.lost, seconds: life.lost_s + waits, ended: Boolean(next) || life.lost > 0 };
  });
}

function attemptTable(run) {
  const cost = costs(run);
  const rows = run.attempts.map((life, i) => {
    const then = (life.action || "") + (life.reason ? ` (${life.reason})` : "");
    return [
      [String(life.attempt), "n"], when(life.began), [span(life.waited_s), "n"],
      [span((life.ended || run.now) - life.began), "n"],
      [life.last > life.first ? `${count(life.first + 1)}–${count(life.last)}` : "–", "n"],
      [(life.cause || "works") + (life.by ? ` by ${life.by}` : ""), bad(life) ? "bad" : ""],
      [life.safe_s === null ? "–" : span(life.safe_s), "n"],
      [cost[i].ended ? count(cost[i].steps) : "–", "n"],
      [cost[i].ended ? span(cost[i].seconds) : "–", "n"],
      then || "–", life.hosts || "–",
    ];
  });
  const heads = [["#", "n"], "began", ["waited", "n"], ["ran", "n"], ["steps", "n"], "ended",
    ["saved within", "n"], ["cost, steps", "n"], ["cost, time", "n"], "then", "nodes"];
  const tall = rows.length > 16 ? "scroll tall" : "scroll";
  return table(heads, rows, { class: tall, "aria-label": "attempts" });
}

const barLegend = () => el("ul", { class: "legend" }, KINDS.map(([kind, words]) =>
  el("li", {}, el("i", { class: kind }), words)));

function attempts(run) {
  if (!run.attempts.length) return [el("p", { class: "none" }, "No attempt has begun yet.")];
  const errors = run.attempts.filter((life) => life.error).slice(-3);
  const earlier = run.earlier ? `${plural(run.earlier, "earlier attempt")} left out here.` : "";
  const told = known(run.efficiency); // else no step has said how long it took
  return [
    timeline(run),
    el("h3", {}, `Time on the nodes: ${span(run.held_s)}` +
      (told ? `, ${percent(run.efficiency)} useful` : "")),
    told ? budgetBar(run) : "", attemptTable(run), earlier && el("p", { class: "note" }, earlier),
    errors.map((life) => el("details", { class: "error", open: life === errors[errors.length - 1] },
      el("summary", {}, `Attempt ${life.attempt}: error of ` +
        (known(life.error.rank) ? `rank ${life.error.rank}` : "a rank") +
        (known(life.error.rank) && life.error.host ? ` on ${life.error.host}` : "")),
      el("pre", { tabindex: "0" }, life.error.text))),
  ].flat().filter(Boolean);
}
