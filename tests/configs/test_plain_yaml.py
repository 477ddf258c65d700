"""Untrusted YAML: plain data, or one error sentence that does not quote it."""

import pytest

from configs.plain_yaml import MAX_BYTES, YamlError, dump, load, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("524_288", 524_288),
        ("-0", 0),
        ("1e-3", 1e-3),
        ("1.", 1.0),
        (".inf", float("inf")),
        ("-inf", float("-inf")),
        ("true", True),
        ("null", None),
        ("", None),
        # text that YAML 1.1 reads as another type
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("2024-01-01", "2024-01-01"),
        ("1__0", "1__0"),
        ("'8'", "8"),
        ("${oc.env:HOME}", "${oc.env:HOME}"),
        ("[0.9, {a: b}]", [0.9, {"a": "b"}]),
    ],
)
def test_scalars_have_the_type_they_look_like(text, value):
    actual = parse(text).values
    assert actual == value
    assert type(actual) is type(value)


def test_each_key_has_a_line():
    assert parse("a:\n  b: 1\nc:\n- d: 2\n- d: 3\n").lines == {
        "a": 1, "a.b": 2, "c": 3, "c[].d": 4
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("s3cr3t: [1", "cannot be parsed at line 1"),
        ("\ts3cr3t: 1", "cannot be parsed at line 1, column 1: indent with spaces"),
        ("a: 's3cr3t", "cannot be parsed at line 1"),
        ("a: !s3cr3t!x 1", "cannot be parsed at line 1"),
        ("a: !s3cr3t 1", "line 1 has a tag"),
        ("a: !!python/object/apply:os.system [s3cr3t]", "line 1 has a tag"),
        ("a: &s3cr3t 1\nb: 2", "line 1 has an anchor"),
        ("a: 1\nb: *s3cr3t", "line 2 has an anchor or an alias"),
        ("s3cr3t: 1\nb: 2\ns3cr3t: 3", "line 3 sets a key again that line 1 sets"),
        ("a: 1\n---\ns3cr3t: 2", "line 2 begins a second document"),
        ("? [s3cr3t]\n: 1", "line 1 has a key that is not a name"),
        ("model.s3cr3t: 1", "line 1 has a key that is not a name"),
        ("a: s3cr3t\x00", "character 9 is a control character"),
        ('a: "s3cr3t \\UFFFFFFFF"', "out of range"),
        (f"%YAML {'9' * 5000}.1\n--- s3cr3t", "out of range"),
        ("a: " + "[" * 1000 + "s3cr3t", "line 1 is nested more than 12 deep"),
        ("{a: " * 100_000, "line 1 is nested more than 12 deep"),
    ],
)
def test_yaml_that_is_not_plain_is_refused_and_not_quoted(text, reason):
    with pytest.raises(YamlError, match=reason) as error:
        parse(text)
    assert "s3cr3t" not in str(error.value)
    assert error.value.__cause__ is None  # a cause would be printed with -X dev


def test_encoding_and_size_of_files(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert load(path).values == {"a": 1}  # some editors write UTF-8 with a byte order mark
    path.write_bytes(b"a: \xff\n")
    with pytest.raises(YamlError, match="byte 3 is not UTF-8"):
        load(path)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(YamlError, match=f"{1 << 40} bytes, and a configuration may .* {MAX_BYTES}"):
        load(path)


def test_dump_round_trips():
    texts = ["no", "1e-3", "1:30", "8", "~", "", "inf", "a: b # c", "é", "true", "1_0", " x ", "-"]
    values = {"texts": texts, "again": texts, "numbers": [1e-8, 6e-4, 1e22, 8, float("inf")],
              "others": [True, None, [], {"x": [{"path": "a"}]}]}  # fmt: skip
    assert parse(dump(values)).values == values
