"""Changes of bytes and of JSON, each drawn from a seed, so that a file can be made again from its number."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

COUNTS = (1, 1, 1, 2, 3, 8)  # changes in one file
LENGTHS = [
    0,
    1,
    2**7,
    2**8 - 1,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
MOST_ENTRIES = 10_000
TOKENS = (
    b"\0",
    b"\xff" * 8,
    b"(" * 60,
    b"[" * 3000,
    b'{"a":' * 50,
    b"9" * 5000,
    b"NaN",
    b"-1",
    b"\r\n\r\n",
    b"\x1b[2J",
)
TEXTS = (
    *(
        "",
        "\x1b[2J",
        "a\nb",
        "\u202e",
        "\ud800",
        "0",
        "nan",
        "true",
        "__class__",
        "../../etc",
        "x" * 3000,
        "<b>",
    ),
    *(
        "stages.0",
        "source.head.weight",
        "head",
        "F32",
        "I64",
        "BOOL",
        "FP32",
        "BYTES",
        "diffusion",
        "feature",
    ),
    *(
        "ensbridge.nets:ResNet",
        "ensbridge.nets:Tail",
        "ensbridge.deploy.saving:load",
        "os:system",
        "torch:load",
    ),
    *("torch.nn:Linear", "torch.nn:Transformer", "builtins:exec", "subprocess:Popen", "digits", "cifar10"),
)
NUMBERS = (
    *(0, -1, 1, 2, 3, 255, 10**6, 2**31, 2**40, 2**63, 2**64, 10**30, 10**400, -(10**400)),
    *(-0.0, 0.5, 1.0, 1e-320, 1e-9, 1e9, 1e300, math.inf, -math.inf, math.nan),
)

# ------------------------------------------------------------------------------ bytes


def mutate_bytes(content: bytes, draws: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A file with one to eight changes; `others` are files of its kind, of which pieces may come in."""
    for _ in range(draws.choice(COUNTS)):
        content = draws.choice(_WAYS)(content, draws, others or (content,))
    return content


def _at(content: bytes, draws: random.Random) -> int:
    """A place in a file; two of three are near its ends, where formats have their headers."""
    share = draws.choice((0.1 * draws.random(), 1 - 0.1 * draws.random(), draws.random()))
    return min(int(share * len(content)), max(0, len(content) - 1))


def _flip(content: bytes, draws: random.Random, _: Sequence[bytes]) -> bytes:
    changed = bytearray(content or b"\0")
    for _count in range(draws.choice((1, 1, 4, 32))):
        changed[_at(content, draws)] ^= 1 << draws.randrange(8)
    return bytes(changed)


def _overwrite(content: bytes, draws: random.Random, _: Sequence[bytes]) -> bytes:
    at, new = _at(content, draws), draws.randbytes(draws.choice((1, 2, 4, 16)))
    return content[:at] + new + content[at + len(new) :]


def _truncate(content: bytes, draws: random.Random, _: Sequence[bytes]) -> bytes:
    return content[: _at(content, draws)]


def _delete(content: bytes, draws: random.Random, _: Sequence[bytes]) -> bytes:
    at = _at(content, draws)
    return content[:at] + content[at + draws.choice((1, 2, 8, 64, 512)) :]


def _double(content: bytes, draws: random.Random, _: Sequence[bytes]) -> bytes:
    at = _at(content, draws)
    return content[: at + draws.choice((1, 8, 64, 512))] + content[at:]


def _length(content: bytes, draws: random.Random, _: Sequence[bytes]) -> bytes:
    """A number where a length may be, in one of the sizes and orders that formats have."""
    size = draws.choice((1, 2, 4, 8))
    number = draws.choice((*LENGTHS, len(content), len(content) + 1, draws.randrange(1000))) % 2 ** (8 * size)
    at = _at(content, draws)
    return content[:at] + number.to_bytes(size, draws.choice(("little", "big"))) + content[at + size :]


def _splice(content: bytes, draws: random.Random, others: Sequence[bytes]) -> bytes:
    other = draws.choice(others)
    start = _at(other, draws)
    piece = other[start : start + draws.choice((4, 64, 1024, len(other)))]
    at = _at(content, draws)
    return content[:at] + piece + content[at + draws.choice((0, len(piece))) :]


def _token(content: bytes, draws: random.Random, _: Sequence[bytes]) -> bytes:
    at = _at(content, draws)
    return content[:at] + draws.choice(TOKENS) + content[at:]


_WAYS: tuple[Callable[[bytes, random.Random, Sequence[bytes]], bytes], ...] = (
    *(_flip, _overwrite, _truncate, _delete, _double, _length, _length, _splice, _token),
)

# ------------------------------------------------------------------------------ JSON


def mutate_json(document: Any, draws: random.Random) -> bytes:
    """The text of a document with a few values, keys or types changed; one in five is damaged as text too."""
    whole = [copy.deepcopy(document)]
    for _ in range(draws.choice(COUNTS)):
        entries = [*_entries(whole)]
        if not 0 < len(entries) < MOST_ENTRIES:  # repeated pieces of repeated ones would have no end
            break
        holder, key = draws.choice(entries)
        _change(holder, key, draws, document)
    text = json.dumps(whole[0] if whole else None).encode("utf-8", "surrogatepass")
    return mutate_bytes(text, draws) if draws.random() < 0.2 else text


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a document with each of its keys."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _entries(value[key])


def _change(holder: Any, key: Any, draws: random.Random, document: Any) -> None:
    old = holder[key]
    match draws.choice(
        ("alike", "alike", "alike", "any", "remove", "add", "elsewhere", "scale", "repeat", "nest")
    ):
        case "remove":
            del holder[key]
        case "add" if isinstance(holder, dict):
            holder[draws.choice(TEXTS)] = _value(draws)
        case "add":
            holder.insert(key, _value(draws))
        case "elsewhere":  # a value of the same document
            inner, name = draws.choice([*_entries([document])])
            holder[key] = copy.deepcopy(inner[name])
        case "scale" if isinstance(old, int | float) and abs(old) < 10**9:
            holder[key] = old * draws.choice((-1, 0, 2, 0.5, 1000, 10**9, 10**18))
        case "repeat" if isinstance(old, list) and len(old) < 100:
            holder[key] = old * draws.choice((0, 2, 70, 500))
        case "nest":
            holder[key] = _nested(draws.choice((1, 3, 300)), old)
        case "alike":  # which comes further than another type does
            holder[key] = _like(old, draws)
        case _:
            holder[key] = _value(draws)


def _like(old: Any, draws: random.Random) -> Any:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return draws.choice(
            [*(n for n in NUMBERS if isinstance(n, int)), old + 1, old - 1, draws.randrange(20)]
        )
    if isinstance(old, float):
        return draws.choice([*(n for n in NUMBERS if isinstance(n, float)), old / 3, draws.random()])
    if isinstance(old, str):
        return draws.choice((*TEXTS, old[1:], old + "x", old.upper(), old * 2))
    return _value(draws)


def _value(draws: random.Random, depth: int = 2) -> Any:
    kind = draws.randrange(6 if depth else 4)
    if kind == 4:
        return [_value(draws, depth - 1) for _ in range(draws.randrange(4))]
    if kind == 5:
        return {draws.choice(TEXTS): _value(draws, depth - 1) for _ in range(draws.randrange(4))}
    return draws.choice(((None, True, False), NUMBERS, TEXTS, (draws.randrange(-3, 20),))[kind])


def _nested(depth: int, value: Any) -> Any:
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value
