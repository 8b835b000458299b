// Asking the server: JSON, bytes, or lines as they come. Every refusal becomes an error with a kind and words.
// @ts-check
import { reachable, untilAnswered } from "./connection.js";
import { said, t } from "./words.js";

export class Refusal extends Error {
  /** @param {string} kind @param {string} message @param {number} status */
  constructor(kind, message, status) {
    super(message);
    this.kind = kind;
    this.status = status;
  }
}

const WAITS = [150, 400, 1000, 2000];

/**
 * @param {string} name @param {object} body @param {AbortSignal | undefined} signal
 * @returns {Promise<Response>}
 */
async function ask(name, body, signal) {
  for (let turn = 0; ; turn++) {
    const headers = { "content-type": "application/json" };
    const request = { method: "POST", headers, body: JSON.stringify(body), signal };
    const answer = await untilAnswered(() => fetch(`/api/${name}`, request), signal);
    if (answer.ok) return answer;
    if (answer.status === 503 && turn < WAITS.length) {
      await new Promise((resolve) => setTimeout(resolve, WAITS[turn]));
      continue;
    }
    const told = await answer.json().catch(() => ({}));
    throw refusal(told, answer.status);
  }
}

/** @param {any} told @param {number} status */
function refusal(told, status) {
  const error = told.error ?? {};
  return new Refusal(String(error.kind ?? "Fault"), said(error, "message") || t("error.unknown"), status);
}

/** @param {string} name @param {object} [body] @param {AbortSignal} [signal] @returns {Promise<any>} */
export async function post(name, body = {}, signal) {
  return (await ask(name, body, signal)).json();
}

/** @param {string} name @param {object} body @param {AbortSignal} [signal] */
export async function bytes(name, body, signal) {
  return (await ask(name, body, signal)).arrayBuffer();
}

/**
 * Call each(line) for every JSON line as it comes.
 * @param {string} name @param {object} body @param {(line: any) => void} each @param {AbortSignal} signal
 */
export async function lines(name, body, each, signal) {
  const answer = await ask(name, body, signal);
  const reader = /** @type {ReadableStream<Uint8Array>} */ (answer.body).getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (signal.aborted) throw error;
      reachable();
      throw new Refusal("Gone", t("error.cut"), 0);
    });
    rest += decoder.decode(value, { stream: !done });
    const whole = rest.split("\n");
    rest = whole.pop() ?? "";
    for (const line of whole) {
      const said = JSON.parse(line);
      if (said.error) throw refusal(said, 200);
      each(said);
    }
    if (done) return;
  }
}
