"""Preparing the tasks of Long Range Arena by name: from where each is read or generated."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from data.lra import image, listops, retrieval, text
from data.lra.pathfinder import pathfinder
from data.lra.request import (
    PATHFINDER_SIZES,
    OnProgress,
    Request,
    Write,
    counted,
    exactly,
    example_numbers,
    origin_of,
)
from data.lra.store import Manifest
from data.lra.writer import TaskWriter, preparing


@dataclass(frozen=True)
class Prepared:
    """What `prepare` did."""

    folder: Path
    manifest: Manifest
    finished_before: bool
    """Whether there was nothing left to do."""


def prepare(
    request: Request, out: Path, on_progress: OnProgress = lambda split, done, total: None
) -> Prepared:
    """Prepare a task; goes on where a preparation of the same request was stopped.

    Args:
        request: What.
        out: Folder for the task's folder, which is named `request.name`.
        on_progress: Told from time to time how far it is.

    Raises:
        ValueError: The request cannot be met, or the folder holds something else.
    """
    if request.task in PATHFINDER_SIZES:
        manifest, write = pathfinder(request)
    else:
        manifest, write = _PLANS[request.task](request)
    with preparing(out / request.name, manifest) as writer:
        finished_before = writer.finished
        if not finished_before:
            write(writer, on_progress)
            writer.finish()
        return Prepared(writer.folder, writer.manifest, finished_before)


def _listops(request: Request) -> tuple[Manifest, Write]:
    sizes = request.examples or listops.SPLIT_SIZES
    if request.source is None:
        origin = {"generator": "data.lra.listops", "examples": dict(sizes), "seed": request.seed}
        if request.name != "listops":
            origin |= {"shortest": request.shortest, "longest": request.longest}
    else:
        origin = origin_of(request, "ListOps")
    manifest = Manifest(
        task=request.name,
        kind="sequences",
        vocab_size=listops.VOCAB_SIZE,
        n_classes=listops.N_CLASSES,
        max_length=listops.MAX_LENGTH,
        source=origin,
    )

    def write(writer: TaskWriter, on_progress: OnProgress) -> None:
        if request.source is None:
            # numba takes a second to import, and only generating needs it
            from data.lra.listops_generator import generate

            numbers = example_numbers(listops.SPLIT_SIZES, sizes)
            n_formulas = max(r.stop for ranges in numbers.values() for r in ranges)
            endless = generate(
                request.seed,
                request.n_threads,
                shortest=request.shortest,
                longest=request.longest,
            )
            series = islice(endless, n_formulas)
            made = list(counted(series, "formulas", n_formulas, on_progress))
            formulas = {s: (made[i] for r in rs for i in r) for s, rs in numbers.items()}
        else:
            paths = listops.find_tsv(request.source)
            formulas = {split: listops.read_tsv(path) for split, path in paths.items()}
        for split, some in formulas.items():
            if request.source is not None and request.examples:
                some = exactly(some, request.examples[split], split)
            examples = ((value, [tokens[: listops.MAX_LENGTH]]) for tokens, value in some)
            told = counted(examples, split, sizes[split], on_progress)
            writer.write_sequences(split, told)

    return manifest, write


def _text(request: Request) -> tuple[Manifest, Write]:
    sizes = request.examples or text.SPLIT_SIZES
    manifest = Manifest(
        task=request.name,
        kind="sequences",
        vocab_size=text.VOCAB_SIZE,
        n_classes=text.N_CLASSES,
        max_length=text.MAX_LENGTH,
        source={
            **origin_of(request, "IMDB", text.HUB_NAME),
            "examples": dict(sizes),
            "seed": request.seed,
            "val": "held out from the published training set",
        },
    )

    def write(writer: TaskWriter, on_progress: OnProgress) -> None:
        imdb = text.read_imdb(request.source)
        for split, reviews in text.split_reviews(imdb, sizes, request.seed).items():
            examples = counted(text.examples(reviews), split, len(reviews), on_progress)
            writer.write_sequences(split, examples)

    return manifest, write


def _image(request: Request) -> tuple[Manifest, Write]:
    sizes = dict(request.examples or image.SPLIT_SIZES)
    manifest = Manifest(
        task=request.name,
        kind="images",
        vocab_size=image.VOCAB_SIZE,
        n_classes=image.N_CLASSES,
        max_length=image.SIDE**2,
        source={**origin_of(request, "CIFAR-10 in grey", image.HUB_NAME), "examples": sizes},
    )

    def write(writer: TaskWriter, on_progress: OnProgress) -> None:
        cifar10 = image.read_cifar10(request.source)
        for split, (images, labels) in image.split_images(cifar10, sizes).items():
            writer.write_images(split, [(images, labels)])
            on_progress(split, len(images), len(images))

    return manifest, write


def _retrieval(request: Request) -> tuple[Manifest, Write]:
    paths = retrieval.find_aan(request.source)
    manifest = Manifest(
        task=request.name,
        kind="sequences",
        vocab_size=text.VOCAB_SIZE,
        n_classes=retrieval.N_CLASSES,
        max_length=retrieval.MAX_LENGTH,
        documents_per_example=2,
        source=origin_of(request, "ACL Anthology Network"),
    )

    def write(writer: TaskWriter, on_progress: OnProgress) -> None:
        for split, path in paths.items():
            skipped: list[str] = []
            examples = retrieval.read_aan(path, skipped)
            total = retrieval.SPLIT_SIZES[split]
            if request.examples:
                total = request.examples[split]
                examples = exactly(examples, total, split)
            writer.write_sequences(split, counted(examples, split, total, on_progress), skipped)

    return manifest, write


def _pairs(request: Request) -> tuple[Manifest, Write]:
    manifest = Manifest(
        task=request.name,
        kind="sequences",
        vocab_size=text.VOCAB_SIZE,
        n_classes=retrieval.N_CLASSES,
        max_length=retrieval.MAX_LENGTH,
        documents_per_example=2,
        source={
            **origin_of(request, "halves of IMDB reviews", text.HUB_NAME),
            "question": "are both halves of one review? (no task of Long Range Arena)",
            "seed": request.seed,
        },
    )

    def write(writer: TaskWriter, on_progress: OnProgress) -> None:
        imdb = text.read_imdb(request.source)
        test = imdb["test"]
        train = retrieval.without(imdb["train"], test)
        n_val = len(train) // 10
        sizes = {"train": len(train) - n_val, "val": n_val, "test": len(test)}
        imdb = {"train": train, "test": test}
        for split, reviews in text.split_reviews(imdb, sizes, request.seed).items():
            pairs = retrieval.make_pairs(reviews, request.seed)
            if request.examples:
                pairs = list(exactly(iter(pairs), request.examples[split], split))
            examples = counted(retrieval.pair_examples(pairs), split, len(pairs), on_progress)
            writer.write_sequences(split, examples)

    return manifest, write


_PLANS: dict[str, Callable[[Request], tuple[Manifest, Write]]] = {
    "listops": _listops,
    "text": _text,
    "image": _image,
    "retrieval": _retrieval,
    "pairs": _pairs,
}
