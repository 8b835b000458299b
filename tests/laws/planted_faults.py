"""Mistakes that people make, each as a function that plants it, with the laws that must see it."""

from __future__ import annotations

import copy
import dataclasses

import combinations as cases
import torch
from torch import nn

from headwater import parts
from headwater.core import cache, embeddings, kernels, masks, model, norms, positions, stack
from headwater.variants import mean_pool_bridge, rope_scaling

FAULTS: dict[str, tuple] = {}


def fault(*laws: str, **choices: str):
    """A function that plants a fault by a monkeypatch, the laws that must each see it, and the cases to try."""

    def listed(plant):
        FAULTS[plant.__name__.replace("_", " ")] = plant, laws, choices
        return plant

    return listed


# ----------------------------------------------------------------------------------------------------- wrong masks


@fault("sees_exactly_what_it_may", "hidden_changes_nothing", "cached_is_whole", rule="all", shape="decoder")
def past_sees_one_ahead(patch):
    patch.setattr(masks.Causal, "allows", lambda self, q, k: k <= q + 1)
    patch.setattr(masks.AttentionMask, "is_causal", False)


@fault("sees_exactly_what_it_may", "cached_is_whole", rule="all", shape="decoder")
def past_is_inverted(patch):
    patch.setattr(masks.Causal, "allows", lambda self, q, k: k > q)
    patch.setattr(masks.AttentionMask, "is_causal", False)


@fault("sees_exactly_what_it_may", "hidden_changes_nothing", rule="all", shape="decoder")
def fused_causal_is_forgotten(patch):
    for kernel in (kernels.Kernel, kernels.SDPAKernel):
        patch.setattr(kernel, "attend", lambda self, q, k, v, attn_mask, is_causal: self.eager(q, k, v, attn_mask))


@fault("sees_exactly_what_it_may", rule="near", shape="decoder")
def window_is_one_too_long(patch):
    patch.setattr(masks.SlidingWindow, "allows", lambda self, q, k: (k <= q) & (q - k <= self.size))


@fault("sees_exactly_what_it_may", rule="near", shape="decoder")
def window_is_one_too_short(patch):
    patch.setattr(masks.SlidingWindow, "allows", lambda self, q, k: (k <= q) & (q - k < self.size - 1))


@fault("sees_exactly_what_it_may", rule="near", shape="encoder")
def around_looks_back_only(patch):
    patch.setattr(masks.LocalWindow, "allows", lambda self, q, k: (q - k).clamp(min=0) <= self.size)


@fault("sees_exactly_what_it_may", rule="both", shape="decoder")
def both_is_either(patch):
    patch.setattr(masks.And, "allows", lambda self, q, k: self.first.allows(q, k) | self.second.allows(q, k))


@fault("cached_is_whole", rule="all", shape="decoder")
def triangle_stands_in_the_top_left_corner(patch):
    """The causal mask of a cached call laid as if queries began at place 0."""

    def attend(self, q, k, v, attn_mask, is_causal):
        corner = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return self.eager(q, k, v, corner)

    for kernel in (kernels.Kernel, kernels.SDPAKernel):
        patch.setattr(kernel, "attend", attend)


# ------------------------------------------------------------------------------------------------- wrong padding


@fault("padded_left_is_unpadded", "cached_batches_are_alone", "padded_anywhere_is_unpadded", position="learned")
def places_are_indices_not_counts(patch):
    def positions_from(self, seen_tokens):
        return seen_tokens + torch.arange(self.ids.shape[1])[None].expand_as(self.ids)

    patch.setattr(embeddings.ModelInputs, "positions_from", positions_from)


PADDING = ("padded_left_is_unpadded", "hidden_changes_nothing", "sees_exactly_what_it_may", "cached_batches_are_alone")


@fault(*PADDING, shape="both")
def padding_is_visible(patch):
    real = masks.AttentionMask.boolean
    patch.setattr(masks.AttentionMask, "boolean", lambda self: real(dataclasses.replace(self, attention_mask=None)))


@fault("padded_left_is_unpadded", "padded_right_is_unpadded", shape="both")
def mask_means_the_opposite(patch):
    real = masks.AttentionMask.boolean

    def boolean(self):
        if self.attention_mask is None:
            return real(self)
        return real(dataclasses.replace(self, attention_mask=~self.attention_mask))

    patch.setattr(masks.AttentionMask, "boolean", boolean)


@fault("padded_right_is_unpadded", "padded_anywhere_is_unpadded", bridge="pooled")
def pooling_groups_move_with_padding(patch):
    def forward(self, memory):
        x, keep = memory.hidden_states, memory.attention_mask
        keep = torch.ones_like(memory.ids, dtype=torch.bool) if keep is None else keep
        spare = -x.shape[1] % self.factor
        keep = nn.functional.pad(keep, (0, spare)).unflatten(1, (-1, self.factor))
        x = nn.functional.pad(x, (0, 0, 0, spare)).unflatten(1, (-1, self.factor)) * keep[..., None]
        return embeddings.ModelInputs(
            memory.ids, keep.any(2), hidden_states=x.sum(2) / keep.sum(2)[..., None].clamp(min=1)
        )

    patch.setattr(mean_pool_bridge.MeanPoolBridgeLayer, "forward", forward)


@fault("batched_is_alone", "padded_right_is_unpadded", "accumulated_is_full_batch", norm="layer")
def norm_looks_across_the_batch(patch):
    def forward(self, x, y=None, p=0.0):
        x = x if y is None else x + y
        return (x - x.mean((0, -1), keepdim=True)) / x.std((0, -1), keepdim=True) * self.weight

    patch.setattr(norms.LayerNormLayer, "forward", forward)


@fault("padded_right_is_unpadded", position="rotary dynamic")
def speeds_depend_on_the_longest_row(patch):
    def for_length(self, inv_freq, theta, positions):
        return inv_freq / (1 + positions.shape[1] / 10)

    patch.setattr(rope_scaling.DynamicScaling, "for_length", for_length)


# ----------------------------------------------------------------------------------------------- wrong documents


@fault("packed_is_alone", "sees_exactly_what_it_may", bridge="unpooled")
def documents_see_each_other(patch):
    real = masks.AttentionMask.boolean
    patch.setattr(masks.AttentionMask, "boolean", lambda self: real(dataclasses.replace(self, q_document_ids=None)))


@fault("packed_is_alone", position="learned")
def places_run_on_through_documents(patch):
    def positions_run_on(document_ids):
        return torch.arange(document_ids.shape[1]).expand_as(document_ids)

    patch.setattr(embeddings, "positions_within_documents", positions_run_on)


@fault("packed_is_alone", rule="all", shape="decoder")
def triangle_ignores_documents(patch):
    def is_causal(self):
        return self.aligned and self.rule.window_size == (None, 0)

    patch.setattr(masks.AttentionMask, "is_causal", property(is_causal))


# -------------------------------------------------------------------------------------------------- wrong caches

CACHED = ("cached_is_whole", "cached_batches_are_alone", "cache_follows_its_rows")


@fault(*CACHED, shape="decoder", rule="all")
def cache_forgets_a_column(patch):
    real = cache.DynamicCache.update

    def update(self, key, k, v):
        k, v = real(self, key, k, v)
        k = k.clone()
        k[:, :, 0] = 0
        return k, v

    patch.setattr(cache.DynamicCache, "update", update)


@fault(*CACHED, position="learned", shape="decoder")
def count_stands_still(patch):
    patch.setattr(cache.Cache, "advance", lambda self, tokens, attention_mask: None)


@fault("cached_batches_are_alone", position="rotary", shape="decoder")
def count_includes_padding(patch):
    def advance(self, tokens, attention_mask):
        self.seen_tokens = self.seen_tokens + tokens

    patch.setattr(cache.Cache, "advance", advance)


@fault("cached_is_whole", shape="decoder", rule="near")
def rolling_is_one_too_short(patch):
    def short(self, t, dim):
        return t if self.window is None else t.narrow(dim, max(0, t.shape[dim] - 1), min(1, t.shape[dim]))

    patch.setattr(cache.DynamicCache, "_last_columns", short)


@fault("cached_batches_are_alone", shape="decoder", rule="near")
def rolling_counts_padding(patch):
    real = cache.DynamicCache._last_columns

    def last(self, t, dim):
        self.window_columns = None
        return real(self, t, dim)

    patch.setattr(cache.DynamicCache, "_last_columns", last)


@fault(*CACHED, shape="decoder", rule="all")
def fixed_shows_what_is_not_written(patch):
    real = cache.StaticCache.update_positions

    def update_positions(self, positions, attention_mask):
        k_positions, attention_mask = real(self, positions, attention_mask)
        return k_positions, torch.ones_like(attention_mask)

    patch.setattr(cache.StaticCache, "update_positions", update_positions)


@fault("cached_is_whole", layers="shared", shape="decoder")
def shared_layers_share_their_cache(patch):
    """What the last use of a layer wrote is all that its earlier uses find again."""
    real = cache.DynamicCache.update

    def update(self, key, k, v):
        kv = real(self, key, k, v)
        self.kv = dict.fromkeys(self.kv, self.kv[key]) if key[0] == 2 else self.kv
        return kv

    patch.setattr(cache.DynamicCache, "update", update)


@fault("cache_follows_its_rows", shape="both")
def select_forgets_the_source(patch):
    real = cache.Cache.reorder

    def reorder(self, rows):
        cross_kv = self.cross_kv
        real(self, rows)
        self.cross_kv = cross_kv

    patch.setattr(cache.Cache, "reorder", reorder)


@fault("cache_follows_its_rows", shape="decoder")
def crop_leaves_one_more(patch):
    real = cache.Cache.crop
    patch.setattr(cache.Cache, "crop", lambda self, length: real(self, length + 1))


# ---------------------------------------------------------------------------------------- wrong heads, wrong scale


def _spelled(scale=1.0, tiled=False):
    real = kernels.Kernel.eager

    def eager(self, q, k, v, attn_mask):
        if tiled and k.shape[1] < q.shape[1]:
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)
        return real(self, q * scale, k, v, attn_mask)

    return eager


@fault("hooked_is_fused", "sdpa_is_eager", kernel="sdpa", attention="heads")
def scale_is_missing(patch):
    patch.setattr(kernels.Kernel, "eager", _spelled(scale=2.0))


@fault("hooked_is_fused", "sdpa_is_eager", kernel="sdpa", attention="grouped")
def groups_are_tiled_not_interleaved(patch):
    patch.setattr(kernels.Kernel, "eager", _spelled(tiled=True))


@fault("hooked_is_fused", kernel="eager")
def weights_are_heard_before_they_are_hidden(patch):
    def eager(self, q, k, v, attn_mask):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        shown = self.weights((self.scale * (q @ k.mT)).exp())
        if attn_mask is not None:
            allowed = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -torch.inf
            shown = shown * allowed
        return shown / shown.sum(-1, keepdim=True).clamp(min=1e-9) @ v

    patch.setattr(kernels.Kernel, "eager", eager)


@fault("sdpa_is_eager", kernel="sdpa")
def plain_ignores_the_mask(patch):
    real = kernels.Kernel.eager
    patch.setattr(kernels.Kernel, "eager", lambda self, q, k, v, attn_mask: real(self, q, k, v, None))


@fault("blind_rows_are_finite", kernel="eager", shape="both")
def blind_rows_divide_by_zero(patch):
    def eager(self, q, k, v, attn_mask):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = self.scale * (q @ k.mT)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self.weights(scores.softmax(-1)) @ v

    patch.setattr(kernels.Kernel, "eager", eager)


@fault("cached_is_whole", "padded_left_is_unpadded", position="rotary", shape="decoder")
def keys_turn_the_other_way(patch):
    """q and k must turn the same way: then only their distance counts."""

    def rotate(self, q, k, cos_sin):
        cos, sin = cos_sin
        return positions.apply_rotary(q, cos, sin), positions.apply_rotary(k, cos, -sin + 0.1 * k.shape[2])

    patch.setattr(positions.RotaryEncoding, "rotate", rotate)


@fault("sdpa_is_eager", "hooked_is_fused", kernel="sdpa", position="alibi")
def bias_is_added_to_one_back_end_only(patch):
    real = kernels.Kernel.eager

    def eager(self, q, k, v, attn_mask):
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask > -torch.inf
        return real(self, q, k, v, attn_mask)

    patch.setattr(kernels.Kernel, "eager", eager)


# ---------------------------------------------------------------------------------------------- wrong housekeeping


@fault("recomputed_is_kept")
def recomputing_drops_other_values(patch):
    def forgetful(layer, x, context, step, use_reentrant):
        return torch.utils.checkpoint.checkpoint(layer, x, context, step, use_reentrant=False, preserve_rng_state=False)

    patch.setattr(stack, "checkpoint", forgetful)


@fault("copied_is_same")
def a_copy_shares_its_weights(patch):
    patch.setattr(copy, "deepcopy", lambda model: copy.copy(model))


@fault("copied_is_same", norm="layer")
def a_weight_is_not_in_the_state_dict(patch):
    real = nn.Module.load_state_dict
    patch.setattr(nn.Module, "load_state_dict", lambda self, state: real(self, _but_norms(state), strict=False))


def _but_norms(state):
    return {name: tensor for name, tensor in state.items() if "norm" not in name}


@fault("copied_is_same", table="tied")
def ties_break_on_leaving_meta(patch):
    patch.setattr(model.Transformer, "_apply", nn.Module._apply)


@fault("counted_is_built", table="tied")
def tied_weights_are_counted_twice(patch):
    patch.setattr(model.Transformer, "_apply", nn.Module._apply)
    cases.built.cache_clear()


@fault("written_is_read")
def printing_leaves_a_field_out(patch):
    real = parts._non_default_fields
    patch.setattr(parts, "_non_default_fields", lambda value: real(value)[:3])


@fault("counted_is_built", norm="offset rms")
def a_norm_asks_for_memory_at_once(patch):
    real = norms.OffsetRMSNormLayer.__init__

    def start(self, d_model, eps):
        real(self, d_model, eps)
        self.weight = nn.Parameter(torch.empty(d_model, device="cpu"))

    patch.setattr(norms.OffsetRMSNormLayer, "__init__", start)
