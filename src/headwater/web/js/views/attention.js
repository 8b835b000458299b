// Attention: thumbnails of every layer and head, one of them large as a heat map or as lines, and what each head does.
// @ts-check
import { bytes, post } from "../api.js";
import { fill, h, visible } from "../dom.js";
import { HeatMap } from "../heatmap.js";
import { keepers, titled } from "../keep.js";
import { lines } from "../lines.js";
import { scale } from "../matrix.js";
import { card, choice, heading, working } from "../parts.js";
import { asked } from "../state.js";
import { number, t, word } from "../words.js";
import { headTable, markChosen, thumbGrid } from "./heads.js";
import { textForm } from "./text.js";

export const needs = "model";
const WINDOW = 60;

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const place = h("div", { class: "stack" });
  fill(root, heading(t("attention.title"), t("attention.lead")), textForm(context), place);
  /** @type {Seen | null} */
  let seen = null;
  await working(place, context.signal, async () => {
    if (!ready(context)) return h("p", { class: "notice" }, t("text.give"));
    const trace = await post("attention", asked(context.params), context.signal);
    seen = new Seen(context, trace);
    return seen.page;
  });
  /** @type {Seen | null} */ (seen)?.choose(context.params);
  return {
    update: (/** @type {Record<string, string>} */ params) => {
      if (!seen || asksOther(context.params, params)) return false;
      context.params = params;
      seen.choose(params);
      return true;
    },
    theme: () => seen?.theme(),
    destroy: () => seen?.map?.destroy(),
  };
}

/** @param {import("../main.js").Context} context */
export function ready({ params, about }) {
  return Boolean(params.ids || (about.shape === "both" ? params.source || params.sids : params.text));
}

/** @param {Record<string, string>} a @param {Record<string, string>} b */
function asksOther(a, b) {
  return ["text", "source", "ids", "sids"].some((name) => a[name] !== b[name]);
}

class Seen {
  /** @param {import("../main.js").Context} context @param {any} trace */
  constructor(context, trace) {
    this.context = context;
    this.trace = trace;
    /** @type {HeatMap | null} */
    this.map = null;
    /** @type {any} */
    this.now = {};
    this.grid = h("div", { class: "grid" });
    this.large = h("div", { class: "large" });
    this.bar = h("div", { class: "row" });
    this.said = h("p", { class: "said big", "aria-live": "polite" }, "\u00a0");
    this.table = h("div", {});
    this.page = [
      card(
        null,
        this.bar,
        h("div", { class: "split" }, this.grid, h("div", { class: "stage" }, this.said, this.large)),
      ),
      card(t("attention.heads"), h("p", { class: "faint" }, t("attention.heads.lead")), this.table),
    ];
    /** @type {Map<string, Promise<Float32Array>>} */
    this.rows = new Map();
    /** @type {Promise<any> | null} */
    this.anew = null;
  }

  /**
   * Bytes of this trace. A server that was started anew has forgotten it, and makes it again.
   * @param {string} name @param {Record<string, any>} body
   */
  async bytes(name, body) {
    const ask = () => bytes(name, { trace: this.trace.trace, ...body }, this.context.signal);
    return ask().catch(async (error) => {
      if (error.kind !== "Forgotten") throw error;
      this.anew ??= post("attention", asked(this.context.params), this.context.signal).finally(() => (this.anew = null));
      this.trace.trace = (await this.anew).trace;
      return ask();
    });
  }

  theme() {
    this.map?.recolour();
    this.drawGrid();
    this.show();
  }

  get kinds() {
    return Object.keys(this.trace.kinds);
  }

  /** Tokens of a kind's rows and columns. @param {string} kind @returns {import("../parts.js").Token[][]} */
  sides(kind) {
    const { tokens, source } = this.trace;
    const rows = kind.startsWith("encoder.") && source.length ? source : tokens;
    return [rows, kind === "decoder.cross_attn" ? source : rows];
  }

  /**
   * Of cross-attention a row is the token that was read and the one that was then written.
   * @param {import("../parts.js").Token} token
   * @param {number} n
   */
  label(token, n) {
    const written = this.now.kind === "decoder.cross_attn" ? this.trace.follows[n] : null;
    return written ? `${token.label} → ${written.label}` : token.label;
  }

  /** @param {Record<string, string>} params */
  choose(params) {
    const kind = this.kinds.includes(params.kind) ? params.kind : this.kinds[this.kinds.length - 1];
    const { layers, heads } = this.trace.kinds[kind];
    const inside = (/** @type {string | undefined} */ v, /** @type {number} */ low, /** @type {number} */ most) =>
      Math.max(low, Math.min(most, Number(v ?? 0) || 0));
    const next = {
      kind,
      layer: inside(params.layer, 0, layers - 1),
      head: params.head === "mean" ? -1 : params.head === "max" ? -2 : inside(params.head, 0, heads - 1),
      how: params.how === "lines" ? "lines" : "map",
      power: params.scale === "linear" ? 1 : 0.5,
    };
    const other = next.kind !== this.now.kind;
    this.now = next;
    if (other) this.drawGrid();
    this.mark();
    this.drawBar();
    this.show();
  }

  /** @param {Record<string, any>} changes */
  set(changes) {
    this.context.set(changes);
  }

  drawBar() {
    const { kind, how, power, head } = this.now;
    const kinds = this.kinds.map((k) => /** @type {[string, string]} */ ([k, word("kind", k)]));
    const heads = /** @type {[string, string][]} */ ([
      ["one", t("head.one")],
      ["mean", t("head.mean")],
      ["max", t("head.max")],
    ]);
    fill(
      this.bar,
      kinds.length > 1
        ? choice(kinds, kind, (k) => this.set({ kind: k, layer: 0, head: 0 }), t("attention.kind"))
        : null,
      choice(
        [
          ["map", t("how.map")],
          ["lines", t("how.lines")],
        ],
        how,
        (v) => this.set({ how: v }),
        t("attention.how"),
      ),
      choice(
        heads,
        head === -1 ? "mean" : head === -2 ? "max" : "one",
        (v) => this.set({ head: v === "one" ? 0 : v }),
        t("attention.average"),
      ),
      choice(
        [
          ["root", t("scale.root")],
          ["linear", t("scale.linear")],
        ],
        power === 1 ? "linear" : "root",
        (v) => this.set({ scale: v }),
        t("attention.scale"),
      ),
      h("span", { class: "grow" }),
      keepers(
        `attention-${this.context.params.model}-${kind}-${this.now.layer}-${head}`,
        () => this.picture(),
        () => this.data(),
      ),
    );
  }

  /** What is shown, whole and with a title, as vectors. */
  async picture() {
    const { model } = this.context.params;
    const { kind, layer, head } = this.now;
    const which = head === -1 ? t("head.mean") : head === -2 ? t("head.max") : `${t("head")} ${head}`;
    const title = `${visible(model)} · ${word("kind", kind)} · ${t("layer")} ${layer} · ${which}`;
    const shown = this.large.querySelector("svg.lines") ?? (await this.map?.vector());
    return shown ? titled(/** @type {SVGSVGElement} */ (shown), title) : null;
  }

  // ------------------------------------------------------------------------------------------------------- the grid

  async drawGrid() {
    const { kind } = this.now;
    const facts = this.trace.kinds[kind];
    const pick = (/** @type {number} */ layer, /** @type {number} */ head) => this.set({ layer, head });
    fill(this.table, headTable(facts, pick));
    fill(this.grid, h("p", { class: "faint" }, t("attention.grid")));
    const atlas = await this.bytes("thumbs", { kind }).catch(() => null);
    if (kind !== this.now.kind || !atlas) return;
    const grid = thumbGrid(facts, new Uint8Array(atlas), pick);
    fill(this.grid, h("p", { class: "faint" }, t("attention.grid.how")), h("div", { class: "scroll" }, grid));
    this.mark();
  }

  mark() {
    markChosen(this.grid, this.table, `${this.now.layer}.${this.now.head}`);
  }

  // ------------------------------------------------------------------------------------------------- the large one

  show() {
    const { kind, how } = this.now;
    this.said.textContent = "\u00a0";
    if (how === "lines") {
      this.map?.destroy();
      this.map = null;
      this.showLines();
      return;
    }
    const [rows, columns] = this.sides(kind);
    const source = {
      rows: rows.map((x, n) => this.label(x, n)),
      columns: columns.map((x) => x.label),
      tile: this.tiles({ ...this.now }),
    };
    if (this.map && this.shownKind === kind) this.map.show(source);
    else {
      this.map?.destroy();
      const frame = h("div", { class: "map" });
      const button = (/** @type {string} */ sign, /** @type {string} */ name, /** @type {() => void} */ f) =>
        h("button", { type: "button", class: "quiet", "aria-label": name, title: name, onclick: f }, sign);
      const zoom = h(
        "div",
        { class: "row" },
        h("span", { class: "legend-place" }),
        h("span", { class: "grow" }),
        button("−", t("zoom.out"), () => this.map?.zoom(1 / 1.6)),
        button("+", t("zoom.in"), () => this.map?.zoom(1.6)),
        button(t("zoom.fit"), t("zoom.fit"), () => this.map?.fit()),
      );
      fill(this.large, zoom, frame);
      this.map = new HeatMap(frame, source, { hover: (cell) => this.tell(cell), label: t("attention.title") });
      this.shownKind = kind;
    }
    const most = this.now.head >= 0 ? this.trace.kinds[kind].most[this.now.layer][this.now.head] : null;
    const place = this.large.querySelector(".legend-place");
    if (place) fill(place, scale("0", most === null ? t("legend.most") : number(most)));
    this.large.dataset.drawn = `${kind} ${this.now.layer} ${this.now.head}`;
  }

  /** @param {any} now */
  tiles({ kind, layer, head, power }) {
    return async (/** @type {number} */ level, /** @type {number} */ row, /** @type {number} */ column) =>
      new Uint8Array(await this.bytes("tile", { kind, layer, head, level, row, column, power }));
  }

  /** One row of exact weights. @param {number} row */
  row(row) {
    const { kind, layer, head } = this.now;
    const key = `${kind} ${layer} ${head} ${row}`;
    const columns = this.sides(kind)[1].length;
    let held = this.rows.get(key);
    if (!held) {
      const block = { kind, layer, head, rows: [row, row + 1], columns: [0, columns] };
      held = this.bytes("block", block).then((b) => new Float32Array(b));
      held.catch(() => this.rows.delete(key));
      this.rows.set(key, held);
      if (this.rows.size > 400) this.rows.clear();
    }
    return held;
  }

  /** @param {import("../heatmap.js").Cell | null} cell */
  async tell(cell) {
    if (!cell) {
      this.said.textContent = "\u00a0";
      return;
    }
    const { kind } = this.now;
    const [rows, columns] = this.sides(kind);
    const [from, to] = [visible(rows[cell.row].text), visible(columns[cell.column].text)];
    const weights = await this.row(cell.row).catch(() => null);
    if (this.map?.cell?.row !== cell.row || this.map.cell.column !== cell.column || !weights) return;
    this.said.textContent = t("attention.says", {
      from,
      to,
      i: cell.row,
      j: cell.column,
      weight: number(weights[cell.column]),
    });
  }

  /**
   * @param {import("../parts.js").Token[]} rows @param {import("../parts.js").Token[]} columns
   * @param {Float32Array} weights @param {[number, number | null]} row first in sight, and which of those
   * @param {[number, number | null]} column @param {number} wide
   */
  tellLine(rows, columns, weights, [r0, r], [c0, c], wide) {
    const one = (/** @type {number} */ i, /** @type {number} */ j) =>
      t("attention.says", {
        from: visible(rows[r0 + i].text),
        to: visible(columns[c0 + j].text),
        i: r0 + i,
        j: c0 + j,
        weight: number(weights[i * wide + j]),
      });
    this.said.textContent = r === null || c === null ? "\u00a0" : one(r, c);
  }

  async showLines() {
    const { kind, layer, head } = this.now;
    const [rows, columns] = this.sides(kind);
    const first = Math.max(
      0,
      Math.min(Number(this.context.params.from ?? 0) || 0, Math.max(0, Math.max(rows.length, columns.length) - 2)),
    );
    const [r0, c0] = [Math.min(first, Math.max(0, rows.length - 1)), Math.min(first, Math.max(0, columns.length - 1))];
    const [r1, c1] = [Math.min(rows.length, r0 + WINDOW), Math.min(columns.length, c0 + WINDOW)];
    const weights = new Float32Array(
      await this.bytes("block", { kind, layer, head, rows: [r0, r1], columns: [c0, c1] }),
    );
    if (this.now.how !== "lines" || this.now.layer !== layer || this.now.head !== head) return;
    const label = (/** @type {any} */ x) => x.label;
    const picture = lines({
      rows: rows.slice(r0, r1).map((x, n) => this.label(x, r0 + n)),
      columns: columns.slice(c0, c1).map(label),
      weights,
      width: this.large.clientWidth,
      power: this.now.power,
      hover: (r, c) => this.tellLine(rows, columns, weights, [r0, r], [c0, c], c1 - c0),
    });
    const longest = Math.max(rows.length, columns.length);
    const step = (/** @type {number} */ by) =>
      h(
        "button",
        {
          type: "button",
          class: "quiet",
          disabled: first + by < 0 || first + by >= longest,
          onclick: () => this.set({ from: first + by }),
        },
        by < 0 ? "←" : "→",
      );
    fill(
      this.large,
      longest > WINDOW
        ? h(
            "div",
            { class: "row" },
            step(-WINDOW),
            h(
              "span",
              { class: "faint" },
              t("lines.part", { from: first, to: Math.min(longest, first + WINDOW), all: longest }),
            ),
            step(WINDOW),
          )
        : null,
      picture,
    );
    this.large.dataset.drawn = `${kind} ${layer} ${head}`;
  }

  /** The exact numbers of what is shown, at most 256 × 256 of them. */
  async data() {
    const { kind, layer, head } = this.now;
    const [rows, columns] = this.sides(kind).map((side) => side.slice(0, 256));
    const weights = new Float32Array(
      await this.bytes("block", { kind, layer, head, rows: [0, rows.length], columns: [0, columns.length] }),
    );
    const matrix = rows.map((_, r) => Array.from(weights.subarray(r * columns.length, (r + 1) * columns.length)));
    return {
      model: this.context.params.model,
      kind,
      layer,
      head: head === -1 ? "mean" : head === -2 ? "max" : head,
      rows: rows.map((x) => x.text),
      columns: columns.map((x) => x.text),
      weights: matrix,
    };
  }
}
