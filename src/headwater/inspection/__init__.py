"""Model inspection: attention, logit lens, losses, gradients, attribution, ablation, costs; as data and figures.

    report = headwater.inspect(headwater.load("smollm2"), "The cat sat on the mat")      # all analyses below
    report.write("report")                                                               # HTML, JSON, PNG

`model`: the result of headwater.load, a run (training.predict.load_run), or a Transformer (its texts are token ids).
`text`: the input; of an encoder-decoder the source, and `target` the decoder's text (generated if None).
Every function accepts a TokenizedInput as `text`, so that a text is tokenized, and a target generated, only once.

    watch(model, *patterns)             -> ActivationCache  with watch(model, "**.self_attn") as cache: … cache[path]
    tokenize_input(model, text, target=None)
                                        -> TokenizedInput   tokens, source, next_tokens: tuples of Token
    attention_maps(model, text, target=None, kinds=None, layers=None, heads=None, max_bytes=MAX_WEIGHT_BYTES)
                                        -> AttentionMaps    maps: AttentionMap(kind, layer, heads, weights [H, Q, S])
    alignment(model, text, target=None, layers=None)
                                        -> Alignment        weights [target, source], the mean of cross-attention
    classify_heads(model, text, target=None)
                                        -> HeadPatterns     one HeadPattern per head: diagonal, previous, …, pattern
    lens(model, text, target=None, top_k=5, positions=None)
                                        -> LogitLens        top_ids, top_probs [layers + 1, P, top_k]
    next_tokens(model, text, top_k=10, target=None, position=None)
                                        -> NextTokens       candidates: NextToken(token, prob); entropy
    token_losses(model, text, target=None)
                                        -> TokenLosses      cross-entropy of each token, in nats; perplexity
    gradient_flow(model, text, target=None)
                                        -> GradientFlow     gradient norms by parameter, flow by layer
    first_nonfinite(model, text, target=None)
                                        -> NonFinite | None the first module that outputs NaN or infinity
    attribute(model, text, target=None, position=None, token_id=None, method="integrated_gradients")
                                        -> Attribution      one score per input token
    ablate(model, text, layer, head, target=None, kind=None)
                                        -> Ablation         predictions with and without the head
    head_importance(model, text, target=None, kind=None)
                                        -> HeadImportance   loss change when each head is ablated [layers, heads]
    position_effects(model, length=64)  -> PositionEffects  what each position encoding of the model computes
    measure_visibility(model, length=64)
                                        -> Visibilities     who sees whom in each kind of attention
    count(model.spec, batch, length)    -> ModelCosts       parameters, bytes, FLOPs
    inspect(model, text, target=None, analyses=None)
                                        -> Inspection       the results by name; write(folder), html()
    plot(result)                        -> a matplotlib figure;  save_figure(result, "a.png" or "a.svg")

Every result is frozen, has to_dict() for JSON, prints a summary, saves a figure of itself (result.save(path)) and
displays itself in a notebook. AttentionMap.tile(head, rows, columns, size) returns part of a matrix as uint8.
"""

from __future__ import annotations

import importlib
from typing import Any

LAZY_IMPORTS = {
    "ablate": "ablation",
    "alignment": "attention",
    "attention_maps": "attention",
    "attribute": "attribution",
    "classify_heads": "head_patterns",
    "count": "costs",
    "first_nonfinite": "gradients",
    "gradient_flow": "gradients",
    "head_importance": "ablation",
    "inspect": "api",
    "lens": "logit_lens",
    "measure_visibility": "visibility",
    "next_tokens": "predictions",
    "plot": "figures",
    "position_effects": "position_plots",
    "save_figure": "figures",
    "token_losses": "predictions",
    "tokenize_input": "inputs",
    "watch": "hooks",
}


def __getattr__(name: str) -> Any:
    """Import a public function when it is first used, so that help and doctor need no torch."""
    if name not in LAZY_IMPORTS:
        raise AttributeError(f"headwater.inspection has no name {name!r}")
    return getattr(importlib.import_module(f"headwater.inspection.{LAZY_IMPORTS[name]}"), name)
