// Model architecture.
// @ts-check
import { post } from "../api.js";
import { replaceChildren, h } from "../dom.js";
import { exportButtons } from "../export.js";
import { card, heading, withLoading } from "../components.js";
import { formatBytes, formatCount, formatPercent, formatCompact, t, translateName } from "../i18n.js";
import { architectureDiagram, maskLabel } from "./architecture_diagram.js";
import { renderPositions, tokenizerCard } from "./positions.js";

export const requires = "model";
export const input = "any";

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const { params, signal } = context;
  const container = h("div", { class: "stack" });
  replaceChildren(root, heading(t("architecture.title"), t("architecture.lead")), container);
  const show = () =>
    withLoading(container, signal, async () => {
      const data = await post("model_structure", { model: params.model }, signal);
      return [
        architectureDiagram(data, params),
        encoderDecoderTable(data),
        tree(data, params),
        costs(data),
        ...(context.modelInfo.input === "text" ? textCards(context) : []),
        code(data),
      ];
    });
  await show();
  return { onThemeChange: show };
}

/** Positions of tokens, and the tokenizer. @param {import("../main.js").Context} context */
function textCards(context) {
  const positions = h("div", {});
  renderPositions(positions, context);
  const lead = h("p", { class: "muted" }, t("architecture.positions.lead"));
  return [card(t("architecture.positions"), lead, positions), tokenizerCard(context)];
}

// ----------------------------------------------------------------------------------------------- encoder and decoder

/** @param {any} data */
function encoderDecoderTable(data) {
  const row = (/** @type {string} */ key, /** @type {string} */ thisModel) =>
    h(
      "tr",
      {},
      h("th", {}, t(`architecture.sides.${key}`)),
      h("td", {}, t(`architecture.sides.${key}.encoder`)),
      h("td", {}, t(`architecture.sides.${key}.decoder`)),
      h("td", {}, thisModel),
    );
  const sides = Object.keys(data.stacks);
  const cross = data.stacks.decoder?.branches.some((/** @type {any} */ b) => b.role === "cross_attn");
  const architecture = t(`architecture.has.${data.model_info.architecture}`);
  return card(
    t("architecture.sides.title"),
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: "comparison" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", {}, ""),
            h("th", {}, t("side.encoder")),
            h("th", {}, t("side.decoder")),
            h("th", {}, t("architecture.sides.here")),
          ),
        ),
        h(
          "tbody",
          {},
          row("mask", sides.map((side) => maskLabel(data.stacks[side].branches[0].mask ?? "")).join(" · ")),
          row("cross", cross ? t("yes") : t("no")),
          row("use", architecture),
        ),
      ),
    ),
  );
}

// ---------------------------------------------------------------------------------------------------------- module tree

const FORMULAS = /** @type {Record<string, string>} */ ({
  AttentionLayer: "softmax(q kᵀ / √head_dim + mask) v · W_out",
  CrossAttentionLayer: "softmax(q kᵀ / √head_dim) v · W_out      q: x,  k, v: memory",
  FeedForwardLayer: "W_down act(W_up x)",
  GatedFeedForwardLayer: "W_down (act(W_gate x) · W_up x)",
  LayerNormLayer: "(x − mean) / √(var + ε) · weight + bias",
  RMSNormLayer: "x / √(mean(x²) + ε) · weight",
  Linear: "x Wᵀ + b",
  Embedding: "table[id]",
  BlockLayer: "x ← post_norm(x + out_norm(layer(norm(x))))",
  TransformerStack: "x = embed(ids);  x = layer(x) × n;  final_norm(x)",
  LMHeadLayer: "logits = W_out x",
});

/** @param {any} data @param {Record<string, string>} params */
function tree(data, params) {
  const total = data.costs.parameters;
  const node = (/** @type {any} */ module, /** @type {number} */ depth) => {
    const formula = FORMULAS[module.kind];
    const fraction = module.parameters / total;
    const line = h(
      "summary",
      {},
      h("span", { class: "name" }, module.name, module.repeats > 1 ? h("small", {}, ` × ${module.repeats}`) : null),
      h("span", { class: "bar thin" }, h("i", { class: "value", style: { width: `${Math.max(0.4, 100 * fraction)}%` } })),
      h("span", { class: "num" }, formatCompact(module.parameters)),
      h("span", { class: "num" }, formatBytes(4 * module.parameters)),
      h("span", { class: "num" }, formatPercent(fraction)),
    );
    const facts = h(
      "div",
      { class: "facts" },
      formula ? h("p", { class: "formula" }, formula) : null,
      module.formula
        ? h(
            "p",
            {},
            t("architecture.tree.parameters"),
            " ",
            h("code", {}, module.formula),
            module.repeats > 1 ? ` (${t("architecture.tree.each")})` : "",
            ` = ${formatCount(module.parameters)}`,
          )
        : null,
      module.shapes
        ? h(
            "p",
            {},
            t("architecture.tree.shapes"),
            " ",
            module.shapes.map((/** @type {number[]} */ shape) => h("code", {}, `[${shape.join(" × ")}] `)),
          )
        : null,
      module.tied_to ? h("p", {}, t("architecture.tree.tied", { path: module.tied_to })) : null,
      h("p", { class: "muted" }, `${module.kind} · ${module.path || "model"}`),
    );
    return h(
      "details",
      { "data-path": module.path, open: depth < 1 },
      line,
      facts,
      (module.children ?? []).map((/** @type {any} */ child) => node(child, depth + 1)),
    );
  };
  return card(
    t("architecture.tree.title", { n: formatCount(total) }),
    h("p", { class: "muted" }, t("architecture.tree.lead")),
    h("div", { class: "tree" }, node(data.costs.tree, 0)),
    h(
      "div",
      { class: "row" },
      h("span", { class: "spacer" }),
      exportButtons(`modules-${params.model}`, null, () => data.costs),
    ),
  );
}

/** @param {any} data */
function costs(data) {
  const { bytes: memory, flops, settings } = data.costs;
  const pairs = (/** @type {Record<string, number>} */ table, /** @type {(n: number) => string} */ format) =>
    Object.entries(table).map(([name, n]) =>
      h("tr", {}, h("th", {}, translateName("cost", name)), h("td", { class: "num" }, format(n))),
    );
  return card(
    t("cost.title"),
    h("p", { class: "muted" }, t("cost.lead", { batch: settings.batch, length: settings.length, dtype: settings.dtype })),
    h(
      "div",
      { class: "two-columns" },
      h("table", {}, h("tbody", {}, pairs(memory, formatBytes))),
      h(
        "table",
        {},
        h(
          "tbody",
          {},
          pairs(flops, (n) => `${formatCompact(n)} FLOP`),
        ),
      ),
    ),
  );
}

/** @param {any} data */
function code(data) {
  return h("details", { class: "card" }, h("summary", {}, t("architecture.code")), h("pre", {}, data.code));
}
