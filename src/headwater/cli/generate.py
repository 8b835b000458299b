"""The command headwater generate MODEL "prompt": text generation, of a decoder or an encoder-decoder."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from headwater.cli import inputs, kernels
from headwater.cli.common import add_adapter_argument, gc_paused, load_model
from headwater.cli.parser import add_sampling_arguments, escape_control, sampling_settings
from headwater.errors import BadInput, BadSetting
from headwater.i18n import _

if TYPE_CHECKING:
    from headwater.families.hf_folder import LoadedModel
    from headwater.generation.beam import Beam
    from headwater.generation.speculative import Drafter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = _("a folder, a run, a .gguf file or a known name (headwater models)")
    parser.add_argument("model", metavar="MODEL", help=help_text)
    help_text = _("the prompt, or a file with it; default: read from a pipe")
    parser.add_argument("prompt", nargs="?", help=help_text)
    help_text = _("the prompt is a text, even if it looks like a file name")
    parser.add_argument("--as-text", action="store_true", help=help_text)
    add_adapter_argument(parser)
    add_sampling_arguments(parser)
    help_text = _("beam search with N beams")
    parser.add_argument("--beam", type=int, metavar="N", help=help_text)
    parser.add_argument("--n", type=int, default=1, metavar="N", help=_("number of completions"))
    help_text = _("sample N answers and print the one with the highest --reward; the prompt is a message to the model")
    parser.add_argument("--best-of", type=int, metavar="N", help=help_text)
    help_text = _("of --best-of: file.py:function, a reward model, or CLASSIFIER:LABEL")
    parser.add_argument("--reward", metavar="SOURCE", help=help_text)
    help_text = _("speculative decoding by prompt lookup: faster, the same text")
    parser.add_argument("--prompt-lookup", action="store_true", help=help_text)
    help_text = _("print each token as it is generated (the default on a terminal)")
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=None, help=help_text)
    help_text = _("the distribution at each step, before and after each logits processor")
    parser.add_argument("--trace", action="store_true", help=help_text)
    help_text = _("the completion with ids and log-probabilities as JSON")
    parser.add_argument("--json", action="store_true", help=help_text)


def run(args: argparse.Namespace) -> None:
    prompt = prompt_or_stdin(args.prompt, args.as_text)
    if not prompt:
        raise BadInput(_('generate: the prompt must not be empty, got ""; give a text such as "Once upon a time"'))
    check_best_of(args)
    settings = {**sampling_settings(args), "trace": args.trace}
    strategy = decoding_strategy(args)
    escape: Callable[[str], str] = str if args.raw else escape_control

    with gc_paused():
        from headwater.generation.api import generate, stream
        from headwater.generation.beam import Beam

        loaded = load_model(args)
    kernels.warn_missing()
    if args.best_of is not None:
        print_best_of(args, loaded, prompt, escape)
        return

    # Stream token by token, if only one text is printed.
    can_stream = not (args.json or args.trace or args.n > 1)
    wants_stream = sys.stdout.isatty() if args.stream is None else args.stream
    if can_stream and wants_stream and not isinstance(strategy, Beam):
        for event in stream(loaded, prompt, strategy=strategy, **settings):
            print(escape(event.text), end="", flush=True)
        print()
        return

    completions = generate(loaded, prompt, strategy=strategy, n=args.n, **settings)
    for completion in completions if isinstance(completions, list) else [completions]:
        if args.json:
            print(json.dumps(completion.to_dict(), ensure_ascii=False, allow_nan=False))
            continue
        if args.trace:
            print(escape(completion.explain(loaded.tokenizer)))
        print(escape(completion.text))


def check_best_of(args: argparse.Namespace) -> None:
    """--best-of and --reward belong together, and take no other way of choosing an answer."""
    if (args.best_of is None) != (args.reward is None):
        raise BadSetting(
            _("generate: --best-of and --reward belong together, got one; --best-of 8 --reward rewards.py:function")
        )
    others = {"--beam": args.beam, "--n": args.n > 1, "--prompt-lookup": args.prompt_lookup, "--trace": args.trace}
    if args.best_of is not None and (clashes := [flag for flag, value in others.items() if value]):
        raise BadSetting(
            _("generate: --best-of samples by itself, got {flag} too; leave it out", flag=", ".join(clashes))
        )


def print_best_of(args: argparse.Namespace, loaded: LoadedModel, prompt: str, escape: Callable[[str], str]) -> None:
    """Print the answer with the highest reward, and its reward beside the mean of all on the standard error."""
    from headwater.tasks.best_of_n import best_of_n, best_of_n_kl
    from headwater.tasks.rewards import load_reward

    settings = {name: value for name, value in sampling_settings(args).items() if value is not None}
    best = best_of_n(loaded, [prompt], load_reward(args.reward), args.best_of, **settings)[0]
    if args.json:
        print(json.dumps(best._asdict(), ensure_ascii=False))
        return
    print(escape(best.text))
    known = [reward for reward in best.rewards if reward is not None]
    about = _(
        "reward {reward:.4g}, mean of {n} answers {mean:.4g}, KL at most {kl:.2f} nats",
        reward=best.reward,
        n=len(known),
        mean=sum(known) / max(1, len(known)),
        kl=best_of_n_kl(args.best_of),
    )
    print(about, file=sys.stderr)


def prompt_or_stdin(prompt: str | None, as_text: bool) -> str:
    """The prompt: the argument, the content of the file it names, or the standard input."""
    if prompt is not None:
        return inputs.read_prompt(prompt, as_text)
    if sys.stdin.isatty():
        raise BadInput(_('generate: it needs a prompt, got none; headwater generate MODEL "Once upon a time"'))
    try:
        return sys.stdin.read().replace("\r\n", "\n").rstrip("\n")
    except UnicodeDecodeError as error:
        raise BadInput(
            _("generate: the prompt must be UTF-8, byte {start} of the pipe is not; convert it", start=error.start)
        ) from None


def decoding_strategy(args: argparse.Namespace) -> Beam | Drafter | None:
    """The strategy of generate(): beam search, prompt lookup, or None."""
    if args.beam and args.prompt_lookup:
        raise BadSetting(_("generate: --beam and --prompt-lookup exclude each other, got both; choose one"))
    if args.beam is not None:
        from headwater.generation.beam import Beam

        return Beam(width=args.beam, num_return_sequences=args.n)
    if args.prompt_lookup:
        from headwater.generation.speculative import PromptLookup

        return PromptLookup()
    return None
