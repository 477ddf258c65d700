"""Scorings of a plan, and messages about those that it skips."""

from dataclasses import replace

import pytest

from evaluation.plan import Plan
from evaluation.sums import MIN_HISTORY_SHARE
from evaluation.windows import Scoring


def test_the_default_plan():
    contexts = (1024, 4096)
    assert Plan().scorings(1024, contexts) == [
        Scoring(history=1024, stride=1024),
        Scoring(history=1024, stride=128, first=4096),
    ]
    full = {"history": 4096, "stride": 512, "first": 4096}
    assert Plan().scorings(4096, contexts) == [
        Scoring(history=4096, stride=4096),
        Scoring(history=1024, stride=128, first=4096),
        Scoring(**full),
        *(
            Scoring(history=4096, stride=1024, first=4096, control=control, near=1024)
            for control in ("intact", "shuffle", "replace")
        ),
    ]
    assert Plan().scorings(1024, (1024,)) == [
        Scoring(history=1024, stride=1024),
        Scoring(history=1024, stride=128, first=1024),
        *(
            Scoring(history=1024, stride=256, first=1024, control=control, near=256)
            for control in ("intact", "shuffle", "replace")
        ),
    ]
    assert Plan().scorings(1024, (1024, 1024)) == Plan().scorings(1024, (1024,))


def names(plan, context, contexts, **options):
    return [scoring.name for scoring in plan.scorings(context, contexts, **options)]


def test_other_plans():
    plan = Plan(
        modes=("strided", "cross"), strides=(64, 512), histories=(256, 2048), document_masks=(True,)
    )
    assert names(plan, 1024, (1024, 4096)) == [
        "h256_s64_f4096_documents", "h1024_s64_f4096_documents", "h1024_s512_f4096_documents"
    ]  # fmt: skip
    both = Plan(modes=("chunk",), document_masks=(False, True))
    assert names(both, 32, (32,)) == ["h32_s32_f0", "h32_s32_f0_documents"]
    later = Plan(modes=("strided", "control"), strides=(8,), first=500, near=9)
    assert {scoring.first for scoring in later.scorings(32, (32, 64))} == {500}
    near = Plan(modes=("control",), strides=(8,), near=95)
    assert near.scorings(64, (64, 128)) == []
    assert names(near, 128, (64, 128)) == [
        f"h128_s32_f128_{control}95" for control in ("intact", "shuffle", "replace")
    ]
    assert replace(near, near=96).scorings(128, (64, 128)) == []  # no distant part is left
    wide = replace(near, strides=(8, 40, 33), near=87)
    assert {scoring.stride for scoring in wide.scorings(128, (64, 128))} == {40}
    assert replace(wide, near=88).scorings(128, (64, 128)) == []
    assert near.scorings(128, (128,), document_mask=True) == []
    with pytest.raises(ValueError, match="--stride=512 must be at most 256, the context of a run"):
        Plan(strides=(600, 512)).scorings(256, (256, 1024))
    side_by_side = Plan(modes=("strided",), strides=(256,))  # a stride may be all of a context
    assert names(side_by_side, 256, (256,)) == ["h256_s256_f256"]


@pytest.mark.parametrize("history", [1, 2, 7, 8, 9, 15, 16, 100, 1000])
def test_by_default_all_tokens_have_enough_context(history):
    (scoring,) = Plan(modes=("strided",)).scorings(history, (history, 1024))
    seen = scoring.seen(1024 + 1 + 500)[1024 + 1 :][: 500 // scoring.stride * scoring.stride]
    assert seen.min() >= MIN_HISTORY_SHARE * history and seen.max() == history


def test_compared_scorings_do_not_depend_on_the_runs():
    plan = Plan(strides=(16, 48), histories=(32, 64), near=4, first=64)
    both = set(plan.compared((32, 64)))
    assert set(plan.compared((32,))) == set(plan.compared((64,))) == both
    assert {(s.history, s.stride) for s in both if s.first and s.control == "none"} == {
        (32, 16), (64, 16), (64, 48)
    }  # fmt: skip
    alone = replace(plan, modes=("strided",)).compared((64,))  # --histories are for cross
    assert {s.history for s in alone} == {64}
    assert {s.history for s in replace(plan, histories=(128,)).compared((64,))} == {64}


def test_key_tokens_are_chosen_with_the_context_and_the_near_text():
    contexts = (1024, 4096)
    long, short = Plan().key_scorings(4096, contexts)
    assert long == Scoring(history=4096, stride=512, first=4096)  # also in the plan of this run
    assert short == Scoring(history=1024, stride=128, first=4096)
    assert {long, short} < set(Plan().scorings(4096, contexts))
    assert Plan().key_scorings(4096, (4096,))[1].history == 1024
    longer, _ = Plan(strides=(64, 300)).key_scorings(16384, contexts)
    assert longer == Scoring(history=16384, stride=64, first=16320)  # the first full window
    fine = Plan(strides=(64,), near=40, document_masks=(False,))
    long, short = fine.key_scorings(256, (128,), document_mask=True)
    assert (short.history, short.stride) == (40, 5)  # no stride of the plan is short enough
    assert not long.document_mask and not short.document_mask
    both = Plan(document_masks=(False, True)).key_scorings(256, (128,), document_mask=True)
    assert all(scoring.document_mask for scoring in both)
    for near in (0, 256, 300):
        with pytest.raises(ValueError, match=f"--near={near} is the short .* from 1 to 255.*--ne"):
            Plan(near=near).key_scorings(256, (256,))


MASKED = ("data.document_mask=true",)


@pytest.mark.parametrize(
    ("overrides", "options", "mode", "reason"),
    [
        ((), ("--near", 24), "control", "--near=24 must be below 24 for a distant part in windows "
         "of 32 tokens that slide by 8. Try a smaller --near, or a shorter --stride"),
        ((), ("--stride", 8, 32), "control", "windows of 32 tokens that slide by 32 have no "
         "distant part. Try a shorter --stride"),
        (MASKED, (), "control", "all runs were trained with data.document_mask, and"),
        ((), ("--histories", 7, 6), "cross", "--histories 6, 7 must include one between "
         "--stride=8 and the longest context, 32 tokens. Try other --histories or --stride"),
    ],
)  # fmt: skip
def test_skipped_modes_are_reported(train, result_of, capsys, overrides, options, mode, reason):
    folder = train("run", *overrides, steps=1)
    command = (folder, "--stride", 8, *options)
    for modes in ((mode,), ("chunk", mode)):
        with pytest.raises(ValueError, match=f"^--modes {mode} has nothing to score: {reason}"):
            result_of(*command, "--modes", *modes)
    assert not (folder / "scores").exists()
    capsys.readouterr()
    result = result_of(*command)
    assert f"skipping mode {mode}: {reason}" in capsys.readouterr().out
    assert len(result["chunk"]) == 1


def test_options_that_no_run_can_use_are_refused(train, result_of):
    folder = train("run", steps=1)
    for option, value in (("--histories", 33), ("--histories", 0), ("--stride", 33)):
        with pytest.raises(ValueError, match=f"^{option}={value} must be from 1 to .*, 32 tokens"):
            result_of(folder, option, 8, value)
    for option, value, least in (("--first", 0, 1), ("--near", -1, 0)):
        with pytest.raises(ValueError, match=f"^{option}={value} must be at least {least}$"):
            result_of(folder, option, value)
    with pytest.raises(ValueError, match="^--documents changes nothing with --modes control"):
        result_of(folder, "--modes", "control", "--documents", "masked")
    # of two histories, a run is scored with the one that fits
    result = result_of(folder, "--histories", 8, 64, "--first", 64, "--modes", "cross")
    assert [row["history"] for row in result["strided"]] == [8]
