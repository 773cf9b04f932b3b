"""The engine's disks: NVMe controllers that fetch entries and lists by sdr_*, move data in host memory, and post completions by sdw_*.

          sdb_* ──► tails, heads ──► sdr_* ──► entries ─► lists? ─sdr_*─► data, after a time ──► sdw_*
                                     sdd_* ◄── (in the order of asking)

Every port is driven with pauses; what the engine offers is watched. A disk believes nothing: `system.accepts(...)` is asked about each entry.
Blocks that were never written read as their own address, so that a block from elsewhere is seen.
"""

import random
from collections import deque

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

from stream import Pauses

FLUSH, WRITE, READ, COMPARE, ZEROES = 0, 1, 2, 5, 8
PAGE = 4096
COMPARE_FAILURE = 0x4285


class Pair:
    """A core's queue pair, as the disk has it."""

    def __init__(self):
        self.head = self.fetched = self.tail = self.cq_tail = self.cq_head = 0
        self.phase = 1
        self.waiting = deque()  # completions for which there is no place


class Disk:
    """One disk's contents and queues."""

    def __init__(self, number, cores):
        self.number = number
        self.blocks = {}         # lba: bytes
        self.failing = {}        # lba: status of commands that begin there
        self.counts = {}         # (owner, opcode): commands
        self.reads, self.asked, self.writes = deque(), deque(), deque()
        self.pairs = [Pair() for _ in range(cores)]
        self.due = []            # (cycle, core, entry, pages)

    def restart(self, core=None):
        """Forgets its queues, as after a controller reset, or those of one core."""
        for at in range(len(self.pairs)) if core is None else [core]:
            self.pairs[at] = Pair()
        if core is None:
            for list_ in (self.reads, self.asked, self.writes, self.due):
                list_.clear()

    def block(self, lba, size):
        return self.blocks.get(lba) or lba.to_bytes(8, "little") * (size // 8)


class Disks:
    """All disks of an engine. `latency`: cycles from an entry's arrival to its completion, from and to; `moves`: data are moved."""

    def __init__(self, dut, system, cores, count, chip_base=0, latency=(20, 200), rate=0.0, moves=True):
        self.dut, self.system, self.count, self.chip_base, self.latency, self.moves = dut, system, count, chip_base, latency, moves
        self.places = 64 // count
        self.disks = [Disk(at, cores) for at in range(count)]
        self.cycle = 0
        self.entries = 0
        self.stalled = 0          # disks, a bit each, that begin nothing and end nothing
        self.pauses = {name: [Pauses(rate) for _ in range(count)] for name in ("sdb", "sdr", "sdd", "sdw")}
        self.valid = {"sdr": 0, "sdw": 0}
        self.ready = {"sdb": 0, "sdd": 0}
        self.offered = {"sdb": [None] * count, "sdd": [None] * count}
        for name in ("sdb_ready", "sdd_ready", "sdr_valid", "sdr_addr", "sdr_beats", "sdr_tag", "sdw_valid", "sdw_addr", "sdw_data"):
            getattr(dut, name).value = 0
        cocotb.start_soon(self._run())

    def restart(self):
        for disk in self.disks:
            disk.restart()

    # ---- Ports
    async def _run(self):
        d = self.dut
        while True:
            await FallingEdge(d.clk)
            taken = {"sdr": 0, "sdw": 0}
            if d.rst.value == 1:
                self.offered = {name: [None] * self.count for name in self.offered}
                taken = dict(self.valid)
            else:
                self._watch("sdb", {"core": 4, "cq": 1, "value": 16}, self._bell)
                self._watch("sdd", {"tag": 8, "data": 128, "last": 1}, self._beat)
                for name, queue in (("sdr", "reads"), ("sdw", "writes")):
                    if self.valid[name]:
                        taken[name] = self.valid[name] & int(getattr(d, f"{name}_ready").value)
                        for at in range(self.count):
                            if taken[name] >> at & 1:
                                self._taken(self.disks[at], queue)
            await RisingEdge(d.clk)
            self.cycle += 1
            for disk in self.disks:
                self._work(disk)
            self._drive("sdr", "reads", (("addr", 18), ("beats", 5), ("tag", 8)), taken["sdr"])
            self._drive("sdw", "writes", (("addr", 18), ("data", 128)), taken["sdw"])
            for name in ("sdb", "sdd"):
                ready = sum(int(not pauses.rests()) << at for at, pauses in enumerate(self.pauses[name]))
                if ready != self.ready[name]:
                    self.ready[name] = ready
                    getattr(d, f"{name}_ready").value = ready

    def _watch(self, name, fields, then):
        valid, before = int(getattr(self.dut, f"{name}_valid").value), self.offered[name]
        if not valid:
            assert not any(before), f"{name}: what was offered went away"
            return
        words = {field: int(getattr(self.dut, f"{name}_{field}").value) for field in fields}
        for at in range(self.count):
            if not valid >> at & 1:
                assert not before[at], f"{name}[{at}]: what was offered went away"
                continue
            word = tuple(words[field] >> width * at & (1 << width) - 1 for field, width in fields.items())
            assert before[at] in (None, word), f"{name}[{at}]: {before[at]} became {word}"
            before[at] = word
            if self.ready[name] >> at & 1:
                before[at] = None
                then(self.disks[at], *word)

    def _taken(self, disk, queue):
        word = getattr(disk, queue).popleft()
        if queue == "reads":
            disk.asked.append([word[2], word[1], [], word[3]])

    def _drive(self, name, queue, fields, taken):
        valid, words = 0, [0] * len(fields)
        for disk in self.disks:
            at, list_ = disk.number, getattr(disk, queue)
            stands = self.valid[name] >> at & 1 and not taken >> at & 1
            if not list_ or (not stands and (self.stalled >> at & 1 or self.pauses[name][at].rests())):
                continue
            valid |= 1 << at
            for index, (_, width) in enumerate(fields):
                words[index] |= list_[0][index] << width * at
        if valid or self.valid[name]:
            getattr(self.dut, f"{name}_valid").value = valid
            for (field, _), word in zip(fields, words):
                getattr(self.dut, f"{name}_{field}").value = word
        self.valid[name] = valid

    # ---- Queues
    def _bell(self, disk, core, cq, value):
        pair = disk.pairs[core]
        assert value < self.places, f"disk {disk.number}: doorbell {value} of {self.places}"
        if cq:
            used = (pair.cq_tail - pair.cq_head) % self.places
            assert (value - pair.cq_head) % self.places <= used, f"disk {disk.number}: the CQ head passes the tail"
            pair.cq_head = value
            return
        ahead = (pair.tail - pair.head) % self.places
        assert ahead <= (value - pair.head) % self.places, f"disk {disk.number}: the tail went back"
        pair.tail = value
        while pair.fetched != value:
            index = pair.fetched
            count = min(random.randint(1, 4), (value - index) % self.places, self.places - index)
            pair.fetched = (index + count) % self.places
            addr = core << 14 | (disk.number * self.places + index) * 64
            self._read(disk, addr, count * 4, lambda data, core=core, pair=pair: self._entries(disk, core, pair, data))

    def _read(self, disk, addr, beats, then):
        disk.reads.append((addr, beats, random.getrandbits(8), then))

    def _beat(self, disk, tag, data, last):
        asked = disk.asked[0]
        assert asked[0] == tag, f"disk {disk.number}: tag {tag:#x} where {asked[0]:#x} was due"
        asked[2].append(data)
        assert last == (len(asked[2]) == asked[1])
        if last:
            disk.asked.popleft()
            asked[3](b"".join(beat.to_bytes(16, "little") for beat in asked[2]))

    def _entries(self, disk, core, pair, data):
        for at in range(0, len(data), 64):
            pair.head = (pair.head + 1) % self.places
            self._entry(disk, core, data[at : at + 64])

    def _entry(self, disk, core, data):
        word = [int.from_bytes(data[at : at + 8], "little") for at in range(0, 64, 8)]
        entry = {"opcode": word[0] & 0xFF, "cid": word[0] >> 16 & 0xFFFF, "nsid": word[0] >> 32, "lba": word[5], "nlb": (word[6] & 0xFFFF) + 1,
                 "fua": word[6] >> 30 & 1, "core": core, "disk": disk.number}
        assert word[1] == word[2] == word[7] == 0 and entry["nsid"] == 1 and word[0] & 0xFF00 == 0
        self.entries += 1
        size = self.system.accepts(entry)  # bytes
        prp1, prp2 = word[3], word[4]
        count = (prp1 % PAGE + size + PAGE - 1) // PAGE
        if count <= 2:
            self._begin(disk, core, entry, [prp1, prp2][:count])
            return
        chip = prp2 - self.chip_base
        assert chip >> 14 == core and chip & 0x3000 == 0x1000 and chip % 256 == 0, f"a list at {prp2:#x}"

        def listed(data):
            pages = [int.from_bytes(data[at : at + 8], "little") for at in range(0, 8 * (count - 1), 8)]
            self._begin(disk, core, entry, [prp1, *pages])

        self._read(disk, chip, (count * 8 + 7) // 16, listed)

    def _begin(self, disk, core, entry, pages):
        self.system.addresses(entry, pages)
        disk.due.append((self.cycle + random.randint(*self.latency), core, entry, pages))

    def _work(self, disk):
        if self.stalled >> disk.number & 1:
            return
        for pair in disk.pairs:
            if pair.waiting and (pair.cq_tail + 1) % self.places != pair.cq_head:
                self._post(disk, pair, *pair.waiting.popleft())
        if not disk.due:
            return
        for command in [command for command in disk.due if command[0] <= self.cycle]:
            disk.due.remove(command)
            _, core, entry, pages = command
            status = disk.failing.get(entry["lba"], 0) if entry["opcode"] != FLUSH else 0
            if not status and self.moves and entry["opcode"] != FLUSH:
                status = self._carry_out(disk, entry, pages)
            disk.pairs[core].waiting.append((core, entry["cid"], status))

    def _post(self, disk, pair, core, cid, status):
        addr = core << 14 | 0x2000 | (disk.number * self.places + pair.cq_tail) * 16
        word = (status << 17 | pair.phase << 16 | cid) << 96 | (core + 1) << 80 | pair.head << 64 | random.getrandbits(64)
        disk.writes.append((addr, word))
        pair.cq_tail = (pair.cq_tail + 1) % self.places
        pair.phase ^= pair.cq_tail == 0

    def _carry_out(self, disk, entry, pages):
        memory, block = self.system.memory, self.system.block(entry)
        lbas = range(entry["lba"], entry["lba"] + entry["nlb"])
        if entry["opcode"] == ZEROES:
            disk.blocks.update((lba, bytes(block)) for lba in lbas)
            return 0
        size = block * entry["nlb"]
        parts, at = [], 0
        for page in pages:
            parts.append((page, min(PAGE - page % PAGE, size - at)))
            at += parts[-1][1]
        if entry["opcode"] == READ:
            data, at = b"".join(disk.block(lba, block) for lba in lbas), 0
            for addr, length in parts:
                memory.write(addr, data[at : at + length])
                at += length
            return 0
        data = b"".join(memory.read(addr, length) for addr, length in parts)
        blocks = {lba: data[at * block : (at + 1) * block] for at, lba in enumerate(lbas)}
        if entry["opcode"] == WRITE:
            disk.blocks.update(blocks)
            return 0
        return 0 if all(disk.block(lba, block) == content for lba, content in blocks.items()) else COMPARE_FAILURE
