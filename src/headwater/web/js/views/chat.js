// Chat, completion, translation, classification.
// @ts-check
import { postForLines } from "../api.js";
import { color, textColor } from "../color.js";
import { replaceChildren, h, escapeInvisible } from "../dom.js";
import { exportButtons } from "../export.js";
import { probabilityBar, field, heading, formatPercent, slider, textarea, errorNotice } from "../components.js";
import { routeUrl, encodeIds } from "../router.js";
import { t, translateName } from "../i18n.js";

export const requires = "model";

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const { modelInfo, params } = context;
  const generates = modelInfo.has_lm_head && modelInfo.architecture !== "encoder";
  if (!generates && !modelInfo.labels.length) {
    replaceChildren(
      root,
      heading(t("chat.title"), t("chat.lead")),
      h("p", { class: "notice" }, t("chat.none")),
      h("p", {}, h("a", { href: routeUrl("attention", { model: modelInfo.name }) }, t("view.attention"))),
    );
    return;
  }
  const mode = !generates ? "labels" : modelInfo.architecture === "encoder-decoder" ? "translation" : modelInfo.has_chat_template ? "chat" : "completion";
  const conversation = new ChatView(context, mode);
  replaceChildren(root, heading(t(`chat.${mode}`), t(`chat.${mode}.lead`)), conversation.page);
  if (params.text) conversation.box.value = params.text;
  return { update: () => true, onThemeChange: () => {} }; // the URL holds text and settings, not the messages
}

class ChatView {
  /** @param {import("../main.js").Context} context @param {string} mode */
  constructor(context, mode) {
    this.context = context;
    this.mode = mode;
    /** @type {{role: string, content: string}[]} */
    this.messages = [];
    /** @type {any[]} */
    this.turns = [];
    /** @type {AbortController | null} */
    this.running = null;
    this.list = h("div", { class: "messages", "aria-live": "polite" });
    this.box = textarea("", () => this.send(), { id: "message", rows: 3 });
    this.button = h("button", { type: "submit", class: "primary", id: "send" }, t("chat.send"));
    const { temperature, max_tokens } = context.params;
    this.settings = { temperature: Number(temperature ?? 0) || 0, max_tokens: Number(max_tokens ?? 64) || 64 };
    const onChange = (/** @type {"temperature" | "max_tokens"} */ name, /** @type {number} */ v) => {
      this.settings[name] = v;
      context.setParams({ [name]: v || null });
    };
    const greedy = t("greedy");
    const sliders = h(
      "div",
      { class: "sliders inline" },
      slider(t("temperature"), {
        id: "chat-temperature",
        value: this.settings.temperature,
        min: 0,
        max: 2,
        step: 0.05,
        format: (v) => (v ? v.toFixed(2) : greedy),
        onChange: (v) => onChange("temperature", v),
      }),
      slider(t("chat.max_tokens"), {
        id: "max-tokens",
        value: this.settings.max_tokens,
        min: 8,
        max: 256,
        step: 8,
        format: String,
        onChange: (v) => onChange("max_tokens", v),
      }),
    );
    const form = h(
      "form",
      { class: "card", onsubmit: (/** @type {Event} */ e) => (e.preventDefault(), this.send()) },
      field(t(mode === "translation" ? "text.source" : "chat.message"), this.box),
      mode === "labels" ? null : sliders,
      h(
        "div",
        { class: "row" },
        this.button,
        h("span", { class: "muted" }, t("chat.keys")),
        h("span", { class: "spacer" }),
        exportButtons(`chat-${context.params.model}`, null, () => this.turns),
      ),
    );
    this.page = [this.list, form];
  }

  async send() {
    if (this.running) return this.running.abort();
    const text = this.box.value.trim();
    if (!text) return;
    const running = (this.running = new AbortController());
    this.context.setParams({ text });
    this.context.signal.addEventListener("abort", () => running.abort());
    this.button.textContent = t("chat.stop");
    const reply = h("p", { class: "model-message" });
    const footer = h("div", { class: "row" });
    const message = h("article", { class: "card message" }, h("p", { class: "user-message" }, text), reply, footer);
    this.list.append(message);
    const { temperature, max_tokens } = this.settings;
    /** @type {Record<string, any>} */
    const body = { model: this.context.params.model, max_tokens };
    if (temperature) body.temperature = temperature;
    if (this.mode === "chat") body.messages = [...this.messages, { role: "user", content: text }];
    else if (this.mode === "translation") body.source = text;
    else body.text = text;
    let fullText = "";
    try {
      await postForLines(
        "chat",
        body,
        (line) => {
          if (line.labels || line.tags) return this.labels(reply, footer, line);
          if (line.finish_reason !== undefined) return this.onFinish(text, fullText, line, footer);
          fullText += line.text;
          const byte = 255 * Math.min(1, -Math.log(Math.max(line.prob, 1e-9)) / 12);
          reply.append(
            h(
              "span",
              { class: "token", title: formatPercent(line.prob), style: { "border-color": color(40 + byte * 0.8) } },
              line.text,
            ),
          );
        },
        running.signal,
      );
      this.box.value = this.mode === "completion" ? text + fullText : "";
    } catch (error) {
      if (!running.signal.aborted) message.append(errorNotice(error));
      else footer.append(h("span", { class: "muted" }, t("chat.stopped")));
    }
    this.running = null;
    this.button.textContent = t("chat.send");
    message.dataset.done = "yes";
  }

  /** @param {string} text @param {string} fullText @param {any} line @param {HTMLElement} footer */
  onFinish(text, fullText, line, footer) {
    if (this.mode === "chat") this.messages.push({ role: "user", content: text }, { role: "assistant", content: fullText });
    this.turns.push({ message: text, reply: fullText, ...line });
    footer.append(
      h("a", { class: "view-link small", href: this.attention(line) }, t("chat.attention")),
      h("span", { class: "muted" }, t("chat.counts", { n: line.completion_tokens, m: line.prompt_tokens, reason: translateName("finish_reason", line.finish_reason) })),
    );
  }

  /** @param {any} line */
  attention(line) {
    const hasSource = line.source_ids?.length;
    return routeUrl("attention", {
      model: this.context.params.model,
      ids: encodeIds(line.ids),
      source_ids: hasSource ? encodeIds(line.source_ids) : null,
      kind: hasSource ? "decoder.cross_attn" : null,
    });
  }

  /** @param {HTMLElement} reply @param {HTMLElement} footer @param {any} line */
  labels(reply, footer, line) {
    if (line.tags)
      replaceChildren(
        reply,
        line.tags.map((/** @type {[string, number]} */ [name, p]) =>
          h(
            "span",
            {
              class: "chip",
              title: formatPercent(p),
              style: { background: color(255 * p * 0.6), color: textColor(255 * p * 0.6) },
            },
            escapeInvisible(name),
          ),
        ),
      );
    else
      replaceChildren(
        reply,
        h(
          "ol",
          { class: "candidates" },
          line.labels.map((/** @type {[string, number]} */ [name, p]) =>
            h(
              "li",
              {},
              h(
                "span",
                { class: "candidate-row" },
                h("span", { class: "token-text" }, escapeInvisible(name)),
                probabilityBar(p, 1),
                h("span", { class: "num strong" }, formatPercent(p)),
              ),
            ),
          ),
        ),
      );
    footer.append(h("a", { class: "view-link small", href: this.attention(line) }, t("chat.attention")));
  }
}
