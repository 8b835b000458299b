// The frame of the page: which view, which model, which language, light or dark.
// @ts-check
import { post } from "./api.js";
import { reachable } from "./connection.js";
import { fill, h } from "./dom.js";
import { select, trouble } from "./parts.js";
import { go, here, link, taste } from "./state.js";
import { language, speak, t } from "./words.js";

/**
 * What a view is given. set changes its address (a new entry in the history with push).
 * @typedef {object} Context
 * @property {Record<string, string>} params
 * @property {any} about the model; null in views that need none
 * @property {any} shelf
 * @property {AbortSignal} signal ends when the view is left
 * @property {(changes: Record<string, any>, push?: boolean) => void} set
 */
/**
 * @typedef {{update?: (params: Record<string, string>) => boolean, theme?: () => void, destroy?: () => void}} Mounted
 */
/** @typedef {{mount: (root: HTMLElement, context: Context) => Promise<Mounted | void>, needs?: string}} View */

/** A view is fetched when it is first opened. @type {Record<string, () => Promise<View>>} */
const VIEWS = {
  start: () => import("./views/start.js"),
  attention: () => import("./views/attention.js"),
  next: () => import("./views/next.js"),
  why: () => import("./views/why.js"),
  talk: () => import("./views/talk.js"),
  walk: () => import("./views/walk.js"),
  anatomy: () => import("./views/anatomy.js"),
  compare: () => import("./views/compare.js"),
  check: () => import("./views/check.js"),
  training: () => import("./views/training.js"),
};

const TRIES = 5;

/** A view's module. One that could not be fetched is fetched under another address: browsers remember the failure. */
async function loaded(/** @type {string} */ name) {
  for (let turn = 0; ; turn++) {
    try {
      return /** @type {View} */ (await (turn ? import(`./views/${name}.js?again=${turn}`) : VIEWS[name]()));
    } catch (error) {
      if (!(error instanceof TypeError) || turn >= TRIES) throw error;
      await reachable();
    }
  }
}

const nav = h("nav", { class: "views" });
const top = h("div", { class: "tools" });
const main = h("main", { id: "main", tabindex: -1 });
/** @type {any} */
let shelf = { items: [], runs: [] };
/** @type {{view: string, model: string, leaving: AbortController, mounted: Mounted} | null} */
let shown = null;

function theme() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  return taste.get("theme", dark);
}

function frame() {
  const { view, params } = here();
  const names = shelf.items.map((/** @type {any} */ item) => [item.name, item.name]);
  const current = params.model ?? params.run ?? "";
  const known = names.some((/** @type {string[]} */ n) => n[0] === current);
  const models = select(
    known ? names : [current ? [current, current] : ["", t("choose")], ...names],
    current,
    (name) => go(view === "start" ? "attention" : view, { model: name }),
    t("model"),
  );
  models.id = "model";
  const other = language() === "zh" ? "en" : "zh";
  fill(
    top,
    h("a", { class: "brand", href: link("start", { model: params.model }) }, "Headwater"),
    models,
    h("span", { class: "grow" }),
    h(
      "button",
      {
        class: "quiet",
        id: "language",
        type: "button",
        lang: other === "zh" ? "zh-CN" : "en",
        onclick: () => speakIn(other),
      },
      other === "zh" ? "中文" : "English",
    ),
    h(
      "button",
      { class: "quiet", id: "theme", type: "button", onclick: turn },
      t(theme() === "dark" ? "theme.light" : "theme.dark"),
    ),
  );
  fill(
    nav,
    Object.keys(VIEWS).map((name) =>
      h(
        "a",
        { href: link(name, { model: current }), "data-view": name, "aria-current": name === view ? "page" : null },
        t(`view.${name}`),
      ),
    ),
  );
  const chosen = /** @type {HTMLElement | null} */ (nav.querySelector("[aria-current]"));
  if (chosen) nav.scrollLeft = chosen.offsetLeft - (nav.clientWidth - chosen.offsetWidth) / 2;
  const skip = document.getElementById("skip");
  if (skip) skip.textContent = t("skip");
  document.title = `${t(`view.${view in VIEWS ? view : "start"}`)} · Headwater`;
}

/** @param {string} name */
async function speakIn(name) {
  taste.set("language", name);
  await speak(name);
  await render(true);
}

function turn() {
  const next_ = theme() === "dark" ? "light" : "dark";
  taste.set("theme", next_);
  document.documentElement.dataset.theme = next_;
  frame();
  if (shown?.mounted.theme) shown.mounted.theme();
  else render(true);
}

/** @param {boolean} [anew] */
async function render(anew = false) {
  const { view: asked, params } = here();
  const name = asked in VIEWS ? asked : "start";
  frame();
  if (!anew && shown && shown.view === name && shown.model === params.model && shown.mounted.update?.(params)) return;
  shown?.leaving.abort();
  shown?.mounted.destroy?.();
  const leaving = new AbortController();
  const mine = (shown = { view: name, model: params.model, leaving, mounted: {} });
  const root = h("div", { class: `view ${name}` });
  fill(main, root);
  window.scrollTo(0, 0);
  try {
    const view = await loaded(name);
    const about = view.needs === "model" ? await theModel(params.model, leaving.signal) : null;
    if (leaving.signal.aborted) return;
    if (view.needs === "model" && !about) return go("start", {}, true);
    const set = (/** @type {Record<string, any>} */ changes, push = false) =>
      go(name, { ...here().params, ...changes }, !push);
    const mounted = await view.mount(root, { params, about, shelf, signal: leaving.signal, set });
    if (shown === mine) mine.mounted = mounted ?? {};
    else mounted?.destroy?.();
  } catch (error) {
    if (!leaving.signal.aborted)
      fill(
        root,
        h("h1", {}, t(`view.${name}`)),
        trouble(error),
        h("p", {}, h("a", { href: link("start") }, t("back.start"))),
      );
  } finally {
    root.dataset.ready = "yes";
    performance.mark("drawn");
  }
}

/** @param {string | undefined} name @param {AbortSignal} signal */
async function theModel(name, signal) {
  const first = name ?? shelf.items[0]?.name;
  if (!first) return null;
  if (!name) go(here().view, { ...here().params, model: first }, true);
  return post("about", { model: first }, signal);
}

async function begin() {
  document.documentElement.dataset.theme = theme();
  const language_ = taste.get("language", navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");
  const [found] = await Promise.allSettled([post("shelf"), speak(language_), (VIEWS[here().view] ?? VIEWS.start)()]);
  const page = /** @type {HTMLElement} */ (document.getElementById("page"));
  fill(page, h("header", { class: "top" }, top), nav, main);
  if (found.status === "fulfilled") shelf = found.value;
  else {
    frame();
    fill(main, trouble(found.reason));
    return;
  }
  window.addEventListener("hashchange", () => render());
  await render();
}

begin();
