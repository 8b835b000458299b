// Taking a view away: its picture as PNG or SVG, its numbers as JSON. All made here, nothing is sent.
// @ts-check
import { css, h, s } from "./dom.js";
import { t } from "./words.js";

/** A name that any file system takes. @param {string} name */
function plainName(name) {
  return (
    name
      .replace(/[^A-Za-z0-9._-]+/g, "-")
      .replace(/^[-.]+|[-.]+$/g, "")
      .slice(0, 80) || "headwater"
  );
}

/** @param {Blob} blob @param {string} name */
function hand(blob, name) {
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
    canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("no picture")))),
  );
}

/** An SVG that stands alone. @param {SVGSVGElement} picture */
export function svgText(picture) {
  const copy = /** @type {SVGSVGElement} */ (picture.cloneNode(true));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.querySelectorAll("[tabindex]").forEach((node) => node.removeAttribute("tabindex"));
  copy.style.background = css("--card");
  return new XMLSerializer().serializeToString(copy);
}

const MARGIN = 16;
const LINE = 24;

/** A copy of a picture with a line above it. @param {SVGSVGElement} picture @param {string} title */
export function titled(picture, title) {
  return sheet([picture], title);
}

/**
 * Pictures side by side under one title, or under none, as one that stands alone.
 * @param {SVGSVGElement[]} pictures @param {string} title @param {number} [across] pictures in a row
 */
export function sheet(pictures, title, across = 1) {
  const size = (/** @type {SVGSVGElement} */ p) => [Number(p.getAttribute("width")), Number(p.getAttribute("height"))];
  const made = s("svg", { "font-family": css("--font"), "font-size": 12 });
  const heading = { x: MARGIN, y: MARGIN + 12, fill: css("--ink"), "font-size": 15, "font-weight": 600 };
  if (title) made.append(s("text", heading, title));
  const pen = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
  pen.font = `600 15px ${css("--font")}`;
  let [y, wide] = [title ? MARGIN + LINE : 0, Math.ceil(pen.measureText(title).width) + 2 * MARGIN];
  for (let n = 0; n < pictures.length; n += across) {
    let [x, tall] = [title ? MARGIN : 0, 0];
    for (const picture of pictures.slice(n, n + across)) {
      const copy = /** @type {SVGSVGElement} */ (picture.cloneNode(true));
      copy.setAttribute("x", String(x));
      copy.setAttribute("y", String(y));
      made.append(copy);
      const [width, height] = size(picture);
      x += width + MARGIN;
      tall = Math.max(tall, height);
    }
    wide = Math.max(wide, x);
    y += tall + MARGIN;
  }
  made.setAttribute("width", String(wide));
  made.setAttribute("height", String(y));
  made.setAttribute("viewBox", `0 0 ${wide} ${y}`);
  return made;
}

/**
 * One that can also draw itself as vectors.
 * @typedef {HTMLCanvasElement & {vector?: () => SVGSVGElement | Promise<SVGSVGElement>}} Canvas
 */
/** @typedef {Canvas | SVGSVGElement | null} Picture */

/** @param {SVGSVGElement} picture */
async function drawn(picture) {
  const address = URL.createObjectURL(new Blob([svgText(picture)], { type: "image/svg+xml" }));
  const image = new Image();
  image.src = address;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * (image.width || 600), 2 * (image.height || 400)];
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(address);
  return canvas;
}

/**
 * Buttons to keep what is seen.
 * @param {string} name @param {(() => Picture | Promise<Picture>) | null} picture @param {() => any} data
 */
export function keepers(name, picture, data) {
  const file = plainName(name);
  const save = async (/** @type {string} */ kind) => {
    if (kind === "json")
      return hand(new Blob([JSON.stringify(await data(), null, 1)], { type: "application/json" }), `${file}.json`);
    const seen = await picture?.();
    if (!seen) return;
    const vector = seen instanceof SVGSVGElement ? seen : await seen.vector?.();
    if (kind === "svg") return vector && hand(new Blob([svgText(vector)], { type: "image/svg+xml" }), `${file}.svg`);
    hand(await png(vector ? await drawn(vector) : /** @type {Canvas} */ (seen)), `${file}.png`);
  };
  const kinds = picture ? ["png", "svg", "json"] : ["json"];
  const button = (/** @type {string} */ kind) =>
    h("button", { class: "quiet", type: "button", onclick: () => save(kind), "data-keep": kind }, kind.toUpperCase());
  return h(
    "span",
    { class: "keepers", role: "group", "aria-label": t("keep") },
    h("span", { class: "faint" }, t("keep")),
    kinds.map(button),
  );
}
