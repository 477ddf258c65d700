import math
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from data.pathfinder.generator import generate
from data.pathfinder.parameters import Pathfinder, display_list_dtype
from data.pathfinder.templates import N_SEEDS, banks_of

KINDS = [
    Pathfinder(32),
    Pathfinder(32, 2),
    Pathfinder(64, 6),
    Pathfinder(64, 3, distractors_of=14),
    Pathfinder(128, 5, distractors_of=0),
    Pathfinder(128, 9),
    Pathfinder(128, 14, distractors_of=6),
    Pathfinder(256),
]
kinds = pytest.mark.parametrize("parameters", KINDS, ids=str)


@kinds
def test_every_number_has_its_image(parameters):
    numbers = [5, 0, 3, 3, 2**40]
    at_once = generate(parameters, 7, numbers, n_threads=2)
    assert at_once.dtype == display_list_dtype(parameters)
    for number, image in zip(numbers, at_once, strict=True):
        assert generate(parameters, 7, [number], n_threads=1)[0].tobytes() == image.tobytes()


@kinds
def test_threads_do_not_matter(parameters):
    images = generate(parameters, 1, range(20), n_threads=1)
    for n_threads in (2, 3, None):
        assert generate(parameters, 1, range(20), n_threads=n_threads).tobytes() == images.tobytes()


def test_seeds_and_numbers_differ():
    images = np.concatenate([generate(Pathfinder(256, 3), seed, range(200)) for seed in (0, 1)])
    assert len({image.tobytes() for image in images}) == 400


def test_images_never_change():
    """Fixed values: prepared sets and curricula must be made again the same."""
    image = generate(Pathfinder(64, 6), 1337, [0])[0]
    assert [tuple(stroke) for stroke in image["strokes"][[0, 5, 6, 11]].tolist()] == PINNED
    assert (image["n_strokes"], image["label"], image["restarts"]) == (24, 0, 1)


PINNED = [(40, 32, 34), (364, 5, 15), (57, 44, 31), (377, 24, 6)]


@kinds
def test_lists_are_well_formed(parameters):
    images = generate(parameters, 2, range(60))
    length, size = parameters.contour_length, parameters.size
    strokes, n_strokes = images["strokes"], images["n_strokes"].astype(int)
    assert (n_strokes <= parameters.max_strokes).all()
    assert ((n_strokes - 2 * length) % parameters.distractor_length == 0).all()
    assert (n_strokes >= 2 * length).all()
    assert (strokes["y"] < size).all() if size < 256 else True
    unused = np.arange(parameters.max_strokes) >= n_strokes[:, None]
    assert not strokes["template"][unused].any()
    assert set(images["margin"].tolist()) == set(parameters.scale.margins)
    # a contour, and every distractor, begins with a seed and continues with others
    banks = banks_of(parameters)
    firsts = np.cumsum([0] + [len(bank.angles) for bank in banks])[: len(banks)]
    bank_number = np.searchsorted(parameters.scale.margins, images["margin"])
    local = strokes["template"].astype(int) - firsts[bank_number, None]
    slots = np.arange(parameters.max_strokes)
    begins = np.where(
        slots < 2 * length,
        slots % length == 0,
        (slots - 2 * length) % parameters.distractor_length == 0,
    )
    is_seed = local < N_SEEDS
    assert (local[~unused] >= 0).all()
    assert (is_seed == begins)[~unused].all()


@kinds
def test_contours_continue_in_their_direction(parameters):
    """Walks every contour and distractor again: a stroke starts on the ring around the next point
    in the direction of the one before."""
    banks = {bank.margin: bank for bank in banks_of(parameters)}
    firsts = dict.fromkeys(banks, 0)
    for before, margin in pairwise(banks):
        firsts[margin] = firsts[before] + len(banks[before].angles)
    length, n_steps = parameters.scale.stroke_length, 0
    for image in generate(parameters, 3, range(40)):
        margin = int(image["margin"])
        bank = banks[margin]
        pivot, angle = (0, 0), 0.0
        for n in range(image["n_strokes"]):
            template, y, x = image["strokes"][n].tolist()
            template -= firsts[margin]
            if template < N_SEEDS:
                angle = math.radians(template - 180)
                head = _move((y, x), angle, length)
                back = angle + math.pi if angle < 0 else angle - math.pi
                pivot = _move(head, back, length + margin)
                continue
            offset = bank.ring[template - N_SEEDS].tolist()
            pivot = _move(pivot, angle, length + 2 * margin)
            assert (y, x) == (pivot[0] + offset[0], pivot[1] + offset[1])
            turn = math.atan2(*offset) - angle
            assert math.cos(turn) > math.cos(math.pi / 2 / parameters.scale.continuity) - 1e-9
            angle = math.atan2(*offset)
            n_steps += 1
        origins = image["strokes"][[0, parameters.contour_length]]
        distance = np.hypot(*(np.diff(origins[axis].astype(int))[0] for axis in ("y", "x")))
        assert abs(distance - parameters.scale.seed_distance) < 0.75
    assert n_steps >= 40 * 2 * (parameters.contour_length - 1)


def _move(pixel, angle, distance):
    return (
        math.ceil(pixel[0] + distance * math.sin(angle)),
        math.ceil(pixel[1] + distance * math.cos(angle)),
    )


@kinds
def test_markers_are_on_the_ends_that_the_label_says(parameters):
    images = generate(parameters, 4, range(100))
    length = parameters.contour_length
    for image in images:
        at = [tuple(stroke)[1:] for stroke in image["strokes"].tolist()]
        origin, terminal = (tuple(marker) for marker in image["markers"].tolist())
        assert origin in (at[0], at[length])
        own = at[length - 1] if origin == at[0] else at[2 * length - 1]
        other = at[2 * length - 1] if origin == at[0] else at[length - 1]
        assert terminal == (own if image["label"] else other)


def test_labels_margins_and_origins_are_balanced():
    parameters = Pathfinder(128, 3, distractors_of=14)
    n = 4000
    images = generate(parameters, 5, range(n))
    on_first = (images["markers"][:, 0, 0] == images["strokes"]["y"][:, 0]) & (
        images["markers"][:, 0, 1] == images["strokes"]["x"][:, 0]
    )
    halves = np.stack([images["label"] == 1, images["margin"] == 3, on_first])
    assert np.abs(halves.mean(axis=1) - 0.5).max() < 4 * 0.5 / np.sqrt(n)
    assert np.abs(np.corrcoef(halves) - np.eye(3)).max() < 4 / np.sqrt(n)


def test_no_images():
    assert generate(Pathfinder(32), 0, range(0)).shape == (0,)


def test_bad_arguments():
    with pytest.raises(ValueError, match="seed=-1"):
        generate(Pathfinder(32), -1, range(1))
    with pytest.raises(ValueError, match=f"seed={2**64}"):
        generate(Pathfinder(32), 2**64, range(1))
    with pytest.raises(ValueError, match="one is -3"):
        generate(Pathfinder(32), 0, [1, -3])
    with pytest.raises(ValueError, match=r"numbers has shape \(1, 2\)"):
        generate(Pathfinder(32), 0, np.zeros((1, 2), np.int64))
    with pytest.raises(ValueError, match="n_threads=0"):
        generate(Pathfinder(32), 0, range(1), n_threads=0)


def test_reading_and_drawing_need_no_compiler():
    code = (
        "import sys, data.pathfinder, data.pathfinder.render, data.pathfinder.parameters;"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
