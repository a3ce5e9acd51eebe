"""The pickle inside a torch zip file, read as data.

Python's own unpickler is a machine that calls what the file names, and even with every name refused a
file can make it reserve 32 GB (one memo index), hash for ever (nested tuples as keys) or set attributes
on the admitted callables. So a machine of our own reads the opcodes: it knows strings, numbers, tuples,
lists, dicts and the four things that `torch.save` of a state dict builds, and calls and imports nothing.
"""

import enum
import pickletools
import struct
from collections import OrderedDict
from dataclasses import dataclass

from wkvm_jax.weights.listing import quoted


class PickleFaultError(Exception):
    """The pickle is damaged, or asks for something that a state dict of tensors does not need."""


@dataclass(frozen=True)
class Storage:
    """A run of numbers in the zip entry `data/<key>`; `type_name` is torch's, such as `FloatStorage`."""

    key: str
    type_name: str
    num_elements: int


@dataclass(frozen=True)
class Tensor:
    """A strided view of a storage; offset and strides count elements, and nothing is checked for overrun."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Callee(enum.Enum):
    TENSOR = "torch._utils._rebuild_tensor_v2"
    PARAMETER = "torch._utils._rebuild_parameter"
    ORDERED_DICT = "collections.OrderedDict"


@dataclass(frozen=True)
class _StorageType:
    name: str


STORAGE_TYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
"""torch's storage types, and the element each holds."""

_MAX_AXES = 64
_CALLEES = {callee.value: callee for callee in _Callee}
_STRINGS = {"SHORT_BINUNICODE": "<B", "BINUNICODE": "<I", "BINUNICODE8": "<Q"}
_LONGS = {"LONG1": "<B", "LONG4": "<i"}
_NUMBERS = {"BININT1": "<B", "BININT2": "<H", "BININT": "<i", "BINFLOAT": ">d"}
_MEMO_INDEXES = {"BINPUT": "<B", "LONG_BINPUT": "<I", "BINGET": "<B", "LONG_BINGET": "<I"}
_FIXED = {**_NUMBERS, **_MEMO_INDEXES, "PROTO": "<B", "FRAME": "<Q"}
_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONTAINERS = frozenset(
    ("EMPTY_DICT", "EMPTY_LIST", "MARK", "TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS")
)
_MEMORY = {"MEMOIZE", *_MEMO_INDEXES}
_OBJECTS = frozenset(("GLOBAL", "STACK_GLOBAL", "BINPERSID", "REDUCE", "BUILD"))
_KNOWN = frozenset(
    (*_FIXED, *_STRINGS, *_LONGS, *_CONSTANTS, *_SHORT_TUPLES, *_CONTAINERS, *_MEMORY, *_OBJECTS, "STOP")
)
_OPCODES = {opcode.code: opcode.name for opcode in pickletools.opcodes}


def read_pickle(data: bytes) -> object:
    """The object that `data` describes: `Tensor`s in plain dicts, lists and tuples.

    Time and memory are linear in `len(data)`, whatever it says.

    Raises:
        PickleFaultError: the pickle is damaged, or holds anything else.
    """
    machine = _Machine()
    reader = _Reader(data)
    name = ""
    while name != "STOP":
        name = reader.opcode()
        machine.step(name, reader.argument(name))
    if reader.position != len(data):
        raise PickleFaultError(f"its pickle is damaged: {len(data) - reader.position} bytes follow the end")
    return machine.result()


class _Reader:
    """The opcodes and their arguments, as bytes give them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def opcode(self) -> str:
        code = self._take(1).decode("latin-1")
        if code not in _OPCODES:
            raise PickleFaultError(f"its pickle is damaged: there is no opcode {code!r}")
        if _OPCODES[code] not in _KNOWN:
            raise PickleFaultError(_refused(f"the opcode {_OPCODES[code]}"))
        return _OPCODES[code]

    def argument(self, opcode: str) -> object:
        if opcode in _FIXED:
            return self._number(_FIXED[opcode])
        if opcode in _STRINGS:
            return self._text(self._take(int(self._number(_STRINGS[opcode]))))
        if opcode in _LONGS:
            return int.from_bytes(self._take(int(self._number(_LONGS[opcode]))), "little", signed=True)
        if opcode == "GLOBAL":
            return self._line(), self._line()
        return None

    def _number(self, layout: str) -> int | float:
        number: int | float = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return number

    def _line(self) -> str:
        end = self._data.find(b"\n", self.position)
        if end < 0:
            raise PickleFaultError("its pickle is damaged: a line has no end")
        line = self._take(end - self.position)
        self.position += 1
        return self._text(line)

    def _text(self, encoded: bytes) -> str:
        try:
            return encoded.decode("utf-8")
        except UnicodeDecodeError as error:
            raise PickleFaultError(f"its pickle is damaged: {error}") from error

    def _take(self, size: int) -> bytes:
        if not 0 <= size <= len(self._data) - self.position:
            raise PickleFaultError("its pickle is damaged: it ends in the middle")
        self.position += size
        return self._data[self.position - size : self.position]


class _Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(self) -> None:
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}

    def result(self) -> object:
        if len(self._stack) != 1 or self._marks:
            raise PickleFaultError("its pickle is damaged: it does not end with one object")
        return self._stack[0]

    def step(self, opcode: str, argument: object) -> None:
        """Take one opcode."""
        if opcode in _STRINGS:
            self._stack.append(argument)
        elif opcode in _NUMBERS or opcode in _LONGS:
            self._stack.append(_number(argument))
        elif opcode in _CONSTANTS:
            self._stack.append(_CONSTANTS[opcode])
        elif opcode in _SHORT_TUPLES:
            items = [self._pop() for _ in range(_SHORT_TUPLES[opcode])]
            self._stack.append(tuple(reversed(items)))
        elif opcode in _CONTAINERS:
            self._container(opcode)
        elif opcode in _MEMORY:
            self._memory(opcode, argument)
        elif opcode in _OBJECTS:
            self._object(opcode, argument)

    def _container(self, opcode: str) -> None:
        match opcode:
            case "EMPTY_DICT":
                self._stack.append({})
            case "EMPTY_LIST":
                self._stack.append([])
            case "MARK":
                self._marks.append(len(self._stack))
            case "TUPLE":
                self._stack.append(tuple(self._pop_to_mark()))
            case "APPEND":
                item = self._pop()
                self._extend([item])
            case "APPENDS":
                self._extend(self._pop_to_mark())
            case "SETITEM":
                value, key = self._pop(), self._pop()
                self._set_items([key, value])
            case "SETITEMS":
                self._set_items(self._pop_to_mark())

    def _memory(self, opcode: str, argument: object) -> None:
        match opcode, argument:
            case ("BINPUT" | "LONG_BINPUT", int(index)):
                self._memo[index] = self._top()
            case ("MEMOIZE", _):
                self._memo[len(self._memo)] = self._top()
            case ("BINGET" | "LONG_BINGET", int(index)):
                if index not in self._memo:
                    raise PickleFaultError(f"its pickle is damaged: it recalls memo {index}, never stored")
                self._stack.append(self._memo[index])

    def _object(self, opcode: str, argument: object) -> None:
        match opcode, argument:
            case ("GLOBAL", (str(module), str(attribute))):
                self._stack.append(_admit(module, attribute))
            case ("STACK_GLOBAL", _):
                last, first = self._pop(), self._pop()
                if not isinstance(first, str) or not isinstance(last, str):
                    raise PickleFaultError("its pickle is damaged: a global's name is not a string")
                self._stack.append(_admit(first, last))
            case ("BINPERSID", _):
                self._stack.append(_storage(self._pop()))
            case ("REDUCE", _):
                arguments, callee = self._pop(), self._pop()
                self._stack.append(_build(callee, arguments))
            case ("BUILD", _):
                # `torch.nn.Module.state_dict` hangs its module versions (`_metadata`) on the OrderedDict.
                state, target = self._pop(), self._top()
                if type(target) is not OrderedDict or type(state) not in (dict, OrderedDict):
                    raise PickleFaultError(_refused("the opcode BUILD, which sets an object's attributes"))

    def _floor(self) -> int:
        return self._marks[-1] if self._marks else 0

    def _top(self) -> object:
        if len(self._stack) <= self._floor():
            raise PickleFaultError("its pickle is damaged: it takes from an empty stack")
        return self._stack[-1]

    def _pop(self) -> object:
        self._top()
        return self._stack.pop()

    def _pop_to_mark(self) -> list[object]:
        if not self._marks:
            raise PickleFaultError("its pickle is damaged: it closes what it never opened")
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _extend(self, items: list[object]) -> None:
        target = self._top()
        if type(target) is not list:
            raise PickleFaultError(_refused("to append to something that is no list"))
        target.extend(items)

    def _set_items(self, items: list[object]) -> None:
        target = self._top()
        if not isinstance(target, dict):
            raise PickleFaultError(_refused("to set items of something that is no dict"))
        if len(items) % 2:
            raise PickleFaultError("its pickle is damaged: a dict has a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Only keys whose hash costs nothing: a tuple of tuples can take for ever.
            if type(key) is not str and type(key) is not int:
                raise PickleFaultError(_refused(f"a dict with a key of type {type(key).__name__}"))
            if key in target:
                raise PickleFaultError(f"it holds {quoted(str(key))} twice")
            target[key] = value


def _number(value: object) -> object:
    # Longer ones are no shape or offset, and hashing them over and over would take for ever.
    if type(value) is int and value.bit_length() > 63:
        raise PickleFaultError("its pickle is damaged: it holds an integer of more than 64 bits")
    return value


def _admit(module: str, attribute: str) -> object:
    name = f"{module}.{attribute}"
    if name in _CALLEES:
        return _CALLEES[name]
    if module == "torch" and attribute in STORAGE_TYPES:
        return _StorageType(attribute)
    raise PickleFaultError(_refused(quoted(name)))


def _refused(what: str) -> str:
    return (
        f"its pickle asks for {what}, which a state dict of plain tensors does not need; it was refused and "
        "nothing in the file was run. Save the plain weights: torch.save(model.state_dict(), path)"
    )


def _storage(identity: object) -> Storage:
    match identity:
        case ("storage", _StorageType(name), str(key), str(), count) if type(count) is int and count >= 0:
            return Storage(key, name, count)
        case _:
            raise PickleFaultError("its pickle is damaged: a storage is not described as torch does it")


def _build(callee: object, arguments: object) -> object:
    if not isinstance(callee, _Callee):
        raise PickleFaultError(_refused("a call of something that is no tensor builder"))
    match callee, arguments:
        case (_Callee.ORDERED_DICT, ()):
            empty: OrderedDict[object, object] = OrderedDict()
            return empty
        case (_Callee.PARAMETER, (Tensor() as tensor, bool(), hooks)) if _is_plain(hooks):
            return tensor
        case (_Callee.TENSOR, (Storage() as storage, offset, shape, strides, bool(), *extras)) if len(
            extras
        ) in (1, 2) and all(map(_is_plain, extras)):
            return _tensor(storage, offset, shape, strides)
        case _:
            raise PickleFaultError(_refused(f"{callee.value} with arguments that torch.save does not write"))


def _is_plain(extra: object) -> bool:
    """Whether a tensor's hooks, or its flags (conjugate, negated: they change its values), are empty."""
    return extra is None or (isinstance(extra, dict) and not extra)


def _tensor(storage: Storage, offset: object, shape: object, strides: object) -> Tensor:
    if not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise PickleFaultError("its pickle is damaged: a tensor's shape or strides are no tuple")
    if len(shape) != len(strides) or len(shape) > _MAX_AXES:
        raise PickleFaultError(
            f"its pickle is damaged: a tensor has {len(shape)} axes and {len(strides)} strides"
        )
    if any(type(number) is not int or number < 0 for number in (offset, *shape, *strides)):
        raise PickleFaultError(
            "its pickle is damaged: a tensor's offset, shape or strides are negative or no integers"
        )
    assert isinstance(offset, int)
    return Tensor(storage, offset, shape, strides)
