"""fairseq's tokenizers: a dictionary for each language, and byte-pair codes that both may share.

    dict.xx.txt     a piece and its count a line; pieces that go on end in @@; ids follow <s> <pad> </s> <unk>
    bpe codes       two pieces a line, best first; the last piece of a word ends in </w>

Words are what stands between spaces. A piece that merging may leave behind but the dictionary lacks means <unk>.
"""

from __future__ import annotations

from headwater.errors import BadFile
from headwater.text.components import Spec, added, bpe, template, whole
from headwater.weights.files import shown

FIRST = ("<s>", "<pad>", "</s>", "<unk>")
ROLES = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
END, GOES_ON = "</w>", "@@"


def dictionary(text: str, where: object) -> dict[str, int]:
    """Pieces and their ids; `wor@@` is kept as `wor`, `word` as `word</w>`."""
    vocab = {token: number for number, token in enumerate(FIRST)}
    for line in filter(None, text.split("\n")):
        piece, _, count = line.rstrip("\r").removesuffix(" #fairseq:overwrite").rpartition(" ")
        spelt = piece.removesuffix(GOES_ON) if piece.endswith(GOES_ON) else piece + END
        if not piece or not count.isdecimal() or spelt in vocab:
            raise BadFile(f"{where}: each line must be a new piece and its count, got {shown(line)}")
        vocab[spelt] = len(vocab)
    return vocab


def codes(text: str, where: object) -> list[list[str]]:
    """The merges of subword-nmt, version 0.2 (the last piece of a word is marked from the start)."""
    lines = [line.rstrip("\r").split(" ") for line in text.split("\n") if line.strip("\r ")]
    version = lines.pop(0) if lines and lines[0][0] == "#version:" else []
    if version[1:] != ["0.2"] or any(len(line) != 2 for line in lines):
        raise BadFile(f"{where}: must be byte-pair codes of version 0.2: two pieces a line; it is something else")
    return lines


def strays(vocab: dict[str, int], merges: list[list[str]]) -> list[str]:
    """Pieces the merges pass through on the way to pieces of the dictionary, which it lacks itself."""
    found: dict[str, None] = {}
    wanted = set(vocab)
    for first, second in reversed(merges):  # a product comes after its parts
        if first + second in wanted:
            for piece in (first, second):
                if piece not in wanted:
                    wanted.add(piece)
                    found[piece] = None
    return list(found)


def fairseq(vocab: dict[str, int], merges: list[list[str]]) -> Spec:
    """Text </s>. Merges that lead to no piece of the vocabulary are left out."""
    kept = [pair for pair in merges if {*pair, "".join(pair)} <= vocab.keys()]
    return whole(
        bpe(vocab, kept, unk_token="<unk>", end_of_word_suffix=END),
        normalizer=[],
        pre_tokenizer=[{"type": "WhitespaceSplit"}],
        decoder=[{"type": "BPEDecoder", "suffix": END}],
        post_processor=template("$A </s>", "$A $B </s>", vocab),
        added=[added(token, vocab[token]) for token in FIRST],
    )
