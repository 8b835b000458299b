// Input form.
// @ts-check
import { h, escapeInvisible } from "../dom.js";
import { field, textarea } from "../components.js";
import { decodeIds } from "../router.js";
import { t } from "../i18n.js";

/**
 * @param {import("../main.js").Context} context
 * @param {{target?: boolean, submitLabel?: string, resetParams?: Record<string, any>}} [options]
 */
export function textForm({ params, modelInfo, setParams }, options = {}) {
  const isEncoderDecoder = modelInfo.architecture === "encoder-decoder";
  const submit = () => {
    const input = { text: text.value, source: isEncoderDecoder ? source.value : null, ids: null, source_ids: null };
    setParams({ ...input, ...options.resetParams }, true);
  };
  const text = textarea(params.text ?? "", submit, { id: "text" });
  const source = textarea(params.source ?? "", submit, { id: "source" });
  const fields = isEncoderDecoder
    ? [
        field(t("text.source"), source),
        options.target === false ? null : field(t("text.target"), text, t("text.target.note")),
      ]
    : [field(t("text"), text)];
  const ids = decodeIds(params.ids);
  const defaultExamples = (isEncoderDecoder ? ["example.source", "example.source2"] : ["example.1", "example.2"]).map((key) => t(key));
  const examples = (modelInfo.examples.length ? modelInfo.examples : defaultExamples).map((/** @type {string} */ example) =>
    h(
      "button",
      { type: "button", class: "ghost", onclick: () => (((isEncoderDecoder ? source : text).value = example), submit()) },
      escapeInvisible(example),
    ),
  );
  return h(
    "form",
    { class: "card text-form", onsubmit: (/** @type {Event} */ event) => (event.preventDefault(), submit()) },
    h("div", { class: isEncoderDecoder && options.target !== false ? "fields two-columns" : "fields" }, fields),
    ids ? h("p", { class: "notice" }, t("text.ids", { n: ids.length })) : null,
    h(
      "div",
      { class: "row" },
      h("button", { type: "submit", class: "primary" }, t(options.submitLabel ?? "text.run")),
      h("span", { class: "muted" }, t("text.try")),
      examples,
    ),
  );
}
