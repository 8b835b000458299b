// How a model knows order, asked of its own position modules; and how it cuts a text.
// @ts-check
import { post } from "../api.js";
import { chart } from "../chart.js";
import { css, fill, h } from "../dom.js";
import { matrix, scale } from "../matrix.js";
import { card, chips, field, textarea, trouble, working } from "../parts.js";
import { asked } from "../state.js";
import { t } from "../words.js";

/** @param {HTMLElement} place @param {import("../main.js").Context} context */
export async function drawPositions(place, { params, signal }) {
  try {
    const { drawn } = await post("positions", { model: params.model }, signal);
    const palette = ["--accent", "--warm", "--third", "--soft"];
    fill(
      place,
      drawn.length ? null : h("p", { class: "notice" }, t("anatomy.positions.none")),
      drawn.map((/** @type {any} */ one) => {
        const figures = [];
        const width = Math.min(640, place.clientWidth || 640);
        if (one.table.length)
          figures.push(
            h(
              "figure",
              {},
              h("figcaption", {}, t(`position.${one.acts}.table`)),
              matrix(
                one.table.map((/** @type {number[]} */ row) => row.slice(0, 96)),
                { signed: true, cell: 6, label: one.where },
              ),
            ),
          );
        if (one.similarity.length)
          figures.push(
            h(
              "figure",
              {},
              h("figcaption", {}, t("position.similarity")),
              matrix(one.similarity, { signed: true, cell: 6, label: t("position.similarity") }),
            ),
          );
        if (one.curves.length)
          figures.push(
            h(
              "figure",
              {},
              chart({
                curves: one.curves.slice(0, 12).map((/** @type {number[]} */ ys, /** @type {number} */ n) => ({
                  name: one.curves.length > 1 ? `${t("head")} ${n}` : t("position.score"),
                  colour: css(palette[n % palette.length]),
                  points: ys.map((y, i) => [one.offsets[i], y]),
                })),
                width,
                x: t("distance"),
                title: t(`position.${one.acts}.curve`),
              }),
            ),
          );
        return h(
          "section",
          { class: "position" },
          h("h3", {}, `${one.part} `, h("small", { class: "faint" }, one.where)),
          h("div", { class: "tables" }, figures),
          one.table.length ? scale("−", "+", true) : null,
        );
      }),
    );
  } catch (error) {
    if (!signal.aborted) fill(place, trouble(error));
  }
}

/** @param {import("../main.js").Context} context */
export function tokenizer({ params, about, signal }) {
  const place = h("div", { class: "cut" });
  const text = textarea(params.text ?? t("example.cut"), () => show(), { id: "cut-text" });
  const show = () =>
    working(place, signal, async () => {
      const side = about.shape === "both" ? { source: text.value, text: "a" } : { text: text.value };
      const data = await post("tokens", { ...asked({ model: params.model }), ...side }, signal);
      const tokens = about.shape === "both" ? data.source : data.tokens;
      const letters = [...text.value].length;
      const shade = tokens.map((/** @type {any} */ _, /** @type {number} */ n) => [0.05, 0.3, 0.16][n % 3]);
      return [
        chips(tokens, { shade, title: (n) => `${t("id")} ${tokens[n].id} · ${tokens[n].bytes ?? ""}` }),
        h(
          "p",
          { class: "faint" },
          t("cut.count", { tokens: tokens.length, letters, rate: (tokens.length / Math.max(1, letters)).toFixed(2) }),
        ),
        h(
          "div",
          { class: "scroll" },
          h(
            "table",
            { class: "ids" },
            h(
              "tbody",
              {},
              h(
                "tr",
                {},
                h("th", {}, t("id")),
                tokens.slice(0, 80).map((/** @type {any} */ x) => h("td", {}, x.id)),
              ),
              h(
                "tr",
                {},
                h("th", {}, t("cut.piece")),
                tokens.slice(0, 80).map((/** @type {any} */ x) => h("td", {}, x.label)),
              ),
              h(
                "tr",
                {},
                h("th", {}, t("cut.bytes")),
                tokens.slice(0, 80).map((/** @type {any} */ x) => h("td", { class: "mono" }, x.bytes ?? "")),
              ),
            ),
          ),
        ),
      ];
    });
  if (!about.pieces) return card(t("cut.title"), h("p", { class: "notice" }, t("cut.none")));
  show();
  return card(
    t("cut.title"),
    h("p", { class: "faint" }, t("cut.lead")),
    field(t("text"), text),
    h("p", {}, h("button", { type: "button", id: "cut", onclick: show }, t("cut.go"))),
    place,
  );
}
