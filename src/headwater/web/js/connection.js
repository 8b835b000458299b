// Retries while the server is unreachable, with a banner.
// @ts-check
import { h } from "./dom.js";
import { t } from "./i18n.js";

const POLL_INTERVAL_MS = 1000;
/** @type {Promise<void> | null} one poll shared by all waiting requests */
let polling = null;

/** Resolves when the server responds again. */
export function waitUntilReachable() {
  polling ??= poll().finally(() => (polling = null));
  return polling;
}

async function poll() {
  const banner = h("div", { class: "banner", id: "unreachable", role: "alert" }, t("error.unreachable"));
  document.body.append(banner);
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, POLL_INTERVAL_MS));
    const response = await fetch("/healthz", { cache: "no-store" }).catch(() => null);
    if (response?.ok) break;
  }
  banner.remove();
}

/**
 * Call attempt until the server responds; an error status is a response too.
 * @template T
 * @param {() => Promise<T>} attempt
 * @param {AbortSignal} [signal]
 * @returns {Promise<T>}
 */
export async function retryUntilReachable(attempt, signal) {
  for (;;) {
    try {
      return await attempt();
    } catch (error) {
      if (signal?.aborted || !(error instanceof TypeError)) throw error;
      await waitUntilReachable();
      signal?.throwIfAborted();
    }
  }
}
