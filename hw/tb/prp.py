"""Guests' memory, PRPs and what the software does with them (crates/frontends/src/nvme/data.rs), for the tests of the command side.

    guest = Guest(random, pages=512)      one local function: a table of 2 MiB pages, some absent, some read only
    guest.row(page)                       the table's row for register 8000h + page
    guest.pointer(bytes, faults)          (prp1, prp2), lists written into guest.memory; with what is asked for wrong
    guest.resolve(prp1, prp2, bytes, to_guest)   ("status", n) or ("pages", [host addresses])

`memory` is what the host would answer: qwords by host address; an address in `broken` fails.
"""

import random

from words import CONSTANTS

PAGE = 4096
BIG = 1 << 21


class Failed(Exception):
    def __init__(self, status):
        self.status = status


class Host:
    """Memory by qword; everything that was not written reads as noise."""

    def __init__(self):
        self.words, self.broken = {}, set()

    def beat(self, address):
        assert address % 16 == 0
        parts = [self.words.get(address + 8 * half, random.getrandbits(64)) for half in (0, 1)]
        return parts[0] | parts[1] << 64, address // PAGE in self.broken


class Guest:
    def __init__(self, host, pages, present=0.8, writable=0.8):
        self.host, self.pages = host, pages
        self.table = []
        for _ in range(pages):
            here = random.random() < present
            self.table.append((random.getrandbits(27), here, random.random() < writable))
        self.used = set()

    def row(self, page):
        frame, present, writable = self.table[page]
        return frame << 21 | writable << 1 | present | random.getrandbits(16) << 48 | random.getrandbits(19) << 2

    def translate(self, address, write):
        page = address // BIG
        if page >= self.pages:
            raise Failed(CONSTANTS["ST_DATA_TRANSFER_ERROR"])
        frame, present, writable = self.table[page]
        if not present or (write and not writable):
            raise Failed(CONSTANTS["ST_DATA_TRANSFER_ERROR"])
        return frame << 21 | address % BIG

    # ---- Making

    def page(self, good=True, write=False):
        """A random page of 4 KiB; a good one is present and may be written."""
        while True:
            page = random.randrange(self.pages)
            frame, present, writable = self.table[page]
            if not good or (present and (writable or not write)):
                return page * BIG + random.randrange(BIG // PAGE) * PAGE

    def list_page(self):
        """A page for a list, used once so that lists do not overwrite each other."""
        while True:
            page = self.page()
            if page not in self.used:
                self.used.add(page)
                return page

    def pointer(self, size, fault=None):
        """PRP1 and PRP2 for so many bytes. Faults: absent, high, inner (an offset where none may be), broken, misaligned."""
        offset = random.choice([0, 0, 0, 4, 512, 2048, 4092, random.randrange(0, PAGE, 4)])
        pages = -(-(offset + size) // PAGE)
        prps = [self.page(write=True) for _ in range(pages)]
        prps[0] += offset
        at = random.randrange(pages)
        if fault == "absent":
            prps[at] = self.page(good=False) + (offset if at == 0 else 0)
        elif fault == "high":
            prps[at] |= 1 << random.randrange((self.pages * BIG).bit_length() - 1, 64)
        elif fault == "inner":
            at = max(at, 1) if pages > 1 else 0
            prps[at] |= 1 << random.randrange(2 if at == 0 else 0, 12) if at else 1 << random.randrange(2)
        if pages == 1:
            return prps[0], random.getrandbits(64)
        if pages == 2:
            return prps[0], prps[1]
        return prps[0], self.list(prps[1:], fault)

    def list(self, entries, fault=None):
        """Writes a list, or a chain of them; its guest address."""
        start = random.choice([0, 8, PAGE - 8, PAGE - 16, PAGE - 24, PAGE - 8 * len(entries), random.randrange(0, PAGE, 8)])
        start = max(start, 0) // 8 * 8
        first = address = self.list_page() + start
        left = list(entries)
        chained = []
        while True:
            room = (PAGE - address % PAGE) // 8
            last = len(left) <= room
            here = left if last else left[: room - 1]
            left = left[len(here):]
            host = self.translate(address, False)
            for index, entry in enumerate(here):
                self.host.words[host + 8 * index] = entry
            if fault == "broken" and random.random() < 0.7:
                self.host.broken.add(host // PAGE)
            if last:
                break
            chained.append(host + 8 * len(here))
            address = self.list_page()
            self.host.words[chained[-1]] = address
        if fault == "chain" and chained:
            where = random.choice(chained)
            self.host.words[where] |= random.choice([8, 1, 2048, 1 << 60])
        if fault == "misaligned":
            first |= 1 << random.randrange(3)
        return first

    # ---- The reference

    def resolve(self, prp1, prp2, size, to_guest):
        try:
            return "pages", self._resolve(prp1, prp2, size, to_guest)
        except Failed as failed:
            return "status", failed.status

    def _resolve(self, prp1, prp2, size, to_guest):
        offset = Failed(CONSTANTS["ST_PRP_OFFSET_INVALID"])
        if prp1 % 4:
            raise offset
        found = [self.translate(prp1, to_guest)]
        left = -(-(size - min(size, PAGE - prp1 % PAGE)) // PAGE)
        if left == 0:
            return found
        if left == 1:
            if prp2 % PAGE:
                raise offset
            return found + [self.translate(prp2, to_guest)]
        if prp2 % 8:
            raise offset
        address = prp2
        while True:
            room = (PAGE - address % PAGE) // 8
            here = room - 1 if left > room else left
            for index in range(here):
                entry = self.read(address + 8 * index)
                if entry % PAGE:
                    raise offset
                found.append(self.translate(entry, to_guest))
            left -= here
            if not left:
                return found
            address = self.read(address + 8 * here)
            if address % PAGE:
                raise offset

    def read(self, address):
        host = self.translate(address, False)
        if host // PAGE in self.host.broken:
            raise Failed(CONSTANTS["ST_DATA_TRANSFER_ERROR"])
        return self.host.words[host]


class HostReads:
    """Answers hrd_* from a `Host`: late, in any mix of tags, each tag in order. Call `run` as a task."""

    def __init__(self, dut, host, latency=(1, 60), pauses=None):
        from stream import Pauses

        self.dut, self.host, self.latency = dut, host, latency
        self.pauses = pauses or Pauses()
        self.queues, self.cycle, self.asked = {}, 0, 0
        self.most = 0
        self.rest = 0.0

    async def run(self):
        from cocotb.triggers import FallingEdge, RisingEdge

        dut = self.dut
        dut.hrr_valid.value = 0
        dut.hrd_ready.value = 0
        while True:
            await FallingEdge(dut.clk)
            if dut.rst.value == 1:
                self.queues.clear()
            elif dut.hrd_valid.value == 1 and dut.hrd_ready.value == 1:
                self._ask(int(dut.hrd_addr.value), int(dut.hrd_beats.value), int(dut.hrd_tag.value))
            await RisingEdge(dut.clk)
            self.cycle += 1
            dut.hrd_ready.value = int(not self.pauses.rests())
            ready = [tag for tag, beats in self.queues.items() if beats[0][0] <= self.cycle]
            sends = bool(ready) and random.random() >= self.rest and dut.rst.value == 0
            dut.hrr_valid.value = int(sends)
            dut.hrr_tag.value = random.getrandbits(8) & 0x7F
            dut.hrr_data.value = random.getrandbits(128)
            dut.hrr_last.value = random.getrandbits(1)
            dut.hrr_error.value = random.getrandbits(1)
            if sends:
                tag = random.choice(ready)
                _, data, last, error = self.queues[tag].pop(0)
                if not self.queues[tag]:
                    del self.queues[tag]
                dut.hrr_tag.value, dut.hrr_data.value, dut.hrr_last.value, dut.hrr_error.value = tag, data, last, error

    def _ask(self, address, beats, tag):
        assert 1 <= beats <= 16 and address % 16 == 0, f"a read of {beats} beats at {address:#x}"
        assert address % PAGE + beats * 16 <= PAGE, f"a read of {beats} beats at {address:#x} crosses a page"
        assert tag >= 0x80 and tag not in self.queues, f"tag {tag:#x} is in use, or not ours"
        due = self.cycle + random.randint(*self.latency)
        self.queues[tag] = []
        for index in range(beats):
            data, error = self.host.beat(address + 16 * index)
            self.queues[tag].append((due, data, int(index == beats - 1), int(error)))
        self.asked += 1
        self.most = max(self.most, len(self.queues))
