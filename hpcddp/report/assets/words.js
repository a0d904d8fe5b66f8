// Elements, and figures in words. What comes from a run enters as text, never as HTML.

// An element; a function in its attributes is called on that event, null leaves one out.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== ""));
  return node;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const known = (value) => value !== null && value !== undefined;
const sum = (values) => values.reduce((a, b) => a + (b || 0), 0);
const plural = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;

// 2 nodes × 4 GPUs; the nodes may be a range, such as 1-4.
const size = (nodes, gpus) =>
  `${nodes} ${String(nodes) === "1" ? "node" : "nodes"} × ${plural(gpus, "GPU")}`;

// 12,345
function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : "–";
}

// At most four digits.
function num(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  if (size >= 1000) return count(value);
  return String(Number(value.toPrecision(4)));
}

// A number on an axis, in its shortest form.
function tick(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`;
  if (size > 0 && size < 1e-3) return Number(value.toPrecision(3)).toExponential();
  return String(Number(value.toPrecision(6)));
}

function percent(share) {
  if (!known(share)) return "–";
  return `${share >= 0.0995 || share === 0 ? Math.round(100 * share) : (100 * share).toFixed(1)} %`;
}

// A duration with at most two units.
function span(seconds) {
  if (!known(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${num(Number((1000 * seconds).toPrecision(3)))} ms`;
  if (seconds < 10) return `${Number(seconds.toFixed(1))} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const i = units.findIndex(([, size]) => whole >= size);
  const [[big, size], [small, part]] = [units[i], units[i + 1] || units[i]];
  const rest = Math.floor((whole % size) / part);
  return `${Math.floor(whole / size)} ${big}${rest && part < size ? ` ${rest} ${small}` : ""}`;
}

function bytes(value) {
  if (!known(value)) return "–";
  const i = Math.min(4, Math.max(0, Math.floor(Math.log(value || 1) / Math.log(1000))));
  return `${Number((value / 1000 ** i).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][i]}`;
}

const pad = (n) => String(n).padStart(2, "0");
const zones = new Intl.DateTimeFormat("en-GB", { timeZoneName: "short" });

// The zone of the reader's browser at a time, such as UTC or CET.
function zone(d) {
  return zones.formatToParts(d).find((part) => part.type === "timeZoneName").value;
}

// Seconds since the epoch as a time in the reader's zone, which it names.
function when(seconds, day = true) {
  if (!seconds) return "–";
  const d = new Date(1000 * seconds);
  const clock = [d.getHours(), d.getMinutes(), d.getSeconds()].map(pad).join(":");
  const date = `${d.getFullYear()}-${pad(d.getMonth() + 1)}-${pad(d.getDate())}`;
  return `${day ? `${date} ` : ""}${clock} ${zone(d)}`;
}

// A state, as the command line prints it -> its kind, which has a colour.
const STATES = {
  RUNNING: "live", COMPLETING: "live", COMPLETED: "good",
  PENDING: "wait", CONFIGURING: "wait", REQUEUED: "wait", REQUEUE_HOLD: "wait", SUSPENDED: "wait",
  STOPPED: "calm", RENDERED: "calm", CANCELLED: "calm",
};
const kind = (state) => STATES[state] || "bad";

// The newest value of a curve. NaN and infinity came as null.
function newest(run, name) {
  return run.newest[name] === null ? "not finite" : num(run.newest[name]);
}

function median(values) {
  const sorted = values.filter(known).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}

// Least and greatest with their steps.
function ends(curve) {
  let low = null, high = null;
  (curve ? curve[1] : []).forEach((value, i) => {
    if (!known(value)) return;
    if (!low || value < low.value) low = { value, step: curve[0][i] };
    if (!high || value > high.value) high = { value, step: curve[0][i] };
  });
  return { low, high };
}

// A table with a name; a cell is text, a node, or [text or node, class].
function table(name, heads, rows, box = "scroll") {
  const cell = (tag, value) => {
    const [content, look] = Array.isArray(value) ? value : [value, null];
    return el(tag, { class: look, scope: tag === "th" ? "col" : null }, content);
  };
  return el("div", { class: box, "data-name": name },
    el("table", { "aria-label": name },
      el("thead", {}, el("tr", {}, heads.map((head) => cell("th", head)))),
      el("tbody", {}, rows.map((row) =>
        row instanceof Node ? row : el("tr", {}, row.map((value) => cell("td", value)))))));
}

// Boxes that scroll can be reached with the keyboard; the others are no stop on its way.
function reachable(root) {
  for (const box of root.querySelectorAll(".scroll, pre")) {
    const scrolls = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
    if (!scrolls) {
      for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
      continue;
    }
    box.setAttribute("tabindex", "0");
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `${box.dataset.name}, scrollable`);
  }
}

// The colour of one of several runs.
const colour = (i) => `--c${i % 8}`;

function swatch(i) {
  const node = el("i", { class: "swatch" });
  node.style.background = `var(${colour(i)})`;
  return node;
}
