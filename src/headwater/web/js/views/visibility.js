// Who sees whom: what a chosen position sees in one layer, and the same of all positions.
// @ts-check
import { post } from "../api.js";
import { cssVariable, replaceChildren, h, s } from "../dom.js";
import { exportButtons, withTitle } from "../export.js";
import { card, errorNotice, field, heading, select, slider } from "../components.js";
import { formatCount, t } from "../i18n.js";

export const requires = "model";
const LENGTHS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096];
const MAX_RANGES = 6;
const DELAY_MS = 120;

/** @typedef {{layers: {path: string, name: string}[], layer: number, length: number, position: number, edges: string[], row: string, matrix: string[] | null}} Answer */
/** @typedef {{first: number, last: number}} Range */

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const controls = h("div", { class: "row" });
  const container = h("div", { class: "stack edges" });
  replaceChildren(root, heading(t("visibility.title"), t("visibility.lead")), card(null, controls), container);
  const view = new VisibilityView(context, controls, container);
  await view.load();
  return {
    update: (/** @type {Record<string, string>} */ params) => {
      if (params.model !== context.params.model) return false;
      context.params = params;
      view.load();
      return true;
    },
    onThemeChange: () => view.draw(),
  };
}

class VisibilityView {
  /** @param {import("../main.js").Context} context @param {HTMLElement} controls @param {HTMLElement} container */
  constructor(context, controls, container) {
    this.context = context;
    this.controls = controls;
    this.container = container;
    /** @type {Answer | null} */
    this.answer = null;
    this.shown = "";
    this.requests = 0;
    this.timer = 0;
  }

  /** What the address asks for. */
  get request() {
    const { params } = this.context;
    const number = (/** @type {string | undefined} */ text, /** @type {number} */ otherwise) =>
      text !== undefined && /^\d{1,4}$/.test(text) ? Number(text) : otherwise;
    const length = LENGTHS.includes(number(params.length, 64)) ? number(params.length, 64) : 64;
    const position = params.position === undefined ? {} : { position: Math.min(length - 1, number(params.position, 0)) };
    return { model: params.model, layer: number(params.layer, 0), length, ...position };
  }

  async load() {
    const number = ++this.requests;
    try {
      const answer = await post("visibility", this.request, this.context.signal);
      if (number !== this.requests) return;
      this.answer = answer;
      this.renderControls();
      this.draw();
    } catch (error) {
      if (!this.context.signal.aborted && number === this.requests) replaceChildren(this.container, errorNotice(error));
    }
  }

  /** The controls stay while the position moves, so that the slider keeps the keyboard. */
  renderControls() {
    if (!this.answer) return;
    const { layers, layer, length, position } = this.answer;
    const shown = `${layer} ${length}`;
    const range = /** @type {HTMLInputElement | null} */ (this.controls.querySelector("#position"));
    if (this.shown === shown && range && document.activeElement === range) return;
    this.shown = shown;
    const set = this.context.setParams;
    const layerSelect = select(
      layers.map(({ path, name }, n) => [String(n), `${path} · ${name}`]),
      String(layer),
      (value) => set({ layer: value }),
      t("visibility.layer"),
    );
    layerSelect.id = "visibility-layer";
    const lengthSelect = select(
      LENGTHS.map((n) => [String(n), formatCount(n)]),
      String(length),
      (value) => set({ length: value, position: Math.floor(Number(value) / 2) }),
      t("visibility.length"),
    );
    lengthSelect.id = "visibility-length";
    replaceChildren(
      this.controls,
      field(t("visibility.layer"), layerSelect),
      field(t("visibility.length"), lengthSelect),
      slider(t("visibility.position"), {
        value: position,
        min: 0,
        max: length - 1,
        step: 1,
        id: "position",
        format: String,
        onChange: (value) => {
          clearTimeout(this.timer);
          this.timer = setTimeout(() => set({ position: value }), DELAY_MS);
        },
      }),
    );
  }

  /** @param {number} position */
  choose(position) {
    const range = /** @type {HTMLInputElement | null} */ (this.controls.querySelector("#position"));
    range?.blur();
    this.context.setParams({ position });
  }

  draw() {
    if (!this.answer) return;
    const { row, position, length, matrix } = this.answer;
    const seen = [...row].filter((digit) => digit !== "0").length;
    const title = t("visibility.row", { position, length: formatCount(length), seen: formatCount(seen) });
    const strip = this.strip();
    replaceChildren(
      this.container,
      card(
        title,
        h("p", { class: "muted" }, t("visibility.strip.lead")),
        strip,
        this.table(),
        h("div", { class: "row" }, h("span", { class: "spacer" }), this.exports(strip, title, "row")),
      ),
      matrix ? this.matrixCard(matrix) : h("p", { class: "notice" }, t("visibility.matrix.long")),
    );
    this.container.dataset.drawn = `${this.answer.layer} ${length} ${position}`;
  }

  /** The chosen row, wrapped into lines. */
  strip() {
    const { row, position } = /** @type {Answer} */ (this.answer);
    const columns = row.length <= 64 ? row.length : row.length <= 1024 ? 64 : 128;
    const lines = Array.from({ length: Math.ceil(row.length / columns) }, (_, n) => row.slice(n * columns, (n + 1) * columns));
    return this.grid(lines, {
      label: t("visibility.row", { position, length: row.length, seen: [...row].filter((digit) => digit !== "0").length }),
      marked: (r, c) => r * columns + c === position,
      onPick: (r, c) => this.choose(r * columns + c),
      describe: (r, c) => [position, r * columns + c],
    });
  }

  /** @param {string[]} matrix */
  matrixCard(matrix) {
    const { position, length } = /** @type {Answer} */ (this.answer);
    const grid = this.grid(matrix, {
      label: t("visibility.matrix"),
      marked: (r) => r === position,
      onPick: (r) => this.choose(r),
      describe: (r, c) => [r, c],
    });
    const title = `${t("visibility.matrix")} · ${formatCount(length)}`;
    return card(
      t("visibility.matrix"),
      h("p", { class: "muted" }, t("visibility.matrix.lead")),
      grid,
      h("div", { class: "row" }, h("span", { class: "spacer" }), this.exports(grid, title, "matrix")),
    );
  }

  /** How many positions are seen in which way, and which: the picture in words. */
  table() {
    const { row, edges } = /** @type {Answer} */ (this.answer);
    const kinds = edges.map((name, n) => ({ name, ranges: ranges(row, String(n)), n })).filter(({ n, ranges }) => n && ranges.length);
    const text = (/** @type {Range[]} */ all) => {
      const first = all.slice(0, MAX_RANGES).map((r) => (r.first === r.last ? `${r.first}` : `${r.first}–${r.last}`));
      const more = all.length > MAX_RANGES ? ` ${t("visibility.more", { n: all.length - MAX_RANGES })}` : "";
      return first.join(", ") + more;
    };
    return h(
      "table",
      { class: "seen" },
      h(
        "thead",
        {},
        h("tr", {}, h("th", {}, t("visibility.edge")), h("th", { class: "num" }, t("visibility.count")), h("th", {}, t("visibility.where"))),
      ),
      h(
        "tbody",
        {},
        kinds.map(({ name, ranges }) =>
          h(
            "tr",
            { "data-edge": name },
            h("th", {}, h("i", { class: "swatch", style: { background: `var(--edge-${name})` } }), t(`visibility.edge.${name}`)),
            h("td", { class: "num" }, formatCount(ranges.reduce((sum, r) => sum + r.last - r.first + 1, 0))),
            h("td", {}, text(ranges)),
          ),
        ),
      ),
    );
  }

  /** @param {string} digit */
  color(digit) {
    const name = /** @type {Answer} */ (this.answer).edges[Number(digit)];
    return name === "unseen" ? cssVariable("--surface") : getComputedStyle(this.container).getPropertyValue(`--edge-${name}`).trim();
  }

  /**
   * Lines of digits as colored squares.
   * @param {string[]} lines
   * @param {{label: string, marked: (row: number, column: number) => boolean, onPick: (row: number, column: number) => void,
   * describe: (row: number, column: number) => number[]}} options
   */
  grid(lines, options) {
    const columns = lines[0].length;
    const wide = Math.max(240, Math.min(lines.length === columns ? 640 : 900, this.container.clientWidth - 40));
    const cell = Math.max(2, Math.min(16, Math.floor(wide / columns)));
    const gap = cell >= 6 ? 1 : 0;
    const canvas = h("canvas", { role: "img", "aria-label": options.label, class: "edges-grid" });
    const ratio = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [columns * cell * ratio, lines.length * cell * ratio];
    canvas.style.width = `${columns * cell}px`;
    const ctx = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    ctx.scale(ratio, ratio);
    const colors = [.../** @type {Answer} */ (this.answer).edges.keys()].map((n) => this.color(String(n)));
    const squares = lines.flatMap((line, r) =>
      [...line].map((digit, c) => ({ x: c * cell, y: r * cell, fill: colors[Number(digit)], marked: options.marked(r, c) })),
    );
    for (const { x, y, fill } of squares) {
      ctx.fillStyle = fill;
      ctx.fillRect(x, y, cell - gap, cell - gap);
    }
    ctx.fillStyle = ctx.strokeStyle = cssVariable("--text");
    const marked = squares.filter((square) => square.marked);
    if (marked.length) {
      ctx.lineWidth = cell >= 6 ? 1.5 : 1;
      const last = marked[marked.length - 1];
      ctx.strokeRect(marked[0].x + 0.5, marked[0].y + 0.5, last.x - marked[0].x + cell - 1 - gap, cell - 1 - gap);
    }
    /** @type {any} */ (canvas).toSvg = () =>
      s(
        "svg",
        { width: columns * cell, height: lines.length * cell, viewBox: `0 0 ${columns * cell} ${lines.length * cell}` },
        ...squares.map(({ x, y, fill }) => s("rect", { x, y, width: cell - gap, height: cell - gap, fill })),
      );
    const at = (/** @type {MouseEvent} */ event) => {
      const scale = canvas.clientWidth / (columns * cell);
      return [Math.floor(event.offsetY / (cell * scale)), Math.floor(event.offsetX / (cell * scale))];
    };
    const inside = (/** @type {number} */ r, /** @type {number} */ c) => r >= 0 && c >= 0 && r < lines.length && c < lines[r].length;
    const readout = h("p", { class: "readout", "aria-live": "polite" }, "\u00a0");
    canvas.addEventListener("click", (event) => {
      const [r, c] = at(event);
      if (inside(r, c)) options.onPick(r, c);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [r, c] = at(event);
      if (!inside(r, c)) return;
      const [query, key] = options.describe(r, c);
      const name = /** @type {Answer} */ (this.answer).edges[Number(lines[r][c])];
      readout.textContent = t("visibility.cell", { query, key, edge: t(`visibility.edge.${name}`) });
    });
    canvas.addEventListener("pointerleave", () => (readout.textContent = "\u00a0"));
    return h("div", {}, h("div", { class: "scroll" }, canvas), readout);
  }

  /** @param {HTMLElement} figure @param {string} title @param {string} part */
  exports(figure, title, part) {
    const { layer } = /** @type {Answer} */ (this.answer);
    return exportButtons(
      `visibility-${this.context.params.model}-${layer}-${part}`,
      () => withTitle(/** @type {any} */ (figure.querySelector("canvas")).toSvg(), title),
      () => this.answer,
    );
  }
}

/** The runs of a digit in a row. @param {string} row @param {string} digit @returns {Range[]} */
function ranges(row, digit) {
  /** @type {Range[]} */
  const found = [];
  for (let n = 0; n < row.length; n++) {
    if (row[n] !== digit) continue;
    const last = found[found.length - 1];
    if (last && last.last === n - 1) last.last = n;
    else found.push({ first: n, last: n });
  }
  return found;
}
