"""headwater train FILE …: look at the files, say what will be done, train; --resume goes on where a run stopped."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli import kernels
from headwater.cli.language import say
from headwater.cli.parser import Parser
from headwater.cli.terminal import harmless
from headwater.errors import BadFile, BadSetting, NotFound

if TYPE_CHECKING:
    from headwater.training.teaching import Lesson

HEADINGS = {
    "data": ("the data", "数据"),
    "model": ("the model", "模型"),
    "optimiser": ("how it learns", "优化"),
    "loop": ("how long and how", "训练过程"),
    "evaluation": ("measuring", "评估"),
    "keeping": ("keeping", "保存"),
}


def arguments(parser: Parser) -> None:
    from headwater.training.settings import LEAVES, SAME, Time, YesNoAuto

    given = {int: "N", float: "X", Time: "TIME", list[str]: "FILE", dict[str, str]: "A=B", str: "NAME"}
    given[YesNoAuto] = "yes|no|auto"
    parser.add_argument(
        "files",
        nargs="*",
        help=say(
            "TSV, CSV, JSONL, text, CoNLL, SQuAD, or train.en train.de",
            "TSV、CSV、JSONL、纯文本、CoNLL、SQuAD，或 train.en train.de 这样的平行文件",
        ),
    )
    parser.add_argument("--resume", metavar="RUN", help=say("go on with this run", "从这个训练目录停下处接着训练"))
    parser.add_argument("--config", "-c", metavar="YAML", help=say("settings from a file", "从 YAML 文件读取设置"))
    parser.add_argument(
        "--recipe", metavar="NAME", help=say("settings known to work: see the docs", "已知可行的设置，见文档")
    )
    processes = say("train with so many processes", "用多少个进程训练")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help=processes)
    parser.add_argument(
        "--dry-run", action="store_true", help=say("say what would be done, and stop", "只说明将做什么，然后停止")
    )
    parser.add_argument("--quiet", action="store_true", help=say("no progress", "不显示进度"))
    groups = {name: parser.add_argument_group(say(*words)) for name, words in HEADINGS.items()}
    for name, leaf in LEAVES.items():
        if name != "paths":
            flags = [*(["--from"] if name == "start" else []), f"--{name.replace('_', '-')}"]
            usual = "" if leaf.default in ("", [], {}) or leaf.kind is bool else f" [{leaf.default}]"
            words = say(*leaf.words).replace("%", "%%") + usual
            if leaf.kind is bool:
                parser.add_switch(groups[leaf.section], flags[0], name, words)
                continue
            more: dict[str, Any] = {"nargs": "+"} if leaf.kind == list[str] else {}
            more |= {"metavar": given[leaf.kind], "help": words}
            groups[leaf.section].add_argument(*flags, dest=name, default=None, **more)
    for alias, name in SAME.items():
        if name == "start":
            continue
        more = {"nargs": "+"} if LEAVES[name].kind == list[str] else {}
        flags = [f"--{alias.replace('_', '-')}", *(["-o"] if alias == "output" else [])]
        parser.add_argument(*flags, dest=name, default=None, help=argparse.SUPPRESS, **more)


def run(args: argparse.Namespace) -> int:
    """Train, and show how far the reading of large files is."""
    if args.quiet or os.environ.get("RANK", "0") != "0":
        return _run(args)
    from headwater.data.reading.progress import ReadingProgress, reporting

    with reporting(ReadingProgress(say)):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from headwater.training.settings import LEAVES

    started = time.monotonic()
    given = {n: getattr(args, n) for n in LEAVES if n != "paths" and getattr(args, n) is not None}
    if args.processes != 1 and "RANK" not in os.environ:
        from headwater.training.launch import launch

        return launch(args.processes)
    from headwater.training.progress import Show
    from headwater.training.teaching import resume, train

    listeners = [] if args.quiet or os.environ.get("RANK", "0") != "0" else [Show(say=say)]
    tell = _announcer(args.dry_run, bool(listeners))
    try:
        if args.resume:
            if args.files or args.config or args.recipe:
                raise BadSetting(
                    "--resume needs only the run: its files and settings are in its folder; leave the rest out"
                )
            trained = resume(args.resume, quiet=True, listeners=listeners, say=tell, started=started, **given)
        else:
            files = {"paths": args.files} if args.files else {}
            config = {**_recipe(args.recipe), **_config(args.config), **files, **given}
            trained = train(quiet=True, listeners=listeners, say=tell, started=started, config=config)
    except DryRun:
        return 0
    return 0 if trained.folder == Path() else after(trained)


class DryRun(Exception):
    """Everything has been said."""


def _announcer(dry: bool, shown: bool) -> Any:
    """shown: what is to be noted is said when training begins, so it is not said here too."""
    from headwater.training.report import announced, noted

    def tell(lesson: Lesson) -> None:
        kernels.note_missing()  # some steps have been measured, so it is known whether they were compiled
        lines = [announced(lesson, say), *([] if shown and not dry else noted(lesson, say))]
        print(harmless("\n".join(lines)), flush=True)  # labels and columns are named as the file names them
        if dry:
            raise DryRun

    return tell


def _config(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml

    if not Path(path).is_file():
        raise NotFound(f"--config must be a YAML file, {path} is not there; the config.yaml of any run is one")
    try:
        said = yaml.safe_load(Path(path).read_bytes())
    except (yaml.YAMLError, RecursionError) as error:
        raise BadFile(f"{path} is not YAML ({' '.join(str(error).split())[:60]}); mend it") from None
    if not isinstance(said, dict):
        raise BadFile(f"{path} must hold settings (name: value); the config.yaml of any run shows how")
    said.get("keeping", {}).pop("out", None)  # the same run anew, in a folder of its own
    return said


def _recipe(name: str | None) -> dict[str, Any]:
    from headwater.training.recipes import recipe

    return recipe(name) if name else {}


WHY = {
    "finished": ("done", "训练完成"),
    "no better": ("stopped: no better for a while", "已停止：一段时间没有变好"),
    "time": ("stopped: the time is over", "已停止：时间到"),
    "signal": ("stopped, nothing is lost", "已停止，没有丢失任何东西"),
}
VERBS = {
    "text-to-text": 'headwater translate {run} "…"',
    "language-model": 'headwater generate {run} "…"',
    "pre-training": "headwater train FILE --from {run}",
    "classification": 'headwater classify {run} "…"',
    "tagging": 'headwater tag {run} "…"',
    "answers": 'headwater answer {run} "question" --text FILE',
}


def _near(folder: Path) -> Path:
    """As it is named from here, if it is below."""
    with suppress(ValueError, OSError):
        return folder.relative_to(Path.cwd())
    return folder


def after(trained: Any) -> int:
    """What became of it, and what to do next."""
    outcome, folder = trained.outcome, _near(trained.folder)
    done, best = outcome.progress.step, outcome.progress.best_step
    where = say(f": step {done}, best at step {best}", f"：第 {done} 步，最好的在第 {best} 步")
    print(f"\n{say(*WHY[outcome.why])}{where}")
    going_on = trained.about.get("objective") in ("", "causal", "packed")
    lines = {
        ("use it", "使用"): VERBS[trained.task if going_on else "pre-training"].format(run=folder),
        ("measure", "评估"): f"headwater eval {folder} FILE",
        ("look", "查看"): f"{folder / 'plots' / 'loss.png'}, {folder / 'metrics.jsonl'}",
    }
    if outcome.why in ("signal", "time"):
        longer = " --max-time …" if outcome.why == "time" else ""
        lines = {("go on", "继续"): f"headwater train --resume {folder}{longer}", **lines}
    for name, what in lines.items():
        print(f"  {say(*name):<10} {what}")
    return 130 if outcome.why == "signal" else 0
