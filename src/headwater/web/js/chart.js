// Curves: a small line chart in SVG with two axes, a logarithmic scale if asked, and the values under the pointer.
// @ts-check
import { css, h, s } from "./dom.js";
import { count, number } from "./words.js";

/** @typedef {{name: string, colour: string, points: [number, number][], dots?: boolean, faint?: boolean}} Curve */

const [LEFT, RIGHT, TOP, BOTTOM] = [56, 14, 12, 30];

/**
 * @param {{curves: Curve[], width: number, height?: number, log?: boolean, x: string, y: string, label: string}} plan
 */
export function chart(plan) {
  const { width, height = 240 } = plan;
  const curves = plan.curves
    .map((c) => ({ ...c, points: c.points.filter(([, v]) => Number.isFinite(v) && (!plan.log || v > 0)) }))
    .filter((c) => c.points.length);
  const picture = s("svg", {
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": plan.label,
    class: "chart",
    "font-family": css("--font"),
    "font-size": 11,
  });
  const said = h("div", { class: "said", "aria-live": "polite" }, "\u00a0");
  const box = h("div", { class: "chart-box" }, picture, legend(curves), said);
  if (!curves.length) return box;
  const all = curves.flatMap((c) => c.points);
  const scale = scales(all, width, height, plan.log ?? false);
  axes(picture, scale, plan);
  for (const curve of curves) {
    const d = curve.points
      .map(([px, py], n) => `${n ? "L" : "M"}${scale.x(px).toFixed(1)},${scale.y(py).toFixed(1)}`)
      .join("");
    picture.append(
      s("path", {
        d,
        fill: "none",
        stroke: curve.colour,
        "stroke-width": curve.faint ? 1 : 1.8,
        "stroke-opacity": curve.faint ? 0.35 : 1,
        "stroke-linejoin": "round",
      }),
    );
    if (curve.dots)
      for (const [px, py] of curve.points)
        picture.append(s("circle", { cx: scale.x(px), cy: scale.y(py), r: 3, fill: curve.colour }));
  }
  const hair = s("line", {
    y1: TOP,
    y2: height - BOTTOM,
    stroke: css("--line"),
    "stroke-dasharray": "3 3",
    visibility: "hidden",
  });
  picture.append(hair);
  picture.addEventListener("pointermove", (event) => {
    const x = (event.offsetX * width) / (picture.clientWidth || width);
    const at = scale.from(x);
    hair.setAttribute("visibility", "visible");
    hair.setAttribute("x1", String(x));
    hair.setAttribute("x2", String(x));
    const near = curves.filter((c) => !c.faint).map((c) => `${c.name} ${number(nearest(c.points, at)[1])}`);
    said.textContent = `${plan.x} ${count(Math.round(at))} · ${near.join(" · ")}`;
  });
  picture.addEventListener("pointerleave", () => {
    hair.setAttribute("visibility", "hidden");
    said.textContent = "\u00a0";
  });
  return box;
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
  const f = log ? Math.log10 : (/** @type {number} */ v) => v;
  const inner = [width - LEFT - RIGHT, height - TOP - BOTTOM];
  return {
    x: (/** @type {number} */ v) => LEFT + ((v - x0) / (x1 - x0 || 1)) * inner[0],
    y: (/** @type {number} */ v) => TOP + inner[1] - ((f(v) - f(y0)) / (f(y1) - f(y0))) * inner[1],
    from: (/** @type {number} */ px) => Math.max(x0, Math.min(x1, x0 + ((px - LEFT) / inner[0]) * (x1 - x0))),
    ticks: { x: ticks(x0, x1), y: log ? decades(y0, y1) : ticks(y0, y1) },
  };
}

/** Round numbers between two ends. @param {number} low @param {number} high */
function ticks(low, high) {
  const rough = (high - low) / 5 || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough) ?? unit;
  const made = [];
  for (let at = Math.ceil(low / step) * step; at <= high + 1e-9 * step && made.length < 12; at += step) made.push(at);
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

/**
 * @param {SVGElement} picture
 * @param {ReturnType<typeof scales>} scale
 * @param {{width: number, height?: number, x: string, y: string}} plan
 */
function axes(picture, scale, plan) {
  const { width, height = 240 } = plan;
  const soft = css("--soft");
  for (const v of scale.ticks.y) {
    picture.append(s("line", { x1: LEFT, x2: width - RIGHT, y1: scale.y(v), y2: scale.y(v), stroke: css("--line") }));
    picture.append(
      s(
        "text",
        { x: LEFT - 6, y: scale.y(v), fill: soft, "text-anchor": "end", "dominant-baseline": "central" },
        tidy(v),
      ),
    );
  }
  for (const v of scale.ticks.x)
    picture.append(s("text", { x: scale.x(v), y: height - BOTTOM + 14, fill: soft, "text-anchor": "middle" }, tidy(v)));
  picture.append(s("text", { x: width - RIGHT, y: height - 3, fill: soft, "text-anchor": "end" }, plan.x));
}

/** @param {number} v */
function tidy(v) {
  return v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6) ? v.toExponential(0) : String(Number(v.toPrecision(4)));
}

/** @param {{name: string, colour: string, faint?: boolean}[]} curves */
function legend(curves) {
  return h(
    "div",
    { class: "keys" },
    curves.filter((c) => !c.faint).map((c) => h("span", {}, h("i", { style: { background: c.colour } }), c.name)),
  );
}

/**
 * A smoothed copy: each point leans on those before it.
 * @param {[number, number][]} points
 * @param {number} weight
 * @returns {[number, number][]}
 */
export function smooth(points, weight) {
  let held = points[0]?.[1] ?? 0;
  return points.map(([x, y]) => [x, (held = weight * held + (1 - weight) * y)]);
}
