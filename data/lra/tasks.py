"""Prepare the tasks of Long Range Arena by name, from published files or generated data."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data.files import write_atomically
from data.lra import image, listops, retrieval, shared_citations, text
from data.lra.request import PATHFINDER_SIZES, Request
from data.lra.store import Manifest
from data.lra.writer import TaskWriter, preparing
from data.pathfinder import generator, release
from data.pathfinder.parameters import Pathfinder, display_list_dtype

CHUNK = 1000  # generated Pathfinder images between two saves
PATHFINDER_SPLIT_SIZES = {"train": 160_000, "val": 20_000, "test": 20_000}
"""80, 10 and 10 % of 200,000 images."""

OnProgress = Callable[[str, int, int], None]
"""Callback with the split, its examples done so far, and their approximate total."""

Plan = tuple[Manifest, Callable[[TaskWriter, OnProgress], None]]
"""Manifest of a task, and the function that writes all splits."""

_REPORT_EVERY = 1000
_T = TypeVar("_T")


class Prepared(NamedTuple):
    """A prepared task."""

    folder: Path
    manifest: Manifest
    finished_before: bool
    """Whether the task was already prepared."""


def prepare(
    request: Request, out: Path, on_progress: OnProgress = lambda split, done, total: None
) -> Prepared:
    """Prepare a task in out/NAME; resumes an interrupted preparation of an equal request.

    Raises:
        ValueError: The request cannot be met, or the folder holds something else.
    """
    manifest, write = _PLANS.get(request.task, _pathfinder)(request)
    with preparing(out / request.name, manifest) as writer:
        finished_before = writer.finished
        if not finished_before:
            write(writer, on_progress)
            writer.finish()
        return Prepared(writer.folder, writer.manifest, finished_before)


def _listops(request: Request) -> Plan:
    sizes = request.examples or listops.SPLIT_SIZES
    origin = _origin(request, "ListOps")
    if request.source is None:
        origin = {"generator": "data.lra.listops", "examples": dict(sizes), "seed": request.seed}
        if request.name != "listops":
            origin |= {"shortest": request.shortest, "longest": request.longest}

    def write(writer: TaskWriter, on_progress: OnProgress) -> None:
        if request.source is None:
            formulas = _generated_formulas(request, sizes, on_progress)
        else:
            paths = listops.find_tsv(request.source)
            formulas = {
                split: _take_requested(listops.read_tsv(path), request, split)
                for split, path in paths.items()
            }
        for split, pairs in formulas.items():
            examples = ((value, [tokens[: listops.MAX_LENGTH]]) for tokens, value in pairs)
            counted = _counted(examples, split, sizes[split], on_progress)
            writer.write_sequences(split, counted)

    return _manifest(request, listops, origin), write


def _generated_formulas(
    request: Request, sizes: Mapping[str, int], on_progress: OnProgress
) -> dict[str, Iterator[listops.Formula]]:
    # importing numba takes a second, and only the generator needs it
    from data.lra.listops_generator import generate

    numbers = _example_numbers(listops.SPLIT_SIZES, sizes)
    n_formulas = max(r.stop for ranges in numbers.values() for r in ranges)
    endless = generate(
        request.seed, request.n_threads, shortest=request.shortest, longest=request.longest
    )
    series = islice(endless, n_formulas)
    formulas = list(_counted(series, "formulas", n_formulas, on_progress))
    return {split: (formulas[i] for r in ranges for i in r) for split, ranges in numbers.items()}


def _text(request: Request) -> Plan:
    sizes = request.examples or text.SPLIT_SIZES
    origin = _origin(request, "IMDB", text.HUB_NAME) | {
        "examples": dict(sizes),
        "seed": request.seed,
        "val": "held out from the published training set",
    }

    def write(writer: TaskWriter, on_progress: OnProgress) -> None:
        imdb = text.read_imdb(request.source)
        for split, reviews in text.split_reviews(imdb, sizes, request.seed).items():
            examples = _counted(text.examples(reviews), split, len(reviews), on_progress)
            writer.write_sequences(split, examples)

    return _manifest(request, text, origin), write


def _image(request: Request) -> Plan:
    sizes = dict(request.examples or image.SPLIT_SIZES)
    origin = _origin(request, "CIFAR-10 in grey", image.HUB_NAME) | {"examples": sizes}

    def write(writer: TaskWriter, on_progress: OnProgress) -> None:
        cifar10 = image.read_cifar10(request.source)
        for split, (images, labels) in image.split_images(cifar10, sizes).items():
            writer.write_images(split, [(images, labels)])
            on_progress(split, len(images), len(images))

    return _manifest(request, image, origin, kind="images"), write


def _retrieval(request: Request) -> Plan:
    paths = retrieval.find_aan(request.source)
    origin = _origin(request, "ACL Anthology Network")

    def write(writer: TaskWriter, on_progress: OnProgress) -> None:
        sizes = request.examples or retrieval.SPLIT_SIZES
        for split, path in paths.items():
            skipped: list[str] = []
            examples = _take_requested(retrieval.read_aan(path, skipped), request, split)
            counted = _counted(examples, split, sizes[split], on_progress)
            writer.write_sequences(split, counted, skipped)

    return _manifest(request, retrieval, origin, documents_per_example=2), write


def _pairs(request: Request) -> Plan:
    origin = _origin(request, "halves of IMDB reviews", text.HUB_NAME) | {
        "question": "are both halves of one review? (no task of Long Range Arena)",
        "seed": request.seed,
    }

    def write(writer: TaskWriter, on_progress: OnProgress) -> None:
        imdb = text.read_imdb(request.source)
        imdb["train"] = retrieval.exclude(imdb["train"], imdb["test"])
        n_train, n_test = len(imdb["train"]), len(imdb["test"])
        n_val = n_train // 10
        sizes = {"train": n_train - n_val, "val": n_val, "test": n_test}
        for split, reviews in text.split_reviews(imdb, sizes, request.seed).items():
            all_pairs = retrieval.make_pairs(reviews, request.seed)
            pairs = list(_take_requested(all_pairs, request, split))
            examples = _counted(retrieval.pair_examples(pairs), split, len(pairs), on_progress)
            writer.write_sequences(split, examples)

    return _manifest(request, retrieval, origin, documents_per_example=2), write


def _aclsum(request: Request) -> Plan:
    papers = shared_citations.read_papers(request.source)
    splits = shared_citations.split_papers(papers, request.seed)
    origin = _origin(request, "papers of aclsum 0.1.2") | {
        "question": "do both papers cite a common work? (not AAN, no task of Long Range Arena)",
        "papers": {split: len(members) for split, members in splits.items()},
        "seed": request.seed,
    }

    def write(writer: TaskWriter, on_progress: OnProgress) -> None:
        for split, members in splits.items():
            all_pairs = shared_citations.balanced_pairs(members, request.seed)
            pairs = [
                (label, first.text, second.text)
                for label, first, second in _take_requested(all_pairs, request, split)
            ]
            examples = _counted(retrieval.pair_examples(pairs), split, len(pairs), on_progress)
            writer.write_sequences(split, examples)

    return _manifest(request, shared_citations, origin, documents_per_example=2), write


def _pathfinder(request: Request) -> Plan:
    size = PATHFINDER_SIZES[request.task]
    parameters = Pathfinder(size, request.contour_length, request.distractors_of)
    sizes = request.examples or PATHFINDER_SPLIT_SIZES
    if request.source is None:
        kind = "display_lists"
        origin = {
            "generator": "data.pathfinder",
            "parameters": asdict(parameters),
            "examples": dict(sizes),
            "seed": request.seed,
        }
    else:
        kind = "images"
        origin = _origin(request, "lra_release") | {"parameters": asdict(parameters)}
    manifest = Manifest(
        task=request.name, kind=kind, vocab_size=256, n_classes=2, max_length=size**2, source=origin
    )

    def write(writer: TaskWriter, on_progress: OnProgress) -> None:
        if request.source is None:
            for split, ranges in _example_numbers(PATHFINDER_SPLIT_SIZES, sizes).items():
                blocks = _generated_images(request, parameters, ranges, writer.chunks)
                counted = _counted(blocks, split, sizes[split], on_progress, len)
                writer.write_display_lists(split, counted)
            return
        folder = release.find_release(request.source, size, request.contour_length)
        for split, released in release.split_images(release.read_metadata(folder)).items():
            images = list(_take_requested(released, request, split))
            skipped: list[str] = []
            blocks = release.read_images(images, size, skipped, request.n_threads)
            counted = _counted(blocks, split, len(images), on_progress, lambda block: len(block[1]))
            writer.write_images(split, counted, skipped)

    return manifest, write


def _generated_images(
    request: Request, parameters: Pathfinder, ranges: Iterable[range], chunks: Path
) -> Iterator[np.ndarray]:
    """Yield display lists chunk by chunk; chunks finished by an earlier run are read from disk."""
    expected = display_list_dtype(parameters)
    for numbers in ranges:
        for first in range(numbers.start, numbers.stop, CHUNK):
            n = min(CHUNK, numbers.stop - first)
            path = chunks / f"{first:09d}.npy"
            if path.exists():
                block = np.load(path, allow_pickle=False)
                if block.dtype != expected or len(block) != n:
                    raise ValueError(
                        f"{path} has {len(block)} rows of {block.dtype}, but must have {n} of "
                        f"{expected}; delete {chunks}."
                    )
            else:
                block = generator.generate(
                    parameters, request.seed, range(first, first + n), n_threads=request.n_threads
                )
                buffer = io.BytesIO()
                np.save(buffer, block)
                write_atomically(path, buffer.getvalue())
            yield block


_PLANS: dict[str, Callable[[Request], Plan]] = {
    "listops": _listops,
    "text": _text,
    "image": _image,
    "retrieval": _retrieval,
    "pairs": _pairs,
    "aclsum": _aclsum,
}


def _origin(request: Request, dataset: str, hub_name: str | None = None) -> dict[str, Any]:
    """Build the manifest's `source` for data that is read instead of generated."""
    return {
        "dataset": dataset,
        "from": hub_name if request.source is None else str(request.source),
        "examples": None if request.examples is None else dict(request.examples),
    }


def _manifest(
    request: Request,
    task: ModuleType,
    origin: dict[str, Any],
    kind: str = "sequences",
    documents_per_example: int = 1,
) -> Manifest:
    """Build the manifest of a task from the constants of its module."""
    return Manifest(
        task=request.name,
        kind=kind,
        vocab_size=task.VOCAB_SIZE,
        n_classes=task.N_CLASSES,
        max_length=task.MAX_LENGTH,
        documents_per_example=documents_per_example,
        source=origin,
    )


def _example_numbers(
    benchmark: Mapping[str, int], sizes: Mapping[str, int]
) -> dict[str, list[range]]:
    """Assign the numbers of an endless series to splits.

    The benchmark's splits take the first numbers: train, then val, then test. Additional training
    examples follow after test. For any size, val and test therefore stay the same, and no example
    is in two splits.

    Raises:
        ValueError: The requested val or test is larger than the benchmark's.
    """
    numbers, first, total = {}, 0, sum(benchmark.values())
    for split, n_benchmark in benchmark.items():
        n_requested = sizes[split]
        numbers[split] = [range(first, first + min(n_requested, n_benchmark))]
        if n_requested > n_benchmark:
            if split != "train":
                raise ValueError(
                    f"examples: {split}={n_requested:,} must be at most {n_benchmark:,}."
                )
            numbers[split].append(range(total, total + n_requested - n_benchmark))
        first += n_benchmark
    return numbers


def _take_requested(items: Iterable[_T], request: Request, split: str) -> Iterator[_T]:
    """Yield the requested number of a split's examples, or all if no number is requested.

    Raises:
        ValueError: There are fewer examples than requested.
    """
    n_requested = request.examples[split] if request.examples else None
    n_yielded = 0
    for item in islice(items, n_requested):
        n_yielded += 1
        yield item
    if n_requested is not None and n_yielded < n_requested:
        raise ValueError(f"examples: {split}={n_requested:,} must be at most {n_yielded:,}.")


def _counted(
    items: Iterable[_T],
    split: str,
    total: int,
    on_progress: OnProgress,
    size: Callable[[_T], int] = lambda item: 1,
) -> Iterator[_T]:
    """Yield examples, or blocks of `size` examples, and report progress."""
    done = 0
    on_progress(split, 0, total)
    for item in items:
        yield item
        done += size(item)
        if size(item) > 1 or done % _REPORT_EVERY == 0:
            on_progress(split, done, total)
    on_progress(split, done, max(done, 1))
