// Export of a figure as PNG or SVG and of its data as JSON.
// @ts-check
import { cssVariable, h, s } from "./dom.js";
import { t } from "./i18n.js";

/** A portable file name. @param {string} name */
function safeFileName(name) {
  return (
    name
      .replace(/[^A-Za-z0-9._-]+/g, "-")
      .replace(/^[-.]+|[-.]+$/g, "")
      .slice(0, 80) || "headwater"
  );
}

/** @param {Blob} blob @param {string} name */
function download(blob, name) {
  const address = URL.createObjectURL(blob);
  const anchor = h("a", { href: address, download: name });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** @param {HTMLCanvasElement} canvas @returns {Promise<Blob>} */
function png(canvas) {
  return new Promise((resolve, reject) =>
    canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the canvas cannot be encoded as PNG")))),
  );
}

/** An SVG as a standalone document. @param {SVGSVGElement} picture */
export function serializeSvg(picture) {
  const copy = /** @type {SVGSVGElement} */ (picture.cloneNode(true));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.querySelectorAll("[tabindex]").forEach((node) => node.removeAttribute("tabindex"));
  copy.style.background = cssVariable("--card");
  return new XMLSerializer().serializeToString(copy);
}

const MARGIN = 16;
const LINE = 24;

/** An SVG with a title above it. @param {SVGSVGElement} picture @param {string} title */
export function withTitle(picture, title) {
  return combineSvgs([picture], title);
}

/**
 * Several SVGs combined in a grid under an optional title.
 * @param {SVGSVGElement[]} pictures @param {string} title @param {number} [columns] SVGs in a row
 */
export function combineSvgs(pictures, title, columns = 1) {
  const size = (/** @type {SVGSVGElement} */ p) => [Number(p.getAttribute("width")), Number(p.getAttribute("height"))];
  const combined = s("svg", { "font-family": cssVariable("--font"), "font-size": 12 });
  const heading = { x: MARGIN, y: MARGIN + 12, fill: cssVariable("--text"), "font-size": 15, "font-weight": 600 };
  if (title) combined.append(s("text", heading, title));
  const ctx = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
  ctx.font = `600 15px ${cssVariable("--font")}`;
  let [y, wide] = [title ? MARGIN + LINE : 0, Math.ceil(ctx.measureText(title).width) + 2 * MARGIN];
  for (let n = 0; n < pictures.length; n += columns) {
    let [x, tall] = [title ? MARGIN : 0, 0];
    for (const picture of pictures.slice(n, n + columns)) {
      const copy = /** @type {SVGSVGElement} */ (picture.cloneNode(true));
      copy.setAttribute("x", String(x));
      copy.setAttribute("y", String(y));
      combined.append(copy);
      const [width, height] = size(picture);
      x += width + MARGIN;
      tall = Math.max(tall, height);
    }
    wide = Math.max(wide, x);
    y += tall + MARGIN;
  }
  combined.setAttribute("width", String(wide));
  combined.setAttribute("height", String(y));
  combined.setAttribute("viewBox", `0 0 ${wide} ${y}`);
  return combined;
}

/**
 * A canvas that can also export itself as SVG.
 * @typedef {HTMLCanvasElement & {toSvg?: () => SVGSVGElement | Promise<SVGSVGElement>}} Canvas
 */
/** @typedef {Canvas | SVGSVGElement | null} Picture */

/** @param {SVGSVGElement} picture */
async function rasterize(picture) {
  const address = URL.createObjectURL(new Blob([serializeSvg(picture)], { type: "image/svg+xml" }));
  const image = new Image();
  image.src = address;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * (image.width || 600), 2 * (image.height || 400)];
  const ctx = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  ctx.drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(address);
  return canvas;
}

/**
 * Export buttons: PNG, SVG, JSON.
 * @param {string} name @param {(() => Picture | Promise<Picture>) | null} picture @param {() => any} data
 */
export function exportButtons(name, picture, data) {
  const file = safeFileName(name);
  const save = async (/** @type {string} */ kind) => {
    if (kind === "json")
      return download(new Blob([JSON.stringify(await data(), null, 1)], { type: "application/json" }), `${file}.json`);
    const figure = await picture?.();
    if (!figure) return;
    const vector = figure instanceof SVGSVGElement ? figure : await figure.toSvg?.();
    if (kind === "svg") return vector && download(new Blob([serializeSvg(vector)], { type: "image/svg+xml" }), `${file}.svg`);
    download(await png(vector ? await rasterize(vector) : /** @type {Canvas} */ (figure)), `${file}.png`);
  };
  const kinds = picture ? ["png", "svg", "json"] : ["json"];
  const button = (/** @type {string} */ kind) =>
    h("button", { class: "ghost", type: "button", onclick: () => save(kind), "data-export": kind }, kind.toUpperCase());
  return h(
    "span",
    { class: "export", role: "group", "aria-label": t("export") },
    h("span", { class: "muted" }, t("export")),
    kinds.map(button),
  );
}
