// The page: draw(root, data) draws it, and again with newer data in place: what the reader has
// opened, zoomed, switched and scrolled stays as it is.

const pages = new WeakMap(); // root -> what stands in it

const PARTS = [
  ["curves", "Curves"], ["speed", "Throughput"], ["attempts", "Attempts"], ["ranks", "Ranks"],
  ["events", "Events"], ["config", "Configuration"], ["script", "Script and log"],
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
    part(page, `attempts-${i}`, [run.attempts, budget(run), run.interruptions], () => attempts(run));
    page.maps[i].update(run);
    part(page, `found-${i}`, [run.ranks, run.heat], () => [rankList(run)].filter(Boolean));
    part(page, `figures-${i}`, run.ranks, () => [rankTable(run)].filter(Boolean));
  });
  part(page, "events", runs.map((run) => run.events), () => events(runs));
  part(page, "config", runs.map((run) => run.config), () => compared(runs, "config"));
  part(page, "versions", runs.map((run) => run.versions), () => compared(runs, "versions"));
  part(page, "script", runs.map((run) => run.script), () => texts(runs, "script", "Script", false));
  part(page, "log", runs.map((run) => run.log), () => texts(runs, "log", "Last lines of the log", true));
  page.sections.ranks.hidden = runs.every((run) => !run.ranks.count && !run.heat.rows.length);
  page.sections.speed.hidden = !page.sections.speed.querySelector(".chart");
  uncover(root);
}

// Draws a part anew if its data is new; what is open or scrolled in it stays so.
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
  if (focused >= 0) [...box.node.querySelectorAll("*")][focused]?.focus({ preventScroll: true });
}

// The frame of the page, with nothing in it.
function begin(root, runs, names) {
  const page = { names, boxes: {}, charts: {}, maps: runs.map(heatMap), sections: {} };
  const reset = el("button", { type: "button", hidden: true, click: () => page.board.look(null) },
    "whole run");
  page.board = newBoard((zoom) => { reset.hidden = !zoom; });
  const box = (name) => {
    const node = el("div", { class: `part ${name.replace(/-\d+$/, "")}` });
    page.boxes[name] = { node };
    return node;
  };
  const each = (build) => runs.map((run, i) => el("div", { class: "one" }, runs.length > 1
    ? el("h3", { class: "run" }, swatch(i), run.status.run) : null, build(i)));
  const inside = {
    curves: [page.curves = el("div", { class: "grid" }), el("p", { class: "note hint" },
      runs.length > 1 ? "" : "Dotted: an attempt began. ",
      "Drag to zoom, double-click for all; with the keyboard: arrows, + and –, 0.")],
    speed: [page.speed = el("div", { class: "grid" })],
    attempts: [barLegend(), each((i) => box(`attempts-${i}`))],
    ranks: each((i) => [box(`found-${i}`), page.maps[i].node, box(`figures-${i}`)]),
    events: [box("events")],
    config: [box("config"), el("h3", {}, "Versions"), box("versions")],
    script: [box("log"), box("script")],
  };
  const sections = PARTS.map(([name, title]) => page.sections[name] = el("section", { id: name },
    el("h2", {}, title, name === "curves" ? reset : null), inside[name]));
  const links = el("nav", { "aria-label": "parts of the page" },
    PARTS.map(([name, title]) => el("a", { href: `#${name}` }, title)));
  root.replaceChildren(el("header", { id: "top" }, box("top")), links, ...sections);
  watch(page, root);
  return page;
}

const QUICK = { smooth: true, reach: 1 / 200 }; // how fast it is changes at once

// Which charts there are: [where, key, title, lines, options].
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
    ["speed", "step_s", one ? "seconds of a step" : "seconds of a step, and of these for data",
      [...lines("step_s", { label: "step" }),
        ...lines("wait_s", { label: "of these, for data", also: "for data", colour: "--c1", dash: true })],
      { ...QUICK, unit: span }],
  ];
  return found.filter(([, , , found]) => found.length);
}

function drawCharts(page, runs) {
  const marks = runs.length > 1 ? [] : runs[0].attempts.slice(1).filter((life) => life.first)
    .map((life) => ({ step: life.first, label: String(life.attempt) }));
  const found = chartsOf(runs);
  for (const [where, key, title, lines, options] of found) {
    if (!page.charts[key]) {
      page.charts[key] = chart(page.board, title, options);
      page[where].append(page.charts[key].node);
    }
    page.charts[key].update(lines, marks);
  }
  const none = page.curves.querySelector(".none");
  if (found.length && none) none.remove();
  if (!found.length && !none)
    page.curves.append(el("p", { class: "none" }, "No step was told yet."));
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
  addEventListener("beforeprint", () => paper(true), { signal });
  addEventListener("afterprint", () => paper(false), { signal });
  const sizes = new ResizeObserver(() => uncover(root));
  sizes.observe(root);
  page.end = () => {
    listening.abort();
    sizes.disconnect();
    for (const each of page.board.charts) each.end();
  };
}
