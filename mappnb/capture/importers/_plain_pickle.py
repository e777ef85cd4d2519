"""Reads a pickle of plain containers by its opcodes. Nothing is ever imported, called or built but the types listed here."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

__all__ = ["MAX_BYTES", "MAX_DEPTH", "MAX_OBJECTS", "PlainPickleError", "load_plain", "measure"]

MAX_BYTES: Final = 64 * 2**20
"""Longest pickle that is read, in bytes; a flight-recorder ring of 20,000 entries with 30 frames each has 6 MB."""
MAX_OBJECTS: Final = 5_000_000
"""Most values a pickle may build, and most values its result may stand for once shared parts are written out."""
MAX_DEPTH: Final = 64
"""Deepest nesting; a flight-recorder dump has six levels."""
_MAX_OPCODES: Final = 4 * MAX_OBJECTS
_MAX_INT_BYTES: Final = 16
_MARK: Final = object()
_STOP, _BINGET, _LONG_BINGET, _BINPUT, _BININT1, _MARK_CODE = (ord(c) for c in ".hjqK(")
_FORBIDDEN: Final = {
    ord("c"): "GLOBAL",
    ord("R"): "REDUCE",
    ord("b"): "BUILD",
    ord("i"): "INST",
    ord("o"): "OBJ",
    ord("P"): "PERSID",
    ord("Q"): "BINPERSID",
    0x81: "NEWOBJ",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    0x92: "NEWOBJ_EX",
    0x93: "STACK_GLOBAL",
    0x97: "NEXT_BUFFER",
}


class PlainPickleError(ValueError):
    """A pickle that is broken, too large, or asks for more than plain containers; the message says which and where."""


class _Reader:
    """The machine: a stack, marks and a memo, all bounded by the counts above."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.built = 0

    def fail(self, what: str) -> PlainPickleError:
        return PlainPickleError(f"byte {self.at}: {what}")

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes: a count beyond the end is refused before anything is made."""
        if count < 0 or count > len(self.data) - self.at:
            raise self.fail(f"asks for {count} bytes, {len(self.data) - self.at} are left: the file is cut or damaged")
        self.at += count
        return self.data[self.at - count : self.at]

    def usual(self) -> int:
        """Run the opcodes that most of a dump is made of, in place; return the next other one."""
        data, at, stack, memo = self.data, self.at, self.stack, self.memo
        end = len(data) - 4  # each of these has at most four bytes of argument
        while at < end:
            code = data[at]
            if code == _BINGET and data[at + 1] in memo:
                stack.append(memo[data[at + 1]])
                at += 2
            elif code == _LONG_BINGET and (key := int.from_bytes(data[at + 1 : at + 5], "little")) in memo:
                stack.append(memo[key])
                at += 5
            elif code == _BINPUT and stack and stack[-1] is not _MARK:
                memo[data[at + 1]] = stack[-1]
                at += 2
            elif code == _BININT1:
                stack.append(data[at + 1])
                at += 2
            elif code == _MARK_CODE:
                stack.append(_MARK)
                at += 1
            else:
                break
        self.at = at
        return self.take(1)[0]

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise self.fail("a line without an end")
        return self.take(end + 1 - self.at)[:-1]

    def push(self, value: Any) -> None:
        self.built += 1
        if self.built > MAX_OBJECTS:
            raise self.fail(f"builds more than {MAX_OBJECTS} values")
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise self.fail("takes a value from an empty stack")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise self.fail(f"expects a {kind.__name__} on the stack")
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        for position in range(len(self.stack) - 1, -1, -1):
            if self.stack[position] is _MARK:
                items = self.stack[position + 1 :]
                del self.stack[position:]
                return items
        raise self.fail("no mark on the stack")

    def text(self, size: int) -> None:
        try:
            self.push(self.take(size).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as err:
            raise self.fail("text that is not UTF-8") from err

    def integer(self, size: int) -> None:
        if not 0 <= size <= _MAX_INT_BYTES:
            raise self.fail(f"an integer of {size} bytes; at most {_MAX_INT_BYTES} are read")
        self.push(self.number(size, signed=True))

    def decimal(self) -> None:
        """INT and LONG of protocol 0: digits in a line; 00 and 01 of INT are False and True."""
        line = self.line()
        try:
            value: Any = {b"00": False, b"01": True}.get(line)
            if value is None:
                if len(line) > 40:
                    raise ValueError
                value = int(line.removesuffix(b"L"))
        except ValueError as err:
            raise self.fail(f"{line[:20]!r} is no integer") from err
        self.push(value)

    def real(self) -> None:
        line = self.line()
        try:
            self.push(float(line))
        except ValueError as err:
            raise self.fail(f"{line[:20]!r} is no number") from err

    def escaped(self) -> None:
        """UNICODE of protocol 0: a line with escapes."""
        line = self.line()
        try:
            self.push(line.decode("raw-unicode-escape"))
        except UnicodeDecodeError as err:
            raise self.fail("text with a broken escape") from err

    def extend(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            raise self.fail("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:  # hashing a deep tuple would overflow the C stack, chosen integers would collide
                raise self.fail(f"a dict key of type {type(key).__name__}; only text is read")
            target[key] = value

    def remember(self, key: int) -> None:
        if not self.stack or self.stack[-1] is _MARK:
            raise self.fail("remembers a value of an empty stack")
        self.memo[key] = self.stack[-1]

    def recall(self, key: int) -> None:
        if key not in self.memo:
            raise self.fail(f"recalls value {key}, which was not remembered")
        self.push(self.memo[key])

    def index(self) -> int:
        line = self.line()
        if not line.isdigit() or len(line) > 12:
            raise self.fail(f"{line[:20]!r} is no memo index")
        return int(line)

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(items)))

    def dict_of(self, items: list[Any]) -> None:
        self.push({})
        self.update(items)

    def append(self) -> None:
        value = self.pop()
        self.extend([value])

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.update([key, value])

    def protocol(self) -> None:
        number = self.number(1)
        if number > 5:
            raise self.fail(f"pickle protocol {number}; 0 to 5 are read")


_Step = Callable[[_Reader], object]
_STEPS: dict[int, _Step] = {
    ord("("): lambda r: r.push(_MARK),
    ord("N"): lambda r: r.push(None),
    0x88: lambda r: r.push(True),
    0x89: lambda r: r.push(False),
    ord("I"): _Reader.decimal,
    ord("L"): _Reader.decimal,
    ord("J"): lambda r: r.push(r.number(4, signed=True)),
    ord("K"): lambda r: r.push(r.number(1)),
    ord("M"): lambda r: r.push(r.number(2)),
    0x8A: lambda r: r.integer(r.number(1)),
    0x8B: lambda r: r.integer(r.number(4, signed=True)),
    ord("F"): _Reader.real,
    ord("G"): lambda r: r.push(struct.unpack(">d", r.take(8))[0]),
    ord("V"): _Reader.escaped,
    ord("X"): lambda r: r.text(r.number(4)),
    0x8C: lambda r: r.text(r.number(1)),
    0x8D: lambda r: r.text(r.number(8)),
    ord("B"): lambda r: r.push(r.take(r.number(4))),
    ord("C"): lambda r: r.push(r.take(r.number(1))),
    0x8E: lambda r: r.push(r.take(r.number(8))),
    ord("]"): lambda r: r.push([]),
    ord("a"): _Reader.append,
    ord("e"): lambda r: r.extend(r.pop_mark()),
    ord("l"): lambda r: r.push(r.pop_mark()),
    ord(")"): lambda r: r.push(()),
    ord("t"): lambda r: r.push(tuple(r.pop_mark())),
    0x85: lambda r: r.tuple_of(1),
    0x86: lambda r: r.tuple_of(2),
    0x87: lambda r: r.tuple_of(3),
    ord("}"): lambda r: r.push({}),
    ord("s"): _Reader.set_item,
    ord("u"): lambda r: r.update(r.pop_mark()),
    ord("d"): lambda r: r.dict_of(r.pop_mark()),
    ord("g"): lambda r: r.recall(r.index()),
    ord("h"): lambda r: r.recall(r.number(1)),
    ord("j"): lambda r: r.recall(r.number(4)),
    ord("p"): lambda r: r.remember(r.index()),
    ord("q"): lambda r: r.remember(r.number(1)),
    ord("r"): lambda r: r.remember(r.number(4)),
    0x94: lambda r: r.remember(len(r.memo)),
    0x80: _Reader.protocol,
    0x95: lambda r: r.take(8),  # a frame: its length is a hint only
}


def load_plain(data: bytes) -> Any:
    """Return what a pickle of plain containers holds.

    Parameters
    ----------
    data : bytes
        The pickle, protocols 0 to 5.

    Returns
    -------
    object
        Made of dict (with text keys), list, tuple, str, bytes, int, float, bool and None only. Parts may be shared.

    Raises
    ------
    PlainPickleError
        If it asks for anything else (a class, a function, an object), is cut or damaged, or passes ``MAX_BYTES``,
        ``MAX_OBJECTS`` or ``MAX_DEPTH``. Nothing of it was executed.

    Notes
    -----
    The opcodes are those of CPython's ``Lib/pickletools.py``. Time and memory grow with the length of the data only:
    lengths are checked against what is left, memo indices are kept in a dict, and shared parts are counted as often as
    they are used, so that a small file cannot stand for a huge value.
    """
    if len(data) > MAX_BYTES:
        raise PlainPickleError(f"{len(data)} bytes; at most {MAX_BYTES} are read")
    reader = _Reader(data)
    for _ in range(_MAX_OPCODES):
        code = reader.usual()
        if code == _STOP:
            value = reader.pop()
            measure(value)
            return value
        step = _STEPS.get(code)
        if step is None:
            name = _FORBIDDEN.get(code)
            raise reader.fail(
                f"opcode {name} would build an object or call code: refused, nothing was run"
                if name
                else f"opcode {code:#04x} is not one of a pickle of plain containers"
            )
        step(reader)
    raise reader.fail(f"more than {_MAX_OPCODES} opcodes")


_CONTAINERS: Final = (dict, list, tuple)


def _children(value: Any) -> list[Any]:
    kind = type(value)
    if kind is dict:
        return list(value.values())
    return list(value) if kind is list or kind is tuple else []


def measure(root: Any) -> tuple[int, int]:
    """Return (number of values, depth) of nested containers, shared parts counted as often as they are used.

    Raises
    ------
    PlainPickleError
        If either passes its bound, or a container holds itself.
    """
    done: dict[int, tuple[int, int]] = {}
    entered: set[int] = set()
    todo = [root]
    while todo:
        value = todo[-1]
        if id(value) in done:
            todo.pop()
            continue
        children = _children(value)
        parts = [c for c in children if type(c) in _CONTAINERS]
        if id(value) not in entered:
            entered.add(id(value))
            if len(entered) - len(done) > MAX_DEPTH:
                raise PlainPickleError(f"more than {MAX_DEPTH} levels deep")
            open_parts = [c for c in parts if id(c) not in done]
            if any(id(c) in entered for c in open_parts):
                raise PlainPickleError("a container holds itself")
            if open_parts:
                todo += open_parts
                continue
        todo.pop()
        size = 1 + len(children) - len(parts) + sum(done[id(c)][0] for c in parts)
        depth = 1 + max((done[id(c)][1] for c in parts), default=0)
        if size > MAX_OBJECTS or depth > MAX_DEPTH:
            raise PlainPickleError(
                f"stands for {size} values, {depth} levels deep; at most {MAX_OBJECTS} and {MAX_DEPTH} are read"
            )
        done[id(value)] = (size, depth)
    return done[id(root)]
