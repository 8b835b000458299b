// Position encodings and the tokenizer.
// @ts-check
import { post } from "../api.js";
import { chart } from "../chart.js";
import { cssVariable, replaceChildren, h } from "../dom.js";
import { matrix, colorbar } from "../matrix.js";
import { card, tokenChips, field, textarea, errorNotice, withLoading } from "../components.js";
import { requestBody } from "../router.js";
import { t } from "../i18n.js";

/** @param {HTMLElement} container @param {import("../main.js").Context} context */
export async function renderPositions(container, { params, signal }) {
  try {
    const { effects } = await post("positions", { model: params.model }, signal);
    const colors = ["--accent", "--accent-2", "--accent-3", "--text-muted"];
    replaceChildren(
      container,
      effects.length ? null : h("p", { class: "notice" }, t("architecture.positions.none")),
      effects.map((/** @type {any} */ effect) => {
        const figures = [];
        const width = Math.min(640, container.clientWidth || 640);
        if (effect.table.length)
          figures.push(
            h(
              "figure",
              {},
              h("figcaption", {}, t(`position.${effect.kind}.table`)),
              matrix(
                effect.table.map((/** @type {number[]} */ row) => row.slice(0, 96)),
                { diverging: true, cell: 6, label: effect.path },
              ),
            ),
          );
        if (effect.similarity.length)
          figures.push(
            h(
              "figure",
              {},
              h("figcaption", {}, t("position.similarity")),
              matrix(effect.similarity, { diverging: true, cell: 6, label: t("position.similarity") }),
            ),
          );
        if (effect.curves.length)
          figures.push(
            h(
              "figure",
              {},
              chart({
                curves: effect.curves.slice(0, 12).map((/** @type {number[]} */ ys, /** @type {number} */ n) => ({
                  name: effect.curves.length > 1 ? `${t("head")} ${n}` : t("position.score"),
                  color: cssVariable(colors[n % colors.length]),
                  points: ys.map((y, i) => [effect.offsets[i], y]),
                })),
                width,
                x: t("distance"),
                title: t(`position.${effect.kind}.curve`),
              }),
            ),
          );
        return h(
          "section",
          { class: "position" },
          h("h3", {}, `${effect.part} `, h("small", { class: "muted" }, effect.path)),
          h("div", { class: "matrices" }, figures),
          effect.table.length ? colorbar("−", "+", true) : null,
        );
      }),
    );
  } catch (error) {
    if (!signal.aborted) replaceChildren(container, errorNotice(error));
  }
}

/** @param {import("../main.js").Context} context */
export function tokenizerCard({ params, modelInfo, signal }) {
  const container = h("div", { class: "tokenized" });
  const text = textarea(params.text ?? t("example.tokenizer"), () => show(), { id: "tokenizer-text" });
  const show = () =>
    withLoading(container, signal, async () => {
      const side = modelInfo.architecture === "encoder-decoder" ? { source: text.value, text: "a" } : { text: text.value };
      const data = await post("tokenize", { ...requestBody({ model: params.model }), ...side }, signal);
      const tokens = modelInfo.architecture === "encoder-decoder" ? data.source : data.tokens;
      const characters = [...text.value].length;
      const intensity = tokens.map((/** @type {any} */ _, /** @type {number} */ n) => [0.05, 0.3, 0.16][n % 3]);
      return [
        tokenChips(tokens, { intensity, title: (n) => `${t("id")} ${tokens[n].id} · ${tokens[n].bytes ?? ""}` }),
        h(
          "p",
          { class: "muted" },
          t("tokenizer.count", { tokens: tokens.length, characters, rate: (tokens.length / Math.max(1, characters)).toFixed(2) }),
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
                h("th", {}, t("tokenizer.token")),
                tokens.slice(0, 80).map((/** @type {any} */ x) => h("td", {}, x.label)),
              ),
              h(
                "tr",
                {},
                h("th", {}, t("tokenizer.bytes")),
                tokens.slice(0, 80).map((/** @type {any} */ x) => h("td", { class: "mono" }, x.bytes ?? "")),
              ),
            ),
          ),
        ),
      ];
    });
  if (!modelInfo.tokenizer_size) return card(t("tokenizer.title"), h("p", { class: "notice" }, t("tokenizer.none")));
  show();
  return card(
    t("tokenizer.title"),
    h("p", { class: "muted" }, t("tokenizer.lead")),
    field(t("text"), text),
    h("p", {}, h("button", { type: "button", id: "tokenize", onclick: show }, t("tokenizer.run"))),
    container,
  );
}
