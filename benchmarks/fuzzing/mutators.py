"""Ways to spoil a value, an array, a tree of values, and bytes."""

import copy
import io
import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

INTEGERS = [0, 1, -1, 2, 7, 255, 256, 2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 10**9, 10**18]
HUGE = [2**63, 2**64, 10**30, -(10**30)]  # no message carries these, but a file does
FLOATS = [0.0, -0.0, 1.0, 0.1, -1.0, 5e-324, 1e-300, 1e-30, 1e-7, 1e7, 3.5e38, 1e300, math.nan, math.inf, -math.inf]
TEXTS = ["", " ", "x", "nan", "-1", "1e999", "true", "null", "../../../etc/passwd", "/dev/zero", "os:system", "a.b:C",
         "\x1b[2J\x1b]0;owned\x07", "\x00", "line\nbreak\r", "\u202egnp.exe", "\ud800", "é" * 50, "𝕏" * 9, "%s%n{0}",
         "fedavg", "0" * 64, "f" * 16, "[" * 2000, "{" * 2000, "(" * 500, "x" * 70_000, "fedavg+" * 300,
         "__class__"]  # fmt: skip


def odd_number(chance: Random) -> Any:
    return chance.choice([*INTEGERS, *FLOATS, chance.uniform(-10, 10), chance.getrandbits(63), True, False])


def odd_scalar(chance: Random) -> Any:
    """A number, truth value, text or bytes, as a field of a message may have."""
    kinds: list[Callable[[], Any]] = [
        lambda: odd_number(chance),
        lambda: chance.choice(TEXTS),
        lambda: chance.randbytes(chance.randint(0, 40)),
        lambda: "".join(chr(chance.randrange(1, 0x300)) for _ in range(chance.randint(1, 20))),
    ]
    return chance.choice(kinds)()


def odd_field(chance: Random) -> Any:
    """What Flower's records take: a scalar or a list of scalars of one type."""
    kinds: list[Callable[[], Any]] = [
        lambda: odd_scalar(chance),
        lambda: odd_scalar(chance),
        lambda: [chance.choice(INTEGERS) for _ in range(chance.randint(0, 5))],
        lambda: [chance.choice(FLOATS) for _ in range(chance.randint(0, 5))],
        lambda: ["x" * chance.choice([0, 1, 5000])] * chance.randint(0, 40),
    ]
    return chance.choice(kinds)()


def odd_value(chance: Random) -> Any:
    """What a JSON or TOML file can hold."""
    kinds: list[Callable[[], Any]] = [
        lambda: odd_number(chance),
        lambda: chance.choice(HUGE),
        lambda: chance.choice(TEXTS),
        lambda: None,
        lambda: [],
        lambda: {},
        lambda: [odd_number(chance) for _ in range(chance.randint(1, 4))],
        lambda: {chance.choice(["name", "x", "", "round"]): odd_number(chance)},
        lambda: nested(chance.choice([3, 40, 300]), chance.random() < 0.5),
    ]
    return chance.choice(kinds)()


def nested(depth: int, lists: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


def spoilt_tree(chance: Random, tree: Any) -> Any:
    """The tree with one to three places changed: another value, gone, renamed, doubled or swapped."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        places = [*_places(tree)]
        if not places:
            return odd_value(chance)
        parent, key = chance.choice(places)
        how = chance.randrange(8)
        if how == 0 and isinstance(parent, dict):
            del parent[key]
        elif how == 1 and isinstance(parent, dict):
            parent[str(chance.choice(TEXTS))] = parent.pop(key)
        elif how == 2 and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif how == 3:
            other, place = chance.choice(places)
            parent[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(parent[key])
        else:
            parent[key] = odd_value(chance)
    return odd_value(chance) if chance.random() < 0.02 else tree


def _places(tree: Any, depth: int = 0) -> Any:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in [*pairs] if depth < 20 else []:
        yield tree, key
        yield from _places(value, depth + 1)


def spoilt_bytes(chance: Random, content: bytes) -> bytes:
    """Cut, flipped, overwritten, doubled, grown or replaced bytes."""
    data = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 4, 16])):
        at = chance.randrange(len(data)) if data else 0
        length = min(chance.choice([1, 2, 4, 8, 64]), len(data) - at)
        how = chance.randrange(9)
        if how <= 1 and data:
            data[at] ^= 1 << chance.randrange(8)
        elif how == 2:
            del data[at:]
        elif how == 3:
            del data[at : at + length]
        elif how == 4:
            data[at:at] = chance.randbytes(chance.choice([1, 4, 100]))
        elif how == 5:
            data[at : at + length] = chance.choice([b"\x00", b"\xff", b"\x7f", b"9", b"["]) * length
        elif how == 6:
            data[at:at] = data[at : at + 64] * chance.choice([1, 3, 50])
        elif how == 7:
            word = chance.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**31, 2**63 - 1, 2**64 - 1, len(data), len(data) + 1])
            data[at : at + 8] = word.to_bytes(8, chance.choice(["little", "big"]))
        else:
            other = chance.randrange(len(data)) if data else 0
            data[at : at + length] = data[other : other + length]
    return b"" if chance.random() < 0.01 else bytes(data)


def spoilt_json(chance: Random, tree: Any) -> bytes:
    """A JSON text: of a spoilt tree, or itself spoilt."""
    if chance.random() < 0.65:
        return json.dumps(spoilt_tree(chance, tree)).encode("utf-8", "surrogatepass")
    if chance.random() < 0.05:
        return chance.choice([b"[" * 100_000, b'{"a":' * 50_000, b"1" * 10_000, b"\xff\xfe", b"NaN", b"-Infinity"])
    return spoilt_bytes(chance, json.dumps(tree).encode())


def odd_array(chance: Random, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array that is not quite what was asked for, or is but has odd entries."""
    flat = like.astype(np.float64).reshape(-1)
    if chance.random() < 0.5:
        entries = np.array(flat, like.dtype)
        if len(entries):
            with np.errstate(all="ignore"):
                spots = [chance.randrange(len(entries)) for _ in range(chance.choice([1, 3]))]
                entries[spots] = np.array(chance.choice(FLOATS)).astype(like.dtype)
        return entries * chance.choice([1, 1, -10, 100]) if entries.dtype.kind == "f" else entries
    kinds: list[Callable[[], Any]] = [
        lambda: flat[: chance.randrange(len(flat) + 1)].astype(like.dtype),
        lambda: np.tile(flat, chance.choice([2, 3, 20])).astype(like.dtype),
        lambda: flat.reshape(1, -1).astype(like.dtype),
        lambda: np.array(chance.choice(FLOATS)),
        lambda: np.zeros((0, 5), like.dtype),
        lambda: flat.astype(chance.choice(["f8", "f2", ">f4", "i8", "u1", "?", "c16", "U3", "S2", "M8[s]", "m8[s]"])),
        lambda: np.zeros(len(flat), [("a", "f4"), ("b", "i2")]),
        lambda: flat.astype(like.dtype)[::-1],
        lambda: np.zeros(len(flat), "V4"),
    ]
    with np.errstate(all="ignore"):
        found: np.ndarray[Any, Any] = np.asarray(chance.choice(kinds)())
        return found


def odd_header(chance: Random) -> bytes:
    """An array in NumPy's format whose header declares what it likes."""
    header = io.BytesIO()
    kind = chance.choice(["<f4", "<f4", "|V0", "|S0", "<U0", "|O", "<f8", ">f4", "|b1", "<f2", "<c16", "|S5"])
    shape = chance.choice([(10**18,), (0, 10**18), (2**40,), (-1,), (4,), (), (2**62, 2**62), (1,) * 40, (0,)])
    order = chance.random() < 0.2
    np.lib.format.write_array_header_1_0(header, {"descr": kind, "fortran_order": order, "shape": shape})
    return header.getvalue() + bytes(chance.choice([0, 0, 4, 16, 64]))
