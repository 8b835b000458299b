// Line chart in SVG.
// @ts-check
import { cssVariable, h, s } from "./dom.js";
import { formatCount, formatNumber } from "./i18n.js";

/**
 * faint: the raw curve behind its smoothed one. dashed: another run's.
 * @typedef {{name: string, color: string, points: [number, number][], dots?: boolean, faint?: boolean,
 * dashed?: boolean}} Curve
 */
/**
 * @typedef {{curves: Curve[], width: number, height?: number, log?: boolean, x: string, title: string}} ChartOptions
 */

const [LEFT, RIGHT, TOP, BOTTOM, LINE] = [56, 14, 30, 40, 18];

/** @param {ChartOptions} options */
export function chart(options) {
  const { width, height = 250 } = options;
  const curves = options.curves
    .map((c) => ({ ...c, points: c.points.filter(([, v]) => Number.isFinite(v) && (!options.log || v > 0)) }))
    .filter((c) => c.points.length);
  const svg = s("svg", {
    role: "img",
    "aria-label": options.title,
    class: "chart",
    "font-family": cssVariable("--font"),
    "font-size": 11,
  });
  const readout = h("div", { class: "readout", "aria-live": "polite" }, "\u00a0");
  const box = h("div", { class: "chart-box" }, svg, readout);
  svg.append(s("text", { x: 4, y: 16, fill: cssVariable("--text"), "font-size": 13, "font-weight": 600 }, options.title));
  const fullHeight = height + legend(svg, curves, width, height);
  svg.setAttribute("viewBox", `0 0 ${width} ${fullHeight}`);
  svg.setAttribute("width", String(width));
  svg.setAttribute("height", String(fullHeight));
  if (!curves.length) return box;
  const scale = scales(
    curves.flatMap((c) => c.points),
    width,
    height,
    options.log ?? false,
  );
  axes(svg, scale, options);
  for (const curve of curves) draw(svg, curve, scale);
  hover(svg, readout, { ...options, curves, height }, scale);
  return box;
}

/** @param {SVGSVGElement} svg @param {Curve} curve @param {ReturnType<typeof scales>} scale */
function draw(svg, curve, scale) {
  const d = curve.points
    .map(([px, py], n) => `${n ? "L" : "M"}${scale.x(px).toFixed(2)},${scale.y(py).toFixed(2)}`)
    .join("");
  svg.append(
    s("path", {
      d,
      fill: "none",
      stroke: curve.color,
      "stroke-width": curve.faint ? 1 : 1.6,
      "stroke-opacity": curve.faint ? 0.35 : 1,
      "stroke-linejoin": "round",
      "stroke-dasharray": curve.dashed ? "5 3" : null,
      "data-curve": curve.name,
    }),
  );
  if (curve.dots)
    for (const [px, py] of curve.points)
      svg.append(s("circle", { cx: scale.x(px), cy: scale.y(py), r: 3, fill: curve.color }));
}

/**
 * Crosshair at the nearest step with every curve's value there; a value of another step names its step.
 * @param {SVGSVGElement} svg @param {HTMLElement} readout @param {ChartOptions & {height: number}} options
 * @param {ReturnType<typeof scales>} scale
 */
function hover(svg, readout, options, scale) {
  const { curves, width, height } = options;
  const crosshair = s("line", {
    y1: TOP,
    y2: height - BOTTOM,
    stroke: cssVariable("--border"),
    "stroke-dasharray": "3 3",
    visibility: "hidden",
  });
  svg.append(crosshair);
  svg.addEventListener("pointermove", (event) => {
    const at = scale.from((event.offsetX * width) / (svg.clientWidth || width));
    const [step] = nearest(
      curves.flatMap((c) => c.points),
      at,
    );
    crosshair.setAttribute("visibility", "visible");
    crosshair.setAttribute("x1", String(scale.x(step)));
    crosshair.setAttribute("x2", String(scale.x(step)));
    const near = curves.map((c) => {
      const [x, y] = nearest(c.points, step);
      return `${c.name} ${formatNumber(y)}` + (x === step ? "" : ` (${options.x} ${formatCount(x)})`);
    });
    readout.textContent = `${options.x} ${formatCount(step)} · ${near.join(" · ")}`;
  });
  svg.addEventListener("pointerleave", () => {
    crosshair.setAttribute("visibility", "hidden");
    readout.textContent = "\u00a0";
  });
}

/** @param {[number, number][]} points @param {number} x */
function nearest(points, x) {
  return points.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best));
}

/** @param {[number, number][]} points @param {number} width @param {number} height @param {boolean} log */
function scales(points, width, height, log) {
  const span = (/** @type {number[]} */ v) => [
    v.reduce((a, b) => Math.min(a, b), Infinity),
    v.reduce((a, b) => Math.max(a, b), -Infinity),
  ];
  const [x0, x1] = span(points.map((p) => p[0]));
  let [y0, y1] = span(points.map((p) => p[1]));
  if (!log && y0 > 0 && y0 < 0.4 * y1) y0 = 0;
  if (y0 === y1) [y0, y1] = [y0 * 0.9, y1 * 1.1 || 1];
  if (!log) [y0, y1] = niceRange(y0, y1);
  const f = log ? Math.log10 : (/** @type {number} */ v) => v;
  const inner = [width - LEFT - RIGHT, height - TOP - BOTTOM];
  return {
    x: (/** @type {number} */ v) => LEFT + ((v - x0) / (x1 - x0 || 1)) * inner[0],
    y: (/** @type {number} */ v) => TOP + inner[1] - ((f(v) - f(y0)) / (f(y1) - f(y0))) * inner[1],
    from: (/** @type {number} */ px) => Math.max(x0, Math.min(x1, x0 + ((px - LEFT) / inner[0]) * (x1 - x0))),
    ticks: { x: ticks(x0, x1), y: log ? logTicks(y0, y1) : ticks(y0, y1) },
  };
}

/** The distance between ticks. @param {number} low @param {number} high */
function tickStep(low, high) {
  const rough = (high - low) / 5 || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough) ?? unit;
}

/** Ends of an axis rounded to ticks. @param {number} low @param {number} high */
function niceRange(low, high) {
  const step = tickStep(low, high);
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}

/** Ticks between two ends. @param {number} low @param {number} high */
function ticks(low, high) {
  const step = tickStep(low, high);
  const values = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step && values.length < 12; n++) values.push(n * step);
  return values;
}

/** @param {number} low @param {number} high */
function logTicks(low, high) {
  const values = [];
  for (let n = Math.floor(Math.log10(low)); n <= Math.ceil(Math.log10(high)); n++)
    for (const m of [1, 3]) values.push(m * 10 ** n);
  const inside = values.filter((v) => v >= low && v <= high);
  return inside.length > 1 ? inside : ticks(low, high);
}

/** @param {SVGElement} svg @param {ReturnType<typeof scales>} scale @param {ChartOptions} options */
function axes(svg, scale, options) {
  const { width, height = 250 } = options;
  const muted = cssVariable("--text-muted");
  for (const v of scale.ticks.y) {
    svg.append(s("line", { x1: LEFT, x2: width - RIGHT, y1: scale.y(v), y2: scale.y(v), stroke: cssVariable("--border") }));
    const at = { x: LEFT - 6, y: scale.y(v), fill: muted, "text-anchor": "end", "dominant-baseline": "central" };
    svg.append(s("text", { ...at, "data-tick": v }, formatTick(v)));
  }
  for (const v of scale.ticks.x) {
    const at = { x: scale.x(v), y: height - BOTTOM + 14, fill: muted, "text-anchor": "middle" };
    svg.append(s("text", { ...at, "data-step": v }, formatTick(v)));
  }
  const middle = LEFT + (width - LEFT - RIGHT) / 2;
  svg.append(s("text", { x: middle, y: height - 8, fill: muted, "text-anchor": "middle" }, options.x));
}

/** @param {number} v */
function formatTick(v) {
  return v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6) ? v.toExponential(0) : String(Number(v.toPrecision(4)));
}

/**
 * Legend: name and color of each curve, wrapped into lines; returns its height.
 * @param {SVGSVGElement} svg @param {Curve[]} curves @param {number} width @param {number} top
 */
function legend(svg, curves, width, top) {
  const ctx = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
  ctx.font = `11px ${cssVariable("--font")}`;
  let [x, y] = [LEFT, top + 4];
  for (const curve of curves) {
    const wide = 20 + Math.ceil(ctx.measureText(curve.name).width) + 18;
    if (x > LEFT && x + wide > width) [x, y] = [LEFT, y + LINE];
    const line = { x1: x, x2: x + 14, y1: y, y2: y, stroke: curve.color, "stroke-width": 3 };
    const weak = { "stroke-opacity": curve.faint ? 0.35 : 1, "stroke-dasharray": curve.dashed ? "4 2" : null };
    svg.append(s("line", { ...line, ...weak }));
    svg.append(s("text", { x: x + 20, y, fill: cssVariable("--text-muted"), "dominant-baseline": "central" }, curve.name));
    x += wide;
  }
  return curves.length ? y - top + LINE / 2 + 2 : 0;
}

/**
 * An exponential moving average, each point divided by the sum of its weights, as TensorBoard does: the first point is
 * itself, without bias towards zero.
 * @param {[number, number][]} points
 * @param {number} weight of the previous average; 0 changes nothing
 * @returns {[number, number][]}
 */
export function ema(points, weight) {
  let [average, total] = [0, 0];
  return points
    .filter(([, y]) => Number.isFinite(y))
    .map(([x, y]) => {
      average = weight * average + (1 - weight) * y;
      total = weight * total + (1 - weight);
      return [x, average / total];
    });
}
