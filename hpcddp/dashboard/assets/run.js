// One run: the report's page, drawn again when there is something new.
"use strict";

document.title = `${decodeURIComponent(location.pathname.slice(5))} · hpcddp`;
follow(`/api${location.pathname}`, (data) => {
  const root = document.getElementById("page");
  document.title = `${data.runs[0].status.run} · hpcddp`;
  hpcddp.draw(root, data);
});
