"""The search tool (retrieval): finds the passages of a corpus that fit a query.

Passages are ranked by their words (BM25, arXiv:2407.03618) and, if embeddings are configured, also
by their meaning.

N = passages, d = width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ratchet.config.resolve import import_object
from ratchet.data.files import DataFile
from ratchet.data.formats.hf_datasets import HubTable
from ratchet.data.jsonl import check_columns
from ratchet.data.tables import open_table
from ratchet.environments.tool_use.base import ToolConfig
from ratchet.errors import DataError, MissingDependency


class SearchConfig(ToolConfig):
    """A tool that finds passages of a corpus by words (BM25) and, optionally, by embeddings."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.retriever:search_tool"

    corpus: DataFile | None = None
    """File, pattern, directory or address (s3://, gs://, hf://) of the passages: rows with
    `text_column`, and optionally `title`; null: hub."""
    hub: str | None = None
    """Id of a dataset of passages on the Hub; null: corpus."""
    subset: str | None = None
    """Configuration of the dataset on the Hub; null: the default one."""
    split: str = "train"
    """Split of the dataset on the Hub."""
    text_column: str = "text"
    """Column of a passage's text."""
    results: int = Field(3, gt=0)
    """Number of passages in an answer."""
    max_chars: int = Field(1000, gt=0)
    """Maximum characters of a passage."""
    k1: float = Field(1.5, ge=0)
    """How much the repetitions of a word in a passage count in BM25; 0: not at all."""
    b: float = Field(0.75, ge=0, le=1)
    """How much BM25 divides a word's count by the length of its passage; 0: not at all."""
    embeddings: str | None = None
    """Import path of a function (N texts -> [N, d] array), or a model's directory. The tool then
    searches by these embeddings too; null: by words only."""

    def check_keys(self) -> None:
        if (self.corpus is None) == (self.hub is None):
            raise ValueError("the passages come from one place: set either corpus or hub")
        if self.hub is None and (self.subset is not None or self.split != "train"):
            raise ValueError("subset and split belong to hub, and corpus is set: remove them")


Embed = Callable[[Sequence[str]], NDArray[Any]]
RANK_OFFSET = 60  # the constant k of reciprocal rank fusion (Cormack et al., 2009)
CANDIDATES = 100  # maximum number of passages in each ranking, before they are merged
# A word may have one character, because a single digit can be all that distinguishes two passages.
WORD_PATTERN = r"\b\w+\b"


@dataclass(frozen=True)
class Passage:
    """A text of the corpus."""

    text: str
    title: str = ""


class RetrieverTool:
    """A tool that returns the passages that best fit a query.

    The rankings by words and by meaning are merged by reciprocal rank fusion, because their scores
    have different scales.
    """

    name = "search"
    description = "Searches a collection of texts and returns the passages that fit best."

    def __init__(
        self,
        passages: Sequence[Passage],
        *,
        results: int = 3,
        max_chars: int = 1000,
        k1: float = 1.5,
        b: float = 0.75,
        embed: Embed | None = None,
    ) -> None:
        """Index the passages.

        Args:
            passages: The corpus.
            results: Number of passages in an answer.
            max_chars: Maximum number of characters of a passage in an answer.
            k1: How much the repetitions of a word in a passage count; 0: not at all.
            b: How much a word's count is divided by the length of its passage; 0: not at all.
            embed: Maps texts to vectors [N, d]; None: ranks by words only.

        Raises DataError for a corpus without words, and MissingDependency if bm25s is not
        installed.
        """
        try:
            import bm25s
        except ImportError:
            raise MissingDependency("bm25s", extra="tools", needed_for="the search tool") from None
        self.passages = passages
        self.results = results
        self.max_chars = max_chars
        self.parameters = {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "what to look for"}},
            "required": ["query"],
        }
        self._tokenize = bm25s.tokenize
        self._index = bm25s.BM25(k1=k1, b=b)
        words = self._split_into_words([f"{p.title} {p.text}" for p in passages])
        if not any(words):
            raise DataError("a corpus without words can't be searched: check its text column")
        self._index.index(words, show_progress=False)
        self._embed = embed
        self._vectors_Nd = (
            _normalise(embed([f"{p.title}\n{p.text}".strip() for p in passages]), len(passages))
            if embed
            else None
        )

    def call(self, query: str) -> str:
        """Return the text that the model reads: the best passages, numbered from 1."""
        passages = self.search(query)
        return (
            "\n\n".join(
                self._format_passage(number, passage) for number, passage in enumerate(passages, 1)
            )
            or "nothing was found"
        )

    def search(self, query: str) -> list[Passage]:
        """Return the passages that fit best, the best one first.

        Without embeddings, a passage that shares no word with the query is never returned.
        """
        rankings = [self._rank_by_words(query)]
        if self._embed is not None:
            rankings.append(self._rank_by_meaning(self._embed, query))
        scores: dict[int, float] = {}
        for ranking in rankings:
            for rank, index in enumerate(ranking):
                scores[index] = scores.get(index, 0.0) + 1.0 / (RANK_OFFSET + rank)
        best = sorted(scores, key=lambda index: (-scores[index], index))
        return [self.passages[index] for index in best[: self.results]]

    def _split_into_words(self, texts: Sequence[str]) -> list[list[str]]:
        words: Any = self._tokenize(
            list(texts),
            stopwords="en",
            token_pattern=WORD_PATTERN,
            return_ids=False,
            show_progress=False,
        )
        return words

    def _rank_by_words(self, query: str) -> list[int]:
        """Return the indices of the passages that share a word with the query, best first."""
        (words,) = self._split_into_words([query])
        known_words = [word for word in words if word in self._index.vocab_dict]
        if not known_words:
            return []
        scores_N = self._index.get_scores(known_words)
        return [
            int(index)
            for index in np.argsort(-scores_N, kind="stable")[:CANDIDATES]
            if scores_N[index] > 0
        ]

    def _rank_by_meaning(self, embed: Embed, query: str) -> list[int]:
        """Return the indices of the passages nearest to the query by cosine, best first."""
        assert self._vectors_Nd is not None
        similarity_N = self._vectors_Nd @ _normalise(embed([query]), 1)[0]
        return [int(index) for index in np.argsort(-similarity_N, kind="stable")[:CANDIDATES]]

    def _format_passage(self, number: int, passage: Passage) -> str:
        header = f"[{number}] {passage.title}\n" if passage.title else f"[{number}] "
        return header + passage.text[: self.max_chars]


def search_tool(config: SearchConfig) -> RetrieverTool:
    """Return the search tool that a section describes."""
    return RetrieverTool(
        read_passages(config),
        results=config.results,
        max_chars=config.max_chars,
        k1=config.k1,
        b=config.b,
        embed=None if config.embeddings is None else load_embedder(config.embeddings),
    )


def read_passages(config: SearchConfig) -> list[Passage]:
    """Return the passages of the files or the dataset that a section names.

    Raises DataError if there are none, or if a row can't be read.
    """
    if config.hub is None:
        table = open_table(config.corpus or "")
    else:
        table = HubTable(config.hub, config.split, subset=config.subset)
    passages: list[Passage] = []
    for index in range(len(table)):
        values = table.row(index).values
        check_columns(values, {config.text_column: str}, table.where(index))
        title = values.get("title", "")
        passages.append(
            Passage(values[config.text_column], title if isinstance(title, str) else "")
        )
    return passages


def load_embedder(name: str) -> Embed:
    """Return an embedding function by name.

    With a colon, `name` is the import path of a function. Otherwise it is a model directory, and a
    text's embedding is the mean of the model's hidden states.
    """
    return import_object(name) if ":" in name else _load_model_embedder(name)


def _load_model_embedder(directory: str) -> Embed:
    """Return a function that embeds texts as the mean hidden state of a model."""
    import torch

    from ratchet.data.chat.tokenizer_loading import load_tokenizer
    from ratchet.models.load import find_model, load_policy

    model_directory = find_model(directory)
    model = load_policy(model_directory)
    tokenizer = load_tokenizer(model_directory)

    def embed(texts: Sequence[str]) -> NDArray[Any]:
        embeddings: list[NDArray[Any]] = []
        for text in texts:
            # An empty text is embedded as the end-of-sequence token.
            tokens = torch.tensor(
                (tokenizer.encode(text) or list(tokenizer.eos_ids[:1]))[: model.max_positions]
            )
            with torch.inference_mode():
                embeddings.append(
                    model.hidden(tokens, torch.arange(len(tokens)), [len(tokens)])
                    .mean(0)
                    .float()
                    .numpy()
                )
        return np.stack(embeddings)

    return embed


def _normalise(vectors: NDArray[Any], count: int) -> NDArray[np.float32]:
    """Return the embeddings, scaled to length 1.

    Raises DataError if they are not `count` finite vectors.
    """
    matrix = np.asarray(vectors, dtype=np.float32)
    if matrix.ndim != 2 or len(matrix) != count or not np.isfinite(matrix).all():
        raise DataError(f"embeddings must be finite and of shape [{count}, d], not {matrix.shape}")
    return matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
