// Asks before something is lost, and says what that costs. A question at a time.

import { byId, h } from "./dom.js";

// `lines`: what it costs, for each of the choices or in any case. Answers the choice that was made (or true), or null:
// nothing is to be done.
export function confirmed({ title, action, lines, choices = [] }) {
  const dialog = byId("confirm");
  if (dialog.open) return Promise.resolve(null);
  const cost = byId("confirm-cost");
  const box = byId("confirm-choices");
  const show = (choice) => cost.replaceChildren(...lines(choice).map((line) => h("p", {}, line)));
  byId("confirm-title").textContent = title;
  byId("confirm-yes").textContent = action;
  const options = choices.map(([value, label], place) => h("label", {}, h("input", { type: "radio", name: "choice", value, checked: place === 0 }), h("span", {}, label)));
  box.replaceChildren(box.querySelector("legend"), ...options);
  box.hidden = choices.length < 2;
  box.onchange = (event) => show(event.target.value);
  show(choices[0]?.[0]);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    const answer = () => (choices.length ? box.querySelector("input:checked").value : true);
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? answer() : null), { once: true });
  });
}
