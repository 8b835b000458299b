"""Models without a KV cache (LSH attention, chunks): each token reads the whole row again, with the same answers."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

import headwater
from headwater.core import Attention
from headwater.errors import BadSetting
from headwater.families.builders import decoder, transformer
from headwater.families.hf_folder import load_hf_folder
from headwater.generation import forward
from headwater.generation.beam import Beam
from headwater.generation.engine import Engine
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.prefix_cache import Prefix
from headwater.generation.request import Request
from headwater.generation.sampling import Greedy
from headwater.generation.speculative import PromptLookup
from headwater.parts import swap
from headwater.tasks.seq2seq import greedy_decode
from headwater.variants.linear_attention import LinearAttention

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as T

SIZES = {"d_model": 32, "heads": 4, "layers": 2, "norm_position": "pre", "position": "rotary"}
PROMPTS = ([1, 2, 3], [4], list(range(5, 24)), [7, 7, 9])  # rows of several lengths, across the border of a chunk


def wide(spec):
    model = spec.build(seed=0).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


@pytest.fixture(scope="module")
def reformer():
    return wide(decoder(40, **SIZES, attention="reformer:chunk=4,rounds=2"))


def engine_outputs(model, requests, **settings):
    engine = Engine(model, **settings)
    rows = [engine.submit(request) for request in requests]
    engine.run()
    return [row.output_ids for row in rows]


@pytest.mark.parametrize("attention", ["lsh:chunk=4", "lsh:chunk=64", "reformer:chunk=4,rounds=2"])
def test_a_batch_is_the_plainest_decoding(attention, slowly):
    model = wide(decoder(40, **SIZES, attention=attention))
    outputs = engine_outputs(model, [Request(tuple(p), processors=(Greedy(),), max_tokens=12) for p in PROMPTS])
    assert outputs == [slowly(model, prompt, 12) for prompt in PROMPTS]


def test_a_layer_with_a_state_beside_chunks(slowly):
    """One layer that could be cached does not help the others: the row is read again by all."""
    spec = decoder(40, **SIZES, attention="reformer:chunk=4")
    first = spec.decoder.layers[0]
    mixed = swap(first, Attention, lambda plain: Attention(4, kernel=LinearAttention(), mask=plain.mask))
    model = wide(swap(spec, type(first), lambda layer: mixed if layer == first else layer))
    outputs = engine_outputs(model, [Request(tuple(p), processors=(Greedy(),), max_tokens=8) for p in PROMPTS])
    assert outputs == [slowly(model, prompt, 8) for prompt in PROMPTS]


def test_from_a_source(slowly):
    spec = transformer(30, 40, **SIZES, decoder_attention="lsh:chunk=4", encoder_attention="longformer:window=4")
    model = wide(spec)
    asks = [((1,), (5, 6, 7)), ((1,), (8,)), ((1, 2), (9, 9, 9, 9, 9, 9)), ((3,), tuple(range(20)))]
    requests = [Request(prompt, source, processors=(Greedy(),), max_tokens=9) for prompt, source in asks]
    for rows in (1, 2, 4):
        outputs = engine_outputs(model, requests, max_num_seqs=rows)
        assert outputs == [slowly(model, prompt, 9, source) for prompt, source in asks]


def test_the_evaluation_of_sequence_to_sequence(slowly):
    """Greedy decoding of a batch, in which rows end one by one."""
    model = wide(transformer(30, 40, **SIZES, attention="reformer:chunk=4"))
    source = torch.randint(30, (6, 9), generator=torch.Generator().manual_seed(0))
    want = [slowly(model, [1], 12, tuple(row)) for row in source.tolist()]
    eos = want[0][3]
    ends = [row.index(eos) if eos in row else len(row) for row in want]
    assert len(set(ends)) > 1
    outputs = greedy_decode(model, source, None, bos=1, eos=eos, max_new_tokens=12)
    assert outputs == [row[:end] for row, end in zip(want, ends, strict=True)]


def test_requests_that_join_at_any_time(reformer, slowly):
    rng = random.Random(0)
    engine, rows, prompts = Engine(reformer, max_num_seqs=3, max_prefill_tokens=5), [], []
    for _ in range(8):
        prompts.append([rng.randrange(40) for _ in range(rng.randint(1, 12))])
        rows.append(engine.submit(Request(tuple(prompts[-1]), processors=(Greedy(),), max_tokens=rng.randint(1, 9))))
        for _ in range(rng.randint(0, 3)):
            engine.step()
    engine.run()
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.output_ids == slowly(reformer, prompt, row.max_new_tokens)


def test_an_interrupted_step_is_repeated(reformer, slowly):
    engine = Engine(reformer)
    row = engine.submit(Request((1, 2, 3), processors=(Greedy(),), max_tokens=9))
    calls = []

    def interrupt(module, arguments):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise KeyboardInterrupt

    hook = reformer.decoder.layers[1].register_forward_pre_hook(interrupt)
    for _ in range(40):
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    hook.remove()
    assert row.output_ids == slowly(reformer, [1, 2, 3], 9)


def test_beams_and_a_prefix(reformer, slowly):
    (narrow,) = headwater.generate(reformer, [[1, 2, 3]], strategy=Beam(1), max_tokens=6)
    assert list(narrow.ids) == slowly(reformer, [1, 2, 3], 6)
    best = headwater.generate(reformer, [1, 2, 3], strategy=Beam(3), max_tokens=6)
    rows = [torch.tensor([[1, 2, 3, *best.ids[:i]]]) for i in range(len(best.ids))]  # a longer row has other chunks
    with torch.no_grad():
        logprobs = [reformer(row)[0, -1].log_softmax(-1) for row in rows]
    expected = [float(after[token]) for after, token in zip(logprobs, best.ids, strict=True)]
    assert list(best.logprobs) == pytest.approx(expected)
    prefix = Prefix(reformer, [1, 2])
    shared = headwater.generate(reformer, [1, 2, 3], prefix=prefix, max_tokens=6, temperature=0)
    assert list(shared.ids) == slowly(reformer, [1, 2, 3], 6)


def test_a_drafter_is_refused(reformer):
    """Drafts stand after a token when it is verified, and change its chunks."""
    with pytest.raises(BadSetting, match="a drafter needs a model with a KV cache, got 'PromptLookup'; leave it out"):
        Engine(reformer, drafter=PromptLookup())


def test_planted_faults_show(reformer, monkeypatch):
    """Rows padded together, or ids of another row, give other logits: so the laws above say something."""

    def logits():
        cache = BatchKVCache(reformer, range(len(PROMPTS)))
        first = forward.forward_last(reformer, cache, PROMPTS)
        return torch.stack((first, forward.forward_last(reformer, cache, [[5]] * len(PROMPTS))))

    def read_padded(model, cache, new_ids):
        ids = cache.append_ids(forward.pad_right(new_ids, cache.device))
        states = model.hidden_states(model.inputs(ids))
        ends = [length + len(new) for length, new in zip(cache.lengths, new_ids, strict=True)]
        cache.advance(max(map(len, new_ids)), None)
        new = [row[end - len(ids) : end] for row, end, ids in zip(states, ends, new_ids, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(new, batch_first=True)

    right = logits()
    monkeypatch.setattr(forward, "_read_again", read_padded)
    assert (logits() - right).abs().max() > 1e-3
    monkeypatch.undo()
    append = BatchKVCache.append_ids
    monkeypatch.setattr(BatchKVCache, "append_ids", lambda cache, ids: append(cache, ids).roll(1, 0))
    assert (logits() - right).abs().max() > 1e-3


# ------------------------------------------------------------------------------------------------ the public Reformer

CONFIG = {
    "vocab_size": 53, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16, "feed_forward_size": 32,
    "attn_layers": ["local", "lsh"], "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [8, 24], "num_buckets": 4,
    "max_position_embeddings": 128, "num_hashes": 2, "hash_seed": 3, "lsh_attn_chunk_length": 8,
    "local_attn_chunk_length": 8, "is_decoder": True, "pad_token_id": 0, "eos_token_id": 52,
}  # fmt: skip


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    torch.manual_seed(0)
    model = T.ReformerModelWithLMHead(T.ReformerConfig(**CONFIG)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    folder = tmp_path_factory.mktemp("reformer")
    model.save_pretrained(folder)
    return model, load_hf_folder(folder)


def test_equals_the_public_generation_without_its_cache(public):
    theirs, ours = public
    for length in (3, 20, 31):
        ids = torch.arange(2, 2 + length)[None]
        want = theirs.generate(ids, max_new_tokens=25, do_sample=False, use_cache=False)[0, length:].tolist()
        got = headwater.generate(ours, ids[0].tolist(), max_tokens=25)
        assert list(got.ids) == want
