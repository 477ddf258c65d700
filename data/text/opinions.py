"""Labels of appellate opinions: whether the court affirmed the judgment, and the text before that.

The label comes from the disposition, such as "The judgment is reversed and the case is remanded.",
at the end of the opinion of the court. The text ends where the disposition begins. Earlier
sentences that name a result, which many opinions announce first, are removed: otherwise a
classifier would only have to find them.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

MAX_CHARS_AFTER = 3000
"""Limit for the text between the disposition and the notes, separate opinions or end of the text.

A footnote of the last page can follow. A longer rest suggests that the disposition was missed."""

MIN_CHARS = 1000
"""Minimum length of the text that is left."""

_MIN_OPINION = 1500  # separate opinions and notes start after the caption, which may name them
_GAP = 3  # sentences between two of a disposition, at most
_ABBREVIATIONS = re.compile(
    "v|vs|Nos?|Inc|Co|Corp|Ltd|Mr|Mrs|Ms|Dr|Jr|Sr|St|Cir|Ct|Dist|Fed|Supp|App|Rev|Stat|Civ|Crim|"
    "Art|Sec|[Cc]f|cert|Bankr|Mass|Hon|al|seq|Evid|[A-Za-z0-9]"
)
_SENTENCE_END = re.compile(r"([\w'-]*)[.?!][\"”’')\]]*\s+(?=[\"“‘(\[]*[A-Z0-9])")
_AFTER_OPINION = re.compile(
    r"\n\s*(?:foot)?notes:?\s*\n|"
    r"\bJudges?,?\s+\(?(?:with whom [^.]{5,80},\s+)?(?:specially\s+)?(?:concurring|dissenting)",
    re.IGNORECASE,
)
# Any form of a result, for removal: better to remove a sentence too many
_ANY_RESULT = re.compile(
    r"\b(?:affirm|revers|vacat|remand|uph[eo]ld)\w*|\bset\w*\s+aside\b|\bsummar(?:y|ily)\s+dispos",
    re.IGNORECASE,
)
# "we affirm", "the judgment is affirmed", "Affirmed."; not "we may affirm", "asks that we affirm"
_NO = "may|might|can|cannot|could|would|not|never|only|declined?|whether|if|that|which|who"
_WORDS = rf"(?:,?\s+(?!(?:{_NO})\b)[\w'-]+){{0,8}}?,?\s+"
_WE = rf"(?<!that )(?<!if )\bwe{_WORDS}"
_ANNOUNCES = re.compile(
    rf"(?i:{_WE}(?:affirm|reverse|vacate|remand|set\s+aside)\b)|"
    rf"(?i:\b(?:is|are|be){_WORDS}(?:(?:affirm|revers|vacat|remand)ed|set\s+aside)\b)|"
    r"\b(?:Affirmed|Reversed|Vacated|Remanded|AFFIRM(?:ED)?|REVERSED?|VACATED?|REMAND(?:ED)?)"
    r"(?=\s*(?:[.;,]|$|in part|and|as|without|with))|\b[Jj]udgment (?:affirmed|reversed|vacated)\b"
)
_WE_OVERTURN = re.compile(rf"{_WE}(?:reverse|vacate|set\s+aside)\b", re.IGNORECASE)
_OVERTURNS = re.compile(
    r"(?<!\bto )(?<!\bof )(?<!\bthe )(?<!\bor )(?<!\bnot )(?<!\bnot be )(?<!\bwas )(?<!\bcourt )"
    r"(?<!properly )(?<!correctly )\b(?:reverse|vacate|set aside)d?\b",
    re.IGNORECASE,
)
# Petitions are decided in other words than judgments, so all of them are left out
_PETITION = re.compile(
    r"\bpetitions?\s+for\s+(?:judicial\s+)?(?:review|enforcement|rehearing)\b|\bpetitions?\s+(?:is|"
    r"are)\s+(?:denied|granted|dismissed)\b|\b(?:deny|grant|dismiss)\s+the\s+petition|\benforced\b",
    re.IGNORECASE,
)
_CHANGED = re.compile(  # affirmances that are not of the whole judgment
    r"\bremand|\bmodif|\bas\s+amended\b|\bexcept\b|\botherwise\s+affirm|\bin\s+part\b|\bother\s+"
    r"respects\b|\b(?:we|and)\s+dismiss\b|\bappeals?\b[^.;]{0,100}\bdismissed\b|^dismissed|"
    r"\. dismissed\.",
    re.IGNORECASE,
)


class Opinion(NamedTuple):
    """An opinion without its result."""

    text: str
    affirmed: bool
    """True if the judgment was affirmed entirely, False if any part was reversed or vacated."""
    disposition: str
    """Sentences that the label was read from."""


def label_opinion(text: str) -> Opinion | None:
    """Read the label of an opinion, and remove the result from its text.

    Args:
        text: whole opinion, including notes and separate opinions.

    Returns:
        None if there is no clear disposition of a judgment near the end: for example if an appeal
        is dismissed, a petition is decided, or a judgment is affirmed with changes. None also if
        little text is left.
    """
    after = _AFTER_OPINION.search(text, _MIN_OPINION)
    end = after.start() if after else len(text)
    sentences = [text[a:b] for a, b in _sentences(text[:end])]
    results = [i for i, sentence in enumerate(sentences) if _ANNOUNCES.search(sentence)]
    if not results or len("".join(sentences[results[-1] + 1 :])) > MAX_CHARS_AFTER:
        return None
    first = results[-1]
    for number in reversed(results):
        if first - number > _GAP:
            break
        first = number
    disposition = " ".join("".join(sentences[first : results[-1] + 1]).split())
    is_petition = _PETITION.search("".join(sentences[first:]))
    affirmed = None if is_petition else _is_affirmed(disposition)
    earlier = [sentences[i] for i in results if i < first]
    if affirmed and any(_WE_OVERTURN.search(sentence) for sentence in earlier):
        affirmed = None
    if affirmed is None:
        return None
    kept = "".join(s for s in sentences[:first] if not _ANY_RESULT.search(s))
    return Opinion(kept.strip(), affirmed, disposition) if len(kept) >= MIN_CHARS else None


def _is_affirmed(disposition: str) -> bool | None:
    """Label of a disposition, or None if it is unclear."""
    affirms = re.search(r"\baffirm(?:ed)?\b", disposition, re.IGNORECASE) is not None
    if _OVERTURNS.search(disposition):
        # An affirmance can also end a stay
        return None if affirms and re.search(r"\bstay", disposition, re.IGNORECASE) else False
    return True if affirms and not _CHANGED.search(disposition) else None


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each sentence; together, they cover the text.

    Line ends do not count, because scanned opinions have them inside of sentences.
    """
    ends = [m.end() for m in _SENTENCE_END.finditer(text) if not _ABBREVIATIONS.fullmatch(m[1])]
    yield from pairwise([0, *(end for end in ends if end < len(text)), len(text)])
