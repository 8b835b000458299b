// Where the page is: #/attention?model=…&text=…  All a view shows is in its address, to be linked and gone back to.
// @ts-check

/** @typedef {{view: string, params: Record<string, string>}} Place */

/** @returns {Place} */
export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { view: path || "start", params: Object.fromEntries(new URLSearchParams(query)) };
}

/** The address of a view. @param {string} view @param {Record<string, string | number | null | undefined>} params */
export function link(view, params = {}) {
  const kept = Object.entries(params).filter(([, v]) => v !== null && v !== undefined && v !== "");
  const query = new URLSearchParams(kept.map(([k, v]) => [k, String(v)])).toString();
  return `#/${view}${query ? "?" + query : ""}`;
}

/**
 * Go there. A new entry in the history unless replace; listeners hear of it through hashchange.
 * @param {string} view @param {Record<string, any>} params @param {boolean} [replace]
 */
export function go(view, params, replace = false) {
  const address = link(view, params);
  if (address === location.hash) return;
  if (replace) {
    history.replaceState(null, "", address);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = address;
}

/** Ids in an address: base 36, a dot between. @param {number[]} ids */
export function packed(ids) {
  return ids.map((n) => n.toString(36)).join(".");
}

/** @param {string | undefined} text @returns {number[] | undefined} */
export function unpacked(text) {
  if (!text) return undefined;
  const ids = text.split(".").map((n) => parseInt(n, 36));
  return ids.every((n) => Number.isSafeInteger(n) && n >= 0) ? ids : undefined;
}

/** What a request about a text holds. @param {Record<string, string>} params */
export function asked(params) {
  /** @type {Record<string, any>} */
  const body = { model: params.model, text: params.text ?? "", source: params.source ?? "" };
  const ids = unpacked(params.ids);
  const sourceIds = unpacked(params.sids);
  if (ids) body.ids = ids;
  if (sourceIds) body.source_ids = sourceIds;
  return body;
}

/** What the browser remembers of a user's taste; nothing of texts or models. */
export const taste = {
  /** @param {string} name @param {string} otherwise */
  get(name, otherwise) {
    try {
      return localStorage.getItem(`headwater.${name}`) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  /** @param {string} name @param {string} value */
  set(name, value) {
    try {
      localStorage.setItem(`headwater.${name}`, value);
    } catch {
      /* a browser that keeps nothing */
    }
  },
};
