// Attention at each checkpoint.
// @ts-check
import { post } from "../api.js";
import { replaceChildren, h, escapeInvisible } from "../dom.js";
import { matrix } from "../matrix.js";
import { card, field, select, slider, textarea, withLoading } from "../components.js";
import { routeUrl } from "../router.js";
import { formatCount, t, translateName } from "../i18n.js";

/** Attention of one head and the generated text over checkpoints. */
export class CheckpointSlider {
  /** @param {import("../main.js").Context} context @param {string} run */
  constructor(context, run) {
    this.context = context;
    this.run = run;
    /** @type {number[]} */
    this.steps = [];
    this.index = -1;
    this.container = h("div", { class: "checkpoint-view" });
    this.controls = h("div", {});
    this.box = textarea(context.params.source ?? context.params.text ?? "", () => this.show(), { id: "checkpoint-text" });
    this.kind = "";
    this.layer = 0;
    this.head = 0;
    this.page = card(
      t("checkpoints.title"),
      h("p", { class: "muted" }, t("checkpoints.lead")),
      field(t("text"), this.box),
      this.controls,
      this.container,
    );
  }

  /** @param {number[]} steps @param {any[]} samples */
  setCheckpoints(steps, samples) {
    if (!this.box.value && samples.length)
      this.box.value = String(
        Object.entries(samples[0]).find(([k, v]) => k !== "step" && typeof v === "string")?.[1] ?? "",
      );
    if (steps.join() === this.steps.join()) return;
    this.steps = steps;
    if (!steps.length) return replaceChildren(this.controls, h("p", { class: "notice" }, t("checkpoints.none")));
    this.index = steps.length - 1;
    const stepSlider = slider(t("checkpoints.at"), {
      id: "checkpoint",
      value: this.index,
      min: 0,
      max: Math.max(0, steps.length - 1),
      step: 1,
      format: (v) => `${t("step")} ${formatCount(this.steps[v])}`,
      onChange: (v) => ((this.index = v), this.show()),
    });
    replaceChildren(
      this.controls,
      stepSlider,
      h("p", {}, h("button", { type: "button", id: "checkpoint-show", onclick: () => this.show() }, t("checkpoints.show"))),
    );
  }

  /** URL parameters of this checkpoint as a model. @param {boolean} isEncoderDecoder */
  checkpointParams(isEncoderDecoder) {
    return { model: `${this.run}@${this.steps[this.index]}`, [isEncoderDecoder ? "source" : "text"]: this.box.value };
  }

  async show() {
    const model = await post("model_info", { model: this.run }, this.context.signal).catch(() => null);
    const isEncoderDecoder = model?.architecture === "encoder-decoder";
    const kind =
      this.kind ||
      (isEncoderDecoder ? "decoder.cross_attn" : model?.architecture === "encoder" ? "encoder.self_attn" : "decoder.self_attn");
    await withLoading(this.container, this.context.signal, async () => {
      const body = {
        run: this.run,
        checkpoint: this.steps[this.index],
        kind,
        layer: this.layer,
        head: this.head,
        ...(isEncoderDecoder ? { source: this.box.value } : { text: this.box.value }),
      };
      const data = await post("checkpoint", body, this.context.signal);
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
            data.kinds.map((/** @type {string} */ k) => [k, translateName("attention_kind", k)]),
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
          h("a", { href: routeUrl("attention", this.checkpointParams(isEncoderDecoder)) }, t("checkpoints.open")),
          " · ",
          h("a", { href: routeUrl("compare", { ...this.checkpointParams(isEncoderDecoder), compare: this.run }) }, t("view.compare")),
        ),
        data.generated_text ? h("p", { class: "model-message" }, `${t("step")} ${formatCount(data.checkpoint)}: `, escapeInvisible(data.generated_text)) : null,
        matrix(data.weights, {
          rows: rows.slice(0, 48).map(label),
          columns: columns.slice(0, 48).map(label),
          power: 0.5,
          label: t("checkpoints.title"),
        }),
      ];
    });
    this.container.dataset.step = String(this.steps[this.index]);
  }
}
