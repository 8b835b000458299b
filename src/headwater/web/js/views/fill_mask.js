// Masked-token prediction and the logit lens.
// @ts-check
import { post } from "../api.js";
import { color, textColor } from "../color.js";
import { cssVariable, replaceChildren, h, s, escapeInvisible } from "../dom.js";
import { exportButtons } from "../export.js";
import { probabilityBar, card, tokenChips, formatPercent, withLoading } from "../components.js";
import { requestBody } from "../router.js";
import { t } from "../i18n.js";
import { hasInput } from "./attention.js";

export class FillMaskView {
  /** @param {HTMLElement} container @param {import("../main.js").Context} context */
  constructor(container, context) {
    this.container = container;
    this.context = context;
  }

  /** @param {Record<string, string>} params */
  async show(params) {
    if (!hasInput(this.context)) return replaceChildren(this.container, h("p", { class: "notice" }, t("text.empty")));
    await withLoading(this.container, this.context.signal, async () => {
      const body = requestBody(params);
      const all = await post("tokenize", body, this.context.signal);
      const position = Math.min(Number(params.position ?? Math.floor(all.tokens.length / 2)) || 0, all.tokens.length - 1);
      const data = await post("fill_mask", { ...body, position }, this.context.signal);
      const max = Math.max(...data.candidates.map((/** @type {any} */ c) => c.probs[0]));
      const rows = data.candidates.map((/** @type {any} */ row) =>
        h(
          "li",
          { class: row.id === data.original_token.id ? "selected" : "" },
          h(
            "span",
            { class: "candidate-row", "data-id": row.id, "data-after": row.probs[0] },
            h("span", { class: "token-text" }, escapeInvisible(row.text)),
            probabilityBar(row.probs[0], max),
            h("span", { class: "num strong" }, formatPercent(row.probs[0])),
          ),
        ),
      );
      const lens = await post("logit_lens", { ...body, num_positions: 8 }, this.context.signal);
      return [
        card(
          null,
          h("p", { class: "muted" }, t("next_token.mask")),
          tokenChips(all.tokens, { selected: position, onPick: (n) => this.context.setParams({ position: n }) }),
          data.has_mask_token ? null : h("p", { class: "notice" }, t("next_token.no_mask")),
          h(
            "div",
            { class: "row" },
            h("span", { class: "spacer" }),
            exportButtons(
              `fill-mask-${params.model}`,
              () => candidatesSvg(data.candidates, t("next_token.predictions", { word: escapeInvisible(data.original_token.text) })),
              () => data,
            ),
          ),
        ),
        card(t("next_token.predictions", { word: escapeInvisible(data.original_token.text) }), h("ol", { class: "candidates" }, rows)),
        card(t("logit_lens"), h("p", { class: "muted" }, t("logit_lens.lead")), logitLensTable(lens)),
      ];
    });
  }
}

const [ROW, NAMES, BARS] = [22, 130, 300]; // pixels: height of a row, width of names and of bars

/** SVG frame for rows of names, bars and numbers. @param {number} rows @param {string} title */
function rowsSvg(rows, title) {
  const ctx = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
  ctx.font = `600 13px ${cssVariable("--font")}`;
  const wide = Math.max(560, Math.ceil(ctx.measureText(title).width) + 24);
  const tall = rows * ROW + 34;
  const svg = s("svg", {
    viewBox: `0 0 ${wide} ${tall}`,
    width: wide,
    height: tall,
    "font-family": cssVariable("--font"),
    "font-size": 13,
  });
  svg.append(s("text", { x: 12, y: 18, fill: cssVariable("--text"), "font-weight": 600 }, title));
  return svg;
}

/** @param {SVGSVGElement} svg @param {number} n @param {string} name @param {string} valueText */
function rowLabels(svg, n, name, valueText) {
  const y = n * ROW + 44;
  svg.append(
    s("text", { x: NAMES - 10, y, "text-anchor": "end", fill: cssVariable("--text") }, escapeInvisible(name).slice(0, 16)),
    s("text", { x: NAMES + BARS + 20, y, fill: cssVariable("--text-muted") }, valueText),
  );
}

/** Candidates with their probabilities as SVG. @param {any[]} rows @param {string} title */
export function candidatesSvg(rows, title) {
  const max = Math.max(...rows.flatMap((row) => [row.probs[0], row.probs.at(-1)]), 1e-9);
  const svg = rowsSvg(rows.length, title);
  rows.forEach((row, n) => {
    const probBar = (/** @type {number} */ prob, /** @type {number} */ inset, /** @type {string} */ opacity) =>
      s("rect", {
        x: NAMES,
        y: n * ROW + 30 + inset,
        width: (BARS * prob) / max,
        height: ROW - 4 - 2 * inset,
        fill: cssVariable("--accent"),
        "fill-opacity": opacity,
        rx: 2,
      });
    svg.append(probBar(row.probs[0], 1, "0.25"), probBar(row.probs.at(-1), 5, "1"));
    rowLabels(svg, n, row.text, formatPercent(row.probs.at(-1)));
  });
  return svg;
}

/**
 * Signed values as bars to both sides of zero. A row without a value is a heading.
 * @param {{text: string, value: number | null, valueText: string}[]} rows @param {string} title
 * @param {number} floor minimum of the scale
 */
export function divergingBarsSvg(rows, title, floor) {
  const max = Math.max(...rows.map((row) => Math.abs(row.value ?? 0)), floor);
  const svg = rowsSvg(rows.length, title);
  const zero = NAMES + BARS / 2;
  rows.forEach((row, n) => {
    if (row.value === null) {
      svg.append(s("text", { x: 12, y: n * ROW + 44, fill: cssVariable("--text-muted") }, row.text));
      return;
    }
    const width = ((BARS / 2) * Math.abs(row.value)) / max;
    svg.append(
      s("rect", {
        x: row.value < 0 ? zero - width : zero,
        y: n * ROW + 32,
        width,
        height: ROW - 6,
        fill: color(row.value < 0 ? 30 : 225, true),
        "data-value": row.value,
      }),
    );
    rowLabels(svg, n, row.text, row.valueText);
  });
  svg.append(
    s("line", { x1: zero, x2: zero, y1: 28, y2: rows.length * ROW + 30, stroke: cssVariable("--text-muted"), "data-zero": zero }),
  );
  return svg;
}

/** Table of the logit lens: layers by positions. @param {any} data */
export function logitLensTable(data) {
  const head = h(
    "tr",
    {},
    h("th", {}, ""),
    data.tokens.map((/** @type {any} */ x) => h("th", {}, escapeInvisible(x.label))),
  );
  const rows = data.cells.map((/** @type {any[][]} */ row, /** @type {number} */ layer) =>
    h(
      "tr",
      {},
      h("th", {}, layer ? `${t("layer")} ${layer - 1}` : t("embedding")),
      row.map((cell) => {
        const byte = 255 * cell[0].prob * 0.9;
        const title = cell.map((/** @type {any} */ x) => `${escapeInvisible(x.text)}  ${formatPercent(x.prob)}`).join("\n");
        return h(
          "td",
          { class: "lens", title, style: { background: color(byte), color: textColor(byte) } },
          escapeInvisible(cell[0].label),
        );
      }),
    ),
  );
  return h(
    "div",
    { class: "scroll" },
    h("table", { class: "lens-table" }, h("thead", {}, head), h("tbody", {}, rows.reverse())),
  );
}
