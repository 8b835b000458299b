// The form above a view: the text a model reads, for two stacks the source and the target.
// @ts-check
import { h, visible } from "../dom.js";
import { field, textarea } from "../parts.js";
import { unpacked } from "../state.js";
import { t } from "../words.js";

/**
 * @param {import("../main.js").Context} context
 * @param {{target?: boolean, go?: string, more?: Record<string, any>}} [options]
 */
export function textForm({ params, about, set }, options = {}) {
  const two = about.shape === "both";
  const submit = () => {
    const given = { text: text.value, source: two ? source.value : null, ids: null, sids: null };
    set({ ...given, ...options.more }, true);
  };
  const text = textarea(params.text ?? "", submit, { id: "text" });
  const source = textarea(params.source ?? "", submit, { id: "source" });
  const fields = two
    ? [
        field(t("text.source"), source),
        options.target === false ? null : field(t("text.target"), text, t("text.target.note")),
      ]
    : [field(t("text"), text)];
  const ids = unpacked(params.ids);
  const usual = (two ? ["example.source", "example.source2"] : ["example.1", "example.2"]).map((key) => t(key));
  const examples = (about.examples.length ? about.examples : usual).map((/** @type {string} */ example) =>
    h(
      "button",
      { type: "button", class: "quiet", onclick: () => (((two ? source : text).value = example), submit()) },
      visible(example),
    ),
  );
  return h(
    "form",
    { class: "card text-form", onsubmit: (/** @type {Event} */ event) => (event.preventDefault(), submit()) },
    h("div", { class: two && options.target !== false ? "fields two" : "fields" }, fields),
    ids ? h("p", { class: "notice" }, t("text.ids", { n: ids.length })) : null,
    h(
      "div",
      { class: "row" },
      h("button", { type: "submit", class: "main" }, t(options.go ?? "text.go")),
      h("span", { class: "faint" }, t("text.try")),
      examples,
    ),
  );
}
