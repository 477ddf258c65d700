"""The report of an evaluation: its numbers are those of the tables, its words follow from them."""

import json
import math
import re

import pytest

from evaluation import report
from evaluation.plan import Plan
from evaluation.report import markdown, write_report
from evaluation.sections import trained_on
from evaluation.verdicts import verdict
from tests.evaluation.made_up_evaluation import CONTEXTS, LONG, SHORT, evaluate, find

TABLES = ("chunk", "strided", "control", "chunk_position", "document_position", "document_length")
PICTURES = ("strided", "chunk_position", "document_position", "document_length")


def sections(text):
    """{title: {what a row starts with: its cells}}, a list of rows where they start alike."""
    found = {}
    for part in text.split("\n## ")[1:]:
        rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line[:2] == "| "]
        found[part.splitlines()[0]] = rows[:1] + rows[2:]
    return found


def test_losses_are_those_of_the_tables(result):
    table = sections(markdown(result))["On identical tokens"]
    assert len(table) - 1 == len(result["strided"]) == 12
    for cells, row in zip(table[1:], result["strided"], strict=True):
        low, high = row["nats_interval"]
        spread = max(row["nats_of_seeds"]) - min(row["nats_of_seeds"])
        difference = "-"
        if row["difference"]:
            ends = [f"{end:.4f}" for end in row["difference"]["interval"]]
            difference = f"{row['difference']['nats']:.4f} ({ends[0]} to {ends[1]})"
        assert cells == [
            row["label"],
            str(row["history"]),
            str(row["stride"]),
            "masked" if row["document_mask"] else "packed",
            f"{row['tokens']:,}",
            f"{row['nats']:.4f} ({low:.4f} to {high:.4f})",
            f"{row['perplexity']:.2f}",
            f"{row['bits_per_byte']:.4f}",
            difference,
            f"{spread:.4f}",
        ]
    assert {cells[-1] for cells in table[1:]} == {"0.0020"}
    result["strided"][0]["nats_of_seeds"] = [3.25, 3.0, 3.125]
    result["strided"][1]["nats_of_seeds"] = [3.25]  # a single one is no distance apart
    table = sections(markdown(result))["On identical tokens"]
    assert [cells[-1] for cells in table[1:3]] == ["0.2500", "-"]
    to = "Differences are to short with 16 tokens of history, documents alike"
    assert markdown(result).count(to) == 2
    chunk = sections(markdown(result))["As the paper evaluates"]
    assert [cells[:2] for cells in chunk[1:]] == [[SHORT, "16"]] * 2 + [[LONG, "64"]] * 2
    assert [cells[4].split()[0] for cells in chunk[1:]] == [
        f"{row['nats']:.4f}" for row in result["chunk"]
    ]


def test_what_was_scored_and_trained(result):
    data = result["data"]
    text = markdown(result)
    assert (
        f"{data['documents']} documents, {data['tokens']:,} tokens, {data['text_bytes']:,} b"
        in text
    )
    assert sections(text)["What was scored"][1:] == [
        [label, "3", str(n), "learned", "dense", "packed", "66,000", "2,000", "1.50"]
        for label, n in CONTEXTS.items()
    ]
    result["runs"][2]["gpu_hours"] = 3.0  # of three seeds one took twice the time
    assert sections(markdown(result))["What was scored"][1][-1] == "2.00"
    result["runs"][1]["tokens_per_s"] = None
    assert sections(markdown(result))["What was scored"][1][-2] == "-"


def test_what_a_model_goes_on_from_counts_as_its_own(result):
    for run in result["runs"][:3]:
        run["init_from"], run["before"] = "out/other", {"tokens": 4_000, "gpu_hours": 0.25}
    short, long = sections(markdown(result))["What was scored"][1:]
    assert (short[6], short[-1]) == ("70,000", "1.75")
    assert (long[6], long[-1]) == ("66,000", "1.50")
    result["runs"][2]["before"] = None  # of one it is not known
    short, _ = sections(markdown(result))["What was scored"][1:]
    assert (short[6], short[-1]) == ("-", "-")


def test_what_is_no_evaluation_is_refused(tmp_path):
    path = tmp_path / "evaluation.json"
    for text, problem in (
        ('{"data": ', r"evaluation.json is damaged \("),
        ('{"rows": {}}', "evaluation.json has no data, strided: give"),
        ("[]", "evaluation.json has no data, strided: give"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=problem):
            report.redraw(tmp_path)


def test_a_name_with_brackets_is_shown_whole(result, capsys):
    for table in ("runs", "strided"):
        for row in result[table]:
            row["label"] = f"{row['label']}[high]"
    report.show(result)
    assert "difference to short[high]" in capsys.readouterr().out


def test_the_first_lines_say_what_the_rows_say(result):
    (line,) = [x for x in markdown(result).splitlines() if x.startswith("- **")]
    short, whole = result["as_trained"]
    assert (whole["stride"], whole["document_mask"]) == (4, False)
    low, high = (-end for end in reversed(whole["difference"]["interval"]))
    assert line == (
        "- **long against short**, each with at least 7/8 of its context, on "
        f"{whole['tokens']:,} identical tokens: {-whole['difference']['nats']:.4f} nats lower "
        f"({low:.4f} to {high:.4f}); "
        f"perplexity {whole['perplexity']:.2f} against {short['perplexity']:.2f}; when long may "
        # seeds are 0.001 apart, but in each pair of them the models are equal
        "see only 16 tokens, no difference shown: 0.0000 nats (0.0000 to 0.0000)."
    )
    assert "Compared over one seed" not in markdown(result)


def test_what_remains_of_a_difference(corpus, tmp_path_factory):
    plan = Plan(modes=("strided", "cross"), strides=(8,))
    text = markdown(evaluate(corpus, tmp_path_factory, plan, seeds=1, shift=-0.1))
    assert re.search(
        r"0\.5\d+ nats lower .*; of that, 0\.1000 nats \(0\.1000 to 0\.1000\) remain when long may "
        r"see only 16 tokens\.$",
        text,
        re.MULTILINE,
    )
    assert "Compared over one seed: long." in text
    text = markdown(evaluate(corpus, tmp_path_factory, plan, seeds=1, shift=0.1))
    assert "; when long may see only 16 tokens, 0.1000 nats higher (0.1000 to 0.1000)." in text


def test_too_few_documents_show_no_difference(corpus, tmp_path_factory, tmp_path):
    plan = Plan(strides=(8,), first=4 * 121)  # all of four documents
    result = evaluate(corpus, tmp_path_factory, plan, seeds=2, shift=-0.1)
    write_report(result, tmp_path)
    text = (tmp_path / "report.md").read_text()
    (line,) = [x for x in text.splitlines() if x.startswith("- **")]
    assert re.search(
        r"tokens: no difference shown: -0\.5\d+ nats; perplexity [\d.]+ against [\d.]+; when long "
        r"may see only 16 tokens, no difference shown: -0\.1000 nats\.$",
        line,
    )
    found = sections(text)
    cells = [row[-2] for row in found["On identical tokens"][1:]]
    assert cells[0] == "-" and all(re.fullmatch(r"-0\.\d{4}", some) for some in cells[1:])
    intact, *disturbed = found["Was the distant context used?"][1:]
    assert intact[-1] == "-" and len(disturbed) == 2
    for row in disturbed:
        assert re.fullmatch(r"no difference shown: 0\.0\d+ nats", row[-1])
    assert "where these are fewer than 5, there is no interval." in text
    assert "nan" not in text


def test_without_sliding_windows_the_paper_s_are_compared(corpus, tmp_path_factory):
    result = evaluate(corpus, tmp_path_factory, Plan(modes=("chunk",)), seeds=2)
    text = markdown(result)
    start = (
        "- **long against short**, as the paper evaluates, which flatters the longer context, each "
        "in its own windows: 0."
    )
    assert start in text
    assert "when long may see" not in text and "documents masked" not in text
    assert "Compared over one seed" not in text
    result["as_trained_chunk"] = []
    assert "- **long against short**: not scored in the same way." in markdown(result)


def test_one_seed_is_told_of_the_comparison_that_is_made(corpus, tmp_path_factory):
    # windows of 32 tokens slide over the long model alone, so that chunks are compared
    plan = Plan(modes=("chunk", "cross"), histories=(32,))
    text = markdown(evaluate(corpus, tmp_path_factory, plan, seeds=1))
    assert "- **long against short**, as the paper evaluates" in text
    assert "Compared over one seed: long." in text


def test_histories_that_are_not_the_contexts_are_told(corpus, tmp_path_factory):
    plan = Plan(modes=("cross",), strides=(4,), histories=(8, 32))
    text = markdown(evaluate(corpus, tmp_path_factory, plan, seeds=1))
    assert "- **long against short**, with 32 against 8 tokens of history, on" in text


def test_models_of_one_context_are_compared_with_no_shorter_history(
    corpus, tmp_path_factory, monkeypatch
):
    monkeypatch.setitem(CONTEXTS, SHORT, CONTEXTS[LONG])
    plan = Plan(modes=("strided", "cross"), strides=(8,))
    text = markdown(evaluate(corpus, tmp_path_factory, plan, seeds=1, shift=-0.1))
    (line,) = [x for x in text.splitlines() if x.startswith("- **")]
    assert "0.1000 nats lower (0.1000 to 0.1000); perplexity" in line and "may see" not in line


@pytest.mark.parametrize("documents", [None, (False, True), (True,)], ids=str)
@pytest.mark.parametrize(
    ("masked", "modes"), [((LONG,), None), ((SHORT,), ("chunk",)), ((SHORT, LONG), None)], ids=str
)
def test_the_first_lines_take_documents_as_in_training(
    corpus, tmp_path_factory, documents, masked, modes
):
    plan = Plan(strides=(8,), modes=modes, document_masks=documents)
    result = evaluate(corpus, tmp_path_factory, plan, seeds=2, shift=-0.1, masked=masked)
    for name in ("strided", "chunk"):  # as if masks helped: these rows alone would tell of it
        for row in result[name]:
            if row["document_mask"] and row["difference"]:
                row["difference"]["nats"] -= 7
    (line,) = [x for x in markdown(result).splitlines() if x.startswith("- **")]
    ways = ["masked" if label in masked else "packed" for label in (LONG, SHORT)]
    if documents == (True,):
        ways = ["masked"] * 2
    same = ways[0] == ways[1]
    told = ways[0] if same else f"{ways[0]} against {ways[1]}"
    how = "each with at least 7/8 of its context"
    if modes:
        how = "as the paper evaluates, which flatters the longer context, each in its own windows"
    table = result["as_trained_chunk" if modes else "as_trained"]
    assert [row["document_mask"] for row in table] == [way == "masked" for way in reversed(ways)]
    nats = -table[1]["difference"]["nats"]
    on = "" if modes else f", on {table[1]['tokens']:,} identical tokens"
    start = f"- **long against short**, {how}, documents {told}{on}: {nats:.4f} nats lower ("
    assert line.startswith(start)
    assert ("when long may see only 16 tokens, 7.1000 nats lower" in line) == (same and not modes)
    assert ("when long may see" in line) == (same and not modes)


def test_the_first_lines_fall_back_where_nothing_slides_for_a_model(result):
    short, long = result["as_trained"]
    for kept in ([short], [long]):
        result["as_trained"] = kept
        assert "- **long against short**, as the paper evaluates, wh" in markdown(result)


@pytest.mark.parametrize(
    ("nats", "interval", "words"),
    [
        (-0.031, [-0.035, -0.027], "0.0310 nats lower (0.0270 to 0.0350)"),
        (0.031, [0.027, 0.0354], "0.0310 nats higher (0.0270 to 0.0354)"),
        (-0.031, [-0.07, 0.001], "no difference shown: -0.0310 nats (-0.0700 to 0.0010)"),
        (0.031, [0.0, 0.07], "no difference shown: 0.0310 nats (0.0000 to 0.0700)"),
        (-1e-9, [-0.07, 1e-9], "no difference shown: 0.0000 nats (-0.0700 to 0.0000)"),
        (-0.031, [None, None], "no difference shown: -0.0310 nats"),
        (-0.031, [math.nan, math.nan], "no difference shown: -0.0310 nats"),
        (None, [None, None], "no difference shown: - nats"),
    ],
)
def test_words_follow_the_interval(nats, interval, words):
    assert verdict({"nats": nats, "interval": interval}) == words


def test_words_of_a_report_follow_the_interval(result):
    (row,) = (row for row in result["as_trained"] if row["label"] == LONG)
    row["difference"] |= {"nats": -0.3, "interval": [-0.7, 0.1]}
    rest = find(result["strided"], LONG, 16, stride=4, document_mask=False)
    rest["difference"] |= {"nats": -0.2, "interval": [-0.3, -0.1]}
    (line,) = [x for x in markdown(result).splitlines() if x.startswith("- **")]
    assert "tokens: no difference shown: -0.3000 nats (-0.7000 to 0.1000);" in line
    assert line.endswith("16 tokens, 0.2000 nats lower (0.1000 to 0.3000).")
    row["difference"] |= {"nats": -0.15, "interval": [-0.2, -0.1]}  # 0.2 are no part of 0.15
    assert "when long may see only 16 tokens, 0.2000 nats lower" in markdown(result)
    row["difference"] |= {"nats": -0.3, "interval": [-0.4, -0.2]}
    assert "; of that, 0.2000 nats (0.1000 to 0.3000) remain when long" in markdown(result)


def test_controls(result):
    table = sections(markdown(result))["Was the distant context used?"]
    assert [cells[:5] for cells in table[1:]] == [
        [LONG, "64", "16", "16", how] for how in ("as it is", "shuffled", "replaced")
    ]
    for cells, row in zip(table[1:], result["control"], strict=True):
        low, high = row["nats_interval"]
        assert cells[5:7] == [f"{row['tokens']:,}", f"{row['nats']:.4f} ({low:.4f} to {high:.4f})"]
    assert table[1][-1] == "-"
    for cells, row in zip(table[2:], result["control"][1:], strict=True):
        assert cells[-1] == verdict(row["difference"])
        assert re.fullmatch(r"0\.0\d+ nats higher \(0\.0\d+ to 0\.0\d+\)", cells[-1])
    result["control"][1]["difference"] = None
    assert sections(markdown(result))["Was the distant context used?"][2][-1] == "-"


def test_bins(result):
    found = sections(markdown(result))
    for name, title in (
        ("chunk_position", "By position in the chunk"),
        ("document_position", "By position in the document"),
        ("document_length", "By length of the document"),
    ):
        header, *lines = found[title]
        assert header[2:] == ["short, nats", "long, difference"]
        rows = {(row["range"], row["label"]): row for row in result[name]}
        assert len(lines) == len({place for place, _ in rows})
        for place, _, loss, difference in lines:
            short, long = (rows.get((place, label)) for label in CONTEXTS)
            assert loss == (f"{short['nats']:.4f}" if short else "")
            known = long["difference"] is not None
            assert difference.split(" (")[0] == (f"{long['difference']:z.4f}" if known else "-")
    lines = {cells[0]: cells for cells in found["By position in the chunk"]}
    assert lines["32 to 63"][2:] == ["", "-"]  # the shorter model has no such position
    for title in ("By position in the document", "By length of the document"):
        assert not any("/" in scored for _, scored, *_ in found[title])  # the same for all models
    several = [rows["tokens"] for rows in result["chunk_position"] if rows["range"] == "8 to 15"]
    assert lines["8 to 15"][1] == " / ".join(f"{count:,}" for count in several)


def test_files(result, tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    write_report(result, out)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["evaluation.json", "report.md", *(f"{name}.png" for name in PICTURES)]
    )
    written = json.loads((out / "evaluation.json").read_text())
    assert written.pop("environment")["torch"]
    assert written == result
    for name in PICTURES:
        assert f"]({name}.png)" in (out / "report.md").read_text()
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / f"{name}.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    row = find(result["strided"], LONG, 64, stride=4, document_mask=False)
    assert f"{row['nats']:.4f}" in printed and f"{row['difference']['nats']:.4f} (-" in printed
    assert printed.endswith(f"wrote {out / 'report.md'}\n")

    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for path in out.iterdir():
        if path.name != "evaluation.json":
            path.unlink()
    report.main([str(out)])
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    made_by = (out / "report.md").read_text().index("This report was made by")
    assert (out / "report.md").read_text()[:made_by].rstrip() == markdown(result).rstrip()


def test_numbers_that_are_none(result, tmp_path):
    nan = [math.nan, math.nan]
    for row in (result["strided"][-1], result["chunk"][-1]):
        row |= {"nats": math.nan, "nats_interval": nan, "perplexity": math.nan}
        row["difference"] |= {"nats": math.nan, "interval": nan}
        row["nats_of_seeds"][1] = math.nan
    for name in TABLES[3:]:
        result[name][-1] |= {"interval": nan, "difference": math.nan, "difference_interval": nan}
    direct = markdown(result)
    write_report(result, tmp_path)
    text = (tmp_path / "evaluation.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    report = (tmp_path / "report.md").read_text()
    assert report.startswith(direct.rstrip()) and "nan" not in report
    assert sections(report)["On identical tokens"][-1][5:] == ["-"] * 2 + [
        f"{result['strided'][-1]['bits_per_byte']:.4f}", "-", "-"
    ]  # fmt: skip


@pytest.mark.parametrize("kept", [(), *((name,) for name in TABLES)], ids=str)
def test_tables_that_are_empty(kept, full, tmp_path, capsys):
    for name in PICTURES:
        (tmp_path / f"{name}.png").write_text("of an earlier evaluation")
    some = {**full, **{name: [] for name in TABLES if name not in kept}}
    write_report(some, tmp_path)
    titles = [f"## {title}" for title in sections(markdown(some))]
    assert len(titles) == 2 + len(kept)
    pictures = {path.stem for path in tmp_path.glob("*.png")}
    assert pictures == set(kept) & set(PICTURES)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    assert set(re.findall(r"\((\w+)\.png\)", markdown(some))) == pictures
    assert ("perplexity" in capsys.readouterr().out) == (kept in [("chunk",), ("strided",)])


def test_one_model_is_compared_with_nothing(result, tmp_path):
    result["runs"] = [run for run in result["runs"] if run["label"] == SHORT]
    for name in TABLES:
        result[name] = [row for row in result[name] if row["label"] == SHORT]
    write_report(result, tmp_path)
    report = (tmp_path / "report.md").read_text()
    assert "against" not in report and "Differences are to" not in report
    assert len(list(tmp_path.glob("*.png"))) == len(PICTURES)


def test_a_folder_without_an_evaluation(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no evaluation.json: give the --out of"):
        report.main([str(tmp_path)])


def test_what_runs_were_trained_on():
    def start(device, commit):
        return {"device": device, "torch": "2", "triton": "3", "commit": commit}

    runs = [{"starts": [start("A", "x"), start("B", "x")]}, {"starts": [start("A", "x")]}]
    both = "Trained on A with torch 2, triton 3, commit x; B with torch 2, triton 3, commit x"
    assert trained_on(runs) == f"{both}."
    assert trained_on([*runs, {"starts": []}]) == f"{both}; a machine that was not noted."
