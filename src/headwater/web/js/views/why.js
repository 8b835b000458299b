// Why this word: what each token that was read adds to it, and what changes when a head is switched off.
// @ts-check
import { post } from "../api.js";
import { colour, ink } from "../colour.js";
import { fill, h, visible } from "../dom.js";
import { keepers } from "../keep.js";
import { scale } from "../matrix.js";
import { bar, card, choice, heading, percent, working } from "../parts.js";
import { asked } from "../state.js";
import { number, t, word } from "../words.js";
import { ready } from "./attention.js";
import { arrows } from "./heads.js";
import { barPicture, signedPicture } from "./gaps.js";
import { textForm } from "./text.js";

export const needs = "model";

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const place = h("div", { class: "stack" });
  fill(root, heading(t("why.title"), t("why.lead")), textForm(context, { more: { place: null, off: null } }), place);
  const { says_tokens, labels } = context.about;
  if (!says_tokens && !labels.length) return fill(place, h("p", { class: "notice" }, t("why.none")));
  if (!ready(context)) return fill(place, h("p", { class: "notice" }, t("text.give")));
  const credit = new Credit(context);
  const heads = says_tokens ? new Heads(context) : null;
  fill(place, credit.page, heads?.page);
  await credit.show(context.params);
  if (heads) heads.credit = credit;
  await heads?.show(context.params);
  return {
    update: (/** @type {Record<string, string>} */ params) => {
      if (["text", "source", "ids", "sids"].some((name) => context.params[name] !== params[name])) return false;
      const before = context.params;
      context.params = params;
      const moved = before.place !== params.place ? credit.show(params) : Promise.resolve();
      if (["off", "kind", "place"].some((name) => before[name] !== params[name])) moved.then(() => heads?.show(params));
      return true;
    },
    theme: () => (credit.draw(), heads?.show(context.params)),
  };
}

const FLOOR = 0.1; // nat: the scale of the colours never ends below it, so that noise stays pale
const CERTAIN = 0.9;

/** The place that is asked about; the server picks one where none is given. @param {Record<string, string>} params */
const placeOf = (params) => (params.place === undefined ? null : Math.max(0, Number(params.place) || 0));

/** With its sign. @param {number} v @param {number} digits */
const signed = (v, digits) => (v >= 0 ? "+" : "−") + Math.abs(v).toFixed(digits);

/** A signed share as a byte of the signed ramp. @param {number} v @param {number} most */
const byteOf = (v, most) => 127.5 + 127.5 * Math.max(-1, Math.min(1, most ? v / most : 0));

// ------------------------------------------------------------------------------------------- what each token adds

class Credit {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    /** @type {any} */
    this.data = null;
    this.place = h("div", { class: "credit" });
    const keep = keepers(
      `why-${context.params.model}`,
      () => (this.data ? creditPicture(this.data, this.read) : null),
      () => this.data,
    );
    this.legend = h("span", {});
    const row = h("div", { class: "row" }, this.legend, h("span", { class: "grow" }), keep);
    this.page = card(t("why.credit"), h("p", { class: "faint" }, t("why.credit.lead")), this.place, row);
  }

  /** @param {Record<string, string>} params */
  async show(params) {
    await working(this.place, this.context.signal, async () => {
      this.data = await post("why", { ...asked(params), place: placeOf(params) }, this.context.signal);
      this.draw();
    });
  }

  /** How many of the tokens were read before the word. */
  get read() {
    return this.context.about.shape === "encoder" ? this.data.tokens.length : this.data.place + 1;
  }

  draw() {
    const { data } = this;
    if (!data) return;
    const { read } = this;
    const largest = Math.max(...[...data.scores, ...data.source_scores].map(Math.abs), 0);
    const most = Math.max(largest, FLOOR);
    const end = most.toFixed(2);
    fill(this.legend, scale(`${t("why.against")} −${end}`, `+${end} nat ${t("why.for")}`, true));
    const certain = Math.exp(data.log_p) >= CERTAIN ? "why.certain" : "why.still";
    const gaps = this.context.about.shape === "encoder";
    const outputs = gaps
      ? data.tokens
      : data.tokens.map((/** @type {any} */ _, /** @type {number} */ n) => data.follows[n] ?? null);
    fill(
      this.place,
      this.context.about.says_tokens ? h("p", { class: "faint" }, t(gaps ? "why.choose.gap" : "why.choose")) : null,
      this.context.about.says_tokens ? this.outputs(outputs, data.place) : null,
      h("p", { class: "answer" }, t("why.says", { word: visible(data.output).trim(), p: percent(Math.exp(data.log_p)) })),
      largest < FLOOR ? h("p", { class: "notice", id: "nothing" }, t(certain, { floor: FLOOR })) : null,
      data.source.length ? this.side(t("text.source"), data.source, data.source_scores, most) : null,
      this.side(data.source.length ? t("why.written") : t("text"), data.tokens.slice(0, read), data.scores, most),
      h("p", { class: "faint" }, t(`why.by.${data.by}`)),
    );
    this.place.dataset.place = String(data.place);
  }

  /** Which word is asked about. @param {any[]} outputs @param {number} chosen */
  outputs(outputs, chosen) {
    const one = (/** @type {any} */ token, /** @type {number} */ n) =>
      h(
        "button",
        {
          type: "button",
          class: `chip${n === chosen ? " chosen" : ""}`,
          "aria-pressed": n === chosen ? "true" : "false",
          onclick: () => this.context.set({ place: n }),
        },
        token ? visible(token.text) : t("why.next"),
      );
    return h("div", { class: "chips", role: "group", "aria-label": t("why.choose") }, outputs.map(one));
  }

  /** @param {string} name @param {any[]} tokens @param {number[]} scores @param {number} most */
  side(name, tokens, scores, most) {
    const one = (/** @type {any} */ token, /** @type {number} */ n) => {
      const byte = byteOf(scores[n], most);
      const style = { background: colour(byte, true), color: ink(byte, true) };
      return h(
        "span",
        { class: "chip scored", style, "data-score": scores[n] },
        visible(token.text),
        h("small", {}, signed(scores[n], 2)),
      );
    };
    return h("div", {}, h("p", { class: "faint" }, name), h("div", { class: "chips" }, tokens.map(one)));
  }
}

/** @param {any} data @param {number} read */
function creditPicture(data, read) {
  const side = (/** @type {string} */ name, /** @type {any[]} */ tokens, /** @type {number[]} */ scores) => [
    { text: name, value: null, shown: "" },
    ...scores.map((score, n) => ({ text: tokens[n].label, value: score, shown: signed(score, 3) })),
  ];
  const rows = [
    ...(data.source.length ? side(t("text.source"), data.source, data.source_scores) : []),
    ...side(t(data.source.length ? "why.written" : "text"), data.tokens, data.scores.slice(0, read)),
  ];
  const word_ = t("why.says", { word: visible(data.output).trim(), p: percent(Math.exp(data.log_p)) });
  return signedPicture(rows, `${word_} · ${t("why.credit")} (nat)`, FLOOR);
}

// ------------------------------------------------------------------------------------------------- heads, switched off

class Heads {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    /** @type {Credit | null} */
    this.credit = null;
    const { shape } = context.about;
    this.kinds =
      shape === "both" ? ["decoder.cross_attn", "decoder.self_attn", "encoder.self_attn"] : [`${shape}.self_attn`];
    this.grid = h("div", {});
    this.result = h("div", {});
    this.bar = h("div", { class: "row" });
    this.legend = h("span", {});
    /** @type {Map<string, (number | null)[]>} the change without each head of a layer, by kind and layer */
    this.changes = new Map();
    this.page = card(
      t("why.heads"),
      h("p", { class: "faint" }, t("why.heads.lead")),
      this.bar,
      h("div", { class: "split even" }, this.grid, this.result),
    );
  }

  /** @param {Record<string, string>} params */
  async show(params) {
    const kind = this.kinds.includes(params.kind) ? params.kind : this.kinds[0];
    const { layers, heads } = this.context.about;
    const count = kind.startsWith("encoder.") ? layers[0] : layers[layers.length - 1];
    const off = (params.off ?? "0.0").split(".").map((n) => Number(n) || 0);
    const at = [Math.min(off[0], count - 1), Math.min(off[1] ?? 0, heads - 1)];
    fill(
      this.bar,
      this.kinds.length > 1
        ? choice(
            this.kinds.map((k) => [k, word("kind", k)]),
            kind,
            (k) => this.context.set({ kind: k, off: null }),
            t("attention.kind"),
          )
        : null,
      this.legend,
    );
    this.drawGrid(kind, count, heads, at);
    await this.turnOff(kind, at);
    for (let layer = 0; layer < count; layer++) {
      const key = `${kind} ${layer}`;
      if (this.changes.has(key)) continue;
      const found = await post("each_off", { ...asked(params), kind, layer }, this.context.signal).catch(() => null);
      if (!found || this.kind !== kind) return;
      this.changes.set(key, found.change);
      this.drawGrid(kind, count, heads, /** @type {number[]} */ (this.at));
    }
    this.grid.dataset.whole = kind;
  }

  /** @param {string} kind @param {number} layers @param {number} heads @param {number[]} at */
  drawGrid(kind, layers, heads, at) {
    this.kind = kind;
    this.at = at;
    const all = [...this.changes].filter(([key]) => key.startsWith(kind)).flatMap(([, row]) => row.map((v) => v ?? 0));
    const most = Math.max(...all.map(Math.abs), 0.01);
    fill(this.legend, scale(`${t("why.better")} −${number(most)}`, `+${number(most)} nat ${t("why.worse")}`, true));
    const focused = this.grid.contains(document.activeElement);
    const cell = (/** @type {number} */ layer, /** @type {number} */ head) => {
      const change = this.changes.get(`${kind} ${layer}`)?.[head];
      const byte = byteOf(change ?? 0, most);
      const on = layer === at[0] && head === at[1];
      const said = typeof change === "number" ? (change >= 0 ? "+" : "−") + number(Math.abs(change)) : "…";
      return h("button", {
        type: "button",
        class: "cell",
        "data-at": `${layer}.${head}`,
        "data-change": change ?? "",
        "aria-pressed": String(on),
        tabindex: on ? 0 : -1,
        "aria-label": `${t("layer")} ${layer}, ${t("head")} ${head}: ${said}`,
        title: `${layer}.${head}: ${said}`,
        style: change === undefined ? {} : { background: colour(byte, true) },
        onclick: () => this.context.set({ off: `${layer}.${head}` }),
      });
    };
    const rows = Array.from({ length: layers }, (_, layer) => [
      h("span", { class: "faint" }, String(layer)),
      ...Array.from({ length: heads }, (_, head) => cell(layer, head)),
    ]);
    const style = { "grid-template-columns": `2.2em repeat(${heads}, minmax(16px, 40px))` };
    fill(
      this.grid,
      h("p", { class: "faint" }, t("attention.grid.how")),
      h("div", { class: "scroll cells-box" }, h("div", { class: "thumbs", role: "group", style, onkeydown: arrows }, rows.flat())),
    );
    if (focused) /** @type {HTMLElement | null} */ (this.grid.querySelector("[aria-pressed=true]"))?.focus();
  }

  /** @param {string} kind @param {number[]} at */
  async turnOff(kind, [layer, head]) {
    await working(this.result, this.context.signal, async () => {
      const place = placeOf(this.context.params) ?? this.credit?.data?.place ?? -1;
      const body = { ...asked(this.context.params), kind, layer, head, place };
      const found = await post("without", body, this.context.signal);
      const most = Math.max(...found.choices.flatMap((/** @type {any} */ c) => c.shares));
      const rise = found.loss === null ? null : found.loss_without - found.loss;
      const rows = found.choices
        .slice(0, 10)
        .map((/** @type {any} */ c) =>
          h(
            "li",
            {},
            h(
              "span",
              { class: "plain-row", "data-id": c.id, "data-after": c.shares[1] },
              h("span", { class: "word" }, visible(c.text)),
              bar(c.shares[1], most, c.shares[0]),
              h("span", { class: "num" }, percent(c.shares[0])),
              h("span", { class: "num strong" }, percent(c.shares[1])),
            ),
          ),
        );
      const apart = Math.max(...found.apart, 1e-9);
      const chips = found.tokens.map((/** @type {any} */ token, /** @type {number} */ n) => {
        const byte = 30 + 200 * (found.apart[n] / apart);
        const title = `${number(found.apart[n])} nat`;
        return h(
          "span",
          { class: "chip", title, style: { background: colour(byte), color: ink(byte) } },
          visible(token.text),
        );
      });
      this.result.dataset.off = `${kind} ${layer} ${head}`;
      return [
        h("h3", {}, t("why.without", { layer, head, word: visible(found.tokens[found.place].text) })),
        rise === null ? null : h("p", {}, t("why.loss", { was: number(found.loss), now: number(found.loss_without) })),
        h("ol", { class: "candidates" }, rows),
        h("p", { class: "faint" }, t("why.apart")),
        h("div", { class: "chips" }, chips),
        h(
          "div",
          { class: "row" },
          h("span", { class: "grow" }),
          keepers(
            `without-${layer}-${head}`,
            () =>
              barPicture(
                found.choices,
                t("why.without", { layer, head, word: visible(found.tokens[found.place].text) }),
              ),
            () => found,
          ),
        ),
      ];
    });
  }
}
