// Talk: a chat, a text that goes on, a translation, or labels; the attention of what was just said is one click away.
// @ts-check
import { lines } from "../api.js";
import { colour, ink } from "../colour.js";
import { fill, h, visible } from "../dom.js";
import { keepers } from "../keep.js";
import { bar, field, heading, percent, slider, textarea, trouble } from "../parts.js";
import { link, packed } from "../state.js";
import { t, word } from "../words.js";

export const needs = "model";

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const { about, params } = context;
  const writes = about.says_tokens && about.shape !== "encoder";
  if (!writes && !about.labels.length) {
    fill(
      root,
      heading(t("talk.title"), t("talk.lead")),
      h("p", { class: "notice" }, t("talk.none")),
      h("p", {}, h("a", { href: link("attention", { model: about.name }) }, t("view.attention"))),
    );
    return;
  }
  const way = !writes ? "labels" : about.shape === "both" ? "both" : about.chats ? "chat" : "goon";
  const conversation = new Conversation(context, way);
  fill(root, heading(t(`talk.${way}`), t(`talk.${way}.lead`)), conversation.page);
  if (params.text) conversation.box.value = params.text;
  return { update: () => true, theme: () => {} }; // its address follows what is said and set; the turns themselves are not in it
}

class Conversation {
  /** @param {import("../main.js").Context} context @param {string} way */
  constructor(context, way) {
    this.context = context;
    this.way = way;
    /** @type {{role: string, content: string}[]} */
    this.messages = [];
    /** @type {any[]} */
    this.turns = [];
    /** @type {AbortController | null} */
    this.running = null;
    this.list = h("div", { class: "turns", "aria-live": "polite" });
    this.box = textarea("", () => this.send(), { id: "say", rows: 3 });
    this.button = h("button", { type: "submit", class: "main", id: "send" }, t("talk.send"));
    const { temperature, tokens } = context.params;
    this.settings = { temperature: Number(temperature ?? 0) || 0, tokens: Number(tokens ?? 64) || 64 };
    const change = (/** @type {"temperature" | "tokens"} */ name, /** @type {number} */ v) => {
      this.settings[name] = v;
      context.set({ [name]: v || null });
    };
    const greedy = t("greedy");
    const sliders = h(
      "div",
      { class: "sliders inline" },
      slider(t("temperature"), {
        id: "talk-temperature",
        value: this.settings.temperature,
        min: 0,
        max: 2,
        step: 0.05,
        shown: (v) => (v ? v.toFixed(2) : greedy),
        change: (v) => change("temperature", v),
      }),
      slider(t("talk.length"), {
        id: "talk-length",
        value: this.settings.tokens,
        min: 8,
        max: 256,
        step: 8,
        shown: String,
        change: (v) => change("tokens", v),
      }),
    );
    const form = h(
      "form",
      { class: "card", onsubmit: (/** @type {Event} */ e) => (e.preventDefault(), this.send()) },
      field(t(way === "both" ? "text.source" : "talk.say"), this.box),
      way === "labels" ? null : sliders,
      h(
        "div",
        { class: "row" },
        this.button,
        h("span", { class: "faint" }, t("talk.keys")),
        h("span", { class: "grow" }),
        keepers(`talk-${context.params.model}`, null, () => this.turns),
      ),
    );
    this.page = [this.list, form];
  }

  async send() {
    if (this.running) return this.running.abort();
    const text = this.box.value.trim();
    if (!text) return;
    const running = (this.running = new AbortController());
    this.context.set({ text });
    this.context.signal.addEventListener("abort", () => running.abort());
    this.button.textContent = t("talk.stop");
    const said = h("p", { class: "answer" });
    const after = h("div", { class: "row" });
    const turn = h("article", { class: "card turn" }, h("p", { class: "asked" }, text), said, after);
    this.list.append(turn);
    const { temperature, tokens } = this.settings;
    /** @type {Record<string, any>} */
    const body = { model: this.context.params.model, tokens };
    if (temperature) body.temperature = temperature;
    if (this.way === "chat") body.messages = [...this.messages, { role: "user", content: text }];
    else if (this.way === "both") body.source = text;
    else body.text = text;
    let whole = "";
    try {
      await lines(
        "talk",
        body,
        (line) => {
          if (line.labels || line.tags) return this.labels(said, after, line);
          if (line.done !== undefined) return this.done(text, whole, line, after);
          whole += line.text;
          const byte = 255 * Math.min(1, -Math.log(Math.max(line.share, 1e-9)) / 12);
          said.append(
            h(
              "span",
              { class: "bit", title: percent(line.share), style: { "border-color": colour(40 + byte * 0.8) } },
              line.text,
            ),
          );
        },
        running.signal,
      );
      this.box.value = this.way === "goon" ? text + whole : "";
    } catch (error) {
      if (!running.signal.aborted) turn.append(trouble(error));
      else after.append(h("span", { class: "faint" }, t("talk.stopped")));
    }
    this.running = null;
    this.button.textContent = t("talk.send");
    turn.dataset.done = "yes";
  }

  /** @param {string} text @param {string} whole @param {any} line @param {HTMLElement} after */
  done(text, whole, line, after) {
    if (this.way === "chat") this.messages.push({ role: "user", content: text }, { role: "assistant", content: whole });
    this.turns.push({ asked: text, said: whole, ...line });
    after.append(
      h("a", { class: "door small", href: this.attention(line) }, t("talk.look")),
      h("span", { class: "faint" }, t("talk.why", { n: line.generated, m: line.read, why: word("stopped", line.done) })),
    );
  }

  /** @param {any} line */
  attention(line) {
    const both = line.source_ids?.length;
    return link("attention", {
      model: this.context.params.model,
      ids: packed(line.ids),
      sids: both ? packed(line.source_ids) : null,
      kind: both ? "decoder.cross_attn" : null,
    });
  }

  /** @param {HTMLElement} said @param {HTMLElement} after @param {any} line */
  labels(said, after, line) {
    if (line.tags)
      fill(
        said,
        line.tags.map((/** @type {[string, number]} */ [name, p]) =>
          h(
            "span",
            {
              class: "chip",
              title: percent(p),
              style: { background: colour(255 * p * 0.6), color: ink(255 * p * 0.6) },
            },
            visible(name),
          ),
        ),
      );
    else
      fill(
        said,
        h(
          "ol",
          { class: "candidates" },
          line.labels.map((/** @type {[string, number]} */ [name, p]) =>
            h(
              "li",
              {},
              h(
                "span",
                { class: "plain-row" },
                h("span", { class: "word" }, visible(name)),
                bar(p, 1),
                h("span", { class: "num strong" }, percent(p)),
              ),
            ),
          ),
        ),
      );
    after.append(h("a", { class: "door small", href: this.attention(line) }, t("talk.look")));
  }
}
