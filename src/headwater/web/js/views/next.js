// Next token: step through generation, see what each chooser leaves, branch at any token.
// @ts-check
import { post } from "../api.js";
import { calm, fill, h, visible } from "../dom.js";
import { keepers } from "../keep.js";
import { bar, card, chips, heading, percent, slider, working } from "../parts.js";
import { asked, packed } from "../state.js";
import { count, t, word } from "../words.js";
import { ready } from "./attention.js";
import { barPicture, Gaps, lensTable } from "./gaps.js";
import { textForm } from "./text.js";

export const needs = "model";
const FIRST = { temperature: 1, top_k: 0, top_p: 1 };

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const { about } = context;
  const place = h("div", { class: "stack" });
  const gaps = about.shape === "encoder";
  fill(
    root,
    heading(t("next.title"), t(gaps ? "next.lead.gaps" : "next.lead")),
    textForm(context, { target: false, go: gaps ? "next.fill" : "next.begin", more: { new: null, place: null } }),
    place,
  );
  if (!about.says_tokens) {
    fill(place, h("p", { class: "notice" }, t("next.none")));
    return;
  }
  const shown = gaps ? new Gaps(place, context) : new Steps(place, context);
  await shown.show(context.params);
  return {
    update: (/** @type {Record<string, string>} */ params) => {
      context.params = params;
      shown.show(params);
      return true;
    },
    theme: () => shown.show(context.params),
  };
}

class Steps {
  /** @param {HTMLElement} place @param {import("../main.js").Context} context */
  constructor(place, context) {
    this.place = place;
    this.context = context;
    /** @type {any} */
    this.data = null;
    this.text = h("div", {});
    this.bars = h("div", { class: "bars" });
    this.lens = h("div", {});
    /** @type {Map<string, string>} the text of each branch that was taken, by its address */
    this.branches = new Map();
    this.other = h("div", {});
    this.ask = calm(() => this.refresh(false), 40);
  }

  /** @param {Record<string, string>} params */
  async show(params) {
    if (!ready(this.context)) return fill(this.place, h("p", { class: "notice" }, t("text.give")));
    if (!this.place.contains(this.bars)) fill(this.place, this.frame(params));
    await this.refresh(true);
  }

  /** @param {Record<string, string>} params */
  settings(params) {
    const read = (/** @type {keyof typeof FIRST} */ name) => Number(params[name] ?? FIRST[name]);
    return {
      temperature: read("temperature"),
      top_k: read("top_k"),
      top_p: read("top_p"),
      seed: Number(params.seed ?? 0) || 0,
    };
  }

  /** @param {Record<string, string>} params */
  frame(params) {
    const now = this.settings(params);
    const change = (/** @type {string} */ name, /** @type {number} */ v) => this.context.set({ [name]: v });
    const off = t("off");
    const sliders = h(
      "div",
      { class: "sliders" },
      slider(t("temperature"), {
        id: "temperature",
        value: now.temperature,
        min: 0.05,
        max: 2,
        step: 0.05,
        shown: (v) => v.toFixed(2),
        change: (v) => change("temperature", v),
      }),
      slider("top-k", {
        id: "top_k",
        value: now.top_k,
        min: 0,
        max: 50,
        step: 1,
        shown: (v) => (v ? String(v) : off),
        change: (v) => change("top_k", v),
      }),
      slider("top-p", {
        id: "top_p",
        value: now.top_p,
        min: 0.05,
        max: 1,
        step: 0.01,
        shown: (v) => (v < 1 ? v.toFixed(2) : off),
        change: (v) => change("top_p", v),
      }),
      slider(t("seed"), {
        id: "seed",
        value: now.seed,
        min: 0,
        max: 99,
        step: 1,
        shown: (v) => String(v),
        change: (v) => change("seed", v),
      }),
    );
    const button = (/** @type {string} */ key, /** @type {() => void} */ f, main = false) =>
      h("button", { type: "button", class: main ? "main" : "", id: key.replace(".", "-"), onclick: f }, t(key));
    return [
      card(
        null,
        this.text,
        h(
          "div",
          { class: "row" },
          button("next.step", () => this.step(1), true),
          button("next.ten", () => this.step(10)),
          button("next.back", () => this.back()),
          h("span", { class: "grow" }),
          this.keep(),
        ),
        this.other,
      ),
      h(
        "div",
        { class: "two wide-left" },
        card(t("next.bars"), h("p", { class: "faint" }, t("next.bars.lead")), this.bars),
        card(t("next.choosers"), sliders, h("p", { class: "faint" }, t("next.choosers.lead"))),
      ),
      card(t("lens"), h("p", { class: "faint" }, t("lens.lead")), this.lens),
    ];
  }

  keep() {
    return keepers(
      `next-${this.context.params.model}`,
      () => (this.data ? barPicture(this.data.rows, t("next.bars")) : null),
      () => ({ model: this.context.params.model, ...this.data }),
    );
  }

  body() {
    const { temperature, top_k, top_p, seed } = this.settings(this.context.params);
    /** @type {Record<string, any>} */
    const body = { ...asked(this.context.params), temperature, seed, new: Number(this.context.params.new ?? 0) || 0 };
    if (top_k) body.top_k = top_k;
    if (top_p < 1) body.top_p = top_p;
    return body;
  }

  /** @param {boolean} moved whether the text is another */
  async refresh(moved) {
    const signal = this.context.signal;
    await working(this.bars, signal, async () => {
      this.data = await post("next", this.body(), signal);
      this.drawText();
      return this.drawBars();
    });
    if (moved && this.data && this.lensOf !== this.key()) {
      this.lensOf = this.key();
      fill(this.lens);
      await working(this.lens, signal, async () =>
        lensTable(await post("lens", { ...asked(this.context.params), places: 8 }, signal)),
      );
    }
  }

  key() {
    return JSON.stringify(asked(this.context.params));
  }

  ids() {
    return this.data.tokens.map((/** @type {any} */ x) => x.id);
  }

  /** The address of a text that goes on with these ids. @param {number[]} ids @param {number} said */
  go(ids, said) {
    const source = this.data.source.length ? packed(this.data.source.map((/** @type {any} */ x) => x.id)) : null;
    this.branches.set(packed(this.ids()), this.data.tokens.map((/** @type {any} */ x) => x.text).join(""));
    this.context.set({ ids: packed(ids), sids: source, new: said }, true);
  }

  get said() {
    return Number(this.context.params.new ?? 0) || 0;
  }

  /** @param {number} times */
  async step(times) {
    if (!this.data) return;
    let ids = this.ids();
    let data = this.data;
    let said = this.said;
    for (let n = 0; n < times && !data.ends; n++) {
      ids = [...ids, data.token];
      said += 1;
      const source_ids = this.data.source.length ? this.data.source.map((/** @type {any} */ x) => x.id) : undefined;
      if (n + 1 < times) data = await post("next", { ...this.body(), ids, source_ids, new: said }, this.context.signal);
    }
    if (ids.length > this.ids().length) this.go(ids, said);
  }

  back() {
    if (this.said > 0 && this.data) this.go(this.ids().slice(0, -1), this.said - 1);
  }

  drawText() {
    const { tokens, shares } = this.data;
    const shade = shares.map((/** @type {number | null} */ p) =>
      p === null ? null : Math.min(1, -Math.log(Math.max(p, 1e-9)) / 12),
    );
    const title = (/** @type {number} */ n) =>
      `${tokens[n].id}` + (shares[n] === null ? "" : ` · ${percent(shares[n])}`);
    const first = tokens.length - this.said;
    const cut = (/** @type {number} */ n) => (n >= first ? this.go(this.ids().slice(0, n), n - first) : undefined);
    fill(
      this.text,
      this.data.source.length
        ? h(
            "p",
            { class: "faint" },
            t("text.source"),
            ": ",
            this.data.source.map((/** @type {any} */ x) => x.text).join(""),
          )
        : null,
      chips(tokens, { shade, title, pick: this.said ? cut : undefined }),
      h("p", { class: "faint" }, this.data.ends ? t("next.ends") : t("next.shade")),
    );
    const now = packed(this.ids());
    const others = [...this.branches].filter(([key]) => key !== now).slice(-6);
    fill(
      this.other,
      others.length
        ? h(
            "details",
            {},
            h("summary", {}, t("next.branches", { n: others.length })),
            h(
              "ul",
              { class: "names" },
              others.map(([key, text]) =>
                h(
                  "li",
                  {},
                  h(
                    "button",
                    {
                      type: "button",
                      class: "quiet",
                      onclick: () =>
                        this.context.set({ ids: key, new: Math.max(0, key.split(".").length - first) }, true),
                    },
                    "…" + visible(text.slice(-60)),
                  ),
                ),
              ),
            ),
          )
        : null,
    );
  }

  drawBars() {
    const { rows, stages, left, token } = this.data;
    const last = stages.length - 1;
    const most = Math.max(...rows.map((/** @type {any} */ r) => Math.max(r.shares[0], r.shares[last])));
    const names = h(
      "p",
      { class: "faint" },
      stages.flatMap((/** @type {any} */ stage, /** @type {number} */ n) => [
        h("span", { class: "stage-name" }, t("next.left", { stage: n ? chooser(stage) : t("the.model"), n: count(left[n]) })),
        n < last ? " → " : "",
      ]),
    );
    return [
      names,
      h(
        "ol",
        { class: "candidates" },
        rows.map((/** @type {any} */ row) =>
          h(
            "li",
            { class: row.id === token ? "chosen" : "" },
            h(
              "button",
              {
                type: "button",
                "data-id": row.id,
                "data-before": row.shares[0],
                "data-after": row.shares[last],
                title: t("next.take"),
                onclick: () => this.go([...this.ids(), row.id], this.said + 1),
              },
              h("span", { class: "word" }, visible(row.text)),
              bar(row.shares[last], most, row.shares[0]),
              h("span", { class: "num" }, percent(row.shares[0])),
              h("span", { class: "num strong" }, percent(row.shares[last])),
            ),
          ),
        ),
      ),
    ];
  }
}

/** In words: temperature 0.7. @param {{by: string, value: number | null}} stage */
function chooser({ by, value }) {
  return `${word("chooser", by)} ${value ?? ""}`.trim();
}
