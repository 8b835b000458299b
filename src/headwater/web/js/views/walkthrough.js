// Walkthrough of one forward pass.
// @ts-check
import { post } from "../api.js";
import { replaceChildren, h, escapeInvisible } from "../dom.js";
import { exportButtons } from "../export.js";
import { matrix, colorbar } from "../matrix.js";
import { probabilityBar, card, heading, formatPercent, select, withLoading } from "../components.js";
import { requestBody } from "../router.js";
import { formatCount, t } from "../i18n.js";
import { hasInput } from "./attention.js";
import { textForm } from "./input_form.js";

export const requires = "model";

const MAX_DRAWN = 16; // rows and columns drawn of a wide matrix
const NON_NEGATIVE = /^(A|M|p)(_\w+)?$/; // weights and masks are non-negative

/** @typedef {{name: string, shape: number[], rows: string, columns: string, values: (number | null)[][]}} Matrix */

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const container = h("div", { class: "stack" });
  replaceChildren(root, heading(t("walkthrough.title"), t("walkthrough.lead")), textForm(context, { submitLabel: "walkthrough.run" }), container);
  let lastRequest = "";
  /** @type {any} */
  let data = null;
  const show = async () =>
    withLoading(container, context.signal, async () => {
      const { params } = context;
      if (!hasInput(context)) return h("p", { class: "notice" }, t("text.empty"));
      const body = { ...requestBody(params), layer: Number(params.layer ?? 0) || 0, head: Number(params.head ?? 0) || 0 };
      if (JSON.stringify(body) !== lastRequest) data = await post("walkthrough", body, context.signal);
      lastRequest = JSON.stringify(body);
      return walkthrough(data, context);
    });
  await show();
  return {
    update: (/** @type {Record<string, string>} */ params) => {
      const same = ["text", "source", "ids", "source_ids"].every((name) => params[name] === context.params[name]);
      context.params = params;
      if (same) show();
      return same;
    },
    onThemeChange: show,
  };
}

/** @param {any} data @param {import("../main.js").Context} context */
function walkthrough(data, { params, setParams }) {
  const { sizes, steps } = data;
  const hasLogits = steps.some((/** @type {any} */ one) => one.type === "logits");
  const allSteps = hasLogits ? steps : [...steps, { type: "logits", key: "logits", formulas: [], matrices: [], weights: [] }];
  const names = allSteps.map((/** @type {any} */ one) => one.key);
  const at = Math.max(0, names.indexOf(params.step ?? names[0]));
  const numbers = (/** @type {number} */ n) =>
    Array.from({ length: n }, (_, i) => /** @type {[string, string]} */ ([String(i), String(i)]));
  const controls = h(
    "div",
    { class: "row" },
    t("layer"),
    select(numbers(sizes.layers), params.layer ?? "0", (v) => setParams({ layer: v }), t("layer")),
    t("head"),
    select(numbers(sizes.heads), params.head ?? "0", (v) => setParams({ head: v }), t("head")),
    h("span", { class: "spacer" }),
    exportButtons(
      `walkthrough-${params.model}`,
      () => document.querySelector(".step canvas"),
      () => data,
    ),
  );
  const stepList = h(
    "ol",
    { class: "step-list" },
    allSteps.map((/** @type {any} */ one, /** @type {number} */ n) =>
      h(
        "li",
        {},
        h(
          "button",
          {
            type: "button",
            "data-value": one.key,
            "aria-current": n === at ? "step" : null,
            class: n < at ? "done" : "",
            onclick: () => setParams({ step: one.key }, true),
          },
          t(`walkthrough.${one.type}`),
        ),
      ),
    ),
  );
  const matrices = steps.flatMap((/** @type {any} */ one) => [...one.matrices, ...one.weights]);
  const matricesByName = new Map(matrices.map((/** @type {any} */ matrix) => [matrix.name, matrix]));
  const content = [stepSection(allSteps[at], data, matricesByName), allSteps[at].type === "logits" ? output(data) : null];
  const move = (/** @type {number} */ by) =>
    h(
      "button",
      {
        type: "button",
        class: by > 0 ? "primary" : "",
        id: by > 0 ? "walkthrough-next" : "walkthrough-previous",
        disabled: !names[at + by],
        onclick: () => setParams({ step: names[at + by] }, true),
      },
      t(by > 0 ? "walkthrough.next" : "walkthrough.previous"),
    );
  return [
    card(null, controls, stepList),
    h(
      "section",
      { class: "card step", "data-step": names[at] },
      h("h2", {}, `${at + 1}. ${t(`walkthrough.${allSteps[at].type}`)}`),
      content,
      h("div", { class: "row" }, move(-1), move(1)),
    ),
  ];
}

/** Names of matrices in a formula, in order. @param {string} formula @returns {string[]} */
function namesIn(formula) {
  return formula.replace(/[ᵀ²]/g, " ").match(/table\[id\]|[\p{L}_][\p{L}\p{N}_]*/gu) ?? [];
}

/** @param {any} step @param {any} data @param {Map<string, Matrix>} matricesByName every matrix of the walkthrough */
function stepSection(step, data, matricesByName) {
  const used = [...new Set(step.formulas.flatMap((/** @type {string} */ f) => [...namesIn(f.split(" = ")[1]), namesIn(f)[0]]))]
    .filter((name) => matricesByName.has(name))
    .map((name) => /** @type {Matrix} */ (matricesByName.get(name)));
  const weights = used.filter((item) => item.rows === "dims");
  const matrices = used.filter((item) => item.rows !== "dims");
  const nonNegative = matrices.length > 0 && matrices.every((item) => NON_NEGATIVE.test(item.name));
  return h(
    "div",
    {},
    step.formulas.length ? h("p", { class: "formula" }, step.formulas.join("\n")) : null,
    step.formulas.length ? h("p", { class: "prose" }, t(`walkthrough.${step.type}.text`, messageValues(step, data)), " ", stepNote(step, data)) : null,
    h(
      "div",
      { class: "matrices" },
      matrices.map((item) => figure(item, data, step)),
    ),
    matrices.length ? (nonNegative ? colorbar("0", "1") : colorbar("−", "+", true)) : null,
    weights.length
      ? h(
          "details",
          {},
          h("summary", {}, t("walkthrough.weights", { names: weights.map((item) => item.name).join(", ") })),
          h(
            "div",
            { class: "matrices" },
            weights.map((item) => figure(item, data, step)),
          ),
        )
      : null,
  );
}

/** Values for the placeholders of a message. @param {any} step @param {any} data */
function messageValues(step, { sizes }) {
  const [from, to] = step.head_columns ?? [0, 0];
  return { d: sizes.d_model, k: sizes.head_dim, h: step.heads ?? sizes.heads, from, to: to - 1, n: step.layer ?? 0, vocab: formatCount(step.vocab_size ?? 0) };
}

/** @param {any} step @param {any} data */
function stepNote(step, { sizes }) {
  if (step.type === "position")
    return t(step.kind === "NoPosition" ? "walkthrough.position.none" : "walkthrough.position.some", { kind: step.kind });
  if (step.type === "mask") return t(step.mask === "Bidirectional" ? "walkthrough.mask.bidirectional" : "walkthrough.mask.causal");
  if (step.type === "scores" && step.is_standard_scale) return t("walkthrough.scores.standard", { k: sizes.head_dim });
  return "";
}

/** @param {Matrix} item @param {any} data @param {any} step */
function figure(item, data, step) {
  /** @type {Record<string, string[] | undefined>} */
  const axisLabels = {
    tokens: data.tokens.map((/** @type {any} */ x) => x.label),
    source: data.source.map((/** @type {any} */ x) => x.label),
    vocab: step.candidates?.map((/** @type {any} */ x) => x.label),
  };
  const isWide = item.columns === "dims";
  const values = item.values
    .slice(0, item.rows === "dims" ? MAX_DRAWN : undefined)
    .map((row) => row.slice(0, isWide ? MAX_DRAWN : undefined));
  const side = (/** @type {string} */ what, /** @type {number} */ n) =>
    axisLabels[what]?.length === n ? axisLabels[what] : undefined;
  const cut = item.shape[1] > values[0].length || item.shape[0] > values.length;
  return h(
    "figure",
    { "data-matrix": item.name },
    h(
      "figcaption",
      {},
      h("strong", {}, item.name),
      " ",
      h(
        "span",
        { class: "muted" },
        `[${item.shape.join(" × ")}]`,
        cut ? ` · ${t("walkthrough.first", { rows: values.length, n: values[0].length })}` : "",
      ),
    ),
    matrix(values, {
      rows: side(item.rows, values.length),
      columns: side(item.columns, values[0].length),
      diverging: !NON_NEGATIVE.test(item.name),
      cell: isWide ? 24 : 34,
      numbers: !isWide,
      nullText: "−∞",
      label: item.name,
    }),
  );
}

/** @param {any} data */
function output(data) {
  if (!data.top_tokens.length) return h("p", { class: "notice" }, t("walkthrough.logits.none"));
  const max = data.top_tokens[0].prob;
  return h(
    "ol",
    { class: "candidates" },
    data.top_tokens.map((/** @type {any} */ x) =>
      h(
        "li",
        {},
        h(
          "span",
          { class: "candidate-row" },
          h("span", { class: "token-text" }, escapeInvisible(x.text)),
          probabilityBar(x.prob, max),
          h("span", { class: "num strong" }, formatPercent(x.prob)),
        ),
      ),
    ),
  );
}
