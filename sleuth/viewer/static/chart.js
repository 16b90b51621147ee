// One small plot of a metric: a line for each run, the values at the pointer below it.

import { el, number } from "/static/dom.js";

export const COLOURS = ["#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f", "#c77f2b", "#2a9d8f", "#6c757d", "#b5446e"];
const WIDTH = 360, HEIGHT = 190, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 22;

export function chart(name, description, series, colourOf, onRemove) {
  const figure = el("figure", { "data-metric": name },
    el("figcaption", { title: description }, el("span", {}, name),
      el("button", { title: "take this plot away", onclick: onRemove }, "×")));
  const points = Object.values(series).flat();
  if (!points.length) {
    figure.append(el("p", { class: "dim" }, "not logged in these runs"));
    return figure;
  }
  const x = scale(points.map((p) => p[0]), LEFT, WIDTH - RIGHT), y = scale(points.map((p) => p[1]), HEIGHT - BOTTOM, TOP);
  const plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}` });
  for (const tick of ticks(y.low, y.high)) {
    plot.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y.at(tick), y2: y.at(tick) }),
      label(number(tick, 3), LEFT - 5, y.at(tick) + 3, "end"));
  }
  for (const tick of ticks(x.low, x.high).filter(Number.isInteger)) plot.append(label(tick, x.at(tick), HEIGHT - 8, "middle"));
  for (const [run, line] of Object.entries(series)) {
    const place = (p) => `${x.at(p[0]).toFixed(1)},${y.at(p[1]).toFixed(1)}`;
    plot.append(svg("polyline", { class: "series", stroke: colourOf(run), points: line.map(place).join(" "), "data-run": run }));
    if (line.length < 40) {
      for (const p of line) plot.append(svg("circle", { cx: x.at(p[0]), cy: y.at(p[1]), r: 2, fill: colourOf(run) }));
    }
  }
  figure.append(plot, readout(plot, series, x));
  return figure;
}

// The values of all runs at the step nearest to the pointer.
function readout(plot, series, x) {
  const values = el("div", { class: "values" });
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  plot.append(cursor);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    const steps = [...new Set(Object.values(series).flat().map((p) => p[0]))];
    const step = steps.reduce((best, other) => (Math.abs(x.at(other) - at) < Math.abs(x.at(best) - at) ? other : best));
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x.at(step));
    cursor.setAttribute("visibility", "visible");
    const found = Object.entries(series).map(([run, line]) => [run, line.find((p) => p[0] === step)]);
    values.textContent = `step ${step}: ` + found.filter(([, p]) => p).map(([run, p]) => `${run} ${number(p[1])}`).join(", ");
  });
  plot.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); values.textContent = ""; });
  return values;
}

function scale(values, from, to) {
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (low === high) { const pad = Math.abs(low) * 0.1 || 0.5; low -= pad; high += pad; }
  return { low, high, at: (value) => from + ((value - low) / (high - low)) * (to - from) };
}

function ticks(low, high, wanted = 4) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function label(text, x, y, anchor) {
  const node = svg("text", { x, y, "text-anchor": anchor });
  node.textContent = text;
  return node;
}
