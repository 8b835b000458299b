// Walk: one forward pass, formula by formula, with the numbers of this model.
// @ts-check
import { post } from "../api.js";
import { fill, h, visible } from "../dom.js";
import { keepers } from "../keep.js";
import { matrix, scale } from "../matrix.js";
import { bar, card, heading, percent, select, working } from "../parts.js";
import { asked } from "../state.js";
import { count, t } from "../words.js";
import { ready } from "./attention.js";
import { textForm } from "./text.js";

export const needs = "model";

const WIDTH = 16; // rows and columns of a wide matrix that are drawn
const UNSIGNED = /^(A|M|p)(_\w+)?$/; // shares and permissions have no sign

/** @typedef {{name: string, shape: number[], rows: string, columns: string, values: (number | null)[][]}} Table */

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const place = h("div", { class: "stack" });
  fill(root, heading(t("walk.title"), t("walk.lead")), textForm(context, { go: "walk.go" }), place);
  let asked_ = "";
  /** @type {any} */
  let data = null;
  const show = async () =>
    working(place, context.signal, async () => {
      const { params } = context;
      if (!ready(context)) return h("p", { class: "notice" }, t("text.give"));
      const body = { ...asked(params), layer: Number(params.layer ?? 0) || 0, head: Number(params.head ?? 0) || 0 };
      if (JSON.stringify(body) !== asked_) data = await post("walk", body, context.signal);
      asked_ = JSON.stringify(body);
      return tour(data, context);
    });
  await show();
  return {
    update: (/** @type {Record<string, string>} */ params) => {
      const same = ["text", "source", "ids", "sids"].every((name) => params[name] === context.params[name]);
      context.params = params;
      if (same) show();
      return same;
    },
    theme: show,
  };
}

/** @param {any} data @param {import("../main.js").Context} context */
function tour(data, { params, set }) {
  const { facts, steps } = data;
  const spoken = steps.some((/** @type {any} */ one) => one.step === "output");
  const all = spoken ? steps : [...steps, { step: "output", key: "output", formulas: [], tables: [], weights: [] }];
  const names = all.map((/** @type {any} */ one) => one.key);
  const at = Math.max(0, names.indexOf(params.at ?? names[0]));
  const numbers = (/** @type {number} */ n) =>
    Array.from({ length: n }, (_, i) => /** @type {[string, string]} */ ([String(i), String(i)]));
  const bar_ = h(
    "div",
    { class: "row" },
    t("layer"),
    select(numbers(facts.layers), params.layer ?? "0", (v) => set({ layer: v }), t("layer")),
    t("head"),
    select(numbers(facts.heads), params.head ?? "0", (v) => set({ head: v }), t("head")),
    h("span", { class: "grow" }),
    keepers(
      `walk-${params.model}`,
      () => document.querySelector(".step canvas"),
      () => data,
    ),
  );
  const trail = h(
    "ol",
    { class: "trail" },
    all.map((/** @type {any} */ one, /** @type {number} */ n) =>
      h(
        "li",
        {},
        h(
          "button",
          {
            type: "button",
            "data-value": one.key,
            "aria-current": n === at ? "step" : null,
            class: n < at ? "past" : "",
            onclick: () => set({ at: one.key }, true),
          },
          t(`walk.${one.step}`),
        ),
      ),
    ),
  );
  const known = new Map(steps.flatMap((/** @type {any} */ one) => [...one.tables, ...one.weights]).map((x) => [x.name, x]));
  const shown = [step(all[at], data, known), all[at].step === "output" ? output(data) : null];
  const move = (/** @type {number} */ by) =>
    h(
      "button",
      {
        type: "button",
        class: by > 0 ? "main" : "",
        id: by > 0 ? "walk-on" : "walk-back",
        disabled: !names[at + by],
        onclick: () => set({ at: names[at + by] }, true),
      },
      t(by > 0 ? "walk.on" : "walk.back"),
    );
  return [
    card(null, bar_, trail),
    h(
      "section",
      { class: "card step", "data-step": names[at] },
      h("h2", {}, `${at + 1}. ${t(`walk.${all[at].step}`)}`),
      shown,
      h("div", { class: "row" }, move(-1), move(1)),
    ),
  ];
}

/** Names in a formula, in the order in which they stand. @param {string} formula @returns {string[]} */
function namesIn(formula) {
  return formula.replace(/[ᵀ²]/g, " ").match(/table\[id\]|[\p{L}_][\p{L}\p{N}_]*/gu) ?? [];
}

/** @param {any} step_ @param {any} data @param {Map<string, Table>} known every matrix of the walk */
function step(step_, data, known) {
  const used = [...new Set(step_.formulas.flatMap((/** @type {string} */ f) => [...namesIn(f.split(" = ")[1]), namesIn(f)[0]]))]
    .filter((name) => known.has(name))
    .map((name) => /** @type {Table} */ (known.get(name)));
  const weights = used.filter((table) => table.rows === "dims");
  const tables = used.filter((table) => table.rows !== "dims");
  const unsigned = tables.length > 0 && tables.every((table) => UNSIGNED.test(table.name));
  return h(
    "div",
    {},
    step_.formulas.length ? h("p", { class: "formula" }, step_.formulas.join("\n")) : null,
    step_.formulas.length ? h("p", { class: "prose" }, t(`walk.${step_.step}.text`, words(step_, data)), " ", note(step_, data)) : null,
    h(
      "div",
      { class: "tables" },
      tables.map((table) => figure(table, data, step_)),
    ),
    tables.length ? (unsigned ? scale("0", "1") : scale("−", "+", true)) : null,
    weights.length
      ? h(
          "details",
          {},
          h("summary", {}, t("walk.weights", { names: weights.map((table) => table.name).join(", ") })),
          h(
            "div",
            { class: "tables" },
            weights.map((table) => figure(table, data, step_)),
          ),
        )
      : null,
  );
}

/** What a message may name. @param {any} step_ @param {any} data */
function words(step_, { facts }) {
  const [from, to] = step_.own ?? [0, 0];
  return { d: facts.d_model, k: facts.head_dim, h: step_.heads ?? facts.heads, from, to: to - 1, n: step_.layer ?? 0, vocab: count(step_.vocab ?? 0) };
}

/** @param {any} step_ @param {any} data */
function note(step_, { facts }) {
  if (step_.step === "position")
    return t(step_.kind === "NoPosition" ? "walk.position.none" : "walk.position.some", { kind: step_.kind });
  if (step_.step === "mask") return t(step_.sees === "Everyone" ? "walk.mask.all" : "walk.mask.past");
  if (step_.step === "scores" && step_.usual) return t("walk.scores.usual", { k: facts.head_dim });
  return "";
}

/** @param {Table} table @param {any} data @param {any} step_ */
function figure(table, data, step_) {
  /** @type {Record<string, string[] | undefined>} */
  const named = {
    tokens: data.tokens.map((/** @type {any} */ x) => x.label),
    source: data.source.map((/** @type {any} */ x) => x.label),
    words: step_.words?.map((/** @type {any} */ x) => x.label),
  };
  const wide = table.columns === "dims";
  const values = table.values
    .slice(0, table.rows === "dims" ? WIDTH : undefined)
    .map((row) => row.slice(0, wide ? WIDTH : undefined));
  const side = (/** @type {string} */ what, /** @type {number} */ n) =>
    named[what]?.length === n ? named[what] : undefined;
  const cut = table.shape[1] > values[0].length || table.shape[0] > values.length;
  return h(
    "figure",
    { "data-table": table.name },
    h(
      "figcaption",
      {},
      h("strong", {}, table.name),
      " ",
      h(
        "span",
        { class: "faint" },
        `[${table.shape.join(" × ")}]`,
        cut ? ` · ${t("walk.first", { rows: values.length, n: values[0].length })}` : "",
      ),
    ),
    matrix(values, {
      rows: side(table.rows, values.length),
      columns: side(table.columns, values[0].length),
      signed: !UNSIGNED.test(table.name),
      cell: wide ? 24 : 34,
      numbers: !wide,
      none: "−∞",
      label: table.name,
    }),
  );
}

/** @param {any} data */
function output(data) {
  if (!data.output.length) return h("p", { class: "notice" }, t("walk.output.none"));
  const most = data.output[0].share;
  return h(
    "ol",
    { class: "candidates" },
    data.output.map((/** @type {any} */ x) =>
      h(
        "li",
        {},
        h(
          "span",
          { class: "plain-row" },
          h("span", { class: "word" }, visible(x.text)),
          bar(x.share, most),
          h("span", { class: "num strong" }, percent(x.share)),
        ),
      ),
    ),
  );
}
