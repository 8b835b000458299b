// Curves: a small line chart in SVG with a title, two axes and a legend, and the values under the pointer.
// @ts-check
import { css, h, s } from "./dom.js";
import { count, number } from "./words.js";

/**
 * faint: drawn weakly, beside a smoothed curve of its own. dashed: another run's.
 * @typedef {{name: string, colour: string, points: [number, number][], dots?: boolean, faint?: boolean,
 * dashed?: boolean}} Curve
 */
/**
 * @typedef {{curves: Curve[], width: number, height?: number, log?: boolean, x: string, title: string}} Plan
 */

const [LEFT, RIGHT, TOP, BOTTOM, LINE] = [56, 14, 30, 40, 18];

/** @param {Plan} plan */
export function chart(plan) {
  const { width, height = 250 } = plan;
  const curves = plan.curves
    .map((c) => ({ ...c, points: c.points.filter(([, v]) => Number.isFinite(v) && (!plan.log || v > 0)) }))
    .filter((c) => c.points.length);
  const picture = s("svg", {
    role: "img",
    "aria-label": plan.title,
    class: "chart",
    "font-family": css("--font"),
    "font-size": 11,
  });
  const said = h("div", { class: "said", "aria-live": "polite" }, "\u00a0");
  const box = h("div", { class: "chart-box" }, picture, said);
  picture.append(s("text", { x: 4, y: 16, fill: css("--ink"), "font-size": 13, "font-weight": 600 }, plan.title));
  const whole = height + legend(picture, curves, width, height);
  picture.setAttribute("viewBox", `0 0 ${width} ${whole}`);
  picture.setAttribute("width", String(width));
  picture.setAttribute("height", String(whole));
  if (!curves.length) return box;
  const scale = scales(
    curves.flatMap((c) => c.points),
    width,
    height,
    plan.log ?? false,
  );
  axes(picture, scale, plan);
  for (const curve of curves) draw(picture, curve, scale);
  hover(picture, said, { ...plan, curves, height }, scale);
  return box;
}

/** @param {SVGSVGElement} picture @param {Curve} curve @param {ReturnType<typeof scales>} scale */
function draw(picture, curve, scale) {
  const d = curve.points
    .map(([px, py], n) => `${n ? "L" : "M"}${scale.x(px).toFixed(2)},${scale.y(py).toFixed(2)}`)
    .join("");
  picture.append(
    s("path", {
      d,
      fill: "none",
      stroke: curve.colour,
      "stroke-width": curve.faint ? 1 : 1.6,
      "stroke-opacity": curve.faint ? 0.35 : 1,
      "stroke-linejoin": "round",
      "stroke-dasharray": curve.dashed ? "5 3" : null,
      "data-curve": curve.name,
    }),
  );
  if (curve.dots)
    for (const [px, py] of curve.points)
      picture.append(s("circle", { cx: scale.x(px), cy: scale.y(py), r: 3, fill: curve.colour }));
}

/**
 * A line through the nearest step, and every curve's value there; one measured at another step says which.
 * @param {SVGSVGElement} picture @param {HTMLElement} said @param {Plan & {height: number}} plan
 * @param {ReturnType<typeof scales>} scale
 */
function hover(picture, said, plan, scale) {
  const { curves, width, height } = plan;
  const hair = s("line", {
    y1: TOP,
    y2: height - BOTTOM,
    stroke: css("--line"),
    "stroke-dasharray": "3 3",
    visibility: "hidden",
  });
  picture.append(hair);
  picture.addEventListener("pointermove", (event) => {
    const at = scale.from((event.offsetX * width) / (picture.clientWidth || width));
    const [step] = nearest(
      curves.flatMap((c) => c.points),
      at,
    );
    hair.setAttribute("visibility", "visible");
    hair.setAttribute("x1", String(scale.x(step)));
    hair.setAttribute("x2", String(scale.x(step)));
    const near = curves.map((c) => {
      const [x, y] = nearest(c.points, step);
      return `${c.name} ${number(y)}` + (x === step ? "" : ` (${plan.x} ${count(x)})`);
    });
    said.textContent = `${plan.x} ${count(step)} · ${near.join(" · ")}`;
  });
  picture.addEventListener("pointerleave", () => {
    hair.setAttribute("visibility", "hidden");
    said.textContent = "\u00a0";
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
  if (!log) [y0, y1] = rounded(y0, y1);
  const f = log ? Math.log10 : (/** @type {number} */ v) => v;
  const inner = [width - LEFT - RIGHT, height - TOP - BOTTOM];
  return {
    x: (/** @type {number} */ v) => LEFT + ((v - x0) / (x1 - x0 || 1)) * inner[0],
    y: (/** @type {number} */ v) => TOP + inner[1] - ((f(v) - f(y0)) / (f(y1) - f(y0))) * inner[1],
    from: (/** @type {number} */ px) => Math.max(x0, Math.min(x1, x0 + ((px - LEFT) / inner[0]) * (x1 - x0))),
    ticks: { x: ticks(x0, x1), y: log ? decades(y0, y1) : ticks(y0, y1) },
  };
}

/** The step between round numbers. @param {number} low @param {number} high */
function spacing(low, high) {
  const rough = (high - low) / 5 || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough) ?? unit;
}

/** Ends that are round numbers, so that the axis ends in a tick. @param {number} low @param {number} high */
function rounded(low, high) {
  const step = spacing(low, high);
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}

/** Round numbers between two ends. @param {number} low @param {number} high */
function ticks(low, high) {
  const step = spacing(low, high);
  const made = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + 1e-9 * step && made.length < 12; at += step)
    made.push(at);
  return made;
}

/** @param {number} low @param {number} high */
function decades(low, high) {
  const made = [];
  for (let n = Math.floor(Math.log10(low)); n <= Math.ceil(Math.log10(high)); n++)
    for (const m of [1, 3]) made.push(m * 10 ** n);
  const inside = made.filter((v) => v >= low && v <= high);
  return inside.length > 1 ? inside : ticks(low, high);
}

/** @param {SVGElement} picture @param {ReturnType<typeof scales>} scale @param {Plan} plan */
function axes(picture, scale, plan) {
  const { width, height = 250 } = plan;
  const soft = css("--soft");
  for (const v of scale.ticks.y) {
    picture.append(s("line", { x1: LEFT, x2: width - RIGHT, y1: scale.y(v), y2: scale.y(v), stroke: css("--line") }));
    const at = { x: LEFT - 6, y: scale.y(v), fill: soft, "text-anchor": "end", "dominant-baseline": "central" };
    picture.append(s("text", { ...at, "data-tick": v }, tidy(v)));
  }
  for (const v of scale.ticks.x) {
    const at = { x: scale.x(v), y: height - BOTTOM + 14, fill: soft, "text-anchor": "middle" };
    picture.append(s("text", { ...at, "data-step": v }, tidy(v)));
  }
  const middle = LEFT + (width - LEFT - RIGHT) / 2;
  picture.append(s("text", { x: middle, y: height - 8, fill: soft, "text-anchor": "middle" }, plan.x));
}

/** @param {number} v */
function tidy(v) {
  return v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6) ? v.toExponential(0) : String(Number(v.toPrecision(4)));
}

/**
 * A name and a stroke of its colour for each curve, in as many lines as it takes; the pixels it takes.
 * @param {SVGSVGElement} picture @param {Curve[]} curves @param {number} width @param {number} top
 */
function legend(picture, curves, width, top) {
  const pen = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
  pen.font = `11px ${css("--font")}`;
  let [x, y] = [LEFT, top + 4];
  for (const curve of curves) {
    const wide = 20 + Math.ceil(pen.measureText(curve.name).width) + 18;
    if (x > LEFT && x + wide > width) [x, y] = [LEFT, y + LINE];
    const line = { x1: x, x2: x + 14, y1: y, y2: y, stroke: curve.colour, "stroke-width": 3 };
    const weak = { "stroke-opacity": curve.faint ? 0.35 : 1, "stroke-dasharray": curve.dashed ? "4 2" : null };
    picture.append(s("line", { ...line, ...weak }));
    picture.append(s("text", { x: x + 20, y, fill: css("--soft"), "dominant-baseline": "central" }, curve.name));
    x += wide;
  }
  return curves.length ? y - top + LINE / 2 + 2 : 0;
}

/**
 * An exponential moving average, each point divided by the sum of its weights, as TensorBoard does: the first point is
 * itself, and no point leans on a value from before the beginning.
 * @param {[number, number][]} points
 * @param {number} weight of what came before; 0 changes nothing
 * @returns {[number, number][]}
 */
export function smooth(points, weight) {
  let [held, total] = [0, 0];
  return points
    .filter(([, y]) => Number.isFinite(y))
    .map(([x, y]) => {
      held = weight * held + (1 - weight) * y;
      total = weight * total + (1 - weight);
      return [x, held / total];
    });
}
