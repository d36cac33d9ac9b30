"""A tokenizer of 256 bytes and a few merges, with the published control tokens after them."""

import base64
import json
from pathlib import Path

import pytest

from kimi_jax.text.chat import ChatTemplate
from kimi_jax.text.tokenizer import Tokenizer, published_tokenizer_config

MERGES = ("th", "he", "the", " t", " the", "in", "er", " a", "os", "os ", '":', "你")
LONG_TOKEN = "0123456789abcdef" * 4  # no merges lead to it: tests put its id where they want it
TEMPLATE = Path(__file__).parents[3] / "kimi_jax" / "demo" / "chat_template.jinja"


@pytest.fixture(scope="session")
def ranks() -> dict[bytes, int]:
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [LONG_TOKEN.encode()]
    tokens += ["你".encode()[:2]]  # a token that ends inside a character
    tokens += [*(merge.encode() for merge in MERGES)]
    return {token: rank for rank, token in enumerate(tokens)}


@pytest.fixture(scope="session")
def tokenizer(ranks) -> Tokenizer:
    return Tokenizer(ranks)


@pytest.fixture(scope="session")
def template(tokenizer) -> ChatTemplate:
    return ChatTemplate(TEMPLATE.read_text(encoding="utf-8"), tokenizer)


@pytest.fixture
def folder(tmp_path, ranks) -> Path:
    """A checkpoint folder's three text files."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (tmp_path / "tiktoken.model").write_text("".join(lines))
    config = published_tokenizer_config(len(ranks))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"))
    return tmp_path


@pytest.fixture(scope="session")
def ids_of(tokenizer):
    """Ids of pieces: a control token by its name, other text encoded."""

    def ids_of(*pieces: str) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            special = tokenizer.special_tokens.get(piece)
            ids += tokenizer.encode(piece) if special is None else [special]
        return ids

    return ids_of
