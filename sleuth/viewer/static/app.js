// Draws the view that the address names; an address leads to the same view whenever it is opened.

import { curves } from "/static/curves.js";
import { current, el } from "/static/dom.js";
import { list } from "/static/list.js";
import { trajectory } from "/static/trajectory.js";

const VIEWS = { curves, list, trajectory };
let drawing = 0;

async function draw() {
  const { view, parameters } = current();
  const mine = ++drawing;
  const main = document.getElementById("main"), status = document.getElementById("status");
  status.textContent = "";
  try {
    await (VIEWS[view] || curves)(main, parameters, () => mine === drawing);
    if (mine === drawing) document.body.dataset.drawn = location.hash || "#/curves";
  } catch (error) {
    if (mine !== drawing) return;
    main.replaceChildren(el("p", { class: "problem" }, error.message));
    document.body.dataset.drawn = location.hash || "#/curves";
  }
}

window.addEventListener("hashchange", draw);
draw();
