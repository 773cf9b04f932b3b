"""The whole command side against a reference: entries in, what disks read and what slots are told out.

Everything around it is played here: the guest's memory and lists, the disks (they fetch entries by their doorbells, check every word, and
complete in any order), the slots (legs, ends, freeing). The storage functions are functions_stage/fn_chain.sv.
"""

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge, Timer

import harness
from prp import Guest, Host, HostReads
from stream import Monitor, Pauses, Source, cycles, reset, start
from words import CONSTANTS, OWNER

FLUSH, WRITE, READ, COMPARE, ZEROES = 0, 1, 2, 5, 8
FAULTS = [None] * 12 + ["absent", "high", "inner", "broken", "misaligned", "chain"]


class World:
    def __init__(self, dut, pace=0.3, latency=(1, 60)):
        self.dut = dut
        self.lf, self.ssds, self.pages = (int(os.environ[f"TEST_{name}"]) for name in ("LF", "SSDS", "PAGES"))
        self.places = 64 // self.ssds
        self.host = Host()
        self.guests = [Guest(self.host, self.pages) for _ in range(self.lf)]
        self.blocks = [random.choice([9, 12]) for _ in range(self.lf)]
        self.start_lba = [random.getrandbits(40) for _ in range(self.lf)]
        self.disks_of = [random.randrange(1, 1 << self.ssds) for _ in range(self.lf)]
        self.durable = [random.getrandbits(1) for _ in range(self.lf)]
        self.free = list(range(64))
        random.shuffle(self.free)
        self.commands = {}        # slot -> what is known of it
        self.ended = 0
        self.completed = 0
        self.rings = 0
        self.entries_read = 0
        self.lists_read = 0
        self.pace = pace
        dut.now.value = 0
        for name in ("cfg_wr_en", "cfg_wr_addr", "cfg_wr_data", "page_wr_en", "page_wr_addr", "page_wr_data", "ssd_write", "ssd_enabled",
                     "free_valid", "free_slot"):
            getattr(dut, name).value = 0
        self.entries = Source(dut, "f", ("beat", "slot", "queue", "data"), Pauses(pace / 2))
        self.reads = Source(dut, "sdr", ("addr", "beats", "tag"), Pauses(pace / 2))
        self.writes = Source(dut, "sdw", ("addr", "data"), Pauses(pace / 2))
        self.data = Monitor(dut, "sdd", ("tag", "data", "last"), Pauses(pace), on_word=self.on_data)
        self.doorbells = Monitor(dut, "sdb", ("ssd", "cq", "value"), Pauses(pace), on_word=self.on_doorbell)
        self.own = Monitor(dut, "own", ("slot",), on_word=self.on_own, holds=False)
        self.leg = Monitor(dut, "leg", ("slot", "count"), on_word=self.on_leg, holds=False)
        self.end = Monitor(dut, "end", ("slot", "status"), Pauses(pace), on_word=self.on_end)
        self.done = Monitor(dut, "done", ("slot", "status"), Pauses(pace), on_word=self.on_done)
        self.answers = HostReads(dut, self.host, latency, Pauses(pace))
        self.answers.rest = pace / 2
        self.to_free = []
        self.disks = [Disk(self, number) for number in range(self.ssds)]
        self.fetching = []        # who asked for the data that come next
        self.held_back = []       # completions that disks will write: (cycle, disk, slot)
        self.cycle = 0
        dut.rst.value = 1

    async def begin(self):
        await Timer(1, "ns")
        cocotb.start_soon(self.answers.run())
        await start(self.dut)
        cocotb.start_soon(self.tick())
        for lf in range(self.lf):
            await self.configure(lf, 0, lf + 1 | self.blocks[lf] << 32 | 1 << 40 | self.durable[lf] << 46 | self.disks_of[lf] << 48)
            for word, value in ((1, 0), (2, self.start_lba[lf]), (3, 0), (4, 0)):
                await self.configure(lf, word, value)
            for page in range(self.pages):
                await self.row(lf * self.pages + page, self.guests[lf].row(page))
        await self.enable((1 << self.ssds) - 1)

    async def configure(self, lf, word, value):
        dut = self.dut
        dut.cfg_wr_en.value, dut.cfg_wr_addr.value, dut.cfg_wr_data.value = 1, lf * 16 + word, value
        await FallingEdge(dut.clk)
        while dut.cfg_wr_ready.value != 1:
            await FallingEdge(dut.clk)
        await RisingEdge(dut.clk)
        dut.cfg_wr_en.value = 0

    async def row(self, at, value):
        dut = self.dut
        dut.page_wr_en.value, dut.page_wr_addr.value, dut.page_wr_data.value = 1, at, value
        await RisingEdge(dut.clk)
        dut.page_wr_en.value = 0

    async def enable(self, disks):
        self.dut.ssd_write.value = disks
        await RisingEdge(self.dut.clk)
        self.dut.ssd_write.value = 0
        self.dut.ssd_enabled.value = disks
        for disk in self.disks:
            disk.reset()

    async def tick(self):
        """Time, freed slots and the disks' own time."""
        dut = self.dut
        while True:
            await RisingEdge(dut.clk)
            self.cycle += 1
            dut.now.value = self.cycle // 64
            dut.free_valid.value = 0
            if dut.rst.value == 1:
                continue
            if self.to_free and random.random() >= self.pace:
                slot = self.to_free.pop(random.randrange(len(self.to_free)))
                dut.free_valid.value, dut.free_slot.value = 1, slot
                self.freed = slot
                self.free.append(slot)
            due = [entry for entry in self.held_back if entry[0] <= self.cycle]
            if due:
                entry = random.choice(due)
                self.held_back.remove(entry)
                self.disks[entry[1]].complete(entry[2])

    # ---- Commands

    def make(self, lf=None, opcode=None, size=None, fault=0):
        """A command, and what is to become of it."""
        lf = random.randrange(self.lf) if lf is None else lf
        guest, shift = self.guests[lf], self.blocks[lf]
        opcode = random.choice([READ] * 4 + [WRITE] * 4 + [COMPARE, FLUSH, ZEROES]) if opcode is None else opcode
        faulty = fault == 0
        fault = random.choice(FAULTS) if faulty else fault
        most = min(131072 >> shift, 8 if random.random() < 0.6 else 256)
        blocks = random.randint(1, most) if size is None else size >> shift
        flags, nsz = 0, 0
        if faulty and fault is None and random.random() < 0.04:
            flags = random.choice([1, 2, 3, 0x40, 0x80])
        prp1, prp2 = guest.pointer(blocks << shift, fault)
        slba = random.getrandbits(44)
        cdw12 = blocks - 1 | random.getrandbits(16) << 16
        cdw12 &= ~(1 << 23)
        if opcode == ZEROES and random.random() < 0.2:
            cdw12 |= 1 << 23
        if faulty and random.random() < 0.03:
            opcode = random.choice([3, 4, 6, 7, 9, 0x0C, 0x10, 0x12, 0x82, 0xFF])
        command = dict(lf=lf, queue=lf << 2 | random.getrandbits(2), opcode=opcode, cid=random.getrandbits(16), nsid=random.getrandbits(32),
                       prp1=prp1, prp2=prp2, slba=slba, cdw12=cdw12, blocks=blocks, flags=flags)
        command["expected"] = self.expect(command)
        return command

    def expect(self, c):
        guest, shift = self.guests[c["lf"]], self.blocks[c["lf"]]
        if c["opcode"] not in (FLUSH, WRITE, READ, COMPARE, ZEROES):
            return "status", CONSTANTS["ST_INVALID_OPCODE"]
        if c["flags"]:
            return "status", CONSTANTS["ST_INVALID_FIELD"]
        if c["opcode"] == ZEROES and c["cdw12"] >> 23 & 1:
            return "status", CONSTANTS["ST_INVALID_FIELD"]
        if c["opcode"] in (FLUSH, ZEROES):
            return "pages", []
        return guest.resolve(c["prp1"], c["prp2"], c["blocks"] << shift, c["opcode"] == READ)

    async def send(self, command):
        began = self.cycle
        while not self.free or len(self.entries.words) > 16:
            await RisingEdge(self.dut.clk)
            assert self.cycle < began + 8000, f"nothing ends any more: {self.commands}"
        slot = self.free.pop(0)
        assert slot not in self.commands
        command["legs"] = None
        self.commands[slot] = command
        c = command
        words = [c["opcode"] | c["flags"] << 8 | c["cid"] << 16 | c["nsid"] << 32 | random.getrandbits(64) << 64,
                 random.getrandbits(64) | c["prp1"] << 64, c["prp2"] | c["slba"] << 64, c["cdw12"] | random.getrandbits(96) << 32]
        for beat, word in enumerate(words):
            self.entries.send(dict(beat=beat, slot=slot, queue=c["queue"], data=word))

    async def settle(self, limit=60000):
        for _ in range(limit):
            if not self.commands and not self.entries.words:
                return
            await RisingEdge(self.dut.clk)
        raise AssertionError(f"{len(self.commands)} commands never ended: {self.commands}")

    # ---- Slots

    def on_own(self, word):
        owner = OWNER.unpack(int(self.dut.own.value))
        command = self.commands[word["slot"]]
        assert owner == dict(queue=command["queue"], cid=command["cid"])
        command["owned"] = True

    def on_leg(self, word):
        command = self.commands[word["slot"]]
        kind, what = command["expected"]
        assert kind == "pages", f"{command} goes to a disk"
        assert command.get("owned") and command["legs"] is None
        assert word["count"] == self.disks_of[command["lf"]].bit_count()
        command["legs"] = word["count"]
        command["to"] = self.disks_of[command["lf"]]

    def on_end(self, word):
        command = self.commands[word["slot"]]
        assert command.get("owned")
        assert command["expected"] == ("status", word["status"]), f"{command} ended with {word['status']:#x}"
        self.ended += 1
        self.leave(word["slot"])

    def on_done(self, word):
        command = self.commands[word["slot"]]
        assert word["status"] in command["statuses"], f"{command} got {word['status']:#x}"
        command["statuses"].remove(word["status"])
        command["legs"] -= 1
        if not command["legs"]:
            assert not command["to"], "a disk was left out"
            self.completed += 1
            self.leave(word["slot"])

    def leave(self, slot):
        del self.commands[slot]
        self.to_free.append(slot)

    # ---- Disks

    def on_doorbell(self, word):
        self.rings += 1
        self.disks[word["ssd"]].ring(word["cq"], word["value"])

    def read(self, address, beats, then):
        self.fetching.append([beats, [], then])
        self.reads.send(dict(addr=address, beats=beats, tag=len(self.fetching) & 0xFF))
        self.fetching[-1].append(len(self.fetching) & 0xFF)

    def on_data(self, word):
        first = self.fetching[0]
        assert word["tag"] == first[3]
        first[1].append(word["data"])
        assert word["last"] == (len(first[1]) == first[0])
        if word["last"]:
            self.fetching.pop(0)
            first[2](b"".join(beat.to_bytes(16, "little") for beat in first[1]))


class Disk:
    def __init__(self, world, number):
        self.world, self.number = world, number
        self.reset()

    def reset(self):
        self.tail = self.head = self.cq_tail = self.cq_head = self.seen = 0
        self.laps = 0
        self.unwritten = []

    def ring(self, cq, value):
        places = self.world.places
        assert value < places
        if cq:
            assert (value - self.cq_head) % places <= (self.cq_tail - self.cq_head) % places, "a head beyond what was written"
            assert value != self.cq_head
            self.cq_head = value
            self.write()
            return
        assert value != self.tail, "a doorbell that tells nothing new"
        self.tail = value
        self.fetch()

    def fetch(self):
        world = self.world
        while self.head != self.tail:
            many = 1
            if self.head + 2 <= world.places and (self.tail - self.head) % world.places >= 2 and random.random() < 0.3:
                many = 2
            at = (self.number * world.places + self.head) * 64
            self.head = (self.head + many) % world.places
            head = self.head
            world.read(at, 4 * many, lambda data, head=head: [self.entry(data[i:i + 64]) for i in range(0, len(data), 64)])

    def entry(self, data):
        world = self.world
        world.entries_read += 1
        self.seen = (self.seen + 1) % world.places
        field = lambda at, size: int.from_bytes(data[at:at + size], "little")
        slot = field(2, 2)
        command = world.commands[slot]
        lf, opcode = command["lf"], command["opcode"]
        assert command["to"] >> self.number & 1, f"disk {self.number} was not meant: {command}"
        command["to"] ^= 1 << self.number
        assert data[0] == opcode and data[1] == 0 and field(4, 4) == 1
        assert field(8, 8) == field(16, 8) == field(56, 8) == 0 and field(52, 4) == 0
        assert field(40, 8) == command["slba"] + world.start_lba[lf]
        cdw12 = command["cdw12"] & 0xC000FFFF
        if opcode == ZEROES:
            cdw12 |= command["cdw12"] & 1 << 25
        if opcode in (WRITE, ZEROES) and world.durable[lf]:
            cdw12 |= 1 << 30
        assert field(48, 4) == (0 if opcode == FLUSH else cdw12), f"{field(48, 4):#x} is not {cdw12:#x}: {command}"
        pages = command["expected"][1]
        assert field(24, 8) == (pages[0] if pages else 0)
        if len(pages) <= 2:
            assert field(32, 8) == (pages[1] if len(pages) == 2 else 0)
            return self.later(slot)
        at = field(32, 8)
        assert at % 256 == 0 and 0x1000 <= at < 0x2000
        rest = pages[1:]
        parts = []

        def part(data):
            parts.append(data)
            if sum(map(len, parts)) < 8 * len(rest):
                return
            found = b"".join(parts)
            assert [int.from_bytes(found[8 * i:8 * i + 8], "little") for i in range(len(rest))] == rest, f"list of {command}"
            world.lists_read += 1
            self.later(slot)

        beats = -(-len(rest) // 2)
        while beats:
            size = random.randint(1, beats)
            world.read(at, size, part)
            at, beats = at + 16 * size, beats - size

    def later(self, slot):
        command = self.world.commands[slot]
        self.world.held_back.append((self.world.cycle + random.choice([0, 5, 20, random.randrange(400)]), self.number, slot))
        command.setdefault("statuses", [])

    def complete(self, slot):
        status = 0 if random.random() < 0.9 else random.getrandbits(15)
        # Without More.
        self.world.commands[slot]["statuses"].append(status & ~(1 << 13))
        self.unwritten.append((slot, status))
        self.write()

    def write(self):
        places = self.world.places
        while self.unwritten and (self.cq_tail + 1) % places != self.cq_head:
            slot, status = self.unwritten.pop(0)
            phase = 1 - self.laps % 2
            last = self.seen | random.getrandbits(16) << 16 | slot << 32 | phase << 48 | status << 49
            at = 0x2000 + (self.number * places + self.cq_tail) * 16
            self.world.writes.send(dict(addr=at, data=random.getrandbits(64) | last << 64))
            self.cq_tail = (self.cq_tail + 1) % places
            self.laps += self.cq_tail == 0


@cocotb.test()
@cocotb.parametrize(pace=[0.0, 0.4])
async def everything(dut, pace):
    """Random commands, sizes, faults: every entry, list and status as the reference has it."""
    world = World(dut, pace)
    await world.begin()
    for _ in range(700):
        await world.send(world.make())
    await world.settle()
    dut._log.info(f"{world.completed} completed, {world.ended} ended, {world.lists_read} lists, {world.rings} doorbells, "
                  f"{world.answers.most} reads at once, {world.cycle} cycles")
    assert world.completed > 250 and world.ended > 60 and world.lists_read > 60


@cocotb.test()
async def full_speed(dut):
    """Without lists: a command each 4 cycles, or what the functions take."""
    world = World(dut, 0.0)
    await world.begin()
    await cycles(dut, 70)
    begin = world.cycle
    for _ in range(300):
        await world.send(world.make(opcode=READ, size=4096, fault=None))
    await world.settle()
    each = (world.cycle - begin) / 300
    dut._log.info(f"{each:.2f} cycles a command")
    # The stand-in for the chain takes 3 cycles; a disk's answer comes up to 400 cycles after the last command.
    assert each < 7.5 * world.disks_of[0].bit_length() + 2


@cocotb.test()
async def lists_come_back(dut):
    """A command with a list at a time, with nothing behind it, more of them than there are lists."""
    world = World(dut, 0.0)
    await world.begin()
    for _ in range(40):
        await world.send(world.make(opcode=READ, size=65536, fault=None))
        await world.settle()
    assert world.completed == 40


@cocotb.test()
async def reset_in_flight(dut):
    """After a reset in the middle of everything, all begins anew: no list, place or command is missing."""
    world = World(dut, 0.3)
    await world.begin()
    for round in range(3):
        for _ in range(60):
            await world.send(world.make())
        await cycles(dut, random.randrange(1, 150))
        dut.rst.value = 1
        for source in (world.entries, world.reads, world.writes):
            source.clear()
        world.commands.clear()
        world.to_free.clear()
        world.fetching.clear()
        world.held_back.clear()
        world.free = list(range(64))
        await cycles(dut, 3)
        dut.rst.value = 0
        await world.enable((1 << world.ssds) - 1)
        for _ in range(150):
            await world.send(world.make())
        await world.settle()


def test_commands():
    sources = ["fifo", "decode", "page_table", "translate", "tb/functions_stage/fn_chain.sv", "functions", "prp_list", "submit", "ssd_memory",
               "ssd_completions", "ssd_doorbells"]
    configurations = [{"LF": 4, "SSDS": 1, "PAGES": 16, "LISTS": 16}, {"LF": 16, "SSDS": 4, "PAGES": 8, "LISTS": 3}]
    for parameters in configurations[: 1 if os.environ.get("MILLRACE_QUICK") == "1" else None]:
        os.environ.update({f"TEST_{name}": str(value) for name, value in parameters.items()})
        harness.run("commands", sources=sources, parameters=parameters)


if __name__ == "__main__":
    test_commands()
