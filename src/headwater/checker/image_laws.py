"""The laws of image models: a patch is seen where it is, a masked one nowhere; an image may have another size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headwater.checker.claims import Claim, Query
from headwater.checker.laws import Probes, nonzero_positions
from headwater.checker.patch_call import PatchCall
from headwater.i18n import _


def patch_claims(probes: Probes) -> Iterator[Claim]:
    """Patches: other pixels in a patch change the vector of that patch alone, and no output where it is masked."""
    call = probes.adapter.call
    if not isinstance(call, PatchCall):
        return
    base = probes.query()
    positions = [j for j in probes.positions_to_change() if j >= call.first_tokens]
    for j in positions:
        here = probes.column_mask(base.ids, j)
        changed = probes.replace_tokens(base.ids, here)
        if call.embed.spec.projection.sees_one_patch:
            flag = {"embedding_only": torch.ones(1)}
            message = _("a patch is seen in the vector of another patch")
            a = Query(base.ids, flag)
            yield Claim("patches", message, a, Query(changed, flag), nonzero_positions(~here), exact=True, key=j)
        if call.is_maskable:
            masked = {"token_types": here.long()}
            message = _("a masked patch is seen")
            everywhere = nonzero_positions(torch.ones_like(here))
            a = Query(base.ids, masked)
            yield Claim("patches", message, a, Query(changed, masked), everywhere, exact=True, key=j)


def size_claims(probes: Probes) -> Iterator[Claim]:
    """Sizes: an image of another size has one output, alone or in a batch, and leaves that of the usual size alone."""
    call = probes.adapter.call
    if not isinstance(call, PatchCall):
        return
    higher = call.length + call.rows * call.columns
    base = Query(probes.random_ids(2, higher))
    alone = Query(base.ids[:1])
    first_row = torch.zeros_like(base.ids, dtype=torch.bool)
    first_row[0] = True
    message = _("an image of twice the height has different outputs alone and in a batch")
    yield Claim("sizes", message, alone, base, nonzero_positions(first_row), exact=False)

    usual = probes.query()
    again = Query(usual.ids.clone())
    message = _("an image of the usual size has another output after one of another size")
    yield Claim("sizes", message, usual, again, nonzero_positions(torch.ones_like(usual.ids)), exact=True)
