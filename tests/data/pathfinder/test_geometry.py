import numpy as np
import pytest

from data.pathfinder.generator import generate
from data.pathfinder.geometry import endpoint_geometry
from data.pathfinder.parameters import Pathfinder
from data.pathfinder.render import Renderer


@pytest.mark.parametrize("parameters", [Pathfinder(64, 6), Pathfinder(128, 9)])
def test_contours_leave_the_markers_in_these_directions(parameters):
    """The image is bright there just beyond a marker, and dark in the other directions."""
    images = generate(parameters, 1, range(100))
    images["n_strokes"] = 2 * parameters.contour_length
    positions, directions = endpoint_geometry(images, parameters)
    assert positions.shape == (*directions.shape, 2) == (100, 2, 2)
    assert np.array_equal(positions, images["markers"])
    drawn = Renderer(parameters)(images).numpy().astype(float)
    distance = 4

    def brightness(offset):
        y = np.rint(positions[..., 0] + distance * np.sin(directions + offset)).astype(int)
        x = np.rint(positions[..., 1] + distance * np.cos(directions + offset)).astype(int)
        last = parameters.size - 1
        return drawn[np.arange(100)[:, None], y.clip(0, last), x.clip(0, last)]

    assert brightness(0).mean() > 120
    for offset in (np.pi / 2, np.pi, -np.pi / 2):
        assert brightness(offset).mean() < 30


def test_directions_are_those_of_the_strokes():
    parameters = Pathfinder(32, 2)
    images = generate(parameters, 2, range(300))
    positions, directions = endpoint_geometry(images, parameters)
    assert (np.abs(directions) <= np.pi).all()
    length = parameters.contour_length
    for image, (origin, terminal), (out, back) in zip(images, positions, directions, strict=True):
        at = np.stack([image["strokes"]["y"], image["strokes"]["x"]], axis=1).astype(int)
        first = 0 if np.array_equal(at[0], origin) else length
        assert image["strokes"]["template"][first] == round(np.degrees(out) + 180) % 360
        own = image["label"] == 1
        last = first + 1 if own else (length - first) + 1
        assert np.array_equal(at[last], terminal)
        # the terminal stroke points back to where its contour came from
        step = at[last - 1] - at[last]
        assert np.cos(np.arctan2(*step) - back) > 0.4


def test_the_label_distinguishes_terminals_on_one_pixel():
    parameters = Pathfinder(64, 2)
    image = np.repeat(generate(parameters, 3, range(1)), 2)
    image["strokes"][:, 1] = (100, 30, 31)
    image["strokes"][:, 3] = (200, 30, 31)
    image["markers"][:, 0] = np.stack(
        [image["strokes"]["y"][:, 0], image["strokes"]["x"][:, 0]], axis=1
    )
    image["markers"][:, 1] = (30, 31)
    image["label"] = [1, 0]
    _, directions = endpoint_geometry(image, parameters)
    assert np.degrees(directions[:, 1]) == pytest.approx([-80, 20])


def test_other_parameters_are_refused():
    images = generate(Pathfinder(32, 6), 4, range(1))
    with pytest.raises(ValueError, match="display_lists has dtype"):
        endpoint_geometry(images, Pathfinder(32))
