// Token attribution and head ablation.
// @ts-check
import { post } from "../api.js";
import { color, textColor } from "../color.js";
import { replaceChildren, h, escapeInvisible } from "../dom.js";
import { exportButtons } from "../export.js";
import { colorbar } from "../matrix.js";
import { probabilityBar, card, segmentedControl, heading, formatPercent, withLoading } from "../components.js";
import { requestBody } from "../router.js";
import { formatNumber, t, translateName } from "../i18n.js";
import { hasInput } from "./attention.js";
import { onArrowKey } from "./head_grid.js";
import { candidatesSvg, divergingBarsSvg } from "./fill_mask.js";
import { textForm } from "./input_form.js";

export const requires = "model";

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const container = h("div", { class: "stack" });
  replaceChildren(root, heading(t("attribution.title"), t("attribution.lead")), textForm(context, { resetParams: { position: null, ablate: null } }), container);
  const { has_lm_head, labels } = context.modelInfo;
  if (!has_lm_head && !labels.length) return replaceChildren(container, h("p", { class: "notice" }, t("attribution.none")));
  if (!hasInput(context)) return replaceChildren(container, h("p", { class: "notice" }, t("text.empty")));
  const attribution = new AttributionView(context);
  const heads = has_lm_head ? new AblationView(context) : null;
  replaceChildren(container, attribution.page, heads?.page);
  await attribution.show(context.params);
  if (heads) heads.attribution = attribution;
  await heads?.show(context.params);
  return {
    update: (/** @type {Record<string, string>} */ params) => {
      if (["text", "source", "ids", "source_ids"].some((name) => context.params[name] !== params[name])) return false;
      const before = context.params;
      context.params = params;
      const updated = before.position !== params.position ? attribution.show(params) : Promise.resolve();
      if (["ablate", "kind", "position"].some((name) => before[name] !== params[name])) updated.then(() => heads?.show(params));
      return true;
    },
    onThemeChange: () => (attribution.draw(), heads?.show(context.params)),
  };
}

const MIN_SCALE_NAT = 0.1; // nat: minimum end of the color scale, so that noise stays pale
const HIGH_PROB = 0.9;

/** The position to explain; the server picks one where it is null. @param {Record<string, string>} params */
const positionParam = (params) => (params.position === undefined ? null : Math.max(0, Number(params.position) || 0));

/** A number with its sign. @param {number} v @param {number} digits */
const signed = (v, digits) => (v >= 0 ? "+" : "−") + Math.abs(v).toFixed(digits);

/** A signed value as a byte of the diverging colormap. @param {number} v @param {number} max */
const divergingByte = (v, max) => 127.5 + 127.5 * Math.max(-1, Math.min(1, max ? v / max : 0));

// ------------------------------------------------------------------------------------------- token attribution

class AttributionView {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    /** @type {any} */
    this.data = null;
    this.container = h("div", { class: "token-attribution" });
    const buttons = exportButtons(
      `attribution-${context.params.model}`,
      () => (this.data ? attributionSvg(this.data, this.numPromptTokens) : null),
      () => this.data,
    );
    this.legend = h("span", {});
    const row = h("div", { class: "row" }, this.legend, h("span", { class: "spacer" }), buttons);
    this.page = card(t("attribution.tokens"), h("p", { class: "muted" }, t("attribution.tokens.lead")), this.container, row);
  }

  /** @param {Record<string, string>} params */
  async show(params) {
    await withLoading(this.container, this.context.signal, async () => {
      this.data = await post("attribution", { ...requestBody(params), position: positionParam(params) }, this.context.signal);
      this.draw();
    });
  }

  /** Number of tokens before the output. */
  get numPromptTokens() {
    return this.context.modelInfo.architecture === "encoder" ? this.data.tokens.length : this.data.position + 1;
  }

  draw() {
    const { data } = this;
    if (!data) return;
    const { numPromptTokens } = this;
    const largest = Math.max(...[...data.attributions, ...data.source_attributions].map(Math.abs), 0);
    const max = Math.max(largest, MIN_SCALE_NAT);
    const end = max.toFixed(2);
    replaceChildren(this.legend, colorbar(`${t("attribution.negative")} −${end}`, `+${end} nat ${t("attribution.positive")}`, true));
    const certain = Math.exp(data.logprob) >= HIGH_PROB ? "attribution.certain" : "attribution.small";
    const isEncoder = this.context.modelInfo.architecture === "encoder";
    const outputs = isEncoder
      ? data.tokens
      : data.tokens.map((/** @type {any} */ _, /** @type {number} */ n) => data.next_tokens[n] ?? null);
    replaceChildren(
      this.container,
      this.context.modelInfo.has_lm_head ? h("p", { class: "muted" }, t(isEncoder ? "attribution.choose.mask" : "attribution.choose")) : null,
      this.context.modelInfo.has_lm_head ? this.outputChips(outputs, data.position) : null,
      h("p", { class: "model-message" }, t("attribution.output", { word: escapeInvisible(data.output).trim(), p: formatPercent(Math.exp(data.logprob)) })),
      largest < MIN_SCALE_NAT ? h("p", { class: "notice", id: "no-attribution" }, t(certain, { floor: MIN_SCALE_NAT })) : null,
      data.source.length ? this.side(t("text.source"), data.source, data.source_attributions, max) : null,
      this.side(data.source.length ? t("attribution.target_prefix") : t("text"), data.tokens.slice(0, numPromptTokens), data.attributions, max),
      h("p", { class: "muted" }, t(`attribution.method.${data.method}`)),
    );
    this.container.dataset.position = String(data.position);
  }

  /** Chips to choose the output to explain. @param {any[]} outputs @param {number} selected */
  outputChips(outputs, selected) {
    const one = (/** @type {any} */ token, /** @type {number} */ n) =>
      h(
        "button",
        {
          type: "button",
          class: `chip${n === selected ? " selected" : ""}`,
          "aria-pressed": n === selected ? "true" : "false",
          onclick: () => this.context.setParams({ position: n }),
        },
        token ? escapeInvisible(token.text) : t("attribution.next"),
      );
    return h("div", { class: "chips", role: "group", "aria-label": t("attribution.choose") }, outputs.map(one));
  }

  /** @param {string} name @param {any[]} tokens @param {number[]} scores @param {number} max */
  side(name, tokens, scores, max) {
    const one = (/** @type {any} */ token, /** @type {number} */ n) => {
      const byte = divergingByte(scores[n], max);
      const style = { background: color(byte, true), color: textColor(byte, true) };
      return h(
        "span",
        { class: "chip attributed", style, "data-score": scores[n] },
        escapeInvisible(token.text),
        h("small", {}, signed(scores[n], 2)),
      );
    };
    return h("div", {}, h("p", { class: "muted" }, name), h("div", { class: "chips" }, tokens.map(one)));
  }
}

/** @param {any} data @param {number} numPromptTokens */
function attributionSvg(data, numPromptTokens) {
  const side = (/** @type {string} */ name, /** @type {any[]} */ tokens, /** @type {number[]} */ scores) => [
    { text: name, value: null, valueText: "" },
    ...scores.map((score, n) => ({ text: tokens[n].label, value: score, valueText: signed(score, 3) })),
  ];
  const rows = [
    ...(data.source.length ? side(t("text.source"), data.source, data.source_attributions) : []),
    ...side(t(data.source.length ? "attribution.target_prefix" : "text"), data.tokens, data.attributions.slice(0, numPromptTokens)),
  ];
  const outputText = t("attribution.output", { word: escapeInvisible(data.output).trim(), p: formatPercent(Math.exp(data.logprob)) });
  return divergingBarsSvg(rows, `${outputText} · ${t("attribution.tokens")} (nat)`, MIN_SCALE_NAT);
}

// ------------------------------------------------------------------------------------------------- head ablation

class AblationView {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    /** @type {AttributionView | null} */
    this.attribution = null;
    const { architecture } = context.modelInfo;
    this.kinds =
      architecture === "encoder-decoder" ? ["decoder.cross_attn", "decoder.self_attn", "encoder.self_attn"] : [`${architecture}.self_attn`];
    this.grid = h("div", {});
    this.result = h("div", {});
    this.bar = h("div", { class: "row" });
    this.legend = h("span", {});
    /** @type {Map<string, (number | null)[]>} loss change of each head of a layer, by kind and layer */
    this.changes = new Map();
    this.page = card(
      t("ablation.title"),
      h("p", { class: "muted" }, t("ablation.lead")),
      this.bar,
      h("div", { class: "split even" }, this.grid, this.result),
    );
  }

  /** @param {Record<string, string>} params */
  async show(params) {
    const kind = this.kinds.includes(params.kind) ? params.kind : this.kinds[0];
    const { layers, heads } = this.context.modelInfo;
    const numLayers = kind.startsWith("encoder.") ? layers[0] : layers[layers.length - 1];
    const ablated = (params.ablate ?? "0.0").split(".").map((n) => Number(n) || 0);
    const at = [Math.min(ablated[0], numLayers - 1), Math.min(ablated[1] ?? 0, heads - 1)];
    replaceChildren(
      this.bar,
      this.kinds.length > 1
        ? segmentedControl(
            this.kinds.map((k) => [k, translateName("attention_kind", k)]),
            kind,
            (k) => this.context.setParams({ kind: k, ablate: null }),
            t("attention.kind"),
          )
        : null,
      this.legend,
    );
    this.drawGrid(kind, numLayers, heads, at);
    await this.ablateHead(kind, at);
    for (let layer = 0; layer < numLayers; layer++) {
      const key = `${kind} ${layer}`;
      if (this.changes.has(key)) continue;
      const result = await post("ablate_layer", { ...requestBody(params), kind, layer }, this.context.signal).catch(() => null);
      if (!result || this.kind !== kind) return;
      this.changes.set(key, result.loss_change);
      this.drawGrid(kind, numLayers, heads, /** @type {number[]} */ (this.selectedHead));
    }
    this.grid.dataset.complete = kind;
  }

  /** @param {string} kind @param {number} layers @param {number} heads @param {number[]} at */
  drawGrid(kind, layers, heads, at) {
    this.kind = kind;
    this.selectedHead = at;
    const all = [...this.changes].filter(([key]) => key.startsWith(kind)).flatMap(([, row]) => row.map((v) => v ?? 0));
    const max = Math.max(...all.map(Math.abs), 0.01);
    replaceChildren(this.legend, colorbar(`${t("ablation.better")} −${formatNumber(max)}`, `+${formatNumber(max)} nat ${t("ablation.worse")}`, true));
    const focused = this.grid.contains(document.activeElement);
    const cell = (/** @type {number} */ layer, /** @type {number} */ head) => {
      const change = this.changes.get(`${kind} ${layer}`)?.[head];
      const byte = divergingByte(change ?? 0, max);
      const on = layer === at[0] && head === at[1];
      const changeText = typeof change === "number" ? (change >= 0 ? "+" : "−") + formatNumber(Math.abs(change)) : "…";
      return h("button", {
        type: "button",
        class: "cell",
        "data-head": `${layer}.${head}`,
        "data-change": change ?? "",
        "aria-pressed": String(on),
        tabindex: on ? 0 : -1,
        "aria-label": `${t("layer")} ${layer}, ${t("head")} ${head}: ${changeText}`,
        title: `${layer}.${head}: ${changeText}`,
        style: change === undefined ? {} : { background: color(byte, true) },
        onclick: () => this.context.setParams({ ablate: `${layer}.${head}` }),
      });
    };
    const rows = Array.from({ length: layers }, (_, layer) => [
      h("span", { class: "muted" }, String(layer)),
      ...Array.from({ length: heads }, (_, head) => cell(layer, head)),
    ]);
    const style = { "grid-template-columns": `2.2em repeat(${heads}, minmax(16px, 40px))` };
    replaceChildren(
      this.grid,
      h("p", { class: "muted" }, t("attention.grid.how")),
      h("div", { class: "scroll cells-box" }, h("div", { class: "thumbnails", role: "group", style, onkeydown: onArrowKey }, rows.flat())),
    );
    if (focused) /** @type {HTMLElement | null} */ (this.grid.querySelector("[aria-pressed=true]"))?.focus();
  }

  /** @param {string} kind @param {number[]} at */
  async ablateHead(kind, [layer, head]) {
    await withLoading(this.result, this.context.signal, async () => {
      const position = positionParam(this.context.params) ?? this.attribution?.data?.position ?? -1;
      const body = { ...requestBody(this.context.params), kind, layer, head, position };
      const result = await post("ablate_head", body, this.context.signal);
      const max = Math.max(...result.candidates.flatMap((/** @type {any} */ c) => c.probs));
      const lossIncrease = result.loss === null ? null : result.ablated_loss - result.loss;
      const rows = result.candidates
        .slice(0, 10)
        .map((/** @type {any} */ c) =>
          h(
            "li",
            {},
            h(
              "span",
              { class: "candidate-row", "data-id": c.id, "data-after": c.probs[1] },
              h("span", { class: "token-text" }, escapeInvisible(c.text)),
              probabilityBar(c.probs[1], max, c.probs[0]),
              h("span", { class: "num" }, formatPercent(c.probs[0])),
              h("span", { class: "num strong" }, formatPercent(c.probs[1])),
            ),
          ),
        );
      const maxDivergence = Math.max(...result.kl_divergence, 1e-9);
      const klChips = result.tokens.map((/** @type {any} */ token, /** @type {number} */ n) => {
        const byte = 30 + 200 * (result.kl_divergence[n] / maxDivergence);
        const title = `${formatNumber(result.kl_divergence[n])} nat`;
        return h(
          "span",
          { class: "chip", title, style: { background: color(byte), color: textColor(byte) } },
          escapeInvisible(token.text),
        );
      });
      this.result.dataset.ablated = `${kind} ${layer} ${head}`;
      return [
        h("h3", {}, t("ablation.head", { layer, head, word: escapeInvisible(result.tokens[result.position].text) })),
        lossIncrease === null ? null : h("p", {}, t("ablation.loss", { loss: formatNumber(result.loss), ablated: formatNumber(result.ablated_loss) })),
        h("ol", { class: "candidates" }, rows),
        h("p", { class: "muted" }, t("ablation.kl_divergence")),
        h("div", { class: "chips" }, klChips),
        h(
          "div",
          { class: "row" },
          h("span", { class: "spacer" }),
          exportButtons(
            `ablation-${layer}-${head}`,
            () =>
              candidatesSvg(
                result.candidates,
                t("ablation.head", { layer, head, word: escapeInvisible(result.tokens[result.position].text) }),
              ),
            () => result,
          ),
        ),
      ];
    });
  }
}
