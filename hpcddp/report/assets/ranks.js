// Ranks over time: the time of each compared with the median rank, as a map of colours and in words.

const STOPS = [[0.5, "--heat-low"], [1, "--heat-mid"], [1.5, "--heat-high"], [2.5, "--heat-top"]];
const SLOW = 1.5; // times the median: named in words
const TALL = 400; // pixels: about the height of a map

function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// The colours of the ratios, one for each character of the code.
function ramp(size, cell) {
  const stops = STOPS.map(([at, name]) => [at, rgb(css(name))]);
  return Array.from({ length: size }, (_, i) => {
    const ratio = i * cell;
    const k = Math.max(1, Math.min(stops.length - 1, stops.findIndex(([at]) => at >= ratio)));
    const [[low, a], [high, b]] = [stops[ratio > stops[stops.length - 1][0] ? stops.length - 1 : k - 1],
      stops[ratio > stops[stops.length - 1][0] ? stops.length - 1 : k]];
    const t = high > low ? Math.max(0, Math.min(1, (ratio - low) / (high - low))) : 1;
    return a.map((v, c) => Math.round(v + t * (b[c] - v)));
  });
}

function hostOf(run, rank) {
  let found = "";
  for (const [host, first] of run.hosts) if (first <= rank) found = host;
  return found;
}

// A rank's name and its host, if known.
const placed = (name, host, word = " on ") => (host ? `${name}${word}${host}` : name);

function rowName(run, row) {
  const first = row * run.heat.each;
  const last = Math.min(first + run.heat.each, run.ranks.count || Infinity) - 1;
  return last > first ? `ranks ${first}–${last}` : `rank ${first}`;
}

// The longest stretch of columns in which a row is slow. Single slow columns come by chance.
function longest(text, slow) {
  let best = [], now = [];
  [...text].forEach((c, i) => {
    now = slow(c) ? [...now, i] : [];
    if (now.length > best.length) best = now;
  });
  return best;
}

// Rows that were slow for a while: [row, ratio, step it began, step it ended].
function slowRows(run) {
  const { rows, steps, code, cell } = run.heat;
  const found = [];
  rows.forEach((text, row) => {
    const at = longest(text, (c) => c !== " " && code.indexOf(c) * cell >= SLOW);
    if (at.length < Math.max(3, steps.length / 20)) return;
    const ratios = at.map((i) => code.indexOf(text[i]) * cell);
    found.push({ row, worst: median(ratios), from: steps[at[0]], to: steps[at[at.length - 1]],
      still: at[at.length - 1] >= steps.length - 3, share: at.length / steps.length });
  });
  return found.sort((a, b) => b.worst * b.share - a.worst * a.share);
}

// The findings on the ranks: [kind, name, text].
function rankWords(run) {
  const named = run.ranks.rows.filter((row) => row.state);
  const said = new Set(named.map((row) => Math.floor(row.rank / run.heat.each)));
  const words = named.map((row) => {
    const who = `ank ${row.rank} on ${row.host}`;
    const note = row.note.replace(/^step \d+\s+/, "");
    if (note.startsWith(`r${who} `)) return [row.state, `R${who}`, note.slice(who.length + 1)];
    const slow = slowRows(run).find(({ row: r }) => r === Math.floor(row.rank / run.heat.each));
    return [row.state, `R${who}: `, note || (slow ? `slow since about step ${count(slow.from)}` : "slow")];
  });
  for (const { row, worst, from, to, still } of slowRows(run).filter(({ row }) => !said.has(row)))
    words.push(["was", `${placed(rowName(run, row).replace("r", "R"), hostOf(run, row * run.heat.each))}: `,
      `took ${num(Number(worst.toFixed(1)))} × the median ` +
      (still ? `from step ${count(from)} on` : `between step ${count(from)} and ${count(to)}`)]);
  return words;
}

function rankList(run) {
  const words = rankWords(run);
  if (!words.length) {
    const compared = run.heat.rows.length > 1;
    return compared ? el("p", { class: "note" }, "No rank is or was slow.") : "";
  }
  const rest = words.length > 8 ? el("li", {}, `and ${words.length - 8} more`) : "";
  return el("ul", { class: "findings" }, words.slice(0, 8).map(([kind, who, text]) =>
    el("li", { class: kind }, el("b", {}, who), text)), rest);
}

function rankTable(run, name) {
  const { rows, count: all } = run.ranks;
  if (!rows.length) return "";
  const heads = [["rank", "n"], "host", "device", ["own work", "n"], ["waiting for data", "n"],
    ["samples/s", "n"], ["memory", "n"], ["GPU use", "n"], "state"];
  const title = rows.length < all ? `Last values of the ${rows.length} slowest of ${all} ranks`
    : "Last values of each rank";
  return el("details", {}, el("summary", {}, title),
    table(name, heads, rows.map((r) => [[String(r.rank), "n"], r.host, r.device, [span(r.busy_s), "n"],
      [span(r.wait_s), "n"], [num(r.samples_per_s), "n"], [bytes(r.memory), "n"],
      [known(r.gpu) ? `${num(r.gpu)} %` : "–", "n"], [r.state || "–", r.state ? "bad" : ""]])));
}

// The map: its node, update(run) and redraw().
function heatMap() {
  let run = null, at = null, text = "";
  const canvas = el("canvas", {
    tabindex: "0", role: "slider", "aria-valuemin": 0, "aria-valuenow": 0, pointermove: point, pointerdown: point, keydown: press,
    pointerleave: () => look(null),
  });
  const labels = el("div", { class: "labels" });
  const said = el("span", { class: "readout" });
  const scale = el("div", { class: "scale" });
  const first = el("span"), last = el("span");
  const body = el("div", { class: "map" }, labels, el("div", {}, canvas,
    el("div", { class: "clock" }, first, last)));
  const node = el("div", { class: "heat" },
    el("div", { class: "heading" }, el("span", { class: "note" },
      "Time per step of each rank (own work and waiting for data), compared with the median rank"),
      said), body, scale);

  function update(next) {
    const now = JSON.stringify([next.heat, next.hosts, next.ranks]);
    if (now === text) return;
    [run, text] = [next, now];
    node.hidden = run.heat.rows.length < 2; // one rank has no other to compare it with
    if (node.hidden) return;
    canvas.setAttribute("aria-valuemax", run.heat.steps.length - 1);
    canvas.setAttribute("aria-label", "Map of the ranks over steps " +
      `${run.heat.steps[0]} to ${run.heat.steps[run.heat.steps.length - 1]}; arrow keys move. ` +
      rankWords(run).map((words) => words.slice(1).join("")).join(". "));
    first.textContent = `step ${count(run.heat.steps[0])}`;
    last.textContent = `step ${count(run.heat.steps[run.heat.steps.length - 1])}`;
    redraw();
    look(null);
  }

  const rowHeight = () => Math.max(2, Math.min(20, Math.floor(TALL / run.heat.rows.length)));

  // One pixel a cell, drawn large without smoothing.
  function redraw() {
    if (!run || node.hidden || !canvas.parentNode.clientWidth) return;
    const { rows, steps, code, cell } = run.heat;
    const colours = ramp(code.length, cell);
    const small = document.createElement("canvas");
    [small.width, small.height] = [steps.length, rows.length];
    const image = small.getContext("2d").createImageData(steps.length, rows.length);
    rows.forEach((row, y) => {
      for (let x = 0; x < steps.length; x++) {
        if (row[x] === undefined || row[x] === " ") continue;
        image.data.set([...colours[code.indexOf(row[x])], 255], 4 * (y * steps.length + x));
      }
    });
    small.getContext("2d").putImageData(image, 0, 0);
    const width = canvas.parentNode.clientWidth, height = rows.length * rowHeight();
    const ratio = devicePixelRatio || 1;
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    canvas.style.height = `${height}px`;
    const ctx = canvas.getContext("2d");
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(small, 0, 0, canvas.width, canvas.height);
    if (rowHeight() >= 8) drawLines(ctx, rows.length, ratio);
    if (at) drawFrame(ctx, ratio);
    drawLabels(height);
    drawScale(colours, cell);
  }

  function drawLines(ctx, rows, ratio) {
    ctx.fillStyle = css("--panel");
    for (let y = 1; y < rows; y++)
      ctx.fillRect(0, Math.round(y * rowHeight() * ratio) - 1, canvas.width, 1);
  }

  function drawFrame(ctx, ratio) {
    const wide = canvas.width / run.heat.steps.length, tall = rowHeight() * ratio;
    ctx.strokeStyle = css("--text");
    ctx.lineWidth = Math.max(1, ratio);
    ctx.strokeRect(at.x * wide, at.y * tall, Math.max(wide, 3), Math.max(tall, 3));
  }

  // Names of rows: as many as fit, and always those of slow ranks.
  function drawLabels(height) {
    const tall = rowHeight(), rows = run.heat.rows.length;
    const marked = new Map(run.ranks.rows.filter((row) => row.state)
      .map((row) => [Math.floor(row.rank / run.heat.each), row.state]));
    for (const { row } of slowRows(run).slice(0, 12)) if (!marked.has(row)) marked.set(row, "was");
    const each = Math.ceil(14 / tall);
    const taken = [], names = [];
    const place = (row, kind) => {
      const y = Math.max(0, Math.min(height - 14, (row + 0.5) * tall - 7));
      if (taken.some((other) => Math.abs(other - y) < 13)) return;
      taken.push(y);
      const name = el("span", { class: kind, "data-row": row, "data-rank": row * run.heat.each },
        placed(rowName(run, row).replace(/ranks? /, ""), hostOf(run, row * run.heat.each), " · ") +
        (kind === "dead" ? " ✕" : kind ? " ◂" : ""));
      name.style.top = `${y}px`;
      names.push(name);
    };
    for (const [row, kind] of marked) place(row, kind);
    for (let row = 0; row < rows; row += each) if (!marked.has(row)) place(row, "");
    labels.style.height = `${height}px`;
    labels.replaceChildren(...names);
  }

  function drawScale(colours, cell) {
    const steps = [0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5];
    scale.replaceChildren(...steps.map((ratio, i) => {
      const part = el("i");
      part.style.background = `rgb(${colours[Math.round(ratio / cell)].join(",")})`;
      return el("span", {}, part, i % 2 ? "" : ratio === 1 ? "1 ×" : `${ratio}`);
    }), "times the median, or more");
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    const { steps, rows } = run.heat;
    const x = Math.floor(((event.clientX - box.left) / box.width) * steps.length);
    const y = Math.floor(((event.clientY - box.top) / box.height) * rows.length);
    look({ x: Math.max(0, Math.min(steps.length - 1, x)), y: Math.max(0, Math.min(rows.length - 1, y)) });
  }

  function press(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") look(null);
    if (!move) return;
    const { steps, rows } = run.heat;
    const from = at || { x: steps.length - 1, y: 0 };
    look({ x: Math.max(0, Math.min(steps.length - 1, from.x + move[0])),
      y: Math.max(0, Math.min(rows.length - 1, from.y + move[1])) });
    event.preventDefault();
  }

  function look(next) {
    at = next;
    const c = at && run.heat.rows[at.y] ? run.heat.rows[at.y][at.x] : null;
    const ratio = !c || c === " " ? "no value"
      : `${(run.heat.code.indexOf(c) * run.heat.cell).toFixed(2)} × the median`;
    said.textContent = at ? `${placed(rowName(run, at.y), hostOf(run, at.y * run.heat.each))}, ` +
      `step ${count(run.heat.steps[at.x])}: ${ratio}` : "";
    canvas.setAttribute("aria-valuenow", at ? at.x : 0);
    canvas.setAttribute("aria-valuetext", said.textContent || "no cell chosen");
    redraw();
  }

  new ResizeObserver(redraw).observe(body);
  return { node, update, redraw };
}
