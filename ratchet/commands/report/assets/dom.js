"use strict";
// Functions that create elements. Texts become text nodes, so that text of a model is never interpreted as markup.

/** Creates an element. `on...` are listeners, `style` and `dataset` are objects, all others are properties or attributes. */
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, entry] of Object.entries(value)) node.style.setProperty(key, entry);
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  fill(node, children);
  return node;
}

function fill(node, ...children) {
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Replaces the children of a node, and returns the node. */
function refill(node, ...children) {
  node.replaceChildren();
  return fill(node, ...children);
}

function select(label, value, options, onchange) {
  const box = el("select", { onchange: () => onchange(box.value), "aria-label": label });
  for (const option of options) {
    const [key, text] = Array.isArray(option) ? option : [option, option];
    fill(box, el("option", { value: key, selected: String(key) === String(value) }, text));
  }
  return el("label", { className: "field" }, el("span", {}, label), box);
}

function field(label, props, oninput) {
  const box = el("input", { ...props, oninput: () => oninput(box), "aria-label": label });
  return el("label", { className: "field" }, el("span", {}, label), box);
}

function toggle(label, checked, onchange) {
  const box = el("input", { type: "checkbox", checked, onchange: () => onchange(box.checked) });
  return el("label", { className: "toggle" }, box, el("span", {}, label));
}

function table(headings, rows, className = "") {
  const head = el("tr", {}, headings.map((heading) => el("th", {}, heading)));
  const cells = (row) => row.map((cell) => (cell instanceof Node && cell.nodeName === "TD" ? cell : el("td", {}, cell)));
  const body = rows.map((row) => el("tr", {}, cells(row)));
  return el("div", { className: "scroll" }, el("table", { className }, el("thead", {}, head), el("tbody", {}, body)));
}

/** Debounces a function: of several calls that are close together, only the last one runs. */
function debounce(work, delay_ms = 120) {
  let timer = 0;
  return (...arguments_) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...arguments_), delay_ms);
  };
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
