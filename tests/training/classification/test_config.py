"""Valid and invalid configurations of a classifier's run."""

import pytest

from configs.reader import ConfigError, read_config, to_yaml
from training.classification.config import ClassifyConfig


def configured(*overrides: str) -> ClassifyConfig:
    return read_config(ClassifyConfig, ["configs/lra/image.yaml", *overrides])


def test_the_default_objective_is_labels(tmp_path):
    config = configured()
    assert (config.objective, config.hidden_share) == ("labels", 0.5)
    masked = configured("objective=masked", "hidden_share=0.15")
    assert (masked.objective, masked.hidden_share) == ("masked", 0.15)
    (tmp_path / "config.yaml").write_text(to_yaml(masked))
    assert read_config(ClassifyConfig, [str(tmp_path / "config.yaml")]) == masked


def test_masked_objective_works_with_padded_zeros():
    assert configured("objective=masked", "data.zeros=padding").objective == "masked"


def phase_of(context_length: int | None = None, **others: float) -> str:
    settings = {"context_length": context_length} if context_length else {}
    values = ", ".join(f"{name}: {value}" for name, value in (settings | others).items())
    return f"data.phases=[{{paths: [x], steps: 1, {values}}}]"


def test_phases_may_have_a_shorter_context():
    shorter = read_config(ClassifyConfig, ["configs/lra/text.yaml", phase_of(4096)])
    assert shorter.data.phases[0].context_length == 4096
    assert configured(phase_of(1024), "data.zeros=padding", "model.context_length=700")


def test_phases_may_set_a_share_of_zeros():
    assert configured(phase_of(700, zeros_share=0.3)).data.phases[0].zeros_share == 0.3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([phase_of(9)], r"context_length=9 has no effect with data.zeros=tokens"),
        (
            [phase_of(1025), "data.zeros=padding"],
            r"data.phases: context_length=1025 must be at most 1024, the number of positions",
        ),
        (
            [phase_of(64), "data.zeros=padding", "model.mask.pattern=butterfly"],
            r"context_length=64 needs model.mask.pattern=dense: the butterfly mask .*=1024 tokens",
        ),
        (
            [phase_of(zeros_share=0.5)],
            r"zeros_share=0.5 needs .* a context_length of its phase",
        ),
        (
            [phase_of(9, zeros_share=0.5), "data.zeros=padding"],
            r"zeros_share=0.5 needs images with data.zeros=tokens",
        ),
        ([phase_of(9, zeros_share=0)], r"zeros_share=0.0 must lie between 0 and 1"),
        ([phase_of(9, zeros_share=1)], r"zeros_share=1.0 must lie between 0 and 1"),
        (["objective=tokens"], r"objective.*tokens"),
        (["objective=masked", "hidden_share=0"], r"hidden_share=0.0 must be above 0 and below 1"),
        (["objective=masked", "hidden_share=1"], r"hidden_share=1.0 must be above 0 and below 1"),
        (["objective=masked", "hidden_share=nan"], r"hidden_share=nan must be above 0 and below 1"),
        (["hidden_share=0.4"], r"hidden_share=0.4 has no effect with objective=labels"),
        (
            ["objective=causal", "hidden_share=0.4"],
            r"hidden_share=0.4 has no effect with objective=causal",
        ),
        (["objective=causal", "data.zeros=padding"], r"objective=causal .* data.zeros=padding"),
        (
            ["objective=causal", phase_of(9, zeros_share=0.5)],
            r"objective=causal .* zeros_share of a phase, hides its position",
        ),
    ],
)
def test_invalid_combinations_are_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        configured(*overrides)


def test_missing_data_names_the_commands_that_prepare_it(tmp_path):
    folders = [str(tmp_path / name) for name in ("image", "pathfinder32-length2")]
    alone = configured(f"data.path={folders[0]}")
    command = "python -m scripts.prepare_lra"
    with pytest.raises(FileNotFoundError) as error:
        alone.check_prepared()
    assert str(error.value) == (
        f"data.path={folders[0]} is not prepared; make it with:\n  {command} image --out {tmp_path}"
    )
    phases = f"data.phases=[{{paths: [{', '.join(folders)}], steps: 1}}]"
    with pytest.raises(FileNotFoundError) as error:
        configured(f"data.path={folders[0]}", phases).check_prepared()
    assert str(error.value).splitlines() == [
        "2 folders of data.path and data.phases are not prepared; make them with:",
        f"  {command} image --out {tmp_path}",
        f"  {command} pathfinder32 --contour-length 2 --out {tmp_path}",
    ]
