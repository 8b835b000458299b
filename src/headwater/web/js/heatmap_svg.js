// A heat map as SVG.
// @ts-check
import { color, textColor } from "./color.js";
import { cssVariable, s, escapeInvisible } from "./dom.js";

/**
 * @typedef {object} HeatmapData
 * @property {number} rows
 * @property {number} columns
 * @property {(row: number, column: number) => number} byte 0 to 255
 * @property {number} cell pixels of a cell
 * @property {string[]} [rowLabels]
 * @property {string[]} [columnLabels]
 * @property {boolean} [diverging]
 * @property {(row: number, column: number) => string} [text] text of a cell
 * @property {(row: number, column: number) => boolean} [isMarked]
 */

const FONT = 11;

/** Width of the labels in pixels. @param {string[] | undefined} names */
function labelWidth(names) {
  const longest = Math.max(0, ...(names ?? []).map((name) => [...escapeInvisible(name)].length));
  return longest ? Math.min(140, 10 + Math.ceil(longest * FONT * 0.75)) : 4;
}

/** @param {HeatmapData} data @returns {SVGSVGElement} */
export function heatmapSvg(data) {
  const { rows, columns, cell } = data;
  const [left, top] = [labelWidth(data.rowLabels), labelWidth(data.columnLabels)];
  const [width, height] = [left + columns * cell + 4, top + rows * cell + 4];
  const svg = s("svg", {
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    "font-family": cssVariable("--font"),
    "font-size": FONT,
  });
  svg.append(cells(data, left, top));
  const muted = cssVariable("--text-muted");
  data.rowLabels?.forEach((label, r) => {
    const at = { x: left - 5, y: top + (r + 0.5) * cell, fill: muted, "text-anchor": "end" };
    svg.append(s("text", { ...at, "dominant-baseline": "central" }, escapeInvisible(label)));
  });
  data.columnLabels?.forEach((label, c) => {
    const rotation = `translate(${left + (c + 0.5) * cell} ${top - 5}) rotate(-90)`;
    svg.append(s("text", { transform: rotation, fill: muted, "dominant-baseline": "central" }, escapeInvisible(label)));
  });
  return svg;
}

/** @param {HeatmapData} data @param {number} left @param {number} top */
function cells({ rows, columns, cell, byte, diverging, text, isMarked }, left, top) {
  const group = s("g", { "shape-rendering": "crispEdges" });
  for (let r = 0; r < rows; r++)
    for (let c = 0; c < columns;) {
      let end = c + 1;
      while (end < columns && byte(r, end) === byte(r, c)) end++;
      const size = { width: (end - c) * cell, height: cell, fill: color(byte(r, c), diverging) };
      group.append(s("rect", { x: left + c * cell, y: top + r * cell, ...size }));
      c = end;
    }
  if (text || isMarked)
    for (let r = 0; r < rows; r++)
      for (let c = 0; c < columns; c++) {
        const [x, y] = [left + c * cell, top + r * cell];
        const middle = { x: x + cell / 2, y: y + cell / 2, "text-anchor": "middle", "dominant-baseline": "central" };
        const size = Math.min(FONT, cell / 3.4);
        if (text) group.append(s("text", { ...middle, "font-size": size, fill: textColor(byte(r, c), diverging) }, text(r, c)));
        const frame = { x: x + 1, y: y + 1, width: cell - 2, height: cell - 2, fill: "none", "stroke-width": 2 };
        if (isMarked?.(r, c)) group.append(s("rect", { ...frame, stroke: cssVariable("--danger") }));
      }
  return group;
}
