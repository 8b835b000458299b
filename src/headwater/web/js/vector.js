// A heat map as vectors: a rectangle a weight (equal neighbours share one), labels as text. For print, at any size.
// @ts-check
import { colour, ink } from "./colour.js";
import { css, s, visible } from "./dom.js";

/**
 * @typedef {object} Grid
 * @property {number} rows
 * @property {number} columns
 * @property {(row: number, column: number) => number} byte 0 to 255
 * @property {number} cell pixels of a cell
 * @property {string[]} [rowLabels]
 * @property {string[]} [columnLabels]
 * @property {boolean} [signed]
 * @property {(row: number, column: number) => string} [text] what is written into a cell
 * @property {(row: number, column: number) => boolean} [marked]
 */

const FONT = 11;

/** Pixels that labels take. @param {string[] | undefined} names */
function room(names) {
  const longest = Math.max(0, ...(names ?? []).map((name) => [...visible(name)].length));
  return longest ? Math.min(140, 10 + Math.ceil(longest * FONT * 0.75)) : 4;
}

/** @param {Grid} grid @returns {SVGSVGElement} */
export function vector(grid) {
  const { rows, columns, cell } = grid;
  const [left, top] = [room(grid.rowLabels), room(grid.columnLabels)];
  const [width, height] = [left + columns * cell + 4, top + rows * cell + 4];
  const picture = s("svg", {
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    "font-family": css("--font"),
    "font-size": FONT,
  });
  picture.append(cells(grid, left, top));
  const soft = css("--soft");
  grid.rowLabels?.forEach((label, r) => {
    const at = { x: left - 5, y: top + (r + 0.5) * cell, fill: soft, "text-anchor": "end" };
    picture.append(s("text", { ...at, "dominant-baseline": "central" }, visible(label)));
  });
  grid.columnLabels?.forEach((label, c) => {
    const turn = `translate(${left + (c + 0.5) * cell} ${top - 5}) rotate(-90)`;
    picture.append(s("text", { transform: turn, fill: soft, "dominant-baseline": "central" }, visible(label)));
  });
  return picture;
}

/** @param {Grid} grid @param {number} left @param {number} top */
function cells({ rows, columns, cell, byte, signed, text, marked }, left, top) {
  const group = s("g", { "shape-rendering": "crispEdges" });
  for (let r = 0; r < rows; r++)
    for (let c = 0; c < columns;) {
      let end = c + 1;
      while (end < columns && byte(r, end) === byte(r, c)) end++;
      const size = { width: (end - c) * cell, height: cell, fill: colour(byte(r, c), signed) };
      group.append(s("rect", { x: left + c * cell, y: top + r * cell, ...size }));
      c = end;
    }
  if (text || marked)
    for (let r = 0; r < rows; r++)
      for (let c = 0; c < columns; c++) {
        const [x, y] = [left + c * cell, top + r * cell];
        const middle = { x: x + cell / 2, y: y + cell / 2, "text-anchor": "middle", "dominant-baseline": "central" };
        const size = Math.min(FONT, cell / 3.4);
        if (text) group.append(s("text", { ...middle, "font-size": size, fill: ink(byte(r, c), signed) }, text(r, c)));
        const frame = { x: x + 1, y: y + 1, width: cell - 2, height: cell - 2, fill: "none", "stroke-width": 2 };
        if (marked?.(r, c)) group.append(s("rect", { ...frame, stroke: css("--bad") }));
      }
  return group;
}
