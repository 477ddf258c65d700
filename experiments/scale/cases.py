"""Cases of experiments.scale: the model, the number of GPUs, and the kind of parallelism."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product, takewhile
from typing import Any

from data.text.config import DataConfig
from model.config import GPT2_SIZES, ModelConfig
from model.mask_config import MaskConfig
from training.config import ParallelConfig, RunConfig
from training.dry_run import GIB, estimate
from training.language.config import OptimConfig, TrainConfig

MASKS = {"dense": MaskConfig(), "butterfly": MaskConfig(pattern="butterfly")}
TOKENS = 32_768  # per GPU and micro-batch
DOCUMENT = 16_384
UNIT = 65_536  # granularity of the longest contexts
FILLED = 0.9  # share of GPU memory that a case may take
RECIPE_TOKENS = 524_288  # tokens per step in GPT-2's recipe

SHAPES: dict[str, dict[str, Any]] = {
    **{f"GPT-2 {size}": shape for size, shape in GPT2_SIZES.items()},
    "GPT-2 small, rotary": {**GPT2_SIZES["small"], "positions": "rotary"},
    # the shape of Llama 2 7B: 6.6B parameters
    "7B": {
        **{"n_layer": 32, "n_head": 32, "n_embd": 4096, "positions": "rotary", "bias": False},
        **{"norm": "rms_norm", "mlp": "swiglu"},
    },
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step to measure."""

    part: str
    """Key of PARTS."""
    model: str
    way: str
    """Parallelism or mask, then activation checkpointing, as a label."""
    n_gpus: int
    config: TrainConfig
    document: int | None = None
    """Length of packed documents, tokens; None: each sequence is one document."""

    @property
    def name(self) -> str:
        """Unique name of the case."""
        return ", ".join(str(value) for value in self.row.values())

    @property
    def row(self) -> dict[str, Any]:
        """First entries of the case's row in results."""
        config = self.config
        return {
            **{"part": self.part, "model": self.model, "way": self.way, "n_gpus": self.n_gpus},
            "context_length": config.model.context_length,
            "batch_tokens": config.optim.batch_tokens,
            "micro_batch_size": config.optim.micro_batch_size,
        }

    @property
    def estimated_gib(self) -> float:
        """Memory of a GPU as `train.py --dry-run` estimates it, GiB."""
        config = self.config
        return estimate(config, config.optim.micro_batch_size, self.n_gpus).total / GIB

    def fits(self, card: float) -> bool:
        """Whether the estimate fits a GPU with `card` bytes, with a margin."""
        return self.estimated_gib * GIB <= FILLED * card


def cases(parts: Sequence[str], card: float) -> Iterator[Case]:
    """Yield the cases of these parts for GPUs with `card` bytes; compared cases are adjacent."""
    for part in parts:
        yield from PARTS[part](card)


def cases_on(n_gpus: int, parts: Sequence[str], only: Sequence[str], card: float) -> list[Case]:
    """Cases of one GPU or of all `n_gpus` whose name contains one of the texts `only`.

    Raises:
        ValueError: there is none.
    """
    found = [
        case
        for case in cases(parts, card)
        if case.n_gpus in (1, n_gpus) and any(text in case.name for text in only)
    ]
    if not found:
        numbers = sorted({case.n_gpus for case in cases(parts, card)})
        raise ValueError(
            f"--parts {' '.join(parts)} --only {' '.join(map(repr, only))} has no case on {n_gpus} "
            f"GPUs: these parts have cases on {', '.join(map(str, numbers))}. Pass another "
            "--nproc_per_node, or other options"
        )
    return found


def _ddp(_: float) -> Iterator[Case]:
    """Gradients all-reduced after one micro-batch, and after as many as the recipe has."""
    for context in (1024, 4096, 16_384):
        for tokens in (2 * TOKENS, RECIPE_TOKENS):
            yield _case("ddp", "GPT-2 small", context, 1, "one GPU", tokens // 2)
            yield _case("ddp", "GPT-2 small", context, 2, "ddp", tokens)


def _fsdp(_: float) -> Iterator[Case]:
    for context in (1024, 4096):
        for way in ("ddp", "fsdp", "fsdp, float32"):
            yield _case("fsdp", "GPT-2 medium", context, 2, way, 2 * TOKENS)


def _muon(_: float) -> Iterator[Case]:
    """Muon orthogonalizes once a step: after one micro-batch, and after as many as the recipe."""
    for n_gpus in (2, 4):
        for tokens, way in product((n_gpus * TOKENS, RECIPE_TOKENS), ("fsdp", "fsdp, muon")):
            yield _case("muon", "GPT-2 medium", 1024, n_gpus, way, tokens)


def _large(_: float) -> Iterator[Case]:
    """Models too large for one GPU, and the effect of activation checkpointing."""
    for checkpointing in ("none", "selective", "full"):
        yield _case("large", "GPT-2 xl", 1024, 2, f"fsdp, {checkpointing}", 2 * 16_384)
    yield _case("large", "7B", 4096, 2, "fsdp, full", 16_384)


def _context(_: float) -> Iterator[Case]:
    """One sequence on one GPU, and sharded over two."""
    for context, mask, n_gpus in product((16_384, 65_536), MASKS, (1, 2)):
        yield long_case("context", context, mask, n_gpus, "none")


def _long_contexts(card: float) -> Iterator[Case]:
    """Long contexts on two GPUs; on one GPU, the lengths from which others are predicted."""
    for mask, context in product(MASKS, (65_536, 262_144, 1_048_576)):
        alone = long_case("long", context, mask, 1, "selective")
        # a dense step on a million tokens takes minutes
        if context < 2**20 or (mask != "dense" and alone.fits(card)):
            yield alone
        yield long_case("long", context, mask, 2, "selective")


def _longest(card: float) -> Iterator[Case]:
    """Longest contexts that fit, in short documents: these take the memory of one long one."""
    for n_gpus in (1, 2):
        lengths = (long_case("longest", n, "dense", n_gpus, "full") for n in count(UNIT, UNIT))
        *_, longest = next(lengths), *takewhile(lambda case: case.fits(card), lengths)
        yield replace(longest, document=DOCUMENT)


PARTS: dict[str, Callable[[float], Iterator[Case]]] = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "muon": _muon,
    "large": _large,
    "context": _context,
    "long": _long_contexts,
    "longest": _longest,
}
LONG = ("context", "long", "longest")  # parts with one sequence per step


def case_of(row: Mapping[str, Any]) -> Case:
    """Case of a row of results, without its documents."""
    if row["part"] in LONG:
        mask, checkpointing = row["way"].split(", ")
        return long_case(row["part"], row["context_length"], mask, row["n_gpus"], checkpointing)
    return next(case for case in PARTS[row["part"]](0) if case.row.items() <= row.items())


def long_case(part: str, context: int, mask: str, n_gpus: int, checkpointing: str) -> Case:
    """One sequence per step of GPT-2 small with rotary positions, which need no learned table."""
    model, way = "GPT-2 small, rotary", f"{mask}, {checkpointing}"
    return _case(part, model, context, n_gpus, way, context, MASKS[mask], shared_by=n_gpus)


def _case(
    part: str, model: str, context: int, n_gpus: int, way: str, batch_tokens: int,
    mask: MaskConfig = MASKS["dense"], shared_by: int = 1,
) -> Case:  # fmt: skip
    parallelism, _, detail = way.partition(", ")
    size = max(1, min(TOKENS, batch_tokens // n_gpus) // context)
    checkpointing = detail if detail in ("selective", "full") else "none"
    config = TrainConfig(
        model=replace(ModelConfig(context_length=context, mask=mask), **SHAPES[model]),
        data=DataConfig(path="unused"),
        optim=OptimConfig(
            name="muon" if detail == "muon" else "adamw",
            max_steps=1,
            batch_tokens=batch_tokens,
            micro_batch_size=size,
        ),
        run=RunConfig(out_dir="unused", activation_checkpointing=checkpointing),
        parallel=ParallelConfig(
            mode="fsdp" if parallelism == "fsdp" else "ddp",
            context=shared_by,
            gather_dtype="float32" if detail == "float32" else "auto",
        ),
    )
    return Case(part=part, model=model, way=way, n_gpus=n_gpus, config=config)
