// Elements, requests and addresses. Texts become text nodes, never HTML: `append` of a string cannot make an element.

export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map(asNode));
  return node;
}

const asNode = (child) => (child instanceof Node ? child : document.createTextNode(String(child)));

export async function get(path, parameters = []) {
  const response = await fetch(`/api/${path}?${new URLSearchParams(parameters)}`);
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

// An address within the page: `#/list?run=a&file=b`. Empty parameters are left out.
export function address(view, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `#/${view}?${new URLSearchParams(given)}`;
}

export function current() {
  const [view, query] = location.hash.replace(/^#\//, "").split("?");
  return { view: view || "curves", parameters: new URLSearchParams(query || "") };
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "";
  if (value === true || value === false) return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(digits)));
}

export function table(heads, rows, name = "") {
  return el("table", { class: name },
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", {}, head)))),
    el("tbody", {}, rows));
}
