// Check: the laws of a Transformer, asked of this model; and who sees whom, measured, on the matrix.
// @ts-check
import { post } from "../api.js";
import { fill, h } from "../dom.js";
import { keepers } from "../keep.js";
import { matrix, scale } from "../matrix.js";
import { card, heading, working } from "../parts.js";
import { said, t, word } from "../words.js";

export const needs = "model";
const MARKS = /** @type {Record<string, string>} */ ({ kept: "✓", broken: "✗", noted: "!", skipped: "–" });

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, { params, about, signal }) {
  const place = h("div", { class: "stack" });
  const all = () =>
    working(place, signal, async () => {
      fill(place, h("p", { class: "faint" }, t("check.working")));
      return shown(await post("check", { model: params.model }, signal), params.model);
    });
  const oneByOne = () =>
    working(place, signal, async () => {
      /** @type {any} */
      let report = { ok: true, verdicts: [], sight: null };
      for (const law of about.laws) {
        fill(
          place,
          shown({ ...report, going: true }, params.model),
          h("p", { class: "faint" }, `${t("check.working")} ${word("law", law)}`),
        );
        const part = await post("check", { model: params.model, only: [law] }, signal);
        const verdicts = [...report.verdicts, ...part.verdicts];
        report = { ...part, verdicts, ok: report.ok && part.ok, sight: report.sight ?? part.sight };
      }
      return shown(report, params.model);
    });
  const large = about.parameters > 5e7;
  fill(
    root,
    heading(t("check.title"), t("check.lead")),
    large
      ? h(
          "p",
          {},
          h("button", { type: "button", class: "main", id: "run-check", onclick: oneByOne }, t("check.run")),
          " ",
          h("span", { class: "faint" }, t("check.large")),
        )
      : null,
    place,
  );
  if (!large) await all();
}

/** @param {any} report @param {string} name */
function shown(report, name) {
  const broken = report.verdicts.filter((/** @type {any} */ v) => v.state === "broken");
  const verdicts = report.verdicts.map((/** @type {any} */ v) => verdict(v));
  const end = h(
    "p",
    { class: `verdict ${report.ok ? "good" : "bad"}`, role: "status" },
    report.ok ? t("check.ok") : t("check.broken", { n: broken.length }),
  );
  return [
    report.going ? null : end,
    h(
      "div",
      { class: "two wide-left" },
      card(
        t("check.laws"),
        report.asked ? h("p", { class: "faint" }, said(report, "asked")) : null,
        h("ul", { class: "laws" }, verdicts),
      ),
      sight(report, broken, name),
    ),
  ];
}

/** @param {any} v */
function verdict(v) {
  const what = word("law", v.law);
  return h(
    "li",
    { class: v.state, "data-law": v.law },
    h("span", { class: "sign", "aria-label": t(`verdict.${v.state}`) }, MARKS[v.state]),
    h(
      "div",
      {},
      h("strong", {}, what),
      h("p", {}, said(v, "says")),
      v.module ? h("p", {}, h("code", {}, v.module)) : null,
      v.remedy ? h("p", {}, said(v, "remedy")) : null,
    ),
  );
}

/** @param {any} report @param {any[]} broken @param {string} name */
function sight(report, broken, name) {
  if (!report.sight) return null;
  const { moved, causal, late, length } = report.sight;
  const labels = Array.from({ length }, (_, n) => String(n));
  const marks = new Set(
    [...late, ...broken.filter((v) => v.key !== undefined && v.place !== undefined).map((v) => [v.place, v.key])].map(
      (at) => at.join(","),
    ),
  );
  const picture = matrix(moved, {
    rows: labels,
    columns: labels,
    power: 0.3,
    cell: 22,
    label: t("check.sight"),
    marked: (r, c) => marks.has(`${r},${c}`),
  });
  const words = late.length ? t("check.leak", { n: late.length }) : causal ? t("check.triangle") : t("check.everyone");
  return card(
    t("check.sight"),
    h("p", { class: "faint" }, t("check.sight.lead")),
    picture,
    h("p", { class: late.length ? "notice bad" : "notice" }, words),
    h(
      "div",
      { class: "row" },
      scale(t("check.still"), t("check.moved")),
      h("span", { class: "grow" }),
      keepers(
        `check-${name}`,
        () => picture.querySelector("canvas"),
        () => report,
      ),
    ),
  );
}
