// Compare: two models, or one at two checkpoints, on the same text: what they are, say, expect and look at.
// @ts-check
import { bytes, post } from "../api.js";
import { fill, h, visible } from "../dom.js";
import { keepers } from "../keep.js";
import { matrix, scale } from "../matrix.js";
import { card, chips, field, heading, percent, select, working } from "../parts.js";
import { asked, link } from "../state.js";
import { count, number, short, t, word } from "../words.js";
import { ready } from "./attention.js";
import { textForm } from "./text.js";

export const needs = "model";
const MOST = 40;

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const { params, about, shelf } = context;
  const names = known(shelf);
  const other = params.other ?? usual(names, about.name);
  const pick = (/** @type {string} */ chosen, /** @type {string} */ which) =>
    select(
      [...new Set([chosen, ...names])].filter(Boolean).map((n) => [n, n]),
      chosen,
      (name) => context.set({ [which]: name, kind: null, layer: null, head: null }, true),
      t(`compare.${which}`),
    );
  const place = h("div", { class: "stack" });
  fill(
    root,
    heading(t("compare.title"), t("compare.lead")),
    card(
      null,
      h(
        "div",
        { class: "two" },
        field(t("compare.model"), pick(about.name, "model")),
        field(t("compare.other"), pick(other, "other")),
      ),
    ),
    textForm(context),
    place,
  );
  const show = () =>
    working(place, context.signal, async () => {
      const second = await post("about", { model: other }, context.signal);
      const pair = [about, second];
      const page = [facts(pair)];
      if (second.shape !== about.shape) return [...page, h("p", { class: "notice" }, t("compare.shapes"))];
      if (!ready(context)) return [...page, h("p", { class: "notice" }, t("text.give"))];
      const seen = await looked(asked(context.params), pair, context.signal);
      return [...page, ...expected(pair, seen), nextTokens(pair, seen), await heads(pair, seen, context)];
    });
  await show();
  return { theme: show };
}

/** Every model, and every checkpoint of a run. @param {any} shelf @returns {string[]} */
function known(shelf) {
  return shelf.items.flatMap((/** @type {any} */ item) => {
    const run = shelf.runs.find((/** @type {any} */ r) => r.run === item.name);
    return [item.name, ...(run?.checkpoints ?? []).map((/** @type {number} */ step) => `${item.name}@${step}`)];
  });
}

/** Beside a run its first checkpoint, else the next model. @param {string[]} names @param {string} mine */
function usual(names, mine) {
  return (
    names.find((n) => n.startsWith(`${mine.split("@")[0]}@`) && n !== mine) ?? names.find((n) => n !== mine) ?? mine
  );
}

/**
 * Both read what the first one reads or writes, where they cut a text alike; else each its own tokens.
 * @param {any} body @param {any[]} pair @param {AbortSignal} signal
 */
async function looked(body, pair, signal) {
  const ids = (/** @type {any[]} */ tokens) => tokens.map((token) => token.id);
  /** @type {any[]} */
  const seen = [];
  for (const about of pair) {
    const own = await post("attention", { ...body, model: about.name }, signal);
    const first = seen[0]?.own ?? own;
    const alike = about.pieces === pair[0].pieces && ids(own.source).join() === ids(first.source).join();
    const { tokens, source } = alike ? first : own;
    const same = { model: about.name, ids: ids(tokens), ...(source.length ? { source_ids: ids(source) } : {}) };
    const trace = own === first || !alike ? own : await post("attention", same, signal);
    const writes = about.says_tokens && about.shape !== "encoder";
    seen.push({ own, trace, next: writes ? await post("next", { ...same, shown: 8 }, signal) : null });
  }
  return seen;
}

/** @param {any[]} pair */
function facts(pair) {
  const row = (/** @type {string} */ name, /** @type {(a: any) => string} */ f) => {
    const cells = pair.map(f);
    return h(
      "tr",
      { class: cells[0] === cells[1] ? "" : "differs" },
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
        { class: "differ" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", {}),
            pair.map((a) => h("th", {}, h("a", { href: link("start", { model: a.name }) }, a.name))),
          ),
        ),
        h(
          "tbody",
          {},
          row(t("compare.shape"), (a) => t(`differ.has.${a.shape}`)),
          row(t("tree.parameters"), (a) => `${short(a.parameters)} (${count(a.parameters)})`),
          row(t("layers.heads"), (a) => `${a.layers.join(" + ")} × ${a.heads}`),
          row("d_model", (a) => count(a.d_model)),
          row(t("compare.pieces"), (a) => count(a.pieces)),
        ),
      ),
    ),
  );
}

/** The text, coloured by how little each expected it. @param {any[]} pair @param {any[]} seen */
function expected(pair, seen) {
  if (!seen[0].next) return [];
  const side = (/** @type {any} */ about, /** @type {any} */ one) => {
    const { tokens, shares } = one.next;
    const costs = shares.map((/** @type {number | null} */ p) => (p === null ? null : -Math.log(Math.max(p, 1e-9))));
    const given = costs.filter((/** @type {number | null} */ c) => c !== null);
    const mean = given.length
      ? given.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0) / given.length
      : null;
    const written = one.own.generated ? one.own.follows.map((/** @type {any} */ x) => x.text).join("") : "";
    return h(
      "div",
      {},
      h("h3", {}, about.name),
      written ? h("p", { class: "answer" }, visible(written)) : null,
      chips(tokens, {
        shade: costs.map((/** @type {number | null} */ c) => (c === null ? null : Math.min(1, c / 12))),
        title: (n) => (shares[n] === null ? "" : percent(shares[n])),
      }),
      mean === null ? null : h("p", { class: "mean", "data-loss": mean }, t("compare.loss", { loss: number(mean) })),
    );
  };
  return [
    card(
      t("compare.expected"),
      h("p", { class: "faint" }, t("next.shade")),
      h("div", { class: "two" }, side(pair[0], seen[0]), side(pair[1], seen[1])),
    ),
  ];
}

/** @param {any[]} pair @param {any[]} seen */
function nextTokens(pair, seen) {
  if (!seen[0].next) return null;
  const most = Math.max(...seen.flatMap((one) => one.next.rows.map((/** @type {any} */ r) => r.shares[0])));
  const side = (/** @type {any} */ about, /** @type {any} */ one) =>
    h(
      "div",
      {},
      h("h3", {}, about.name),
      h(
        "ol",
        { class: "candidates" },
        one.next.rows
          .slice(0, 8)
          .map((/** @type {any} */ row) =>
            h(
              "li",
              {},
              h(
                "span",
                { class: "plain-row" },
                h("span", { class: "word" }, visible(row.text)),
                h(
                  "span",
                  { class: "bar" },
                  h("i", { class: "now", style: { width: `${(100 * row.shares[0]) / most}%` } }),
                ),
                h("span", { class: "num strong" }, percent(row.shares[0])),
              ),
            ),
          ),
      ),
    );
  return card(t("next.bars"), h("div", { class: "two" }, side(pair[0], seen[0]), side(pair[1], seen[1])));
}

/** One head of each, and their difference where both read the same tokens. @param {any[]} pair @param {any[]} seen
 * @param {import("../main.js").Context} context */
async function heads(pair, seen, context) {
  const { params } = context;
  const kinds = Object.keys(seen[0].trace.kinds).filter((k) => k in seen[1].trace.kinds);
  const kind = kinds.includes(params.kind) ? params.kind : kinds[kinds.length - 1];
  const sizes = seen.map((one) => one.trace.kinds[kind]);
  const least = (/** @type {string} */ name) => Math.min(...sizes.map((s) => s[name]));
  const inside = (/** @type {string | undefined} */ v, /** @type {number} */ n) =>
    Math.max(0, Math.min(n - 1, Number(v ?? 0) || 0));
  const [layer, head] = [inside(params.layer, least("layers")), inside(params.head, least("heads"))];
  /** @type {HTMLElement[]} */
  const figures = [];
  /** @type {{value: number[][], look: {rows: string[], columns: string[]}}[]} */
  const values = [];
  for (const [n, one] of seen.entries()) {
    const { source, tokens } = one.trace;
    const rows = (kind.startsWith("encoder.") && source.length ? source : tokens).slice(0, MOST);
    const columns = (kind === "decoder.cross_attn" ? source : rows).slice(0, MOST);
    const body = { trace: one.trace.trace, kind, layer, head, rows: [0, rows.length], columns: [0, columns.length] };
    const flat = new Float32Array(await bytes("block", body, context.signal));
    const value = rows.map((/** @type {any} */ _, /** @type {number} */ r) =>
      Array.from(flat.subarray(r * columns.length, (r + 1) * columns.length)),
    );
    const look = {
      rows: rows.map((/** @type {any} */ x) => x.label),
      columns: columns.map((/** @type {any} */ x) => x.label),
    };
    values.push({ value, look });
    figures.push(figure(pair[n].name, matrix(value, { ...look, power: 0.5, label: pair[n].name })));
  }
  const [mine, theirs] = values.map(({ look }) => JSON.stringify(look));
  const apart = mine === theirs ? values[1].value.map((row, r) => row.map((v, c) => v - values[0].value[r][c])) : null;
  if (apart)
    figures.push(
      figure(t("compare.apart"), matrix(apart, { ...values[0].look, signed: true, label: t("compare.apart") })),
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
            kinds.map((k) => [k, word("kind", k)]),
            kind,
            (k) => context.set({ kind: k, layer: 0, head: 0 }),
            t("attention.kind"),
          )
        : null,
      t("layer"),
      select(numbers(least("layers")), String(layer), (v) => context.set({ layer: v }), t("layer")),
      t("head"),
      select(numbers(least("heads")), String(head), (v) => context.set({ head: v }), t("head")),
      h("span", { class: "grow" }),
      apart ? scale("−", "+", true) : null,
      keepers(
        `compare-${pair[0].name}-${pair[1].name}`,
        () => figures[figures.length - 1].querySelector("canvas"),
        () => ({ models: pair.map((a) => a.name), kind, layer, head, weights: values.map((v) => v.value), apart }),
      ),
    ),
    h("div", { class: "tables" }, figures),
    apart ? null : h("p", { class: "notice" }, t("compare.other.tokens")),
  );
}

/** @param {string} name @param {HTMLElement} picture */
function figure(name, picture) {
  return h("figure", {}, h("figcaption", {}, name), picture);
}
