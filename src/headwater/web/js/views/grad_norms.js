// Gradient norms by layer.
// @ts-check
import { h } from "../dom.js";
import { exportButtons } from "../export.js";
import { matrix, colorbar } from "../matrix.js";
import { formatNumber, t } from "../i18n.js";

const MAX_ROWS = 64;

/**
 * @param {any[]} train lines of metrics @param {string} name @param {number} maxWidth pixels across
 * @returns {HTMLElement | null}
 */
export function gradNormHeatmap(train, name, maxWidth) {
  const lines = train.filter((line) => line.grad_norms && typeof line.grad_norms === "object");
  const layers = [...new Set(lines.flatMap((line) => Object.keys(line.grad_norms)))].slice(0, MAX_ROWS);
  if (!layers.length) return null;
  const cell = Math.max(12, Math.min(26, Math.floor((Math.min(maxWidth, 1100) - 150) / lines.length)));
  const columns = Math.max(1, Math.min(lines.length, Math.floor((Math.min(maxWidth, 1100) - 150) / cell)));
  const sampled = Array.from({ length: columns }, (_, n) => lines[Math.floor(((n + 1) * lines.length) / columns) - 1]);
  const values = layers.map((layer) => sampled.map((line) => finite(line.grad_norms[layer])));
  const sizes = values
    .flat()
    .map((v) => v ?? 0)
    .filter((v) => v > 0);
  const [low, high] = [Math.min(...sizes), Math.max(...sizes)];
  const shade = (/** @type {number | null} */ v) =>
    v === null || v <= 0 ? 0 : 0.04 + (0.96 * Math.log(v / low)) / (Math.log(high / low) || 1);
  const figure = matrix(
    values.map((row) => row.map(shade)),
    {
      rows: layers,
      columns: sampled.map((line) => String(line.step)),
      cell,
      label: t("training.layers"),
      formatCell: (r, c) => formatNumber(values[r][c]),
    },
  );
  const zeroGradLayers = layers.filter((_, r) => values[r].every((v) => v === 0));
  return h(
    "figure",
    { class: "grad-norms" },
    h("figcaption", {}, t("training.layers")),
    h("p", { class: "muted" }, t("training.layers.lead")),
    figure,
    zeroGradLayers.length
      ? h("p", { class: "notice" }, t("training.layers.zero", { names: zeroGradLayers.slice(0, 5).join(", ") }))
      : null,
    h(
      "div",
      { class: "row" },
      colorbar(formatNumber(low), formatNumber(high)),
      h("span", { class: "spacer" }),
      exportButtons(
        name,
        () => figure.querySelector("canvas"),
        () => ({ steps: sampled.map((line) => line.step), layers, norms: values }),
      ),
    ),
  );
}

/** @param {any} value */
function finite(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}
