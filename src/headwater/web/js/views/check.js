// Checker report and measured dependencies.
// @ts-check
import { post } from "../api.js";
import { replaceChildren, h } from "../dom.js";
import { exportButtons } from "../export.js";
import { matrix, colorbar } from "../matrix.js";
import { card, heading, withLoading } from "../components.js";
import { localized, t, translateName } from "../i18n.js";

export const requires = "model";
export const input = "any";
const ICONS = /** @type {Record<string, string>} */ ({ passed: "✓", failed: "✗", warning: "!", skipped: "–" });

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, { params, modelInfo, signal }) {
  const container = h("div", { class: "stack" });
  const all = () =>
    withLoading(container, signal, async () => {
      replaceChildren(container, h("p", { class: "muted" }, t("check.working")));
      return renderReport(await post("check", { model: params.model }, signal), params.model);
    });
  const checkEachLaw = () =>
    withLoading(container, signal, async () => {
      /** @type {any} */
      let report = { ok: true, verdicts: [], dependencies: null };
      for (const law of modelInfo.laws) {
        replaceChildren(
          container,
          renderReport({ ...report, running: true }, params.model),
          h("p", { class: "muted" }, `${t("check.working")} ${translateName("law", law)}`),
        );
        const part = await post("check", { model: params.model, laws: [law] }, signal);
        const verdicts = [...report.verdicts, ...part.verdicts];
        report = { ...part, verdicts, ok: report.ok && part.ok, dependencies: report.dependencies ?? part.dependencies };
      }
      return renderReport(report, params.model);
    });
  const large = modelInfo.parameters > 5e7;
  replaceChildren(
    root,
    heading(t("check.title"), t("check.lead")),
    large
      ? h(
          "p",
          {},
          h("button", { type: "button", class: "primary", id: "run-check", onclick: checkEachLaw }, t("check.run")),
          " ",
          h("span", { class: "muted" }, t("check.large")),
        )
      : null,
    container,
  );
  if (!large) await all();
}

/** @param {any} report @param {string} name */
function renderReport(report, name) {
  const failed = report.verdicts.filter((/** @type {any} */ v) => v.status === "failed");
  const verdicts = report.verdicts.map((/** @type {any} */ v) => verdict(v));
  const end = h(
    "p",
    { class: `verdict ${report.ok ? "good" : "bad"}`, role: "status" },
    report.ok ? t("check.ok") : t("check.failed", { n: failed.length }),
  );
  return [
    report.running ? null : end,
    h(
      "div",
      { class: "two-columns wide-left" },
      card(
        t("check.laws"),
        report.summary ? h("p", { class: "muted" }, localized(report, "summary")) : null,
        h("ul", { class: "laws" }, verdicts),
      ),
      dependencyCard(report, failed, name),
    ),
  ];
}

/** @param {any} v */
function verdict(v) {
  const title = translateName("law", v.law);
  return h(
    "li",
    { class: v.status, "data-law": v.law },
    h("span", { class: "icon", "aria-label": t(`verdict.${v.status}`) }, ICONS[v.status]),
    h(
      "div",
      {},
      h("strong", {}, title),
      h("p", {}, localized(v, "message")),
      v.module ? h("p", {}, h("code", {}, v.module)) : null,
      v.remedy ? h("p", {}, localized(v, "remedy")) : null,
    ),
  );
}

/** @param {any} report @param {any[]} failed @param {string} name */
function dependencyCard(report, failed, name) {
  if (!report.dependencies) return null;
  const { change, causal, leaks, length } = report.dependencies;
  const labels = Array.from({ length }, (_, n) => String(n));
  const marks = new Set(
    [...leaks, ...failed.filter((v) => v.key !== undefined && v.position !== undefined).map((v) => [v.position, v.key])].map(
      (at) => at.join(","),
    ),
  );
  const figure = matrix(change, {
    rows: labels,
    columns: labels,
    power: 0.3,
    cell: 22,
    label: t("check.dependencies"),
    isMarked: (r, c) => marks.has(`${r},${c}`),
  });
  const words = leaks.length ? t("check.leak", { n: leaks.length }) : causal ? t("check.causal") : t("check.bidirectional");
  return card(
    t("check.dependencies"),
    h("p", { class: "muted" }, t("check.dependencies.lead")),
    figure,
    h("p", { class: leaks.length ? "notice bad" : "notice" }, words),
    h(
      "div",
      { class: "row" },
      colorbar(t("check.unchanged"), t("check.changed")),
      h("span", { class: "spacer" }),
      exportButtons(
        `check-${name}`,
        () => figure.querySelector("canvas"),
        () => report,
      ),
    ),
  );
}
