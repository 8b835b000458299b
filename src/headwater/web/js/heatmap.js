// Tiled heat map on a canvas: only visible tiles are fetched, at the needed resolution.
// @ts-check
import { toCanvas } from "./color.js";
import { cssVariable, h, escapeInvisible } from "./dom.js";
import { heatmapSvg } from "./heatmap_svg.js";

/** @typedef {{row: number, column: number}} Cell */
/**
 * @typedef {object} Source
 * @property {string[]} rows labels of the rows
 * @property {string[]} columns
 * @property {(level: number, row: number, column: number) => Promise<Uint8Array>} tile its bytes
 */

export const TILE = 256;
const LABEL_PX = 96;
const MAX_CELL_PX = 44;
const MAX_SVG_CELLS = 300;

export class HeatMap {
  /**
   * @param {HTMLElement} container @param {Source} source
   * @param {{onHover?: (cell: Cell | null) => void, onPick?: (cell: Cell) => void, maxHeight?: number, label: string}} options
   */
  constructor(container, source, options) {
    this.container = container;
    this.source = source;
    this.options = options;
    /** @type {Cell | null} */
    this.cell = null;
    /** @type {Map<string, HTMLCanvasElement | null>} null while it is being fetched */
    this.tiles = new Map();
    /** @type {Map<string, HTMLCanvasElement | null>} tiles of the previous source, drawn until the new ones arrive */
    this.staleTiles = new Map();
    this.canvas = h("canvas", { class: "heat", tabindex: 0, role: "img", "aria-label": options.label });
    /** @type {any} */ (this.canvas).toSvg = () => this.toSvg();
    container.append(this.canvas);
    /** @type {any} */ (container).heat = this; // for the console and tests
    this.size = { width: 0, height: 0, left: 0, top: 0 };
    this.view = { scale: 1, x: 0, y: 0 };
    this.addEventListeners();
    this.resizing = new ResizeObserver(() => this.fit());
    this.resizing.observe(container);
    this.fit();
  }

  destroy() {
    this.resizing.disconnect();
    this.canvas.remove();
  }

  /** Another matrix of the same tokens. @param {Source} source */
  setSource(source) {
    this.source = source;
    this.refreshTiles();
  }

  /** The full matrix as SVG; beyond MAX_SVG_CELLS rows a rectangle is the maximum of several weights. */
  async toSvg() {
    const { rows, columns, tile } = this.source;
    const level = Math.max(0, Math.ceil(Math.log2(Math.max(rows.length, columns.length) / MAX_SVG_CELLS)));
    const side = (/** @type {number} */ n) => Math.ceil(n / 2 ** level);
    const [tall, wide] = [side(rows.length), side(columns.length)];
    const across = Math.ceil(wide / TILE);
    const tilePositions = Array.from({ length: Math.ceil(tall / TILE) * across }, (_, n) => [
      Math.floor(n / across),
      n % across,
    ]);
    const tiles = await Promise.all(tilePositions.map(([r, c]) => tile(level, r, c)));
    const byte = (/** @type {number} */ r, /** @type {number} */ c) => {
      const [i, k] = [Math.floor(r / TILE), Math.floor(c / TILE)];
      return tiles[i * across + k][(r % TILE) * Math.min(TILE, wide - k * TILE) + (c % TILE)];
    };
    const cell = Math.max(2, Math.min(MAX_CELL_PX, Math.round(640 / Math.max(tall, wide))));
    const names = level === 0 && cell >= 9 ? { rowLabels: rows, columnLabels: columns } : {};
    return heatmapSvg({ rows: tall, columns: wide, byte, cell, ...names });
  }

  /** Fetch every tile again; the old ones stay visible until then. */
  refreshTiles() {
    for (const [key, tile] of this.tiles) if (tile) this.staleTiles.set(key, tile);
    this.tiles.clear();
    this.draw();
  }

  // ------------------------------------------------------------------------------------------------------- geometry

  get minScale() {
    const { width, left } = this.size;
    const tall = this.options.maxHeight ?? 620;
    return Math.min(MAX_CELL_PX, (width - left) / this.source.columns.length, tall / this.source.rows.length);
  }

  /** Fit the full matrix into the canvas. */
  fit() {
    const width = Math.floor(this.container.clientWidth);
    if (!width) return;
    const ctx = this.context2d();
    const longest = Math.max(
      ...this.source.rows.slice(0, 400).map((label) => ctx.measureText(escapeInvisible(label)).width),
      12,
    );
    const left = Math.min(1.4 * LABEL_PX, Math.ceil(longest) + 10, width / 3.5);
    this.size = { width, height: 0, left, top: 0 };
    const scale = this.minScale;
    this.size.top = scale >= 9 ? this.columnLabelHeight(ctx) : 8;
    this.size.height = Math.ceil(this.size.top + scale * this.source.rows.length) + 2;
    this.view = { scale, x: 0, y: 0 };
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.size.height * ratio);
    this.canvas.style.height = `${this.size.height}px`;
    this.draw();
  }

  /** @param {CanvasRenderingContext2D} ctx */
  columnLabelHeight(ctx) {
    const longest = Math.max(
      ...this.source.columns.slice(0, 400).map((label) => ctx.measureText(escapeInvisible(label)).width),
      12,
    );
    return Math.min(LABEL_PX, Math.ceil(longest) + 10);
  }

  context2d() {
    const ctx = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    ctx.font = `12px ${cssVariable("--font")}`;
    return ctx;
  }

  /** Zoom about a point of the canvas. @param {number} factor @param {number} [px] @param {number} [py] */
  zoom(factor, px = this.size.left + 40, py = this.size.top + 40) {
    const { left, top } = this.size;
    const scale = Math.max(this.minScale, Math.min(48, this.view.scale * factor));
    const cell = [(px - left) / this.view.scale + this.view.x, (py - top) / this.view.scale + this.view.y];
    this.view = { scale, x: cell[0] - (px - left) / scale, y: cell[1] - (py - top) / scale };
    this.clampView();
    this.draw();
  }

  clampView() {
    const { width, height, left, top } = this.size;
    const { rows, columns } = this.source;
    const maxWidth = (/** @type {number} */ cells, /** @type {number} */ px) => Math.max(0, cells - px / this.view.scale);
    this.view.x = Math.max(0, Math.min(maxWidth(columns.length, width - left), this.view.x));
    this.view.y = Math.max(0, Math.min(maxWidth(rows.length, height - top), this.view.y));
  }

  /** Center of a cell in CSS pixels of the canvas. @param {number} row @param {number} column */
  cellCenter(row, column) {
    const { scale, x, y } = this.view;
    return [this.size.left + (column + 0.5 - x) * scale, this.size.top + (row + 0.5 - y) * scale];
  }

  /** @param {number} px @param {number} py @returns {Cell | null} */
  cellAt(px, py) {
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
    const ctx = this.context2d();
    const ratio = this.canvas.width / width;
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.fillStyle = cssVariable("--card");
    ctx.fillRect(0, 0, width, height);
    this.drawTiles(ctx);
    this.drawLabels(ctx);
    this.drawCrosshair(ctx);
  }

  /** @param {CanvasRenderingContext2D} ctx */
  drawTiles(ctx) {
    const { width, height, left, top } = this.size;
    const { scale, x, y } = this.view;
    const level = scale >= 1 ? 0 : Math.min(6, Math.ceil(Math.log2(1 / scale)));
    const step = TILE << level;
    const [rows, columns] = [this.source.rows.length, this.source.columns.length];
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width - left, height - top);
    ctx.clip();
    ctx.imageSmoothingEnabled = false;
    for (let r = Math.floor(y / step); r * step < Math.min(rows, y + (height - top) / scale); r++)
      for (let c = Math.floor(x / step); c * step < Math.min(columns, x + (width - left) / scale); c++) {
        const tile = this.tile(level, r, c);
        if (!tile) continue;
        const [px, py] = [left + (c * step - x) * scale, top + (r * step - y) * scale];
        const cells = [Math.min(step, columns - c * step), Math.min(step, rows - r * step)];
        ctx.drawImage(tile, px, py, cells[0] * scale, cells[1] * scale);
      }
    ctx.restore();
  }

  /** A tile, fetched if it is not cached. @param {number} level @param {number} row @param {number} column */
  tile(level, row, column) {
    const key = `${level} ${row} ${column}`;
    const cached = this.tiles.get(key);
    if (cached !== undefined) return cached ?? this.staleTiles.get(key);
    this.tiles.set(key, null);
    const source = this.source;
    const side = (/** @type {number} */ n, /** @type {number} */ at) =>
      Math.ceil(Math.min(TILE << level, n - at * (TILE << level)) / 2 ** level);
    const [wide, tall] = [side(source.columns.length, column), side(source.rows.length, row)];
    source.tile(level, row, column).then(
      (bytes) => {
        if (source !== this.source) return;
        this.tiles.set(key, toCanvas(bytes, wide, tall));
        this.staleTiles.delete(key);
        this.draw();
      },
      () => source === this.source && this.tiles.delete(key),
    );
    return this.staleTiles.get(key);
  }

  /** @param {CanvasRenderingContext2D} ctx */
  drawLabels(ctx) {
    const { left, top } = this.size;
    const { scale } = this.view;
    ctx.fillStyle = cssVariable("--text-muted");
    ctx.textBaseline = "middle";
    const every = scale >= 11 ? 1 : 0;
    const selected = this.cell;
    for (let r = 0; r < this.source.rows.length; r++) {
      const [, py] = this.cellCenter(r, 0);
      if (py < top || py > this.size.height || !(every || r === selected?.row)) continue;
      ctx.textAlign = "right";
      ctx.fillStyle = cssVariable(r === selected?.row ? "--text" : "--text-muted");
      ctx.fillText(this.ellipsize(ctx, this.source.rows[r], left - 8), left - 6, py);
    }
    if (top < 20) return;
    for (let c = 0; c < this.source.columns.length; c++) {
      const [px] = this.cellCenter(0, c);
      if (px < left || px > this.size.width || !(every || c === selected?.column)) continue;
      ctx.save();
      ctx.translate(px, top - 5);
      ctx.rotate(-Math.PI / 2);
      ctx.textAlign = "left";
      ctx.fillStyle = cssVariable(c === selected?.column ? "--text" : "--text-muted");
      ctx.fillText(this.ellipsize(ctx, this.source.columns[c], top - 8), 0, 0);
      ctx.restore();
    }
  }

  /** A label shortened to a width. @param {CanvasRenderingContext2D} ctx @param {string} label @param {number} maxWidth */
  ellipsize(ctx, label, maxWidth) {
    let printable = escapeInvisible(label);
    if (ctx.measureText(printable).width <= maxWidth) return printable;
    while (printable.length > 1 && ctx.measureText(printable + "…").width > maxWidth) printable = printable.slice(0, -1);
    return printable + "…";
  }

  /** @param {CanvasRenderingContext2D} ctx */
  drawCrosshair(ctx) {
    if (!this.cell) return;
    const { width, height, left, top } = this.size;
    const size = Math.max(3, this.view.scale);
    const [px, py] = this.cellCenter(this.cell.row, this.cell.column);
    if (px < left || py < top) return;
    ctx.strokeStyle = cssVariable("--accent-2");
    ctx.lineWidth = 1;
    ctx.globalAlpha = 0.5;
    ctx.strokeRect(left, py - size / 2, Math.min(width - left, this.source.columns.length * this.view.scale), size);
    ctx.strokeRect(px - size / 2, top, size, height - top);
    ctx.globalAlpha = 1;
    ctx.lineWidth = 2;
    ctx.strokeRect(px - size / 2, py - size / 2, size, size);
  }

  // ---------------------------------------------------------------------------------------------- pointer and keys

  addEventListeners() {
    /** @type {{x: number, y: number, view: {x: number, y: number}} | null} */
    let drag = null;
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        this.view.x = drag.view.x - (event.offsetX - drag.x) / this.view.scale;
        this.view.y = drag.view.y - (event.offsetY - drag.y) / this.view.scale;
        this.clampView();
      }
      this.selectCell(this.cellAt(event.offsetX, event.offsetY));
    });
    canvas.addEventListener("pointerdown", (event) => {
      if (this.view.scale > this.minScale * 1.01) {
        drag = { x: event.offsetX, y: event.offsetY, view: { ...this.view } };
        canvas.setPointerCapture(event.pointerId);
      }
    });
    canvas.addEventListener("pointerup", () => (drag = null));
    canvas.addEventListener("pointerleave", () => this.selectCell(null));
    canvas.addEventListener("click", () => this.cell && this.options.onPick?.(this.cell));
    canvas.addEventListener("dblclick", (event) => this.zoom(2, event.offsetX, event.offsetY));
    const wheel = (/** @type {WheelEvent} */ event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 200), event.offsetX, event.offsetY);
    };
    canvas.addEventListener("wheel", wheel, { passive: false });
    canvas.addEventListener("keydown", (event) => this.onKeyDown(event));
  }

  /** @param {Cell | null} cell */
  selectCell(cell) {
    if (cell?.row === this.cell?.row && cell?.column === this.cell?.column && cell !== null) return;
    this.cell = cell;
    this.options.onHover?.(cell);
    this.draw();
  }

  /** @param {KeyboardEvent} event */
  onKeyDown(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = /** @type {Record<string, number[]>} */ (moves)[event.key];
    if (move) {
      const { row, column } = this.cell ?? { row: 0, column: 0 };
      const inside = (/** @type {number} */ n, /** @type {number} */ size) => Math.max(0, Math.min(size - 1, n));
      this.selectCell({
        row: inside(row + move[0], this.source.rows.length),
        column: inside(column + move[1], this.source.columns.length),
      });
    } else if (event.key === "+" || event.key === "=") this.zoom(1.5, ...this.zoomCenter());
    else if (event.key === "-") this.zoom(1 / 1.5, ...this.zoomCenter());
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" && this.cell) this.options.onPick?.(this.cell);
    else return;
    event.preventDefault();
  }

  /** @returns {[number, number]} */
  zoomCenter() {
    return this.cell
      ? /** @type {[number, number]} */ (this.cellCenter(this.cell.row, this.cell.column))
      : [this.size.width / 2, this.size.height / 2];
  }
}
