"""The stages of Path-X and Path-256: what each begins with, and the images that it needs.

    path64 -> pathx -> pathx_dense
    path64_butterfly -> pathx_butterfly -> path256_butterfly

Table 6 of the FlashAttention paper (arXiv 2205.14135); its appendix E.3 begins with Path-64, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.lra.request import Request
from scripts.classifier_runs import ClassifierRun, is_finished

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

SHORT_EXAMPLES = {"train": 40_000, "val": 500, "test": 500}
"""Of the sets of a curriculum, in which nothing is scored."""

REQUESTS = (
    *(Request(task=task) for task in ("pathfinder64", "pathx", "pathfinder256")),
    *(
        Request(
            task=task, contour_length=length, distractors_of=distractors, examples=SHORT_EXAMPLES
        )
        for task, length, distractors in (
            *(("pathfinder64", length, 0) for length in (2, 4, 7)),
            *(("pathfinder64", length, 14) for length in (3, 5, 7, 10)),
            *(("pathx", length, 0) for length in (2, 4)),
            *(("pathx", length, 14) for length in (4, 7)),
            *(("pathfinder256", length, 0) for length in (2, 4)),
            *(("pathfinder256", length, 14) for length in (4, 7)),
        )
    ),
)
"""All sets of images that the stages need; a folder is named by its request."""

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


def images_needed(runs: Sequence[StageRun]) -> list[tuple[Path, Request]]:
    """The folders of images that some runs read, each with what to prepare there.

    Raises:
        ValueError: none of REQUESTS makes a folder of that name.
    """
    requests = {request.name: request for request in REQUESTS}
    folders: dict[Path, Request] = {}
    for run in runs:
        for path in run.config.data.training_paths:
            folder = Path(path)
            if folder.name not in requests:
                raise ValueError(
                    f"{folder} is none of the sets that can be prepared here: "
                    f"{', '.join(sorted(requests))}"
                )
            folders[folder] = requests[folder.name]
    return list(folders.items())
