// Colormaps: sequential for weights, diverging for signed numbers.
// @ts-check

const SEQUENTIAL_LIGHT = ["#f6f8f8", "#d9e9ea", "#a5cdd1", "#62a8b2", "#2a8093", "#0f5a70", "#083a4f", "#04202f"];
const SEQUENTIAL_DARK = ["#171d20", "#143742", "#145a68", "#1f8289", "#4aab9d", "#8fcfa9", "#d2ebb9", "#fdfbd8"];
const DIVERGING_LIGHT = ["#9a3d12", "#d98352", "#f3d3bd", "#f8f8f6", "#bcd9e4", "#4f9bb6", "#0b4f6b"];
const DIVERGING_DARK = ["#ffb385", "#c96a35", "#5b3826", "#1c2225", "#1d4656", "#3491b0", "#9fe0f5"];

export function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

/** @param {string} hex */
function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** 256 interpolated colors of a colormap. @param {string[]} anchors @returns {Uint8ClampedArray} rgb, rgb, … */
function colormap(anchors) {
  const colors = new Uint8ClampedArray(256 * 3);
  for (let byte = 0; byte < 256; byte++) {
    const at = (byte / 255) * (anchors.length - 1);
    const low = Math.min(Math.floor(at), anchors.length - 2);
    const [a, b] = [rgb(anchors[low]), rgb(anchors[low + 1])];
    for (let c = 0; c < 3; c++) colors[3 * byte + c] = a[c] + (b[c] - a[c]) * (at - low);
  }
  return colors;
}

/** @type {Map<string, Uint8ClampedArray>} */
const palettes = new Map();

/** The 256 colors of the current theme. @param {boolean} [diverging] */
export function palette(diverging = false) {
  const name = `${diverging}${isDark()}`;
  const anchors = diverging ? (isDark() ? DIVERGING_DARK : DIVERGING_LIGHT) : isDark() ? SEQUENTIAL_DARK : SEQUENTIAL_LIGHT;
  if (!palettes.has(name)) palettes.set(name, colormap(anchors));
  return /** @type {Uint8ClampedArray} */ (palettes.get(name));
}

/** One color as CSS. @param {number} byte @param {boolean} [diverging] */
export function color(byte, diverging = false) {
  const all = palette(diverging);
  const at = 3 * Math.max(0, Math.min(255, Math.round(byte)));
  return `rgb(${all[at]},${all[at + 1]},${all[at + 2]})`;
}

/** The text color with the best contrast. @param {number} byte @param {boolean} [diverging] */
export function textColor(byte, diverging = false) {
  const all = palette(diverging);
  const at = 3 * Math.max(0, Math.min(255, Math.round(byte)));
  return all[at] * 0.3 + all[at + 1] * 0.59 + all[at + 2] * 0.11 > 140 ? "#10242b" : "#f4f8f7";
}

/**
 * Bytes as a canvas, one pixel each.
 * @param {Uint8Array} bytes
 * @param {number} width
 * @param {number} height
 * @param {boolean} [diverging]
 */
export function toCanvas(bytes, width, height, diverging = false) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const image = context.createImageData(width, height);
  const all = palette(diverging);
  for (let n = 0; n < width * height; n++) {
    const at = 3 * bytes[n];
    image.data[4 * n] = all[at];
    image.data[4 * n + 1] = all[at + 1];
    image.data[4 * n + 2] = all[at + 2];
    image.data[4 * n + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
