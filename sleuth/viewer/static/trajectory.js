// The third view: one trajectory, its tokens coloured by what they are or by what engine and trainer think of them.

import { address, el, get, number, table } from "/static/dom.js";
import { rowsTable } from "/static/list.js";

const CHUNK = 3000; // tokens that are drawn at once
const SOURCES = { model: "#dff0e2", observation: "#dbe9f6", correction: "#f7ecc6" };
const QUERY = /<search>([\s\S]*?)<\/search>|"query"\s*:\s*"((?:[^"\\]|\\.)*)"/g;

export async function trajectory(main, parameters, isCurrent) {
  const [run, file, at] = ["run", "file", "number"].map((name) => parameters.get(name) || "");
  const found = await get("trajectory", [["run", run], ["file", file], ["number", at]]);
  if (!isCurrent()) return;
  const { record } = found, chosen = { mode: parameters.get("colour") || "source" };
  const link = (other) => address("trajectory", { run, file, number: other, colour: chosen.mode === "source" ? "" : chosen.mode });
  const modes = [["source", "source"], ["mask", "trained or not"], ["engine", "log-probability in the engine"],
    ...(found.trainer ? [["difference", "trainer's minus engine's log-probability"]] : [])];
  const places = placesOf(found);
  const bars = modes.map(([value, text]) => el("label", {}, el("input", { type: "radio", name: "colour", value, checked: value === chosen.mode,
    onchange: () => { chosen.mode = value; history.replaceState(null, "", link(at)); colourAll(places, value); } }), text));

  main.replaceChildren(
    el("h1", {}, found.headline),
    el("div", { class: "pager" }, el("a", { href: link(Math.max(0, Number(at) - 1)) }, "previous"), el("a", { href: link(Number(at) + 1) }, "next"),
      el("a", { href: address("list", { run, file }) }, `${file} of ${run}`)),
    el("div", { class: "side" }, rewardTable(record, found), queryTable(record)),
    el("h2", {}, "The response"),
    el("div", { class: "controls", id: "colours" }, bars),
    ...(found.pieces ? [] : [el("p", { class: "dim" }, "The tokenizer of the run's model is not on this machine, so tokens are not shown one by one.")]),
    el("details", { class: "segment prompt" }, el("summary", {}, "prompt"), el("div", { class: "text", dir: "auto" }, record.prompt)),
    ...record.segments.map((segment, i) => segmentBlock(segment, places[i], chosen)),
    el("h2", {}, `The samples of this prompt (${found.group.length} logged)`),
    rowsTable(found.group.map((row) => ({ ...row, file })), run, false, false));
}

function rewardTable(record, found) {
  const rows = [["reward", record.reward], ...Object.entries(record.reward_components)].map(([name, value]) =>
    el("tr", {}, el("td", {}, name), el("td", { class: "number" }, number(value))));
  const why = [...found.findings, ...found.numbers.slice(1)].map(([name, text]) =>
    el("tr", {}, el("td", {}, name), el("td", { dir: "auto", class: name === "Error" || name === "Invalid format" ? "problem" : "" }, text)));
  return el("div", { class: "side", id: "reward" }, table(["reward", ""], rows), table(["why", ""], why));
}

function queryTable(record) {
  const said = record.segments.filter((segment) => segment.source === "model").flatMap((segment) => [...segment.text.matchAll(QUERY)]);
  if (!said.length) return el("p", { class: "dim" }, "no search");
  return table(["", "query"], said.map((match, i) => el("tr", {}, el("td", {}, i + 1), el("td", { dir: "auto", class: "query" }, (match[1] ?? match[2]).trim()))));
}

// For each segment what its pieces are about: ids, mask, log-probabilities of engine and trainer.
function placesOf(found) {
  const { record } = found;
  let start = 0;
  return record.segments.map((segment, i) => {
    const pieces = found.pieces ? found.pieces[i] : [[segment.tokens, segment.text]];
    let at = start;
    start += segment.tokens;
    return pieces.map(([count, text]) => {
      const span = [at, at + count];
      at += count;
      const of = (values) => (values ? values.slice(...span) : []);
      return { text, source: segment.source, ids: of(record.response_ids), mask: of(record.loss_mask),
        engine: of(record.log_probs), trainer: of(found.trainer), node: null };
    });
  });
}

function segmentBlock(segment, places, chosen) {
  const text = el("div", { class: "text", dir: "auto" });
  const more = el("button", { onclick: () => draw() });
  let drawn = 0;
  const draw = () => {
    const next = places.slice(drawn, drawn + CHUNK);
    for (const place of next) {
      place.node = el("span", { title: told(place) }, place.text);
      colour(place, chosen.mode);
    }
    text.append(...next.map((place) => place.node));
    drawn += next.length;
    more.textContent = `show more of ${places.length - drawn} tokens`;
    more.hidden = drawn >= places.length;
  };
  draw();
  const trained = segment.trained_tokens ? `, ${segment.trained_tokens} of them trained on` : "";
  const names = { model: "model", observation: "observation (passages)", correction: "correction" };
  return el("section", { class: `segment ${segment.source}` }, el("div", { class: "head" }, `${names[segment.source] || segment.source}: ${segment.tokens} tokens${trained}`), text, more);
}

const colourAll = (places, mode) => places.flat().filter((place) => place.node).forEach((place) => colour(place, mode));
const sum = (values) => values.reduce((a, b) => a + b, 0);
const difference = (place) => (place.trainer.length && place.mask.some(Boolean) && place.trainer.every((v) => v !== null) ? sum(place.trainer) - sum(place.engine) : null);

function colour(place, mode) {
  let background = "";
  if (mode === "source") background = SOURCES[place.source] || "";
  else if (mode === "mask") background = place.mask.some(Boolean) ? "#dff0e2" : "#eceef1";
  else if (mode === "engine" && place.mask.some(Boolean)) background = `rgba(209, 73, 91, ${Math.min(0.9, -sum(place.engine) / 5).toFixed(3)})`;
  else if (mode === "difference" && difference(place) !== null) {
    const by = difference(place);
    background = `rgba(${by > 0 ? "27, 108, 168" : "209, 73, 91"}, ${Math.min(0.9, Math.sqrt(Math.abs(by))).toFixed(3)})`;
  }
  place.node.style.backgroundColor = background;
}

function told(place) {
  const lines = [`id ${place.ids.join(", ")}`, place.mask.some(Boolean) ? "trained on" : "not trained on"];
  if (place.mask.some(Boolean)) lines.push(`engine ${number(sum(place.engine))} nats`);
  if (difference(place) !== null) lines.push(`trainer ${number(sum(place.trainer))} nats`, `difference ${number(difference(place), 3)}`);
  return lines.join("\n");
}
