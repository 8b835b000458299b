// A small matrix of numbers: one canvas, exact colours, a word about the cell under the pointer.
// @ts-check
import { colours, ink, painted } from "./colour.js";
import { css, h, visible } from "./dom.js";
import { vector } from "./vector.js";
import { number } from "./words.js";

/**
 * @typedef {object} Look
 * @property {string[]} [rows] labels
 * @property {string[]} [columns]
 * @property {boolean} [signed] numbers have a sign: two colours, white is zero
 * @property {number} [power] 0.5 shows small weights
 * @property {number} [cell] pixels of a cell
 * @property {boolean} [numbers] write the numbers into the cells
 * @property {string} [none] what stands for a value that is null
 * @property {string} label what it is, for those who do not see it
 * @property {(row: number, column: number) => boolean} [marked] cells with a frame
 * @property {(row: number, column: number) => string} [shown] what is said of a cell, where its value is only a shade
 */

/**
 * Bytes of a matrix: see as_bytes on the server.
 * @param {(number | null)[][]} values
 * @param {boolean} signed
 * @param {number} power
 */
export function asBytes(values, signed = false, power = 1) {
  const flat = values.flat().map((v) => v ?? 0);
  const most = Math.max(...flat.map(Math.abs), 0);
  const made = new Uint8Array(flat.length);
  flat.forEach((v, n) => {
    const share = most > 0 ? v / most : 0;
    if (signed) made[n] = Math.round(127.5 + 127.5 * Math.sign(share) * Math.abs(share) ** power);
    else made[n] = v > 0 ? Math.max(1, Math.round(255 * share ** power)) : 0;
  });
  return made;
}

/**
 * @param {(number | null)[][]} values @param {Look} look
 * @returns {HTMLElement} a figure with a canvas and a line that follows the pointer
 */
export function matrix(values, look) {
  const [rows, columns] = [values.length, values[0]?.length ?? 0];
  const cell = look.cell ?? 18;
  const left = room(look.rows, cell);
  const top = room(look.columns, cell);
  const [width, height] = [left + columns * cell + 2, top + rows * cell + 2];
  const canvas = h("canvas", { class: "matrix", role: "img", "aria-label": look.label });
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const bytes = asBytes(values, look.signed, look.power);
  const said = h("span", { class: "said", "aria-live": "polite" }, "\u00a0");
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.scale(ratio, ratio);
  pen.imageSmoothingEnabled = false;
  if (rows && columns)
    pen.drawImage(painted(bytes, columns, rows, look.signed), left, top, columns * cell, rows * cell);
  labels(pen, look, { left, top, cell });
  if (look.numbers) numbers(pen, values, bytes, look, { left, top, cell });
  frames(pen, look, { left, top, cell, rows, columns });
  /** @type {any} */ (canvas).vector = () =>
    vector({
      rows,
      columns,
      byte: (r, c) => bytes[r * columns + c],
      cell,
      rowLabels: look.rows,
      columnLabels: look.columns,
      signed: look.signed,
      text: look.numbers ? (r, c) => written(values[r][c], look.none) : undefined,
      marked: look.marked,
    });
  canvas.addEventListener("pointermove", (event) => {
    const [r, c] = [Math.floor((event.offsetY - top) / cell), Math.floor((event.offsetX - left) / cell)];
    const inside = r >= 0 && c >= 0 && r < rows && c < columns;
    const name = (/** @type {string[] | undefined} */ names, /** @type {number} */ n) =>
      names ? visible(names[n] ?? "") : String(n);
    const value = () => look.shown?.(r, c) ?? (values[r][c] === null ? (look.none ?? "–") : number(values[r][c]));
    said.textContent = inside ? `${name(look.rows, r)} · ${name(look.columns, c)}: ${value()}` : "\u00a0";
  });
  canvas.addEventListener("pointerleave", () => (said.textContent = "\u00a0"));
  return h("div", { class: "matrix-box" }, h("div", { class: "scroll" }, canvas), said);
}

/** Pixels that labels take. @param {string[] | undefined} names @param {number} cell */
function room(names, cell) {
  if (!names || cell < 10) return 2;
  const pen = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
  pen.font = `11px ${css("--font")}`;
  return Math.min(130, 14 + Math.ceil(Math.max(...names.map((name) => pen.measureText(visible(name)).width), 0)));
}

/** @param {CanvasRenderingContext2D} pen @param {Look} look @param {{left: number, top: number, cell: number}} at */
function labels(pen, look, at) {
  pen.font = `11px ${css("--font")}`;
  pen.fillStyle = css("--soft");
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  if (at.cell >= 10)
    look.rows?.forEach((label, r) =>
      pen.fillText(cut(pen, label, at.left - 8), at.left - 6, at.top + (r + 0.5) * at.cell),
    );
  pen.textAlign = "left";
  if (at.cell >= 10)
    look.columns?.forEach((label, c) => {
      pen.save();
      pen.translate(at.left + (c + 0.5) * at.cell, at.top - 5);
      pen.rotate(-Math.PI / 2);
      pen.fillText(cut(pen, label, at.top - 8), 0, 0);
      pen.restore();
    });
}

/** @param {CanvasRenderingContext2D} pen @param {string} label @param {number} room */
function cut(pen, label, room) {
  let shown = visible(label);
  if (pen.measureText(shown).width <= room) return shown;
  while (shown.length > 1 && pen.measureText(shown + "…").width > room) shown = shown.slice(0, -1);
  return shown + "…";
}

/** @param {number | null} value @param {string} [none] */
function written(value, none = "") {
  return value === null ? none : Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(2);
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {(number | null)[][]} values
 * @param {Uint8Array} bytes
 * @param {Look} look
 * @param {{left: number, top: number, cell: number}} at
 */
function numbers(pen, values, bytes, look, at) {
  pen.font = `${Math.min(11, at.cell / 3.4)}px ${css("--mono")}`;
  pen.textAlign = "center";
  const columns = values[0]?.length ?? 0;
  values.forEach((row, r) =>
    row.forEach((value, c) => {
      pen.fillStyle = ink(bytes[r * columns + c], look.signed);
      pen.fillText(written(value, look.none), at.left + (c + 0.5) * at.cell, at.top + (r + 0.5) * at.cell);
    }),
  );
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {Look} look
 * @param {{left: number, top: number, cell: number, rows: number, columns: number}} at
 */
function frames(pen, look, at) {
  if (!look.marked) return;
  pen.strokeStyle = css("--bad");
  pen.lineWidth = 2;
  for (let r = 0; r < at.rows; r++)
    for (let c = 0; c < at.columns; c++)
      if (look.marked(r, c))
        pen.strokeRect(at.left + c * at.cell + 1, at.top + r * at.cell + 1, at.cell - 2, at.cell - 2);
}

/**
 * The scale of a heat map: a strip of the ramp with its ends named.
 * @param {string} low
 * @param {string} high
 * @param {boolean} [signed]
 */
export function scale(low, high, signed = false) {
  const strip = painted(
    Uint8Array.from({ length: 256 }, (_, n) => n),
    256,
    1,
    signed,
  );
  strip.className = "ramp";
  colours(signed);
  return h("span", { class: "legend" }, low, strip, high);
}
