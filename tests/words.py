"""Check text for words that the project avoids, and name what to write instead.

python -m tests.words FILE_OR_FOLDER...
python -m tests.words --commit-message FILE    # also checks the form of its subject
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

AVOIDED = {
    r"\b(go|goes|going|went|gone) on\b": "continue or resume",
    r"\bbeside\b": "next to, alongside or in addition to",
    r", too(?=\s*[\"'.,;:)\]]|\s*$)": "also",
    r"\b(told|tells)\b(?! \w+ apart)": "passed, reported, given or estimated",
    r"\b(anew|once more)\b": "again",
    r"\b(foretold|foretells?)\b": "predicted",
    r"\blikewise\b": "similarly",
    r"\bof today\b": "modern or current",
    r"\bso (many|much)\b(?! that)": "N or the number of",
    r"\b(lies|stands(?! for)|has its place)\b": "is",
    r"\b(share|shares|shared|sharing) out\b": "shard",
    r"\b(by whom|who computes)\b": "which implementation",
    r", say(?=[\s.,;:)]|$)": "for example",
    r'"""(Of|Those|That|What|Who|Whose)\b': "a noun phrase or an imperative",
    r"(?<!\bthere )\b(is|are|was|were) no (?!longer|more|less|lower)[a-z]": "is not",
    r"\bno \w+ (is|are) one\b": "is not",
}
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml"}
EXEMPT = {"words.py", "test_words.py"}
SUBJECT = re.compile(r"[a-z0-9_./,+-]+: .+")


def offences(text: str) -> Iterator[str]:
    """A line for each avoided word: its line number, the line and what to write instead.

    Names are read as words: `goes_on` is avoided as well.
    """
    for number, line in enumerate(text.splitlines(), 1):
        names = [word.replace("_", " ") for word in re.findall(r"\w+", line) if "_" in word]
        words = "; ".join([line, *names])
        for pattern, instead in AVOIDED.items():
            if found := re.search(pattern, words, re.IGNORECASE):
                yield f"{number}: {line.strip()!r}: write {instead} for {found.group().strip()!r}"


def subject_offences(message: str) -> Iterator[str]:
    """What is wrong with the subject of a commit message."""
    subject = message.split("\n", 1)[0]
    if subject.startswith(("Merge ", "Revert ", "fixup! ", "squash! ")):
        return
    if not SUBJECT.fullmatch(subject):
        yield f"1: {subject!r}: write `area: imperative`"
    if len(subject) > 72:
        yield f"1: {subject!r}: {len(subject)} characters, of at most 72"


def main(arguments: list[str]) -> int:
    """Print the offences in these files; returns how many there are."""
    n = 0
    is_message = arguments[0] == "--commit-message"
    for place in map(Path, arguments[is_message:]):
        files = [place] if place.is_file() else sorted(place.rglob("*"))
        for file in files:
            if not is_message and (file.suffix not in SUFFIXES or file.name in EXEMPT):
                continue
            text = file.read_text()
            if is_message:  # without the diff that `git commit --verbose` adds
                text = text.partition("\n# ------------------------ >8")[0]
            for line in (*(subject_offences(text) if is_message else ()), *offences(text)):
                sys.stdout.write(f"{file}:{line}\n")
                n += 1
    return n


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
