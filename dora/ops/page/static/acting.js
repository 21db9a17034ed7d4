// Actions: asked with a confirmation, carried out by the service, which checks the browser's role.

export async function act(name, body, title, text) {
  if (!(await confirmed(title, text))) return;
  try {
    const reply = await fetch(`act/${name}`, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Dora-Csrf": document.querySelector('meta[name="csrf"]').content },
      body: JSON.stringify(body),
    });
    if (!reply.ok) return tell((await reply.text()).trim(), true);
    const { message, moves, loads } = await reply.json();
    tell([message, moves && `moves: ${moves}`, loads && `loads: ${loads}`].filter(Boolean).join("; "), false);
  } catch (error) {
    tell(`The front does not answer: ${error.message}`, true);
  }
}

function confirmed(title, text) {
  const dialog = document.getElementById("confirm");
  document.getElementById("confirm-title").textContent = title;
  document.getElementById("confirm-text").textContent = text;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

let hiding = 0;

function tell(text, isBad) {
  const reply = document.getElementById("reply");
  reply.textContent = text;
  reply.className = `reply ${isBad ? "bad" : "good"}`;
  reply.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => (reply.hidden = true), 12000);
}
