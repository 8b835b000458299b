// Attention weights of every head.
// @ts-check
import { post, postForBytes } from "../api.js";
import { replaceChildren, h, escapeInvisible } from "../dom.js";
import { HeatMap } from "../heatmap.js";
import { exportButtons, withTitle } from "../export.js";
import { attentionLines } from "../attention_lines.js";
import { colorbar } from "../matrix.js";
import { card, segmentedControl, heading, withLoading } from "../components.js";
import { requestBody } from "../router.js";
import { formatNumber, t, translateName } from "../i18n.js";
import { headStatsTable, markSelected, thumbnailGrid } from "./head_grid.js";
import { textForm } from "./input_form.js";

export const requires = "model";
const MAX_LINE_TOKENS = 60;

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const container = h("div", { class: "stack" });
  replaceChildren(root, heading(t("attention.title"), t("attention.lead")), textForm(context), container);
  /** @type {AttentionView | null} */
  let view = null;
  await withLoading(container, context.signal, async () => {
    if (!hasInput(context)) return h("p", { class: "notice" }, t("text.empty"));
    const trace = await post("attention", requestBody(context.params), context.signal);
    view = new AttentionView(context, trace);
    return view.page;
  });
  /** @type {AttentionView | null} */ (view)?.select(context.params);
  return {
    update: (/** @type {Record<string, string>} */ params) => {
      if (!view || inputChanged(context.params, params)) return false;
      context.params = params;
      view.select(params);
      return true;
    },
    onThemeChange: () => view?.onThemeChange(),
    destroy: () => view?.map?.destroy(),
  };
}

/** @param {import("../main.js").Context} context */
export function hasInput({ params, modelInfo }) {
  return Boolean(params.ids || (modelInfo.architecture === "encoder-decoder" ? params.source || params.source_ids : params.text));
}

/** @param {Record<string, string>} a @param {Record<string, string>} b */
function inputChanged(a, b) {
  return ["text", "source", "ids", "source_ids"].some((name) => a[name] !== b[name]);
}

class AttentionView {
  /** @param {import("../main.js").Context} context @param {any} trace */
  constructor(context, trace) {
    this.context = context;
    this.trace = trace;
    /** @type {HeatMap | null} */
    this.map = null;
    /** @type {any} */
    this.selection = {};
    this.grid = h("div", { class: "grid" });
    this.mainPlot = h("div", { class: "large" });
    this.toolbar = h("div", { class: "row" });
    this.readout = h("p", { class: "readout big", "aria-live": "polite" }, "\u00a0");
    this.table = h("div", {});
    this.page = [
      card(
        null,
        this.toolbar,
        h("div", { class: "split" }, this.grid, h("div", { class: "stage" }, this.readout, this.mainPlot)),
      ),
      card(t("attention.heads"), h("p", { class: "muted" }, t("attention.heads.lead")), this.table),
    ];
    /** @type {Map<string, Promise<Float32Array>>} */
    this.rows = new Map();
    /** @type {Promise<any> | null} */
    this.retrace = null;
  }

  /**
   * Bytes of this trace; an expired trace is computed again.
   * @param {string} name @param {Record<string, any>} body
   */
  async fetchBytes(name, body) {
    const fetch_ = () => postForBytes(name, { trace_id: this.trace.trace_id, ...body }, this.context.signal);
    return fetch_().catch(async (error) => {
      if (error.type !== "Expired") throw error;
      this.retrace ??= post("attention", requestBody(this.context.params), this.context.signal).finally(() => (this.retrace = null));
      this.trace.trace_id = (await this.retrace).trace_id;
      return fetch_();
    });
  }

  onThemeChange() {
    this.map?.refreshTiles();
    this.drawGrid();
    this.show();
  }

  get kinds() {
    return Object.keys(this.trace.kinds);
  }

  /** Tokens of the rows and columns of a kind. @param {string} kind @returns {import("../components.js").Token[][]} */
  axisTokens(kind) {
    const { tokens, source } = this.trace;
    const rows = kind.startsWith("encoder.") && source.length ? source : tokens;
    return [rows, kind === "decoder.cross_attn" ? source : rows];
  }

  /**
   * Label of a row; of cross-attention with the token predicted next.
   * @param {import("../components.js").Token} token
   * @param {number} n
   */
  label(token, n) {
    const nextToken = this.selection.kind === "decoder.cross_attn" ? this.trace.next_tokens[n] : null;
    return nextToken ? `${token.label} → ${nextToken.label}` : token.label;
  }

  /** @param {Record<string, string>} params */
  select(params) {
    const kind = this.kinds.includes(params.kind) ? params.kind : this.kinds[this.kinds.length - 1];
    const { layers, heads } = this.trace.kinds[kind];
    const inside = (/** @type {string | undefined} */ v, /** @type {number} */ low, /** @type {number} */ high) =>
      Math.max(low, Math.min(high, Number(v ?? 0) || 0));
    const next = {
      kind,
      layer: inside(params.layer, 0, layers - 1),
      head: params.head === "mean" ? -1 : params.head === "max" ? -2 : inside(params.head, 0, heads - 1),
      plot: params.plot === "lines" ? "lines" : "heatmap",
      power: params.scale === "linear" ? 1 : 0.5,
    };
    const other = next.kind !== this.selection.kind;
    this.selection = next;
    if (other) this.drawGrid();
    this.markSelected();
    this.renderToolbar();
    this.show();
  }

  /** @param {Record<string, any>} changes */
  setParams(changes) {
    this.context.setParams(changes);
  }

  renderToolbar() {
    const { kind, plot, power, head } = this.selection;
    const kinds = this.kinds.map((k) => /** @type {[string, string]} */ ([k, translateName("attention_kind", k)]));
    const heads = /** @type {[string, string][]} */ ([
      ["one", t("head.one")],
      ["mean", t("head.mean")],
      ["max", t("head.max")],
    ]);
    replaceChildren(
      this.toolbar,
      kinds.length > 1
        ? segmentedControl(kinds, kind, (k) => this.setParams({ kind: k, layer: 0, head: 0 }), t("attention.kind"))
        : null,
      segmentedControl(
        [
          ["heatmap", t("plot.heatmap")],
          ["lines", t("plot.lines")],
        ],
        plot,
        (v) => this.setParams({ plot: v }),
        t("attention.plot"),
      ),
      segmentedControl(
        heads,
        head === -1 ? "mean" : head === -2 ? "max" : "one",
        (v) => this.setParams({ head: v === "one" ? 0 : v }),
        t("attention.aggregation"),
      ),
      segmentedControl(
        [
          ["sqrt", t("scale.sqrt")],
          ["linear", t("scale.linear")],
        ],
        power === 1 ? "linear" : "sqrt",
        (v) => this.setParams({ scale: v }),
        t("attention.scale"),
      ),
      h("span", { class: "spacer" }),
      exportButtons(
        `attention-${this.context.params.model}-${kind}-${this.selection.layer}-${head}`,
        () => this.figure(),
        () => this.data(),
      ),
    );
  }

  /** The plot with a title, as SVG. */
  async figure() {
    const { model } = this.context.params;
    const { kind, layer, head } = this.selection;
    const which = head === -1 ? t("head.mean") : head === -2 ? t("head.max") : `${t("head")} ${head}`;
    const title = `${escapeInvisible(model)} · ${translateName("attention_kind", kind)} · ${t("layer")} ${layer} · ${which}`;
    const plotted = this.mainPlot.querySelector("svg.lines") ?? (await this.map?.toSvg());
    return plotted ? withTitle(/** @type {SVGSVGElement} */ (plotted), title) : null;
  }

  // ------------------------------------------------------------------------------------------------------- grid of heads

  async drawGrid() {
    const { kind } = this.selection;
    const group = this.trace.kinds[kind];
    const onPick = (/** @type {number} */ layer, /** @type {number} */ head) => this.setParams({ layer, head });
    replaceChildren(this.table, headStatsTable(group, onPick));
    replaceChildren(this.grid, h("p", { class: "muted" }, t("attention.grid")));
    const atlas = await this.fetchBytes("attention_thumbnails", { kind }).catch(() => null);
    if (kind !== this.selection.kind || !atlas) return;
    const grid = thumbnailGrid(group, new Uint8Array(atlas), onPick);
    replaceChildren(this.grid, h("p", { class: "muted" }, t("attention.grid.how")), h("div", { class: "scroll" }, grid));
    this.markSelected();
  }

  markSelected() {
    markSelected(this.grid, this.table, `${this.selection.layer}.${this.selection.head}`);
  }

  // ------------------------------------------------------------------------------------------------- main plot

  show() {
    const { kind, plot } = this.selection;
    this.readout.textContent = "\u00a0";
    if (plot === "lines") {
      this.map?.destroy();
      this.map = null;
      this.renderLines();
      return;
    }
    const [rows, columns] = this.axisTokens(kind);
    const source = {
      rows: rows.map((x, n) => this.label(x, n)),
      columns: columns.map((x) => x.label),
      tile: this.tiles({ ...this.selection }),
    };
    if (this.map && this.drawnKind === kind) this.map.setSource(source);
    else {
      this.map?.destroy();
      const frame = h("div", { class: "map" });
      const button = (/** @type {string} */ sign, /** @type {string} */ name, /** @type {() => void} */ f) =>
        h("button", { type: "button", class: "ghost", "aria-label": name, title: name, onclick: f }, sign);
      const zoom = h(
        "div",
        { class: "row" },
        h("span", { class: "legend-place" }),
        h("span", { class: "spacer" }),
        button("−", t("zoom.out"), () => this.map?.zoom(1 / 1.6)),
        button("+", t("zoom.in"), () => this.map?.zoom(1.6)),
        button(t("zoom.fit"), t("zoom.fit"), () => this.map?.fit()),
      );
      replaceChildren(this.mainPlot, zoom, frame);
      this.map = new HeatMap(frame, source, { onHover: (cell) => this.showWeight(cell), label: t("attention.title") });
      this.drawnKind = kind;
    }
    const maxWeight = this.selection.head >= 0 ? this.trace.kinds[kind].max_weights[this.selection.layer][this.selection.head] : null;
    const container = this.mainPlot.querySelector(".legend-place");
    if (container) replaceChildren(container, colorbar("0", maxWeight === null ? t("legend.max") : formatNumber(maxWeight)));
    this.mainPlot.dataset.drawn = `${kind} ${this.selection.layer} ${this.selection.head}`;
  }

  /** @param {any} now */
  tiles({ kind, layer, head, power }) {
    return async (/** @type {number} */ level, /** @type {number} */ row, /** @type {number} */ column) =>
      new Uint8Array(await this.fetchBytes("attention_tile", { kind, layer, head, level, row, column, power }));
  }

  /** One row of exact weights. @param {number} row */
  row(row) {
    const { kind, layer, head } = this.selection;
    const key = `${kind} ${layer} ${head} ${row}`;
    const columns = this.axisTokens(kind)[1].length;
    let cached = this.rows.get(key);
    if (!cached) {
      const block = { kind, layer, head, rows: [row, row + 1], columns: [0, columns] };
      cached = this.fetchBytes("attention_block", block).then((b) => new Float32Array(b));
      cached.catch(() => this.rows.delete(key));
      this.rows.set(key, cached);
      if (this.rows.size > 400) this.rows.clear();
    }
    return cached;
  }

  /** @param {import("../heatmap.js").Cell | null} cell */
  async showWeight(cell) {
    if (!cell) {
      this.readout.textContent = "\u00a0";
      return;
    }
    const { kind } = this.selection;
    const [rows, columns] = this.axisTokens(kind);
    const [from, to] = [escapeInvisible(rows[cell.row].text), escapeInvisible(columns[cell.column].text)];
    const weights = await this.row(cell.row).catch(() => null);
    if (this.map?.cell?.row !== cell.row || this.map.cell.column !== cell.column || !weights) return;
    this.readout.textContent = t("attention.weight", {
      from,
      to,
      i: cell.row,
      j: cell.column,
      weight: formatNumber(weights[cell.column]),
    });
  }

  /**
   * @param {import("../components.js").Token[]} rows @param {import("../components.js").Token[]} columns
   * @param {Float32Array} weights @param {[number, number | null]} row first visible row, and the row among those
   * @param {[number, number | null]} column @param {number} wide
   */
  showLineWeight(rows, columns, weights, [r0, r], [c0, c], wide) {
    const one = (/** @type {number} */ i, /** @type {number} */ j) =>
      t("attention.weight", {
        from: escapeInvisible(rows[r0 + i].text),
        to: escapeInvisible(columns[c0 + j].text),
        i: r0 + i,
        j: c0 + j,
        weight: formatNumber(weights[i * wide + j]),
      });
    this.readout.textContent = r === null || c === null ? "\u00a0" : one(r, c);
  }

  async renderLines() {
    const { kind, layer, head } = this.selection;
    const [rows, columns] = this.axisTokens(kind);
    const first = Math.max(
      0,
      Math.min(Number(this.context.params.offset ?? 0) || 0, Math.max(0, Math.max(rows.length, columns.length) - 2)),
    );
    const [r0, c0] = [Math.min(first, Math.max(0, rows.length - 1)), Math.min(first, Math.max(0, columns.length - 1))];
    const [r1, c1] = [Math.min(rows.length, r0 + MAX_LINE_TOKENS), Math.min(columns.length, c0 + MAX_LINE_TOKENS)];
    const weights = new Float32Array(
      await this.fetchBytes("attention_block", { kind, layer, head, rows: [r0, r1], columns: [c0, c1] }),
    );
    if (this.selection.plot !== "lines" || this.selection.layer !== layer || this.selection.head !== head) return;
    const label = (/** @type {any} */ x) => x.label;
    const svg = attentionLines({
      rows: rows.slice(r0, r1).map((x, n) => this.label(x, r0 + n)),
      columns: columns.slice(c0, c1).map(label),
      weights,
      width: this.mainPlot.clientWidth,
      power: this.selection.power,
      onHover: (r, c) => this.showLineWeight(rows, columns, weights, [r0, r], [c0, c], c1 - c0),
    });
    const longest = Math.max(rows.length, columns.length);
    const step = (/** @type {number} */ by) =>
      h(
        "button",
        {
          type: "button",
          class: "ghost",
          disabled: first + by < 0 || first + by >= longest,
          onclick: () => this.setParams({ offset: first + by }),
        },
        by < 0 ? "←" : "→",
      );
    replaceChildren(
      this.mainPlot,
      longest > MAX_LINE_TOKENS
        ? h(
            "div",
            { class: "row" },
            step(-MAX_LINE_TOKENS),
            h(
              "span",
              { class: "muted" },
              t("lines.part", { from: first, to: Math.min(longest, first + MAX_LINE_TOKENS), all: longest }),
            ),
            step(MAX_LINE_TOKENS),
          )
        : null,
      svg,
    );
    this.mainPlot.dataset.drawn = `${kind} ${layer} ${head}`;
  }

  /** The exact weights of the plot, at most 256 × 256. */
  async data() {
    const { kind, layer, head } = this.selection;
    const [rows, columns] = this.axisTokens(kind).map((side) => side.slice(0, 256));
    const weights = new Float32Array(
      await this.fetchBytes("attention_block", { kind, layer, head, rows: [0, rows.length], columns: [0, columns.length] }),
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
