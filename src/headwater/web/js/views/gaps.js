// An encoder fills gaps; and what both kinds of model show: the logit lens, and candidates as a picture.
// @ts-check
import { post } from "../api.js";
import { colour, ink } from "../colour.js";
import { css, fill, h, s, visible } from "../dom.js";
import { keepers } from "../keep.js";
import { bar, card, chips, percent, working } from "../parts.js";
import { asked } from "../state.js";
import { t } from "../words.js";
import { ready } from "./attention.js";

export class Gaps {
  /** @param {HTMLElement} place @param {import("../main.js").Context} context */
  constructor(place, context) {
    this.place = place;
    this.context = context;
  }

  /** @param {Record<string, string>} params */
  async show(params) {
    if (!ready(this.context)) return fill(this.place, h("p", { class: "notice" }, t("text.give")));
    await working(this.place, this.context.signal, async () => {
      const body = asked(params);
      const all = await post("tokens", body, this.context.signal);
      const place = Math.min(Number(params.place ?? Math.floor(all.tokens.length / 2)) || 0, all.tokens.length - 1);
      const data = await post("hidden", { ...body, place }, this.context.signal);
      const most = Math.max(...data.rows.map((/** @type {any} */ r) => r.shares[0]));
      const rows = data.rows.map((/** @type {any} */ row) =>
        h(
          "li",
          { class: row.id === data.was.id ? "chosen" : "" },
          h(
            "span",
            { class: "plain-row", "data-id": row.id, "data-after": row.shares[0] },
            h("span", { class: "word" }, visible(row.text)),
            bar(row.shares[0], most),
            h("span", { class: "num strong" }, percent(row.shares[0])),
          ),
        ),
      );
      const lens = await post("lens", { ...body, places: 8 }, this.context.signal);
      return [
        card(
          null,
          h("p", { class: "faint" }, t("next.hide")),
          chips(all.tokens, { chosen: place, pick: (n) => this.context.set({ place: n }) }),
          data.masked ? null : h("p", { class: "notice" }, t("next.nomask")),
          h(
            "div",
            { class: "row" },
            h("span", { class: "grow" }),
            keepers(
              `gap-${params.model}`,
              () => barPicture(data.rows, t("next.gap", { word: visible(data.was.text) })),
              () => data,
            ),
          ),
        ),
        card(t("next.gap", { word: visible(data.was.text) }), h("ol", { class: "candidates" }, rows)),
        card(t("lens"), h("p", { class: "faint" }, t("lens.lead")), lensTable(lens)),
      ];
    });
  }
}

const [ROW, NAMES, BARS] = [22, 130, 300]; // pixels: a row, the room for names, and for bars

/** Rows of names, bars and numbers under a title. @param {number} rows @param {string} title */
function rowsPicture(rows, title) {
  const pen = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
  pen.font = `600 13px ${css("--font")}`;
  const wide = Math.max(560, Math.ceil(pen.measureText(title).width) + 24);
  const tall = rows * ROW + 34;
  const picture = s("svg", {
    viewBox: `0 0 ${wide} ${tall}`,
    width: wide,
    height: tall,
    "font-family": css("--font"),
    "font-size": 13,
  });
  picture.append(s("text", { x: 12, y: 18, fill: css("--ink"), "font-weight": 600 }, title));
  return picture;
}

/** @param {SVGSVGElement} picture @param {number} n @param {string} name @param {string} shown */
function rowTexts(picture, n, name, shown) {
  const y = n * ROW + 44;
  picture.append(
    s("text", { x: NAMES - 10, y, "text-anchor": "end", fill: css("--ink") }, visible(name).slice(0, 16)),
    s("text", { x: NAMES + BARS + 20, y, fill: css("--soft") }, shown),
  );
}

/** The candidates as a picture that can be kept. @param {any[]} rows @param {string} title */
export function barPicture(rows, title) {
  const most = Math.max(...rows.flatMap((row) => [row.shares[0], row.shares.at(-1)]), 1e-9);
  const picture = rowsPicture(rows.length, title);
  rows.forEach((row, n) => {
    const bar_ = (/** @type {number} */ share, /** @type {number} */ inset, /** @type {string} */ opacity) =>
      s("rect", {
        x: NAMES,
        y: n * ROW + 30 + inset,
        width: (BARS * share) / most,
        height: ROW - 4 - 2 * inset,
        fill: css("--accent"),
        "fill-opacity": opacity,
        rx: 2,
      });
    picture.append(bar_(row.shares[0], 1, "0.25"), bar_(row.shares.at(-1), 5, "1"));
    rowTexts(picture, n, row.text, percent(row.shares.at(-1)));
  });
  return picture;
}

/**
 * Numbers with a sign, as bars to both sides of a line that is zero. A row without a number is a heading.
 * @param {{text: string, value: number | null, shown: string}[]} rows @param {string} title
 * @param {number} floor the scale ends here or above
 */
export function signedPicture(rows, title, floor) {
  const most = Math.max(...rows.map((row) => Math.abs(row.value ?? 0)), floor);
  const picture = rowsPicture(rows.length, title);
  const zero = NAMES + BARS / 2;
  rows.forEach((row, n) => {
    if (row.value === null) {
      picture.append(s("text", { x: 12, y: n * ROW + 44, fill: css("--soft") }, row.text));
      return;
    }
    const width = ((BARS / 2) * Math.abs(row.value)) / most;
    picture.append(
      s("rect", {
        x: row.value < 0 ? zero - width : zero,
        y: n * ROW + 32,
        width,
        height: ROW - 6,
        fill: colour(row.value < 0 ? 30 : 225, true),
        "data-value": row.value,
      }),
    );
    rowTexts(picture, n, row.text, row.shown);
  });
  picture.append(
    s("line", { x1: zero, x2: zero, y1: 28, y2: rows.length * ROW + 30, stroke: css("--soft"), "data-zero": zero }),
  );
  return picture;
}

/** What each layer would say at the last places. @param {any} data */
export function lensTable(data) {
  const head = h(
    "tr",
    {},
    h("th", {}, ""),
    data.tokens.map((/** @type {any} */ x) => h("th", {}, visible(x.label))),
  );
  const rows = data.cells.map((/** @type {any[][]} */ row, /** @type {number} */ layer) =>
    h(
      "tr",
      {},
      h("th", {}, layer ? `${t("layer")} ${layer - 1}` : t("embedding")),
      row.map((cell) => {
        const byte = 255 * cell[0].share * 0.9;
        const title = cell.map((/** @type {any} */ x) => `${visible(x.text)}  ${percent(x.share)}`).join("\n");
        return h(
          "td",
          { class: "lens", title, style: { background: colour(byte), color: ink(byte) } },
          visible(cell[0].label),
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
