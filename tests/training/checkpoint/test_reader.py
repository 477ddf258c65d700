"""Checkpoints are restored bit for bit, and damage is detected."""

import json
import pickle
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.mask_config import MaskConfig
from tests.training.checkpoint.small import ALONE, MUST_MATCH, make, save, take_steps
from training.checkpoint import reader
from training.checkpoint.choice import newest_intact, rename_damaged
from training.checkpoint.contents import Progress, save_model
from training.checkpoint.files import SUMS, write_sums
from training.checkpoint.folders import checkpoint_folder, latest_checkpoint
from training.checkpoint.reader import Checkpoint
from training.config import AdamWConfig


def test_resumes_bit_for_bit(tmp_path):
    model, optimizer = make(0)
    take_steps(model, optimizer, 3)
    folder = save(tmp_path, 3, model, optimizer)
    take_steps(model, optimizer, 3)

    again, again_optimizer = make(1)
    checkpoint = Checkpoint.open(folder)
    checkpoint.restore(again, again_optimizer, MUST_MATCH, ALONE)
    assert checkpoint.progress == Progress(step=3, samples=24, tokens=192, gpu_hours=3 / 7)
    take_steps(again, again_optimizer, 3)  # the inputs come from the restored random state
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("saved_as_tensor", [False, True])
def test_the_learning_rate_may_be_a_tensor_on_one_side(tmp_path, saved_as_tensor):
    """CUDA graphs need a tensor learning rate: such a run must resume without graphs, and back."""

    def make_one(seed, as_tensor):
        model, optimizer = make(seed)
        if as_tensor:
            optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        return model, optimizer

    model, optimizer = make_one(0, saved_as_tensor)
    take_steps(model, optimizer, 3)
    folder = save(tmp_path, 3, model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor) == saved_as_tensor  # unchanged by the save
    take_steps(model, optimizer, 3)
    again, again_optimizer = make_one(1, not saved_as_tensor)
    rate = again_optimizer.param_groups[0]["lr"]
    Checkpoint.open(folder).restore(again, again_optimizer, MUST_MATCH, ALONE)
    assert again_optimizer.param_groups[0]["lr"] is rate  # a captured step reads this tensor
    take_steps(again, again_optimizer, 3)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_optimizer_settings_come_from_the_new_run(tmp_path):
    model, optimizer = make(0)
    take_steps(model, optimizer, 1)
    folder = save(tmp_path, 1, model, optimizer)
    again, again_optimizer = make(1)
    again_optimizer.param_groups[0].update(weight_decay=0.5, betas=(0.1, 0.2))
    Checkpoint.open(folder).restore(again, again_optimizer, MUST_MATCH, ALONE)
    group = again_optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.1, 0.2))


def test_weights_are_read_without_the_optimizer(tmp_path):
    model, optimizer = make(0)
    take_steps(model, optimizer, 1)
    weights = Checkpoint.open(save(tmp_path, 1, model, optimizer)).weights()
    assert weights.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(weights[name], value)


def test_a_checkpoint_older_than_a_setting_resumes_with_its_default(tmp_path):
    model, optimizer = make(0)
    take_steps(model, optimizer, 1)
    folder = save(tmp_path / "run", 1, model, optimizer)
    Checkpoint.open(folder).restore(model, optimizer, MUST_MATCH | {"model.bias": True}, ALONE)
    with pytest.raises(ValueError, match="model.bias is True there and False here"):
        Checkpoint.open(folder).restore(model, optimizer, MUST_MATCH | {"model.bias": False}, ALONE)


def test_a_checkpoint_older_than_a_setting_of_a_section_resumes(tmp_path):
    model, optimizer = make(0)
    take_steps(model, optimizer, 1)
    mask = asdict(MaskConfig())
    older = {"model.mask": {name: mask[name] for name in ("pattern", "block_size")}}
    folder = save(tmp_path / "run", 1, model, optimizer, must_match=MUST_MATCH | older)
    wanted = MUST_MATCH | {"model.mask": mask, "model.n_kv_head": None, "optim.name": "adamw"}
    Checkpoint.open(folder).restore(model, optimizer, wanted, ALONE)
    changed = {"model.mask": mask | {"stride_blocks": 4}}
    with pytest.raises(ValueError, match=r"model\.mask\.stride_blocks is 8 there and 4 here"):
        Checkpoint.open(folder).restore(model, optimizer, wanted | changed, ALONE)
    with pytest.raises(ValueError, match=r"optim\.name is 'adamw' there and 'muon' here"):
        Checkpoint.open(folder).restore(model, optimizer, wanted | {"optim.name": "muon"}, ALONE)


def test_a_run_with_a_removed_setting_resumes_unless_its_weights_need_it(tmp_path):
    model, optimizer = make(0)
    take_steps(model, optimizer, 1)
    for step, removed in enumerate(({"model.zero_init": True}, {"model.smear": False}), start=1):
        folder = save(tmp_path / "run", step, model, optimizer, must_match=MUST_MATCH | removed)
        Checkpoint.open(folder).restore(model, optimizer, MUST_MATCH, ALONE)
    smeared = MUST_MATCH | {"model.smear": True}
    folder = save(tmp_path / "run", 3, model, optimizer, must_match=smeared)
    with pytest.raises(ValueError, match=r"model\.smear is True there and None here"):
        Checkpoint.open(folder).restore(model, optimizer, MUST_MATCH, ALONE)


def test_another_run_is_refused_with_both_values(tmp_path):
    model, optimizer = make(0)
    folder = save(tmp_path, 1, model, optimizer)
    with pytest.raises(ValueError, match=r"model.n_layer is 2 there and 3 here"):
        Checkpoint.open(folder).restore(model, optimizer, {"model.n_layer": 3}, ALONE)


def test_a_refused_resume_names_the_way_to_start_from_the_weights(tmp_path):
    folder = save(tmp_path, 1, *make(0))
    with pytest.raises(ValueError, match=f"weights, set run.init_from={tmp_path} and another run"):
        Checkpoint.open(folder).restore(*make(1), {"optim.batch_tokens": 3}, ALONE)


def test_folder_without_a_finished_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a finished checkpoint"):
        Checkpoint.open(tmp_path).weights()


def test_weights_without_an_optimizer_load_but_do_not_resume(tmp_path):
    model, _ = make(0)
    folder = save_model(tmp_path, model, config={"a": 1}, tokenizer="b")
    assert folder == latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 0)
    again, again_optimizer = make(1)
    message = rf"has weights but no optimizer state.*run.init_from={tmp_path}$"
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(folder).restore(again, again_optimizer, MUST_MATCH, ALONE)
    opened = Checkpoint.open(folder)
    assert (opened.progress, opened.must_match) == (Progress(), {"tokenizer": "b"})
    again.load_state_dict(Checkpoint.open(folder).weights())
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_save_model_does_not_replace_a_checkpoint(tmp_path):
    model, optimizer = make(0)
    save(tmp_path, 3, model, optimizer)
    with pytest.raises(ValueError, match="already has step_00000003. Choose another folder"):
        save_model(tmp_path, model, config={}, tokenizer="b")


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_reported(tmp_path, value):
    model, optimizer = make(0)
    with torch.no_grad():
        model[2].bias[0] = value
    folder = save(tmp_path, 3, model, optimizer)
    with pytest.raises(ValueError, match=r"has values in 2.bias that are not finite"):
        Checkpoint.open(folder).weights()


@pytest.mark.parametrize(
    "file",
    ["state.json", SUMS, *(f"{name}.safetensors" for name in ("model", "optimizer", "processes"))],
)
def test_huge_files_are_refused_before_their_checksum(tmp_path, file):
    folder = save(tmp_path, 3, *make(0))
    with (folder / file).open("r+b") as opened:
        opened.truncate(1 << 42)  # sparse; its checksum would take an hour
    with pytest.raises(ValueError, match=f"is damaged.*{file}: "):
        Checkpoint.open(folder).restore(*make(1), MUST_MATCH, ALONE)


def rewrite(folder, **values):
    """Change state.json and update its checksum, as a forger would."""
    state = json.loads((folder / "state.json").read_text()) | values
    (folder / "state.json").write_text(json.dumps(state))
    resum(folder)


def resum(folder):
    (folder / SUMS).unlink()
    write_sums(folder)


def test_settings_newer_than_a_checkpoint_get_defaults(tmp_path):
    folder = save(tmp_path, 1, *make(0))
    optim = {"max_steps": 5, "lr": 0.25, "betas": [0.5, 0.75], "batch_tokens": 64}
    rewrite(folder, config={"optim": optim})
    expected = AdamWConfig(max_steps=5, lr=0.25, betas=(0.5, 0.75))
    assert Checkpoint.open(folder).optim(AdamWConfig) == expected
    wrong = [{"lr": 0.25}, {"max_steps": 5, "lr": "${oc.env:HOME}"}, {"max_steps": 5, "betas": 1}]
    for optim in [*wrong, {"max_steps": 5, "schedule": "none"}, [], None]:
        rewrite(folder, config={"optim": optim})
        with pytest.raises(ValueError, match="damaged"):
            Checkpoint.open(folder).optim(AdamWConfig)


def test_settings_that_were_removed_since_are_reported(tmp_path):
    folder = save(tmp_path, 1, *make(0))
    optim = {"max_steps": 5, "orthogonalization": "newton_schulz", "z_loss": 0.5}
    rewrite(folder, config={"optim": optim})
    assert Checkpoint.open(folder).optim(AdamWConfig) == AdamWConfig(max_steps=5)
    assert Checkpoint.open(folder).removed_settings() == [
        "optim.z_loss was 0.5, and is no longer a setting"
    ]


FILES = ["state.json", "model.safetensors", "optimizer.safetensors", "processes.safetensors", SUMS]


def load(folder):
    return Checkpoint.open(folder).restore(*make(1), MUST_MATCH, ALONE)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["cut", "gone", "flipped"])
def test_damage_is_reported_with_the_older_intact_checkpoint(tmp_path, file, damage):
    model, optimizer = make(0)
    older = save(tmp_path, 2, model, optimizer)
    folder = save(tmp_path, 3, model, optimizer)
    path = folder / file
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[len(content) // 3] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    if (file, damage) == ("state.json", "gone"):
        expected, message = FileNotFoundError, "is not a finished checkpoint"
    else:
        expected = ValueError
        message = rf"^{folder} is damaged .*{file}.* the intact {older} with run.resume=previous$"
    with pytest.raises(expected, match=message):
        load(folder)
    assert newest_intact(tmp_path) == older
    assert rename_damaged(tmp_path, older) == [folder.with_name("damaged_step_00000003")]
    assert latest_checkpoint(tmp_path) == older


def test_a_missing_checksum_is_damage(tmp_path):
    folder = save(tmp_path, 1, *make(0))
    lines = (folder / SUMS).read_text().splitlines(keepends=True)
    (folder / SUMS).write_text("".join(line for line in lines if "optimizer" not in line))
    with pytest.raises(ValueError, match=f"{SUMS} has no line for optimizer.safetensors"):
        load(folder)
    assert newest_intact(tmp_path) is None


def test_damaged_checkpoints_of_one_step_get_different_names(tmp_path):
    whole = save(tmp_path, 1, *make(0))
    for name in ("damaged_step_00000002", "damaged_step_00000002_2", "damaged_step_00000002_3"):
        folder = save(tmp_path, 2, *make(0))
        (folder / "model.safetensors").unlink()
        assert rename_damaged(tmp_path, whole) == [folder.with_name(name)]


def test_damage_without_an_older_intact_checkpoint(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step, *make(0)) / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"step_00000002 is damaged.*no older .* is intact$"):
        load(latest_checkpoint(tmp_path))
    assert newest_intact(tmp_path) is None


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("change", ["has no tensor", "has an unexpected tensor", "must be"])
def test_tensors_of_another_model_are_refused_despite_valid_checksums(tmp_path, file, change):
    folder = save(tmp_path, 1, *make(0))
    tensors = load_file(folder / file)
    name = min(tensors)
    if change == "has no tensor":
        del tensors[name]
    elif change == "must be":
        tensors[name] = tensors[name].half()
    else:
        tensors["more"] = torch.zeros(2)
    save_file(tensors, folder / file)
    resum(folder)
    with pytest.raises(ValueError, match=rf"step_00000001 is damaged.*{file}.*{change}|{change}"):
        load(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"progress": {"step": -1}},
        {"progress": {"step": "3"}},
        {"progress": {"gpu_hours": float("nan")}},
        {"progress": {"gpu_hours": 10**400}},
        {"progress": {"tokens": 10**40}},
        {"progress": {"val_loss": True}},
        {"progress": {"stride": 3}},
        {"progress": 3},
        {"must_match": 3},
        {"must_match": [["a", 1]]},
    ],
)
def test_impossible_states_are_damage(tmp_path, values):
    folder = save(tmp_path, 1, *make(0))
    rewrite(folder, **values)
    with pytest.raises(ValueError, match="is damaged .*state.json: "):
        load(folder)


def test_an_invalid_random_state_is_damage(tmp_path):
    folder = save(tmp_path, 1, *make(0))
    save_file({"rank_0.random.cpu": torch.zeros(3)}, folder / "processes.safetensors")
    resum(folder)
    with pytest.raises(ValueError, match="is damaged .*has an invalid RNG state"):
        load(folder)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("file", [*FILES, ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("agrees", [False, True])
def test_code_in_a_file_is_not_executed(tmp_path, file, agrees):
    folder = save(tmp_path, 1, *make(0))
    executed = tmp_path / "executed"
    (folder / file).write_bytes(pickle.dumps(Bomb(executed)))
    if agrees and file != SUMS:
        resum(folder)
    if file != "__0_0.distcp":  # a file that is never read
        with pytest.raises(ValueError, match="step_00000001 (is damaged|was saved by version 0.2)"):
            load(folder)
    with suppress(ValueError):
        Checkpoint.open(folder).weights()
    with suppress(ValueError):
        newest_intact(tmp_path)
    assert not executed.exists()


def test_an_older_format_is_reported(tmp_path):
    folder = save(tmp_path, 1, *make(0))
    (folder / ".metadata").touch()
    with pytest.raises(ValueError, match="step_00000001 was saved by version 0.2 or older"):
        load(folder)


def test_each_damaged_checkpoint_is_read_once(tmp_path, monkeypatch):
    for step in range(1, 13):
        (save(tmp_path, step, *make(0), keep_last=99) / SUMS).write_text("")
    read_folders = []
    read = reader.read_sums
    monkeypatch.setattr(
        reader, "read_sums", lambda folder: read_folders.append(folder) or read(folder)
    )
    with pytest.raises(ValueError, match="step_00000012 is damaged.*no older .* is intact$"):
        Checkpoint.open(latest_checkpoint(tmp_path))
    assert sorted(read_folders) == sorted(set(read_folders)) and len(read_folders) == 12
