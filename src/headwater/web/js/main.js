// Application: header, navigation, and the view of the current route.
// @ts-check
import { post } from "./api.js";
import { waitUntilReachable } from "./connection.js";
import { replaceChildren, h } from "./dom.js";
import { select, errorNotice } from "./components.js";
import { navigate, currentRoute, routeUrl, preferences } from "./router.js";
import { language, loadLanguage, t } from "./i18n.js";

/**
 * The context of a view. setParams changes the URL parameters (with push as a new history entry).
 * @typedef {object} Context
 * @property {Record<string, string>} params
 * @property {any} modelInfo the model's facts; null in views that need none
 * @property {any} catalog models and runs of the server
 * @property {AbortSignal} signal aborts when the view is left
 * @property {(changes: Record<string, any>, push?: boolean) => void} setParams
 */
/**
 * @typedef {{update?: (params: Record<string, string>) => boolean, onThemeChange?: () => void, destroy?: () => void}} Mounted
 */
/**
 * requires: "model" if it shows a model. input: what that model must read, "text" by default, or "any".
 * @typedef {{mount: (root: HTMLElement, context: Context) => Promise<Mounted | void>, requires?: string, input?: string}} View
 */

/** Views are imported on demand. @type {Record<string, () => Promise<View>>} */
const VIEWS = {
  start: () => import("./views/start.js"),
  attention: () => import("./views/attention.js"),
  image: () => import("./views/image.js"),
  "next-token": () => import("./views/next_token.js"),
  attribution: () => import("./views/attribution.js"),
  chat: () => import("./views/chat.js"),
  speech: () => import("./views/speech.js"),
  walkthrough: () => import("./views/walkthrough.js"),
  architecture: () => import("./views/architecture.js"),
  compare: () => import("./views/compare.js"),
  visibility: () => import("./views/visibility.js"),
  check: () => import("./views/check.js"),
  training: () => import("./views/training.js"),
};

const MAX_RETRIES = 5;

/** A view's module. After a failure it is imported under another URL: browsers cache the failure. */
async function importView(/** @type {string} */ name) {
  for (let attempt = 0; ; attempt++) {
    try {
      return /** @type {View} */ (await (attempt ? import(`./views/${name.replace("-", "_")}.js?retry=${attempt}`) : VIEWS[name]()));
    } catch (error) {
      if (!(error instanceof TypeError) || attempt >= MAX_RETRIES) throw error;
      await waitUntilReachable();
    }
  }
}

const nav = h("nav", { class: "nav" });
const top = h("div", { class: "toolbar" });
const main = h("main", { id: "main", tabindex: -1 });
/** @type {any} */
let catalog = { models: [], runs: [] };
/** @type {{view: string, model: string, abortController: AbortController, mounted: Mounted} | null} */
let currentView = null;

function theme() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  return preferences.get("theme", dark);
}

function renderHeader() {
  const { view, params } = currentRoute();
  const names = catalog.models.map((/** @type {any} */ item) => [item.name, item.name]);
  const current = params.model ?? params.run ?? "";
  const isKnown = names.some((/** @type {string[]} */ n) => n[0] === current);
  const models = select(
    isKnown ? names : [current ? [current, current] : ["", t("choose")], ...names],
    current,
    (name) => navigate(view === "start" ? "attention" : view, { model: name }),
    t("model"),
  );
  models.id = "model";
  const other = language() === "zh" ? "en" : "zh";
  replaceChildren(
    top,
    h("a", { class: "brand", href: routeUrl("start", { model: params.model }) }, "Headwater"),
    models,
    h("span", { class: "spacer" }),
    h(
      "button",
      {
        class: "ghost",
        id: "language",
        type: "button",
        lang: other === "zh" ? "zh-CN" : "en",
        onclick: () => setLanguage(other),
      },
      other === "zh" ? "中文" : "English",
    ),
    h(
      "button",
      { class: "ghost", id: "theme", type: "button", onclick: toggleTheme },
      t(theme() === "dark" ? "theme.light" : "theme.dark"),
    ),
  );
  replaceChildren(
    nav,
    Object.keys(VIEWS).map((name) =>
      h(
        "a",
        { href: routeUrl(name, { model: current }), "data-view": name, "aria-current": name === view ? "page" : null },
        t(`view.${name}`),
      ),
    ),
  );
  const selected = /** @type {HTMLElement | null} */ (nav.querySelector("[aria-current]"));
  if (selected) nav.scrollLeft = selected.offsetLeft - (nav.clientWidth - selected.offsetWidth) / 2;
  const skip = document.getElementById("skip");
  if (skip) skip.textContent = t("skip");
  document.title = `${t(`view.${view in VIEWS ? view : "start"}`)} · Headwater`;
}

/** @param {string} name */
async function setLanguage(name) {
  preferences.set("language", name);
  await loadLanguage(name);
  await render(true);
}

function toggleTheme() {
  const newTheme = theme() === "dark" ? "light" : "dark";
  preferences.set("theme", newTheme);
  document.documentElement.dataset.theme = newTheme;
  renderHeader();
  if (currentView?.mounted.onThemeChange) currentView.mounted.onThemeChange();
  else render(true);
}

/** @param {boolean} [force] */
async function render(force = false) {
  const { view: requested, params } = currentRoute();
  const name = requested in VIEWS ? requested : "start";
  renderHeader();
  if (!force && currentView && currentView.view === name && currentView.model === params.model && currentView.mounted.update?.(params)) return;
  currentView?.abortController.abort();
  currentView?.mounted.destroy?.();
  const abortController = new AbortController();
  const thisView = (currentView = { view: name, model: params.model, abortController, mounted: {} });
  const root = h("div", { class: `view ${name}` });
  replaceChildren(main, root);
  window.scrollTo(0, 0);
  try {
    const view = await importView(name);
    const modelInfo = view.requires === "model" ? await fetchModelInfo(params.model, abortController.signal) : null;
    if (abortController.signal.aborted) return;
    if (view.requires === "model" && !modelInfo) return navigate("start", {}, true);
    if (modelInfo && ![modelInfo.input, "any"].includes(view.input ?? "text")) return replaceChildren(root, otherInput(name, modelInfo));
    const setParams = (/** @type {Record<string, any>} */ changes, push = false) =>
      navigate(name, { ...currentRoute().params, ...changes }, !push);
    const mounted = await view.mount(root, { params, modelInfo, catalog, signal: abortController.signal, setParams });
    if (currentView === thisView) thisView.mounted = mounted ?? {};
    else mounted?.destroy?.();
  } catch (error) {
    if (!abortController.signal.aborted)
      replaceChildren(
        root,
        h("h1", {}, t(`view.${name}`)),
        errorNotice(error),
        h("p", {}, h("a", { href: routeUrl("start") }, t("back.start"))),
      );
  } finally {
    root.dataset.ready = "yes";
    performance.mark("drawn");
  }
}

/** What a view says of a model that reads something else. @param {string} view @param {any} modelInfo */
function otherInput(view, modelInfo) {
  const other = /** @type {Record<string, string>} */ ({ image: "image", sound: "speech" })[modelInfo.input] ?? "attention";
  const link = h("a", { href: routeUrl(other, { model: modelInfo.name }) }, t(`view.${other}`));
  return h("div", { class: "stack" }, h("h1", {}, t(`view.${view}`)), h("p", { class: "notice" }, t(`input.${modelInfo.input}`), " ", link));
}

/** @param {string | undefined} name @param {AbortSignal} signal */
async function fetchModelInfo(name, signal) {
  const first = name ?? catalog.models[0]?.name;
  if (!first) return null;
  if (!name) navigate(currentRoute().view, { ...currentRoute().params, model: first }, true);
  return post("model_info", { model: first }, signal);
}

async function init() {
  document.documentElement.dataset.theme = theme();
  const language_ = preferences.get("language", navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");
  const [result] = await Promise.allSettled([post("models"), loadLanguage(language_), (VIEWS[currentRoute().view] ?? VIEWS.start)()]);
  const page = /** @type {HTMLElement} */ (document.getElementById("page"));
  replaceChildren(page, h("header", { class: "top" }, top), nav, main);
  if (result.status === "fulfilled") catalog = result.value;
  else {
    renderHeader();
    replaceChildren(main, errorNotice(result.reason));
    return;
  }
  window.addEventListener("hashchange", () => render());
  await render();
}

init();
