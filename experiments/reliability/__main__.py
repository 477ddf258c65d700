"""Test the promises of docs/reliability.md with random faults: twenty minutes on two cores.

python -m experiments.reliability [--share 0.1] [--out docs/results/reliability.json]
"""

from pathlib import Path

from experiments.harness import Command, measure_rows

command = Command(__name__)
command.add("--share", type=float, default=1.0, help="share of the full number of tries")
command.read(out="docs/results/reliability.json")

import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial

from evaluation.results import Row
from experiments.reliability.damage import cuts, flips
from experiments.reliability.faults import (
    changed_data,
    changed_records,
    missing_checkpoints,
    ruined_weights,
)
from experiments.reliability.hostile import hostile
from experiments.reliability.kills import kills
from experiments.reliability.stops import stops
from experiments.reliability.table import reliability_table
from experiments.reliability.trust import absurd_sizes, other_weights, secrets, wrong_types
from experiments.reliability.world import World


def parts(share: float = 1.0) -> dict[str, Callable[[World], Row]]:
    """Fault tests by name, with a share of the full number of tries."""

    def times(n: int) -> int:
        return max(1, round(share * n))

    return {
        "kills of one": partial(kills, n=times(200), world_size=1),
        "kills of two": partial(kills, n=times(200), world_size=2),
        "flips": partial(flips, n=times(200)),
        "cuts": partial(cuts, n=times(50)),
        "hostile": hostile,
        "secrets": partial(secrets, n=times(600)),
        "wrong types": partial(wrong_types, n=times(600)),
        "absurd sizes": partial(absurd_sizes, n=times(400)),
        "other weights": partial(other_weights, n=times(45)),
        "stops of one": partial(stops, world_size=1),
        "stops of two": partial(stops, world_size=2),
        "missing checkpoints": missing_checkpoints,
        "changed records": changed_records,
        "changed data": partial(changed_data, n=times(40)),
        "ruined weights": partial(ruined_weights, n=times(40)),
    }


@command.main
def main(args: Namespace) -> None:
    """Run the command."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "world")

        def stage(part: Callable[[World], Row]) -> Iterator[list[Row]]:
            row = part(world)
            print(row, flush=True)
            yield [row]

        stages = [partial(stage, part) for part in parts(args.share).values()]
        measure_rows(args, stages, reliability_table)
