// Gradient norms of every layer over the steps, as a strip: a row a layer, light to dark by its logarithm.
// @ts-check
import { h } from "../dom.js";
import { keepers } from "../keep.js";
import { matrix, scale } from "../matrix.js";
import { number, t } from "../words.js";

const MOST_ROWS = 64;

/**
 * @param {any[]} train lines of metrics @param {string} name @param {number} room pixels across
 * @returns {HTMLElement | null}
 */
export function strip(train, name, room) {
  const lines = train.filter((line) => line.grad_norms && typeof line.grad_norms === "object");
  const layers = [...new Set(lines.flatMap((line) => Object.keys(line.grad_norms)))].slice(0, MOST_ROWS);
  if (!layers.length) return null;
  const cell = Math.max(12, Math.min(26, Math.floor((Math.min(room, 1100) - 150) / lines.length)));
  const columns = Math.max(1, Math.min(lines.length, Math.floor((Math.min(room, 1100) - 150) / cell)));
  const picked = Array.from({ length: columns }, (_, n) => lines[Math.floor(((n + 1) * lines.length) / columns) - 1]);
  const values = layers.map((layer) => picked.map((line) => finite(line.grad_norms[layer])));
  const sizes = values
    .flat()
    .map((v) => v ?? 0)
    .filter((v) => v > 0);
  const [low, high] = [Math.min(...sizes), Math.max(...sizes)];
  const shade = (/** @type {number | null} */ v) =>
    v === null || v <= 0 ? 0 : 0.04 + (0.96 * Math.log(v / low)) / (Math.log(high / low) || 1);
  const picture = matrix(
    values.map((row) => row.map(shade)),
    {
      rows: layers,
      columns: picked.map((line) => String(line.step)),
      cell,
      label: t("training.layers"),
      shown: (r, c) => number(values[r][c]),
    },
  );
  const still = layers.filter((_, r) => values[r].every((v) => v === 0));
  return h(
    "figure",
    { class: "strip" },
    h("figcaption", {}, t("training.layers")),
    h("p", { class: "faint" }, t("training.layers.lead")),
    picture,
    still.length
      ? h("p", { class: "notice" }, t("training.layers.still", { names: still.slice(0, 5).join(", ") }))
      : null,
    h(
      "div",
      { class: "row" },
      scale(number(low), number(high)),
      h("span", { class: "grow" }),
      keepers(
        name,
        () => picture.querySelector("canvas"),
        () => ({ steps: picked.map((line) => line.step), layers, norms: values }),
      ),
    ),
  );
}

/** @param {any} value */
function finite(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}
