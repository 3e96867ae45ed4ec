"""Passages of a corpus for a question: by their words (BM25, arXiv:2407.03618), and by meaning
where embeddings are given.

N = passages, d = width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ratchet.config.resolve import imported
from ratchet.data.jsonl import read_jsonl
from ratchet.environments.tool_use.base import ToolConfig
from ratchet.errors import DataError, MissingDependency


class SearchConfig(ToolConfig):
    """Finds passages of a corpus, by their words (BM25) and, if asked for, by their meaning."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.retriever:search_tool"

    corpus: Path = Field(description="JSON Lines with the column `text`, and perhaps `title`.")
    results: int = Field(3, gt=0, description="Passages of one answer.")
    max_chars: int = Field(1000, gt=0, description="Of one passage.")
    embeddings: str | None = Field(
        None,
        description="Also by meaning: my_pkg.my_mod:function (texts -> [N, d] array), or a model's "
        "directory.",
    )


Embed = Callable[[Sequence[str]], NDArray[Any]]
RANK_OFFSET = 60  # of reciprocal rank fusion (Cormack et al., 2009)
CANDIDATES = 100  # of each way to rank
WORD = r"\b\w+\b"  # of one letter too: single digits tell passages apart


@dataclass(frozen=True)
class Passage:
    text: str
    title: str = ""


class RetrieverTool:
    """embed: texts -> [N, d]; the rankings by words and by meaning are merged by reciprocal ranks,
    which need no scale."""

    name = "search"
    description = "Searches a collection of texts and returns the passages that fit best."

    def __init__(
        self,
        passages: Sequence[Passage],
        *,
        results: int = 3,
        max_chars: int = 1000,
        embed: Embed | None = None,
    ) -> None:
        """Raises DataError for an empty corpus, MissingDependency without bm25s."""
        try:
            import bm25s
        except ImportError:
            raise MissingDependency("bm25s", extra="envs", needed_for="the search tool") from None
        if not passages:
            raise DataError("a corpus without passages can't be searched")
        self.passages, self.results, self.max_chars = passages, results, max_chars
        self.parameters = {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "what to look for"}},
            "required": ["query"],
        }
        self._tokenize = bm25s.tokenize
        self._index = bm25s.BM25()
        self._index.index(
            self._split([f"{p.title} {p.text}" for p in passages]), show_progress=False
        )
        self._embed = embed
        self._vectors_Nd = (
            _unit(embed([f"{p.title}\n{p.text}".strip() for p in passages]), len(passages))
            if embed
            else None
        )

    def call(self, query: str) -> str:
        passages = self.search(query)
        return (
            "\n\n".join(self._shown(number, passage) for number, passage in enumerate(passages, 1))
            or "nothing was found"
        )

    def search(self, query: str) -> list[Passage]:
        """The passages that fit best, first the best; none that shares no word with the query,
        unless by meaning."""
        rankings = [self._by_words(query)]
        if self._embed is not None:
            rankings.append(self._by_meaning(self._embed, query))
        scores: dict[int, float] = {}
        for ranking in rankings:
            for rank, row in enumerate(ranking):
                scores[row] = scores.get(row, 0.0) + 1.0 / (RANK_OFFSET + rank)
        best = sorted(scores, key=lambda row: (-scores[row], row))
        return [self.passages[row] for row in best[: self.results]]

    def _split(self, texts: Sequence[str]) -> list[list[str]]:
        words: Any = self._tokenize(
            list(texts), stopwords="en", token_pattern=WORD, return_ids=False, show_progress=False
        )
        return words

    def _by_words(self, query: str) -> list[int]:
        (words,) = self._split([query])
        indexed = [word for word in words if word in self._index.vocab_dict]
        if not indexed:
            return []
        scores_N = self._index.get_scores(indexed)
        return [
            int(row)
            for row in np.argsort(-scores_N, kind="stable")[:CANDIDATES]
            if scores_N[row] > 0
        ]

    def _by_meaning(self, embed: Embed, query: str) -> list[int]:
        assert self._vectors_Nd is not None
        likeness_N = self._vectors_Nd @ _unit(embed([query]), 1)[0]
        return [int(row) for row in np.argsort(-likeness_N, kind="stable")[:CANDIDATES]]

    def _shown(self, number: int, passage: Passage) -> str:
        head = f"[{number}] {passage.title}\n" if passage.title else f"[{number}] "
        return head + passage.text[: self.max_chars]


def search_tool(config: SearchConfig) -> RetrieverTool:
    return RetrieverTool(
        read_passages(config.corpus),
        results=config.results,
        max_chars=config.max_chars,
        embed=None if config.embeddings is None else embedder(config.embeddings),
    )


def read_passages(path: Path) -> list[Passage]:
    """Raises DataError with file and line."""
    passages: list[Passage] = []
    for row in read_jsonl(path, {"text": str}):
        title = row.values.get("title", "")
        passages.append(Passage(row.values["text"], title if isinstance(title, str) else ""))
    if not passages:
        raise DataError(f"{path}: a corpus without passages can't be searched")
    return passages


def embedder(name: str) -> Embed:
    """The function of an import path, or the mean of the hidden states of a model in a
    directory."""
    return imported(name) if ":" in name else _load_embedder(name)


def _load_embedder(directory: str) -> Embed:
    import torch

    from ratchet.data.chat.tokenizer_loading import load_tokenizer
    from ratchet.models.load import find_model, load_policy

    model_directory = find_model(directory)
    model, tokenizer = load_policy(model_directory), load_tokenizer(model_directory)

    def embed(texts: Sequence[str]) -> NDArray[Any]:
        rows: list[NDArray[Any]] = []
        for text in texts:
            tokens = torch.tensor(
                (tokenizer.encode(text) or list(tokenizer.eos_ids[:1]))[: model.max_positions]
            )
            with torch.inference_mode():
                rows.append(
                    model.hidden(tokens, torch.arange(len(tokens)), [len(tokens)])
                    .mean(0)
                    .float()
                    .numpy()
                )
        return np.stack(rows)

    return embed


def _unit(vectors: NDArray[Any], count: int) -> NDArray[np.float32]:
    matrix = np.asarray(vectors, dtype=np.float32)
    if matrix.ndim != 2 or len(matrix) != count or not np.isfinite(matrix).all():
        raise DataError(f"embeddings must be finite and of shape [{count}, d], not {matrix.shape}")
    return matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
