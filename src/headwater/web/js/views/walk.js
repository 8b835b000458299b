// Walk: one forward pass, formula by formula, with the numbers of this model.
// @ts-check
import { post } from "../api.js";
import { fill, h, visible } from "../dom.js";
import { keepers } from "../keep.js";
import { matrix, scale } from "../matrix.js";
import { bar, card, heading, percent, select, working } from "../parts.js";
import { asked } from "../state.js";
import { t } from "../words.js";
import { ready } from "./attention.js";
import { textForm } from "./text.js";

export const needs = "model";

const PLAIN = new Set(["A", "M"]); // shares and permissions have no sign

/** @type {Record<string, (step: any, facts: any) => string>} */
const FORMULAS = {
  embedding: (step) => (step.scale === 1 ? "E = table[id]" : `E = table[id] · ${step.scale}`),
  position: (step) => (["NoPosition"].includes(step.kind) ? "x = E" : "x = E + P"),
  qkv: () => "q = x W_q    k = x W_k    v = x W_v",
  scores: (_, facts) => `S = q kᵀ · ${facts.scale}    (1/√${facts.head_dim})`,
  mask: () => "S_ij ← −∞  where  M_ij = 0",
  softmax: () => "A_ij = exp(S_ij) / Σ_j exp(S_ij)",
  values: () => "z_i = Σ_j A_ij v_j",
  heads: () => "out = [z¹; z²; …] W_o",
  add_norm: (step) =>
    step.norms.some((/** @type {string} */ n) => n.includes("post_norm"))
      ? "x ← norm(x + out)"
      : "x ← x + attention(norm(x))",
  cross: () => "x ← x + attention(q from x; k, v from the source)",
  ffn: (step) => (step.gated ? "ffn(x) = W_down (act(W_gate x) · W_up x)" : "ffn(x) = W_down act(W_up x)"),
  block: () => "y = x + ffn(x)",
};

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const place = h("div", { class: "stack" });
  fill(root, heading(t("walk.title"), t("walk.lead")), textForm(context, { go: "walk.go" }), place);
  const show = async () =>
    working(place, context.signal, async () => {
      const { params } = context;
      if (!ready(context)) return h("p", { class: "notice" }, t("text.give"));
      const data = await post(
        "walk",
        { ...asked(params), layer: Number(params.layer ?? 0) || 0, head: Number(params.head ?? 0) || 0 },
        context.signal,
      );
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
  const { facts, steps, tokens } = data;
  const names = [...steps.map((/** @type {any} */ s) => s.step), "output"];
  const at = Math.max(0, names.indexOf(params.at ?? "embedding"));
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
    names.map((name, n) =>
      h(
        "li",
        {},
        h(
          "button",
          {
            type: "button",
            "aria-current": n === at ? "step" : null,
            class: n < at ? "past" : "",
            onclick: () => set({ at: name }, true),
          },
          t(`walk.${name}`),
        ),
      ),
    ),
  );
  const shown = names[at] === "output" ? output(data) : step(steps[at], data, tokens);
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
      h("h2", {}, `${at + 1}. ${t(`walk.${names[at]}`)}`),
      shown,
      h("div", { class: "row" }, move(-1), move(1)),
    ),
  ];
}

/** @param {any} step_ @param {any} data @param {any[]} tokens */
function step(step_, data, tokens) {
  const labels = tokens.map((x) => x.label);
  const formula = FORMULAS[step_.step](step_, data.facts);
  const note =
    step_.step === "position"
      ? t(step_.kind === "NoPosition" ? "walk.position.none" : "walk.position.some", { kind: step_.kind })
      : step_.step === "mask"
        ? t(step_.sees === "Everyone" ? "walk.mask.all" : "walk.mask.past")
        : step_.step === "qkv" && step_.turned !== "NoPosition"
          ? t("walk.turned", { kind: step_.turned })
          : "";
  const tables = step_.tables.map((/** @type {any} */ table) => {
    const square = table.columns === "tokens";
    const signed = !PLAIN.has(table.name);
    const look = {
      rows: table.rows === "tokens" ? labels.slice(0, table.values.length) : undefined,
      columns: square ? labels : undefined,
      signed,
      cell: square ? 34 : 24,
      numbers: square,
      label: table.name,
    };
    return h(
      "figure",
      {},
      h(
        "figcaption",
        {},
        h("strong", {}, table.name),
        " ",
        h(
          "span",
          { class: "faint" },
          `[${table.shape.join(" × ")}]`,
          !square && table.shape[1] > table.values[0]?.length
            ? ` · ${t("walk.first", { n: table.values[0].length })}`
            : "",
        ),
      ),
      matrix(table.values, look),
    );
  });
  return h(
    "div",
    {},
    h("p", { class: "formula" }, formula),
    h(
      "p",
      { class: "prose" },
      t(`walk.${step_.step}.text`, { d: data.facts.d_model, k: data.facts.head_dim, h: data.facts.heads }),
      " ",
      note,
    ),
    h("div", { class: "tables" }, tables),
    step_.tables.every((/** @type {any} */ x) => PLAIN.has(x.name)) ? scale("0", "1") : scale("−", "+", true),
  );
}

/** @param {any} data */
function output(data) {
  if (!data.output.length) return h("p", { class: "notice" }, t("walk.output.none"));
  const most = data.output[0].share;
  return h(
    "div",
    {},
    h("p", { class: "formula" }, "p = softmax(W_out y)"),
    h("p", { class: "prose" }, t("walk.output.text")),
    h(
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
    ),
  );
}
