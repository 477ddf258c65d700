"""Pathfinder sets as a whole, against the reference's and against a generator without shortcuts.

All bounds are 4 standard errors, so they hold for any number of images, and are closer for more:
each comparison is made of a few at every run of the tests, and of many where slow ones are run.
"""

import numpy as np
import pytest

from data.pathfinder.generator import generate
from data.pathfinder.parameters import Pathfinder
from data.pathfinder.render import Renderer
from tests.data.pathfinder.plain import NoRoomError, PlainGenerator

# What the reference (drewlinsley/pathfinder at ab9c130) makes: its number of images, and means of
# attempts per image, fractions of pixels above 0 and 25, intensity, its deviation over pixels, and
# of the distance between markers by label.
REFERENCE = {
    32: (1000, 326, 0.342, 0.152, 20.2, 51.1, 13.2, 12.8),
    64: (120, 4121, 0.261, 0.113, 13.45, 41.4, 32.1, 29.6),
    128: (150, 359, 0.137, 0.057, 7.91, 35.65, 78.1, 77.8),
    256: (2500, 8.19, 0.039, 0.017, 2.95, 24.15, 124.4, 125.2),
}
# few and many; the reference has 120 or 150, so more than a few hundred would add nothing
N_IMAGES = {32: (1000, 3000), 64: (300, 800), 128: (300, 800), 256: (400, 1000)}
DISTRACTORS = {32: 1.16, 64: 2.6, 128: 7.7, 256: 7.0}


def _few_and_many(few, many):
    return [*few, *(pytest.param(*one, marks=pytest.mark.slow) for one in many)]


@pytest.fixture(
    scope="module",
    params=_few_and_many(
        [(size, few) for size, (few, _) in N_IMAGES.items()],
        [((size, many),) for size, (_, many) in N_IMAGES.items()],
    ),
    ids=lambda param: "{}-{}".format(*param),
)
def hard(request):
    size, n_images = request.param
    parameters = Pathfinder(size)
    images = generate(parameters, 1, range(n_images))
    renderer = Renderer(parameters)
    drawn = [renderer(images[n : n + 100]).numpy() for n in range(0, len(images), 100)]
    return parameters, images, np.concatenate(drawn)


def _agree(values, expected, n_expected, rounding):
    """Whether means agree within 4 standard errors of both samples, and the rounding of one."""
    error = values.std() * np.sqrt(1 / len(values) + 1 / n_expected)
    assert abs(values.mean() - expected) < 4 * error + rounding, (values.mean(), expected, error)


def test_images_are_like_the_reference(hard):
    parameters, images, drawn = hard
    n, attempts, above_0, above_25, mean, deviation, *distances = REFERENCE[parameters.size]
    _agree(images["restarts"] + 1.0, attempts, n, 0.01)
    _agree((drawn > 0).mean(axis=(1, 2)), above_0, n, 0.0005)
    _agree((drawn > 25).mean(axis=(1, 2)), above_25, n, 0.0005)
    _agree(drawn.mean(axis=(1, 2)), mean, n, 0.05)
    squares = (drawn.astype(float) ** 2).mean(axis=(1, 2))
    _agree(squares, deviation**2 + mean**2, n, 0.1 * deviation)
    markers = images["markers"].astype(float)
    between = np.hypot(*(markers[:, 0] - markers[:, 1]).T)
    # half of the images have each label
    for label, distance in zip((1, 0), distances, strict=True):
        _agree(between[images["label"] == label], distance, n / 2, 0.05)


def test_distractors_find_room_as_often(hard):
    parameters, images, _ = hard
    n_distractors = (images["n_strokes"].astype(float) - 28) / parameters.distractor_length
    _agree(n_distractors, DISTRACTORS[parameters.size], np.inf, 0.05)


def test_non_zero_pixels(hard):
    parameters, images, drawn = hard
    n_pixels = (drawn > 0).sum(axis=(1, 2))
    expected = {32: (349, 266, 444), 64: (1065, 797, 1329), 128: (2246, 1979, 2434)}
    mean, low, high = expected.get(parameters.size, (2544, 2372, 2693))
    # the expected values are themselves known to about 2 %
    error = n_pixels.std() / np.sqrt(len(images))
    assert abs(n_pixels.mean() - mean) < max(0.02 * mean, 4 * error)
    # of a few images, the outermost ones are a single one or two
    outside = ((n_pixels < low) | (n_pixels > high)).mean()
    assert abs(outside - 0.02) < 4 * np.sqrt(0.02 * 0.98 / len(images))
    if len(images) == N_IMAGES[parameters.size][1]:
        assert np.percentile(n_pixels, [1, 99]) == pytest.approx([low, high], rel=0.04)


@pytest.mark.parametrize(
    ("parameters", "n_attempts", "n_images"),
    _few_and_many(
        [
            (Pathfinder(32, 6), 8000, 1000),
            (Pathfinder(64, 4), 3000, 1000),
            (Pathfinder(128, 4), 500, 1000),
            (Pathfinder(256, 6), 200, 500),
        ],
        [
            (Pathfinder(32, 6), 20000, 3000),
            (Pathfinder(64, 4), 6000, 3000),
            (Pathfinder(128, 4), 2000, 3000),
            (Pathfinder(256, 6), 600, 3000),
        ],
    ),
    ids=str,
)
def test_contours_fit_as_often_as_without_shortcuts(parameters, n_attempts, n_images):
    rng = np.random.default_rng(0)
    # each image draws its margin once, so attempts are compared margin by margin
    images = generate(parameters, 2, range(n_images))
    for margin in parameters.scale.margins:
        restarts = images["restarts"][images["margin"] == margin]
        expected = 1 / (restarts.mean() + 1)
        plain, fits = PlainGenerator(parameters, margin, rng), 0
        for _ in range(n_attempts):
            try:
                plain.targets()
            except NoRoomError:
                continue
            fits += 1
        error = np.sqrt(
            expected * (1 - expected) / n_attempts + (1 - expected) * expected**2 / len(restarts)
        )
        assert abs(fits / n_attempts - expected) < 4 * error


@pytest.mark.parametrize(
    ("parameters", "n_images"),
    _few_and_many(
        [(Pathfinder(32, 6), 200), (Pathfinder(64, 9), 100), (Pathfinder(128), 60)],
        [(Pathfinder(64, 9), 200), (Pathfinder(128), 200)],
    ),
    ids=str,
)
def test_distractors_fit_as_often_as_without_shortcuts(parameters, n_images):
    rng = np.random.default_rng(0)
    length = parameters.contour_length
    images = generate(parameters, 3, range(n_images))
    difference = []
    for image in images:
        plain = PlainGenerator(parameters, int(image["margin"]), rng)
        mask = plain.empty()
        for n in range(2 * length):
            if n != length - 1:  # the end of the first contour may be drawn over
                template, y, x = image["strokes"][n].item()
                mask = np.maximum(mask, plain.patch(template - plain.first_template, y, x))
        n_distractors = (int(image["n_strokes"]) - 2 * length) / parameters.distractor_length
        difference.append(plain.distractors(mask) - n_distractors)
    error = np.std(difference) / np.sqrt(len(difference))
    assert abs(np.mean(difference)) < 4 * error
