// Asks the dashboard every two seconds while the tab is visible, and shows whether it answers.
"use strict";

const EVERY = 2000; // milliseconds
const LONGEST = 15000; // for one answer, and between two tries while there is none
const TOKEN = "hpcddp-token";

// The token follows # in the address: a browser never sends that part. localStorage keeps it for this
// port alone; a cookie would go to all ports of the host, also to those of other users.
function takeToken() {
  const [, token] = location.hash.match(/^#token=(.+)$/) || [];
  if (!token) return;
  localStorage.setItem(TOKEN, token);
  history.replaceState(null, "", location.pathname);
}

function say(kind, words) {
  const answers = document.getElementById("answers");
  answers.className = kind;
  if (answers.textContent !== words) answers.textContent = words;
}

function warn(words) {
  const note = document.getElementById("note");
  note.hidden = !words;
  if (note.textContent !== words) note.textContent = words;
}

// Calls draw(data) with all new data.
function follow(path, draw) {
  let tag = "", timer = 0, asking = false, pause = EVERY;

  async function ask() {
    const headers = { Authorization: `Bearer ${localStorage.getItem(TOKEN) || ""}` };
    if (tag) headers["If-None-Match"] = tag;
    const signal = AbortSignal.timeout(LONGEST);
    const answer = await fetch(path, { headers, signal, cache: "no-store" });
    if (answer.status === 304) return;
    if (answer.status === 401) {
      throw new Error("The access token is missing or wrong: open the full address that " +
        "`hpcddp dashboard` printed.");
    }
    const json = answer.headers.get("Content-Type")?.includes("json");
    const data = json ? await answer.json() : { error: await answer.text() };
    if (!answer.ok) throw new Error(data.error);
    draw(data);
    tag = answer.headers.get("ETag");
  }

  async function look() {
    clearTimeout(timer);
    if (asking || document.hidden) return;
    asking = true;
    try {
      await ask();
      pause = EVERY;
      if (document.hidden) say("", "paused");
      else say("on", "live");
      warn("");
    } catch (error) {
      pause = Math.min(2 * pause, LONGEST);
      tag = "";
      const silent = error instanceof TypeError || error.name === "TimeoutError";
      say("off", silent ? "no answer" : "error");
      warn(silent ? "The dashboard does not answer: it has ended, or the SSH tunnel to it is closed. " +
        "Start it again; this page then goes on by itself." : error.message);
    }
    asking = false;
    timer = setTimeout(look, pause);
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) say("", "paused");
    look();
  });
  addEventListener("hashchange", () => {
    takeToken();
    look();
  });
  takeToken();
  look();
}
