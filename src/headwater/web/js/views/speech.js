// A recording with the words of a speech model over its spectrogram, the cross-attention of each token, and playback.
// @ts-check
import { post } from "../api.js";
import { toCanvas } from "../color.js";
import { card, field, heading, notice, withLoading } from "../components.js";
import { escapeInvisible, h, replaceChildren } from "../dom.js";
import { t } from "../i18n.js";
import { Player, decodeRecording, fromBase64, toBase64 } from "../player.js";

export const requires = "model";
export const input = "sound";
const PIXELS_PER_SECOND = 96;

/** @typedef {{text: string, start: number, end: number}} Word */
/** @typedef {{rows: number, columns: number, data: string}} Picture */
/** @typedef {{seconds: number, spectrogram: Picture, tokens: string[], weights: Picture, words: Word[]}} Alignment */

/** @param {HTMLElement} root @param {import("../main.js").Context} context */
export async function mount(root, { params, signal }) {
  const result = h("div", { class: "stack" });
  /** @type {{player: Player, redraw: () => void} | null} */
  let shown = null;
  const show = async (/** @type {File} */ file) => {
    shown?.player.close();
    shown = null;
    replaceChildren(result);
    await withLoading(result, signal, async () => {
      const recording = await decodeRecording(await file.arrayBuffer()).catch(() => null);
      if (!recording) return notice(t("speech.unreadable", { name: file.name }));
      const alignment = await post("speech", { model: params.model, samples: toBase64(recording) }, signal);
      if (signal.aborted) return;
      const view = aligned(recording, alignment);
      shown = view;
      return view.content;
    });
  };
  const chooser = h("input", { type: "file", accept: "audio/*,video/*", id: "recording" });
  chooser.addEventListener("change", () => chooser.files?.[0] && show(chooser.files[0]));
  replaceChildren(
    root,
    heading(t("speech.title"), t("speech.lead")),
    card(null, field(t("speech.recording"), chooser, t("speech.formats"))),
    result,
  );
  return { destroy: () => shown?.player.close(), onThemeChange: () => shown?.redraw() };
}

/** The words, the pictures and the player of a recording. @param {AudioBuffer} recording @param {Alignment} alignment */
function aligned(recording, alignment) {
  const { seconds, words, tokens } = alignment;
  const time = h("output", { class: "mono" });
  const button = h("button", { type: "button", class: "primary", id: "play" }, t("speech.play"));
  const cursor = h("i", { class: "cursor" });
  const chips = words.map((word) => h("button", { type: "button", class: "chip", title: span(word), onclick: () => play(word.start) }, word.text.trim()));
  const marks = words.map((word) => h("i", { style: { left: at(word.start, seconds), width: at(word.end - word.start, seconds) } }, h("span", {}, word.text.trim())));
  const pictures = [h("div", { class: "picture" }), h("div", { class: "picture" })];
  const axis = h("div", { class: "timeline", style: { width: `${Math.round(seconds * PIXELS_PER_SECOND)}px` } }, h("div", { class: "words" }, marks), pictures, cursor);
  const labels = h(
    "div",
    { class: "labels" },
    h("span", { class: "muted" }, t("speech.spectrogram")),
    tokens.map((token) => h("span", { class: "mono" }, escapeInvisible(token))),
  );
  const box = h("div", { class: "scroll speech-box" }, labels, axis);

  const onTick = (/** @type {number} */ now) => {
    time.textContent = `${now.toFixed(1)} / ${seconds.toFixed(1)} s`;
    cursor.style.left = at(now, seconds);
    words.forEach((word, n) => {
      const spoken = now >= word.start && now < word.end;
      chips[n].classList.toggle("selected", spoken);
      marks[n].classList.toggle("selected", spoken);
    });
    const x = labels.offsetWidth + (now / seconds) * axis.offsetWidth;
    if (player?.playing && (x < box.scrollLeft || x > box.scrollLeft + box.clientWidth - 40)) box.scrollLeft = x - box.clientWidth / 3;
  };
  const player = new Player(recording, onTick, () => (button.textContent = t("speech.play")));
  const play = async (/** @type {number} */ from) => {
    await player.play(from);
    button.textContent = t("speech.pause");
  };
  button.addEventListener("click", () => (player.playing ? player.pause() : play(player.offset)));
  axis.addEventListener("click", (event) => play((seconds * (event.clientX - axis.getBoundingClientRect().left)) / axis.offsetWidth));

  const redraw = () => {
    replaceChildren(pictures[0], picture(alignment.spectrogram, t("speech.spectrogram")));
    replaceChildren(pictures[1], picture(alignment.weights, t("speech.attention")));
    pictures[1].style.height = `${20 * tokens.length}px`;
  };
  redraw();
  onTick(0);
  const content = [
    card(t("speech.words"), h("div", { class: "row" }, button, time), h("div", { class: "chips", id: "words" }, chips)),
    card(t("speech.attention"), box),
  ];
  return { player, redraw, content };
}

/** @param {Picture} of @param {string} label */
function picture(of, label) {
  const canvas = toCanvas(fromBase64(of.data), of.columns, of.rows);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  return canvas;
}

/** A time as a share of the axis. @param {number} time @param {number} seconds */
function at(time, seconds) {
  return `${(100 * time) / seconds}%`;
}

/** @param {Word} word */
function span(word) {
  return `${word.start.toFixed(2)}–${word.end.toFixed(2)} s`;
}
