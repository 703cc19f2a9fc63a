"use strict";
// The server says when something changed; the page then loads itself and takes over the new content.
(() => {
  const said = document.getElementById("connection");
  const source = new EventSource(document.body.dataset.events);
  let busy = false;
  let again = false;
  const reload = async () => {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const answer = await fetch(location.href);
      if (!answer.ok) { said.textContent = `The server refuses: ${answer.status}`; return; }
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      const old = document.querySelector("main");
      const opened = new Set([...old.querySelectorAll("details[open]")].map(each => each.dataset.key));
      const main = next.querySelector("main");
      for (const each of main.querySelectorAll("details")) each.open = opened.has(each.dataset.key);
      const ticked = new Set([...old.querySelectorAll(":checked")].map(each => each.value));
      for (const each of main.querySelectorAll("[type=checkbox]")) each.checked = ticked.has(each.value);
      for (const each of main.querySelectorAll("[type=radio]")) if (ticked.has(each.value)) each.checked = true;
      // A form that is open keeps what was typed.
      if (old.querySelector(".actions [open]")) main.querySelector(".actions")?.replaceWith(old.querySelector(".actions"));
      old.replaceWith(main);
      if (typeof drawChart !== "undefined") drawChart();
      said.textContent = "";
    } catch (error) {
      said.textContent = "No connection to the server";
    } finally {
      busy = false;
      if (again) { again = false; reload(); }
    }
  };
  source.onmessage = reload;
  source.onerror = () => { said.textContent = "No connection to the server"; };
})();
