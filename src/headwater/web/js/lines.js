// Attention as lines between two columns of tokens: who looks (left) at whom (right), the stronger the darker.
// @ts-check
import { css, s, visible } from "./dom.js";

const ROW = 22;
const WIDTH = 520;
const FAINT = 0.02;

/**
 * @typedef {object} Web
 * @property {string[]} rows tokens that look
 * @property {string[]} columns tokens that are looked at
 * @property {Float32Array} weights rows × columns, row by row
 * @property {number} width
 * @property {number} power 0.5 shows small weights
 * @property {(row: number | null, column: number | null) => void} [hover] which line is under the pointer
 */
/** @param {Web} data */
export function lines(data) {
  const { rows, columns, weights } = data;
  const height = Math.max(rows.length, columns.length) * ROW + 12;
  const wide = Math.max(300, Math.min(WIDTH, data.width));
  const [from, to] = [wide * 0.3, wide * 0.7];
  const y = (/** @type {number} */ n) => n * ROW + ROW / 2 + 6;
  const web = s("g", { fill: "none", stroke: css("--accent") });
  /** @type {SVGPathElement[][]} */
  const byRow = rows.map(() => []);
  /** @type {SVGPathElement[][]} */
  const byColumn = columns.map(() => []);
  for (let r = 0; r < rows.length; r++)
    for (let c = 0; c < columns.length; c++) {
      const weight = weights[r * columns.length + c];
      const strength = weight ** data.power;
      if (strength < FAINT) continue;
      const mid = (from + to) / 2;
      const path = s("path", {
        d: `M${from},${y(r)} C${mid},${y(r)} ${mid},${y(c)} ${to},${y(c)}`,
        "stroke-width": 0.6 + 3 * strength,
        "stroke-opacity": Math.min(1, 0.08 + strength * 0.9),
        "data-weight": weight,
        onpointerenter: () => data.hover?.(r, c),
        onpointerleave: () => data.hover?.(null, null),
      });
      path.append(s("title", {}, `${visible(rows[r])} → ${visible(columns[c])}: ${weight.toFixed(4)}`));
      byRow[r].push(path);
      byColumn[c].push(path);
      web.append(path);
    }
  const picture = s("svg", {
    viewBox: `0 0 ${wide} ${height}`,
    width: wide,
    height,
    class: "lines",
    role: "img",
    "font-family": css("--font"),
    "font-size": 13,
  });
  picture.append(web);
  const focus = (/** @type {SVGPathElement[] | null} */ mine) => {
    web.setAttribute("stroke-opacity", mine ? "0.15" : "1");
    web.querySelectorAll("path").forEach((p) => (p.style.opacity = mine && !mine.includes(p) ? "0.06" : ""));
  };
  const side = (
    /** @type {string[]} */ labels,
    /** @type {number} */ x,
    /** @type {string} */ anchor,
    /** @type {SVGPathElement[][]} */ own,
  ) =>
    labels.forEach((label, n) => {
      const best = () => strongest(own[n]);
      const enter = () => (focus(own[n]), data.hover?.(...best()));
      const leave = () => (focus(null), data.hover?.(null, null));
      const shown = visible(label).length > 18 ? visible(label).slice(0, 17) + "…" : visible(label);
      picture.append(
        s(
          "text",
          {
            x,
            y: y(n),
            "text-anchor": anchor,
            "dominant-baseline": "central",
            fill: css("--ink"),
            tabindex: 0,
            onpointerenter: enter,
            onpointerleave: leave,
            onfocus: enter,
            onblur: leave,
          },
          shown,
        ),
      );
    });
  /** Where the strongest of these lines begins and ends. */
  const strongest = (/** @type {SVGPathElement[]} */ mine) => {
    const most = mine.reduce((a, b) => (Number(b.dataset.weight) > Number(a.dataset.weight) ? b : a), mine[0]);
    const at = (/** @type {SVGPathElement[][]} */ side_) => side_.findIndex((paths) => paths.includes(most));
    return /** @type {[number | null, number | null]} */ (most ? [at(byRow), at(byColumn)] : [null, null]);
  };
  side(rows, from - 8, "end", byRow);
  side(columns, to + 8, "start", byColumn);
  return picture;
}
