// What changed from one model to another, token by token: how much likelier each token of the text has become.
// @ts-check
import { h } from "../dom.js";
import { colorbar } from "../matrix.js";
import { card, formatPercent, tokenChips } from "../components.js";
import { formatNumber, t } from "../i18n.js";

const FULL_COLOR = 3; // nats at which the color scale ends
const NUM_LISTED = 8;
const SMALL = 0.01; // nats; a token that changed less is neither likelier nor less likely

/**
 * Changes in nats, ln p(second) - ln p(first), of the tokens that both models read; null for the first one.
 * @param {any} first @param {any} second
 */
function changesOf(first, second) {
  const floor = (/** @type {number} */ p) => Math.log(Math.max(p, 1e-9));
  return first.token_probs.map((/** @type {number | null} */ p, /** @type {number} */ n) =>
    p === null || second.token_probs[n] === null ? null : floor(second.token_probs[n]) - floor(p),
  );
}

/** @param {any[]} pair @param {any[]} results */
export function tokenChanges(pair, results) {
  const [first, second] = results.map((one) => one.next);
  const ids = (/** @type {any} */ next) => next.tokens.map((/** @type {any} */ token) => token.id).join();
  if (!first || !second || ids(first) !== ids(second)) return null;
  const changes = changesOf(first, second);
  const known = changes.filter((/** @type {number | null} */ x) => x !== null);
  if (!known.length) return null;

  const signed = (/** @type {number} */ x) => `${x < 0 ? "−" : "+"}${formatNumber(Math.abs(x))}`;
  const probs = (/** @type {number} */ n) => `${formatPercent(first.token_probs[n])} → ${formatPercent(second.token_probs[n])}`;
  const order = changes
    .map((/** @type {number | null} */ change, /** @type {number} */ n) => ({ change: change ?? 0, n }))
    .filter((/** @type {any} */ x) => Math.abs(x.change) >= SMALL)
    .sort((/** @type {any} */ a, /** @type {any} */ b) => Math.abs(b.change) - Math.abs(a.change))
    .slice(0, NUM_LISTED);
  const mean = known.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0) / known.length;
  const count = (/** @type {(x: number) => boolean} */ test) => known.filter(test).length;
  const summary = t("compare.changes.summary", {
    mean: signed(mean),
    more: count((x) => x >= SMALL),
    less: count((x) => x <= -SMALL),
  });
  return card(
    t("compare.changes"),
    h("p", { class: "muted" }, t("compare.changes.lead", { first: pair[0].name, second: pair[1].name })),
    h(
      "div",
      { class: "token-changes", "data-changes": JSON.stringify(changes) },
      tokenChips(first.tokens, {
        diverging: true,
        intensity: changes.map((/** @type {number | null} */ x) => (x === null ? null : Math.max(-1, Math.min(1, x / FULL_COLOR)))),
        title: (n) => (changes[n] === null ? "" : `${probs(n)} (${signed(changes[n])} nat)`),
      }),
    ),
    h("p", { class: "row" }, h("span", {}, summary), h("span", { class: "spacer" }), colorbar(`−${FULL_COLOR}`, `+${FULL_COLOR} nat`, true)),
    order.length ? changeTable(order, first, probs, signed) : h("p", { class: "notice" }, t("compare.changes.none")),
  );
}

/**
 * The tokens that changed most. @param {{change: number, n: number}[]} order @param {any} first
 * @param {(n: number) => string} probs @param {(x: number) => string} signed
 */
function changeTable(order, first, probs, signed) {
  const head = ["compare.changes.token", "compare.changes.probability", "compare.changes.nats"].map((key) => h("th", {}, t(key)));
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "changes" },
      h("thead", {}, h("tr", {}, head)),
      h(
        "tbody",
        {},
        order.map(({ change, n }) =>
          h("tr", {}, h("td", {}, h("span", { class: "token-text" }, first.tokens[n].label)), h("td", { class: "num" }, probs(n)), h("td", { class: "num" }, signed(change))),
        ),
      ),
    ),
  );
}
