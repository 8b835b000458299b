// An image through an image model: attention of each head, rollout and attribution over its patches.
// @ts-check
import { post } from "../api.js";
import { color, toCanvas } from "../color.js";
import { card, field, formatPercent, heading, probabilityBar, segmentedControl, withLoading } from "../components.js";
import { replaceChildren, h, s } from "../dom.js";
import { exportButtons } from "../export.js";
import { colorbar, toUint8 } from "../matrix.js";
import { t } from "../i18n.js";
import { onArrowKey } from "./head_grid.js";

export const requires = "model";
export const input = "image";

const SIDE = 448; // CSS pixels of the picture
const MAX_FILE_BYTES = 700_000; // larger files are made smaller before they are sent
const MAX_SENT_SIDE = 1024;
const OPACITY = 0.62;

/** The last image, in base64, so that another model or language shows it again. */
let lastImage = "";

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, context) {
  const container = h("div", { class: "stack" });
  const view = new ImageView(context, container);
  const chooser = h("input", { type: "file", id: "image-file", accept: "image/*" });
  chooser.addEventListener("change", async () => {
    if (!chooser.files?.length) return;
    lastImage = await readImage(chooser.files[0]);
    await view.show(null);
  });
  const form = h("form", { class: "card" }, field(t("image.choose"), chooser, t("image.choose.note")));
  replaceChildren(root, heading(t("image.title"), t("image.lead")), form, container);
  if (lastImage) await view.show(null);
  return { onThemeChange: () => view.draw() };
}

/** A file in base64; a large one as a smaller JPEG. @param {File} file */
async function readImage(file) {
  const blob = file.size > MAX_FILE_BYTES ? await makeSmaller(file) : file;
  const bytes = new Uint8Array(await blob.arrayBuffer());
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return btoa(binary);
}

/** @param {File} file @returns {Promise<Blob>} the file itself where the browser cannot read it: the server says why */
async function makeSmaller(file) {
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) return file;
  const scale = Math.min(1, MAX_SENT_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = h("canvas", {});
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  context2d(canvas).drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
  return /** @type {Blob} */ (blob ?? file);
}

/** @param {HTMLCanvasElement} canvas */
function context2d(canvas) {
  return /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
}

class ImageView {
  /** @param {import("../main.js").Context} context @param {HTMLElement} container */
  constructor(context, container) {
    this.context = context;
    this.container = container;
    /** @type {any} */
    this.data = null;
    /** The map over the picture: rollout, attribution, none, or layer.head. */
    this.selected = "rollout";
    /** The patch that looks; null is the class token. @type {number | null} */
    this.patch = null;
  }

  /** Fetch the maps as one patch, or the class token, sees the image. @param {number | null} patch */
  async show(patch) {
    this.patch = patch;
    await withLoading(this.container, this.context.signal, async () => {
      const body = { model: this.context.params.model, image: lastImage, patch };
      this.data = await post("image", body, this.context.signal);
      this.picture = await loadPicture(this.data.image);
      this.draw();
    });
  }

  get rows() {
    return this.data.rollout.length;
  }

  get columns() {
    return this.data.rollout[0].length;
  }

  /** The values over the patches that are selected; null for the picture alone. @returns {number[][] | null} */
  get values() {
    if (this.selected === "none") return null;
    if (this.selected in this.data) return this.data[this.selected];
    const [layer, head] = this.selected.split(".").map(Number);
    return this.data.attention[layer][head];
  }

  get title() {
    const [layer, head] = this.selected.split(".");
    if (head === undefined) return t(`image.${this.selected}`);
    return `${t("layer")} ${layer}, ${t("head")} ${head}`;
  }

  draw() {
    if (!this.data) return;
    replaceChildren(this.container, this.pictureCard(), this.headsCard());
    this.container.dataset.drawn = this.selected;
    this.container.dataset.patch = String(this.patch ?? "");
  }

  /** @param {string} name */
  select(name) {
    this.selected = name;
    this.draw();
  }

  pictureCard() {
    const names = ["rollout", "attribution", "none"];
    const options = /** @type {[string, string][]} */ (names.map((name) => [name, t(`image.${name}`)]));
    const control = segmentedControl(options, this.selected, (name) => this.select(name), t("image.map"));
    const from = this.patch === null ? t("image.from.all") : t("image.from.patch", this.place(this.patch));
    const reset = h("button", { type: "button", class: "ghost", id: "all-patches", onclick: () => this.show(null) }, t("image.reset"));
    const isSigned = this.selected === "attribution";
    const bar = isSigned ? colorbar(t("image.against"), t("image.for"), true) : colorbar("0", t("image.most"), false);
    const buttons = exportButtons(`image-${this.context.params.model}`, () => this.toSvg(), () => this.data);
    return card(
      this.title,
      h("p", { class: "muted" }, isSigned ? t("image.attribution.lead", { label: this.data.best }) : t("image.attention.lead")),
      h("div", { class: "row" }, control, h("span", { class: "spacer" }), h("span", { id: "image-from" }, from), this.patch === null ? null : reset),
      h("div", { class: "image-columns" }, this.largePicture(), this.labelList()),
      h("div", { class: "row" }, this.values ? bar : null, h("span", { class: "spacer" }), buttons),
    );
  }

  /** @param {number} patch */
  place(patch) {
    return { row: Math.floor(patch / this.columns) + 1, column: (patch % this.columns) + 1 };
  }

  /** The picture under the map; a click on a patch asks what it attends to. */
  largePicture() {
    const canvas = h("canvas", { class: "picture", tabindex: 0, role: "img", "aria-label": t("image.picture.label") });
    paint(canvas, SIDE, this.picture, this.values, this.selected === "attribution");
    if (this.patch !== null) this.outline(canvas);
    canvas.addEventListener("click", (event) => {
      const column = Math.floor((event.offsetX / canvas.clientWidth) * this.columns);
      const row = Math.floor((event.offsetY / canvas.clientHeight) * this.rows);
      this.show(clamp(row, this.rows) * this.columns + clamp(column, this.columns));
    });
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    return canvas;
  }

  /** Arrow keys move the patch that looks. @param {KeyboardEvent} event */
  async onKey(event) {
    const moves = /** @type {Record<string, [number, number]>} */ ({
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
    });
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const patch = this.patch ?? 0;
    const row = clamp(Math.floor(patch / this.columns) + move[0], this.rows);
    const column = clamp((patch % this.columns) + move[1], this.columns);
    await this.show(row * this.columns + column);
    /** @type {HTMLElement | null} */ (this.container.querySelector("canvas.picture"))?.focus({ preventScroll: true });
  }

  /** @param {HTMLCanvasElement} canvas */
  outline(canvas) {
    const [wide, tall] = [canvas.width / this.columns, canvas.height / this.rows];
    const at = this.patch ?? 0;
    const [x, y] = [(at % this.columns) * wide, Math.floor(at / this.columns) * tall];
    const context = context2d(canvas);
    for (const [style, width] of /** @type {[string, number][]} */ ([["#fff", 5], ["#c2410c", 3]])) {
      context.strokeStyle = style;
      context.lineWidth = width;
      context.strokeRect(x, y, wide, tall);
    }
  }

  /** The picture and the map over it. */
  toSvg() {
    const [width, height] = [SIDE, Math.round((SIDE * this.picture.naturalHeight) / this.picture.naturalWidth)];
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
    const picture = s("image", { width, height, style: { "image-rendering": "pixelated" } });
    picture.setAttribute("href", this.picture.src); // a data URL, which links may not be
    svg.append(picture);
    const { values } = this;
    if (!values) return svg;
    const isSigned = this.selected === "attribution";
    const [wide, tall] = [width / this.columns, height / this.rows];
    toUint8(values, isSigned).forEach((byte, n) => {
      const place = { x: (n % this.columns) * wide, y: Math.floor(n / this.columns) * tall, width: wide, height: tall };
      svg.append(s("rect", { ...place, fill: color(byte, isSigned), "fill-opacity": OPACITY }));
    });
    return svg;
  }

  labelList() {
    const { labels } = this.data;
    if (!labels.length) return h("p", { class: "muted" }, t("image.vector"));
    const row = (/** @type {any} */ { label, probability }) =>
      h("li", {}, h("span", { class: "name" }, label), probabilityBar(probability, 1), h("span", { class: "num" }, formatPercent(probability)));
    return h("div", {}, h("h3", {}, t("image.labels")), h("ol", { class: "candidates image-labels" }, labels.map(row)));
  }

  headsCard() {
    const { attention } = this.data;
    const cell = (/** @type {number} */ layer, /** @type {number} */ head) => {
      const name = `${layer}.${head}`;
      const canvas = h("canvas", {});
      paint(canvas, 64, this.picture, attention[layer][head], false);
      const props = {
        type: "button",
        class: "thumbnail image-head",
        "data-head": name,
        "aria-label": `${t("layer")} ${layer}, ${t("head")} ${head}`,
        "aria-pressed": String(name === this.selected),
        title: name,
        tabindex: name === this.selected || (name === "0.0" && !this.selected.includes(".")) ? 0 : -1,
        onclick: () => this.select(name),
      };
      return h("button", props, canvas);
    };
    const rows = attention.map((/** @type {any[]} */ heads, /** @type {number} */ layer) => [
      h("span", { class: "muted" }, `${layer}`),
      ...heads.map((_, head) => cell(layer, head)),
    ]);
    const style = { "grid-template-columns": `2.2em repeat(${attention[0].length}, minmax(24px, 72px))` };
    const grid = h("div", { class: "thumbnails", role: "group", "aria-label": t("image.heads"), style, onkeydown: onArrowKey }, rows.flat());
    return card(t("image.heads"), h("p", { class: "muted" }, t("image.heads.lead")), h("div", { class: "scroll" }, grid));
  }
}

/** @param {number} value @param {number} count */
const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));

/** @param {string} base64 of a PNG @returns {Promise<HTMLImageElement>} */
async function loadPicture(base64) {
  const image = new Image();
  image.src = `data:image/png;base64,${base64}`;
  await image.decode();
  return image;
}

/**
 * Draw a picture, and over it a map of its patches.
 * @param {HTMLCanvasElement} canvas @param {number} side of the longer side, in CSS pixels
 * @param {any} picture @param {number[][] | null} values @param {boolean} isSigned
 */
function paint(canvas, side, picture, values, isSigned) {
  const scale = (side * (window.devicePixelRatio || 1)) / Math.max(picture.naturalWidth, picture.naturalHeight);
  canvas.width = Math.round(picture.naturalWidth * scale);
  canvas.height = Math.round(picture.naturalHeight * scale);
  const context = context2d(canvas);
  context.imageSmoothingEnabled = picture.naturalWidth > 160; // small pictures keep their pixels
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  if (!values) return;
  context.imageSmoothingEnabled = false;
  context.globalAlpha = OPACITY;
  const map = toCanvas(toUint8(values, isSigned), values[0].length, values.length, isSigned);
  context.drawImage(map, 0, 0, canvas.width, canvas.height);
  context.globalAlpha = 1;
}
