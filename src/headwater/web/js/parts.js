// Pieces that several views share: fields, tokens, bars, notices.
// @ts-check
import { colour, ink } from "./colour.js";
import { fill, h, visible } from "./dom.js";
import { knows, percent, t } from "./words.js";

/** @typedef {{id: number, text: string, label: string, parts?: number}} Token */

/** A labelled field. @param {string} label @param {HTMLElement} input @param {string} [note] */
export function field(label, input, note) {
  return h("label", { class: "field" }, h("span", {}, label), input, note ? h("small", {}, note) : null);
}

/** @param {string} value @param {(value: string) => void} change @param {{rows?: number, id?: string}} [more] */
export function textarea(value, change, more = {}) {
  const area = h("textarea", { rows: more.rows ?? 2, spellcheck: "false", id: more.id, maxlength: 60000 });
  area.value = value;
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) change(area.value);
  });
  return area;
}

/**
 * @param {[string, string][]} options value and words
 * @param {string} chosen
 * @param {(value: string) => void} change
 * @param {string} label
 */
export function select(options, chosen, change, label) {
  const made = h(
    "select",
    { "aria-label": label, onchange: () => change(made.value) },
    options.map(([value, words]) => h("option", { value, selected: value === chosen }, words)),
  );
  return made;
}

/**
 * A row of choices of which one is on.
 * @param {[string, string][]} options
 * @param {string} chosen
 * @param {(value: string) => void} change
 * @param {string} label
 */
export function choice(options, chosen, change, label) {
  return h(
    "span",
    { class: "choice", role: "group", "aria-label": label },
    options.map(([value, words]) =>
      h(
        "button",
        {
          type: "button",
          "aria-pressed": value === chosen ? "true" : "false",
          "data-value": value,
          onclick: () => change(value),
        },
        words,
      ),
    ),
  );
}

/**
 * Tokens as chips. shade: 0..1 or null of each.
 * @param {Token[]} tokens
 * @param {{shade?: (number | null)[], pick?: (n: number) => void, chosen?: number, title?: (n: number) => string}}
 * [more]
 */
export function chips(tokens, more = {}) {
  return h(
    "div",
    { class: "chips" },
    tokens.map((token, n) => {
      const shade = more.shade?.[n];
      const byte = shade === null || shade === undefined ? null : 30 + 200 * shade;
      const style = byte === null ? {} : { background: colour(byte), color: ink(byte) };
      const props = {
        class: `chip${n === more.chosen ? " chosen" : ""}`,
        style,
        title: more.title?.(n) ?? `${token.id}`,
      };
      const words = token.parts && token.parts > 1 ? token.label : visible(token.text);
      return more.pick
        ? h("button", { ...props, type: "button", onclick: () => more.pick?.(n) }, words)
        : h("span", props, words);
    }),
  );
}

/** What went wrong, in words. @param {unknown} error */
export function trouble(error) {
  const kind = /** @type {any} */ (error)?.kind ?? "Fault";
  const heading = knows(`error.${kind}`) ? t(`error.${kind}`) : t("error.Fault");
  return h(
    "div",
    { class: "notice bad", role: "alert" },
    h("strong", {}, heading),
    " ",
    String(/** @type {any} */ (error)?.message ?? error),
  );
}

/** @param {string} words */
export function notice(words) {
  return h("p", { class: "notice" }, words);
}

/**
 * Run f while the place says that it works; show what goes wrong.
 * @param {HTMLElement} place
 * @param {AbortSignal} signal
 * @param {() => Promise<import("./dom.js").Child | import("./dom.js").Child[] | void>} f
 */
export async function working(place, signal, f) {
  place.setAttribute("aria-busy", "true");
  const timer = setTimeout(
    () => !signal.aborted && place.childElementCount === 0 && fill(place, h("p", { class: "faint" }, t("working"))),
    250,
  );
  try {
    const made = await f();
    if (!signal.aborted && made) fill(place, made);
  } catch (error) {
    if (!signal.aborted) fill(place, trouble(error));
  } finally {
    clearTimeout(timer);
    place.removeAttribute("aria-busy");
  }
}

/**
 * A bar of a share, perhaps with a fainter one behind it.
 * @param {number} share
 * @param {number} most
 * @param {number} [before]
 */
export function bar(share, most, before) {
  const wide = (/** @type {number} */ p) => `${Math.max(0, Math.min(100, (100 * p) / (most || 1)))}%`;
  return h(
    "span",
    { class: "bar" },
    before === undefined ? null : h("i", { class: "before", style: { width: wide(before) } }),
    h("i", { class: "now", style: { width: wide(share) } }),
  );
}

/** @param {string} title @param {string} lead @param {...any} more */
export function heading(title, lead, ...more) {
  return h(
    "header",
    { class: "head" },
    h("div", {}, h("h1", { tabindex: -1 }, title), h("p", { class: "lead" }, lead)),
    ...more,
  );
}

/** @param {string | null} title @param {...any} content */
export function card(title, ...content) {
  return h("section", { class: "card" }, title ? h("h2", {}, title) : null, ...content);
}

/**
 * @param {string} label
 * @param {{value: number, min: number, max: number, step: number, shown: (v: number) => string, change: (v: number) =>
 * void, id: string}} plan
 */
export function slider(label, plan) {
  const out = h("output", {}, plan.shown(plan.value));
  const input = h("input", {
    type: "range",
    min: plan.min,
    max: plan.max,
    step: plan.step,
    id: plan.id,
    "aria-label": label,
  });
  input.value = String(plan.value);
  input.addEventListener("input", () => {
    out.textContent = plan.shown(Number(input.value));
    input.setAttribute("aria-valuetext", plan.shown(Number(input.value)));
    plan.change(Number(input.value));
  });
  return h("label", { class: "slider" }, h("span", {}, label, out), input);
}

export { percent };
