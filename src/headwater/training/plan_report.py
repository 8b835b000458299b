"""The plan of a run as a report: data, tokenizer, model, what learns, training, evaluation, memory, time."""

from __future__ import annotations

from headwater.core.model import Transformer
from headwater.data.summary import format_summary, summary_line
from headwater.i18n import _, join
from headwater.training.config import TrainConfig
from headwater.training.loggers import format_duration
from headwater.training.preview import learned_lines
from headwater.training.setup import TrainSetup
from headwater.training.tuned import is_tuned
from headwater.tuning.base import trained_parameters
from headwater.weights.native import quantized_blocks, quantized_layers

MAX_USUAL_SECONDS = 1900  # of a run for which no time limit is proposed


def format_plan(setup: TrainSetup) -> str:
    """The report before training: data, tokenizer, model, training, evaluation, memory, time."""
    config = setup.config
    task_data = setup.task_data
    vocab_size = len(task_data.tokenizer)
    seconds = config.max_steps * setup.step_seconds + setup.eval_plan.total_seconds(config.max_steps)
    hint = _("; --max-time 15m makes it fit") if seconds > MAX_USUAL_SECONDS and not config.max_time else ""
    duration = format_duration(max(1.0, seconds))
    size = f"{estimate_memory(setup.model, config, vocab_size) / 2**20:,.0f} MB"
    lines = [
        *([format_summary(setup.data_summary)] if setup.data_summary else []),
        *([_tokenizer_line(setup)] if task_data.task.reads_text else []),
        *learned_lines(task_data),
        summary_line(_("model"), _format_model(setup)),
        summary_line(
            _("training"),
            _(
                "{max_steps:,} steps of up to {batch_tokens:,} tokens, learning rate {lr:.2g} ({schedule})",
                max_steps=config.max_steps,
                batch_tokens=config.batch_tokens,
                lr=config.lr,
                schedule=config.schedule,
            ),
        ),
        summary_line(_("evaluation"), _format_evaluation(setup)),
        summary_line(_("memory"), _("about {size}", size=size)),
        summary_line(
            _("time"),
            _("about {time} on {device}, from measured steps{hint}", time=duration, device=config.device, hint=hint),
        ),
    ]
    return "\n".join(map(str, lines))


def _tokenizer_line(setup: TrainSetup) -> str:
    tokens = setup.task_data.num_tokens
    return summary_line(
        _("tokenizer"),
        _(
            "{num_tokenizer:,} pieces ({tokenizer}), {tokens:,} tokens to learn from",
            num_tokenizer=len(setup.task_data.tokenizer),
            tokenizer=setup.config.tokenizer,
            tokens=tokens,
        ),
    )


def format_notes(setup: TrainSetup) -> list[str]:
    """Notes on the data and the plan."""
    return [summary_line(_("note"), str(note)) for note in (*setup.task_data.notes, *setup.notes)]


def _format_evaluation(setup: TrainSetup) -> str:
    """The evaluation interval and the number of validation examples."""
    plan = setup.eval_plan
    every = _("at the end") if plan.every >= setup.config.max_steps else _("every {every:,} steps", every=plan.every)
    rows = _("{rows:,} of {available:,} validation rows", rows=plan.num_examples, available=plan.num_available)
    if plan.num_examples == plan.num_available:
        rows = _("all {rows:,} validation rows", rows=plan.num_examples)
    final = ""
    if plan.num_final_examples > plan.num_examples:
        more = f"{plan.num_final_examples:,}"
        final = _("; the best model on {more} at the end", more=more)
    return _("{every}, {rows}", every=every, rows=rows) + final


def _format_model(setup: TrainSetup) -> str:
    config = setup.config
    size = sum(p.numel() for p in setup.model.parameters())
    if described := setup.task_data.task.describe_model(setup.model):
        return _("{described}: {size:,} weights", described=described, size=size)
    names = {"encoder": _("encoder"), "decoder": _("decoder"), "text": _("text tower"), "image": _("image tower")}
    stacks = [words for name, words in names.items() if getattr(setup.model, name, None) is not None]
    layers = _("1 layer") if config.layers == 1 else _("{layers} layers", layers=config.layers)
    each = _(" each") if len(stacks) > 1 else ""
    learned = sum(p.numel() for p in trained_parameters(setup.model).values())
    if is_tuned(config):
        quantized = quantized_layers(setup.model)
        paths = [name.removesuffix(".blocks") for name in quantized_blocks(quantized)]  # tied layers are there once
        size += sum(quantized[path].rows * quantized[path].columns for path in paths)
        return _(
            "{init_from}, {tune}: {learned:,} weights learn, {share:.2%} of {size:,}",
            init_from=config.init_from,
            tune=config.tune,
            learned=learned,
            share=learned / size,
            size=size,
        )
    return _(
        "{stacks}, {layers}{each}, d_model {d_model}, {heads} heads: {size:,} weights",
        stacks=join(_(" and "), stacks),
        layers=layers,
        each=each,
        d_model=config.d_model,
        heads=config.heads,
        size=size,
    )


def estimate_memory(model: Transformer, config: TrainConfig, vocab_size: int) -> int:
    """Estimated bytes: weights, gradients and two moments in fp32, frozen weights, activations of one micro-batch."""
    weights = sum(p.numel() for p in trained_parameters(model).values())
    frozen = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) - 4 * weights
    tokens = config.micro_batch_tokens or config.batch_tokens
    layers = config.layers * (2 if model.encoder is not None and model.decoder is not None else 1)
    activations = tokens * layers * (10 * config.d_model + 2 * config.d_ff) * 4
    scores = 2 * min(tokens, 512) * vocab_size * 4
    if config.gradient_checkpointing:
        activations //= 6
    return 16 * weights + 4 * weights * bool(config.ema) + frozen + activations + scores
