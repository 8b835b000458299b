// Architecture diagram.
// @ts-check
import { cssVariable, h, s } from "../dom.js";
import { exportButtons } from "../export.js";
import { card } from "../components.js";
import { t, translateName } from "../i18n.js";

/** @param {any} data @param {Record<string, string>} params */
export function architectureDiagram(data, params) {
  const sides = Object.keys(data.stacks);
  const maxBranches = Math.max(...sides.map((side) => data.stacks[side].branches.length));
  const [wide, tall] = [250, 96 + maxBranches * 92 + 96];
  const width = sides.length * wide + (sides.length - 1) * 60;
  const svg = s("svg", {
    viewBox: `0 0 ${width} ${tall}`,
    width,
    height: tall,
    class: "diagram",
    role: "img",
    "aria-label": t("architecture.title"),
    "font-family": cssVariable("--font"),
    "font-size": 13,
  });
  sides.forEach((side, n) => drawStack(svg, data, side, n * (wide + 60), wide, tall));
  if (sides.length === 2) {
    const at =
      tall - 96 - data.stacks.decoder.branches.findIndex((/** @type {any} */ b) => b.role === "cross_attn") * 92 - 46;
    svg.append(
      s("path", {
        d: `M${wide - 30},31 C${wide + 50},31 ${wide - 20},${at} ${wide + 72},${at}`,
        fill: "none",
        stroke: cssVariable("--accent-2"),
        "stroke-width": 2,
      }),
      s("path", { d: `M${wide + 66},${at - 5} l10,5 l-10,5 z`, fill: cssVariable("--accent-2") }),
    );
  }
  return card(
    t("architecture.diagram"),
    h("div", { class: "scroll" }, svg),
    h(
      "div",
      { class: "row" },
      h("span", { class: "muted" }, t("architecture.diagram.lead")),
      h("span", { class: "spacer" }),
      exportButtons(
        `architecture-${params.model}`,
        () => svg,
        () => data,
      ),
    ),
  );
}

/**
 * One stack, from tokens at the bottom to hidden states at the top.
 * @param {SVGElement} svg
 * @param {any} data
 * @param {string} side
 * @param {number} x
 * @param {number} wide
 * @param {number} tall
 */
function drawStack(svg, data, side, x, wide, tall) {
  const stack = data.stacks[side];
  const inner = stack.branches.length * 92;
  const bottom = tall - 76;
  svg.append(
    box(
      x + 30,
      bottom + 8,
      wide - 60,
      40,
      t("part.embed"),
      stack.embed.position ? shortName(stack.embed.position) : "",
      "--surface",
      () => openInTree(`${side}.embed`),
    ),
  );
  svg.append(
    s(
      "text",
      { x: x + wide / 2, y: tall - 8, "text-anchor": "middle", fill: cssVariable("--text-muted") },
      side === "encoder" && data.stacks.decoder ? t("text.source") : t("tokens"),
    ),
  );
  const y0 = bottom - inner - 8;
  svg.append(
    s("rect", {
      x: x + 8,
      y: y0,
      width: wide - 16,
      height: inner + 6,
      rx: 12,
      fill: "none",
      stroke: cssVariable("--border"),
      "stroke-dasharray": stack.shared_weights ? "5 4" : "",
    }),
  );
  svg.append(
    s(
      "text",
      { x: x + 14, y: y0 - 6, fill: cssVariable("--text-muted") },
      `${t(`side.${side}`)} × ${stack.layers}${stack.shared_weights ? ` (${t("shared")})` : ""}`,
    ),
  );
  stack.branches.forEach((/** @type {any} */ branch, /** @type {number} */ n) => {
    const y = bottom - (n + 1) * 92 + 4;
    const subtitle =
      branch.role === "ffn"
        ? [branch.d_ff && `d_ff ${branch.d_ff}`, branch.activation].filter(Boolean).join(" · ")
        : [
            `${branch.heads} ${t("heads")}`,
            branch.kv_heads && branch.kv_heads !== branch.heads ? `${branch.kv_heads} k/v` : "",
            branch.role === "self_attn" ? maskLabel(branch.mask) : "",
          ]
            .filter(Boolean)
            .join(" · ");
    svg.append(
      box(
        x + 30,
        y + 4,
        wide - 60,
        46,
        translateName("part", branch.role),
        subtitle,
        branch.role === "ffn" ? "--ffn" : branch.role === "cross_attn" ? "--cross" : "--self",
        () => openInTree(`${side}.layers.0.${branch.role}`),
      ),
    );
    const norm = Object.entries(branch.norms)
      .filter(([, v]) => v)
      .map(([slot, v]) => `${t(`slot.${slot}`)}: ${shortName(String(v))}`)
      .join(" · ");
    svg.append(
      s("text", { x: x + wide / 2, y: y + 66, "text-anchor": "middle", fill: cssVariable("--text-muted"), "font-size": 11 }, norm),
    );
    svg.append(
      s("path", {
        d: `M${x + wide / 2},${y + 84} H${x + 18} V${y - 2} H${x + wide / 2}`,
        fill: "none",
        stroke: cssVariable("--text-muted"),
        "stroke-width": 1.2,
        "stroke-opacity": 0.55,
      }),
    );
  });
  const top = data.stacks.decoder && side === "encoder" ? t("architecture.memory") : t("part.head");
  svg.append(
    box(x + 30, 14, wide - 60, 34, top, "", "--surface", () =>
      openInTree(side === "encoder" && data.stacks.decoder ? "encoder" : "head"),
    ),
  );
}

/** The name of an attention mask. @param {string} mask */
export function maskLabel(mask) {
  if (mask.startsWith("Causal")) return t("mask.causal");
  return mask.startsWith("Bidirectional") ? t("mask.bidirectional") : shortName(mask);
}

/** A part's name without its arguments. @param {string} code */
function shortName(code) {
  return code.length > 26 ? code.split("(")[0] : code;
}

/**
 * @param {number} x
 * @param {number} y
 * @param {number} w
 * @param {number} k
 * @param {string} title
 * @param {string} subtitle
 * @param {string} fillVariable
 * @param {() => void} onPick
 */
function box(x, y, w, k, title, subtitle, fillVariable, onPick) {
  const key = (/** @type {KeyboardEvent} */ e) => e.key === "Enter" && onPick();
  return s(
    "g",
    { class: "box", tabindex: 0, role: "button", "aria-label": title, onclick: onPick, onkeydown: key },
    s("rect", { x, y, width: w, height: k, rx: 8, fill: cssVariable(fillVariable), stroke: cssVariable("--border") }),
    s(
      "text",
      {
        x: x + w / 2,
        y: y + (subtitle ? k / 2 - 8 : k / 2),
        "text-anchor": "middle",
        "dominant-baseline": "central",
        fill: cssVariable("--text"),
      },
      title,
    ),
    subtitle
      ? s(
          "text",
          {
            x: x + w / 2,
            y: y + k / 2 + 10,
            "text-anchor": "middle",
            "dominant-baseline": "central",
            fill: cssVariable("--text-muted"),
            "font-size": 11,
          },
          subtitle,
        )
      : null,
  );
}

/** Open the module tree at a path and scroll to it. @param {string} path */
function openInTree(path) {
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
