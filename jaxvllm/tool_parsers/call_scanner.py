"""Reads the JSON object of a call character by character, and tells as early as possible whether it is one."""

import json
import re
from enum import Enum, auto

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")
_LITERAL = re.compile(r"[\w.+-]")  # numbers, true, false, null
_NOTABLE = re.compile(r'["{}\[\]<]')  # in a nested value, outside of strings
_STRING_END = re.compile(r'["\\]')


class _State(Enum):
    OPEN = auto()  # before the object's brace
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NESTED = auto()  # within an object or a list, among them the arguments
    LITERAL = auto()
    COMMA = auto()


class CallScanner:
    """One object, from its opening brace.

    Attributes:
      name: of the function, once it is known.
      is_call: name and arguments are there; stays so whatever follows.
      is_over: the object is complete, or the text no longer is one; then nothing more may be read.
      raw: the text read so far; kept only until is_call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_call = False
        self.is_over = False
        self._pieces: list[str] = []
        self._state = _State.OPEN
        self._key = ""
        self._string: list[str] | None = None  # a string that is not complete yet
        self._is_escaped = False
        self._depth = 0
        self._are_arguments = False  # the nested value being read is the call's arguments
        self._arguments: list[str] | None = None  # read before the name was known

    @property
    def raw(self) -> str:
        """See the class."""
        return "".join(self._pieces)

    def read(self, text: str, position: int) -> tuple[int, str]:
        """Read on from text[position].

        Returns: where reading stopped (the end of the text if not is_over), and the arguments that came with it; ""
          until is_call, then all of them so far.
        """
        start = position
        emitted: list[str] = []
        while position < len(text) and not self.is_over:
            before, was_arguments = position, self._are_arguments
            position = self._read_some(text, position)
            if was_arguments or self._are_arguments:
                self._keep_arguments(text[before:position], emitted)
            if not self.is_call and self.name is not None and self._arguments is not None:
                self.is_call = True
                emitted.extend(self._arguments)
        if not self.is_call:
            self._pieces.append(text[start:position])
        return position, "".join(emitted)

    def _keep_arguments(self, piece: str, emitted: list[str]) -> None:
        if self.is_call:
            emitted.append(piece)
            return
        if self._arguments is None:
            self._arguments = []
        self._arguments.append(piece)

    def _read_some(self, text: str, position: int) -> int:
        """Read at least one character, or set is_over; returns the position behind."""
        if self._string is not None:
            return self._read_string(text, position)
        if self._state is _State.NESTED:
            return self._read_nested(text, position)
        char = text[position]
        if self._state is _State.LITERAL:
            if _LITERAL.match(char):
                return position + 1
            self._state = _State.COMMA
        if char in _SPACE:
            return position + 1
        return position + self._read_mark(char)

    def _read_mark(self, char: str) -> bool:
        """One character between keys and values; returns whether it belongs to the object."""
        state = self._state
        if state is _State.OPEN and char == "{":
            self._state = _State.KEY
        elif state is _State.KEY and char == '"':
            self._string = []
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state is _State.VALUE:
            return self._begin_value(char)
        elif state is _State.COMMA and char == ",":
            self._state = _State.KEY
        elif state in (_State.COMMA, _State.KEY) and char == "}":
            self.is_over = True
        else:
            self.is_over = True
            return False
        return True

    def _begin_value(self, char: str) -> bool:
        is_name = self._key == "name" and self.name is None
        is_arguments = self._key in _ARGUMENT_KEYS and self._arguments is None and not self.is_call
        if (is_name and char != '"') or (is_arguments and char != "{"):
            self.is_over = True
            return False
        if char == '"':
            self._string = []
        elif char in "{[":
            self._state, self._depth = _State.NESTED, 1
            self._are_arguments = is_arguments
        elif _LITERAL.match(char):
            self._state = _State.LITERAL
        else:
            self.is_over = True
            return False
        return True

    def _read_string(self, text: str, position: int) -> int:
        """Read within a string, to its end at most."""
        assert self._string is not None
        if self._is_escaped:
            self._is_escaped = False
            self._string.append(text[position])
            return position + 1
        end = _STRING_END.search(text, position)
        if end is None:
            self._string.append(text[position:])
            return len(text)
        self._string.append(text[position : end.start()])
        if end.group() == "\\":
            self._is_escaped = True
            self._string.append("\\")
        else:
            self._end_string("".join(self._string))
        return end.end()

    def _end_string(self, body: str) -> None:
        self._string = None
        if self._state is _State.NESTED:
            return
        if self._state is _State.KEY:
            self._key, self._state = _decode(body) or "", _State.COLON
            return
        self._state = _State.COMMA
        if self._key == "name" and self.name is None:
            self.name = _decode(body)
            self.is_over = not self.name

    def _read_nested(self, text: str, position: int) -> int:
        """Read within an object or a list; brackets are counted, not matched."""
        notable = _NOTABLE.search(text, position)
        if notable is None:
            return len(text)
        char = notable.group()
        if char == "<":  # no JSON, but perhaps the tag behind arguments that break off
            self.is_over = True
            return notable.start()
        if char == '"':
            self._string = []
        else:
            self._depth += 1 if char in "{[" else -1
            if self._depth == 0:
                self._state = _State.COMMA
                self._are_arguments = False
        return notable.end()


def _decode(body: str) -> str | None:
    """What the text between two quotes means; None if it is empty or no valid string, in Unicode too."""
    try:
        text = json.loads(f'"{body}"')
        text.encode()  # a lone surrogate could be sent to nobody
    except ValueError:
        return None
    return text or None
