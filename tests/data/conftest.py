"""A tiny tokenizer and tiny corpora; nothing here needs the network."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from data.text.shard_writer import ShardWriter
from data.text.shards import Manifest, SplitInfo, TokenizerInfo, token_dtype
from data.text.tokenizer import TextTokenizer, train_tokenizer

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "said", "that", "it's", "42", "!?", "", "\t"]
WORDS += ["naïve", "cafés,", "東京", "🦋", "\n\n", "def", "f(x):"]


def random_texts(n: int, seed: int = 0, max_words: int = 60) -> list[str]:
    """Short documents of odd words, some of them white space alone."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(max_words))) or " " for _ in range(n)]


@pytest.fixture(scope="session")
def texts() -> Callable[..., list[str]]:
    return random_texts


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    return train_tokenizer(random_texts(200), 400)


@pytest.fixture(scope="session")
def tokenizer_file(tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    return path


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(documents: Sequence[str], name: str = "corpus.jsonl") -> Path:
        path = tmp_path / name
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents]
        path.write_text("".join(lines), encoding="utf-8", newline="")
        return path

    return write


@pytest.fixture
def make_shards(tmp_path: Path) -> Callable[..., Path]:
    """Write documents of token ids as shards; id 0 ends each of them."""

    def make(
        train: Sequence[list[int]],
        val: Sequence[list[int]] = ([1],),
        *,
        shard_tokens: int = 1000,
        vocab_size: int = 100,
    ) -> Path:
        splits = {}
        tokenizer = TokenizerInfo(name="tiny", sha256="abc", vocab_size=vocab_size, eot_id=0)
        dtype = token_dtype(vocab_size)
        for split, documents in (("train", train), ("val", val)):
            info = splits[split] = SplitInfo()
            writer = ShardWriter(tmp_path, split, info, tokenizer, shard_tokens)
            for ids in documents:
                writer.append(ids)
                writer.end_document(text_bytes=len(ids))
            writer.close_shard()
        Manifest(settings={}, tokenizer=tokenizer, dtype=dtype, splits=splits).save(tmp_path)
        return tmp_path

    return make
