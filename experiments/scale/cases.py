"""Which steps are measured: of what model, on how many GPUs, and how they share it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product, takewhile
from typing import Any

from data.text.config import DataConfig
from model.config import GPT2_SIZES, MaskConfig, ModelConfig
from training.config import ParallelConfig, RunConfig
from training.dry_run import GIB, estimate
from training.language.config import OptimConfig, TrainConfig

MASKS = {"dense": MaskConfig(), "butterfly": MaskConfig(pattern="butterfly")}
TOKENS = 32_768  # that a GPU takes through the model at a time
DOCUMENT = 16_384
UNIT = 65_536  # of the longest contexts
FILLED = 0.9  # of a card
RECIPE_TOKENS = 524_288  # of a step, as GPT-2's recipe has it

SHAPES: dict[str, dict[str, Any]] = {
    **{f"GPT-2 {size}": shape for size, shape in GPT2_SIZES.items()},
    "GPT-2 small, rotary": {**GPT2_SIZES["small"], "positions": "rotary"},
    # as Llama 2's: 6.6B parameters
    "7B": {
        **{"n_layer": 32, "n_head": 32, "n_embd": 4096, "positions": "rotary", "bias": False},
        **{"norm": "rms_norm", "mlp": "swiglu"},
    },
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of training to be measured."""

    part: str
    """What it is measured for."""
    model: str
    way: str
    """Who holds weights, and keeps which activations, for readers."""
    n_gpus: int
    config: TrainConfig
    document: int | None = None
    """Tokens of a document, of which none sees another; None: each sequence is one."""

    @property
    def name(self) -> str:
        """What tells it from the others of its part."""
        return ", ".join(str(value) for value in self.row.values())

    @property
    def row(self) -> dict[str, Any]:
        """The first columns of its row in results."""
        config = self.config
        return {
            **{"part": self.part, "model": self.model, "way": self.way, "n_gpus": self.n_gpus},
            "context_length": config.model.context_length,
            "batch_tokens": config.optim.batch_tokens,
            "micro_batch_size": config.optim.micro_batch_size,
        }

    @property
    def told_gib(self) -> float:
        """What `train.py --dry-run` tells of a GPU's memory, GiB."""
        config = self.config
        return estimate(config, config.optim.micro_batch_size, self.n_gpus).total / GIB

    def fits(self, card: float) -> bool:
        """Whether that leaves room on a GPU of `card` bytes."""
        return self.told_gib * GIB <= FILLED * card


def cases(parts: Sequence[str], card: float) -> Iterator[Case]:
    """Cases of these parts, compared with each other side by side, for GPUs of `card` bytes."""
    for part in parts:
        yield from PARTS[part](card)


def _ddp(_: float) -> Iterator[Case]:
    """Gradients that are exchanged after each micro-batch, and after as many as the recipe has."""
    for context in (1024, 4096, 16_384):
        for tokens in (2 * TOKENS, RECIPE_TOKENS):
            yield _case("ddp", "GPT-2 small", context, 1, "one GPU", tokens // 2)
            yield _case("ddp", "GPT-2 small", context, 2, "ddp", tokens)


def _fsdp(_: float) -> Iterator[Case]:
    for context in (1024, 4096):
        for way in ("ddp", "fsdp", "fsdp, float32"):
            yield _case("fsdp", "GPT-2 medium", context, 2, way, 2 * TOKENS)


def _large(_: float) -> Iterator[Case]:
    """What one GPU does not hold, and what keeping less saves and costs."""
    for keeps in ("none", "selective", "full"):
        yield _case("large", "GPT-2 xl", 1024, 2, f"fsdp, {keeps}", 2 * 16_384)
    yield _case("large", "7B", 4096, 2, "fsdp, full", 16_384)


def _context(_: float) -> Iterator[Case]:
    """One sequence on one GPU, and shared by two."""
    for context, mask, n_gpus in product((16_384, 65_536), MASKS, (1, 2)):
        yield long_case("context", context, mask, n_gpus, "none")


def _long_contexts(card: float) -> Iterator[Case]:
    """Up to what two GPUs reach; on one, lengths from which the others are foretold."""
    for mask, context in product(MASKS, (65_536, 262_144, 1_048_576)):
        alone = long_case("long", context, mask, 1, "selective")
        # a dense step of a million takes minutes
        if context < 2**20 or (mask != "dense" and alone.fits(card)):
            yield alone
        yield long_case("long", context, mask, 2, "selective")


def _longest(card: float) -> Iterator[Case]:
    """The longest contexts that fit: of short documents, as their memory is that of one."""
    for n_gpus in (1, 2):
        lengths = (long_case("longest", n, "dense", n_gpus, "full") for n in count(UNIT, UNIT))
        *_, longest = next(lengths), *takewhile(lambda case: case.fits(card), lengths)
        yield replace(longest, document=DOCUMENT)


PARTS: dict[str, Callable[[float], Iterator[Case]]] = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "large": _large,
    "context": _context,
    "long": _long_contexts,
    "longest": _longest,
}
LONG = ("context", "long", "longest")  # of one sequence a step


def case_of(row: Mapping[str, Any]) -> Case:
    """The case that a row of results is of, but for its documents."""
    if row["part"] in LONG:
        mask, keeps = row["way"].split(", ")
        return long_case(row["part"], row["context_length"], mask, row["n_gpus"], keeps)
    return next(case for case in PARTS[row["part"]](0) if case.row.items() <= row.items())


def long_case(part: str, context: int, mask: str, n_gpus: int, keeps: str) -> Case:
    """One sequence a step of GPT-2 small with rotary positions, of which no table is learned."""
    model, way = "GPT-2 small, rotary", f"{mask}, {keeps}"
    return _case(part, model, context, n_gpus, way, context, MASKS[mask], shared_by=n_gpus)


def _case(
    part: str, model: str, context: int, n_gpus: int, way: str, batch_tokens: int,
    mask: MaskConfig = MASKS["dense"], shared_by: int = 1,
) -> Case:  # fmt: skip
    who, _, how = way.partition(", ")
    size = max(1, min(TOKENS, batch_tokens // n_gpus) // context)
    keeps = how if how in ("selective", "full") else "none"
    config = TrainConfig(
        model=replace(ModelConfig(context_length=context, mask=mask), **SHAPES[model]),
        data=DataConfig(path="unused"),
        optim=OptimConfig(max_steps=1, batch_tokens=batch_tokens, micro_batch_size=size),
        run=RunConfig(out_dir="unused", activation_checkpointing=keeps),
        parallel=ParallelConfig(
            mode="fsdp" if who == "fsdp" else "ddp",
            context=shared_by,
            gather_dtype="float32" if how == "float32" else "auto",
        ),
    )
    return Case(part=part, model=model, way=way, n_gpus=n_gpus, config=config)
