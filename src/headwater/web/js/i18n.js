// Translations and number formats.
// @ts-check
import { retryUntilReachable } from "./connection.js";

/** @type {Record<string, string>} */
let messages = {};
let current = "en";

/** @param {string} language */
export async function loadLanguage(language) {
  const file = new URL(`../locales/${language === "zh" ? "zh" : "en"}.json`, import.meta.url);
  const response = await retryUntilReachable(() => fetch(file));
  messages = await response.json();
  current = language === "zh" ? "zh" : "en";
  document.documentElement.lang = current === "zh" ? "zh-CN" : "en";
}

export function language() {
  return current;
}

/** A translated message; {name} placeholders are replaced. @param {string} key @param {Record<string, string | number>} [values] */
export function t(key, values = {}) {
  const text = messages[key];
  if (text === undefined) throw new Error(`no message ${key}`);
  return text.replace(/\{(\w+)\}/g, (placeholder, name) => (name in values ? String(values[name]) : placeholder));
}

/** Whether there is such a message. @param {string} key */
export function hasMessage(key) {
  return key in messages;
}

/**
 * The translation of a name from the server; the name itself where there is none.
 * @param {string} group
 * @param {string} name
 */
export function translateName(group, name) {
  const key = `${group}.${name}`;
  return hasMessage(key) ? t(key) : name;
}

/**
 * A field of the server's JSON in the current language: name, or name_zh.
 * @param {any} object
 * @param {string} name
 * @returns {string}
 */
export function localized(object, name) {
  return String((current === "zh" && object[`${name}_zh`]) || (object[name] ?? ""));
}

/** A count with thousands separators. @param {number} n */
export function formatCount(n) {
  return n.toLocaleString(current === "zh" ? "zh-CN" : "en");
}

/** A compact count: 1.3 M. @param {number} n */
export function formatCompact(n) {
  const units = ["", " k", " M", " G", " T"];
  const step = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(1, n)) / 3));
  return step ? (n / 1000 ** step).toPrecision(3) + units[step] : String(n);
}

/** A compact number of bytes. @param {number} n */
export function formatBytes(n) {
  return formatCompact(n) + "B";
}

/** A probability as a percentage, with more digits where it is small. @param {number} p */
export function formatPercent(p) {
  const x = 100 * p;
  return (
    (x >= 10 ? x.toFixed(1) : x >= 0.1 ? x.toFixed(2) : x === 0 ? "0" : x < 0.001 ? "<0.001" : x.toFixed(3)) + " %"
  );
}

/** A number with a fixed number of significant digits. @param {number | null} x */
export function formatNumber(x) {
  if (x === null || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return x.toExponential(2);
  return x.toFixed(size < 1 ? 4 : size < 100 ? 3 : 1);
}
