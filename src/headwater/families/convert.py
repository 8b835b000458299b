"""Convert models between layouts, and legacy checkpoints (pickles, fairseq) to safetensors and tokenizer.json.

    a run, a model folder with safetensors, or a .gguf file        the requested layout (load.py)
    a folder with config.json and pytorch_model.bin (or shards)    a Hugging Face folder with safetensors
    fairseq's checkpoint.pt with dict.*.txt and BPE codes          a folder of the family `fairseq`

The new folder is built in a temporary one, loaded, compared with the checkpoint tensor by tensor, and then moved.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.errors import BadFile, BadSetting, NotFound, nearest
from headwater.families.bare_vit import is_bare_vit, write_vit_folder
from headwater.families.export import FamilyMismatch
from headwater.families.fairseq import fairseq_args_to_config
from headwater.families.hf_folder import LoadedModel, ModelWeights, load_hf_folder, read_model_plan, transform_sizes
from headwater.families.hub import HUB, find_installed
from headwater.families.load import find_model, load, save_with_result
from headwater.families.registry import find_family
from headwater.families.tuned_folder import ADAPTER_NAME
from headwater.families.whisper_formats import is_ctranslate2, openai_configs, openai_to_hf
from headwater.i18n import _
from headwater.io.files import atomic_write, read_limited
from headwater.text.load import load_tokenizer
from headwater.text.loaders import marian
from headwater.text.loaders.vocab import BERT_TOKENS, wordpiece_spec
from headwater.text.tokenizer import PairTokenizer, Tokenizer
from headwater.weights.ggml import is_ggml
from headwater.weights.hf_config import MAX_CONFIG_BYTES
from headwater.weights.name_map import format_names
from headwater.weights.pickles import PickleContents, read_pickles
from headwater.weights.shards import WEIGHTS_INDEX_NAME, WEIGHTS_NAME, save_weights


@dataclass(frozen=True)
class ConversionResult:
    """The result of a conversion: folder, model, dropped tensors, a note where there is no tokenizer, rewrites."""

    folder: Path
    loaded: LoadedModel
    num_tensors: int
    dropped: list[str] = field(default_factory=list)
    tokenizer_note: str = ""
    rewrites: tuple[str, ...] = ()
    mismatch: FamilyMismatch | None = None


def convert(
    input_path: str | Path,
    output_path: str | Path,
    *,
    vocabulary: str | Path | None = None,
    drop: Iterable[str] = (),
    force: bool = False,
    layout: str = "auto",
) -> ConversionResult:
    """Convert a model (a run, a folder, a file or an installed model's name) to a new folder or .gguf file.

    vocabulary  the folder with the tokenizer's files, if it is not that of the weights
    drop        patterns of tensor names to leave out, such as custom heads that no family has
    layout      as in save(); a legacy checkpoint always becomes the family of its config.json
    """
    output_path = Path(output_path)
    if output_path.exists() and (not output_path.is_dir() or any(output_path.iterdir())) and not force:
        raise BadFile(
            _(
                "{path}: it must be a new or empty folder, it exists already; choose another, or add --force",
                path=output_path,
            )
        )
    source = Path(input_path)
    if not source.exists() and str(input_path) in HUB:
        source = find_installed(str(input_path))

    if source.exists() and (loadable := find_model(source)) and _is_loadable(loadable):
        if drop or vocabulary:
            raise BadSetting(
                _("--drop and --vocabulary are for old checkpoints, {source} is not one; leave them out", source=source)
            )
        return _convert_model(loadable, output_path, layout)
    if layout != "auto":
        raise BadSetting(
            _("--layout is for models that load, {source} is an old checkpoint; convert it first", source=source)
        )

    # A legacy checkpoint.
    folder, pickles = _find_checkpoint(source)
    is_hf = (folder / "config.json").is_file()
    if is_hf:
        read_model_plan(folder)  # errors in config.json come before the pickles are read
    output_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_path.parent, prefix=f".{output_path.name}-") as temp_dir:
        output_dir = Path(temp_dir) / "converted"
        work_dir = Path(temp_dir) / "pickles"
        output_dir.mkdir()
        work_dir.mkdir()
        contents = read_pickles(pickles, work_dir)
        kept, dropped = _drop_tensors(contents.tensors, list(drop), source)
        contents = PickleContents(kept, contents.training_args)
        write_folder = _folder_writer(is_hf, contents)
        written, tokenizer_note = write_folder(folder, contents, output_dir, Path(vocabulary or folder))
        _check_converted(output_dir, written, source)
        _move_into_place(output_dir, output_path)
    return ConversionResult(output_path, load_hf_folder(output_path), len(kept), dropped, tokenizer_note)


def _is_loadable(path: Path) -> bool:
    """Whether load() can open a model without conversion: safetensors, adapters, GGUF, CTranslate2 and ggml."""
    if path.suffix == ".gguf" or is_ctranslate2(path) or is_ggml(path):
        return True
    return any((path / name).is_file() for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME, ADAPTER_NAME))


def _convert_model(source: Path, output_path: Path, layout: str) -> ConversionResult:
    output_path.parent.mkdir(parents=True, exist_ok=True)
    loaded = load(source)
    with tempfile.TemporaryDirectory(dir=output_path.parent, prefix=f".{output_path.name}-") as temp_dir:
        saved = save_with_result(loaded, Path(temp_dir) / output_path.name, layout)
        if saved.path.is_dir():
            _move_into_place(saved.path, output_path)
        else:
            os.replace(saved.path, output_path)
    num_tensors = len(ModelWeights(saved.model.model))
    return ConversionResult(output_path, saved.model, num_tensors, rewrites=saved.rewrites, mismatch=saved.mismatch)


# -------------------------------------------------------------------------------------------------- reading checkpoints


def _find_checkpoint(source: Path) -> tuple[Path, Path]:
    """The folder of a checkpoint, and the file (or folder) with its pickles."""
    if not source.exists():
        raise NotFound(
            _(
                "{source} does not exist; name a folder, a .pt or .bin file, or one of {known}",
                source=source,
                known=", ".join(HUB),
            )
        )
    if source.is_file():
        return source.parent, source
    if (source / "config.json").is_file():
        return source, source
    for pattern in ("checkpoint_best.pt", "checkpoints/checkpoint_best.pt", "*.pt", "checkpoints/*.pt"):
        if files := sorted(source.glob(pattern)):
            return source, files[0]
    raise NotFound(
        _(
            "{source} must hold a config.json with a pickle, or a checkpoint of fairseq (*.pt); it holds neither",
            source=source,
        )
    )


def _drop_tensors(
    tensors: Mapping[str, Tensor], patterns: list[str], where: object
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors without those that match a pattern, and the names of these."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in tensors):
            raise BadSetting(
                _(
                    "{where}: no tensor matches --drop {pattern!r}; {nearest}",
                    where=where,
                    pattern=pattern,
                    nearest=nearest(pattern, tensors),
                )
            )
    dropped = [name for name in tensors if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return {name: tensor for name, tensor in tensors.items() if name not in set(dropped)}, dropped


# ------------------------------------------------------------------------------------------------------ writing folders


def _write_hf_folder(
    folder: Path, contents: PickleContents, output_dir: Path, vocabulary: Path
) -> tuple[dict[str, Tensor], str]:
    """A Hugging Face folder with safetensors; returns its tensors and a note on the tokenizer."""
    family = read_model_plan(folder).family
    name_maps = [family.body_names, *family.head_names.values()]
    unknown = [name for name in contents.tensors if not any(names.match_checkpoint(name) for names in name_maps)]
    if unknown:
        parts = sorted({name.rpartition(".")[0] + ".*" for name in unknown})
        raise BadFile(
            _(
                "{folder}: {num_unknown} tensors belong to no part of {family}: {unknown}; to leave them out: {flags}",
                folder=folder,
                num_unknown=len(unknown),
                family=family.name,
                unknown=format_names(unknown),
                flags=" ".join(_("--drop {part!r}", part=part) for part in parts[:6]),
            )
        )
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            _write_file(output_dir / name, read_limited(folder / name, MAX_CONFIG_BYTES))
    save_weights(output_dir, contents.tensors)
    return contents.tensors, convert_hf_tokenizer(vocabulary, output_dir)


def _write_fairseq_folder(
    folder: Path, contents: PickleContents, output_dir: Path, vocabulary: Path
) -> tuple[dict[str, Tensor], str]:
    """A folder of the family `fairseq`, its config.json from the checkpoint's arguments; returns its tensors."""
    if "arch" not in contents.training_args or "encoder.embed_tokens.weight" not in contents.tensors:
        raise BadFile(
            _("{folder} must hold a config.json, or a translator trained by fairseq; it holds neither", folder=folder)
        )
    config = fairseq_args_to_config(contents.training_args, folder)
    tensors = dict(contents.tensors)
    source_table = tensors["encoder.embed_tokens.weight"]
    target_table = tensors["decoder.embed_tokens.weight"]
    num_missing = convert_fairseq_tokenizer(
        vocabulary, output_dir, len(source_table), len(target_table), contents.training_args
    )
    if num_missing:  # pieces that the dictionary lacks are <unk> (id 3) in fairseq: they get rows equal to that one
        source_table = torch.cat([source_table, source_table[3:4].expand(num_missing, -1)])
        tensors["encoder.embed_tokens.weight"] = source_table
    config |= {"source_vocab_size": len(source_table), "target_vocab_size": len(target_table)}
    _write_file(output_dir / "config.json", json.dumps(config, indent=2).encode())
    save_weights(output_dir, tensors)
    return tensors, ""


def _folder_writer(is_hf: bool, contents: PickleContents) -> Callable[..., tuple[dict[str, Tensor], str]]:
    """The function that writes the folder of a checkpoint."""
    if is_hf:
        return _write_hf_folder
    if is_bare_vit(contents.tensors):
        return write_vit_folder
    is_whisper = "n_audio_head" in contents.training_args and "decoder.token_embedding.weight" in contents.tensors
    return _write_whisper_folder if is_whisper else _write_fairseq_folder


def _write_whisper_folder(
    folder: Path, contents: PickleContents, output_dir: Path, vocabulary: Path
) -> tuple[dict[str, Tensor], str]:
    """The Hugging Face folder of an OpenAI checkpoint of Whisper; returns its tensors and a note on the tokenizer."""
    tensors = {openai_to_hf(name): tensor for name, tensor in contents.tensors.items()}
    for name, values in openai_configs(tensors, contents.training_args, folder).items():
        _write_file(output_dir / name, json.dumps(values, indent=2).encode())
    save_weights(output_dir, tensors)
    return tensors, convert_hf_tokenizer(vocabulary, output_dir)


def _write_file(path: Path, content: bytes) -> None:
    with atomic_write(path) as file:
        file.write(content)


# ------------------------------------------------------------------------------------------------------------- checking


def _check_converted(output_dir: Path, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Load the converted folder: the model must have the tensors of the checkpoint, bit for bit."""
    loaded = load_hf_folder(output_dir)
    family = find_family(loaded.config["model_type"])
    names = family.body_names + family.head_names[loaded.head]
    state_dict = loaded.model.state_dict()
    sizes = transform_sizes(loaded.spec)
    for checkpoint_name, tensor in tensors.items():
        match = names.match_checkpoint(checkpoint_name)
        params = match.param_names() if match else []
        if match is None or not params:
            continue
        pieces = match.rule.transforms.forward(tensor.float(), len(params), sizes) or []
        for param, piece in zip(params, pieces, strict=True):
            if not torch.equal(state_dict[param], piece):
                raise BadFile(
                    _(
                        "{source}: {tensor} changed when it was written and read back; not converted",
                        source=source,
                        tensor=checkpoint_name,
                    )
                )


def _move_into_place(temp_dir: Path, output_path: Path) -> None:
    """Move the files, the weights last. Other files of an existing folder stay, except weights that are now stale."""
    output_path.mkdir(exist_ok=True)
    files = sorted(temp_dir.iterdir(), key=lambda path: path.name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME))
    for path in files:
        os.replace(path, output_path / path.name)
    for name in {WEIGHTS_NAME, WEIGHTS_INDEX_NAME} - {path.name for path in files}:
        (output_path / name).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------- tokenizers of legacy checkpoints

MAX_VOCAB_BYTES = 64 << 20
MIN_RECOVERED_FRACTION = 0.9  # of the pieces of a vocabulary; BERT's [unused17] and the like never encode to themselves


def convert_hf_tokenizer(folder: Path, output_dir: Path) -> str:
    """Save the tokenizer of a Hugging Face folder; returns a note where it has none, or none that works."""
    try:
        tokenizer = load_tokenizer(folder)
    except NotFound:
        return _("no tokenizer was found; name its folder with --vocabulary")
    if (folder / "vocab.txt").exists() and not (folder / "tokenizer.json").exists():
        tokenizer = max((tokenizer, _cased_wordpiece(folder)), key=recovered_fraction)
        if recovered_fraction(tokenizer) < MIN_RECOVERED_FRACTION:
            return _("vocab.txt is not a WordPiece vocabulary (most pieces never match), so no tokenizer was written")
    tokenizer.save(output_dir)
    return ""


def _cased_wordpiece(folder: Path) -> Tokenizer:
    text = read_limited(folder / "vocab.txt", MAX_VOCAB_BYTES).decode()
    return Tokenizer(wordpiece_spec(text, BERT_TOKENS, {"do_lower_case": False}, folder), BERT_TOKENS, where=folder)


def recovered_fraction(tokenizer: Tokenizer) -> float:
    """The fraction of word-initial pieces that the tokenizer encodes to themselves."""
    special = set(tokenizer.special_tokens_map.values())
    words = [piece for piece in tokenizer.backend.get_vocab() if not piece.startswith("##") and piece not in special]
    encoded = tokenizer.encode_batch(words, add_special_tokens=False)
    recovered = sum(ids == [tokenizer.token_to_id(word)] for word, ids in zip(words, encoded, strict=True))
    return recovered / max(len(words), 1)


def convert_fairseq_tokenizer(
    folder: Path, output_dir: Path, source_size: int, target_size: int, training_args: dict[str, Any]
) -> int:
    """Save the pair of tokenizers; returns the number of pieces to add to the source dictionary and its embedding."""
    candidates = (folder, folder / "data", folder.parent / "data")
    data_dir = next((path for path in candidates if any(path.glob("dict.*.txt"))), None)
    if data_dir is None:
        raise NotFound(
            _(
                "{folder}: fairseq's dict.*.txt must be in it or in data/; name their folder with --vocabulary",
                folder=folder,
            )
        )
    source_vocab, target_vocab = _read_dictionaries(data_dir, source_size, target_size, training_args)
    merges = _read_merges(data_dir)
    missing = marian.missing_pieces(source_vocab, merges)
    for piece in missing:
        source_vocab[piece] = len(source_vocab)
    source = Tokenizer(marian.fairseq_spec(source_vocab, merges), marian.FAIRSEQ_SPECIAL_TOKENS)
    target = Tokenizer(marian.fairseq_spec(target_vocab, merges), marian.FAIRSEQ_SPECIAL_TOKENS)
    PairTokenizer(source, target).save(output_dir)
    return len(missing)


def _read_dictionaries(
    data_dir: Path, source_size: int, target_size: int, training_args: dict[str, Any]
) -> tuple[dict[str, int], dict[str, int]]:
    """The source and the target dictionary: by the languages in the arguments, else by the sizes of the tables."""
    dictionaries = {
        path.name.split(".")[1]: marian.parse_dictionary(_read_text(path), path)
        for path in sorted(data_dir.glob("dict.*.txt"))
    }

    def choose(language_key: str, size: int) -> dict[str, int]:
        named = dictionaries.get(str(training_args.get(language_key)))
        if named:
            return named
        of_size = [vocab for vocab in dictionaries.values() if len(vocab) == size]
        return of_size[0] if len(of_size) == 1 else {}

    source = choose("source_lang", source_size)
    target = choose("target_lang", target_size)
    if [len(source), len(target)] != [source_size, target_size]:
        sizes = ", ".join(f"{name} {len(vocab)}" for name, vocab in dictionaries.items())
        raise BadFile(
            _(
                "{folder}: there must be dictionaries of {source_size} and {target_size} pieces, found: {sizes}",
                folder=data_dir,
                source_size=source_size,
                target_size=target_size,
                sizes=sizes,
            )
        )
    return source, target


def _read_merges(data_dir: Path) -> list[list[str]]:
    files = [path for pattern in ("bpe.code*", "*bpecodes", "code*") for path in sorted(data_dir.glob(pattern))]
    return marian.parse_bpe_codes(_read_text(files[0]), files[0]) if files else []


def _read_text(path: Path) -> str:
    try:
        return read_limited(path, MAX_VOCAB_BYTES).decode()
    except UnicodeDecodeError:
        raise BadFile(_("{path}: not UTF-8 text; the file is damaged or of another kind", path=path)) from None
