"""The stages of Path-X and Path-256, each begun with the best weights of the one before.

    path64 -> pathx -> pathx_dense
    path64_butterfly -> pathx_butterfly -> path256_butterfly

Table 6 of the FlashAttention paper (arXiv 2205.14135); its appendix E.3 begins with Path-64, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.classifier_runs import ClassifierRun, is_finished, refuse_overrides

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


@dataclass(frozen=True, kw_only=True)
class StageRun(ClassifierRun):
    """A stage with a seed."""

    stage: str


def make_runs(
    stages: Sequence[str], seeds: Sequence[int], out: Path, overrides: Sequence[str] = ()
) -> list[StageRun]:
    """The runs of some stages, each after the one that it begins with.

    Args:
        stages: of BEFORE.
        seeds: each gives all stages once.
        out: folder of the runs, STAGE_seedN.
        overrides: key=value for all runs.

    Raises:
        ValueError: a stage begins with one that is neither named nor finished, `overrides` set what
            is set here, or a folder holds a run with other settings.
    """
    refuse_overrides(overrides, SET_HERE)
    runs = []
    for seed in dict.fromkeys(seeds):
        for stage in (stage for stage in BEFORE if stage in stages):
            folder, before = out / f"{stage}_seed{seed}", BEFORE[stage]
            source = None if before is None else out / f"{before}_seed{seed}"
            if source is not None and before not in stages and not is_finished(source):
                raise ValueError(
                    f"{stage} begins with the weights of {before}, and {source} is not "
                    f"finished: add {before} to --stages"
                )
            own = [f"run.seed={seed}", f"run.out_dir={folder}"]
            own += [] if source is None else [f"run.init_from={source}"]
            runs.append(
                StageRun(
                    stage=stage,
                    seed=seed,
                    folder=folder,
                    arguments=(str(CONFIGS / f"{stage}.yaml"), *overrides, *own),
                    needs=frozenset() if source is None else frozenset({source.name}),
                )
            )
    for run in runs:
        run.check_folder()
    return runs
