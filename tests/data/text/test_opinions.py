"""Labels of made-up appellate opinions, and removal of what gives the label away."""

import pytest

from data.text.opinions import MAX_CHARS_AFTER, label_opinion

CAPTION = (
    "No. 93-1\n\nJANE ROE,\n\nPlaintiff, Appellant, v.\n\nACME CO.,\n\nDefendant, Appellee.\n\n"
    "Before Poe and Doe,\n\nCircuit Judges.\n\n"
)
REASONS = (
    "Roe slipped on ice. The jury found for Acme. See Coe v. Moe, 1 F.2d 3 (1st Cir. 1950). " * 20
)
SEPARATE = "\n\nPOE, Circuit Judge, dissenting. I would reverse. We reverse such awards as a rule."
NOTES = "\n\nNOTES\n\n[1] In Coe, the judgment is reversed on other grounds."


def opinion(disposition: str, before: str = "", after: str = "") -> str:
    return f"{CAPTION}{before}{REASONS}{disposition}{after}"


def label(disposition: str, before: str = "", after: str = "") -> bool | None:
    result = label_opinion(opinion(disposition, before, after))
    return None if result is None else result.affirmed


@pytest.mark.parametrize(
    "disposition",
    [
        "Affirmed.",
        "AFFIRMED",
        "Affirmed.\n\nAffirmed.",
        "Judgment affirmed.",
        "The judgment of the district court is\n\nAffirmed. Costs to appellee.",
        "For these reasons, the judgment must, therefore, be affirmed.",
        "We allow the motion to withdraw and summarily affirm the judgment.",
        "We affirm. It is so ordered.",
        "The denial of Roe's motion to vacate sentence under 28 U.S.C. 2255 is affirmed.",
        "As the court correctly reversed the award, we affirm. Affirmed.",
        "We lack any basis to set aside the order.\n\nAffirmed.",
        "The complaint was properly dismissed. Affirmed.",
        "The order dismissing the petition is affirmed.",
        "The judgment is affirmed. The motion for argument is denied as moot.",
    ],
)
def test_affirmed(disposition):
    assert label(disposition) is True


@pytest.mark.parametrize(
    "disposition",
    [
        "Reversed.",
        "Judgment reversed; cause remanded for trial.",
        "Vacated and remanded for further proceedings. No costs.",
        "The sentence is vacated and the case is remanded for resentencing.",
        "The award is set aside.",
        "We REVERSE the judgment of acquittal.",
        "We therefore must vacate the decision of the district court.",
        "Affirmed in part, reversed in part, and remanded.",
        "The convictions are affirmed. The sentence of Roe is vacated.",
        "We vacate the fee award and otherwise affirm.",
    ],
)
def test_reversed_or_vacated_in_any_part(disposition):
    assert label(disposition) is False


@pytest.mark.parametrize(
    "disposition",
    [
        "",
        "So ordered.",
        "The appeal is dismissed.",
        "The petition for review is denied.",
        "We affirm the order of the Board. The petition is denied.",
        "We grant the petition for review, vacate the order, and remand.",
        "Affirmed as modified.",
        "The judgment is affirmed, except as concerns the fees.",
        "We affirm the conviction and dismiss the claim of ineffective assistance.",
        "Affirmed in part, dismissed in part.",
        # an interlocutory order can be affirmed entirely and the case still be sent back
        "The injunction is affirmed and the cause is remanded for further proceedings.",
        "The order is affirmed. Our order staying the payment is vacated.",
        "This would be different if we reversed. The district court affirmed the award.",
    ],
)
def test_unclear(disposition):
    assert label(disposition) is None


def test_an_earlier_reversal_contradicts_a_final_affirmance():
    others = "All other convictions are affirmed."
    assert label(others, before="We reverse the firearms convictions. ") is None
    assert label("Reversed.", before="We affirm the denial of a new trial. ") is False


def test_result_of_another_court_does_not_count():
    cited = "Coe v. Moe, 1 F.2d 3 (1st Cir.), aff'd, 2 U.S. 4 (1951). "
    assert label("Reversed.", before=cited) is False
    assert cited.strip() in label_opinion(opinion("Reversed.", before=cited)).text
    assert (
        label("Affirmed.", before="In Coe, the court reversed. The Board had vacated it. ") is True
    )


@pytest.mark.parametrize("after", [SEPARATE, NOTES, SEPARATE + NOTES])
def test_separate_opinions_and_notes_do_not_count(after):
    result = label_opinion(opinion("Affirmed.", after=after))
    assert result is not None and result.affirmed
    assert result.text == (CAPTION + REASONS).strip()


def test_a_caption_may_name_a_dissent():
    assert label("Affirmed.", before="Poe, Circuit Judge, dissenting, filed an opinion. ") is True


def test_text_ends_at_the_first_sentence_of_the_disposition():
    parts = "We affirm count one. Count two is another matter. We vacate count two."
    result = label_opinion(opinion(parts, after="\n\n7. A footnote of the last page."))
    assert result is not None and not result.affirmed
    assert result.disposition == parts
    assert result.text == (CAPTION + REASONS).strip()


def test_a_footnote_may_follow_but_not_half_an_opinion():
    assert label("Affirmed.", after=" X" * (MAX_CHARS_AFTER // 2)) is True
    assert label("Affirmed.", after=" X" * (MAX_CHARS_AFTER // 2 + 1)) is None


@pytest.mark.parametrize(
    "announcement",
    [
        "Finding no error, we affirm. ",
        "We therefore affirm the denial of the motion to suppress. ",
        "We reverse. ",
        "Summary affirmance is in order. ",
        "On remand, the district court should hear the witness. ",
        "On remand, other evidence is welcome. ",
        "This error requires reversal. ",
        "We uphold the verdict. ",
        "We will vacate the award, unless Roe accepts less. ",
    ],
)
def test_earlier_sentences_with_the_result_are_removed(announcement):
    result = label_opinion(opinion("Reversed.", before=announcement))
    assert result is not None and result.text == (CAPTION + REASONS).strip()


@pytest.mark.parametrize(
    "sentence",
    [
        "Roe asks that we reverse.",
        "We may affirm on any ground in the record.",
        "We decline to reverse.",
        "Findings will not be reversed unless clearly erroneous.",
        "The Board affirmed, and the district court reversed.",
        "It is a judgment which has been reversed or vacated.",
        "We review the order to remand.",
    ],
)
def test_rules_and_requests_do_not_count(sentence):
    assert label("Affirmed.", before=f"{sentence} ") is True


def test_abbreviations_do_not_end_sentences():
    before = "We affirm as to Dr. Coe, Acme Co. and J. Moe. "
    result = label_opinion(opinion("Affirmed.", before=before))
    assert result is not None and result.text == (CAPTION + REASONS).strip()


@pytest.mark.parametrize("text", ["", "AFFIRMED.", CAPTION + "The judgment is affirmed."])
def test_a_text_that_is_empty_without_its_result_has_no_label(text):
    assert label_opinion(text) is None
