import numpy as np
import pytest
import torch

from data.pathfinder.generator import generate
from data.pathfinder.parameters import Pathfinder, display_list_dtype
from data.pathfinder.render import Renderer, pack
from data.pathfinder.templates import banks_of, marker_patch

KINDS = [Pathfinder(32), Pathfinder(64, 6), Pathfinder(128, 9), Pathfinder(256)]
kinds = pytest.mark.parametrize("parameters", KINDS, ids=str)


def _draw(image, parameters):
    """One image, stroke after stroke: float32, and with its markers float64, as the reference."""
    size = parameters.size
    canvas = np.zeros((size, size), np.float32)

    def paste(patch, y, x, gain=1.0):
        reach = len(patch) // 2
        for row in range(max(0, y - reach), min(size, y + reach + 1)):
            for column in range(max(0, x - reach), min(size, x + reach + 1)):
                value = patch[row - y + reach, column - x + reach] / 255 * gain
                canvas[row, column] = max(canvas[row, column], value)

    lines = [line for bank in banks_of(parameters) for line in bank.lines]
    for n, (template, y, x) in enumerate(image["strokes"].tolist()[: image["n_strokes"]]):
        target = n < 2 * parameters.contour_length
        gain = parameters.scale.target_gain if target else parameters.scale.distractor_gain
        paste(lines[template], y, x, gain)
    canvas = canvas.astype(np.float64)
    for y, x in image["markers"].tolist():
        paste(marker_patch(parameters), y, x)
    scale = 255 / (canvas.max() - canvas.min())
    return ((canvas - canvas.min()) * scale + 0.5).astype(np.uint8)


@kinds
def test_images_are_those_drawn_one_by_one(parameters):
    images = generate(parameters, 1, range(6))
    drawn = Renderer(parameters)(images)
    assert drawn.dtype == torch.uint8
    assert drawn.shape == (6, parameters.size, parameters.size)
    for image, pixels in zip(images, drawn.numpy(), strict=True):
        assert np.array_equal(pixels, _draw(image, parameters))


@kinds
def test_strokes_and_markers_are_cut_at_the_edge(parameters):
    image = generate(parameters, 2, range(1))
    last = parameters.size - 1
    corners = [(0, 0), (0, last), (last, 0), (last, last), (0, last // 2), (last // 2, last)]
    for n, (y, x) in enumerate(corners):
        for slot in (0, 2, 3):
            image["strokes"]["y"][0, n + slot], image["strokes"]["x"][0, n + slot] = y, x
    image["markers"][0] = [[0, last], [last, 1]]
    drawn = Renderer(parameters)(image)[0].numpy()
    assert np.array_equal(drawn, _draw(image[0], parameters))
    assert drawn[0, last] > 200
    assert drawn[last, 1] > 200


@kinds
def test_batches_and_packing_do_not_matter(parameters):
    images = generate(parameters, 3, range(9))
    renderer = Renderer(parameters, torch.device("cpu"))
    at_once = renderer(images)
    packed = pack(images)
    assert len(packed) == 9
    numbers = torch.tensor([8, 2, 2, 5])
    assert torch.equal(renderer(packed), at_once)
    assert torch.equal(renderer(packed[numbers]), at_once[numbers])
    assert torch.equal(renderer(packed[3:4]), at_once[3:4])
    assert renderer(packed[:0]).shape == (0, parameters.size, parameters.size)


def test_slots_after_the_last_stroke_are_not_drawn():
    parameters = Pathfinder(32, 6)
    images = generate(parameters, 4, range(50))
    image = images[images["n_strokes"] < parameters.max_strokes][:1].copy()
    expected = Renderer(parameters)(image)
    image["strokes"][0, image["n_strokes"][0] :] = (77, 16, 16)
    assert torch.equal(Renderer(parameters)(image), expected)


@pytest.mark.parametrize(("size", "peak"), [(64, 204), (128, 229), (256, 255)])
def test_brightness_of_lines_and_markers(size, peak):
    parameters = Pathfinder(size, 6)
    images = generate(parameters, 5, range(40))
    drawn = Renderer(parameters)(images).numpy()
    assert (drawn.max(axis=(1, 2)) == 255).all()
    assert (drawn.min(axis=(1, 2)) == 0).all()
    rows, columns = np.mgrid[:size, :size]
    brightest = []
    for image, pixels in zip(images, drawn, strict=True):
        away = np.ones((size, size), bool)
        for y, x in image["markers"].tolist():
            away &= np.hypot(rows - y, columns - x) > parameters.scale.marker_radius + 5
            assert pixels[y, x] >= 248
        brightest.append(pixels[away].max())
    assert max(brightest) == peak
    assert min(brightest) > peak - 10


def test_distractors_are_brighter_than_contours_at_size_32():
    images = generate(Pathfinder(32), 6, range(400))
    drawn = Renderer(Pathfinder(32))(images).numpy()
    markers = images["markers"].astype(int)
    centres = drawn[np.arange(400)[:, None], markers[..., 0], markers[..., 1]]
    with_distractors = images["n_strokes"] > 28
    # 255 / (2 * 147): a stroke's brightest pixel is 147 at most angles
    assert centres[with_distractors].min() == 221
    assert (centres[~with_distractors] == 255).all()


def test_other_lists_are_refused():
    images = generate(Pathfinder(128, 6), 7, range(2))
    with pytest.raises(ValueError, match="display_lists has dtype"):
        Renderer(Pathfinder(128))(images)
    with pytest.raises(ValueError, match="has 48 strokes per image"):
        Renderer(Pathfinder(128))(pack(images))
    with pytest.raises(ValueError, match=r"display_lists is an array \(3,\) of float64"):
        pack(np.zeros(3))
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        pack(np.zeros((1, 2), display_list_dtype(Pathfinder(32))))


@pytest.mark.gpu
@kinds
def test_gpu_draws_the_same_in_a_graph(parameters):
    images = generate(parameters, 8, range(16))
    expected = Renderer(parameters)(images)
    renderer, packed = Renderer(parameters, "cuda"), pack(images, "cuda")
    numbers = torch.arange(8, device="cuda")
    assert torch.equal(renderer(packed[numbers]).cpu(), expected[:8])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = renderer(packed[numbers])
    numbers += 8
    graph.replay()
    assert torch.equal(drawn.cpu(), expected[8:])
