// Next-token distribution and sampling.
// @ts-check
import { post } from "../api.js";
import { debounce, replaceChildren, h, escapeInvisible } from "../dom.js";
import { exportButtons } from "../export.js";
import { probabilityBar, card, tokenChips, heading, formatPercent, slider, withLoading } from "../components.js";
import { requestBody, encodeIds } from "../router.js";
import { formatCount, t, translateName } from "../i18n.js";
import { hasInput } from "./attention.js";
import { candidatesSvg, FillMaskView, logitLensTable } from "./fill_mask.js";
import { textForm } from "./input_form.js";

export const requires = "model";
const DEFAULTS = { temperature: 1, top_k: 0, top_p: 1 };

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const { modelInfo } = context;
  const container = h("div", { class: "stack" });
  const isEncoder = modelInfo.architecture === "encoder";
  replaceChildren(
    root,
    heading(t("next_token.title"), t(isEncoder ? "next_token.lead.mask" : "next_token.lead")),
    textForm(context, { target: false, submitLabel: isEncoder ? "next_token.predict" : "next_token.start", resetParams: { num_generated: null, position: null } }),
    container,
  );
  if (!modelInfo.has_lm_head) {
    replaceChildren(container, h("p", { class: "notice" }, t("next_token.none")));
    return;
  }
  const view = isEncoder ? new FillMaskView(container, context) : new NextTokenView(container, context);
  await view.show(context.params);
  return {
    update: (/** @type {Record<string, string>} */ params) => {
      context.params = params;
      view.show(params);
      return true;
    },
    onThemeChange: () => view.show(context.params),
  };
}

class NextTokenView {
  /** @param {HTMLElement} container @param {import("../main.js").Context} context */
  constructor(container, context) {
    this.container = container;
    this.context = context;
    /** @type {any} */
    this.data = null;
    this.text = h("div", {});
    this.bars = h("div", { class: "bars" });
    this.lens = h("div", {});
    /** @type {Map<string, string>} text of each explored branch, by its encoded ids */
    this.branches = new Map();
    this.otherBranches = h("div", {});
    this.debouncedRefresh = debounce(() => this.refresh(false), 40);
  }

  /** @param {Record<string, string>} params */
  async show(params) {
    if (!hasInput(this.context)) return replaceChildren(this.container, h("p", { class: "notice" }, t("text.empty")));
    if (!this.container.contains(this.bars)) replaceChildren(this.container, this.frame(params));
    await this.refresh(true);
  }

  /** @param {Record<string, string>} params */
  settings(params) {
    const read = (/** @type {keyof typeof DEFAULTS} */ name) => Number(params[name] ?? DEFAULTS[name]);
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
    const change = (/** @type {string} */ name, /** @type {number} */ v) => this.context.setParams({ [name]: v });
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
        format: (v) => v.toFixed(2),
        onChange: (v) => change("temperature", v),
      }),
      slider("top-k", {
        id: "top_k",
        value: now.top_k,
        min: 0,
        max: 50,
        step: 1,
        format: (v) => (v ? String(v) : off),
        onChange: (v) => change("top_k", v),
      }),
      slider("top-p", {
        id: "top_p",
        value: now.top_p,
        min: 0.05,
        max: 1,
        step: 0.01,
        format: (v) => (v < 1 ? v.toFixed(2) : off),
        onChange: (v) => change("top_p", v),
      }),
      slider(t("seed"), {
        id: "seed",
        value: now.seed,
        min: 0,
        max: 99,
        step: 1,
        format: (v) => String(v),
        onChange: (v) => change("seed", v),
      }),
    );
    const button = (/** @type {string} */ key, /** @type {() => void} */ f, main = false) =>
      h("button", { type: "button", class: main ? "primary" : "", id: key.replace(/[._]/g, "-"), onclick: f }, t(key));
    return [
      card(
        null,
        this.text,
        h(
          "div",
          { class: "row" },
          button("next_token.step", () => this.step(1), true),
          button("next_token.ten", () => this.step(10)),
          button("next_token.undo", () => this.undo()),
          h("span", { class: "spacer" }),
          this.exportButtons(),
        ),
        this.otherBranches,
      ),
      h(
        "div",
        { class: "two-columns wide-left" },
        card(t("next_token.probabilities"), h("p", { class: "muted" }, t("next_token.probabilities.lead")), this.bars),
        card(t("next_token.sampling"), sliders, h("p", { class: "muted" }, t("next_token.sampling.lead"))),
      ),
      card(t("logit_lens"), h("p", { class: "muted" }, t("logit_lens.lead")), this.lens),
    ];
  }

  exportButtons() {
    return exportButtons(
      `next-${this.context.params.model}`,
      () => (this.data ? candidatesSvg(this.data.candidates, t("next_token.probabilities")) : null),
      () => ({ model: this.context.params.model, ...this.data }),
    );
  }

  body() {
    const { temperature, top_k, top_p, seed } = this.settings(this.context.params);
    /** @type {Record<string, any>} */
    const body = { ...requestBody(this.context.params), temperature, seed, num_generated: this.numGenerated };
    if (top_k) body.top_k = top_k;
    if (top_p < 1) body.top_p = top_p;
    return body;
  }

  /** @param {boolean} inputChanged whether the text is another */
  async refresh(inputChanged) {
    const signal = this.context.signal;
    await withLoading(this.bars, signal, async () => {
      this.data = await post("next_token", this.body(), signal);
      this.renderTokens();
      return this.renderCandidates();
    });
    if (inputChanged && this.data && this.lensKey !== this.key()) {
      this.lensKey = this.key();
      replaceChildren(this.lens);
      await withLoading(this.lens, signal, async () =>
        logitLensTable(await post("logit_lens", { ...requestBody(this.context.params), num_positions: 8 }, signal)),
      );
    }
  }

  key() {
    return JSON.stringify(requestBody(this.context.params));
  }

  ids() {
    return this.data.tokens.map((/** @type {any} */ x) => x.id);
  }

  /** Navigate to the text with these token ids. @param {number[]} ids @param {number} numGenerated */
  setTokens(ids, numGenerated) {
    const source = this.data.source.length ? encodeIds(this.data.source.map((/** @type {any} */ x) => x.id)) : null;
    this.branches.set(encodeIds(this.ids()), this.data.tokens.map((/** @type {any} */ x) => x.text).join(""));
    this.context.setParams({ ids: encodeIds(ids), source_ids: source, num_generated: numGenerated }, true);
  }

  get numGenerated() {
    return Number(this.context.params.num_generated ?? 0) || 0;
  }

  /** @param {number} times */
  async step(times) {
    if (!this.data) return;
    let ids = this.ids();
    let data = this.data;
    let numGenerated = this.numGenerated;
    for (let n = 0; n < times && !data.is_eos; n++) {
      ids = [...ids, data.token_id];
      numGenerated += 1;
      const source_ids = this.data.source.length ? this.data.source.map((/** @type {any} */ x) => x.id) : undefined;
      if (n + 1 < times) data = await post("next_token", { ...this.body(), ids, source_ids, num_generated: numGenerated }, this.context.signal);
    }
    if (ids.length > this.ids().length) this.setTokens(ids, numGenerated);
  }

  undo() {
    if (this.numGenerated > 0 && this.data) this.setTokens(this.ids().slice(0, -1), this.numGenerated - 1);
  }

  renderTokens() {
    const { tokens, token_probs } = this.data;
    const intensity = token_probs.map((/** @type {number | null} */ p) =>
      p === null ? null : Math.min(1, -Math.log(Math.max(p, 1e-9)) / 12),
    );
    const title = (/** @type {number} */ n) =>
      `${tokens[n].id}` + (token_probs[n] === null ? "" : ` · ${formatPercent(token_probs[n])}`);
    const first = tokens.length - this.numGenerated;
    const cut = (/** @type {number} */ n) => (n >= first ? this.setTokens(this.ids().slice(0, n), n - first) : undefined);
    replaceChildren(
      this.text,
      this.data.source.length
        ? h(
            "p",
            { class: "muted" },
            t("text.source"),
            ": ",
            this.data.source.map((/** @type {any} */ x) => x.text).join(""),
          )
        : null,
      tokenChips(tokens, { intensity, title, onPick: this.numGenerated ? cut : undefined }),
      h("p", { class: "muted" }, this.data.is_eos ? t("next_token.eos") : t("next_token.surprisal")),
    );
    const now = encodeIds(this.ids());
    const others = [...this.branches].filter(([key]) => key !== now).slice(-6);
    replaceChildren(
      this.otherBranches,
      others.length
        ? h(
            "details",
            {},
            h("summary", {}, t("next_token.branches", { n: others.length })),
            h(
              "ul",
              { class: "name-list" },
              others.map(([key, text]) =>
                h(
                  "li",
                  {},
                  h(
                    "button",
                    {
                      type: "button",
                      class: "ghost",
                      onclick: () =>
                        this.context.setParams({ ids: key, num_generated: Math.max(0, key.split(".").length - first) }, true),
                    },
                    "…" + escapeInvisible(text.slice(-60)),
                  ),
                ),
              ),
            ),
          )
        : null,
    );
  }

  renderCandidates() {
    const { candidates, processors, num_allowed, token_id } = this.data;
    const last = processors.length - 1;
    const max = Math.max(...candidates.map((/** @type {any} */ c) => Math.max(c.probs[0], c.probs[last])));
    const names = h(
      "p",
      { class: "muted" },
      processors.flatMap((/** @type {any} */ processor, /** @type {number} */ n) => [
        h("span", { class: "stage-name" }, t("next_token.num_allowed", { name: processorLabel(processor), n: formatCount(num_allowed[n]) })),
        n < last ? " → " : "",
      ]),
    );
    return [
      names,
      h(
        "ol",
        { class: "candidates" },
        candidates.map((/** @type {any} */ row) =>
          h(
            "li",
            { class: row.id === token_id ? "selected" : "" },
            h(
              "button",
              {
                type: "button",
                "data-id": row.id,
                "data-before": row.probs[0],
                "data-after": row.probs[last],
                title: t("next_token.append"),
                onclick: () => this.setTokens([...this.ids(), row.id], this.numGenerated + 1),
              },
              h("span", { class: "token-text" }, escapeInvisible(row.text)),
              probabilityBar(row.probs[last], max, row.probs[0]),
              h("span", { class: "num" }, formatPercent(row.probs[0])),
              h("span", { class: "num strong" }, formatPercent(row.probs[last])),
            ),
          ),
        ),
      ),
    ];
  }
}

/** The name of a logits processor with its setting: temperature 0.7. @param {{name: string, value: number | null}} processor */
function processorLabel({ name, value }) {
  return `${translateName("processor", name)} ${value ?? ""}`.trim();
}
