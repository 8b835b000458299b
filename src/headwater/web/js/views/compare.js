// Comparison of two models.
// @ts-check
import { postForBytes, post } from "../api.js";
import { replaceChildren, h, escapeInvisible } from "../dom.js";
import { exportButtons } from "../export.js";
import { matrix, colorbar } from "../matrix.js";
import { card, tokenChips, field, heading, formatPercent, select, withLoading } from "../components.js";
import { requestBody, routeUrl } from "../router.js";
import { formatCount, formatNumber, formatCompact, t, translateName } from "../i18n.js";
import { hasInput } from "./attention.js";
import { textForm } from "./input_form.js";
import { tokenChanges } from "./token_changes.js";

export const requires = "model";
const MAX_TOKENS = 40;

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const { params, modelInfo, catalog } = context;
  const names = modelNames(catalog);
  const other = params.compare ?? defaultComparison(names, modelInfo.name);
  const modelSelect = (/** @type {string} */ selected, /** @type {string} */ param, /** @type {string} */ label) =>
    select(
      [...new Set([selected, ...names])].filter(Boolean).map((n) => [n, n]),
      selected,
      (name) => context.setParams({ [param]: name, kind: null, layer: null, head: null }, true),
      label,
    );
  const container = h("div", { class: "stack" });
  replaceChildren(
    root,
    heading(t("compare.title"), t("compare.lead")),
    card(
      null,
      h(
        "div",
        { class: "two-columns" },
        field(t("compare.model"), modelSelect(modelInfo.name, "model", t("compare.model"))),
        field(t("compare.other"), modelSelect(other, "compare", t("compare.other"))),
      ),
      h(
        "button",
        { type: "button", id: "swap", onclick: () => context.setParams({ model: other, compare: modelInfo.name }, true) },
        t("compare.swap"),
      ),
    ),
    textForm(context),
    container,
  );
  const show = () =>
    withLoading(container, context.signal, async () => {
      const second = await post("model_info", { model: other }, context.signal);
      const pair = [modelInfo, second];
      const page = [factsTable(pair)];
      if (second.architecture !== modelInfo.architecture) return [...page, h("p", { class: "notice" }, t("compare.incompatible"))];
      if (!hasInput(context)) return [...page, h("p", { class: "notice" }, t("text.empty"))];
      const results = await fetchTraces(requestBody(context.params), pair, context.signal);
      return [
        ...page,
        ...tokenLosses(pair, results),
        tokenChanges(pair, results),
        nextTokens(pair, results),
        await heads(pair, results, context),
      ];
    });
  await show();
  return { onThemeChange: show };
}

/** Names of all models and of all checkpoints of runs. @param {any} catalog @returns {string[]} */
function modelNames(catalog) {
  return catalog.models.flatMap((/** @type {any} */ item) => {
    const run = catalog.runs.find((/** @type {any} */ r) => r.run === item.name);
    return [item.name, ...(run?.has_base ? [`${item.name}@base`] : []), ...(run?.checkpoints ?? []).map((/** @type {number} */ step) => `${item.name}@${step}`)];
  });
}

/** Default comparison: a run's base or first checkpoint, else another model. @param {string[]} names @param {string} ownName */
function defaultComparison(names, ownName) {
  if (ownName.endsWith("@base")) return ownName.replace(/@base$/, "");
  return (
    names.find((n) => n.startsWith(`${ownName.split("@")[0]}@`) && n !== ownName) ?? names.find((n) => n !== ownName) ?? ownName
  );
}

/**
 * Traces of both models on the first one's tokens, where their tokenizers agree; else each on its own tokens.
 * @param {any} body @param {any[]} pair @param {AbortSignal} signal
 */
async function fetchTraces(body, pair, signal) {
  const ids = (/** @type {any[]} */ tokens) => tokens.map((token) => token.id);
  /** @type {any[]} */
  const results = [];
  for (const modelInfo of pair) {
    const own = await post("attention", { ...body, model: modelInfo.name }, signal);
    const first = results[0]?.own ?? own;
    const sameTokens = modelInfo.tokenizer_size === pair[0].tokenizer_size && ids(own.source).join() === ids(first.source).join();
    const { tokens, source } = sameTokens ? first : own;
    const same = { model: modelInfo.name, ids: ids(tokens), ...(source.length ? { source_ids: ids(source) } : {}) };
    const trace = own === first || !sameTokens ? own : await post("attention", same, signal);
    const generates = modelInfo.has_lm_head && modelInfo.architecture !== "encoder";
    results.push({ own, trace, next: generates ? await post("next_token", { ...same, num_candidates: 8 }, signal) : null });
  }
  return results;
}

/** @param {any[]} pair */
function factsTable(pair) {
  const row = (/** @type {string} */ name, /** @type {(a: any) => string} */ f) => {
    const cells = pair.map(f);
    return h(
      "tr",
      { class: cells[0] === cells[1] ? "" : "different" },
      h("th", {}, name),
      cells.map((c) => h("td", {}, c)),
    );
  };
  return card(
    null,
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
            h("th", {}),
            pair.map((a) => h("th", {}, h("a", { href: routeUrl("start", { model: a.name }) }, a.name))),
          ),
        ),
        h(
          "tbody",
          {},
          row(t("compare.architecture"), (a) => t(`architecture.has.${a.architecture}`)),
          row(t("architecture.tree.parameters"), (a) => `${formatCompact(a.parameters)} (${formatCount(a.parameters)})`),
          row(t("layers.heads"), (a) => `${a.layers.join(" + ")} × ${a.heads}`),
          row("d_model", (a) => formatCount(a.d_model)),
          row(t("compare.vocab_size"), (a) => formatCount(a.tokenizer_size)),
        ),
      ),
    ),
  );
}

/** Tokens colored by surprisal, for each model. @param {any[]} pair @param {any[]} results */
function tokenLosses(pair, results) {
  if (!results[0].next) return [];
  const side = (/** @type {any} */ modelInfo, /** @type {any} */ one) => {
    const { tokens, token_probs } = one.next;
    const losses = token_probs.map((/** @type {number | null} */ p) => (p === null ? null : -Math.log(Math.max(p, 1e-9))));
    const known = losses.filter((/** @type {number | null} */ c) => c !== null);
    const mean = known.length
      ? known.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0) / known.length
      : null;
    const generated = one.own.generated ? one.own.next_tokens.map((/** @type {any} */ x) => x.text).join("") : "";
    return h(
      "div",
      {},
      h("h3", {}, modelInfo.name),
      generated ? h("p", { class: "model-message" }, escapeInvisible(generated)) : null,
      tokenChips(tokens, {
        intensity: losses.map((/** @type {number | null} */ c) => (c === null ? null : Math.min(1, c / 12))),
        title: (n) => (token_probs[n] === null ? "" : formatPercent(token_probs[n])),
      }),
      mean === null ? null : h("p", { class: "mean", "data-loss": mean }, t("compare.loss", { loss: formatNumber(mean) })),
    );
  };
  return [
    card(
      t("compare.losses"),
      h("p", { class: "muted" }, t("next_token.surprisal")),
      h("div", { class: "two-columns" }, side(pair[0], results[0]), side(pair[1], results[1])),
    ),
  ];
}

/** @param {any[]} pair @param {any[]} results */
function nextTokens(pair, results) {
  if (!results[0].next) return null;
  const max = Math.max(...results.flatMap((one) => one.next.candidates.map((/** @type {any} */ c) => c.probs[0])));
  const side = (/** @type {any} */ modelInfo, /** @type {any} */ one) =>
    h(
      "div",
      {},
      h("h3", {}, modelInfo.name),
      h(
        "ol",
        { class: "candidates" },
        one.next.candidates
          .slice(0, 8)
          .map((/** @type {any} */ row) =>
            h(
              "li",
              {},
              h(
                "span",
                { class: "candidate-row" },
                h("span", { class: "token-text" }, escapeInvisible(row.text)),
                h(
                  "span",
                  { class: "bar" },
                  h("i", { class: "value", style: { width: `${(100 * row.probs[0]) / max}%` } }),
                ),
                h("span", { class: "num strong" }, formatPercent(row.probs[0])),
              ),
            ),
          ),
      ),
    );
  return card(t("next_token.probabilities"), h("div", { class: "two-columns" }, side(pair[0], results[0]), side(pair[1], results[1])));
}

/** One head of each model, and the difference where the tokens agree. @param {any[]} pair @param {any[]} results
 * @param {import("../main.js").Context} context */
async function heads(pair, results, context) {
  const { params } = context;
  const kinds = Object.keys(results[0].trace.kinds).filter((k) => k in results[1].trace.kinds);
  const kind = kinds.includes(params.kind) ? params.kind : kinds[kinds.length - 1];
  const sizes = results.map((one) => one.trace.kinds[kind]);
  const minSize = (/** @type {string} */ name) => Math.min(...sizes.map((s) => s[name]));
  const inside = (/** @type {string | undefined} */ v, /** @type {number} */ n) =>
    Math.max(0, Math.min(n - 1, Number(v ?? 0) || 0));
  const [layer, head] = [inside(params.layer, minSize("layers")), inside(params.head, minSize("heads"))];
  /** @type {HTMLElement[]} */
  const figures = [];
  /** @type {{value: number[][], labels: {rows: string[], columns: string[]}}[]} */
  const values = [];
  for (const [n, one] of results.entries()) {
    const { source, tokens } = one.trace;
    const rows = (kind.startsWith("encoder.") && source.length ? source : tokens).slice(0, MAX_TOKENS);
    const columns = (kind === "decoder.cross_attn" ? source : rows).slice(0, MAX_TOKENS);
    const body = { trace_id: one.trace.trace_id, kind, layer, head, rows: [0, rows.length], columns: [0, columns.length] };
    const flat = new Float32Array(await postForBytes("attention_block", body, context.signal));
    const value = rows.map((/** @type {any} */ _, /** @type {number} */ r) =>
      Array.from(flat.subarray(r * columns.length, (r + 1) * columns.length)),
    );
    const labels = {
      rows: rows.map((/** @type {any} */ x) => x.label),
      columns: columns.map((/** @type {any} */ x) => x.label),
    };
    values.push({ value, labels });
    figures.push(figure(pair[n].name, matrix(value, { ...labels, power: 0.5, label: pair[n].name })));
  }
  const [firstLabels, secondLabels] = values.map(({ labels }) => JSON.stringify(labels));
  const difference = firstLabels === secondLabels ? values[1].value.map((row, r) => row.map((v, c) => v - values[0].value[r][c])) : null;
  if (difference)
    figures.push(
      figure(t("compare.difference"), matrix(difference, { ...values[0].labels, diverging: true, label: t("compare.difference") })),
    );
  const numbers = (/** @type {number} */ n) =>
    Array.from({ length: n }, (_, i) => /** @type {[string, string]} */ ([String(i), String(i)]));
  return card(
    t("compare.heads"),
    h(
      "div",
      { class: "row" },
      kinds.length > 1
        ? select(
            kinds.map((k) => [k, translateName("attention_kind", k)]),
            kind,
            (k) => context.setParams({ kind: k, layer: 0, head: 0 }),
            t("attention.kind"),
          )
        : null,
      t("layer"),
      select(numbers(minSize("layers")), String(layer), (v) => context.setParams({ layer: v }), t("layer")),
      t("head"),
      select(numbers(minSize("heads")), String(head), (v) => context.setParams({ head: v }), t("head")),
      h("span", { class: "spacer" }),
      difference ? colorbar("−", "+", true) : null,
      exportButtons(
        `compare-${pair[0].name}-${pair[1].name}`,
        () => figures[figures.length - 1].querySelector("canvas"),
        () => ({ models: pair.map((a) => a.name), kind, layer, head, weights: values.map((v) => v.value), difference }),
      ),
    ),
    h("div", { class: "matrices" }, figures),
    difference ? null : h("p", { class: "notice" }, t("compare.different_tokens")),
  );
}

/** @param {string} name @param {HTMLElement} picture */
function figure(name, picture) {
  return h("figure", {}, h("figcaption", {}, name), picture);
}
