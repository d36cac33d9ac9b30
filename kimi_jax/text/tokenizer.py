"""Text to token ids and back, from a checkpoint's `tiktoken.model` and `tokenizer_config.json`.

Byte-level BPE: text is split by `SPLIT_PATTERN`, bytes inside a piece are merged by rank. Ids are
the ranks 0..n-1, then 256 slots for control tokens. How many ranks there are differs between
checkpoints, so control tokens are found by name. It knows nothing of chats.
"""

import base64
import binascii
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tiktoken

NUM_SPECIAL_SLOTS = 256

_CASED = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_UPPER = rf"[\p{{Lu}}\p{{Lt}}{_CASED}]"
_LOWER = rf"[\p{{Ll}}{_CASED}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

# The intersection `&&[^\p{Han}]` keeps a word from swallowing Han characters that follow it. Rust's
# regex (tiktoken), Oniguruma (Hugging Face tokenizers) and `regex` with V1 read this as it stands.
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# Longest text, and longest run of only spaces or only non-spaces, given to the merger at once.
MAX_CHARS = 400_000
MAX_RUN_CHARS = 25_000

# Control tokens of Kimi-K2.5 by slot; the slots between them are reserved.
_PUBLISHED_SLOTS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
_TURN_ENDS = ("[EOS]", "<|im_end|>")


class TokenizerError(ValueError):
    """Tokenizer files that cannot be used, or a token that does not exist."""


class Tokenizer:
    """Encodes and decodes with one checkpoint's vocabulary.

    Ordinary text never becomes a control token: `encode` has no way to produce one. Control tokens
    are the 256 ids from `num_ranks` on; those without a name in `tokenizer_config.json` are called
    `<|reserved_token_{id}|>`.
    """

    def __init__(self, ranks: Mapping[bytes, int], config: Mapping[str, Any] | None = None):
        """Takes parsed files; without a config the control tokens are those of Kimi-K2.5."""
        _check_ranks(ranks)
        if config is None:
            config = published_tokenizer_config(len(ranks))
        self.num_ranks = len(ranks)
        self.vocab_size = self.num_ranks + NUM_SPECIAL_SLOTS
        names = _slot_names(config, self.num_ranks)
        self.special_tokens: Mapping[str, int] = MappingProxyType(
            {name: self.num_ranks + slot for slot, name in enumerate(names)}
        )
        self.bos_token = self._named(config, "bos_token")
        self.eos_token = self._named(config, "eos_token")
        self.pad_token = self._named(config, "pad_token")
        ends = {*_TURN_ENDS, self.eos_token} & self.special_tokens.keys()
        self.eos_ids = tuple(sorted(self.special_tokens[name] for name in ends))
        by_rank = {rank: token for token, rank in ranks.items()}
        self._bytes = [by_rank[rank] for rank in range(self.num_ranks)]
        self._bytes += [name.encode() for name in names]
        self._encoding = tiktoken.Encoding(
            "kimi_jax", pat_str=SPLIT_PATTERN, mergeable_ranks=dict(ranks), special_tokens={}
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads `tiktoken.model` and `tokenizer_config.json` of a checkpoint folder.

        Raises:
            TokenizerError: names the file, the line where there is one, and what is wrong.
        """
        ranks = read_tiktoken_model(Path(folder) / "tiktoken.model")
        path = Path(folder) / "tokenizer_config.json"
        try:
            config = json.loads(_read_text(path))
        except json.JSONDecodeError as error:
            raise TokenizerError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
        if not isinstance(config, dict):
            raise TokenizerError(f"{path}: expected a JSON object, found {type(config).__name__}")
        try:
            return cls(ranks, config)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary tokens; a control token's literal is encoded like any other text."""
        ids: list[int] = []
        for piece in _pieces(replace_surrogates(text)):
            ids += self._encoding.encode_ordinary(piece)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become replacement characters.

        A control token ends a character even when it is skipped.
        """
        runs = [bytearray()]
        for token_id in ids:
            token = self.token_bytes(token_id)
            if skip_special and self.is_special(token_id):
                runs.append(bytearray())
            else:
                runs[-1] += token
        return "".join(run.decode(errors="replace") for run in runs)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a control token's are its name."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is not in 0..{self.vocab_size - 1}")
        return self._bytes[token_id]

    def special_id(self, name: str) -> int:
        """The id of the control token called `name`."""
        try:
            return self.special_tokens[name]
        except KeyError:
            near = difflib.get_close_matches(name, self.special_tokens, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TokenizerError(f"this tokenizer has no control token {name!r}{hint}") from None

    def is_special(self, token_id: int) -> bool:
        """Whether the id is one of the 256 control slots."""
        return self.num_ranks <= token_id < self.vocab_size

    def _named(self, config: Mapping[str, Any], key: str) -> str | None:
        value = config.get(key)
        name = value.get("content") if isinstance(value, Mapping) else value
        if name is not None and not (isinstance(name, str) and name in self.special_tokens):
            raise TokenizerError(f"{key} is {name!r}, which is no token of added_tokens_decoder")
        return name


def published_tokenizer_config(num_ranks: int) -> dict[str, Any]:
    """`tokenizer_config.json` with Kimi-K2.5's control tokens after `num_ranks` ranks."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "added_tokens_decoder": {
            str(num_ranks + slot): {"content": name, **flags, "special": True}
            for slot, name in _PUBLISHED_SLOTS.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "TikTokenTokenizer",
    }


def read_tiktoken_model(path: str | Path) -> dict[bytes, int]:
    """Ranks by token of a `tiktoken.model` file: a base64 token and its rank on each line.

    Raises:
        TokenizerError: a line that is not that, a token or rank given twice, a rank left out.
    """
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}
    for number, line in enumerate(_read_text(Path(path)).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            encoded, digits = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except (ValueError, binascii.Error):
            shown = repr(line if len(line) <= 40 else line[:40] + "...")
            raise TokenizerError(
                f"{where}: expected a base64 token and a rank, found {shown}"
            ) from None
        if rank in lines:
            raise TokenizerError(f"{where}: rank {rank} is already on line {lines[rank]}")
        if token in ranks:
            raise TokenizerError(
                f"{where}: token {token!r} is already on line {lines[ranks[token]]}"
            )
        ranks[token], lines[rank] = rank, number
    try:
        _check_ranks(ranks)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    return ranks


def write_tiktoken_model(path: str | Path, ranks: Mapping[bytes, int]) -> None:
    """Writes `ranks` as a `tiktoken.model` file, in order of rank."""
    _check_ranks(ranks)
    rows = sorted((rank, base64.b64encode(token).decode()) for token, rank in ranks.items())
    text = "".join(f"{token} {rank}\n" for rank, token in rows)
    Path(path).write_text(text, encoding="ascii", newline="\n")


def replace_surrogates(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates, which no UTF-8 has, replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TokenizerError(f"{path}: no such file; a checkpoint folder holds one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: not readable as text ({error})") from None


def _check_ranks(ranks: Mapping[bytes, int]) -> None:
    given = set(ranks.values())
    if len(given) != len(ranks):
        raise TokenizerError("a rank is given to two tokens")
    missing = next((rank for rank in range(len(ranks)) if rank not in given), None)
    if missing is not None:
        raise TokenizerError(
            f"rank {missing} is missing; {len(ranks)} tokens need 0..{len(ranks) - 1}"
        )
    if b"" in ranks:
        raise TokenizerError(f"the token of rank {ranks[b'']} is empty")
    byte = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if byte is not None:
        raise TokenizerError(
            f"no token for the single byte 0x{byte:02x}; all 256 are needed to encode any text"
        )


def _slot_names(config: Mapping[str, Any], num_ranks: int) -> list[str]:
    """Names of the control slots in order, from `added_tokens_decoder`."""
    last = num_ranks + NUM_SPECIAL_SLOTS - 1
    added = config.get("added_tokens_decoder")
    if not isinstance(added, Mapping):
        raise TokenizerError("added_tokens_decoder is missing; it maps ids to control tokens")
    names = [f"<|reserved_token_{token_id}|>" for token_id in range(num_ranks, last + 1)]
    for key, entry in added.items():
        where = f"added_tokens_decoder[{key!r}]"
        content = entry.get("content") if isinstance(entry, Mapping) else entry
        # One character could not be told from text, and nothing from an end of text.
        if not isinstance(content, str) or len(content) < 2:
            raise TokenizerError(
                f"{where}: content is {content!r}, expected a token of two or more characters"
            )
        if not str(key).isdecimal() or not num_ranks <= int(key) <= last:
            raise TokenizerError(
                f"{where}: {content!r} must have an id in {num_ranks}..{last}, "
                f"the {NUM_SPECIAL_SLOTS} slots after the {num_ranks} ranks"
            )
        names[int(key) - num_ranks] = content
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TokenizerError(f"added_tokens_decoder: {twice!r} has two ids")
    return names


def _pieces(text: str) -> Iterator[str]:
    """Cuts text too long for the merger, at the places the published tokenizer cuts."""
    for start in range(0, len(text), MAX_CHARS):
        part = text[start : start + MAX_CHARS]
        cut = 0
        if len(part) > MAX_RUN_CHARS:
            for run in re.finditer(r"\s+|\S+", part):
                for end in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                    yield part[cut:end]
                    cut = end
        yield part[cut:]
