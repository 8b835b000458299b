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
              () => barPicture(data.rows),
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

/** The candidates as a picture that can be kept. @param {any[]} rows */
export function barPicture(rows) {
  const [tall, wide] = [22, 560];
  const most = Math.max(...rows.flatMap((row) => [row.shares[0], row.shares.at(-1)]), 1e-9);
  const picture = s("svg", {
    viewBox: `0 0 ${wide} ${rows.length * tall + 8}`,
    width: wide,
    height: rows.length * tall + 8,
    "font-family": css("--font"),
    "font-size": 13,
  });
  rows.forEach((row, n) => {
    const y = n * tall + 4;
    const bar_ = (/** @type {number} */ share, /** @type {number} */ inset, /** @type {string} */ opacity) =>
      s("rect", {
        x: 130,
        y: y + inset,
        width: (300 * share) / most,
        height: tall - 4 - 2 * inset,
        fill: css("--accent"),
        "fill-opacity": opacity,
        rx: 2,
      });
    picture.append(
      s("text", { x: 120, y: y + 14, "text-anchor": "end", fill: css("--ink") }, visible(row.text).slice(0, 16)),
      bar_(row.shares[0], 1, "0.25"),
      bar_(row.shares.at(-1), 5, "1"),
      s("text", { x: 450, y: y + 14, fill: css("--soft") }, row.shown ?? percent(row.shares.at(-1))),
    );
  });
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
