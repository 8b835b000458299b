// HTTP client: JSON, bytes or streamed JSON lines; errors as ApiError.
// @ts-check
import { waitUntilReachable, retryUntilReachable } from "./connection.js";
import { localized, t } from "./i18n.js";

export class ApiError extends Error {
  /** @param {string} type @param {string} message @param {number} status */
  constructor(type, message, status) {
    super(message);
    this.type = type;
    this.status = status;
  }
}

const RETRY_DELAYS_MS = [150, 400, 1000, 2000];

/**
 * @param {string} name @param {object} body @param {AbortSignal | undefined} signal
 * @returns {Promise<Response>}
 */
async function request(name, body, signal) {
  for (let attempt = 0; ; attempt++) {
    const headers = { "content-type": "application/json" };
    const options = { method: "POST", headers, body: JSON.stringify(body), signal };
    const response = await retryUntilReachable(() => fetch(`/api/${name}`, options), signal);
    if (response.ok) return response;
    if (response.status === 503 && attempt < RETRY_DELAYS_MS.length) {
      await new Promise((resolve) => setTimeout(resolve, RETRY_DELAYS_MS[attempt]));
      continue;
    }
    const payload = await response.json().catch(() => ({}));
    throw toApiError(payload, response.status);
  }
}

/** @param {any} payload @param {number} status */
function toApiError(payload, status) {
  const error = payload.error ?? {};
  return new ApiError(String(error.type ?? "Fault"), localized(error, "message") || t("error.unknown"), status);
}

/** @param {string} name @param {object} [body] @param {AbortSignal} [signal] @returns {Promise<any>} */
export async function post(name, body = {}, signal) {
  return (await request(name, body, signal)).json();
}

/** @param {string} name @param {object} body @param {AbortSignal} [signal] */
export async function postForBytes(name, body, signal) {
  return (await request(name, body, signal)).arrayBuffer();
}

/**
 * Call onLine(line) for every JSON line as it arrives.
 * @param {string} name @param {object} body @param {(line: any) => void} onLine @param {AbortSignal} signal
 */
export async function postForLines(name, body, onLine, signal) {
  const response = await request(name, body, signal);
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (signal.aborted) throw error;
      waitUntilReachable();
      throw new ApiError("ConnectionLost", t("error.interrupted"), 0);
    });
    rest += decoder.decode(value, { stream: !done });
    const complete = rest.split("\n");
    rest = complete.pop() ?? "";
    for (const line of complete) {
      const event = JSON.parse(line);
      if (event.error) throw toApiError(event, 200);
      onLine(event);
    }
    if (done) return;
  }
}
