// Router: view and parameters in location.hash; preferences in localStorage.
// @ts-check

/** @typedef {{view: string, params: Record<string, string>}} Route */

/** @returns {Route} */
export function currentRoute() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { view: path || "start", params: Object.fromEntries(new URLSearchParams(query)) };
}

/** The URL hash of a view. @param {string} view @param {Record<string, string | number | null | undefined>} params */
export function routeUrl(view, params = {}) {
  const entries = Object.entries(params).filter(([, v]) => v !== null && v !== undefined && v !== "");
  const query = new URLSearchParams(entries.map(([k, v]) => [k, String(v)])).toString();
  return `#/${view}${query ? "?" + query : ""}`;
}

/**
 * Navigate: a new history entry unless replace; fires hashchange.
 * @param {string} view @param {Record<string, any>} params @param {boolean} [replace]
 */
export function navigate(view, params, replace = false) {
  const address = routeUrl(view, params);
  if (address === location.hash) return;
  if (replace) {
    history.replaceState(null, "", address);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = address;
}

/** Token ids in a URL: base 36, separated by dots. @param {number[]} ids */
export function encodeIds(ids) {
  return ids.map((n) => n.toString(36)).join(".");
}

/** @param {string | undefined} text @returns {number[] | undefined} */
export function decodeIds(text) {
  if (!text) return undefined;
  const ids = text.split(".").map((n) => parseInt(n, 36));
  return ids.every((n) => Number.isSafeInteger(n) && n >= 0) ? ids : undefined;
}

/** The body of a request about a text. @param {Record<string, string>} params */
export function requestBody(params) {
  /** @type {Record<string, any>} */
  const body = { model: params.model, text: params.text ?? "", source: params.source ?? "" };
  const ids = decodeIds(params.ids);
  const sourceIds = decodeIds(params.source_ids);
  if (ids) body.ids = ids;
  if (sourceIds) body.source_ids = sourceIds;
  return body;
}

/** Preferences in localStorage: language and theme; no texts or models. */
export const preferences = {
  /** @param {string} name @param {string} fallback */
  get(name, fallback) {
    try {
      return localStorage.getItem(`headwater.${name}`) ?? fallback;
    } catch {
      return fallback;
    }
  },
  /** @param {string} name @param {string} value */
  set(name, value) {
    try {
      localStorage.setItem(`headwater.${name}`, value);
    } catch {
      /* storage is disabled */
    }
  },
};
