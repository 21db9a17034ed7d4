// Colours: as the system has them, or as chosen here. Runs before the first paint.
"use strict";
(() => {
  const names = { auto: "automatic", light: "light", dark: "dark" };
  const order = Object.keys(names);
  const stored = () => {
    try {
      return localStorage.getItem("dora-theme") ?? "auto";
    } catch {
      return "auto"; // storage is forbidden here
    }
  };
  let theme = order.includes(stored()) ? stored() : "auto";
  const apply = () => {
    document.documentElement.dataset.theme = theme;
    document.getElementById("theme")?.setAttribute("aria-label", `Colours: ${names[theme]}`);
    document.getElementById("theme")?.setAttribute("title", `Colours: ${names[theme]}`);
    document.dispatchEvent(new Event("theme"));
  };
  apply();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      theme = order[(order.indexOf(theme) + 1) % order.length];
      try {
        localStorage.setItem("dora-theme", theme);
      } catch {
        // it holds for this page only
      }
      apply();
    });
  });
})();
