"""What is around an engine: host memory, guests with their queues, the control processor's registers. With disk.py it is a whole machine.

    system = System(dut, guests=16)        guests, each with its place, pages, namespace; all ports driven, with pauses
    await system.begin()                   reset, registers as docs/hardware.md says
    await system.enable(guest, qid)        a queue pair
    system.load = 0.2                      guests submit by themselves; system.commands() says what
    await system.settle()                  everything comes back as it should, and then the engine is quiet

What a guest may do it does as early as it may: it writes over an entry as soon as a completion's SQ head allows, and gives a buffer away as
soon as its command has ended. Every command's end is checked: status, data, the rest of the buffer; every access of engine and disks is to what
is theirs.
"""

import random

import cocotb
from cocotb.triggers import FallingEdge, Lock, RisingEdge

import prp
from disk import COMPARE, COMPARE_FAILURE, FLUSH, READ, WRITE, ZEROES, Disks
from host import Host
from stream import Monitor, Pauses, cycles, idle, start
from words import CONSTANTS

PAGE = 4096
BIG = 2 << 20
FAULTS = ["absent", "high", "inner", "broken", "misaligned", "chain"]
SHARE, THROTTLE, REPLICATE = 1 << 42, 1 << 43, 1 << 44


class Memory:
    """The host's memory by pages; only those that somebody was given exist."""

    def __init__(self):
        self.pages, self.broken, self.frames = {}, set(), set()
        self.words = self  # as prp.py has it: by 8 bytes

    def frame(self):
        while (frame := random.getrandbits(27)) in self.frames:
            pass
        self.frames.add(frame)
        return frame

    def give(self, addr, content=None):
        self.pages[addr // PAGE] = bytearray(content or PAGE)

    def read(self, addr, length):
        assert addr // PAGE in self.pages, f"{addr:#x} is read, which is nobody's"
        assert addr % PAGE + length <= PAGE
        return bytes(self.pages[addr // PAGE][addr % PAGE : addr % PAGE + length])

    def write(self, addr, data):
        assert addr // PAGE in self.pages, f"{addr:#x} is written, which is nobody's"
        assert addr % PAGE + len(data) <= PAGE
        self.pages[addr // PAGE][addr % PAGE : addr % PAGE + len(data)] = data

    def beat(self, addr):
        data = int.from_bytes(self.read(addr, 16), "little")
        return None if addr // PAGE in self.broken or addr in self.broken else data

    def __setitem__(self, addr, word):
        if addr // PAGE not in self.pages:
            self.give(addr)
        self.write(addr, word.to_bytes(8, "little"))

    def __getitem__(self, addr):
        return int.from_bytes(self.read(addr, 8), "little")


class Queue:
    """One queue pair, as its guest has it."""

    def __init__(self, guest, qid, vector):
        self.guest, self.qid, self.vector = guest, qid, vector
        self.enabled = self.stopped = self.lazy = False
        self.outstanding = {}
        self.done = self.posted = self.told = self.unseen = 0

    def place(self, size, c_size):
        memory = self.guest.system.memory
        self.size, self.c_size = size, c_size
        self.base, self.c_base = (memory.frame() << 21 | random.randrange(512) * PAGE for _ in range(2))
        memory.give(self.base)
        memory.give(self.c_base)
        self.tail = self.head = self.c_head = self.c_tail = self.unseen = self.untold = 0
        self.phase = 1
        self.stopped = False
        self.outstanding = {}

    def room(self):
        return (self.head - self.tail - 1) % self.size

    def bell(self, cq=False, value=None):
        value = (self.c_head if cq else self.tail) if value is None else value
        self.guest.system.bells.append((self.guest.number, self.qid * 8 + 4 * cq, value))

    def submit(self, command):
        cid = random.choice([n for n in random.choices(range(65536), k=8) if n not in self.outstanding])
        dwords = command.pop("dwords")
        dwords[0] |= cid << 16
        self.guest.system.memory.write(self.base + self.tail * 64, b"".join(word.to_bytes(4, "little") for word in dwords))
        if command.pop("unread", False):
            self.guest.system.memory.broken.add(self.base + self.tail * 64 + 16 * random.randrange(4))
        self.outstanding[cid] = command
        self.tail = (self.tail + 1) % self.size

    def came(self, addr):
        """The engine has written an entry."""
        assert addr == self.c_base + self.c_tail * 16, f"an entry at {addr:#x}, not at place {self.c_tail}"
        self.c_tail = (self.c_tail + 1) % self.c_size
        self.unseen += 1
        self.untold += 1
        self.posted += 1
        assert self.unseen < self.c_size, "the CQ is overrun"

    def take(self):
        """Takes every completion that lies there."""
        took = 0
        while True:
            data = self.guest.system.memory.read(self.c_base + self.c_head * 16, 16)
            dw = [int.from_bytes(data[at : at + 4], "little") for at in range(0, 16, 4)]
            if dw[3] >> 16 & 1 != self.phase:
                break
            cid = dw[3] & 0xFFFF
            assert cid in self.outstanding, f"{self.guest.number}.{self.qid}: CID {cid} ends, which is not in flight"
            assert dw[2] >> 16 == self.qid and dw[0] == 0
            head = dw[2] & 0xFFFF
            assert (head - self.head) % self.size <= (self.tail - self.head) % self.size, f"SQ head {head} beyond the tail"
            self.head = head
            self.c_head = (self.c_head + 1) % self.c_size
            self.phase ^= self.c_head == 0
            self.unseen -= 1
            self.done += 1
            took += 1
            self.guest.ended(self.outstanding.pop(cid), dw[3] >> 17)
        assert self.unseen == 0
        if took:
            self.bell(cq=True)


class Guest(prp.Guest):
    """A function: its memory, its window of the disks, its queues. What it knows of its blocks is in `blocks`: bytes, or None: it does not know."""

    def __init__(self, system, number, core, local, disks, flags, caps=(0, 0)):
        super().__init__(system.memory, system.pages)
        self.system, self.number, self.core, self.local, self.disks, self.flags, self.caps = system, number, core, local, disks, flags, caps
        self.table = [(system.memory.frame(), present, writable) for _, present, writable in self.table]
        self.table[0] = (self.table[0][0], True, True)
        self.lbads = random.choice([9, 12])
        self.count = random.choice([256, 4096])
        self.nsid = random.randint(1, 1 << 32 - 1)
        self.first = (number + 1 << 24) + random.getrandbits(20) if flags & SHARE else 0
        self.blocks, self.busy, self.flying = {}, set(), {}
        self.queues = {qid: Queue(self, qid, random.choice([None, qid, qid])) for qid in range(1, system.qp + 1)}
        self.grabbed, self.failures = [], 0.0
        self.arrived = []  # (cycle, disk, opcode) of what came to the disks

    def index(self, qid):
        return self.local * self.system.qp + qid - 1

    # ---- Buffers: a page belongs to one command at a time
    def page(self, good=True, write=False):
        while True:
            page = super().page(good, write)
            if page not in self.used:  # one that is to be wrong may be right
                self.used.add(page)
                self.grabbed.append(page)
                return page

    def list_page(self):
        return self.page()

    # ---- Commands
    def content(self, lba):
        return self.blocks[lba] if lba in self.blocks else (self.first + lba).to_bytes(8, "little") * ((1 << self.lbads) // 8)

    def command(self, opcode=None, blocks=None, fault=None, lba=None):
        """A command with its entry's words and what is to come of it."""
        opcode = random.choice([READ, READ, READ, WRITE, WRITE, COMPARE, ZEROES, FLUSH]) if opcode is None else opcode
        most = min((128 << 10) >> self.lbads, self.count)
        blocks = min(blocks or random.choice([1, 1, (4096 >> self.lbads) or 1, random.randint(1, most)]), most)
        for _ in range(50):
            lba_ = random.randrange(self.count - blocks + 1) if lba is None else lba
            if self.busy.isdisjoint(range(lba_, lba_ + blocks)):
                break
        else:
            return None
        lba = lba_
        command = {"opcode": opcode, "lba": lba, "blocks": blocks, "status": {0}, "pages": [], "data": None, "fault": fault, "size": blocks << self.lbads}
        dwords = [opcode, self.nsid] + [random.getrandbits(32) for _ in range(2)] + [0] * 2 + [random.getrandbits(32) for _ in range(10)]
        dwords[10:13] = lba & 0xFFFFFFFF, lba >> 32, blocks - 1
        self.grabbed = []
        if opcode in (READ, WRITE, COMPARE):
            self.data(command, dwords, fault)
        if opcode == FLUSH and random.getrandbits(1):
            dwords[1] = 0xFFFFFFFF
        self.spoil(command, dwords, fault)
        command["grabbed"], command["dwords"] = self.grabbed, dwords
        if opcode != FLUSH:
            command["range"] = range(lba, lba + blocks)
            self.busy.update(command["range"])
            self.flying[self.first + lba] = command
        if random.random() < self.failures and opcode != FLUSH and command["status"] <= {0, COMPARE_FAILURE}:
            status = random.choice([0x0281, 0x4281, 0x0286])
            disk = random.choice([at for at in range(16) if self.disks >> at & 1])
            self.system.disks.disks[disk].failing[self.first + lba] = status
            command["failing"] = disk
            one_of = self.flags & REPLICATE and opcode in (READ, COMPARE)  # it may be another leg's turn
            command["status"] = command["status"] | {status} if one_of else {status}
        return command

    def data(self, command, dwords, fault):
        """PRPs, the buffer and its content."""
        size, to_guest = command["size"], command["opcode"] == READ
        prp1, prp2 = self.pointer(size, fault if fault in FAULTS else None)
        dwords[6:10] = prp1 & 0xFFFFFFFF, prp1 >> 32, prp2 & 0xFFFFFFFF, prp2 >> 32
        how, what = self.resolve(prp1, prp2, size, to_guest)
        if how == "status":
            command["status"] = {what}
            return
        command["pages"] = what
        memory = self.system.memory
        filler = bytes([random.getrandbits(8)]) * PAGE
        for page in what:
            memory.give(page, filler)
        command["filler"] = filler
        if command["opcode"] == READ:
            return
        if command["opcode"] == COMPARE and random.random() < 0.7:
            known = [self.content(lba) for lba in range(command["lba"], command["lba"] + command["blocks"])]
            data = b"".join(part or random.randbytes(1 << self.lbads) for part in known)
            if None in known:
                command["status"] = {0, COMPARE_FAILURE}
        else:
            data = random.randbytes(size)
            if command["opcode"] == COMPARE:
                command["status"] = {COMPARE_FAILURE}
        command["data"] = data
        for addr, part in parts(what, size):
            memory.write(addr, data[part])

    def spoil(self, command, dwords, fault):
        """What is wrong with a command beside its PRPs."""
        if fault == "opcode":
            dwords[0] = random.choice([3, 4, 6, 7, 9, 0x80, 0xFF])
            command["status"] = {CONSTANTS["ST_INVALID_OPCODE"]}
        elif fault == "namespace":
            dwords[1] ^= 1 << random.randrange(32)
            command["status"] = {CONSTANTS["ST_INVALID_NAMESPACE"]}
        elif fault == "range" and command["opcode"] != FLUSH:
            dwords[10:12] = random.choice([(self.count, 0), (0xFFFFFFFF, 0), (dwords[10], random.getrandbits(31) + 1)])
            command["status"] = {CONSTANTS["ST_LBA_OUT_OF_RANGE"]}
        elif fault == "fused":
            dwords[0] |= random.choice([1, 2, 3]) << 8
            command["status"] = {CONSTANTS["ST_INVALID_FIELD"]}
        elif fault == "unread":
            command["unread"] = True

    def ended(self, command, status):
        self.system.ends[status] = self.system.ends.get(status, 0) + 1
        assert status in command["status"], f"guest {self.number}: {describe(command)} ends with {status:#x}"
        memory, opcode, good = self.system.memory, command["opcode"], status == 0
        lbas = range(command["lba"], command["lba"] + command["blocks"])
        if opcode == READ and command["pages"]:
            self.check_read(command, lbas, good)
        elif command["data"]:
            assert b"".join(memory.read(addr, part.stop - part.start) for addr, part in parts(command["pages"], command["size"])) == command["data"]
        if opcode in (WRITE, ZEROES) and (good or command.get("failing") is not None):
            size = 1 << self.lbads
            for at, lba in enumerate(lbas):
                self.blocks[lba] = None if not good else bytes(size) if opcode == ZEROES else command["data"][at * size : (at + 1) * size]
        self.forget(command)

    def check_read(self, command, lbas, good):
        memory, at = self.system.memory, 0
        expected = [self.content(lba) for lba in lbas] if good else None
        for addr, part in parts(command["pages"], command["size"]):
            page = memory.read(addr & -PAGE, PAGE)
            inner = slice(addr % PAGE, addr % PAGE + part.stop - part.start)
            at = part.start
            if good and self.system.moves and None not in expected:
                assert page[inner] == b"".join(expected)[part], f"guest {self.number}: {describe(command)}: wrong data at {at}"
            if not good:
                assert page[inner] == command["filler"][inner], f"guest {self.number}: {describe(command)} failed, but data came"
            rest = page[: inner.start] + page[inner.stop :]
            assert rest == command["filler"][: len(rest)], f"guest {self.number}: {describe(command)} wrote beside its buffer"

    def forget(self, command):
        """Its buffer and blocks are free."""
        for page in command["pages"]:
            self.system.memory.pages.pop(page // PAGE, None)
        self.used.difference_update(command["grabbed"])
        if "range" in command:
            self.busy.difference_update(command["range"])
            del self.flying[self.first + command["lba"]]
        if command.get("failing") is not None:
            self.system.disks.disks[command["failing"]].failing.pop(self.first + command["lba"], None)

    def config(self):
        flags = self.flags | 1 << 40 | ((4 << 32) if self.lbads == 12 else 0)
        return [self.nsid | flags | self.disks << 48, self.count, self.first, self.caps[0], self.caps[1]]


def parts(pages, size):
    """(address, slice of the data) of each page."""
    at = 0
    for page in pages:
        length = min(PAGE - page % PAGE, size - at)
        yield page, slice(at, at + length)
        at += length


def describe(command):
    return ", ".join(f"{name} {command[name]}" for name in ("opcode", "lba", "blocks", "fault", "status"))


class System:
    """See the module. `placing(n)`: the nth guest's core, disks (a mask), flags and caps; which function it is is random."""

    def __init__(self, dut, guests=1, placing=None, latency=(30, 60), disk=(20, 200), rate=0.2, moves=True):
        self.dut, self.moves, self.rate = dut, moves, rate
        self.cores, self.ssds, self.pages, self.qp = (int(getattr(dut, name).value) for name in ("CORES", "SSDS", "PAGES", "QP"))
        self.memory = Memory()
        idle(dut, rst=1, bar_valid=0, bar_function=0, bar_offset=0, bar_data=0, reg_valid=0, reg_write=0, reg_addr=0, reg_wdata=0)
        self.host = Host(dut, self.memory.beat, *latency, refuse=Pauses(rate), rest=Pauses(rate / 2))
        Monitor(dut, "hwr", ("kind", "addr", "data", "bytes", "function", "vector"), pauses=Pauses(rate), on_word=self._written)
        self.disks = Disks(dut, self, self.cores, self.ssds, int(dut.CHIP_BASE.value), disk, rate, moves)
        placing = placing or (lambda number: (number % self.cores, 1 << random.randrange(self.ssds), SHARE))
        taken, self.guests = {}, []
        for at, number in enumerate(random.sample(range(int(dut.FUNCTIONS.value)), guests)):
            core, disks, flags, *caps = placing(at)
            local = taken.setdefault(core, random.sample(range(16), 16)).pop()
            self.guests.append(Guest(self, number, core, local, disks, flags, *caps))
        self.by_number = {guest.number: guest for guest in self.guests}
        self.bells, self.looks, self.by_page, self.ends = [], [], {}, {}
        self.faulty, self.load, self.depth = 0.0, 0.0, 64
        self.submitted, self.cycle, self.interrupts = 0, 0, 0
        self.lock = Lock()
        cocotb.start_soon(self._run())

    # ---- What disks ask
    def owner(self, entry):
        guest = next(guest for guest in self.guests if guest.first >> 24 == entry["lba"] >> 24 and guest.first <= entry["lba"] < guest.first + guest.count)
        assert guest.core == entry["core"], f"guest {guest.number} is core {guest.core}'s, not core {entry['core']}'s"
        assert guest.disks >> entry["disk"] & 1, f"guest {guest.number} is not on disk {entry['disk']}"
        return guest

    def accepts(self, entry):
        """Whether a disk may have this entry; bytes that it moves."""
        if entry["opcode"] == FLUSH:
            return 0
        guest = self.owner(entry)
        command = guest.flying.get(entry["lba"])
        assert command and command["blocks"] == entry["nlb"] and command["opcode"] == entry["opcode"], f"guest {guest.number} never gave {entry}"
        assert 0 in command["status"] or COMPARE_FAILURE in command["status"] or command.get("failing") is not None, describe(command)
        guest.arrived.append((self.cycle, entry["disk"], entry["opcode"]))
        return command["size"] if entry["opcode"] in (READ, WRITE, COMPARE) else 0

    def addresses(self, entry, pages):
        if entry["opcode"] == FLUSH:
            return
        expected = self.owner(entry).flying[entry["lba"]]["pages"]
        assert pages == expected, f"{entry}: its data are at {[hex(page) for page in pages]}, not {[hex(page) for page in expected]}"

    def block(self, entry):
        return 1 << self.owner(entry).lbads

    # ---- What the engine writes
    def _written(self, word):
        if not word["kind"]:
            assert word["bytes"] == 16
            self.memory.write(word["addr"], word["data"].to_bytes(16, "little"))
            queue = self.by_page[word["addr"] // PAGE]
            queue.came(word["addr"])
            if not queue.lazy and (queue.vector is None or random.random() < 0.2):
                self.looks.append((self.cycle + random.randint(0, 150), queue))
            return
        self.interrupts += 1
        guest = self.by_number[word["function"]]
        queue = next(queue for queue in guest.queues.values() if queue.vector == word["vector"])
        if queue.enabled:
            assert queue.told < queue.posted, f"guest {guest.number}: an interrupt of queue {queue.qid} without an entry"
            queue.told += 1
            queue.untold = 0
            if not queue.lazy:
                queue.take()

    # ---- Time
    async def _run(self):
        d = self.dut
        rests = Pauses(self.rate)
        while True:
            await RisingEdge(d.clk)
            self.cycle += 1
            d.bar_valid.value = 0
            if d.rst.value == 1:
                continue
            if self.looks:
                for look in [look for look in self.looks if look[0] <= self.cycle]:
                    self.looks.remove(look)
                    if look[1].enabled:
                        look[1].take()
            if self.load and random.random() < self.load:
                self._submit()
            if self.bells and not rests.rests():
                d.bar_valid.value = 1
                d.bar_function.value, d.bar_offset.value, d.bar_data.value = self.bells.pop(0)

    def commands(self, guest):
        """What guests submit by themselves; tests put their own here."""
        fault = None
        if random.random() < self.faulty:
            fault = random.choice([*FAULTS, "opcode", "namespace", "range", "fused"])
        return guest.command(fault=fault)

    def _submit(self):
        ready = [queue for guest in self.guests for queue in guest.queues.values()
                 if queue.enabled and not queue.stopped and queue.room() and len(queue.outstanding) < self.depth]
        if not ready:
            return
        queue = random.choice(ready)
        for _ in range(random.randint(1, min(queue.room(), self.depth - len(queue.outstanding)))):
            if (command := self.commands(queue.guest)) is None:
                break
            queue.submit(command)
            self.submitted += 1
        queue.bell()

    # ---- The control processor
    async def write(self, addr, value):
        await self._access(addr, value)

    async def read(self, addr):
        return await self._access(addr)

    async def _access(self, addr, value=None):
        d = self.dut
        async with self.lock:
            d.reg_valid.value, d.reg_write.value, d.reg_addr.value, d.reg_wdata.value = 1, int(value is not None), addr, value or 0
            for _ in range(20000):
                await FallingEdge(d.clk)
                if d.reg_ready.value == 1:
                    break
            else:
                assert False, f"register {addr:#x} is never ready"
            await RisingEdge(d.clk)
            d.reg_valid.value = 0
            for _ in range(20000):
                await FallingEdge(d.clk)
                if d.reg_rvalid.value == 1:
                    result = int(d.reg_rdata.value)
                    await RisingEdge(d.clk)
                    return result
            assert False, f"register {addr:#x} does not answer"

    async def begin(self):
        await start(self.dut)
        await self.program()

    async def program(self):
        """What the control processor does after reset: disks, places, pages, configurations."""
        for core in range(self.cores):
            for disk in range(self.ssds):
                await self.write(core << 16 | 0x10 + disk, 1)
        for guest in self.guests:
            at = guest.core << 16
            for page in range(self.pages):
                await self.write(at | 0x8000 + guest.local * self.pages + page, guest.row(page))
            await self.configure(guest)
            await self.write(0xF7000 + guest.number, 1 << 63 | guest.core << 8 | guest.local)

    async def configure(self, guest):
        for word, value in enumerate(guest.config()):
            await self.write(guest.core << 16 | 0x3000 + guest.local * 16 + word, value)

    async def enable(self, guest, qid, size=None, c_size=None):
        queue = guest.queues[qid]
        queue.place(size or random.randint(2, 64), c_size or random.randint(2, 64))
        self.by_page[queue.c_base // PAGE] = queue
        at = guest.core << 16 | 0x1000 + guest.index(qid) * 4
        vector = 0 if queue.vector is None else queue.vector << 24 | 1 << 16
        await self.write(at + 1, queue.size | queue.c_size << 8 | vector)
        await self.write(at + 2, queue.c_base)
        await self.write(at, queue.base | 1)
        queue.enabled = True

    async def state(self, guest, qid):
        """Register 1003h of a queue."""
        word = await self.read(guest.core << 16 | 0x1003 + guest.index(qid) * 4)
        return {"head": word & 63, "tail": word >> 8 & 63, "c_tail": word >> 16 & 63, "c_head": word >> 24 & 63, "phase": word >> 32 & 1,
                "flight": word >> 33 & 127, "stopped": word >> 40 & 1}

    async def disable(self, guest, qid):
        """Disables a queue, waits until nothing of it is in flight, and gives its memory away."""
        queue = guest.queues[qid]
        await self.write(guest.core << 16 | 0x1000 + guest.index(qid) * 4, 0)
        for _ in range(4000):
            if not (await self.state(guest, qid))["flight"]:
                break
        else:
            assert False, f"guest {guest.number}, queue {qid}: never ends"
        self.drop(queue)

    def drop(self, queue):
        """What the queue still has is the guest's again; its memory is gone."""
        if queue.enabled:
            queue.take()
        queue.enabled = False
        for command in queue.outstanding.values():
            queue.guest.forget(command)
        queue.outstanding = {}
        self.bells = [bell for bell in self.bells if (bell[0], bell[1] // 8) != (queue.guest.number, queue.qid)]
        for page in (queue.base, queue.c_base):
            self.memory.pages.pop(page // PAGE, None)

    async def reset(self):
        """Of the whole engine, in whatever it is doing; the disks' controllers are reset with it."""
        await RisingEdge(self.dut.clk)
        self.dut.rst.value = 1
        self.disks.restart()
        self.bells.clear()
        self.looks.clear()
        await cycles(self.dut, random.randint(1, 3))
        self.dut.rst.value = 0
        for guest in self.guests:
            # What a disk had begun may have been done or not.
            for command in guest.flying.values():
                if command["opcode"] in (WRITE, ZEROES):
                    guest.blocks.update(dict.fromkeys(range(command["lba"], command["lba"] + command["blocks"])))
            for queue in guest.queues.values():
                if queue.enabled:
                    queue.enabled = False
                    self.drop(queue)

    async def faults(self, core):
        """All that are waiting: (queue index, code)."""
        found = []
        while (word := await self.read(core << 16 | 2)) >> 63:
            found.append((word & 0xFFFF, word >> 16 & 0xFFFF))
        assert word == 0
        return found

    def left(self):
        return [queue for guest in self.guests for queue in guest.queues.values() if queue.enabled and not queue.stopped and queue.outstanding]

    async def settle(self, limit=60000):
        """No more commands; all that were given come back, and then the engine is quiet."""
        self.load = 0.0
        for _ in range(limit // 20):
            await cycles(self.dut, 20)
            for queue in self.left():
                if queue.unseen and not queue.lazy:
                    queue.take()
            if not self.left():
                break
        left = {(queue.guest.number, queue.qid): [describe(command) for command in queue.outstanding.values()][:3] for queue in self.left()}
        assert not left, f"never came back: {left}"
        await self.quiet()

    async def quiet(self, limit=6000):
        for _ in range(limit):
            await FallingEdge(self.dut.clk)
            if self.dut.busy.value == 0:
                break
        else:
            assert False, "busy for ever"
        for core in range(self.cores):
            assert await self.read(core << 16 | 1) == 0, f"core {core} has commands in flight"
