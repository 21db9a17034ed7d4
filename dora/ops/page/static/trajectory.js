// A trajectory's page: moving it.

import { act } from "./acting.js";

document.getElementById("migrate")?.addEventListener("submit", (event) => {
  event.preventDefault();
  const { trajectory } = event.target.dataset;
  const target = event.target.elements.target.value;
  act("migrate", { trajectory, target }, `Migrate ${trajectory}?`, `It moves, with its KV cache, to ${target}.`);
});
