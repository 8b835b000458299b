// The drawing of a model: its stacks side by side, read from below; a box opens its part in the tree.
// @ts-check
import { css, h, s } from "../dom.js";
import { keepers } from "../keep.js";
import { card } from "../parts.js";
import { t, word } from "../words.js";

/** @param {any} data @param {Record<string, string>} params */
export function drawing(data, params) {
  const sides = Object.keys(data.stacks);
  const most = Math.max(...sides.map((side) => data.stacks[side].branches.length));
  const [wide, tall] = [250, 96 + most * 92 + 96];
  const width = sides.length * wide + (sides.length - 1) * 60;
  const picture = s("svg", {
    viewBox: `0 0 ${width} ${tall}`,
    width,
    height: tall,
    class: "plan",
    role: "img",
    "aria-label": t("anatomy.title"),
    "font-family": css("--font"),
    "font-size": 13,
  });
  sides.forEach((side, n) => column(picture, data, side, n * (wide + 60), wide, tall));
  if (sides.length === 2) {
    const at =
      tall - 96 - data.stacks.decoder.branches.findIndex((/** @type {any} */ b) => b.role === "cross_attn") * 92 - 46;
    picture.append(
      s("path", {
        d: `M${wide - 30},31 C${wide + 50},31 ${wide - 20},${at} ${wide + 72},${at}`,
        fill: "none",
        stroke: css("--warm"),
        "stroke-width": 2,
      }),
      s("path", { d: `M${wide + 66},${at - 5} l10,5 l-10,5 z`, fill: css("--warm") }),
    );
  }
  return card(
    t("anatomy.drawing"),
    h("div", { class: "scroll" }, picture),
    h(
      "div",
      { class: "row" },
      h("span", { class: "faint" }, t("anatomy.drawing.lead")),
      h("span", { class: "grow" }),
      keepers(
        `anatomy-${params.model}`,
        () => picture,
        () => data,
      ),
    ),
  );
}

/**
 * One stack from below (tokens) to above (states).
 * @param {SVGElement} picture
 * @param {any} data
 * @param {string} side
 * @param {number} x
 * @param {number} wide
 * @param {number} tall
 */
function column(picture, data, side, x, wide, tall) {
  const stack = data.stacks[side];
  const inner = stack.branches.length * 92;
  const bottom = tall - 76;
  picture.append(
    box(
      x + 30,
      bottom + 8,
      wide - 60,
      40,
      t("part.embed"),
      stack.embed.position ? short_(stack.embed.position) : "",
      "--soft-fill",
      () => open(`${side}.embed`),
    ),
  );
  picture.append(
    s(
      "text",
      { x: x + wide / 2, y: tall - 8, "text-anchor": "middle", fill: css("--soft") },
      side === "encoder" && data.stacks.decoder ? t("text.source") : t("tokens"),
    ),
  );
  const y0 = bottom - inner - 8;
  picture.append(
    s("rect", {
      x: x + 8,
      y: y0,
      width: wide - 16,
      height: inner + 6,
      rx: 12,
      fill: "none",
      stroke: css("--line"),
      "stroke-dasharray": stack.shared ? "5 4" : "",
    }),
  );
  picture.append(
    s(
      "text",
      { x: x + 14, y: y0 - 6, fill: css("--soft") },
      `${t(`side.${side}`)} × ${stack.layers}${stack.shared ? ` (${t("shared")})` : ""}`,
    ),
  );
  stack.branches.forEach((/** @type {any} */ branch, /** @type {number} */ n) => {
    const y = bottom - (n + 1) * 92 + 4;
    const under =
      branch.role === "ffn"
        ? [branch.d_ff && `d_ff ${branch.d_ff}`, branch.activation].filter(Boolean).join(" · ")
        : [
            `${branch.heads} ${t("heads")}`,
            branch.kv_heads && branch.kv_heads !== branch.heads ? `${branch.kv_heads} k/v` : "",
            branch.role === "self_attn" ? see(branch.sees) : "",
          ]
            .filter(Boolean)
            .join(" · ");
    picture.append(
      box(
        x + 30,
        y + 4,
        wide - 60,
        46,
        word("part", branch.role),
        under,
        branch.role === "ffn" ? "--ffn" : branch.role === "cross_attn" ? "--cross" : "--self",
        () => open(`${side}.layers.0.${branch.role}`),
      ),
    );
    const norm = Object.entries(branch.norms)
      .filter(([, v]) => v)
      .map(([slot, v]) => `${t(`slot.${slot}`)}: ${short_(String(v))}`)
      .join(" · ");
    picture.append(
      s("text", { x: x + wide / 2, y: y + 66, "text-anchor": "middle", fill: css("--soft"), "font-size": 11 }, norm),
    );
    picture.append(
      s("path", {
        d: `M${x + wide / 2},${y + 84} H${x + 18} V${y - 2} H${x + wide / 2}`,
        fill: "none",
        stroke: css("--soft"),
        "stroke-width": 1.2,
        "stroke-opacity": 0.55,
      }),
    );
  });
  const top = data.stacks.decoder && side === "encoder" ? t("anatomy.memory") : t("part.head");
  picture.append(
    box(x + 30, 14, wide - 60, 34, top, "", "--soft-fill", () =>
      open(side === "encoder" && data.stacks.decoder ? "encoder" : "head"),
    ),
  );
}

/** @param {string} sees */
export function see(sees) {
  return sees.startsWith("Past") ? t("sees.past") : sees.startsWith("Everyone") ? t("sees.all") : short_(sees);
}

/** A part's name without its settings. @param {string} code */
function short_(code) {
  return code.length > 26 ? code.split("(")[0] : code;
}

/**
 * @param {number} x
 * @param {number} y
 * @param {number} w
 * @param {number} k
 * @param {string} words
 * @param {string} under
 * @param {string} fill_
 * @param {() => void} pick
 */
function box(x, y, w, k, words, under, fill_, pick) {
  const key = (/** @type {KeyboardEvent} */ e) => e.key === "Enter" && pick();
  return s(
    "g",
    { class: "box", tabindex: 0, role: "button", "aria-label": words, onclick: pick, onkeydown: key },
    s("rect", { x, y, width: w, height: k, rx: 8, fill: css(fill_), stroke: css("--line") }),
    s(
      "text",
      {
        x: x + w / 2,
        y: y + (under ? k / 2 - 8 : k / 2),
        "text-anchor": "middle",
        "dominant-baseline": "central",
        fill: css("--ink"),
      },
      words,
    ),
    under
      ? s(
          "text",
          {
            x: x + w / 2,
            y: y + k / 2 + 10,
            "text-anchor": "middle",
            "dominant-baseline": "central",
            fill: css("--soft"),
            "font-size": 11,
          },
          under,
        )
      : null,
  );
}

/** Open the tree down to a path and go there. @param {string} path */
function open(path) {
  /** @type {NodeListOf<HTMLElement>} */
  const all = document.querySelectorAll("details[data-path]");
  const where = [...all].map((part) => ({ part, at: part.dataset.path ?? "" }));
  where
    .filter(({ at }) => path === at || path.startsWith(`${at}.`))
    .forEach(({ part }) => part.setAttribute("open", ""));
  const target = where.find(({ at }) => at === path) ?? where.find(({ at }) => at.startsWith(path));
  target?.part.setAttribute("open", "");
  target?.part.scrollIntoView({ block: "center", behavior: "smooth" });
  target?.part.querySelector("summary")?.focus();
}
