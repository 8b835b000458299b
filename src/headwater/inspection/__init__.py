"""Looking at models and machines: plain data first, pictures and words made from it.

    found = headwater.inspect(headwater.load("smollm2"), "The cat sat on the mat")      # all of the below
    found.write("report")                                                               # HTML, JSON, PNG

`model`: what headwater.load gives, a run (training.use.load_run), or a model alone (then texts are token ids).
`text`: what is read; for an encoder-decoder the source, and `target` what is written (generated where it is None).
Every function takes a Reading in the place of `text`, so that a text is cut, and a target generated, only once.

    watch(model, *patterns)                        with watch(model, "decoder.layers.*.cross_attn") as seen: seen[path]
    read(model, text, target=None)                 -> Reading        tokens, source, follows: tuples of Token
    attention(model, text, target=None, kinds=None, layers=None, heads=None, budget=BUDGET)
                                                   -> Attention      maps: Map(kind, layer, heads, weights [H, Q, S])
    alignment(model, text, target=None, layers=None)
                                                   -> Alignment      weights [written, source], of cross-attention
    heads(model, text, target=None)                -> Heads          one Head a head: self, previous, …, does
    lens(model, text, target=None, top=5, places=None)
                                                   -> Lens           top ids and shares [layers + 1, Q, top]
    next_tokens(model, text, n=10, target=None, place=None)
                                                   -> NextTokens     choices: NextToken(token, share); entropy
    token_losses(model, text, target=None)         -> TokenLosses    one loss a token, in nats
    gradients(model, text, target=None)            -> Gradients      norms by parameter, flow by layer
    first_bad(model, text, target=None)            -> Spoilt | None  the module where NaN or inf first arises
    attribution(model, text, target=None, place=None, token=None, by="integrated" | "gradient" | "blanked")
                                                   -> Attribution    a score for each token that was read
    ablate(model, text, layer, head, target=None, kind=None)
                                                   -> Ablation       what is said without that head
    ablations(model, text, target=None, kind=None) -> Ablations      loss without each head [layers, heads]
    positions(model, length=64)                    -> Positions      what each position of the model does
    count(model.spec, batch, length)               -> Count          parameters, bytes, operations (costs.py)
    inspect(model, text, target=None, what=None)   -> Inspection     the results by name; write(folder), html()
    picture(result)                                -> a matplotlib figure;  save(result, "a.png" or "a.svg")

Every result is frozen, has to_plain() for JSON, prints as words, saves itself as a picture (result.save(path)) and
shows itself in a notebook. A Map gives parts of a matrix as bytes: map.tile(head, rows, columns, size).
"""

from __future__ import annotations

import importlib
from typing import Any

HOMES = {
    "ablate": "ablation",
    "ablations": "ablation",
    "alignment": "maps",
    "attention": "maps",
    "attribution": "credit",
    "count": "costs",
    "first_bad": "flow",
    "gradients": "flow",
    "heads": "patterns",
    "inspect": "gathering",
    "lens": "logit_lens",
    "next_tokens": "surprise",
    "picture": "pictures",
    "positions": "places",
    "read": "subjects",
    "save": "pictures",
    "token_losses": "surprise",
    "watch": "watching",
}


def __getattr__(name: str) -> Any:
    """Fetched when asked for, so that help and doctor need no torch."""
    if name not in HOMES:
        raise AttributeError(f"headwater.inspection has no name {name!r}")
    return getattr(importlib.import_module(f"headwater.inspection.{HOMES[name]}"), name)
