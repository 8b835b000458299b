// Whether the server answers. While it does not, one banner says so, and whoever asked waits and asks again.
// @ts-check
import { h } from "./dom.js";
import { t } from "./words.js";

const PAUSE = 1000;
/** @type {Promise<void> | null} one poll for all who wait */
let polling = null;

/** Resolves when the server answers again. */
export function reachable() {
  polling ??= poll().finally(() => (polling = null));
  return polling;
}

async function poll() {
  const banner = h("div", { class: "banner", id: "unreachable", role: "alert" }, t("error.gone"));
  document.body.append(banner);
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, PAUSE));
    const answer = await fetch("/healthz", { cache: "no-store" }).catch(() => null);
    if (answer?.ok) break;
  }
  banner.remove();
}

/**
 * Call attempt until the server answers it. An answer of any kind is an answer, also a refusal.
 * @template T
 * @param {() => Promise<T>} attempt
 * @param {AbortSignal} [signal]
 * @returns {Promise<T>}
 */
export async function untilAnswered(attempt, signal) {
  for (;;) {
    try {
      return await attempt();
    } catch (error) {
      if (signal?.aborted || !(error instanceof TypeError)) throw error;
      await reachable();
      signal?.throwIfAborted();
    }
  }
}
