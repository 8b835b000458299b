"""The words of the checker, in both languages: what a broken law means, and what to do about it."""

from __future__ import annotations

from headwater.inspection.calling import Calling
from headwater.inspection.claims import Broken, Claim
from headwater.inspection.words import Both

KEPT = {
    "future": Both(
        "no place sees a later one, in evaluation and in training mode", "无论评估还是训练，没有位置看到后面的位置"
    ),
    "window": Both("no place sees beyond its window", "没有位置看到窗口之外"),
    "padding": Both("padding is not seen, on either side", "两边的填充都不被看到"),
    "positions": Both("padding on the left moves no place", "左边的填充不会移动位置"),
    "documents": Both("documents in one row do not see one another", "同一行里的文档互不相见"),
    "batch": Both("other rows change nothing", "别的行不会改变什么"),
    "cache": Both("piece by piece through a cache answers as the whole", "经缓存逐段读，与整段读回答相同"),
    "back end": Both("fused attention and the plain formula agree", "融合的注意力与逐步公式一致"),
}
SKIPPED = {
    "future": Both("it may look both ways; causal=True makes it a law", "它可以双向看；要查这条，给 causal=True"),
    "window": Both("its attention has no window", "它的注意力没有窗口"),
    "padding": Both(
        "no padding mask is known for it; pass call=, with a parameter keep",
        "不知道它的填充掩码；用 call= 给出带 keep 的调用",
    ),
    "positions": Both(
        "padding on the left is not asked about, or no padding mask is known; pass call=, with keep",
        "没有问左边的填充，或不知道填充掩码；用 call= 给出带 keep 的调用",
    ),
    "documents": Both("it takes no document numbers", "它不接收文档编号"),
    "cache": Both("no cache is known for it; pass step=", "不知道它的缓存；用 step= 给出"),
}
REMEDIES = {
    "future": Both(
        "Hide later keys before the softmax in every layer. If it is meant to look both ways, pass causal=False.",
        "每一层都要在 softmax 之前遮住后面的键。若本来就该双向看，给 causal=False。",
    ),
    "window": Both(
        "Let a window of w hide keys with q - k ≥ w: 0 ≤ q - k < w.", "窗口 w 应遮住 q - k ≥ w 的键：0 ≤ q - k < w。"
    ),
    "padding": Both(
        "Hide padded keys before the softmax in every layer (True = may attend), and average real tokens only.",
        "每一层都要在 softmax 之前遮住填充的键（True = 可以看），求平均时只算真词元。",
    ),
    "positions": Both(
        "Count places over real tokens: (keep.cumsum(1) - 1).clamp(min=0), and use them in every position.",
        "位置只数真词元：(keep.cumsum(1) - 1).clamp(min=0)，并在每种位置编码里用它。",
    ),
    "documents": Both(
        "Let a query see a key only where document numbers are equal, and count places from its start.",
        "只有文档编号相等时查询才能看到键，位置从文档开头数起。",
    ),
    "batch": Both(
        "Keep rows apart: look for a reshape, transpose or norm that mixes the batch axis (BatchNorm does).",
        "各行要分开：找把批这一轴混进来的 reshape、transpose 或归一化（BatchNorm 就会）。",
    ),
    "cache": Both(
        "With q new queries and k keys the triangle ends at the bottom right: key ≤ query + (k - q). Keep every "
        "token that was read, and count places on from them.",
        "有 q 个新查询、k 个键时，三角形对齐右下角：key ≤ query + (k - q)。读过的词元都要留下，位置接着数。",
    ),
    "back end": Both(
        "Compare the mask, the scale and the dropout that each back end is given.",
        "比较两种实现各自得到的掩码、缩放和 dropout。",
    ),
}
NUMBERS = Both(
    "Look at what it divides by, and at rows that may attend to nothing: hide with the dtype's smallest number, not "
    "with -1e9 or -inf, and set such rows to zero.",
    "看看它除以什么，以及什么都不能看的行：遮住时用该类型的最小数，不要用 -1e9 或 -inf，并把这样的行置零。",
)
LATE = Both(
    "Hide later keys before the softmax with -inf, not with a number that leaves a small weight.",
    "在 softmax 之前用 -inf 遮住后面的键，不要用会留下微小权重的数。",
)
CUT = Both(
    "Look for .detach(), no_grad, .data or an argmax on the way; or freeze it with requires_grad_(False).",
    "在路上找 .detach()、no_grad、.data 或 argmax；或用 requires_grad_(False) 冻结它。",
)
UNUSED = Both("Use them, or freeze them with requires_grad_(False).", "用上它们，或用 requires_grad_(False) 冻结。")
INVERTED = Both(
    "The mask is inverted: it shows the future and hides the past. Use one convention, True = may attend.",
    "掩码反了：露出未来，遮住过去。只用一种约定：True = 可以看。",
)
STATISTIC = Both(
    "A statistic over places (BatchNorm, a mean) carries the future back: normalise each place alone.",
    "跨位置的统计量（BatchNorm、平均）把未来带了回来：每个位置单独归一化。",
)


def why_skipped(law: str, how: Calling, per_token: bool) -> Both:
    if law in ("future", "documents", "cache") and not per_token:
        return Both("it answers once a row", "它每行只回答一次")
    if law == "documents" and "source" in how.takes:
        return Both("it reads a source, for which packed documents are not asked about", "它读源文，不问装箱的文档")
    return SKIPPED[law]


def remedy(claim: Claim, alike: list[Broken], inverted: bool) -> Both:
    if claim.law != "future":
        return REMEDIES[claim.law]
    if inverted:
        return INVERTED
    if claim.a.training:
        return STATISTIC
    ahead = max(found.claim.key - place for found in alike for _, place in found.places)  # type: ignore[operator]
    if ahead < claim.a.size[1] // 2:
        return Both(
            f"It sees {ahead} ahead, in all layers together: a mask off by one. Show key ≤ query: tril(diagonal=0).",
            f"所有层合起来多看了 {ahead} 个：掩码差了一位。只露出 key ≤ query：tril(diagonal=0)。",
        )
    return REMEDIES["future"]


def sentence(alike: list[Broken], worst: Broken) -> Both:
    """What was seen, at the worst place, and how often."""
    claim, more = worst.claim, sum(len(found.places) for found in alike) - 1
    by = f"{worst.gap:.2g} ({worst.share:.1%} of the largest)"
    en = f"{claim.says}: place {worst.place} of row {worst.row} changes by {by}"
    zh = f"{claim.says.zh}：第 {worst.row} 行位置 {worst.place} 变了 {worst.gap:.2g}（最大值的 {worst.share:.1%}）"
    if claim.key is not None:
        en, zh = en + f" with the token at place {claim.key}", zh + f"，因为位置 {claim.key} 的词元变了"
    if more:
        en, zh = en + f"; {more} more places do", zh + f"；还有 {more} 处如此"
    return Both(en, zh)
