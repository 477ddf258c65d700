from evaluation.pictures import differences_by_bin
from experiments.table4.models import MODELS
from experiments.table4.questions import PAIRS, comparisons_table, draw_positions


def test_every_pair_is_of_two_models_and_is_asked_about_once():
    assert len(set(PAIRS)) == len(PAIRS)
    assert all(one != other and {one, other} <= set(MODELS) for one, other in PAIRS)


def test_every_model_but_the_first_answers_something():
    asked = {name for pair in PAIRS for name in pair}
    assert set(MODELS) - asked == set()
    # a control that only differs in its batches is worth little without what it is a control of
    assert ("1k_then_4k", "1k_then_1k_of_4k") in PAIRS and ("4k", "1k_of_4k") in PAIRS


def bins(*means):
    return [
        {
            "bin": number,
            "tokens": 1 if number == 1 else 5000,
            "difference": mean,
            "difference_interval": [None, None] if number == 3 else [mean - 0.1, mean + 0.1],
        }
        for number, mean in enumerate(means)
    ]


def comparison(label, other, *means):
    chunk = {"nats": -0.04, "interval": [-0.05, -0.03]}
    strided = {"nats": -0.02, "interval": [None, None], "seeds": 3}
    start = {"range": "0 to 31", "nats": 0.01, "interval": [-0.01, 0.03]}
    rest = {"range": "32 and more", "nats": None, "interval": [None, None]}
    return {
        "label": label,
        "to_label": other,
        "chunk": chunk,
        "strided": strided,
        "parts": [start, rest],
        "document_position": bins(*means),
    }


def test_table():
    rows = [comparison("4k", "1k", 0.0), comparison("4k_from_1k", "4k", 0.0)]
    lines = comparisons_table(rows).splitlines()
    assert lines[0].endswith(
        "| of these 0 to 31 tokens into a document | of these 32 and more tokens into a document |"
    )
    assert lines[2] == (
        "| longer context from scratch, equal tokens | 4k | 1k | 3 | -0.0400 (-0.0500 to -0.0300) "
        "| -0.0200 | 0.0100 (-0.0100 to 0.0300) | - |"
    )
    assert lines[3].startswith("| a trained 1K model instead of from scratch, equal time | 4k_from")


def test_picture(tmp_path, monkeypatch):
    figures = []

    def record(*arguments):
        figures.append(differences_by_bin(*arguments))
        return figures[-1]

    monkeypatch.setattr("experiments.table4.questions.differences_by_bin", record)
    path = tmp_path / "positions.png"
    rows = [
        comparison("4k", "1k", 0.1, 0.2, 0.3, 0.4),
        comparison("1k_then_4k", "1k_then_1k", 0.0, -0.1, -0.2, 0.1),
        comparison("4k_butterfly", "4k", 0.1, 9.0, 0.3, 0.4),
        comparison("4k_documents", "4k", 0.1),
    ]
    draw_positions(rows, path)
    assert path.stat().st_size > 10_000
    assert [axes.get_title() for axes in figures[0].axes] == [
        "a longer context, from scratch",
        "a longer context, going on",
        "butterfly instead of dense attention",
    ]
    right = figures[0].axes[-1]
    (line,) = (line for line in right.get_lines() if line.get_label() == "4k_butterfly minus 4k")
    assert list(line.get_ydata()) == [0.1, 0.3, 0.4]  # without the bin of one token
    low, high = right.get_ylim()
    assert low < 0.0 and 0.4 < high < 1.0
    draw_positions(rows[-1:], path)
    assert not path.exists()
