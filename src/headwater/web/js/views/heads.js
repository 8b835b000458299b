// Every head of a model: as a thumbnail in a grid of layers and heads, and as a row of measures.
// @ts-check
import { painted } from "../colour.js";
import { h } from "../dom.js";
import { t, word } from "../words.js";

const SHOWN = ["self", "previous", "next", "first", "entropy", "distance", "peak"];

/** @typedef {(layer: number, head: number) => void} Pick */

/**
 * Layer by layer, head by head.
 * @template T
 * @param {any} facts
 * @param {(layer: number, head: number) => T} make
 * @returns {T[][]}
 */
function each({ layers, heads }, make) {
  return Array.from({ length: layers }, (_, layer) => Array.from({ length: heads }, (_, head) => make(layer, head)));
}

/**
 * Arrow keys in a grid of heads choose the neighbour; the grid is one stop of the Tab key.
 * @param {KeyboardEvent} event
 */
export function arrows(event) {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const move = /** @type {Record<string, number[]>} */ (moves)[event.key];
  const from = /** @type {HTMLElement} */ (event.target).dataset.at?.split(".").map(Number);
  if (!move || !from) return;
  event.preventDefault();
  const grid = /** @type {HTMLElement} */ (event.currentTarget);
  const to = /** @type {HTMLElement | null} */ (
    grid.querySelector(`[data-at="${from[0] + move[0]}.${from[1] + move[1]}"]`)
  );
  to?.focus();
  to?.click();
}

/** @param {any} facts @param {Uint8Array} atlas all thumbnails, one after another @param {Pick} pick */
export function thumbGrid(facts, atlas, pick) {
  const [tall, wide] = facts.thumb;
  const thumb = (/** @type {number} */ layer, /** @type {number} */ head) => {
    const at = (layer * facts.heads + head) * tall * wide;
    const does = word("does", facts.patterns[layer][head].does);
    const props = {
      type: "button",
      class: "thumb",
      "data-at": `${layer}.${head}`,
      title: `${layer}.${head}: ${does}`,
      "aria-label": `${t("layer")} ${layer}, ${t("head")} ${head}: ${does}`,
      onclick: () => pick(layer, head),
    };
    return h("button", props, painted(atlas.subarray(at, at + tall * wide), wide, tall));
  };
  const rows = each(facts, thumb).map((row, layer) => [h("span", { class: "faint" }, `${layer}`), ...row]);
  const style = { "grid-template-columns": `2.2em repeat(${facts.heads}, minmax(14px, 46px))` };
  return h("div", { class: "thumbs", role: "group", "aria-label": t("attention.grid"), style, onkeydown: arrows }, rows.flat());
}

/** @param {any} facts @param {Pick} pick */
export function headTable(facts, pick) {
  const row = (/** @type {number} */ layer, /** @type {number} */ head) => {
    const p = facts.patterns[layer][head];
    const props = { type: "button", class: "quiet", tabindex: -1, onclick: () => pick(layer, head) };
    const open = h("button", props, `${layer}.${head}`); // the grid is the way there by keyboard
    const numbers = SHOWN.map((name) => (p[name] === null ? "–" : p[name].toFixed(name === "distance" ? 1 : 2)));
    const cells = numbers.map((shown) => h("td", { class: "num" }, shown));
    return h("tr", { "data-at": `${layer}.${head}` }, h("td", {}, open), h("td", {}, word("does", p.does)), cells);
  };
  const names = SHOWN.map((name) => h("th", { class: "num", title: t(`measure.${name}.why`) }, t(`measure.${name}`)));
  const top = h("thead", {}, h("tr", {}, h("th", {}, t("head")), h("th", {}, t("does")), names));
  return h(
    "div",
    { class: "scroll tall" },
    h("table", { class: "heads" }, top, h("tbody", {}, each(facts, row).flat())),
  );
}

/** Show which head is chosen, in both. @param {HTMLElement} grid @param {HTMLElement} table @param {string} at */
export function markChosen(grid, table, at) {
  /** @type {NodeListOf<HTMLElement>} */
  const thumbs = grid.querySelectorAll(".thumb");
  const inGrid = [...thumbs].some((thumb) => thumb.dataset.at === at);
  thumbs.forEach((thumb, n) => {
    const on = thumb.dataset.at === at;
    thumb.setAttribute("aria-pressed", String(on));
    thumb.tabIndex = on || (n === 0 && !inGrid) ? 0 : -1;
    const box = /** @type {HTMLElement | null} */ (on ? thumb.closest(".scroll") : null);
    if (box) box.scrollTop = Math.max(0, thumb.offsetTop - box.offsetTop - 200);
  });
  /** @type {NodeListOf<HTMLElement>} */
  const rows = table.querySelectorAll("tr[data-at]");
  rows.forEach((row) => row.classList.toggle("chosen", row.dataset.at === at));
}
