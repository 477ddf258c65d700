"""Variants of the classifier of dots."""

from pathlib import Path

from experiments.reliability.dots import SIZE


def zeros_come_in(folder: Path) -> list[str]:
    """Overrides of `make_config(folder)`: phases with some of the zero pixels, then all pixels."""
    room = SIZE * SIZE
    phases = (
        f"{{paths: ['{folder / 'dots'}'], steps: 5, zeros_share: {share}, "
        f"context_length: {room - 8}}}"
        for share in (0.2, 0.7)
    )
    tokens = ["data.zeros=tokens", f"model.context_length={room}"]
    return [*tokens, f"data.phases=[{', '.join(phases)}]"]
