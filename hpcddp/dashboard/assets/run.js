// One run: the report's page, drawn again when there is something new.
"use strict";

const asked = decodeURIComponent(location.pathname.slice(5));
document.title = `${asked} · hpcddp`;
document.querySelector("h1").textContent = asked;
follow(`/api${location.pathname}`, (data) => {
  const root = document.getElementById("page");
  document.title = `${data.runs[0].status.run} · hpcddp`;
  hpcddp.draw(root, data);
});
