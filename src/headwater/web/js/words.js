// The page's two languages: flat message files, one word for one thing.
// @ts-check
import { untilAnswered } from "./connection.js";

/** @type {Record<string, string>} */
let messages = {};
let current = "en";

/** @param {string} language */
export async function speak(language) {
  const file = new URL(`../messages/${language === "zh" ? "zh" : "en"}.json`, import.meta.url);
  const answer = await untilAnswered(() => fetch(file));
  messages = await answer.json();
  current = language === "zh" ? "zh" : "en";
  document.documentElement.lang = current === "zh" ? "zh-CN" : "en";
}

export function language() {
  return current;
}

/** A message; {name} in it is replaced. @param {string} key @param {Record<string, string | number>} [values] */
export function t(key, values = {}) {
  const text = messages[key];
  if (text === undefined) throw new Error(`no message ${key}`);
  return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}

/** Whether there is such a message. @param {string} key */
export function knows(key) {
  return key in messages;
}

/**
 * The word for a name that the server gives; the name itself where the page has no word for it.
 * @param {string} group
 * @param {string} name
 */
export function word(group, name) {
  const key = `${group}.${name}`;
  return knows(key) ? t(key) : name;
}

/**
 * What the server says in both languages: its Chinese is beside it, under the same name.
 * @param {any} told
 * @param {string} name
 * @returns {string}
 */
export function said(told, name) {
  return String((current === "zh" && told[`${name}_zh`]) || (told[name] ?? ""));
}

/** A count with thousands. @param {number} n */
export function count(n) {
  return n.toLocaleString(current === "zh" ? "zh-CN" : "en");
}

/** A count in short: 1.3 M. @param {number} n */
export function short(n) {
  const units = ["", " k", " M", " G", " T"];
  const step = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(1, n)) / 3));
  return step ? (n / 1000 ** step).toPrecision(3) + units[step] : String(n);
}

/** Bytes in short. @param {number} n */
export function bytes(n) {
  return short(n) + "B";
}

/** A share as per cent, precise where it is small. @param {number} p */
export function percent(p) {
  const x = 100 * p;
  return (
    (x >= 10 ? x.toFixed(1) : x >= 0.1 ? x.toFixed(2) : x === 0 ? "0" : x < 0.001 ? "<0.001" : x.toFixed(3)) + " %"
  );
}

/** A number in the fewest telling digits. @param {number | null} x */
export function number(x) {
  if (x === null || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return x.toExponential(2);
  return x.toFixed(size < 1 ? 4 : size < 100 ? 3 : 1);
}
