"""Which GPT configuration fits which GPU, as `train.py CONFIG --dry-run` estimates it."""

from pathlib import Path

from evaluation.markdown import dict_table
from model.flops import hours_at
from training.dry_run import (
    CLOCKS,
    GIB,
    SPARE,
    UTILISATION,
    duration,
    estimate,
    fitting_micro_batch,
)
from training.language.config import TrainConfig, load_config
from training.language.stages import flops_per_token

CARDS = (24, 40, 80)  # GiB
TOKENS = 1e9


def fits_table() -> str:
    """A row for each shipped GPT: memory, micro-batches that fit, and time for a billion tokens."""
    rows = []
    files = [*Path("configs").glob("long_*.yaml"), *Path("configs/paper").glob("*.yaml")]
    configs = {file: load_config([str(file)]) for file in files}
    for file, config in sorted(configs.items(), key=lambda item: _order(item[1])):
        model, size = config.model, config.optim.micro_batch_size
        flops = TOKENS * flops_per_token(model, config.stages, causal=True)
        fits = {
            f"largest micro-batch, {card} GB": str(
                fitting_micro_batch(config, card * GIB * SPARE, 1)
            )
            for card in CARDS
        }
        times = {
            f"1B tokens, {card}": duration(hours_at(flops, name, UTILISATION))
            for card, name in CLOCKS.items()
        }
        memory = estimate(config, size, 1).total / GIB
        rows.append(
            {
                "configuration": f"[{file.stem}](../{file})",
                "context": " to ".join(f"{context:,}" for context in model.contexts),
                "memory as shipped": f"{memory:.0f} GiB, {size} sequences",
                **fits,
                **times,
            }
        )
    return dict_table(rows)


def _order(config: TrainConfig) -> tuple[bool, int, int]:
    """Modern models before GPT-2's, small ones before large ones, short contexts first."""
    model = config.model
    return model.norm == "layer_norm", model.n_layer * model.n_embd, model.context_length
