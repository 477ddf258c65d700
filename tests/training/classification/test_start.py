"""Initial weights of runs that predict labels or tokens, and the settings a resume must share."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.reader import read_config
from model.classifier import Classifier
from model.token_predictor import TokenPredictor
from tests.experiments.tiny_lra import TINY, make_tasks
from training.classification.config import ClassifyConfig
from training.classification.scoring import save_best
from training.classification.start import AnyModel, load_initial_weights, make_model, must_match

OBJECTIVES = ("labels", "masked", "causal")


def build(*overrides: str, seed: int = 0, objective: str = "labels") -> Any:
    torch.manual_seed(seed)
    arguments = ["configs/lra/image.yaml", *TINY, f"objective={objective}", *overrides]
    return make_model(read_config(ClassifyConfig, arguments))


def saved(folder: Path, model: AnyModel) -> Path:
    folder.mkdir()
    save_best(folder, model, 3, 0.5)
    return folder


def same(one: torch.nn.Module, other: torch.nn.Module, *, but: tuple[str, ...] = ()) -> bool:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    return all(torch.equal(first[x], second[x]) for x in first if not x.startswith(but or " "))


def test_each_objective_builds_its_model():
    assert isinstance(build(), Classifier)
    masked, causal = (build(objective=name) for name in ("masked", "causal"))
    assert isinstance(masked, TokenPredictor) and masked.mask_token is not None
    assert isinstance(causal, TokenPredictor) and causal.mask_token is None


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_same_objective_loads_all_weights(tmp_path: Path, objective: str, pooling: str):
    first, second = (
        build(f"model.pooling={pooling}", seed=seed, objective=objective) for seed in (1, 2)
    )
    assert not same(first, second)
    load_initial_weights(saved(tmp_path / "run", first), second)
    assert same(first, second)


@pytest.mark.parametrize("objective", OBJECTIVES[1:])
def test_labels_load_all_but_the_head_from_a_token_predictor(tmp_path: Path, objective: str):
    """The heads may differ in classes, documents and kind of pooling."""
    head = ("head_in", "head_out")
    first = build("model.pooling=max", "model.n_classes=2", seed=1, objective=objective)
    second, drawn = (build("model.pooling=mean_max", seed=2) for _ in range(2))
    load_initial_weights(saved(tmp_path / "run", first), second)
    assert same(second.head_in, drawn.head_in) and same(second.head_out, drawn.head_out)
    for name, weight in first.classifier.state_dict().items():
        assert name.startswith(head) or torch.equal(second.state_dict()[name], weight)
    assert all(p.requires_grad for p in second.parameters())


@pytest.mark.parametrize("objectives", [("masked", "labels"), ("masked", "masked")])
def test_learned_positions_are_upsampled_to_a_larger_grid(
    tmp_path: Path, objectives: tuple[str, str]
):
    first, second = build(seed=1, objective=objectives[0]), build(
        "model.grid_width=16", "model.context_length=256", seed=2, objective=objectives[1]
    )  # fmt: skip
    load_initial_weights(saved(tmp_path / "run", first), second)
    grown = second.pos_emb if objectives[1] == "labels" else second.classifier.pos_emb
    small = first.classifier.pos_emb.view(8, 8, -1)
    assert torch.equal(grown.view(16, 16, -1)[::2, 1::2], small)


@pytest.mark.parametrize(
    ("first", "second", "overrides", "differing"),
    [
        ("masked", "labels", ["model.n_inner=8"], r"blocks.0.mlp.fc_in.weight"),
        ("causal", "labels", ["model.n_layer=2"], r"blocks.1.attn"),
        ("masked", "labels", ["model.pooling=cls"], r"cls differ"),
        ("masked", "masked", ["model.vocab_size=300"], r"tok_emb.weight"),
        ("masked", "causal", [], r"mask_token differ"),
        ("labels", "masked", [], r"tok_emb.weight, tokens_out.bias, tokens_out.weight differ"),
        ("labels", "labels", ["model.n_classes=3"], r"head_out.bias, head_out.weight differ"),
    ],
)
def test_any_other_difference_is_refused(
    tmp_path: Path, first: str, second: str, overrides: list[str], differing: str
):
    run = saved(tmp_path / "run", build(objective=first))
    with pytest.raises(ValueError, match=rf"has another model: .*{differing}") as error:
        load_initial_weights(run, build(*overrides, objective=second))
    assert "its objective unless this run has objective=labels" in str(error.value)


def test_weights_of_a_gpt_are_refused(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(Path("configs/quickstart.yaml").read_text())
    with pytest.raises(ValueError, match="but is one of a GPT"):
        load_initial_weights(tmp_path, build())


def test_must_match_includes_the_objective(tmp_path: Path):
    data = make_tasks(tmp_path, "image") / "image"

    def settings(*overrides: str) -> dict[str, Any]:
        arguments = ["configs/lra/image.yaml", *TINY, f"data.path={data}", *overrides]
        return must_match(read_config(ClassifyConfig, arguments))

    labels, masked = settings(), settings("objective=masked")
    assert {k for k in labels if labels[k] != masked[k]} == {"objective"}
    other = settings("objective=masked", "hidden_share=0.25")
    assert {k for k in other if other[k] != masked[k]} == {"hidden_share"}
