"""Stream the documents of a dataset on the hub, without storing it on disk."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

from data.hub import from_hub
from data.text.documents import HUB_VAL_RATIO, Document, load_document, split_of
from data.text.readers import check_column, checked_text


@dataclass(frozen=True)
class HubStream:
    """Dataset on the Hugging Face hub, or its beginning, streamed over the network.

    Validation is a random fraction of the documents, drawn as they arrive, so their total number
    need not be known.
    """

    name: str
    config: str | None = None
    text_field: str = "text"
    val_ratio: float = HUB_VAL_RATIO
    max_documents: int | None = None
    skip_bad: bool = False

    def describe(self) -> dict[str, Any]:
        settings = asdict(self) | {"skip_bad": self.skip_bad or None}
        return {"kind": "hub stream", **settings, "commit": self._commit}

    def documents(self, start: int = 0) -> Iterator[Document]:
        for number, row in enumerate(self._read(start), start=start):
            where = f"{self.name}: field {self.text_field!r} of row {number}"
            yield load_document(
                number,
                split_of(number, self.val_ratio),
                partial(checked_text, row[self.text_field], where),
                self._done(number),
                skip_bad=self.skip_bad,
            )

    def _read(self, start: int) -> Iterator[dict[str, Any]]:
        """Yield rows from number `start` on."""
        n_left = None if self.max_documents is None else max(0, self.max_documents - start)
        rows = islice(self._rows.skip(start) if start else self._rows, n_left)
        while True:
            with from_hub(f"the next row of {self.name}", self._remedy):
                row = next(rows, None)
            if row is None:
                return
            yield row

    def _done(self, number: int) -> float:
        """Fraction of the stream read up to this document; 0 if the total is unknown."""
        return 0.0 if self._n_documents is None else min(1.0, (number + 1) / self._n_documents)

    @cached_property
    def _n_documents(self) -> int | None:
        if self.max_documents is not None:
            return self.max_documents
        splits = self._rows.info.splits or {}
        return splits["train"].num_examples if "train" in splits else None

    @property
    def _remedy(self) -> str:
        return "check the name and the network; the same command resumes where this one ended"

    @cached_property
    def _commit(self) -> str:
        """Commit of the dataset at the first request; another commit may have other documents."""
        with from_hub(f"{self.name}, as a dataset,", self._remedy):
            from huggingface_hub import HfApi

            return str(HfApi().dataset_info(self.name).sha)

    @cached_property
    def _rows(self) -> Any:
        with from_hub(f"{self.name}, as a dataset,", self._remedy):
            import datasets

            rows: Any = datasets.load_dataset(
                self.name, self.config, split="train", streaming=True, revision=self._commit
            )
            # some formats do not know their columns before a row is read
            columns = rows.column_names or list(next(iter(rows), {}))
        check_column(self.name, self.text_field, columns)
        return rows.select_columns([self.text_field])
