"""Escaping of text from other people's runs in Markdown."""

import pytest

from evaluation.markdown import code, dict_table, escape, escaped

OURS = ["1k_then_4k_seed1", "NVIDIA H100 80GB HBM3", "x86_64", "2.13.0+cpu", "window 1,024", "a/b"]


@pytest.mark.parametrize("text", OURS)
def test_ordinary_text_is_unchanged(text):
    assert escape(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[click](http://here)",
        "![pixel](http://here)",
        "a | b",
        "`code`",
        "**bold**",
        "_cursive_",
        "~~gone~~",
        "$x$",
        "https://here",
        "www.here.org",
        "@somebody",
        "&lt;",
        "\\[",
        "a\n\n# title",
        "a\u2028b",
        "\x1b]52;c;\x07",
    ],
)
def test_markup_is_escaped(text):
    markdown_it = pytest.importorskip("markdown_it")
    rendered = markdown_it.MarkdownIt("gfm-like", {"linkify": False}).render(escape(text))
    shown = rendered.removeprefix("<p>").removesuffix("</p>\n")
    assert "<" not in shown and "\n" not in shown and "\x1b" not in shown
    assert "://" not in escape(text) and "www." not in escape(text) and "@" not in escape(text)


def test_a_command_can_be_copied():
    command = "python -m scripts.evaluate out/_a* $HOME ~/x --names [1]"
    assert code(command) == f"`{command}`"
    assert code("a`b\n# title") == "`a'b # title`"


def test_all_texts_in_a_result_are_escaped():
    assert escaped({"<a>": ["<", 1, None, ("|",)]}) == {"<a>": ["&#60;", 1, None, ["&#124;"]]}
    assert len(escape("x" * 5000)) == 1000


def test_columns_are_those_of_all_rows_and_a_lacking_cell_is_filled():
    rows = [{"run": "a", "at 1": "x"}, {"run": "b", "at 2": "y"}]
    header, line, a, b = dict_table(rows, missing="-").splitlines()
    assert (header, line) == ("| run | at 1 | at 2 |", "| --- | --- | --- |")
    assert (a, b) == ("| a | x | - |", "| b | - | y |")
    assert dict_table(rows).splitlines()[2:] == ["| a | x |  |", "| b |  | y |"]
