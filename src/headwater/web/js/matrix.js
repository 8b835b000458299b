// A small matrix as a heat map.
// @ts-check
import { palette, textColor, toCanvas } from "./color.js";
import { cssVariable, h, escapeInvisible } from "./dom.js";
import { heatmapSvg } from "./heatmap_svg.js";
import { formatNumber } from "./i18n.js";

/**
 * @typedef {object} MatrixOptions
 * @property {string[]} [rows] labels
 * @property {string[]} [columns]
 * @property {boolean} [diverging] signed values: a diverging colormap, white is zero
 * @property {number} [power] 0.5: square root, shows small weights
 * @property {number} [cell] pixels of a cell
 * @property {boolean} [numbers] write the numbers into the cells
 * @property {string} [nullText] text of a null value
 * @property {string} label accessible name
 * @property {(row: number, column: number) => boolean} [isMarked] cells with a frame
 * @property {(row: number, column: number) => string} [formatCell] text of a cell, where its value is only an intensity
 */

/**
 * Values as bytes: see to_uint8 on the server.
 * @param {(number | null)[][]} values
 * @param {boolean} diverging
 * @param {number} power
 */
export function toUint8(values, diverging = false, power = 1) {
  const flat = values.flat().map((v) => v ?? 0);
  const max = Math.max(...flat.map(Math.abs), 0);
  const result = new Uint8Array(flat.length);
  flat.forEach((v, n) => {
    const relative = max > 0 ? v / max : 0;
    if (diverging) result[n] = Math.round(127.5 + 127.5 * Math.sign(relative) * Math.abs(relative) ** power);
    else result[n] = v > 0 ? Math.max(1, Math.round(255 * relative ** power)) : 0;
  });
  return result;
}

/**
 * @param {(number | null)[][]} values @param {MatrixOptions} options
 * @returns {HTMLElement} a figure with a canvas and a readout of the cell under the pointer
 */
export function matrix(values, options) {
  const [rows, columns] = [values.length, values[0]?.length ?? 0];
  const cell = options.cell ?? 18;
  const left = labelWidth(options.rows, cell);
  const top = labelWidth(options.columns, cell);
  const [width, height] = [left + columns * cell + 2, top + rows * cell + 2];
  const canvas = h("canvas", { class: "matrix", role: "img", "aria-label": options.label });
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const bytes = toUint8(values, options.diverging, options.power);
  const readout = h("span", { class: "readout", "aria-live": "polite" }, "\u00a0");
  const ctx = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  ctx.scale(ratio, ratio);
  ctx.imageSmoothingEnabled = false;
  if (rows && columns)
    ctx.drawImage(toCanvas(bytes, columns, rows, options.diverging), left, top, columns * cell, rows * cell);
  labels(ctx, options, { left, top, cell });
  if (options.numbers) numbers(ctx, values, bytes, options, { left, top, cell });
  drawMarks(ctx, options, { left, top, cell, rows, columns });
  /** @type {any} */ (canvas).toSvg = () =>
    heatmapSvg({
      rows,
      columns,
      byte: (r, c) => bytes[r * columns + c],
      cell,
      rowLabels: options.rows,
      columnLabels: options.columns,
      diverging: options.diverging,
      text: options.numbers ? (r, c) => formatCell(values[r][c], options.nullText) : undefined,
      isMarked: options.isMarked,
    });
  canvas.addEventListener("pointermove", (event) => {
    const [r, c] = [Math.floor((event.offsetY - top) / cell), Math.floor((event.offsetX - left) / cell)];
    const inside = r >= 0 && c >= 0 && r < rows && c < columns;
    const name = (/** @type {string[] | undefined} */ names, /** @type {number} */ n) =>
      names ? escapeInvisible(names[n] ?? "") : String(n);
    const value = () => options.formatCell?.(r, c) ?? (values[r][c] === null ? (options.nullText ?? "–") : formatNumber(values[r][c]));
    readout.textContent = inside ? `${name(options.rows, r)} · ${name(options.columns, c)}: ${value()}` : "\u00a0";
  });
  canvas.addEventListener("pointerleave", () => (readout.textContent = "\u00a0"));
  return h("div", { class: "matrix-box" }, h("div", { class: "scroll" }, canvas), readout);
}

/** Width of the labels in pixels. @param {string[] | undefined} names @param {number} cell */
function labelWidth(names, cell) {
  if (!names || cell < 10) return 2;
  const ctx = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
  ctx.font = `11px ${cssVariable("--font")}`;
  return Math.min(130, 14 + Math.ceil(Math.max(...names.map((name) => ctx.measureText(escapeInvisible(name)).width), 0)));
}

/** @param {CanvasRenderingContext2D} ctx @param {MatrixOptions} options @param {{left: number, top: number, cell: number}} at */
function labels(ctx, options, at) {
  ctx.font = `11px ${cssVariable("--font")}`;
  ctx.fillStyle = cssVariable("--text-muted");
  ctx.textBaseline = "middle";
  ctx.textAlign = "right";
  if (at.cell >= 10)
    options.rows?.forEach((label, r) =>
      ctx.fillText(ellipsize(ctx, label, at.left - 8), at.left - 6, at.top + (r + 0.5) * at.cell),
    );
  ctx.textAlign = "left";
  if (at.cell >= 10)
    options.columns?.forEach((label, c) => {
      ctx.save();
      ctx.translate(at.left + (c + 0.5) * at.cell, at.top - 5);
      ctx.rotate(-Math.PI / 2);
      ctx.fillText(ellipsize(ctx, label, at.top - 8), 0, 0);
      ctx.restore();
    });
}

/** @param {CanvasRenderingContext2D} ctx @param {string} label @param {number} maxWidth */
function ellipsize(ctx, label, maxWidth) {
  let printable = escapeInvisible(label);
  if (ctx.measureText(printable).width <= maxWidth) return printable;
  while (printable.length > 1 && ctx.measureText(printable + "…").width > maxWidth) printable = printable.slice(0, -1);
  return printable + "…";
}

/** @param {number | null} value @param {string} [none] */
function formatCell(value, none = "") {
  return value === null ? none : Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(2);
}

/**
 * @param {CanvasRenderingContext2D} ctx
 * @param {(number | null)[][]} values
 * @param {Uint8Array} bytes
 * @param {MatrixOptions} options
 * @param {{left: number, top: number, cell: number}} at
 */
function numbers(ctx, values, bytes, options, at) {
  ctx.font = `${Math.min(11, at.cell / 3.4)}px ${cssVariable("--mono")}`;
  ctx.textAlign = "center";
  const columns = values[0]?.length ?? 0;
  values.forEach((row, r) =>
    row.forEach((value, c) => {
      ctx.fillStyle = textColor(bytes[r * columns + c], options.diverging);
      ctx.fillText(formatCell(value, options.nullText), at.left + (c + 0.5) * at.cell, at.top + (r + 0.5) * at.cell);
    }),
  );
}

/**
 * @param {CanvasRenderingContext2D} ctx
 * @param {MatrixOptions} options
 * @param {{left: number, top: number, cell: number, rows: number, columns: number}} at
 */
function drawMarks(ctx, options, at) {
  if (!options.isMarked) return;
  ctx.strokeStyle = cssVariable("--danger");
  ctx.lineWidth = 2;
  for (let r = 0; r < at.rows; r++)
    for (let c = 0; c < at.columns; c++)
      if (options.isMarked(r, c))
        ctx.strokeRect(at.left + c * at.cell + 1, at.top + r * at.cell + 1, at.cell - 2, at.cell - 2);
}

/**
 * A color bar with its two ends labelled.
 * @param {string} low
 * @param {string} high
 * @param {boolean} [diverging]
 */
export function colorbar(low, high, diverging = false) {
  const strip = toCanvas(
    Uint8Array.from({ length: 256 }, (_, n) => n),
    256,
    1,
    diverging,
  );
  strip.className = "colorbar";
  palette(diverging);
  return h("span", { class: "legend" }, low, strip, high);
}
