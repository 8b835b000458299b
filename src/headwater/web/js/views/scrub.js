// A scrubber over checkpoints: how one head, and one answer, came to be.
// @ts-check
import { post } from "../api.js";
import { fill, h, visible } from "../dom.js";
import { matrix } from "../matrix.js";
import { card, field, select, slider, textarea, working } from "../parts.js";
import { link } from "../state.js";
import { count, t, word } from "../words.js";

/** One head, and what is said, over checkpoints. */
export class Scrub {
  /** @param {import("../main.js").Context} context @param {string} run */
  constructor(context, run) {
    this.context = context;
    this.run = run;
    /** @type {number[]} */
    this.steps = [];
    this.at = -1;
    this.place = h("div", { class: "scrubbed" });
    this.rail = h("div", {});
    this.box = textarea(context.params.source ?? context.params.text ?? "", () => this.show(), { id: "scrub-text" });
    this.kind = "";
    this.layer = 0;
    this.head = 0;
    this.page = card(
      t("scrub.title"),
      h("p", { class: "faint" }, t("scrub.lead")),
      field(t("text"), this.box),
      this.rail,
      this.place,
    );
  }

  /** @param {number[]} steps @param {any[]} samples */
  has(steps, samples) {
    if (!this.box.value && samples.length)
      this.box.value = String(
        Object.entries(samples[0]).find(([k, v]) => k !== "step" && typeof v === "string")?.[1] ?? "",
      );
    if (steps.join() === this.steps.join()) return;
    this.steps = steps;
    if (!steps.length) return fill(this.rail, h("p", { class: "notice" }, t("scrub.none")));
    this.at = steps.length - 1;
    const bar = slider(t("scrub.at"), {
      id: "scrub",
      value: this.at,
      min: 0,
      max: Math.max(0, steps.length - 1),
      step: 1,
      shown: (v) => `${t("step")} ${count(this.steps[v])}`,
      change: (v) => ((this.at = v), this.show()),
    });
    fill(
      this.rail,
      bar,
      h("p", {}, h("button", { type: "button", id: "scrub-go", onclick: () => this.show() }, t("scrub.go"))),
    );
  }

  /** This checkpoint as a model of its own, in an address. @param {boolean} two */
  named(two) {
    return { model: `${this.run}@${this.steps[this.at]}`, [two ? "source" : "text"]: this.box.value };
  }

  async show() {
    const model = await post("about", { model: this.run }, this.context.signal).catch(() => null);
    const two = model?.shape === "both";
    const kind =
      this.kind ||
      (two ? "decoder.cross_attn" : model?.shape === "encoder" ? "encoder.self_attn" : "decoder.self_attn");
    await working(this.place, this.context.signal, async () => {
      const body = {
        run: this.run,
        checkpoint: this.steps[this.at],
        kind,
        layer: this.layer,
        head: this.head,
        ...(two ? { source: this.box.value } : { text: this.box.value }),
      };
      const data = await post("scrub", body, this.context.signal);
      const rows = kind.startsWith("encoder.") && data.source.length ? data.source : data.tokens;
      const columns = kind === "decoder.cross_attn" ? data.source : rows;
      const numbers = (/** @type {number} */ n) =>
        Array.from({ length: n }, (_, i) => /** @type {[string, string]} */ ([String(i), String(i)]));
      const label = (/** @type {any} */ x) => x.label;
      return [
        h(
          "div",
          { class: "row" },
          select(
            data.kinds.map((/** @type {string} */ k) => [k, word("kind", k)]),
            kind,
            (v) => ((this.kind = v), this.show()),
            t("attention.kind"),
          ),
          t("layer"),
          select(numbers(data.layers), String(this.layer), (v) => ((this.layer = Number(v)), this.show()), t("layer")),
          t("head"),
          select(numbers(data.heads), String(this.head), (v) => ((this.head = Number(v)), this.show()), t("head")),
        ),
        h(
          "p",
          {},
          h("a", { href: link("attention", this.named(two)) }, t("scrub.open")),
          " · ",
          h("a", { href: link("compare", { ...this.named(two), other: this.run }) }, t("view.compare")),
        ),
        data.said ? h("p", { class: "answer" }, `${t("step")} ${count(data.checkpoint)}: `, visible(data.said)) : null,
        matrix(data.weights, {
          rows: rows.slice(0, 48).map(label),
          columns: columns.slice(0, 48).map(label),
          power: 0.5,
          label: t("scrub.title"),
        }),
      ];
    });
    this.place.dataset.step = String(this.steps[this.at]);
  }
}
