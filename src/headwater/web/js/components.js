// Shared components: fields, token chips, bars, notices.
// @ts-check
import { color, textColor } from "./color.js";
import { replaceChildren, h, escapeInvisible } from "./dom.js";
import { hasMessage, formatPercent, t } from "./i18n.js";

/** @typedef {{id: number, text: string, label: string, num_pieces?: number}} Token */

/** A labelled field. @param {string} label @param {HTMLElement} input @param {string} [note] */
export function field(label, input, note) {
  return h("label", { class: "field" }, h("span", {}, label), input, note ? h("small", {}, note) : null);
}

/** @param {string} value @param {(value: string) => void} onChange @param {{rows?: number, id?: string}} [more] */
export function textarea(value, onChange, more = {}) {
  const area = h("textarea", { rows: more.rows ?? 2, spellcheck: "false", id: more.id, maxlength: 60000 });
  area.value = value;
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) onChange(area.value);
  });
  return area;
}

/**
 * @param {[string, string][]} options value and label
 * @param {string} selected
 * @param {(value: string) => void} onChange
 * @param {string} label
 */
export function select(options, selected, onChange, label) {
  const element = h(
    "select",
    { "aria-label": label, onchange: () => onChange(element.value) },
    options.map(([value, text]) => h("option", { value, selected: value === selected }, text)),
  );
  return element;
}

/**
 * A segmented control: one of several options.
 * @param {[string, string][]} options
 * @param {string} selected
 * @param {(value: string) => void} onChange
 * @param {string} label
 */
export function segmentedControl(options, selected, onChange, label) {
  return h(
    "span",
    { class: "segmented", role: "group", "aria-label": label },
    options.map(([value, text]) =>
      h(
        "button",
        {
          type: "button",
          "aria-pressed": value === selected ? "true" : "false",
          "data-value": value,
          onclick: () => onChange(value),
        },
        text,
      ),
    ),
  );
}

/**
 * Tokens as chips. intensity: 0..1 or null of each; diverging: -1..1.
 * @param {Token[]} tokens
 * @param {{intensity?: (number | null)[], diverging?: boolean, onPick?: (n: number) => void, selected?: number, title?: (n: number) => string}}
 * [more]
 */
export function tokenChips(tokens, more = {}) {
  return h(
    "div",
    { class: "chips" },
    tokens.map((token, n) => {
      const intensity = more.intensity?.[n];
      const diverging = more.diverging ?? false;
      const byte = intensity === null || intensity === undefined ? null : diverging ? 127.5 + 127.5 * intensity : 30 + 200 * intensity;
      const style = byte === null ? {} : { background: color(byte, diverging), color: textColor(byte, diverging) };
      const props = {
        class: `chip${n === more.selected ? " selected" : ""}`,
        style,
        title: more.title?.(n) ?? `${token.id}`,
      };
      const text = token.num_pieces && token.num_pieces > 1 ? token.label : escapeInvisible(token.text);
      return more.onPick
        ? h("button", { ...props, type: "button", onclick: () => more.onPick?.(n) }, text)
        : h("span", props, text);
    }),
  );
}

/** A notice with an error's message. @param {unknown} error */
export function errorNotice(error) {
  const kind = /** @type {any} */ (error)?.type ?? "Fault";
  const heading = hasMessage(`error.${kind}`) ? t(`error.${kind}`) : t("error.Fault");
  return h(
    "div",
    { class: "notice bad", role: "alert" },
    h("strong", {}, heading),
    " ",
    String(/** @type {any} */ (error)?.message ?? error),
  );
}

/** @param {string} text */
export function notice(text) {
  return h("p", { class: "notice" }, text);
}

/**
 * Run f with a loading state in the container; show its error.
 * @param {HTMLElement} container
 * @param {AbortSignal} signal
 * @param {() => Promise<import("./dom.js").Child | import("./dom.js").Child[] | void>} f
 */
export async function withLoading(container, signal, f) {
  container.setAttribute("aria-busy", "true");
  const timer = setTimeout(
    () => !signal.aborted && container.childElementCount === 0 && replaceChildren(container, h("p", { class: "muted" }, t("working"))),
    250,
  );
  try {
    const content = await f();
    if (!signal.aborted && content) replaceChildren(container, content);
  } catch (error) {
    if (!signal.aborted) replaceChildren(container, errorNotice(error));
  } finally {
    clearTimeout(timer);
    container.removeAttribute("aria-busy");
  }
}

/**
 * A probability bar, with a lighter baseline bar behind it.
 * @param {number} value
 * @param {number} max
 * @param {number} [baseline]
 */
export function probabilityBar(value, max, baseline) {
  const width = (/** @type {number} */ p) => `${Math.max(0, Math.min(100, (100 * p) / (max || 1)))}%`;
  return h(
    "span",
    { class: "bar" },
    baseline === undefined ? null : h("i", { class: "baseline", style: { width: width(baseline) } }),
    h("i", { class: "value", style: { width: width(value) } }),
  );
}

/** @param {string} title @param {string} subtitle @param {...any} more */
export function heading(title, subtitle, ...more) {
  return h(
    "header",
    { class: "head" },
    h("div", {}, h("h1", { tabindex: -1 }, title), h("p", { class: "subtitle" }, subtitle)),
    ...more,
  );
}

/** @param {string | null} title @param {...any} content */
export function card(title, ...content) {
  return h("section", { class: "card" }, title ? h("h2", {}, title) : null, ...content);
}

/**
 * @param {string} label
 * @param {{value: number, min: number, max: number, step: number, format: (v: number) => string, onChange: (v: number) =>
 * void, id: string}} options
 */
export function slider(label, options) {
  const out = h("output", {}, options.format(options.value));
  const input = h("input", {
    type: "range",
    min: options.min,
    max: options.max,
    step: options.step,
    id: options.id,
    "aria-label": label,
  });
  input.value = String(options.value);
  input.addEventListener("input", () => {
    out.textContent = options.format(Number(input.value));
    input.setAttribute("aria-valuetext", options.format(Number(input.value)));
    options.onChange(Number(input.value));
  });
  return h("label", { class: "slider" }, h("span", {}, label, out), input);
}

export { formatPercent };
