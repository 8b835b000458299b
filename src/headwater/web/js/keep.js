// Taking a view away: its picture as PNG or SVG, its numbers as JSON. All made here, nothing is sent.
// @ts-check
import { css, h } from "./dom.js";
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

/**
 * One that can also draw itself as vectors.
 * @typedef {HTMLCanvasElement & {vector?: () => SVGSVGElement | Promise<SVGSVGElement>}} Canvas
 */

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
 * @param {string} name @param {(() => Canvas | SVGSVGElement | null) | null} picture @param {() => any} data
 */
export function keepers(name, picture, data) {
  const file = plainName(name);
  const save = async (/** @type {string} */ kind) => {
    const seen = picture?.();
    if (kind === "json")
      return hand(new Blob([JSON.stringify(await data(), null, 1)], { type: "application/json" }), `${file}.json`);
    if (!seen) return;
    const vector = seen instanceof SVGSVGElement ? seen : await seen.vector?.();
    if (kind === "svg") return vector && hand(new Blob([svgText(vector)], { type: "image/svg+xml" }), `${file}.svg`);
    hand(await png(seen instanceof SVGSVGElement ? await drawn(seen) : seen), `${file}.png`);
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
