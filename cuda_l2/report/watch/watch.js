"use strict";
// Asks for what changed once a second while the page is visible, and replaces those sections alone.
const EVERY_MS = 1000;
const main = document.getElementById("sections");
const lost = document.getElementById("lost");

// What the reader opened, scrolled or focused stays so, by its place among its kind.
function put(section, html) {
  const all = (kind) => [...section.querySelectorAll(kind)];
  const open = all("details").map((each) => each.open);
  const scrolled = all(".scroll").map((each) => each.scrollLeft);
  const focused = all("summary, .scroll").indexOf(document.activeElement);
  section.innerHTML = html;
  all("details").forEach((each, at) => (each.open = open[at] || false));
  all(".scroll").forEach((each, at) => (each.scrollLeft = scrolled[at] || 0));
  all("summary, .scroll")[focused]?.focus({ preventScroll: true });
}

async function ask() {
  const has = [...main.children].map((each) => each.dataset.key).join(",");
  const answer = await fetch(`now?has=${has}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(answer.statusText);
  const found = await answer.json();
  found.forEach(([id, key, html], at) => {
    let section = main.querySelector(`:scope > [data-id="${id}"]`);
    if (!section) {
      section = document.createElement("div");
      section.dataset.id = id;
    }
    if (main.children[at] !== section) main.insertBefore(section, main.children[at] || null);
    if (section.dataset.key !== key && html) put(section, html);
    section.dataset.key = key;
  });
  while (main.children.length > found.length) main.lastElementChild.remove();
}

async function follow() {
  if (document.visibilityState === "visible") {
    try {
      await ask();
      lost.textContent = "";
    } catch {
      lost.textContent = "No answer: cuda-l2 watch was ended, or the connection to it. This page asks again.";
    }
  }
  setTimeout(follow, EVERY_MS);
}
follow();
