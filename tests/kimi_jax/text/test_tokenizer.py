import base64
import json
import random

import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.text import tokenizer as module
from kimi_jax.text.tokenizer import (
    SPLIT_PATTERN,
    Tokenizer,
    TokenizerError,
    published_tokenizer_config,
    read_tiktoken_model,
    write_tiktoken_model,
)

ALPHABET = "aZé漢字カな́ǅ1２ \t\n\r\x1c\x85\u3000.,'sTlL𠮷々〇한ʼ😀-_[]<>|the"


def merged(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Byte-pair merging from its definition: join the adjacent pair of lowest rank, repeat."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        pairs = [(ranks.get(parts[i] + parts[i + 1]), i) for i in range(len(parts) - 1)]
        pairs = [pair for pair in pairs if pair[0] is not None]
        if not pairs:
            return [ranks[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_encode_is_split_then_merge(tokenizer, ranks):
    pattern = regex.compile(SPLIT_PATTERN, regex.V1)
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices(ALPHABET, k=rng.randint(0, 20)))
        expected = [i for p in pattern.findall(text) for i in merged(p.encode(), ranks)]
        assert tokenizer.encode(text) == expected


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("don't WON'T", ["don't", " WON'T"]),
        ("HelloWorld", ["Hello", "World"]),
        ("abc漢字def", ["abc", "漢字", "def"]),
        ("漢字abc漢", ["漢字", "abc", "漢"]),
        ("カタ漢字", ["カタ", "漢字"]),
        ("12345", ["123", "45"]),
        (" ?!\n\nx", [" ?!\n\n", "x"]),
        ("a   b", ["a", "  ", " b"]),
        ("a \n\n b", ["a", " \n\n", " b"]),
        ("a  ", ["a", "  "]),
    ],
)
def test_split_pattern_pieces_in_three_engines(text, pieces):
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), "isolated")
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces
    assert regex.findall(SPLIT_PATTERN, text, flags=regex.V1) == pieces
    # tiktoken does not show its pieces: give each a token of its own, above pieces that overlap.
    tokens = [bytes([byte]) for byte in range(256)]
    for piece in dict.fromkeys(pieces):
        raw = piece.encode()
        tokens += [raw[:n] for n in range(2, len(raw) + 1) if raw[:n] not in tokens]
    assert [t.decode() for t in _tokens(tokens, text)] == pieces


def _tokens(tokens: list[bytes], text: str) -> list[bytes]:
    tokenizer = Tokenizer({token: rank for rank, token in enumerate(tokens)})
    return [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]


@settings(deadline=None, max_examples=100)
@given(st.text())
def test_decode_inverts_encode(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not any(tokenizer.is_special(i) for i in ids)


def test_special_literals_in_text_are_ordinary_tok_2(tokenizer):
    text = "".join(tokenizer.special_tokens)
    ids = tokenizer.encode(text)
    assert max(ids) < tokenizer.num_ranks
    assert tokenizer.decode(ids) == text


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "😀"


def test_special_ids_follow_the_ranks_at_the_published_offsets(tokenizer, ranks):
    n = len(ranks)
    assert tokenizer.vocab_size == n + 256
    assert tokenizer.special_id("[BOS]") == n
    assert tokenizer.special_id("<|im_end|>") == n + 163586 - 163584
    assert tokenizer.special_id("<|im_middle|>") == n + 163601 - 163584
    assert tokenizer.special_id("</think>") == n + 163607 - 163584
    assert tokenizer.special_id("[PAD]") == n + 255
    assert tokenizer.special_id(f"<|reserved_token_{n + 5}|>") == n + 5
    assert tokenizer.eos_ids == (n + 1, n + 2)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "[BOS]",
        "[EOS]",
        "[PAD]",
    )
    assert not tokenizer.is_special(n - 1) and tokenizer.is_special(n)


def test_published_config_has_the_published_ids():
    added = published_tokenizer_config(163584)["added_tokens_decoder"]
    assert added["163586"]["content"] == "<|im_end|>"
    assert added["163595"]["content"] == "<|tool_calls_section_begin|>"
    assert added["163606"]["content"] == "<think>"
    assert added["163839"]["content"] == "[PAD]"
    assert len(added) == 23


def test_eos_token_of_the_config_is_a_stop_id(ranks):
    config = published_tokenizer_config(len(ranks)) | {"eos_token": {"content": "[EOT]"}}
    assert Tokenizer(ranks, config).eos_ids == tuple(len(ranks) + k for k in (1, 2, 9))


def test_decode_skips_special_tokens_only_when_asked(tokenizer, ids_of):
    ids = ids_of("<think>", "the", "<|im_end|>", "in")
    assert tokenizer.decode(ids) == "<think>the<|im_end|>in"
    assert tokenizer.decode(ids, skip_special=True) == "thein"
    lead, tail = "é".encode()
    assert tokenizer.decode([lead, *ids_of("[EOS]"), tail], skip_special=True) == "\ufffd\ufffd"


def test_unknown_tokens_are_errors(tokenizer):
    with pytest.raises(TokenizerError, match=r"'<\|im_ends\|>'; did you mean '<\|im_end\|>'"):
        tokenizer.special_id("<|im_ends|>")
    with pytest.raises(TokenizerError, match="token id -1 is not in 0.."):
        tokenizer.token_bytes(-1)
    with pytest.raises(TokenizerError, match="token id 9999"):
        tokenizer.decode([9999])


def test_from_folder_reads_what_was_written(folder, tokenizer, tmp_path, ranks):
    read = Tokenizer.from_folder(folder)
    assert read.special_tokens == tokenizer.special_tokens
    assert read.encode("the 你") == tokenizer.encode("the 你")
    write_tiktoken_model(tmp_path / "again", dict(reversed(ranks.items())))
    assert read_tiktoken_model(tmp_path / "again") == ranks
    assert (tmp_path / "again").read_bytes() == (folder / "tiktoken.model").read_bytes()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("!!! 5", r"tiktoken.model, line 4: expected a base64 token and a rank, found '!!! 5'"),
        ("YWI=", r"line 4: expected a base64 token and a rank"),
        ("YWI= x", r"line 4: expected a base64 token and a rank"),
        ("YWI= 1", r"line 4: rank 1 is already on line 2"),
        ("AA== 3", r"line 4: token b'\\x00' is already on line 1"),
        ("YWI= 9999", r"tiktoken.model: rank 3 is missing"),
        ("YWJjZA== 3", r"tiktoken.model: no token for the single byte 0x03"),
    ],
)
def test_bad_model_lines_are_named(folder, line, message):
    path = folder / "tiktoken.model"
    lines = path.read_text().splitlines()
    lines[3] = line
    path.write_text("\n".join(lines))
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"added_tokens_decoder": None}, "tokenizer_config.json: added_tokens_decoder is missing"),
        ({"added_tokens_decoder": {"5": {"content": "[EOS]"}}}, r"'\[EOS\]' must have an id in 2"),
        ({"added_tokens_decoder": {"99999": "[EOS]"}}, "the 256 slots after the"),
        ({"added_tokens_decoder": {"300": "x"}}, "two or more characters"),
        ({"added_tokens_decoder": {"300": "ab", "301": "ab"}}, "'ab' has two ids"),
        ({"eos_token": "[NOPE]"}, r"eos_token is '\[NOPE\]'"),
    ],
)
def test_bad_configs_are_named(folder, change, message):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(folder)


def test_missing_and_unreadable_files_are_named(folder, tmp_path_factory):
    with pytest.raises(TokenizerError, match="tiktoken.model: no such file"):
        Tokenizer.from_folder(tmp_path_factory.mktemp("empty"))
    (folder / "tokenizer_config.json").write_text('{\n"a": }')
    with pytest.raises(TokenizerError, match="tokenizer_config.json, line 2: not JSON"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match="expected a JSON object, found list"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match="tokenizer_config.json: no such file"):
        Tokenizer.from_folder(folder)
    (folder / "tiktoken.model").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match="not readable as text"):
        Tokenizer.from_folder(folder)


def cut_by_definition(text: str, max_chars: int, max_run: int) -> list[str]:
    """The published rule, a character at a time."""
    out = []
    for start in range(0, len(text), max_chars):
        part, run = "", 0
        for char in text[start : start + max_chars]:
            run = run + 1 if part and char.isspace() == part[-1].isspace() else 1
            if run > max_run:
                out.append(part)
                part, run = "", 1
            part += char
        out.append(part)
    return out


@settings(deadline=None)
@given(st.text(alphabet="ab \n", max_size=60))
def test_long_texts_are_cut_at_the_published_places(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_CHARS", 23)
        patch.setattr(module, "MAX_RUN_CHARS", 4)
        assert list(module._pieces(text)) == cut_by_definition(text, 23, 4)


def test_long_runs_encode_in_reasonable_time(tokenizer):
    text = "a" * 30_000 + " " * 60_000 + "b"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [len(piece) for piece in module._pieces("a" * 60_000)] == [25_000, 25_000, 10_000]


def test_writer_refuses_ranks_the_reader_would_refuse(tmp_path, ranks):
    with pytest.raises(TokenizerError, match="a rank is given to two tokens"):
        write_tiktoken_model(tmp_path / "x", ranks | {b"new": 0})
    with pytest.raises(TokenizerError, match="is empty"):
        write_tiktoken_model(tmp_path / "x", ranks | {b"": len(ranks)})
    assert not (tmp_path / "x").exists()


def test_model_file_is_base64_and_rank_by_line(tmp_path, ranks):
    write_tiktoken_model(tmp_path / "x", ranks)
    lines = (tmp_path / "x").read_text().splitlines()
    assert lines[65] == f"{base64.b64encode(b'A').decode()} 65"
    assert len(lines) == len(ranks)
