// Models and runs.
// @ts-check
import { post } from "../api.js";
import { replaceChildren, h } from "../dom.js";
import { card, heading, errorNotice } from "../components.js";
import { routeUrl } from "../router.js";
import { formatCount, formatCompact, t, translateName } from "../i18n.js";

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, { catalog, params, signal }) {
  const selected = params.model ?? catalog.models[0]?.name;
  const groups = ["run", "model", "random"].map((kind) => [
    kind,
    catalog.models.filter((/** @type {any} */ item) => item.kind === kind),
  ]);
  const details = h("section", { class: "card model-card", "aria-live": "polite" });
  replaceChildren(
    root,
    heading(t("start.title"), t("start.lead")),
    h(
      "div",
      { class: "two-columns" },
      h(
        "div",
        { class: "model-list" },
        groups.filter(([, items]) => items.length).map(([kind, items]) => modelGroup(kind, items, catalog, selected)),
      ),
      details,
    ),
    catalog.models.every((/** @type {any} */ item) => item.kind === "random")
      ? card(t("start.none"), h("p", {}, t("start.none.how")), h("pre", {}, "headwater demo\nheadwater ui runs"))
      : null,
  );
  if (!selected) return;
  try {
    replaceChildren(details, ...modelCard(await post("model_info", { model: selected }, signal)));
  } catch (error) {
    if (!signal.aborted) replaceChildren(details, h("h2", {}, selected), errorNotice(error));
  }
}

/** @param {string} kind @param {any[]} items @param {any} catalog @param {string} selected */
function modelGroup(kind, items, catalog, selected) {
  return h(
    "section",
    { class: "card" },
    h("h2", {}, t(`start.${kind}`)),
    h(
      "ul",
      { class: "name-list" },
      items.map((item) => {
        const run = catalog.runs.find((/** @type {any} */ r) => r.run === item.name);
        const more = run ? `${t("step")} ${formatCount(run.step)} · ${state(run.state)}` : "";
        return h(
          "li",
          {},
          h(
            "a",
            { href: routeUrl("start", { model: item.name }), "aria-current": item.name === selected ? "true" : null },
            h("span", {}, item.name),
            h("small", {}, more),
          ),
        );
      }),
    ),
  );
}

/** @param {string} name */
export function state(name) {
  return translateName("state", name);
}

/** Summary of a model, and links to its views. @param {any} modelInfo */
function modelCard(modelInfo) {
  const layers = modelInfo.layers.join(" + ");
  const head = modelInfo.task
    ? t("about.task", { task: modelInfo.task })
    : modelInfo.has_lm_head
      ? t("about.tokens")
      : t("about.states");
  const textViews = [
    "attention",
    "next-token",
    "attribution",
    "chat",
    "walkthrough",
    "compare",
  ];
  const ownViews = /** @type {Record<string, string[]>} */ ({ image: ["image"], sound: ["speech"] });
  const views = [
    ...(ownViews[modelInfo.input] ?? textViews),
    "architecture",
    ...(modelInfo.input === "sound" ? [] : ["check"]),
    ...(modelInfo.kind === "run" ? ["training"] : []),
  ];
  return [
    h("h2", {}, modelInfo.name),
    h("p", {}, t(`about.${modelInfo.input === "text" ? modelInfo.architecture : modelInfo.input}`)),
    h(
      "p",
      {},
      t("about.sizes", {
        layers,
        heads: modelInfo.heads,
        d_model: modelInfo.d_model,
        parameters: formatCompact(modelInfo.parameters),
        exact: formatCount(modelInfo.parameters),
      }),
    ),
    h("p", {}, head, " ", aboutVocabulary(modelInfo)),
    h(
      "div",
      { class: "view-links" },
      views.map((view) =>
        h(
          "a",
          { class: "view-link", href: routeUrl(view, { model: modelInfo.name, run: view === "training" ? modelInfo.name : null }) },
          h("strong", {}, t(`view.${view}`)),
          h("small", {}, t(`view.${view}.description`)),
        ),
      ),
    ),
  ];
}

/** @param {any} modelInfo */
function aboutVocabulary(modelInfo) {
  if (modelInfo.kind === "random") return t("about.random");
  return modelInfo.input === "image" ? "" : t("about.vocab_size", { size: formatCount(modelInfo.tokenizer_size) });
}
