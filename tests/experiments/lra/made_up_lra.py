"""Folders of runs on Long Range Arena that look finished."""

import json
from pathlib import Path

from configs import to_yaml
from experiments.lra.jobs import make_jobs


def make_up(out: Path, task: str, attention: str, seed: int, accuracy: float, **options) -> Path:
    """The folder of a finished run."""
    steps = ("optim.warmup_steps=0", "optim.max_steps=5000", "data.phases=[]")
    overrides = (*steps, *options.get("overrides", ()))
    (job,) = make_jobs([task], [attention], [seed], data=out, out=out, overrides=overrides)
    steps = job.config.optim.max_steps
    job.folder.mkdir(parents=True)
    (job.folder / "config.yaml").write_text(to_yaml(job.config))
    records = [
        {"step": step, "examples": 32 * step, "val_loss": 1.0, "val_accuracy": share,
         "gpu_hours": step / 1e4}
        for step, share in ((steps // 2, 0.4), (steps, 0.5))
    ]  # fmt: skip
    records[-1] |= {
        "best_step": steps, "best_val_accuracy": 0.5, "test_loss": 1.5, "test_accuracy": accuracy,
        "test_examples": options.get("n", 2000),
    }  # fmt: skip
    lines = [json.dumps(record) + "\n" for record in records]
    (job.folder / "metrics.jsonl").write_text("".join(lines))
    return job.folder
