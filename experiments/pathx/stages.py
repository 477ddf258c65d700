"""The stages of Path-X and Path-256, and what each begins with.

    path64 -> pathx -> pathx_dense
    path64_butterfly -> pathx_butterfly -> path256_butterfly

Table 6 of the FlashAttention paper (arXiv 2205.14135); its appendix E.3 begins with Path-64, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.classifier_runs import ClassifierRun, is_finished

CONFIGS = Path("configs/pathx")

BEFORE: dict[str, str | None] = {
    "path64": None,
    "pathx": "path64",
    "pathx_dense": "pathx",
    "path64_butterfly": None,
    "pathx_butterfly": "path64_butterfly",
    "path256_butterfly": "pathx_butterfly",
}
"""The stages, each with the one whose best weights it begins with."""

SET_HERE = {"run.seed": "--seeds", "run.out_dir": "--out", "run.init_from": "--out"}


@dataclass(frozen=True, kw_only=True)
class StageRun(ClassifierRun):
    """A stage with a seed."""

    stage: str
    seed: int


def run_folder(out: Path, stage: str, seed: int) -> Path:
    """Where a stage with a seed is trained."""
    return out / f"{stage}_seed{seed}"


def make_runs(
    stages: Sequence[str], seeds: Sequence[int], out: Path, overrides: Sequence[str] = ()
) -> list[StageRun]:
    """The runs of some stages, each after the one that it begins with.

    Args:
        stages: of BEFORE.
        seeds: each gives all stages once.
        out: folder of the runs.
        overrides: key=value for all runs.

    Raises:
        ValueError: a stage begins with one that is neither named nor finished, `overrides` set what
            is set here, or a folder holds a run with other settings.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key in SET_HERE:
            raise ValueError(f"--set {override}: {key} follows from {SET_HERE[key]}, set that")
    runs = []
    for seed in dict.fromkeys(seeds):
        for stage in sorted(set(stages), key=list(BEFORE).index):
            folder, before = run_folder(out, stage, seed), BEFORE[stage]
            arguments = [str(CONFIGS / f"{stage}.yaml"), *overrides]
            arguments += [f"run.seed={seed}", f"run.out_dir={folder}"]
            if before is not None:
                source = run_folder(out, before, seed)
                if before not in stages and not is_finished(source):
                    raise ValueError(
                        f"{stage} begins with the weights of {before}, and {source} is not "
                        f"finished: add {before} to --stages"
                    )
                arguments.append(f"run.init_from={source}")
            runs.append(StageRun(stage=stage, seed=seed, folder=folder, arguments=tuple(arguments)))
    for run in runs:
        run.check_folder()
    return runs
