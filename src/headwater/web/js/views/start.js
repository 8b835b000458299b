// Start: what there is to look at, and what each thing is, in three lines.
// @ts-check
import { post } from "../api.js";
import { fill, h } from "../dom.js";
import { card, heading, trouble } from "../parts.js";
import { link } from "../state.js";
import { count, short, t, word } from "../words.js";

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, { shelf, params, signal }) {
  const chosen = params.model ?? shelf.items[0]?.name;
  const groups = ["run", "model", "made"].map((kind) => [
    kind,
    shelf.items.filter((/** @type {any} */ item) => item.kind === kind),
  ]);
  const what = h("section", { class: "card what", "aria-live": "polite" });
  fill(
    root,
    heading(t("start.title"), t("start.lead")),
    h(
      "div",
      { class: "two" },
      h(
        "div",
        { class: "shelf" },
        groups.filter(([, items]) => items.length).map(([kind, items]) => group(kind, items, shelf, chosen)),
      ),
      what,
    ),
    shelf.items.every((/** @type {any} */ item) => item.kind === "made")
      ? card(t("start.none"), h("p", {}, t("start.none.how")), h("pre", {}, "headwater demo\nheadwater ui runs"))
      : null,
  );
  if (!chosen) return;
  try {
    fill(what, ...told(await post("about", { model: chosen }, signal)));
  } catch (error) {
    if (!signal.aborted) fill(what, h("h2", {}, chosen), trouble(error));
  }
}

/** @param {string} kind @param {any[]} items @param {any} shelf @param {string} chosen */
function group(kind, items, shelf, chosen) {
  return h(
    "section",
    { class: "card" },
    h("h2", {}, t(`start.${kind}`)),
    h(
      "ul",
      { class: "names" },
      items.map((item) => {
        const run = shelf.runs.find((/** @type {any} */ r) => r.run === item.name);
        const more = run ? `${t("step")} ${count(run.step)} · ${state(run.state)}` : "";
        return h(
          "li",
          {},
          h(
            "a",
            { href: link("start", { model: item.name }), "aria-current": item.name === chosen ? "true" : null },
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
  return word("state", name);
}

/** Three lines and where to go. @param {any} about */
function told(about) {
  const layers = about.layers.join(" + ");
  const head = about.task
    ? t("about.task", { task: about.task })
    : about.says_tokens
      ? t("about.tokens")
      : t("about.states");
  const views = [
    "attention",
    "next",
    "why",
    "talk",
    "walk",
    "anatomy",
    "compare",
    "check",
    ...(about.kind === "run" ? ["training"] : []),
  ];
  return [
    h("h2", {}, about.name),
    h("p", {}, t(`about.${about.shape}`)),
    h(
      "p",
      {},
      t("about.sizes", {
        layers,
        heads: about.heads,
        d_model: about.d_model,
        parameters: short(about.parameters),
        exact: count(about.parameters),
      }),
    ),
    h("p", {}, head, " ", about.kind === "made" ? t("about.made") : t("about.pieces", { pieces: count(about.pieces) })),
    h(
      "div",
      { class: "doors" },
      views.map((view) =>
        h(
          "a",
          { class: "door", href: link(view, { model: about.name, run: view === "training" ? about.name : null }) },
          h("strong", {}, t(`view.${view}`)),
          h("small", {}, t(`door.${view}`)),
        ),
      ),
    ),
  ];
}
