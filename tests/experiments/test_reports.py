"""Parts that reports share."""

import pytest

from experiments.reports import tokens_text


@pytest.mark.parametrize(
    ("tokens", "said"), [(117_964_800, "118M"), (999.6e6, "1B"), (1.554e9, "1.55B"), (2e10, "20B")]
)
def test_tokens_are_rounded(tokens, said):
    assert tokens_text(tokens) == said
