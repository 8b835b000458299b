// Anatomy: the model as a drawing, its parts down to formula and bytes, its positions, and how it cuts a text.
// @ts-check
import { post } from "../api.js";
import { fill, h } from "../dom.js";
import { keepers } from "../keep.js";
import { card, heading, working } from "../parts.js";
import { bytes, count, percent, short, t, word } from "../words.js";
import { drawing, see } from "./drawing.js";
import { drawPositions, tokenizer } from "./order.js";

export const needs = "model";

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const { params, signal } = context;
  const place = h("div", { class: "stack" });
  fill(root, heading(t("anatomy.title"), t("anatomy.lead")), place);
  const show = () =>
    working(place, signal, async () => {
      const data = await post("anatomy", { model: params.model }, signal);
      const positions = h("div", {});
      drawPositions(positions, context);
      return [
        drawing(data, params),
        difference(data),
        tree(data, params),
        costs(data),
        card(t("anatomy.positions"), h("p", { class: "faint" }, t("anatomy.positions.lead")), positions),
        tokenizer(context),
        code(data),
      ];
    });
  await show();
  return { theme: show };
}

// ----------------------------------------------------------------------------------------------- encoder and decoder

/** @param {any} data */
function difference(data) {
  const row = (/** @type {string} */ key, /** @type {string} */ here) =>
    h(
      "tr",
      {},
      h("th", {}, t(`differ.${key}`)),
      h("td", {}, t(`differ.${key}.encoder`)),
      h("td", {}, t(`differ.${key}.decoder`)),
      h("td", {}, here),
    );
  const sides = Object.keys(data.stacks);
  const cross = data.stacks.decoder?.branches.some((/** @type {any} */ b) => b.role === "cross_attn");
  const mine = data.about.shape === "both" ? t("differ.has.both") : t(`differ.has.${data.about.shape}`);
  return card(
    t("differ.title"),
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: "differ" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", {}, ""),
            h("th", {}, t("side.encoder")),
            h("th", {}, t("side.decoder")),
            h("th", {}, t("differ.here")),
          ),
        ),
        h(
          "tbody",
          {},
          row("sees", sides.map((side) => see(data.stacks[side].branches[0].sees ?? "")).join(" · ")),
          row("cross", cross ? t("yes") : t("no")),
          row("use", mine),
        ),
      ),
    ),
  );
}

// ---------------------------------------------------------------------------------------------------------- the tree

const FORMULAS = /** @type {Record<string, string>} */ ({
  AttentionLayer: "softmax(q kᵀ / √head_dim + mask) v · W_out",
  CrossAttentionLayer: "softmax(q kᵀ / √head_dim) v · W_out      q: x,  k, v: memory",
  FeedForwardLayer: "W_down act(W_up x)",
  GatedFeedForwardLayer: "W_down (act(W_gate x) · W_up x)",
  LayerNorm: "(x − mean) / √(var + ε) · weight + bias",
  RMSNorm: "x / √(mean(x²) + ε) · weight",
  Linear: "x Wᵀ + b",
  Embedding: "table[id]",
  BlockLayer: "x ← post_norm(x + out_norm(layer(norm(x))))",
  TransformerStack: "x = embed(ids);  x = layer(x) × n;  final_norm(x)",
  LanguageScores: "logits = W_out x",
});

/** @param {any} data @param {Record<string, string>} params */
function tree(data, params) {
  const total = data.count.parameters;
  const node = (/** @type {any} */ part, /** @type {number} */ depth) => {
    const formula = FORMULAS[part.kind];
    const share = part.parameters / total;
    const line = h(
      "summary",
      {},
      h("span", { class: "name" }, part.name, part.times > 1 ? h("small", {}, ` × ${part.times}`) : null),
      h("span", { class: "bar thin" }, h("i", { class: "now", style: { width: `${Math.max(0.4, 100 * share)}%` } })),
      h("span", { class: "num" }, short(part.parameters)),
      h("span", { class: "num" }, bytes(4 * part.parameters)),
      h("span", { class: "num" }, percent(share)),
    );
    const facts = h(
      "div",
      { class: "facts" },
      formula ? h("p", { class: "formula" }, formula) : null,
      part.formula
        ? h(
            "p",
            {},
            t("tree.parameters"),
            " ",
            h("code", {}, part.formula),
            part.times > 1 ? ` (${t("tree.each")})` : "",
            ` = ${count(part.parameters)}`,
          )
        : null,
      part.shapes
        ? h(
            "p",
            {},
            t("tree.shapes"),
            " ",
            part.shapes.map((/** @type {number[]} */ shape) => h("code", {}, `[${shape.join(" × ")}] `)),
          )
        : null,
      part.same_as ? h("p", {}, t("tree.tied", { path: part.same_as })) : null,
      h("p", { class: "faint" }, `${part.kind} · ${part.path || "model"}`),
    );
    return h(
      "details",
      { "data-path": part.path, open: depth < 1 },
      line,
      facts,
      (part.parts ?? []).map((/** @type {any} */ child) => node(child, depth + 1)),
    );
  };
  return card(
    t("tree.title", { n: count(total) }),
    h("p", { class: "faint" }, t("tree.lead")),
    h("div", { class: "tree" }, node(data.count.tree, 0)),
    h(
      "div",
      { class: "row" },
      h("span", { class: "grow" }),
      keepers(`parts-${params.model}`, null, () => data.count),
    ),
  );
}

/** @param {any} data */
function costs(data) {
  const { bytes: held, flops, at } = data.count;
  const pairs = (/** @type {Record<string, number>} */ table, /** @type {(n: number) => string} */ shown) =>
    Object.entries(table).map(([name, n]) =>
      h("tr", {}, h("th", {}, word("cost", name)), h("td", { class: "num" }, shown(n))),
    );
  return card(
    t("cost.title"),
    h("p", { class: "faint" }, t("cost.lead", { batch: at.batch, length: at.length, dtype: at.dtype })),
    h(
      "div",
      { class: "two" },
      h("table", {}, h("tbody", {}, pairs(held, bytes))),
      h(
        "table",
        {},
        h(
          "tbody",
          {},
          pairs(flops, (n) => `${short(n)} FLOP`),
        ),
      ),
    ),
  );
}

/** @param {any} data */
function code(data) {
  return h("details", { class: "card" }, h("summary", {}, t("anatomy.code")), h("pre", {}, data.code));
}
