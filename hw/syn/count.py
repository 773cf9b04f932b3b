"""What a netlist of Yosys counts: cells by kind, and LUTs that a device can put together by twos."""

import collections
import re

# LUTs that a memory of LUTs takes, by Yosys' cell: of each bit of width, for every read and write port, as in the device's manual.
LUTRAM = {
    "RAM16X1S": 1, "RAM16X1D": 2, "RAM32X1S": 1, "RAM32X1D": 2, "RAM64X1S": 1, "RAM64X1D": 2, "RAM128X1S": 2, "RAM128X1D": 4,
    "RAM256X1S": 4, "RAM256X1D": 8, "RAM512X1S": 8, "RAM32M": 4, "RAM64M": 4, "RAM32M16": 8, "RAM64M8": 8,
    "RAM32X16DR8": 8, "RAM64X8SW": 8, "SRL16": 1, "SRL16E": 1, "SRLC16": 1, "SRLC16E": 1, "SRLC32E": 1,
}
# Wiring inside a slice or beside the fabric: no LUT of its own.
FREE = re.compile(r"MUXF[789]|CARRY[48]|BUFG.*|IBUF|OBUF|GND|VCC|\$scopeinfo")
LOGIC = re.compile(r"LUT[1-6](_2)?|INV")
# One LUT of six inputs is two of the same five.
INPUTS = 5
# Nets of more readers lead to no pairs by themselves: they are on everybody's list.
WIDE = 200


def counts(cells):
    """From the number of cells by type."""
    count = {"LUT": 0, "LUTRAM": 0, "FF": 0, "BRAM": 0.0, "DSP": 0, "other": {}}
    for cell, number in cells.items():
        if LOGIC.fullmatch(cell):
            count["LUT"] += number
        elif cell in LUTRAM:
            count["LUT"] += LUTRAM[cell] * number
            count["LUTRAM"] += LUTRAM[cell] * number
        elif re.fullmatch(r"(FD|LD)[A-Z]+(_1)?", cell):
            count["FF"] += number
        elif cell.startswith("RAMB36"):
            count["BRAM"] += number
        elif cell.startswith("RAMB18"):
            count["BRAM"] += number / 2
        elif cell.startswith("DSP48"):
            count["DSP"] += number
        elif not FREE.fullmatch(cell):
            count["other"][cell] = number
    return count


def pairs(cells):
    """How many pairs of LUTs of logic have an input in common and no more than five together. Whoever has most in common is
    paired first, each with one other: a matching, not the largest that there may be."""
    inputs = []
    for cell in cells.values():
        if LOGIC.fullmatch(cell["type"]):
            bits = [bit for port, wires in cell["connections"].items() if port != "O" for bit in wires]
            inputs.append(frozenset(bit for bit in bits if not isinstance(bit, str)))
    readers = collections.defaultdict(list)
    for number, nets in enumerate(inputs):
        if len(nets) <= INPUTS:
            for net in nets:
                readers[net].append(number)
    found = set()
    for near in readers.values():
        if len(near) <= WIDE:
            found.update((one, other) for at, one in enumerate(near) for other in near[at + 1:] if len(inputs[one] | inputs[other]) <= INPUTS)
    paired = set()
    for one, other in sorted(found, key=lambda pair: (-len(inputs[pair[0]] & inputs[pair[1]]), len(inputs[pair[0]] | inputs[pair[1]]), pair)):
        if one not in paired and other not in paired:
            paired |= {one, other}
    return len(paired) // 2
