// Curves of what training steps measure beside the loss: rewards, divergence and margins of a run on feedback.
// @ts-check
import { chart } from "../chart.js";
import { cssVariable, h } from "../dom.js";
import { t, translateName } from "../i18n.js";

/** Metrics that share a chart, in the order of the page; others follow one by one. */
const GROUPS = [
  ["reward"],
  ["kl"],
  ["margin"],
  ["accuracy"],
  ["reward_chosen", "reward_rejected"],
  ["logprob_chosen", "logprob_rejected"],
  ["ended"],
  ["length"],
  ["clipped"],
  ["step_kl"],
];

/** @typedef {{train: any[], valid: any[], other: any[], otherName: string}} RunLines lines of metrics.jsonl */

/** Names of the numbers that training lines have. @param {any[]} lines @param {Set<string>} known */
export function stepMetricNames(lines, known) {
  return [...new Set(lines.flatMap((line) => Object.keys(line)))].filter(
    (name) => !known.has(name) && lines.some((line) => typeof line[name] === "number"),
  );
}

/**
 * One chart for each group: its metrics in training, the same in validation as dots, and those of another run.
 * @param {RunLines} lines @param {string[]} names @param {number} width
 * @param {(name: string, color: string, points: [number, number][]) => import("../chart.js").Curve[]} withSmoothing
 */
export function stepCharts(lines, names, width, withSmoothing) {
  const colors = ["--accent-2", "--accent", "--accent-3"].map(cssVariable);
  const of = (/** @type {any[]} */ rows, /** @type {string} */ name) =>
    rows.filter((x) => typeof x[name] === "number").map((x) => /** @type {[number, number]} */ ([x.step, x[name]]));
  const grouped = GROUPS.map((group) => group.filter((name) => names.includes(name))).filter((group) => group.length);
  const rest = names.filter((name) => !GROUPS.flat().includes(name)).map((name) => [name]);
  return [...grouped, ...rest].map((group) => {
    const curves = group.flatMap((name, n) => {
      const label = translateName("metric", name);
      const valid = { name: `${label} · ${t("training.valid")}`, color: colors[n], points: of(lines.valid, name), dots: true };
      const other = { name: `${lines.otherName} · ${label}`, color: cssVariable("--text-muted"), points: of(lines.other, name), dashed: true };
      return [...withSmoothing(label, colors[n], of(lines.train, name)), valid, other];
    });
    const title = group.length > 1 ? translateName("metrics", group[0]) : translateName("metric", group[0]);
    return h("figure", { "data-metric": group.join(" ") }, chart({ curves, width, x: t("step"), title }));
  });
}
