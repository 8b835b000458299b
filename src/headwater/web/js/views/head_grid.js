// Grid and statistics of heads.
// @ts-check
import { toCanvas } from "../color.js";
import { h } from "../dom.js";
import { t, translateName } from "../i18n.js";

const COLUMNS = ["diagonal", "previous", "next", "first", "entropy", "distance", "max_weight"];

/** @typedef {(layer: number, head: number) => void} Pick */

/**
 * Map over layers and heads.
 * @template T
 * @param {any} group
 * @param {(layer: number, head: number) => T} make
 * @returns {T[][]}
 */
function mapHeads({ layers, heads }, make) {
  return Array.from({ length: layers }, (_, layer) => Array.from({ length: heads }, (_, head) => make(layer, head)));
}

/**
 * Arrow keys in a grid of heads select the neighbor; the grid is one Tab stop.
 * @param {KeyboardEvent} event
 */
export function onArrowKey(event) {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const move = /** @type {Record<string, number[]>} */ (moves)[event.key];
  const from = /** @type {HTMLElement} */ (event.target).dataset.head?.split(".").map(Number);
  if (!move || !from) return;
  event.preventDefault();
  const grid = /** @type {HTMLElement} */ (event.currentTarget);
  const to = /** @type {HTMLElement | null} */ (
    grid.querySelector(`[data-head="${from[0] + move[0]}.${from[1] + move[1]}"]`)
  );
  to?.focus();
  to?.click();
}

/** @param {any} group @param {Uint8Array} atlas all thumbnails, one after another @param {Pick} onPick */
export function thumbnailGrid(group, atlas, onPick) {
  const [tall, wide] = group.thumbnail_size;
  const thumb = (/** @type {number} */ layer, /** @type {number} */ head) => {
    const at = (layer * group.heads + head) * tall * wide;
    const pattern = translateName("pattern", group.patterns[layer][head].pattern);
    const props = {
      type: "button",
      class: "thumbnail",
      "data-head": `${layer}.${head}`,
      title: `${layer}.${head}: ${pattern}`,
      "aria-label": `${t("layer")} ${layer}, ${t("head")} ${head}: ${pattern}`,
      onclick: () => onPick(layer, head),
    };
    return h("button", props, toCanvas(atlas.subarray(at, at + tall * wide), wide, tall));
  };
  const rows = mapHeads(group, thumb).map((row, layer) => [h("span", { class: "muted" }, `${layer}`), ...row]);
  const style = { "grid-template-columns": `2.2em repeat(${group.heads}, minmax(14px, 46px))` };
  return h("div", { class: "thumbnails", role: "group", "aria-label": t("attention.grid"), style, onkeydown: onArrowKey }, rows.flat());
}

/** @param {any} group @param {Pick} onPick */
export function headStatsTable(group, onPick) {
  const row = (/** @type {number} */ layer, /** @type {number} */ head) => {
    const p = group.patterns[layer][head];
    const props = { type: "button", class: "ghost", tabindex: -1, onclick: () => onPick(layer, head) };
    const open = h("button", props, `${layer}.${head}`); // keyboard users use the grid
    const numbers = COLUMNS.map((name) => (p[name] === null ? "–" : p[name].toFixed(name === "distance" ? 1 : 2)));
    const cells = numbers.map((text) => h("td", { class: "num" }, text));
    return h("tr", { "data-head": `${layer}.${head}` }, h("td", {}, open), h("td", {}, translateName("pattern", p.pattern)), cells);
  };
  const names = COLUMNS.map((name) => h("th", { class: "num", title: t(`measure.${name}.description`) }, t(`measure.${name}`)));
  const top = h("thead", {}, h("tr", {}, h("th", {}, t("head")), h("th", {}, t("pattern")), names));
  return h(
    "div",
    { class: "scroll tall" },
    h("table", { class: "heads" }, top, h("tbody", {}, mapHeads(group, row).flat())),
  );
}

/** Mark the selected head in grid and table. @param {HTMLElement} grid @param {HTMLElement} table @param {string} at */
export function markSelected(grid, table, at) {
  /** @type {NodeListOf<HTMLElement>} */
  const thumbs = grid.querySelectorAll(".thumbnail");
  const inGrid = [...thumbs].some((thumb) => thumb.dataset.head === at);
  thumbs.forEach((thumb, n) => {
    const on = thumb.dataset.head === at;
    thumb.setAttribute("aria-pressed", String(on));
    thumb.tabIndex = on || (n === 0 && !inGrid) ? 0 : -1;
    const box = /** @type {HTMLElement | null} */ (on ? thumb.closest(".scroll") : null);
    if (box) box.scrollTop = Math.max(0, thumb.offsetTop - box.offsetTop - 200);
  });
  /** @type {NodeListOf<HTMLElement>} */
  const rows = table.querySelectorAll("tr[data-head]");
  rows.forEach((row) => row.classList.toggle("selected", row.dataset.head === at));
}
