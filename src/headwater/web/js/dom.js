// DOM helpers: elements from tags, properties and children; text never becomes HTML.
// @ts-check

/** @typedef {Node | string | number | null | undefined | false} Child */
/** @typedef {Record<string, any>} Props */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element: h("button", {class: "plain", onclick: f}, "Go").
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag @param {Props} [props] @param {...(Child | Child[])} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  setProps(element, props);
  append(element, children);
  return element;
}

/**
 * The same for an SVG element.
 * @template {keyof SVGElementTagNameMap} T
 * @param {T} tag @param {Props} [props] @param {...(Child | Child[])} children
 * @returns {SVGElementTagNameMap[T]}
 */
export function s(tag, props = {}, ...children) {
  const element = /** @type {SVGElementTagNameMap[T]} */ (document.createElementNS(SVG, tag));
  setProps(element, props);
  append(element, children);
  return element;
}

/** @param {Element} element @param {Props} props */
function setProps(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style")
      for (const [k, v] of Object.entries(value)) /** @type {any} */ (element).style.setProperty(k, String(v));
    else if (name === "value" && "value" in element) /** @type {any} */ (element).value = value;
    else if (name === "href" && !isSafeHref(String(value))) throw new Error(`not an allowed link: ${value}`);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

/** Links stay in this page or are downloads made by it. @param {string} link */
function isSafeHref(link) {
  return link.startsWith("#") || link.startsWith("blob:");
}

/** @param {Element} element @param {(Child | Child[])[]} children */
function append(element, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/**
 * Replace the children of an element; the focused control is focused again if it is still there.
 * @param {Element} element @param {...(Child | Child[])} children
 */
export function replaceChildren(element, ...children) {
  const focused = element.contains(document.activeElement) ? selectorOf(document.activeElement) : "";
  element.replaceChildren();
  append(element, children);
  if (focused) /** @type {HTMLElement | null} */ (element.querySelector(focused))?.focus({ preventScroll: true });
}

/** A selector that finds a control again after rendering. @param {Element | null} control */
function selectorOf(control) {
  if (!control) return "";
  if (control.id) return `#${CSS.escape(control.id)}`;
  const name = ["data-head", "data-value", "data-view", "data-id", "data-export", "aria-label"].find((n) =>
    control.hasAttribute(n),
  );
  if (!name) return "";
  const group = control.parentElement?.closest("[role=group][aria-label]")?.getAttribute("aria-label");
  const own = `${control.localName}[${name}="${CSS.escape(control.getAttribute(name) ?? "")}"]`;
  return group ? `[aria-label="${CSS.escape(group)}"] ${own}` : own;
}

/**
 * A text with invisible characters escaped: control and direction characters, spaces alone.
 * @param {string} text
 */
export function escapeInvisible(text) {
  const printable = text
    .replace(/\n/g, "⏎")
    .replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, "�");
  return printable.trim() === "" ? "␣".repeat(Math.max(1, Math.min(printable.length, 8))) : printable;
}

/** A CSS variable of the current theme. @param {string} name */
export function cssVariable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * Call f after ms without another call.
 * @template {any[]} A
 * @param {(...a: A) => void} f
 * @param {number} ms
 */
export function debounce(f, ms) {
  let timer = 0;
  return (/** @type {A} */ ...args) => {
    clearTimeout(timer);
    timer = window.setTimeout(() => f(...args), ms);
  };
}
