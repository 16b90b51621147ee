// The first view: the runs, what differs between them, and curves, which grow while a run goes on.

import { chart, COLOURS } from "/static/chart.js";
import { address, el, get, number, table } from "/static/dom.js";

const FIRST = ["reward/mean", "reward/exact_match", "reward/valid_format", "rollout/searches", "rollout/response_length/mean",
  "train/kl_loss", "train/entropy", "train/grad_norm", "train/train_rollout_logprob_abs_diff", "search/success_rate", "time/step"];
const EVERY_MS = 3000;

export async function curves(main, parameters, isCurrent) {
  let runs = await get("runs");
  const all = Object.keys(runs.metrics);
  let shown = parameters.getAll("metric");
  if (!shown.length) shown = [...all.filter((name) => /^eval\/[^/]+\/[^/]+\/em$/.test(name)).slice(0, 2), ...FIRST.filter((name) => all.includes(name))];
  const colourOf = (run) => COLOURS[runs.runs.findIndex((other) => other.name === run) % COLOURS.length];
  const go = (names) => { location.hash = `#/curves?${new URLSearchParams(names.map((name) => ["metric", name]))}`; };

  const overview = el("div"), charts = el("div", { class: "charts" });
  const choice = el("input", { id: "metric", placeholder: "any metric", size: 44 });
  choice.setAttribute("list", "metrics");
  choice.addEventListener("change", () => { if (choice.value in runs.metrics) go([choice.value, ...shown.filter((name) => name !== choice.value)]); });
  main.replaceChildren(overview, el("div", { class: "controls" }, el("label", {}, "add a plot", choice)),
    el("datalist", { id: "metrics" }, all.map((name) => el("option", { value: name }, runs.metrics[name]))), charts);

  let before = "";
  const refresh = async () => {
    runs = await get("runs");
    const series = await get("series", shown.map((name) => ["name", name]));
    if (!isCurrent()) return;
    const now = JSON.stringify([runs, series]);
    if (now !== before) {
      overview.replaceChildren(...overviewOf(runs, colourOf));
      charts.replaceChildren(...shown.map((name) =>
        chart(name, runs.metrics[name] || "", series[name] || {}, colourOf, () => go(shown.filter((other) => other !== name)))));
    }
    before = now;
  };
  await refresh();
  const timer = setInterval(() => (isCurrent() ? refresh().catch(() => {}) : clearInterval(timer)), EVERY_MS);
}

function overviewOf(runs, colourOf) {
  const rows = runs.runs.map((run) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.backgroundColor = colourOf(run.name);
    const progress = run.step === null ? "no step yet" : `step ${run.step}${run.of ? ` of ${run.of}` : ""}`;
    return el("tr", {}, el("td", { title: run.folder }, swatch, run.name), el("td", { class: run.live ? "live" : "" }, progress),
      el("td", {}, el("a", { href: address("list", { run: run.name }) }, `${run.files.length} files of trajectories`)),
      el("td", { class: "problem" }, run.problem || ""));
  });
  const differing = Object.entries(runs.differing).filter(([name]) => name !== "run_dir");
  const parts = [table(["run", "progress", "trajectories", ""], rows)];
  if (runs.runs.length > 1) {
    const settings = differing.map(([name, values]) => el("tr", {}, el("td", {}, name), values.map((value) =>
      el("td", {}, typeof value === "object" && value !== null ? JSON.stringify(value) : number(value, 12)))));
    parts.push(el("details", { open: settings.length < 8 }, el("summary", {}, `${settings.length} settings differ`),
      settings.length ? table(["setting", ...runs.runs.map((run) => run.name)], settings) : null));
  }
  return parts;
}
