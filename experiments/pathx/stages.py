"""The stages of Path-X and Path-256, each begun with the best weights of the one before.

    path64 -> pathx -> pathx_dense
    path64_butterfly -> pathx_butterfly -> path256_butterfly

Table 6 of the FlashAttention paper (arXiv 2205.14135); its appendix E.3 begins with Path-64, too.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from experiments.classifier_runs import ClassifierRun, is_finished
from experiments.sweep import refuse_overrides

CONFIGS = Path("configs/pathx")

BEFORE: dict[str, str | None] = {
    "path64": None,
    "pathx": "path64",
    "pathx_dense": "pathx",
    "path64_butterfly": None,
    "pathx_butterfly": "path64_butterfly",
    "path256_butterfly": "pathx_butterfly",
}
"""The stages, each with the one before."""

SET_HERE = {"run.seed": "--seeds", "run.out_dir": "--out", "run.init_from": "--out"}


def make_runs(
    stages: Sequence[str], seeds: Sequence[int], out: Path, overrides: Sequence[str] = ()
) -> list[ClassifierRun]:
    """The runs of some stages of BEFORE with each seed, OUT/STAGE_seedN, earlier stages first.

    Raises:
        ValueError: a stage begins with one that is neither named nor finished, `overrides`,
            key=value, set what is set here, or a folder holds a run with other settings.
    """
    refuse_overrides(overrides, SET_HERE)
    runs = []
    for seed, stage in product(dict.fromkeys(seeds), (s for s in BEFORE if s in stages)):
        name = BEFORE[stage]
        before = None if name is None else out / f"{name}_seed{seed}"
        if before is not None and name not in stages and not is_finished(before):
            raise ValueError(
                f"{stage} begins with the weights of {name}, and {before} is not finished: add "
                f"{name} to --stages"
            )
        folder, settings = out / f"{stage}_seed{seed}", (str(CONFIGS / f"{stage}.yaml"), *overrides)
        runs.append(ClassifierRun(seed=seed, folder=folder, settings=settings, before=before))
    for run in runs:
        run.check_folder()
    return runs
