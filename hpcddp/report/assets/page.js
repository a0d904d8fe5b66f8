// The page: draw(root, data) draws it. With newer data it changes the page in place and keeps what
// the reader has opened, zoomed, switched and scrolled.

const pages = new WeakMap(); // root -> its parts

const PARTS = [
  ["curves", "Curves"], ["speed", "Throughput"], ["attempts", "Attempts"], ["ranks", "Ranks"],
  ["events", "Events"], ["config", "Configuration"], ["script", "Log and script"],
];

function draw(root, data) {
  const names = JSON.stringify(data.runs.map((run) => run.status.run));
  let page = pages.get(root);
  if (!page || page.names !== names) {
    if (page) page.end();
    pages.set(root, (page = begin(root, data.runs, names)));
  }
  const { runs } = data;
  part(page, "top", runs, (all) => (all.length === 1 ? single(all[0]) : several(all)));
  drawCharts(page, runs);
  runs.forEach((run, i) => {
    const of = (name) => (runs.length > 1 ? `${name} of ${run.status.run}` : name);
    part(page, `attempts-${i}`, [run.attempts, budget(run), run.interruptions],
      () => attempts(run, of("attempts")));
    page.maps[i].update(run);
    part(page, `found-${i}`, [run.ranks, run.heat], () => [rankList(run)].filter(Boolean));
    part(page, `figures-${i}`, run.ranks, () => [rankTable(run, of("ranks"))].filter(Boolean));
  });
  part(page, "events", runs.map((run) => run.events), () => events(runs));
  part(page, "config", runs.map((run) => run.config), () => compared(runs, "config"));
  part(page, "versions", runs.map((run) => run.versions), () => compared(runs, "versions"));
  part(page, "script", runs.map((run) => run.script), () => texts(runs, "script", "Batch script", false));
  part(page, "log", runs.map((run) => run.log), () => texts(runs, "log", "Last lines of the log", true));
  page.legend.hidden = runs.every((run) => !run.attempts.length);
  hide(page, "ranks", runs.every((run) => !run.ranks.count && !run.heat.rows.length));
  hide(page, "speed", !page.sections.speed.querySelector(".chart"));
  hide(page, "script", runs.every((run) => !run.script && !run.log.length));
  uncover(root);
  reachable(root);
}

// Hides a section that has nothing to show, and the link to it.
function hide(page, name, hidden) {
  page.sections[name].hidden = page.links[name].hidden = hidden;
}

// Draws a part again if its data is new, and keeps what is open or scrolled in it.
function part(page, name, data, build) {
  const box = page.boxes[name], text = JSON.stringify(data);
  if (box.text === text) return;
  box.text = text;
  const was = [...box.node.querySelectorAll("details, .scroll, pre")].map((node) => ({
    open: node.open, top: node.scrollTop, left: node.scrollLeft,
    end: node.scrollTop + node.clientHeight >= node.scrollHeight - 4,
  }));
  const focused = [...box.node.querySelectorAll("*")].indexOf(document.activeElement);
  box.node.replaceChildren(...build(data));
  [...box.node.querySelectorAll("details, .scroll, pre")].forEach((node, i) => {
    const old = was[i];
    if (old && "open" in node) node.open = old.open;
    const last = /^(log|events|attempts)/.test(name);
    node.scrollTop = last && (!old || old.end) ? node.scrollHeight : old ? old.top : 0;
    node.scrollLeft = old ? old.left : 0;
  });
  if (focused < 0) return;
  reachable(box.node);
  [...box.node.querySelectorAll("*")][focused]?.focus({ preventScroll: true });
}

// The frame of the page, without its data.
function begin(root, runs, names) {
  const page = { names, boxes: {}, charts: {}, maps: runs.map(heatMap), sections: {}, links: {} };
  const whole = () => {
    page.board.look(null);
    page.curves.querySelector(".plot").focus(); // the button is hidden now
  };
  const reset = el("button", { type: "button", hidden: true, click: whole }, "reset zoom");
  page.board = newBoard((zoom) => { reset.hidden = !zoom; });
  const box = (name) => {
    const node = el("div", { class: `part ${name.replace(/-\d+$/, "")}` });
    page.boxes[name] = { node };
    return node;
  };
  const each = (build) => runs.map((run, i) => el("div", { class: "one" }, runs.length > 1
    ? el("h3", { class: "run" }, swatch(i), run.status.run) : null, build(i)));
  const inside = {
    curves: [page.curves = el("div", { class: "grid" }), page.hint = el("p", { class: "note hint" },
      runs.length > 1 ? "" : "A dotted line marks the start of an attempt. ",
      "Drag to zoom, double-click to reset. Keyboard, on a chart: ← and → move, + and – zoom, ",
      "0 or Esc resets.")],
    speed: [page.speed = el("div", { class: "grid" })],
    attempts: [page.legend = barLegend(), each((i) => box(`attempts-${i}`))],
    ranks: each((i) => [box(`found-${i}`), page.maps[i].node, box(`figures-${i}`)]),
    events: [box("events")],
    config: [box("config"), el("h3", {}, "Versions"), box("versions")],
    script: [box("log"), box("script")],
  };
  const sections = PARTS.map(([name, title]) => page.sections[name] = el("section",
    { id: name, "aria-labelledby": `${name}-title` },
    el("h2", {}, el("span", { id: `${name}-title` }, title), name === "curves" ? reset : null),
    inside[name]));
  const links = el("nav", { "aria-label": "Sections" }, PARTS.map(([name, title]) =>
    page.links[name] = el("a", { href: `#${name}` }, title)));
  root.replaceChildren(el("header", { id: "top" }, box("top")), links, ...sections);
  watch(page, root);
  return page;
}

const QUICK = { smooth: true, reach: 1 / 200 }; // speed changes at once

// The charts: [where, key, title, lines, options].
function chartsOf(runs) {
  const one = runs.length === 1;
  const lines = (name, more = {}) => runs.flatMap((run, i) => {
    const curve = run.curves[name];
    if (!curve || !curve[1].some(known)) return [];
    return [{ label: one ? more.label || name : run.status.run + (more.also ? `, ${more.also}` : ""),
      colour: one ? more.colour || "--c0" : colour(i), dash: more.dash, curve, means: run.means[name] }];
  });
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  const found = [
    ["curves", "loss", "loss", [...lines("loss", { label: "training" }),
      ...lines("eval/loss", { label: "evaluation", also: "evaluation", colour: "--c1", dash: true })],
    { wide: true, height: 260, smooth: true }],
    ...names.filter((n) => n.startsWith("eval/") && n !== "eval/loss")
      .map((n) => ["curves", n, `eval ${n.slice(5)}`, lines(n), {}]),
    ...names.filter((n) => n.startsWith("log/")).map((n) => ["curves", n, n.slice(4), lines(n), {}]),
    ["curves", "lr", "learning rate", lines("lr"), {}],
    ["curves", "grad_norm", "gradient norm", lines("grad_norm"), { smooth: true }],
    ["speed", "samples_per_s", "samples/s", lines("samples_per_s"), QUICK],
    ["speed", "step_s", "time per step, in seconds",
      [...lines("step_s", { label: "whole step" }),
        ...lines("wait_s", { label: "waiting for data", also: "waiting for data", colour: "--c1", dash: true })],
      { ...QUICK, unit: span }],
  ];
  return found.filter(([, , , found]) => found.length);
}

function drawCharts(page, runs) {
  const marks = runs.length > 1 ? [] : runs[0].attempts.slice(1).filter(({ first }) => first)
    .map(({ first, attempt }) => ({ step: first, label: String(attempt) }));
  const found = chartsOf(runs);
  for (const [where, key, title, lines, options] of found) {
    if (!page.charts[key]) {
      page.charts[key] = chart(page.board, title, options);
      page[where].append(page.charts[key].node);
    }
    page.charts[key].update(lines, marks);
  }
  page.hint.hidden = !found.length;
  page.curves.querySelector(".none")?.remove();
  if (!found.length) page.curves.append(el("p", { class: "none" }, noCurves(runs)));
}

// The reason why there is no curve yet.
function noCurves(runs) {
  if (runs.length > 1) return "None of these runs has recorded metrics.";
  const { status, attempts, config, defaults } = runs[0];
  if (!attempts.length) return "No metrics yet: the run has not started.";
  if (config.command && !defaults.includes("command"))
    return "No metrics recorded. A program of your own records them with hpcddp.attach.";
  return status.state === "RUNNING" ? "No metrics yet: they appear after the first recorded step."
    : "No metrics recorded: no attempt came to its first recorded step.";
}

// Colours and widths follow the window, the reader's colour scheme, and paper.
function watch(page, root) {
  const again = () => {
    for (const each of page.board.charts) each.redraw();
    for (const map of page.maps) map.redraw();
  };
  const paper = (on) => {
    document.documentElement.classList.toggle("paper", on);
    for (const each of page.board.charts) each.resize();
    again();
    uncover(root);
  };
  const listening = new AbortController(), { signal } = listening;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again, { signal });
  root.addEventListener("toggle", () => reachable(root), { capture: true, signal });
  addEventListener("beforeprint", () => paper(true), { signal });
  addEventListener("afterprint", () => paper(false), { signal });
  const sizes = new ResizeObserver(() => {
    uncover(root);
    reachable(root);
  });
  sizes.observe(root);
  page.end = () => {
    listening.abort();
    sizes.disconnect();
    for (const each of page.board.charts) each.end();
  };
}
