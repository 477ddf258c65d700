import pytest

from data.pathfinder.parameters import DIFFICULTIES, Pathfinder, display_list_dtype

SIZES = (32, 64, 128, 256)


@pytest.mark.parametrize(
    ("difficulty", "length", "counts"),
    [("easy", 2, [10, 11, 18, 15]), ("intermediate", 3, [6, 8, 12, 10]), ("hard", 4, [5, 5, 8, 7])],
)
def test_distractors_of_the_benchmark(difficulty, length, counts):
    sets = [Pathfinder(size, DIFFICULTIES[difficulty]) for size in SIZES]
    assert [parameters.n_distractors for parameters in sets] == counts
    assert {parameters.distractor_length for parameters in sets} == {length}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("contour_length", range(2, 15))
def test_every_contour_length_has_distractors(size, contour_length):
    parameters = Pathfinder(size, contour_length)
    assert parameters.n_distractors > 0
    assert parameters.distractor_length >= 1
    assert 2 * contour_length < parameters.max_strokes < 256
    assert display_list_dtype(parameters).itemsize <= 4 * parameters.max_strokes + 12


def test_distractors_of_another_contour_length():
    parameters, hard = Pathfinder(128, 3, distractors_of=14), Pathfinder(128)
    assert parameters.n_distractors == hard.n_distractors == 8
    assert parameters.distractor_length == hard.distractor_length == 4
    assert parameters.max_strokes == hard.max_strokes - 2 * 11 == 6 + 32
    assert Pathfinder(128, 6, distractors_of=0).max_strokes == 12
    assert Pathfinder(128, 9, distractors_of=9).max_strokes == Pathfinder(128, 9).max_strokes


def test_bad_arguments():
    with pytest.raises(ValueError, match="size=48 must be one of 32, 64, 128, 256"):
        Pathfinder(48)
    with pytest.raises(ValueError, match="contour_length=1 must be between 2 and 14"):
        Pathfinder(32, 1)
    with pytest.raises(ValueError, match="contour_length=15"):
        Pathfinder(32, 15)
    with pytest.raises(ValueError, match="distractors_of=1 must be between 2 and 14"):
        Pathfinder(32, 6, distractors_of=1)
