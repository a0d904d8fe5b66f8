// Curves, drawn by uPlot. All charts of a page share zoom and cursor; each has its own switches for a
// logarithmic scale and for smoothing. For a screen reader a chart is a slider over the steps.

const HEIGHT = 190;
const REACH = 1 / 40; // of the width, over which an average reaches

// A chart: its node, and update(lines, marks). A line is {label, colour, dash, curve, means}.
function chart(board, title, options = {}) {
  const own = { log: false, smooth: options.smooth || false, hidden: new Set(), lines: [], marks: [] };
  let plot = null, signature = "", idle = true;
  const value = el("span", { class: "readout" });
  const keys = el("div", { class: "keys" });
  const button = (name, text, help) => el("button", {
    type: "button", "aria-pressed": String(own[name]), title: help, "aria-label": `${text}: ${title}`,
    click: (event) => {
      own[name] = !own[name];
      event.currentTarget.setAttribute("aria-pressed", String(own[name]));
      make();
    },
  }, text);
  const log = button("log", "log", "logarithmic scale");
  const smooth = button("smooth", "smooth", "moving average");
  const area = el("div", { class: "plot", tabindex: "0", role: "slider", keydown: press,
    "aria-valuemin": 0, "aria-valuenow": 0, "aria-valuetext": "no value" });
  const node = el("figure", { class: options.wide ? "chart wide" : "chart" },
    el("figcaption", {}, el("b", {}, title), value,
      el("span", { class: "switches" }, options.plain ? null : [log, smooth])),
    area, keys);

  function update(lines, marks) {
    const text = JSON.stringify([lines, marks]);
    if (own.text === text) return;
    Object.assign(own, { text, lines, marks });
    log.disabled = !lines.some(({ curve }) => curve[1].some((v) => v > 0));
    area.setAttribute("aria-label", `${title}. ${lines.map(inWords).join(" ")}`);
    const now = JSON.stringify(lines.map((line) => [line.label, line.colour, line.dash]));
    if (plot && signature === now) fill();
    else make();
    signature = now;
  }

  function make() {
    if (plot) plot.destroy();
    plot = null;
    drawKeys();
    if (area.clientWidth) begin();
  }

  function begin() {
    plot = new uPlot(settings(), columns(), area);
    rescale();
    read(null);
  }

  function fill() {
    const zoomed = board.zoom;
    plot.setData(columns(), !zoomed);
    rescale();
    if (idle) read(null);
  }

  function rescale() {
    if (plot && board.zoom) plot.setScale("x", board.zoom);
  }

  function columns() {
    const tables = [];
    for (const line of own.lines) {
      const { curve, means } = line;
      tables.push([curve[0], drawable(curve[1])]);
      if (!own.smooth) continue;
      const [steps, values] = means || curve;
      tables.push([steps, noisy(line) ? averaged(steps, drawable(values), options.reach || REACH) : values]);
    }
    return uPlot.join(tables);
  }

  const drawable = (values) => (own.log ? values.map((v) => (v > 0 ? v : null)) : values);

  function settings() {
    const axis = { stroke: () => css("--muted"), font: FONT, ticks: { show: false } };
    const grid = { stroke: () => css("--line"), width: 1 };
    return {
      width: area.clientWidth, height: options.height || HEIGHT, legend: { show: false },
      padding: [8, 18, 0, 0],
      scales: { x: { time: false }, y: own.log ? { distr: 3 } : {} },
      axes: [
        { ...axis, grid: { show: false }, size: 24, gap: 3, space: 60,
          values: (u, splits) => splits.map(tick) },
        { ...axis, grid, gap: 4, space: 28, size: (u, values) =>
          12 + 6.2 * Math.max(3, ...(values || []).map((v) => (v || "").length)),
          values: (u, splits) => splits.map((v) => (known(v) && shownTick(v) ? tick(v) : "")) },
      ],
      series: [{}, ...own.lines.flatMap(series)],
      cursor: {
        y: false, points: { size: 6 }, drag: { x: true, y: false, setScale: false },
        sync: { key: board.key, filters: { pub: moves, sub: moves } },
        bind: { dblclick: () => () => board.look(null) },
      },
      hooks: {
        setSelect: [selected], setCursor: [(u) => read(u.cursor.idx)],
        drawClear: [(u) => drawMarks(u, own.marks)],
      },
    };
  }

  // On a logarithmic axis only 1, 2 and 5 times a power of ten are labelled.
  const shownTick = (v) =>
    !own.log || [1, 2, 5].includes(Math.round(v / 10 ** Math.floor(Math.log10(v) + 1e-9)));

  function series(line) {
    const show = !own.hidden.has(line.label);
    const stroke = () => css(line.colour);
    const base = { label: line.label, stroke, show, width: 1.5, dash: line.dash ? [5, 4] : undefined,
      points: { size: 5, fill: () => css("--panel"), stroke } };
    if (!own.smooth) return [base];
    if (!noisy(line)) return [base, { ...base, show: false }];
    return [{ ...base, alpha: 0.3, width: 1 }, { ...base, width: 2 }];
  }

  function selected(u) {
    if (u.select.width < 5) return;
    const [a, b] = [u.select.left, u.select.left + u.select.width].map((x) => u.posToVal(x, "x"));
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    board.look({ min: a, max: b });
  }

  // Shows the values under the cursor, or the last ones.
  function read(index) {
    if (!plot) return;
    idle = !known(index);
    const per = own.smooth ? 2 : 1;
    const at = (i) => {
      const values = plot.data[1 + i * per];
      for (let k = idle ? values.length - 1 : index; k >= 0; k--)
        if (known(values[k])) return values[k];
      return null;
    };
    const steps = plot.data[0];
    const step = idle ? steps[steps.length - 1] : steps[index];
    const unit = options.unit || num;
    const single = own.lines.length === 1;
    value.textContent = single ? `${unit(at(0))} at step ${count(step)}` : `step ${count(step)}`;
    [...keys.children].forEach((key, i) => { key.lastChild.textContent = unit(at(i)); });
    area.setAttribute("aria-valuemin", steps[0]);
    area.setAttribute("aria-valuemax", steps[steps.length - 1]);
    area.setAttribute("aria-valuenow", step);
    area.setAttribute("aria-valuetext", `step ${count(step)}: ` +
      own.lines.map(({ label }, i) => `${label} ${unit(at(i))}`).join(", "));
  }

  function drawKeys() {
    const lines = own.lines.length > 1 ? own.lines : [];
    keys.replaceChildren(...lines.map((line, i) => {
      const mark = el("i", { class: line.dash ? "dash" : "dot" });
      mark.style.color = `var(${line.colour})`;
      return el("button", {
        type: "button", "aria-pressed": String(!own.hidden.has(line.label)),
        title: `show or hide ${line.label}`, click: () => toggle(line, i),
      }, mark, el("span", {}, line.label), el("span", { class: "value" }));
    }));
  }

  function toggle(line, i) {
    const show = own.hidden.delete(line.label);
    if (!show) own.hidden.add(line.label);
    keys.children[i].setAttribute("aria-pressed", String(show));
    const per = own.smooth ? 2 : 1;
    const drawn = own.smooth && noisy(line) ? 2 : 1;
    for (let k = 0; k < drawn; k++) plot.setSeries(1 + i * per + k, { show });
  }

  function press(event) {
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = plot.scales.x;
    const steps = plot.data[0];
    const at = known(plot.cursor.idx) ? plot.cursor.idx : (plot.series[0].idxs || [0, steps.length - 1])[1];
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    const near = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (move) {
      point(steps[Math.max(0, Math.min(steps.length - 1, at + move))]);
    } else if (near) {
      const half = ((max - min) * near) / 2, whole = [steps[0], steps[steps.length - 1]];
      const middle = known(plot.cursor.idx) ? steps[at] : (min + max) / 2;
      const next = { min: Math.max(whole[0], middle - half), max: Math.min(whole[1], middle + half) };
      board.look(next.min <= whole[0] && next.max >= whole[1] ? null : next);
      queueMicrotask(() => point(middle)); // once the new scale holds
    } else if (event.key === "0" || event.key === "Escape") board.look(null);
    else return;
    event.preventDefault();
  }

  function point(step) {
    plot.setCursor({ left: plot.valToPos(step, "x"), top: 10 });
  }

  function resize(width) {
    if (!width || !own.lines.length) return;
    if (!plot) begin();
    else if (plot.width !== width) plot.setSize({ width, height: plot.height });
  }

  const made = {
    node, update,
    zoomed: () => { if (plot) board.zoom ? rescale() : plot.setData(plot.data, true); },
    redraw: () => plot && plot.redraw(false),
    end: () => plot && plot.destroy(),
    resize: () => resize(area.clientWidth),
  };
  new ResizeObserver(() => made.resize()).observe(area);
  board.charts.push(made);
  return made;
}

const FONT = "11px system-ui, sans-serif";
const moves = (type) => type === "mousemove" || type === "mouseleave";

// The common state of all charts of a page.
function newBoard(onZoom) {
  const board = { charts: [], zoom: null, key: `steps-${Math.random()}` };
  board.look = (zoom) => {
    board.zoom = zoom;
    for (const each of board.charts) each.zoomed();
    onZoom(zoom);
  };
  return board;
}

// Draws a line where an attempt begins.
function drawMarks(u, marks) {
  const { ctx } = u, { left, top, width, height } = u.bbox;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css("--mark");
  ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
  let free = 0; // where there is room for a name
  for (const { step, label } of marks) {
    const x = Math.round(u.valToPos(step, "x", true));
    if (x <= left || x >= left + width) continue;
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
    if (x < free) continue;
    ctx.fillText(label, x + 3 * devicePixelRatio, top + 9 * devicePixelRatio);
    free = x + ctx.measureText(label).width + 6 * devicePixelRatio;
  }
  ctx.restore();
}

// Short curves are not smoothed. The points of a long curve are its peaks; it comes with means.
const noisy = ({ curve, means }) => Boolean(means) || curve[0].length > 60;

// The mean of the near values, weighted by the distance in steps: a sum from each side.
function averaged(steps, values, share) {
  const reach = Math.max(1, (steps[steps.length - 1] - steps[0]) * share);
  const total = values.map(() => 0), weight = values.map(() => 0);
  const pass = (order) => {
    let held = 0, weighs = 0, last = null;
    for (const i of order) {
      if (!known(values[i])) continue;
      const keep = last === null ? 0 : Math.exp(-Math.abs(steps[i] - last) / reach);
      last = steps[i];
      [held, weighs] = [held * keep, weighs * keep];
      total[i] += held + values[i] / 2;
      weight[i] += weighs + 0.5;
      [held, weighs] = [held + values[i], weighs + 1];
    }
  };
  const order = [...values.keys()];
  pass(order);
  pass(order.reverse());
  return values.map((value, i) => (known(value) ? total[i] / weight[i] : value));
}

function inWords({ label, curve }) {
  const { low, high } = ends(curve);
  if (!low) return `${label}: no values.`;
  return `${label}: last ${num(curve[1][curve[1].length - 1])}, lowest ${num(low.value)} at step ` +
    `${count(low.step)}, highest ${num(high.value)} at step ${count(high.step)}.`;
}
