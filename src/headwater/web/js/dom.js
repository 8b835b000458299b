// A few functions to build elements. Text only ever becomes text: there is no way in here for HTML.
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
  const made = document.createElement(tag);
  dress(made, props);
  append(made, children);
  return made;
}

/**
 * The same for a picture.
 * @template {keyof SVGElementTagNameMap} T
 * @param {T} tag @param {Props} [props] @param {...(Child | Child[])} children
 * @returns {SVGElementTagNameMap[T]}
 */
export function s(tag, props = {}, ...children) {
  const made = /** @type {SVGElementTagNameMap[T]} */ (document.createElementNS(SVG, tag));
  dress(made, props);
  append(made, children);
  return made;
}

/** @param {Element} element @param {Props} props */
function dress(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style")
      for (const [k, v] of Object.entries(value)) /** @type {any} */ (element).style.setProperty(k, String(v));
    else if (name === "value" && "value" in element) /** @type {any} */ (element).value = value;
    else if (name === "href" && !safe(String(value))) throw new Error(`not a link of ours: ${value}`);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

/** Links stay in this page, or hand over what was made here. @param {string} link */
function safe(link) {
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
 * Put these in place of all that is inside. The control that had the keyboard's focus has it again if it is still there.
 * @param {Element} element @param {...(Child | Child[])} children
 */
export function fill(element, ...children) {
  const focused = element.contains(document.activeElement) ? selectorOf(document.activeElement) : "";
  element.replaceChildren();
  append(element, children);
  if (focused) /** @type {HTMLElement | null} */ (element.querySelector(focused))?.focus({ preventScroll: true });
}

/** What finds a control again after its part was drawn anew. @param {Element | null} control */
function selectorOf(control) {
  if (!control) return "";
  if (control.id) return `#${CSS.escape(control.id)}`;
  const name = ["data-at", "data-value", "data-view", "data-id", "data-keep", "aria-label"].find((n) =>
    control.hasAttribute(n),
  );
  if (!name) return "";
  const group = control.parentElement?.closest("[role=group][aria-label]")?.getAttribute("aria-label");
  const own = `${control.localName}[${name}="${CSS.escape(control.getAttribute(name) ?? "")}"]`;
  return group ? `[aria-label="${CSS.escape(group)}"] ${own}` : own;
}

/**
 * A text with nothing invisible in it: control and direction characters, spaces that are all there is.
 * @param {string} text
 */
export function visible(text) {
  const shown = text
    .replace(/\n/g, "⏎")
    .replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, "�");
  return shown.trim() === "" ? "␣".repeat(Math.max(1, Math.min(shown.length, 8))) : shown;
}

/** A colour or size of the present theme. @param {string} name */
export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * Call f once things have been quiet for so long.
 * @template {any[]} A
 * @param {(...a: A) => void} f
 * @param {number} ms
 */
export function calm(f, ms) {
  let timer = 0;
  return (/** @type {A} */ ...args) => {
    clearTimeout(timer);
    timer = window.setTimeout(() => f(...args), ms);
  };
}
