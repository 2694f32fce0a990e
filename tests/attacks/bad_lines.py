"""Lines for the attack on rows: good ones, damaged in some way, and plain Python that splits them into fields."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

LIMIT = 64 << 10
NASTY: tuple[bytes, ...] = (
    *(b"", b" ", b"\x00", b"a\x00b", b"\r", b"\\", b"\xff", b"a\xfe\xffb", b"\xed\xa0\x80", b"\xc3", b"\x85"),
    *(b'"', b'""', b'"""', b'"a', b'a"', b'a"b', b'"a"', b'"a""b"', b'"a"b', b'"a,b;c\td"', b'\\"', b'"\\""', b"'a'"),
    *(b"nan", b"NaN", b"inf", b"-inf", b"Infinity", b"1e400", b"-1e400", b"3.4e38", b"3.5e38", b"1e-400", b"-0", b"+1"),
    *(b"9" * 30, b"-" + b"9" * 30, b"9223372036854775807", b"-9223372036854775808", b"9007199254740993", b"2", b"-1"),
    *(b"0x10", b"1_000", b" 1", b"1 ", b".5", b"5.", b".", b"1e", b"1e5", b"1d5", b"--1", b"0.1", b"1.0", b"true"),
    *(b",", b";", b"\t", b"::", b"|", b"a|b||c", b"1\x1f2", b"NULL", b"#", b"14102100", b"14132400", b"1410210a"),
    *("١".encode(), "é".encode(), "\u2028".encode(), "\U0001f600".encode(), "e\u0301".encode(), "\ufeff".encode()),
    *(b"x" * LIMIT, b"x" * (LIMIT + 1), "é".encode() * (LIMIT // 2) + b"x", b"1" * 5000, b"\n", b"\r\n", b"a\nb"),
)  # fmt: skip


def nasty(chosen: random.Random) -> bytes:
    return chosen.randbytes(chosen.randrange(12)) if chosen.random() < 0.2 else chosen.choice(NASTY)


def make_line(chosen: random.Random, good: Sequence[bytes], separator: bytes) -> bytes:
    """A good line, or one that is damaged in some way; it may hold line breaks."""
    fields = list(good)
    damage = chosen.randrange(10)
    if damage < 6:
        for _ in range(chosen.choice((0, 1, 1, 1, 2, 5))):
            fields[chosen.randrange(len(fields))] = nasty(chosen)
    elif damage == 6:
        del fields[chosen.randrange(len(fields)) :]
    elif damage == 7:
        fields.insert(chosen.randrange(len(fields) + 1), nasty(chosen))
    line = separator.join(fields)
    if damage == 8:
        line = line[: chosen.randrange(len(line) + 1)]
    if damage == 9:
        line = b"".join(nasty(chosen) for _ in range(chosen.randrange(4)))
    return line + chosen.choice((b"", b"", b"", b"\r"))


def make_lines(
    chosen: random.Random, number: int, good: Callable[[], Sequence[bytes]], separator: bytes
) -> list[bytes]:
    """Lines as a reader counts them; the first is good."""
    lines = [separator.join(good())]
    while len(lines) < number:
        lines += make_line(chosen, good(), separator).split(b"\n")
    return lines


def decoded(line: bytes, encoding: str = "utf-8") -> str | None:
    """The text of a line without its end; None where it is not text, is empty, or has a carriage return inside."""
    try:
        text = line.removesuffix(b"\r").decode(encoding)
    except UnicodeDecodeError:
        return None
    return None if "\r" in text or not text else text


def split_quoted(text: str, separator: str, escape: str = "") -> list[str] | None:
    """The fields of a line with quotes; None where a quote is open or inside a field."""
    if escape:
        text = text.replace(f'{escape}"', '""')
    fields, place = [], 0
    while True:
        if text.startswith('"', place):
            match = re.compile(r'"((?:[^"]|"")*)"').match(text, place)
            if match is None:
                return None
            fields.append(match[1].replace('""', '"'))
            place = match.end()
            if place < len(text) and text[place] != separator:
                return None
        else:
            end = text.find(separator, place)
            fields.append(text[place : end if end >= 0 else len(text)])
            if '"' in fields[-1]:
                return None
            place = end if end >= 0 else len(text)
        if place == len(text):
            return fields
        place += 1


def split_csv(text: str) -> list[str] | None:
    """Fields of RFC 4180; a quote inside a field without quotes around it is a character."""
    fields, place = [], 0
    while True:
        match = re.compile(r'"((?:[^"]|"")*)"(?=,|$)|(?!")[^,]*(?=,|$)').match(text, place)
        if match is None:
            return None
        fields.append(match[1].replace('""', '"') if match[1] is not None else match[0])
        if match.end() == len(text):
            return fields
        place = match.end() + 1
