"""Programs that use FastPath (docs/hardware.md): what they write, what they expect, the records they find.

    Request        as a program writes it, the commands it is to become, its record's status when none of them fails
    Program        one space's: tags, its ring of records
    rows           statistics
"""

import random

from words import CONSTANTS

FLUSH, WRITE, READ, COMPARE, ZEROES = 0, 1, 2, 5, 8
MOST = 131072


class Request:
    def __init__(self, tag, opcode, offset=0, lba=0, blocks=0, durable=0, junk=0, missing=None):
        """`junk`: more bits of the go word; `missing`: a word that is not written."""
        self.tag, self.opcode, self.offset, self.lba, self.blocks = tag, opcode, offset, lba, blocks
        self.durable, self.junk, self.missing = durable, junk, missing

    def writes(self):
        """Offset in the page and value."""
        words = [(0x800, self.offset), (0x804, self.lba & 0xFFFFFFFF), (0x808, self.lba >> 32 | self.blocks << 16)]
        if self.missing is not None:
            del words[self.missing]
        random.shuffle(words)
        return words + [(0x80C, self.opcode | self.durable << 8 | self.junk | self.tag << 16)]

    def wrong(self, pages, block):
        """The status that ends it before any command, or None."""
        moves = self.opcode in (WRITE, READ, COMPARE)
        if self.opcode not in (FLUSH, WRITE, READ, COMPARE, ZEROES):
            return CONSTANTS["ST_INVALID_OPCODE"]
        if self.missing is not None or self.junk or (self.opcode != FLUSH and not self.blocks) or (moves and (self.offset % 4 or self.offset >> 30)):
            return CONSTANTS["ST_INVALID_FIELD"]
        if moves and self.offset + self.blocks * block > pages * 4096:
            return CONSTANTS["ST_DATA_TRANSFER_ERROR"]
        return None

    def commands(self, block):
        """(opcode, durable, first byte in the buffer, LBA, blocks) of each."""
        if self.opcode == FLUSH:
            return [(FLUSH, self.durable, self.offset, self.lba, 1)]
        most = MOST // block
        return [(self.opcode, self.durable, self.offset + at * block, self.lba + at, min(most, self.blocks - at)) for at in range(0, self.blocks, most)]


def any_request(tag, pages, block, largest=600):
    """Mostly good ones, of all sizes."""
    opcode = random.choice([READ, READ, WRITE, WRITE, COMPARE, ZEROES, FLUSH])
    size = random.choice([8 * 4096, MOST, 3 * MOST, largest * 1024])
    blocks = min(max(1, random.randint(1, size) // block), pages * 4096 // block, 65535)
    room = pages * 4096 - blocks * block
    offset = 4 * random.randint(0, room // 4)
    if random.random() < 0.5:
        offset &= ~4095
    if random.random() < 0.1:
        offset = room
    # Some reach beyond the last block that has a number of 48 bits.
    lba = random.getrandbits(48) if random.random() < 0.9 else (1 << 48) - random.randint(1, 2 * blocks + 1)
    request = Request(tag, opcode, offset, lba, blocks, random.getrandbits(1))
    bad = random.random()
    if bad < 0.03:
        request.opcode = random.choice([3, 4, 6, 9, 12, 0x10, 0x21, 0x82, 0xFF])
    elif bad < 0.05:
        request.missing = random.randrange(3)
    elif bad < 0.07:
        request.junk = 1 << random.randrange(9, 16)
    elif bad < 0.09:
        request.blocks = 0
    elif bad < 0.11:
        request.offset |= random.choice([1, 2, 3, 1 << 30, 1 << 31])
    elif bad < 0.14:
        request.offset = room + 4 * random.randint(1, 64)
    return request


def rows(times):
    """The statistics of requests that took so many cycles: registers +20h to +3Fh."""
    words = [len(times), sum(times), min(times, default=0), max(times, default=0)] + [0] * 28
    for cycles in times:
        words[max(4, cycles.bit_length() - 1)] += 1
    return words


class Program:
    def __init__(self, space, function, core, local, ring, pages, block):
        self.space, self.function, self.core, self.local, self.ring, self.pages, self.block = space, function, core, local, ring, pages, block
        self.reset()

    def reset(self):
        self.outstanding = {}      # tag: [request, statuses of its commands in the order of their ends, commands still to end]
        self.expected = []         # commands in order: (tag, command)
        self.place, self.phase = 0, 1
        self.refused = self.done = self.failed = 0
        self.cycles = []           # of each record

    def setup(self):
        """Registers of the space, in the order in which they are to be written."""
        base = 0xF7C00 + 0x40 * self.space
        return [(base + 1, self.pages | int(self.block == 4096) << 32), (base + 2, self.ring),
                (base, 1 << 63 | self.function << 16 | self.core << 8 | self.local)]

    def accept(self, request):
        """It was sent, and is to be accepted."""
        assert request.tag not in self.outstanding
        wrong = request.wrong(self.pages, self.block)
        commands = request.commands(self.block) if wrong is None else []
        self.outstanding[request.tag] = [request, [wrong or 0], len(commands)]
        self.expected += [(request.tag, command) for command in commands]

    def ended(self, tag, status):
        """One of the request's commands ended so."""
        entry = self.outstanding[tag]
        entry[1].append(status)
        entry[2] -= 1
        assert entry[2] >= 0

    def record(self, address, data):
        """A record was written; gives the request."""
        assert address == self.ring + 16 * self.place, f"a record at {address:#x}, place {self.place} of {self.ring:#x} was next"
        dw = [data >> 32 * i & 0xFFFFFFFF for i in range(4)]
        assert dw[3] >> 16 & 1 == self.phase and dw[1] == 0
        self.place += 1
        if self.place == 32:
            self.place, self.phase = 0, 1 - self.phase
        request, statuses, left = self.outstanding.pop(dw[3] & 0xFFFF)
        assert left == 0, f"{left} commands of tag {request.tag} have not ended"
        assert dw[3] >> 17 == next((status for status in statuses if status), 0)
        assert dw[2] <= self.refused
        self.failed += any(statuses)
        self.done += 1
        self.cycles.append(dw[0])
        return request

    def check_statistics(self, words):
        """Rows +20h to +3Fh after all is done."""
        expected = rows(self.cycles)
        assert words == expected, f"space {self.space}: {words} are not {expected}"
