// Anatomy: the model as a drawing, its parts down to formula and bytes, its positions, and how it cuts a text.
// @ts-check
import { post } from "../api.js";
import { chart } from "../chart.js";
import { css, fill, h, s } from "../dom.js";
import { keepers } from "../keep.js";
import { matrix, scale } from "../matrix.js";
import { card, chips, field, heading, textarea, trouble, working } from "../parts.js";
import { asked } from "../state.js";
import { bytes, count, percent, short, t, word } from "../words.js";

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
      return [drawing(data, params), difference(data), tree(data, params), costs(data), card(t("anatomy.positions"), h("p", { class: "faint" }, t("anatomy.positions.lead")), positions), tokenizer(context), code(data)];
    });
  await show();
  return { theme: show };
}

// ------------------------------------------------------------------------------------------------------- the drawing

/** @param {any} data @param {Record<string, string>} params */
function drawing(data, params) {
  const sides = Object.keys(data.stacks);
  const most = Math.max(...sides.map((side) => data.stacks[side].branches.length));
  const [wide, tall] = [250, 96 + most * 92 + 96];
  const width = sides.length * wide + (sides.length - 1) * 60;
  const picture = s("svg", { viewBox: `0 0 ${width} ${tall}`, width, height: tall, class: "plan", role: "img", "aria-label": t("anatomy.title"), "font-family": css("--font"), "font-size": 13 });
  sides.forEach((side, n) => column(picture, data, side, n * (wide + 60), wide, tall));
  if (sides.length === 2) {
    const at = tall - 96 - data.stacks.decoder.branches.findIndex((/** @type {any} */ b) => b.role === "cross_attn") * 92 - 46;
    picture.append(s("path", { d: `M${wide - 30},31 C${wide + 50},31 ${wide - 20},${at} ${wide + 72},${at}`, fill: "none", stroke: css("--warm"), "stroke-width": 2 }), s("path", { d: `M${wide + 66},${at - 5} l10,5 l-10,5 z`, fill: css("--warm") }));
  }
  return card(t("anatomy.drawing"), h("div", { class: "scroll" }, picture), h("div", { class: "row" }, h("span", { class: "faint" }, t("anatomy.drawing.lead")), h("span", { class: "grow" }), keepers(`anatomy-${params.model}`, () => picture, () => data)));
}

/** One stack from below (tokens) to above (states). @param {SVGElement} picture @param {any} data @param {string} side @param {number} x @param {number} wide @param {number} tall */
function column(picture, data, side, x, wide, tall) {
  const stack = data.stacks[side];
  const inner = stack.branches.length * 92;
  const bottom = tall - 76;
  picture.append(box(x + 30, bottom + 8, wide - 60, 40, t("part.embed"), stack.embed.position ? short_(stack.embed.position) : "", "--soft-fill", () => open(`${side}.embed`)));
  picture.append(s("text", { x: x + wide / 2, y: tall - 8, "text-anchor": "middle", fill: css("--soft") }, side === "encoder" && data.stacks.decoder ? t("text.source") : t("tokens")));
  const y0 = bottom - inner - 8;
  picture.append(s("rect", { x: x + 8, y: y0, width: wide - 16, height: inner + 6, rx: 12, fill: "none", stroke: css("--line"), "stroke-dasharray": stack.shared ? "5 4" : "" }));
  picture.append(s("text", { x: x + 14, y: y0 - 6, fill: css("--soft") }, `${t(`side.${side}`)} × ${stack.layers}${stack.shared ? ` (${t("shared")})` : ""}`));
  stack.branches.forEach((/** @type {any} */ branch, /** @type {number} */ n) => {
    const y = bottom - (n + 1) * 92 + 4;
    const under = branch.role === "ffn" ? [branch.d_ff && `d_ff ${branch.d_ff}`, branch.activation].filter(Boolean).join(" · ") : [`${branch.heads} ${t("heads")}`, branch.kv_heads && branch.kv_heads !== branch.heads ? `${branch.kv_heads} k/v` : "", branch.role === "self_attn" ? see(branch.sees) : ""].filter(Boolean).join(" · ");
    picture.append(box(x + 30, y + 4, wide - 60, 46, word("part", branch.role), under, branch.role === "ffn" ? "--ffn" : branch.role === "cross_attn" ? "--cross" : "--self", () => open(`${side}.layers.0.${branch.role}`)));
    const norm = Object.entries(branch.norms).filter(([, v]) => v).map(([slot, v]) => `${t(`slot.${slot}`)}: ${short_(String(v))}`).join(" · ");
    picture.append(s("text", { x: x + wide / 2, y: y + 66, "text-anchor": "middle", fill: css("--soft"), "font-size": 11 }, norm));
    picture.append(s("path", { d: `M${x + wide / 2},${y + 84} H${x + 18} V${y - 2} H${x + wide / 2}`, fill: "none", stroke: css("--soft"), "stroke-width": 1.2, "stroke-opacity": 0.55 }));
  });
  const top = data.stacks.decoder && side === "encoder" ? t("anatomy.memory") : t("part.head");
  picture.append(box(x + 30, 14, wide - 60, 34, top, "", "--soft-fill", () => open(side === "encoder" && data.stacks.decoder ? "encoder" : "head")));
}

/** @param {string} sees */
function see(sees) {
  return sees.startsWith("Past") ? t("sees.past") : sees.startsWith("Everyone") ? t("sees.all") : short_(sees);
}

/** A part's name without its settings. @param {string} code */
function short_(code) {
  return code.length > 26 ? code.split("(")[0] : code;
}

/** @param {number} x @param {number} y @param {number} w @param {number} k @param {string} words @param {string} under @param {string} fill_ @param {() => void} pick */
function box(x, y, w, k, words, under, fill_, pick) {
  const key = (/** @type {KeyboardEvent} */ e) => e.key === "Enter" && pick();
  return s("g", { class: "box", tabindex: 0, role: "button", "aria-label": words, onclick: pick, onkeydown: key }, s("rect", { x, y, width: w, height: k, rx: 8, fill: css(fill_), stroke: css("--line") }), s("text", { x: x + w / 2, y: y + (under ? k / 2 - 8 : k / 2), "text-anchor": "middle", "dominant-baseline": "central", fill: css("--ink") }, words), under ? s("text", { x: x + w / 2, y: y + k / 2 + 10, "text-anchor": "middle", "dominant-baseline": "central", fill: css("--soft"), "font-size": 11 }, under) : null);
}

/** Open the tree down to a path and go there. @param {string} path */
function open(path) {
  const all = [...document.querySelectorAll("details[data-path]")];
  const near = all.filter((d) => path.startsWith(/** @type {HTMLElement} */ (d).dataset.path ?? "") || (/** @type {HTMLElement} */ (d).dataset.path ?? "").startsWith(path));
  near.forEach((d) => path.startsWith(/** @type {HTMLElement} */ (d).dataset.path ?? " ") && d.setAttribute("open", ""));
  const last = near.find((d) => /** @type {HTMLElement} */ (d).dataset.path === path) ?? near[near.length - 1];
  last?.setAttribute("open", "");
  last?.scrollIntoView({ block: "center", behavior: "smooth" });
  /** @type {HTMLElement | null | undefined} */ (last?.querySelector("summary"))?.focus();
}

// ----------------------------------------------------------------------------------------------- encoder and decoder

/** @param {any} data */
function difference(data) {
  const row = (/** @type {string} */ key, /** @type {string} */ here) => h("tr", {}, h("th", {}, t(`differ.${key}`)), h("td", {}, t(`differ.${key}.encoder`)), h("td", {}, t(`differ.${key}.decoder`)), h("td", {}, here));
  const sides = Object.keys(data.stacks);
  const cross = data.stacks.decoder?.branches.some((/** @type {any} */ b) => b.role === "cross_attn");
  const mine = data.about.shape === "both" ? t("differ.has.both") : t(`differ.has.${data.about.shape}`);
  return card(t("differ.title"), h("div", { class: "scroll" }, h("table", { class: "differ" }, h("thead", {}, h("tr", {}, h("th", {}, ""), h("th", {}, t("side.encoder")), h("th", {}, t("side.decoder")), h("th", {}, t("differ.here")))), h("tbody", {}, row("sees", sides.map((side) => see(data.stacks[side].branches[0].sees ?? "")).join(" · ")), row("cross", cross ? t("yes") : t("no")), row("use", mine)))));
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
    const line = h("summary", {}, h("span", { class: "name" }, part.name, part.times > 1 ? h("small", {}, ` × ${part.times}`) : null), h("span", { class: "bar thin" }, h("i", { class: "now", style: { width: `${Math.max(0.4, 100 * share)}%` } })), h("span", { class: "num" }, short(part.parameters)), h("span", { class: "num" }, bytes(4 * part.parameters)), h("span", { class: "num" }, percent(share)));
    const facts = h("div", { class: "facts" }, formula ? h("p", { class: "formula" }, formula) : null, part.formula ? h("p", {}, t("tree.parameters"), " ", h("code", {}, part.formula), part.times > 1 ? ` (${t("tree.each")})` : "", ` = ${count(part.parameters)}`) : null, part.shapes ? h("p", {}, t("tree.shapes"), " ", part.shapes.map((/** @type {number[]} */ shape) => h("code", {}, `[${shape.join(" × ")}] `))) : null, part.same_as ? h("p", {}, t("tree.tied", { path: part.same_as })) : null, h("p", { class: "faint" }, `${part.kind} · ${part.path || "model"}`));
    return h("details", { "data-path": part.path, open: depth < 1 }, line, facts, (part.parts ?? []).map((/** @type {any} */ child) => node(child, depth + 1)));
  };
  return card(t("tree.title", { n: count(total) }), h("p", { class: "faint" }, t("tree.lead")), h("div", { class: "tree" }, node(data.count.tree, 0)), h("div", { class: "row" }, h("span", { class: "grow" }), keepers(`parts-${params.model}`, null, () => data.count)));
}

/** @param {any} data */
function costs(data) {
  const { bytes: held, flops, at } = data.count;
  const pairs = (/** @type {Record<string, number>} */ table, /** @type {(n: number) => string} */ shown) => Object.entries(table).map(([name, n]) => h("tr", {}, h("th", {}, word("cost", name)), h("td", { class: "num" }, shown(n))));
  return card(t("cost.title"), h("p", { class: "faint" }, t("cost.lead", { batch: at.batch, length: at.length, dtype: at.dtype })), h("div", { class: "two" }, h("table", {}, h("tbody", {}, pairs(held, bytes))), h("table", {}, h("tbody", {}, pairs(flops, (n) => `${short(n)} FLOP`)))));
}

/** @param {any} data */
function code(data) {
  return h("details", { class: "card" }, h("summary", {}, t("anatomy.code")), h("pre", {}, data.code));
}

// --------------------------------------------------------------------------------------- positions, and the tokenizer

/** @param {HTMLElement} place @param {import("../main.js").Context} context */
async function drawPositions(place, { params, signal }) {
  try {
    const { drawn } = await post("positions", { model: params.model }, signal);
    const palette = ["--accent", "--warm", "--third", "--soft"];
    fill(
      place,
      drawn.length ? null : h("p", { class: "notice" }, t("anatomy.positions.none")),
      drawn.map((/** @type {any} */ one) => {
        const figures = [];
        const width = Math.min(640, place.clientWidth || 640);
        if (one.table.length) figures.push(h("figure", {}, h("figcaption", {}, t(`position.${one.acts}.table`)), matrix(one.table.map((/** @type {number[]} */ row) => row.slice(0, 96)), { signed: true, cell: 6, label: one.where })));
        if (one.similarity.length) figures.push(h("figure", {}, h("figcaption", {}, t("position.similarity")), matrix(one.similarity, { signed: true, cell: 6, label: t("position.similarity") })));
        if (one.curves.length) figures.push(h("figure", {}, h("figcaption", {}, t(`position.${one.acts}.curve`)), chart({ curves: one.curves.slice(0, 12).map((/** @type {number[]} */ ys, /** @type {number} */ n) => ({ name: one.curves.length > 1 ? `${t("head")} ${n}` : t("position.score"), colour: css(palette[n % palette.length]), points: ys.map((y, i) => [one.offsets[i], y]) })), width, x: t("distance"), y: "", label: one.where })));
        return h("section", { class: "position" }, h("h3", {}, `${one.part} `, h("small", { class: "faint" }, one.where)), h("div", { class: "tables" }, figures), one.table.length ? scale("−", "+", true) : null);
      }),
    );
  } catch (error) {
    if (!signal.aborted) fill(place, trouble(error));
  }
}

/** @param {import("../main.js").Context} context */
function tokenizer({ params, about, signal }) {
  const place = h("div", { class: "cut" });
  const text = textarea(params.text ?? t("example.cut"), () => show(), { id: "cut-text" });
  const show = () =>
    working(place, signal, async () => {
      const side = about.shape === "both" ? { source: text.value, text: "a" } : { text: text.value };
      const data = await post("tokens", { ...asked({ model: params.model }), ...side }, signal);
      const tokens = about.shape === "both" ? data.source : data.tokens;
      const letters = [...text.value].length;
      const shade = tokens.map((/** @type {any} */ _, /** @type {number} */ n) => [0.05, 0.3, 0.16][n % 3]);
      return [chips(tokens, { shade, title: (n) => `${t("id")} ${tokens[n].id} · ${tokens[n].bytes ?? ""}` }), h("p", { class: "faint" }, t("cut.count", { tokens: tokens.length, letters, rate: (tokens.length / Math.max(1, letters)).toFixed(2) })), h("div", { class: "scroll" }, h("table", { class: "ids" }, h("tbody", {}, h("tr", {}, h("th", {}, t("id")), tokens.slice(0, 80).map((/** @type {any} */ x) => h("td", {}, x.id))), h("tr", {}, h("th", {}, t("cut.piece")), tokens.slice(0, 80).map((/** @type {any} */ x) => h("td", {}, x.label))), h("tr", {}, h("th", {}, t("cut.bytes")), tokens.slice(0, 80).map((/** @type {any} */ x) => h("td", { class: "mono" }, x.bytes ?? ""))))))];
    });
  if (!about.pieces) return card(t("cut.title"), h("p", { class: "notice" }, t("cut.none")));
  show();
  return card(t("cut.title"), h("p", { class: "faint" }, t("cut.lead")), field(t("text"), text), h("p", {}, h("button", { type: "button", id: "cut", onclick: show }, t("cut.go"))), place);
}
