// Attention as lines between two columns of tokens (as in BertViz).
// @ts-check
import { cssVariable, s, escapeInvisible } from "./dom.js";

const ROW = 22;
const WIDTH = 520;
const MIN_OPACITY = 0.02;

/**
 * @typedef {object} AttentionLines
 * @property {string[]} rows query tokens
 * @property {string[]} columns key tokens
 * @property {Float32Array} weights rows × columns, row by row
 * @property {number} width
 * @property {number} power 0.5 shows small weights
 * @property {(row: number | null, column: number | null) => void} [onHover] which line is under the pointer
 */
/** @param {AttentionLines} data */
export function attentionLines(data) {
  const { rows, columns, weights } = data;
  const height = Math.max(rows.length, columns.length) * ROW + 12;
  const wide = Math.max(300, Math.min(WIDTH, data.width));
  const [from, to] = [wide * 0.3, wide * 0.7];
  const y = (/** @type {number} */ n) => n * ROW + ROW / 2 + 6;
  const lineGroup = s("g", { fill: "none", stroke: cssVariable("--accent") });
  /** @type {SVGPathElement[][]} */
  const byRow = rows.map(() => []);
  /** @type {SVGPathElement[][]} */
  const byColumn = columns.map(() => []);
  for (let r = 0; r < rows.length; r++)
    for (let c = 0; c < columns.length; c++) {
      const weight = weights[r * columns.length + c];
      const strength = weight ** data.power;
      if (strength < MIN_OPACITY) continue;
      const mid = (from + to) / 2;
      const path = s("path", {
        d: `M${from},${y(r)} C${mid},${y(r)} ${mid},${y(c)} ${to},${y(c)}`,
        "stroke-width": 0.6 + 3 * strength,
        "stroke-opacity": Math.min(1, 0.08 + strength * 0.9),
        "data-weight": weight,
        onpointerenter: () => data.onHover?.(r, c),
        onpointerleave: () => data.onHover?.(null, null),
      });
      path.append(s("title", {}, `${escapeInvisible(rows[r])} → ${escapeInvisible(columns[c])}: ${weight.toFixed(4)}`));
      byRow[r].push(path);
      byColumn[c].push(path);
      lineGroup.append(path);
    }
  const svg = s("svg", {
    viewBox: `0 0 ${wide} ${height}`,
    width: wide,
    height,
    class: "lines",
    role: "img",
    "font-family": cssVariable("--font"),
    "font-size": 13,
  });
  svg.append(lineGroup);
  const focus = (/** @type {SVGPathElement[] | null} */ selectedPaths) => {
    lineGroup.setAttribute("stroke-opacity", selectedPaths ? "0.15" : "1");
    lineGroup.querySelectorAll("path").forEach((p) => (p.style.opacity = selectedPaths && !selectedPaths.includes(p) ? "0.06" : ""));
  };
  const side = (
    /** @type {string[]} */ labels,
    /** @type {number} */ x,
    /** @type {string} */ anchor,
    /** @type {SVGPathElement[][]} */ own,
  ) =>
    labels.forEach((label, n) => {
      const best = () => strongest(own[n]);
      const enter = () => (focus(own[n]), data.onHover?.(...best()));
      const leave = () => (focus(null), data.onHover?.(null, null));
      const printable = escapeInvisible(label).length > 18 ? escapeInvisible(label).slice(0, 17) + "…" : escapeInvisible(label);
      svg.append(
        s(
          "text",
          {
            x,
            y: y(n),
            "text-anchor": anchor,
            "dominant-baseline": "central",
            fill: cssVariable("--text"),
            tabindex: 0,
            onpointerenter: enter,
            onpointerleave: leave,
            onfocus: enter,
            onblur: leave,
          },
          printable,
        ),
      );
    });
  /** Row and column of the line with the largest weight. */
  const strongest = (/** @type {SVGPathElement[]} */ selectedPaths) => {
    const strongestPath = selectedPaths.reduce((a, b) => (Number(b.dataset.weight) > Number(a.dataset.weight) ? b : a), selectedPaths[0]);
    const at = (/** @type {SVGPathElement[][]} */ side_) => side_.findIndex((paths) => paths.includes(strongestPath));
    return /** @type {[number | null, number | null]} */ (strongestPath ? [at(byRow), at(byColumn)] : [null, null]);
  };
  side(rows, from - 8, "end", byRow);
  side(columns, to + 8, "start", byColumn);
  return svg;
}
