"""The packed structures and constants of hw/rtl/millrace_pkg.sv, read from it, so that tests cannot disagree with it.

    COMMAND.pack(slot=3, opcode=2)  ->  integer for a port of type command_t; what is not named is zero
    COMMAND.unpack(int(port.value)) ->  dict
    CONSTANTS["ST_INVALID_FIELD"]   ->  0x4002
"""

import re
from pathlib import Path

_TEXT = re.sub(r"//.*", "", (Path(__file__).resolve().parents[1] / "rtl" / "millrace_pkg.sv").read_text())


def _number(text):
    sized = re.fullmatch(r"(?:\d+)?'([hdb])([0-9a-fA-F_]+)", text)
    if sized:
        return int(sized[2].replace("_", ""), {"h": 16, "d": 10, "b": 2}[sized[1]])
    if not re.fullmatch(r"[\w\s+*/()-]+", text):
        raise ValueError(f"millrace_pkg.sv: {text!r} is no constant that words.py can read")
    return eval(text.replace("/", "//"), {"__builtins__": {}}, CONSTANTS)  # names and arithmetic only, see above


CONSTANTS = {}
for _line in re.findall(r"localparam\b([^;]*);", _TEXT):
    for _name, _value in re.findall(r"(\w+)\s*=\s*([^,;]+)", _line):
        CONSTANTS[_name] = _number(_value.strip())

_WIDTHS = {name: _number(f"{msb}") + 1 for msb, name in re.findall(r"typedef\s+logic\s*\[([^:]+):0\]\s*(\w+)\s*;", _TEXT)}


class Layout:
    """A packed structure: names and widths, most significant first."""

    def __init__(self, fields):
        self.fields = fields
        self.width = sum(width for _, width in fields)

    def pack(self, **values):
        word = 0
        for name, width in self.fields:
            value = values.pop(name, 0)
            assert 0 <= value < 1 << width, f"{name} = {value:#x} does not fit into {width} bits"
            word = word << width | value
        assert not values, f"no such fields: {', '.join(values)}"
        return word

    def unpack(self, word):
        values = {}
        for name, width in reversed(self.fields):
            values[name] = word & ((1 << width) - 1)
            word >>= width
        return dict(reversed(values.items()))


def _layout(body):
    fields = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        kind, bits, name = re.fullmatch(r"(\w+)\s*(?:\[([^:]+):0\])?\s*(\w+)", declaration).groups()
        if kind in LAYOUTS:
            width = LAYOUTS[kind].width
        else:
            width = _WIDTHS[kind] if kind in _WIDTHS else _number(bits) + 1 if bits else 1
        fields.append((name, width))
    return Layout(fields)


LAYOUTS = {}
for _body, _name in re.findall(r"typedef\s+struct\s+packed\s*\{([^}]*)\}\s*(\w+)\s*;", _TEXT):
    LAYOUTS[_name] = _layout(_body)

COMMAND = LAYOUTS["command_t"]
OWNER = LAYOUTS["owner_t"]
