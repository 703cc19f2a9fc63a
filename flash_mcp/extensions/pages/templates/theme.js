"use strict";
// The colours of the system, or those that were chosen in this browser.
(() => {
  const root = document.documentElement;
  const show = theme => { if (theme) root.dataset.theme = theme; };
  try { show(localStorage.getItem("theme")); } catch { /* a browser that keeps nothing */ }
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    button.hidden = false;
    button.onclick = () => {
      const isDark = (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "")) === "dark";
      show(isDark ? "light" : "dark");
      try { localStorage.setItem("theme", root.dataset.theme); } catch { /* until the next page */ }
      dispatchEvent(new Event("theme"));
    };
  });
})();
