// Training curves and samples.
// @ts-check
import { post } from "../api.js";
import { chart, ema } from "../chart.js";
import { cssVariable, replaceChildren, h, escapeInvisible } from "../dom.js";
import { exportButtons, combineSvgs, withTitle } from "../export.js";
import { card, segmentedControl, heading, notice, select, slider, errorNotice } from "../components.js";
import { routeUrl } from "../router.js";
import { formatCount, formatNumber, t, translateName } from "../i18n.js";
import { CheckpointSlider } from "./checkpoints.js";
import { state } from "./start.js";
import { gradNormHeatmap } from "./grad_norms.js";
import { stepCharts, stepMetricNames } from "./step_metrics.js";

const POLL = 2000;
const NON_METRICS = new Set([
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
  "targets_per_second",
  "applied",
  "note",
  "stop_reason",
  "seconds",
]);

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const { catalog, params } = context;
  const runs = catalog.models
    .filter((/** @type {any} */ item) => item.kind === "run")
    .map((/** @type {any} */ item) => item.name);
  replaceChildren(root, heading(t("training.title"), t("training.lead")));
  if (!runs.length) {
    root.append(h("p", { class: "notice" }, t("training.none")), h("pre", {}, "headwater demo\nheadwater ui runs"));
    return;
  }
  const model = params.model?.replace(/@(\d+|base)$/, "");
  const name = params.run ?? (runs.includes(model) ? model : runs[0]);
  if (!runs.includes(name)) await post("run", { run: name }, context.signal); // raises on an unknown name
  const view = new RunView(context, name, runs);
  if (!params.run && params.model && model !== name)
    root.append(notice(t("training.other", { model: escapeInvisible(params.model), run: escapeInvisible(name) })));
  root.append(...view.page);
  await view.refresh();
  const timer = setInterval(() => document.visibilityState === "visible" && view.running && view.refresh(), POLL);
  return {
    update: (/** @type {Record<string, string>} */ params) => {
      const same = (params.run ?? params.model) === (context.params.run ?? context.params.model);
      const comparisonChanged = params.compare !== context.params.compare;
      context.params = params;
      if (same && comparisonChanged) view.compare();
      else if (same) view.draw();
      return same;
    },
    destroy: () => clearInterval(timer),
    onThemeChange: () => view.draw(),
  };
}

class RunView {
  /** @param {import("../main.js").Context} context @param {string} name @param {string[]} runs */
  constructor(context, name, runs) {
    const { catalog } = context;
    this.context = context;
    this.name = name;
    /** @type {any[]} */
    this.lines = [];
    this.lastLine = -1;
    /** @type {any} */
    this.data = null;
    /** @type {any[] | null} */
    this.comparisonMetrics = null;
    this.running = true;
    this.loading = false;
    this.errorBox = h("div", {});
    this.status = h("span", { class: "muted", role: "status" });
    this.curves = h("div", { class: "charts" });
    this.samples = h("div", {});
    this.checkpoints = new CheckpointSlider(context, name);
    const others = [["", t("training.compare.choose")], ...runs.filter((r) => r !== name).map((r) => [r, r])];
    this.scaleToggle = h("span", {});
    const smoothing = slider(t("training.smoothing"), {
      id: "smoothing",
      value: this.smoothing,
      min: 0,
      max: 0.99,
      step: 0.01,
      format: (v) => (v ? v.toFixed(2) : t("off")),
      onChange: (v) => context.setParams({ smoothing: v || null }),
    });
    const bar = h(
      "div",
      { class: "row" },
      select(
        runs.map((r) => [r, r]),
        name,
        (r) => context.setParams({ run: r, compare: null, model: r }, true),
        t("training.run"),
      ),
      runs.length > 1
        ? select(
            /** @type {[string, string][]} */ (others),
            context.params.compare ?? "",
            (r) => context.setParams({ compare: r || null }),
            t("training.compare"),
          )
        : null,
      this.scaleToggle,
      smoothing,
      this.status,
      h("span", { class: "spacer" }),
      h("a", { href: routeUrl("attention", { model: name }) }, t("view.attention")),
      catalog.runs.find((/** @type {any} */ r) => r.run === name)?.has_base
        ? h("a", { href: routeUrl("compare", { model: `${name}@base`, compare: name }) }, t("training.base"))
        : null,
      exportButtons(
        `run-${name}`,
        () => this.figure(),
        () => this.lines,
      ),
    );
    this.page = [
      card(null, bar, this.errorBox, this.curves),
      card(t("training.samples"), h("p", { class: "muted" }, t("training.samples.lead")), this.samples),
      this.checkpoints.page,
    ];
  }

  /** Smoothing factor of the moving average; 0 is off. */
  get smoothing() {
    return Math.max(0, Math.min(0.99, Number(this.context.params.smoothing ?? 0) || 0));
  }

  /** All charts as one SVG. */
  async figure() {
    const charts = /** @type {SVGSVGElement[]} */ ([...this.curves.querySelectorAll("svg.chart")]);
    const layers = /** @type {any} */ (this.curves.querySelector(".grad-norms canvas"));
    const parts = [combineSvgs(charts, "", 2)];
    if (layers) parts.push(withTitle(await layers.toSvg(), t("training.layers")));
    return combineSvgs(parts, `${t("training.title")} · ${escapeInvisible(this.name)}`);
  }

  async refresh() {
    if (this.loading) return;
    this.loading = true;
    try {
      const data = await post("run", { run: this.name, after_line: this.lastLine }, this.context.signal);
      if (data.last_line < this.lastLine) [this.lines, this.lastLine] = [[], -1];
      this.lines.push(...data.metrics.filter((/** @type {any} */ line) => line.line > this.lastLine));
      const changed = data.last_line !== this.lastLine || !this.data;
      this.lastLine = data.last_line;
      this.data = data;
      this.running = data.state === "running";
      this.status.textContent = `${state(data.state)} · ${t("step")} ${formatCount(data.step)}` + this.throughput();
      if (changed) this.draw();
      this.checkpoints.setCheckpoints(data.checkpoints, data.samples);
      if (this.context.params.compare && !this.comparisonMetrics) await this.compare();
      replaceChildren(this.errorBox);
    } catch (error) {
      if (!this.context.signal.aborted) replaceChildren(this.errorBox, errorNotice(error)); // the curves stay, and the next poll tries again
    } finally {
      this.loading = false;
    }
  }

  async compare() {
    const other = this.context.params.compare;
    this.comparisonMetrics = other ? (await post("run", { run: other }, this.context.signal)).metrics : null;
    this.comparisonRun = other ?? "";
    this.draw();
  }

  throughput() {
    const rates = this.lines.filter((line) => line.tokens_per_second).map((line) => line.tokens_per_second);
    return rates.length ? ` · ${formatCount(rates[rates.length - 1])} ${t("training.rate")}` : "";
  }

  draw() {
    const train = this.lines.filter((line) => line.split === "train");
    const valid = this.lines.filter((line) => line.split === "valid");
    const of = (/** @type {any[]} */ lines, /** @type {string} */ name) =>
      lines.filter((x) => typeof x[name] === "number").map((x) => /** @type {[number, number]} */ ([x.step, x[name]]));
    const log = this.context.params.log === "1";
    replaceChildren(
      this.scaleToggle,
      segmentedControl(
        [
          ["0", t("scale.linear")],
          ["1", t("scale.log")],
        ],
        log ? "1" : "0",
        (v) => this.context.setParams({ log: v === "1" ? 1 : null }),
        t("training.scale"),
      ),
    );
    const maxWidth = this.curves.clientWidth || 560;
    const width = Math.max(300, Math.min(560, maxWidth > 700 ? maxWidth / 2 - 12 : maxWidth));
    const plot = (/** @type {string} */ title, /** @type {import("../chart.js").Curve[]} */ curves, scale = false) =>
      curves.some((c) => c.points.length)
        ? h("figure", {}, chart({ curves, width, log: scale, x: t("step"), title }))
        : null;
    const [accent, warm, third] = [cssVariable("--accent"), cssVariable("--accent-2"), cssVariable("--accent-3")];
    const stepMetrics = stepMetricNames(train, NON_METRICS);
    const metrics = stepMetricNames(valid, NON_METRICS).filter((name) => !stepMetrics.includes(name));
    const colors = [accent, warm, third];
    const notes = this.lines.filter((line) => line.note);
    const other = escapeInvisible(this.comparisonRun ?? "");
    const comparisonSplit = (/** @type {string} */ split) => (this.comparisonMetrics ?? []).filter((x) => x.split === split);
    replaceChildren(
      this.curves,
      this.lines.length ? null : h("p", { class: "notice" }, t("training.empty")),
      plot(
        t(stepMetrics.length ? "training.loss.feedback" : "training.loss"),
        [
          ...this.withSmoothing(t("training.train"), accent, of(train, "loss")),
          { name: t("training.valid"), color: warm, points: of(valid, "loss"), dots: true },
          ...this.withSmoothing(`${other} · ${t("training.train")}`, third, of(comparisonSplit("train"), "loss")),
          {
            name: `${other} · ${t("training.valid")}`,
            color: third,
            points: of(comparisonSplit("valid"), "loss"),
            dots: true,
            dashed: true,
          },
        ],
        log,
      ),
      metrics.map((name, n) =>
        plot(name, [
          { name, color: colors[(n + 1) % 3], points: of(valid, name), dots: true },
          { name: `${other} · ${name}`, color: cssVariable("--text-muted"), points: of(comparisonSplit("valid"), name), dots: true, dashed: true },
        ]),
      ),
      stepCharts(
        { train, valid, other: comparisonSplit("train"), otherName: other },
        stepMetrics,
        width,
        (metric, color, points) => this.withSmoothing(metric, color, points),
      ),
      plot(t("training.lr"), [{ name: t("training.lr"), color: third, points: of(train, "lr") }]),
      plot(t("training.norm"), this.withSmoothing(t("training.norm"), warm, of(train, "grad_norm")), true),
      gradNormHeatmap(train, `gradients-${this.name}`, maxWidth),
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
   * The raw curve; with smoothing on, it is faint and its moving average is added.
   * @param {string} name @param {string} color @param {[number, number][]} points
   * @returns {import("../chart.js").Curve[]}
   */
  withSmoothing(name, color, points) {
    const weight = this.smoothing;
    if (!weight) return [{ name, color, points }];
    return [
      { name, color, points, faint: true },
      { name: t("training.smooth", { name }), color, points: ema(points, weight) },
    ];
  }

  drawSamples() {
    const samples = this.data?.samples ?? [];
    if (!samples.length) return replaceChildren(this.samples, h("p", { class: "notice" }, t("training.samples.none")));
    const [first, ...others] = Object.keys(samples[0]).filter((name) => name !== "step");
    const columns = others.filter((name) => samples.some((/** @type {any} */ x) => x[name] !== ""));
    const inputs = [...new Set(samples.map((/** @type {any} */ x) => text(x[first])))].slice(0, 12);
    const selected = Number(this.context.params.sample ?? 0) || 0;
    const selectedSamples = samples.filter(
      (/** @type {any} */ x) => text(x[first]) === inputs[Math.min(selected, inputs.length - 1)],
    );
    replaceChildren(
      this.samples,
      select(
        inputs.map((input, n) => [String(n), escapeInvisible(String(input)).slice(0, 90)]),
        String(selected),
        (v) => this.context.setParams({ sample: v }),
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
              columns.map((name) => h("th", {}, translateName("sample", name))),
            ),
          ),
          h(
            "tbody",
            {},
            selectedSamples.reverse().map((/** @type {any} */ x) =>
              h(
                "tr",
                {},
                h("td", { class: "num" }, formatCount(x.step)),
                columns.map((name) => h("td", {}, text(x[name]))),
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
  if (typeof value === "number") return formatNumber(value);
  return escapeInvisible(typeof value === "string" ? value : JSON.stringify(value ?? "")).slice(0, 400);
}
