// Training: every run from its files, live or past; curves, samples over time, and a scrubber over its checkpoints.
// @ts-check
import { post } from "../api.js";
import { chart, smooth } from "../chart.js";
import { css, fill, h, visible } from "../dom.js";
import { keepers, sheet, titled } from "../keep.js";
import { card, choice, heading, notice, select, slider, trouble } from "../parts.js";
import { link } from "../state.js";
import { count, number, t } from "../words.js";
import { Scrub } from "./scrub.js";
import { state } from "./start.js";
import { strip } from "./strip.js";

const POLL = 2000;
const LEAVE_OUT = new Set([
  "line",
  "step",
  "split",
  "best",
  "time",
  "loss",
  "epoch",
  "lr",
  "grad_norm",
  "grad_norms",
  "tokens_per_second",
  "answers_per_second",
  "applied",
  "note",
  "stopped",
  "seconds",
]);

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const { shelf, params } = context;
  const runs = shelf.items
    .filter((/** @type {any} */ item) => item.kind === "run")
    .map((/** @type {any} */ item) => item.name);
  fill(root, heading(t("training.title"), t("training.lead")));
  if (!runs.length) {
    root.append(h("p", { class: "notice" }, t("training.none")), h("pre", {}, "headwater demo\nheadwater ui runs"));
    return;
  }
  const model = params.model?.replace(/@\d+$/, "");
  const name = params.run ?? (runs.includes(model) ? model : runs[0]);
  if (!runs.includes(name)) await post("run", { run: name }, context.signal); // refuses a name that it does not know
  const shown = new Run(context, name, runs);
  if (!params.run && params.model && model !== name)
    root.append(notice(t("training.other", { model: visible(params.model), run: visible(name) })));
  root.append(...shown.page);
  await shown.refresh();
  const timer = setInterval(() => document.visibilityState === "visible" && shown.live && shown.refresh(), POLL);
  return {
    update: (/** @type {Record<string, string>} */ params) => {
      const same = (params.run ?? params.model) === (context.params.run ?? context.params.model);
      const beside = params.beside !== context.params.beside;
      context.params = params;
      if (same && beside) shown.compare();
      else if (same) shown.draw();
      return same;
    },
    destroy: () => clearInterval(timer),
    theme: () => shown.draw(),
  };
}

class Run {
  /** @param {import("../main.js").Context} context @param {string} name @param {string[]} runs */
  constructor(context, name, runs) {
    this.context = context;
    this.name = name;
    /** @type {any[]} */
    this.lines = [];
    this.last = -1;
    /** @type {any} */
    this.data = null;
    /** @type {any[] | null} */
    this.beside = null;
    this.live = true;
    this.asking = false;
    this.problem = h("div", {});
    this.status = h("span", { class: "faint", role: "status" });
    this.curves = h("div", { class: "charts" });
    this.samples = h("div", {});
    this.scrub = new Scrub(context, name);
    const others = [["", t("training.alone")], ...runs.filter((r) => r !== name).map((r) => [r, r])];
    this.logs = h("span", {});
    const smoothing = slider(t("training.smoothing"), {
      id: "smoothing",
      value: this.smoothing,
      min: 0,
      max: 0.99,
      step: 0.01,
      shown: (v) => (v ? v.toFixed(2) : t("off")),
      change: (v) => context.set({ smooth: v || null }),
    });
    const bar = h(
      "div",
      { class: "row" },
      select(
        runs.map((r) => [r, r]),
        name,
        (r) => context.set({ run: r, beside: null, model: r }, true),
        t("training.run"),
      ),
      runs.length > 1
        ? select(
            /** @type {[string, string][]} */ (others),
            context.params.beside ?? "",
            (r) => context.set({ beside: r || null }),
            t("training.beside"),
          )
        : null,
      this.logs,
      smoothing,
      this.status,
      h("span", { class: "grow" }),
      h("a", { href: link("attention", { model: name }) }, t("view.attention")),
      keepers(
        `run-${name}`,
        () => this.picture(),
        () => this.lines,
      ),
    );
    this.page = [
      card(null, bar, this.problem, this.curves),
      card(t("training.samples"), h("p", { class: "faint" }, t("training.samples.lead")), this.samples),
      this.scrub.page,
    ];
  }

  /** The weight of what came before in the smoothed curves; 0 is none of them. */
  get smoothing() {
    return Math.max(0, Math.min(0.99, Number(this.context.params.smooth ?? 0) || 0));
  }

  /** All charts on one sheet. */
  async picture() {
    const charts = /** @type {SVGSVGElement[]} */ ([...this.curves.querySelectorAll("svg.chart")]);
    const layers = /** @type {any} */ (this.curves.querySelector(".strip canvas"));
    const parts = [sheet(charts, "", 2)];
    if (layers) parts.push(titled(await layers.vector(), t("training.layers")));
    return sheet(parts, `${t("training.title")} · ${visible(this.name)}`);
  }

  async refresh() {
    if (this.asking) return;
    this.asking = true;
    try {
      const data = await post("run", { run: this.name, after: this.last }, this.context.signal);
      if (data.last < this.last) [this.lines, this.last] = [[], -1];
      this.lines.push(...data.lines.filter((/** @type {any} */ line) => line.line > this.last));
      const changed = data.last !== this.last || !this.data;
      this.last = data.last;
      this.data = data;
      this.live = data.state === "live";
      this.status.textContent = `${state(data.state)} · ${t("step")} ${count(data.step)}` + this.speed();
      if (changed) this.draw();
      this.scrub.has(data.checkpoints, data.samples);
      if (this.context.params.beside && !this.beside) await this.compare();
      fill(this.problem);
    } catch (error) {
      if (!this.context.signal.aborted) fill(this.problem, trouble(error)); // what was drawn stays, and it is asked again
    } finally {
      this.asking = false;
    }
  }

  async compare() {
    const other = this.context.params.beside;
    this.beside = other ? (await post("run", { run: other }, this.context.signal)).lines : null;
    this.besideName = other ?? "";
    this.draw();
  }

  speed() {
    const rates = this.lines.filter((line) => line.tokens_per_second).map((line) => line.tokens_per_second);
    return rates.length ? ` · ${count(rates[rates.length - 1])} ${t("training.rate")}` : "";
  }

  draw() {
    const train = this.lines.filter((line) => line.split === "train");
    const valid = this.lines.filter((line) => line.split === "valid");
    const of = (/** @type {any[]} */ lines, /** @type {string} */ name) =>
      lines.filter((x) => typeof x[name] === "number").map((x) => /** @type {[number, number]} */ ([x.step, x[name]]));
    const log = this.context.params.log === "1";
    fill(
      this.logs,
      choice(
        [
          ["0", t("scale.linear")],
          ["1", t("scale.log")],
        ],
        log ? "1" : "0",
        (v) => this.context.set({ log: v === "1" ? 1 : null }),
        t("training.scale"),
      ),
    );
    const room = this.curves.clientWidth || 560;
    const width = Math.max(300, Math.min(560, room > 700 ? room / 2 - 12 : room));
    const plot = (/** @type {string} */ title, /** @type {import("../chart.js").Curve[]} */ curves, scale = false) =>
      curves.some((c) => c.points.length)
        ? h("figure", {}, chart({ curves, width, log: scale, x: t("step"), title }))
        : null;
    const [accent, warm, third] = [css("--accent"), css("--warm"), css("--third")];
    const scores = [...new Set(valid.flatMap((line) => Object.keys(line)))].filter(
      (name) => !LEAVE_OUT.has(name) && valid.some((line) => typeof line[name] === "number"),
    );
    const hues = [accent, warm, third];
    const notes = this.lines.filter((line) => line.note);
    const other = visible(this.besideName ?? "");
    const theirs = (/** @type {string} */ split) => (this.beside ?? []).filter((x) => x.split === split);
    fill(
      this.curves,
      this.lines.length ? null : h("p", { class: "notice" }, t("training.empty")),
      plot(
        t("training.loss"),
        [
          ...this.raw(t("training.train"), accent, of(train, "loss")),
          { name: t("training.valid"), colour: warm, points: of(valid, "loss"), dots: true },
          ...this.raw(`${other} · ${t("training.train")}`, third, of(theirs("train"), "loss")),
          {
            name: `${other} · ${t("training.valid")}`,
            colour: third,
            points: of(theirs("valid"), "loss"),
            dots: true,
            dashed: true,
          },
        ],
        log,
      ),
      scores.map((name, n) =>
        plot(name, [
          { name, colour: hues[(n + 1) % 3], points: of(valid, name), dots: true },
          { name: `${other} · ${name}`, colour: css("--soft"), points: of(theirs("valid"), name), dots: true, dashed: true },
        ]),
      ),
      plot(t("training.lr"), [{ name: t("training.lr"), colour: third, points: of(train, "lr") }]),
      plot(t("training.norm"), this.raw(t("training.norm"), warm, of(train, "grad_norm")), true),
      strip(train, `gradients-${this.name}`, room),
      notes.length
        ? h(
            "ul",
            { class: "notes" },
            notes.slice(-5).map((line) => h("li", {}, `${t("step")} ${line.step}: ${line.note}`)),
          )
        : null,
    );
    this.drawSamples();
  }

  /**
   * A curve as it was measured; where smoothing is on it is drawn weakly, and its moving average strongly.
   * @param {string} name @param {string} colour @param {[number, number][]} points
   * @returns {import("../chart.js").Curve[]}
   */
  raw(name, colour, points) {
    const weight = this.smoothing;
    if (!weight) return [{ name, colour, points }];
    return [
      { name, colour, points, faint: true },
      { name: t("training.smooth", { name }), colour, points: smooth(points, weight) },
    ];
  }

  drawSamples() {
    const samples = this.data?.samples ?? [];
    if (!samples.length) return fill(this.samples, h("p", { class: "notice" }, t("training.samples.none")));
    const names = Object.keys(samples[0]).filter((name) => name !== "step");
    const first = names[0];
    const inputs = [...new Set(samples.map((/** @type {any} */ x) => text(x[first])))].slice(0, 12);
    const chosen = Number(this.context.params.sample ?? 0) || 0;
    const mine = samples.filter(
      (/** @type {any} */ x) => text(x[first]) === inputs[Math.min(chosen, inputs.length - 1)],
    );
    fill(
      this.samples,
      select(
        inputs.map((input, n) => [String(n), visible(String(input)).slice(0, 90)]),
        String(chosen),
        (v) => this.context.set({ sample: v }),
        t("training.sample"),
      ),
      h(
        "div",
        { class: "scroll tall" },
        h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              h("th", { class: "num" }, t("step")),
              names.slice(1).map((name) => h("th", {}, name)),
            ),
          ),
          h(
            "tbody",
            {},
            mine.reverse().map((/** @type {any} */ x) =>
              h(
                "tr",
                {},
                h("td", { class: "num" }, count(x.step)),
                names.slice(1).map((name) => h("td", {}, text(x[name]))),
              ),
            ),
          ),
        ),
      ),
    );
  }
}

/** @param {any} value */
function text(value) {
  if (typeof value === "number") return number(value);
  return visible(typeof value === "string" ? value : JSON.stringify(value ?? "")).slice(0, 400);
}
