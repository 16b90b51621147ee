// The second view: a page of trajectories, filtered on the server.

import { address, el, get, number, table } from "/static/dom.js";

export async function list(main, parameters, isCurrent) {
  const runs = await get("runs");
  const state = Object.fromEntries(["run", "file", "filter", "text", "group", "compare", "offset"].map((name) => [name, parameters.get(name) || ""]));
  const run = runs.runs.find((other) => other.name === state.run) || runs.runs[0];
  if (!state.file && run.files.length) state.file = run.files[run.files.length - 1].name;
  state.run = run.name;
  const go = (changes) => { location.hash = address("list", { ...state, offset: "", ...changes }); };

  const files = run.files.map((file) => [file.name, `${file.evaluation ? `evaluation ${file.evaluation}, ` : ""}step ${file.step}`]);
  const chosen = run.files.find((file) => file.name === state.file);
  const others = run.files.filter((file) => chosen && file.evaluation === chosen.evaluation && file.name !== chosen.name);
  const controls = el("div", { class: "controls" },
    choice("run", "run", runs.runs.map((other) => [other.name, other.name]), state, (value) => go({ run: value, file: "", compare: "", group: "" })),
    choice("file", "step or evaluation", [["*", "all of them"], ...files], state, (value) => go({ file: value, compare: "", group: "" })),
    choice("filter", "show", runs.filters.map((name) => [name, name]), state, (value) => go({ filter: value })),
    choice("compare", "changed since", [["", "(no comparison)"], ...others.map((file) => [file.name, `step ${file.step}`])], state, (value) => go({ compare: value })),
    el("label", {}, "text", el("input", { id: "text", value: state.text, placeholder: "in prompt, response, notes", onchange: (event) => go({ text: event.target.value }) })),
    state.group === "" ? null : el("button", { onclick: () => go({ group: "" }) }, `group ${state.group} ×`));
  const body = el("div", {}, el("p", { class: "dim" }, "reading..."));
  main.replaceChildren(controls, body);
  if (!run.files.length) return body.replaceChildren(el("p", { class: "problem" }, "this run has logged no trajectories (yet)"));

  const found = await get("trajectories", Object.entries(state));
  if (!isCurrent()) return;
  const offset = Number(state.offset) || 0;
  const end = Math.min(offset + found.page, found.total);
  const move = (to) => go({ offset: String(to) });
  const pager = el("div", { class: "pager" }, el("button", { disabled: offset === 0, onclick: () => move(Math.max(0, offset - found.page)) }, "back"),
    el("span", { id: "count" }, found.total ? `${offset + 1} to ${end} of ${found.total}` : "none", found.total === found.of ? "" : ` (${found.of} logged)`),
    el("button", { disabled: end >= found.total, onclick: () => move(offset + found.page) }, "on"),
    found.broken ? el("span", { class: "problem" }, `${found.broken} incomplete lines left out`) : null);
  body.replaceChildren(pager, rowsTable(found.rows, run.name, state.file === "*", Boolean(state.compare)));
}

function choice(id, label, options, state, onChange) {
  const select = el("select", { id, onchange: (event) => onChange(event.target.value) },
    options.map(([value, text]) => el("option", { value, selected: value === state[id] }, text)));
  return el("label", {}, label, select);
}

export function rowsTable(rows, run, withFile, withBefore) {
  const heads = [...(withFile ? ["file"] : []), "", "group", "question", "answer", "reward", ...(withBefore ? ["before"] : []), "right", "valid", "searches", "tokens", "ended"];
  return table(heads, rows.map((row) => el("tr", { class: row.right === true ? "right" : row.right === false ? "wrong" : "" },
    withFile ? el("td", {}, row.file.replace(/\.jsonl$/, "")) : null,
    el("td", {}, el("a", { href: address("trajectory", { run, file: row.file, number: row.number }) }, `#${row.number}`)),
    el("td", {}, el("a", { href: address("list", { run, file: row.file, group: row.group }) }, number(row.group))),
    el("td", { dir: "auto" }, row.question), el("td", { dir: "auto" }, number(row.answer)),
    el("td", { class: "number" }, number(row.reward, 3)),
    withBefore ? el("td", {}, row.before ? "right" : "wrong") : null,
    el("td", {}, number(row.right)), el("td", {}, number(row.valid)), el("td", { class: "number" }, number(row.searches)),
    el("td", { class: "number" }, number(row.tokens)), el("td", {}, row.stop_reason || row.status || ""))), "list");
}
