// A heat map that stays smooth at a thousand tokens: only the tiles in sight are fetched, at the detail that is needed.
// @ts-check
import { painted } from "./colour.js";
import { css, h, visible } from "./dom.js";
import { vector } from "./vector.js";

/** @typedef {{row: number, column: number}} Cell */
/**
 * @typedef {object} Source
 * @property {string[]} rows labels of the rows
 * @property {string[]} columns
 * @property {(level: number, row: number, column: number) => Promise<Uint8Array>} tile its bytes
 */

export const TILE = 256;
const GUTTER = 96;
const LARGEST = 44;
const FINEST = 300;

export class HeatMap {
  /**
   * @param {HTMLElement} home @param {Source} source
   * @param {{hover?: (cell: Cell | null) => void, pick?: (cell: Cell) => void, tall?: number, label: string}} options
   */
  constructor(home, source, options) {
    this.home = home;
    this.source = source;
    this.options = options;
    /** @type {Cell | null} */
    this.cell = null;
    /** @type {Map<string, HTMLCanvasElement | null>} null while it is on its way */
    this.tiles = new Map();
    /** @type {Map<string, HTMLCanvasElement | null>} of what was shown before: drawn until the new tile has come */
    this.former = new Map();
    this.canvas = h("canvas", { class: "heat", tabindex: 0, role: "img", "aria-label": options.label });
    /** @type {any} */ (this.canvas).vector = () => this.vector();
    home.append(this.canvas);
    /** @type {any} */ (home).heat = this; // for whoever looks from outside: a console, a test
    this.size = { width: 0, height: 0, left: 0, top: 0 };
    this.view = { scale: 1, x: 0, y: 0 };
    this.listen();
    this.resizing = new ResizeObserver(() => this.fit());
    this.resizing.observe(home);
    this.fit();
  }

  destroy() {
    this.resizing.disconnect();
    this.canvas.remove();
  }

  /** Another matrix of the same tokens. @param {Source} source */
  show(source) {
    this.source = source;
    this.recolour();
  }

  /** The whole matrix as vectors; beyond FINEST rows a rectangle is the largest of several weights, as on the screen. */
  async vector() {
    const { rows, columns, tile } = this.source;
    const level = Math.max(0, Math.ceil(Math.log2(Math.max(rows.length, columns.length) / FINEST)));
    const side = (/** @type {number} */ n) => Math.ceil(n / 2 ** level);
    const [tall, wide] = [side(rows.length), side(columns.length)];
    const across = Math.ceil(wide / TILE);
    const places = Array.from({ length: Math.ceil(tall / TILE) * across }, (_, n) => [
      Math.floor(n / across),
      n % across,
    ]);
    const tiles = await Promise.all(places.map(([r, c]) => tile(level, r, c)));
    const byte = (/** @type {number} */ r, /** @type {number} */ c) => {
      const [i, k] = [Math.floor(r / TILE), Math.floor(c / TILE)];
      return tiles[i * across + k][(r % TILE) * Math.min(TILE, wide - k * TILE) + (c % TILE)];
    };
    const cell = Math.max(2, Math.min(LARGEST, Math.round(640 / Math.max(tall, wide))));
    const names = level === 0 && cell >= 9 ? { rowLabels: rows, columnLabels: columns } : {};
    return vector({ rows: tall, columns: wide, byte, cell, ...names });
  }

  /** Every tile is fetched anew; the old ones stay in sight until then. */
  recolour() {
    for (const [key, tile] of this.tiles) if (tile) this.former.set(key, tile);
    this.tiles.clear();
    this.draw();
  }

  // ------------------------------------------------------------------------------------------------------- geometry

  get least() {
    const { width, left } = this.size;
    const tall = this.options.tall ?? 620;
    return Math.min(LARGEST, (width - left) / this.source.columns.length, tall / this.source.rows.length);
  }

  /** The whole matrix in sight. */
  fit() {
    const width = Math.floor(this.home.clientWidth);
    if (!width) return;
    const pen = this.pen();
    const longest = Math.max(
      ...this.source.rows.slice(0, 400).map((label) => pen.measureText(visible(label)).width),
      12,
    );
    const left = Math.min(1.4 * GUTTER, Math.ceil(longest) + 10, width / 3.5);
    this.size = { width, height: 0, left, top: 0 };
    const scale = this.least;
    this.size.top = scale >= 9 ? this.above(pen) : 8;
    this.size.height = Math.ceil(this.size.top + scale * this.source.rows.length) + 2;
    this.view = { scale, x: 0, y: 0 };
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.size.height * ratio);
    this.canvas.style.height = `${this.size.height}px`;
    this.draw();
  }

  /** @param {CanvasRenderingContext2D} pen */
  above(pen) {
    const longest = Math.max(
      ...this.source.columns.slice(0, 400).map((label) => pen.measureText(visible(label)).width),
      12,
    );
    return Math.min(GUTTER, Math.ceil(longest) + 10);
  }

  pen() {
    const pen = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    pen.font = `12px ${css("--font")}`;
    return pen;
  }

  /** Zoom about a point of the canvas. @param {number} factor @param {number} [px] @param {number} [py] */
  zoom(factor, px = this.size.left + 40, py = this.size.top + 40) {
    const { left, top } = this.size;
    const scale = Math.max(this.least, Math.min(48, this.view.scale * factor));
    const cell = [(px - left) / this.view.scale + this.view.x, (py - top) / this.view.scale + this.view.y];
    this.view = { scale, x: cell[0] - (px - left) / scale, y: cell[1] - (py - top) / scale };
    this.keepInside();
    this.draw();
  }

  keepInside() {
    const { width, height, left, top } = this.size;
    const { rows, columns } = this.source;
    const room = (/** @type {number} */ cells, /** @type {number} */ px) => Math.max(0, cells - px / this.view.scale);
    this.view.x = Math.max(0, Math.min(room(columns.length, width - left), this.view.x));
    this.view.y = Math.max(0, Math.min(room(rows.length, height - top), this.view.y));
  }

  /** The middle of a cell, in CSS pixels of the canvas. @param {number} row @param {number} column */
  middle(row, column) {
    const { scale, x, y } = this.view;
    return [this.size.left + (column + 0.5 - x) * scale, this.size.top + (row + 0.5 - y) * scale];
  }

  /** @param {number} px @param {number} py @returns {Cell | null} */
  at(px, py) {
    const { left, top } = this.size;
    const column = Math.floor((px - left) / this.view.scale + this.view.x);
    const row = Math.floor((py - top) / this.view.scale + this.view.y);
    const inside = px >= left && py >= top && row >= 0 && column >= 0;
    return inside && row < this.source.rows.length && column < this.source.columns.length ? { row, column } : null;
  }

  // -------------------------------------------------------------------------------------------------------- drawing

  draw() {
    const { width, height } = this.size;
    if (!height) return;
    const pen = this.pen();
    const ratio = this.canvas.width / width;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = css("--card");
    pen.fillRect(0, 0, width, height);
    this.drawTiles(pen);
    this.drawLabels(pen);
    this.drawCross(pen);
  }

  /** @param {CanvasRenderingContext2D} pen */
  drawTiles(pen) {
    const { width, height, left, top } = this.size;
    const { scale, x, y } = this.view;
    const level = scale >= 1 ? 0 : Math.min(6, Math.ceil(Math.log2(1 / scale)));
    const step = TILE << level;
    const [rows, columns] = [this.source.rows.length, this.source.columns.length];
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width - left, height - top);
    pen.clip();
    pen.imageSmoothingEnabled = false;
    for (let r = Math.floor(y / step); r * step < Math.min(rows, y + (height - top) / scale); r++)
      for (let c = Math.floor(x / step); c * step < Math.min(columns, x + (width - left) / scale); c++) {
        const tile = this.tile(level, r, c);
        if (!tile) continue;
        const [px, py] = [left + (c * step - x) * scale, top + (r * step - y) * scale];
        const cells = [Math.min(step, columns - c * step), Math.min(step, rows - r * step)];
        pen.drawImage(tile, px, py, cells[0] * scale, cells[1] * scale);
      }
    pen.restore();
  }

  /** A tile, asked for if it is not here. @param {number} level @param {number} row @param {number} column */
  tile(level, row, column) {
    const key = `${level} ${row} ${column}`;
    const held = this.tiles.get(key);
    if (held !== undefined) return held ?? this.former.get(key);
    this.tiles.set(key, null);
    const source = this.source;
    const side = (/** @type {number} */ n, /** @type {number} */ at) =>
      Math.ceil(Math.min(TILE << level, n - at * (TILE << level)) / 2 ** level);
    const [wide, tall] = [side(source.columns.length, column), side(source.rows.length, row)];
    source.tile(level, row, column).then(
      (bytes) => {
        if (source !== this.source) return;
        this.tiles.set(key, painted(bytes, wide, tall));
        this.former.delete(key);
        this.draw();
      },
      () => source === this.source && this.tiles.delete(key),
    );
    return this.former.get(key);
  }

  /** @param {CanvasRenderingContext2D} pen */
  drawLabels(pen) {
    const { left, top } = this.size;
    const { scale } = this.view;
    pen.fillStyle = css("--soft");
    pen.textBaseline = "middle";
    const every = scale >= 11 ? 1 : 0;
    const chosen = this.cell;
    for (let r = 0; r < this.source.rows.length; r++) {
      const [, py] = this.middle(r, 0);
      if (py < top || py > this.size.height || !(every || r === chosen?.row)) continue;
      pen.textAlign = "right";
      pen.fillStyle = css(r === chosen?.row ? "--ink" : "--soft");
      pen.fillText(this.cut(pen, this.source.rows[r], left - 8), left - 6, py);
    }
    if (top < 20) return;
    for (let c = 0; c < this.source.columns.length; c++) {
      const [px] = this.middle(0, c);
      if (px < left || px > this.size.width || !(every || c === chosen?.column)) continue;
      pen.save();
      pen.translate(px, top - 5);
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "left";
      pen.fillStyle = css(c === chosen?.column ? "--ink" : "--soft");
      pen.fillText(this.cut(pen, this.source.columns[c], top - 8), 0, 0);
      pen.restore();
    }
  }

  /** A label that fits. @param {CanvasRenderingContext2D} pen @param {string} label @param {number} room */
  cut(pen, label, room) {
    let shown = visible(label);
    if (pen.measureText(shown).width <= room) return shown;
    while (shown.length > 1 && pen.measureText(shown + "…").width > room) shown = shown.slice(0, -1);
    return shown + "…";
  }

  /** @param {CanvasRenderingContext2D} pen */
  drawCross(pen) {
    if (!this.cell) return;
    const { width, height, left, top } = this.size;
    const size = Math.max(3, this.view.scale);
    const [px, py] = this.middle(this.cell.row, this.cell.column);
    if (px < left || py < top) return;
    pen.strokeStyle = css("--warm");
    pen.lineWidth = 1;
    pen.globalAlpha = 0.5;
    pen.strokeRect(left, py - size / 2, Math.min(width - left, this.source.columns.length * this.view.scale), size);
    pen.strokeRect(px - size / 2, top, size, height - top);
    pen.globalAlpha = 1;
    pen.lineWidth = 2;
    pen.strokeRect(px - size / 2, py - size / 2, size, size);
  }

  // ---------------------------------------------------------------------------------------------- pointer and keys

  listen() {
    /** @type {{x: number, y: number, view: {x: number, y: number}} | null} */
    let held = null;
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (event) => {
      if (held) {
        this.view.x = held.view.x - (event.offsetX - held.x) / this.view.scale;
        this.view.y = held.view.y - (event.offsetY - held.y) / this.view.scale;
        this.keepInside();
      }
      this.choose(this.at(event.offsetX, event.offsetY));
    });
    canvas.addEventListener("pointerdown", (event) => {
      if (this.view.scale > this.least * 1.01) {
        held = { x: event.offsetX, y: event.offsetY, view: { ...this.view } };
        canvas.setPointerCapture(event.pointerId);
      }
    });
    canvas.addEventListener("pointerup", () => (held = null));
    canvas.addEventListener("pointerleave", () => this.choose(null));
    canvas.addEventListener("click", () => this.cell && this.options.pick?.(this.cell));
    canvas.addEventListener("dblclick", (event) => this.zoom(2, event.offsetX, event.offsetY));
    const wheel = (/** @type {WheelEvent} */ event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 200), event.offsetX, event.offsetY);
    };
    canvas.addEventListener("wheel", wheel, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  /** @param {Cell | null} cell */
  choose(cell) {
    if (cell?.row === this.cell?.row && cell?.column === this.cell?.column && cell !== null) return;
    this.cell = cell;
    this.options.hover?.(cell);
    this.draw();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = /** @type {Record<string, number[]>} */ (moves)[event.key];
    if (move) {
      const { row, column } = this.cell ?? { row: 0, column: 0 };
      const inside = (/** @type {number} */ n, /** @type {number} */ most) => Math.max(0, Math.min(most - 1, n));
      this.choose({
        row: inside(row + move[0], this.source.rows.length),
        column: inside(column + move[1], this.source.columns.length),
      });
    } else if (event.key === "+" || event.key === "=") this.zoom(1.5, ...this.focus());
    else if (event.key === "-") this.zoom(1 / 1.5, ...this.focus());
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" && this.cell) this.options.pick?.(this.cell);
    else return;
    event.preventDefault();
  }

  /** @returns {[number, number]} */
  focus() {
    return this.cell
      ? /** @type {[number, number]} */ (this.middle(this.cell.row, this.cell.column))
      : [this.size.width / 2, this.size.height / 2];
  }
}
