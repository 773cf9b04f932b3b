"""fastpath.sv with everything around it played: programs, cores (which fetch entries and lists from the window by doorbells, and post
completions there), the host, and other traffic of all kinds that must pass unchanged and in order."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from programs import COMPARE, FLUSH, READ, WRITE, ZEROES, Program, Request, any_request
from stream import Monitor, Pauses, Source, cycles, idle, start

WINDOW = 0xFFFF_FFE0_0000
SOURCES = ["one_of", "arbiter", "fifo", "fp_control", "fp_submit", "fp_complete", "fp_statistics"]


class Queue:
    """A space's queue pair as its core has it."""

    def __init__(self):
        self.head = self.tail = 0           # SQ
        self.c_tail = self.c_head = 0       # CQ
        self.promised = 0                   # commands fetched or being fetched and not posted
        self.unseen = 0                     # entries posted of which no doorbell has told
        self.phase = 1

    def places(self):
        return 31 - self.promised - self.unseen


class Bench:
    def __init__(self, dut, pace=0.3, others=0.2, delay=300, fails=0.05):
        self.dut, self.pace, self.others, self.delay, self.fails = dut, pace, others, delay, fails
        self.spaces, self.cores, self.pages = (int(getattr(dut, p).value) for p in ("SPACES", "CORES", "PAGES"))
        idle(dut, rst=1, bar_valid=0, bar_function=0, bar_offset=0, bar_data=0, reg_valid=0, reg_write=0, reg_addr=0, reg_wdata=0,
             f_db_valid=0, f_db_queue=0, f_db_cq=0, f_db_value=0, hrr_valid=0, hrr_tag=0, hrr_data=0, hrr_last=0, hrr_error=0, hrd_ready=0)
        self.asks = Source(dut, "c_hrd", ("addr", "beats", "tag"), Pauses(pace / 2))
        self.posts = Source(dut, "c_hwr", ("kind", "addr", "data", "bytes"), Pauses(pace / 2))
        Monitor(dut, "hwr", ("kind", "addr", "data", "bytes"), Pauses(pace), on_word=self.write)
        Monitor(dut, "c_hrr", ("tag", "data", "last", "error"), on_word=self.answer, holds=False)
        self.pauses = Pauses(pace)
        places = random.sample([(c, l) for c in range(self.cores) for l in range(16)], self.spaces)
        functions = random.sample(range(256), self.spaces)
        self.programs = [Program(s, functions[s], *places[s], random.getrandbits(39) % (WINDOW >> 9) << 9, 4096 if s == 0 else random.choice([40, 64, 300, 4096]), random.choice([512, 4096]))
                         for s in range(self.spaces)]
        self.clear()
        self.cycle, self.passed, self.lists, self.commands, self.resets = 0, 0, 0, 0, False

    def clear(self):
        self.queues = [Queue() for _ in self.programs]
        self.bells, self.passing, self.due, self.reads, self.foreign = [], [], [], {}, {}
        self.bar, self.held = [], []
        for stream in (self.asks, self.posts):
            stream.clear()

    async def begin(self):
        await start(self.dut)
        cocotb.start_soon(self.run())
        cocotb.start_soon(self.watch())

    async def reset(self):
        await RisingEdge(self.dut.clk)
        self.dut.rst.value, self.resets = 1, True
        self.clear()
        await cycles(self.dut, 3)
        self.clear()
        self.dut.rst.value, self.resets = 0, False

    async def access(self, address, value=None):
        d = self.dut
        await RisingEdge(d.clk)
        d.reg_valid.value, d.reg_write.value, d.reg_addr.value, d.reg_wdata.value = 1, int(value is not None), address & 0x3FF, value or 0
        while True:
            await FallingEdge(d.clk)
            if d.reg_ready.value == 1:
                break
        await RisingEdge(d.clk)
        d.reg_valid.value = 0
        await FallingEdge(d.clk)
        assert d.reg_rvalid.value == 1
        return int(d.reg_rdata.value)

    async def open(self, program):
        program.reset()
        self.queues[program.space] = Queue()
        for register, value in program.setup():
            await self.access(register, value)

    async def close(self, program):
        base = 0xF7C00 + 0x40 * program.space
        await self.access(base, 0)
        while await self.access(base + 3) & 63:
            pass

    async def statistics(self, program):
        program.check_statistics([await self.access(0xF7C20 + 0x40 * program.space + i) for i in range(32)])

    # ---- Programs

    def send(self, program, request):
        """The words go out; whether it is accepted is decided now, as nothing of this tag can end in between."""
        for offset, value in request.writes():
            self.bar.append((program.function, offset, value))
        if request.tag in program.outstanding:
            program.refused += 1
        else:
            program.accept(request)

    async def quiet(self, limit=60000):
        for _ in range(limit):
            await RisingEdge(self.dut.clk)
            if not (self.bar or self.due or self.asks.words or self.posts.words or self.passing or self.reads or self.foreign or any(p.outstanding for p in self.programs)):
                break
        else:
            raise AssertionError(f"it does not end: {[p.outstanding for p in self.programs]}, {self.reads}, {len(self.passing)}")
        for _ in range(40):
            await FallingEdge(self.dut.clk)
        assert self.dut.busy.value == 0 and not any(p.expected for p in self.programs) and not self.bells
        assert all(queue.unseen == 0 for queue in self.queues), "a completion queue's head was not told"

    # ---- Cores: reads

    def tag(self):
        return random.choice([t for t in random.choices(range(4096), k=8) if t not in self.reads and t not in self.foreign])

    def read(self, address, beats, then):
        tag = self.tag()
        self.reads[tag] = [[], beats, then]
        self.asks.send(dict(addr=address, beats=beats, tag=tag))

    def answer(self, word):
        tag = word["tag"]
        if self.resets:
            return
        if tag in self.foreign:
            beats = self.foreign[tag]
            assert (word["data"], word["last"], word["error"]) == beats.pop(0)
            if not beats:
                del self.foreign[tag]
                self.passed += 1
            return
        data, beats, then = self.reads[tag]
        data.append(word["data"])
        assert not word["error"] and word["last"] == (len(data) == beats)
        if word["last"]:
            del self.reads[tag]
            then(data)

    def fetch(self, s):
        queue = self.queues[s]
        while queue.head != queue.tail and queue.places() > 0:
            count = min((queue.tail - queue.head) % 32, 32 - queue.head, queue.places(), random.randint(1, 4))
            at = queue.head
            queue.head = (queue.head + count) % 32
            queue.promised += count
            self.read(WINDOW + 0x4000 * s + 64 * at, 4 * count, lambda data, at=at: [self.entry(s, at + i // 4, data[i:i + 4]) for i in range(0, len(data), 4)])

    def entry(self, s, index, beats):
        program = self.programs[s]
        tag, (opcode, durable, offset, lba, blocks) = program.expected.pop(0)
        self.commands += 1
        assert beats[0] == opcode | index << 16 | 1 << 32
        assert beats[3] == ((blocks - 1) | durable << 30)
        assert beats[2] >> 64 == lba, f"LBA {beats[2] >> 64:#x} is not {lba:#x}"
        prp1, prp2 = beats[1] >> 64, beats[2] & (1 << 64) - 1
        assert beats[1] & (1 << 64) - 1 == 0
        if opcode not in (READ, WRITE, COMPARE):
            return self.end(s, index, tag)
        assert prp1 == offset
        more = (offset % 4096 + blocks * program.block - 1) // 4096
        if more == 1:
            assert prp2 == offset // 4096 * 4096 + 4096
        if more < 2:
            return self.end(s, index, tag)
        assert prp2 >> 21 == self.pages - 1 and prp2 % 256 == 0

        def check(data):
            entries = [beat >> 64 * half & (1 << 64) - 1 for beat in data for half in range(2)]
            assert entries[:more] == [(offset // 4096 + 1 + k) * 4096 for k in range(more)]
            self.lists += 1
            self.end(s, index, tag)

        self.read(WINDOW + (prp2 & (1 << 21) - 1), (more + 1) // 2, check)

    def end(self, s, cid, tag):
        status = random.getrandbits(15) if random.random() < self.fails else 0
        self.due.append((self.cycle + random.randint(0, self.delay), s, cid, tag, status))

    # ---- Cores: writes. Posted in the order in which they are offered.

    def post(self, s, cid, tag, status):
        queue = self.queues[s]
        word = status << 17 | queue.phase << 16 | cid
        self.posts.send(dict(kind=0, addr=WINDOW + 0x4000 * s + 0x1000 + 16 * queue.c_tail, bytes=16, data=word << 96 | random.getrandbits(96)))
        queue.promised -= 1
        queue.unseen += 1
        queue.c_tail = (queue.c_tail + 1) % 32
        queue.phase ^= queue.c_tail == 0
        self.programs[s].ended(tag, status)

    def write(self, word):
        if self.resets:
            return
        if word["kind"] == 0 and word["bytes"] == 16:
            for program in self.programs:
                if program.ring <= word["addr"] < program.ring + 512:
                    return program.record(word["addr"], word["data"])
        assert word == self.passing.pop(0)
        self.passed += 1

    # ---- Every cycle

    async def watch(self):
        d = self.dut
        while True:
            await FallingEdge(d.clk)
            if d.rst.value == 1 or self.resets:
                continue
            if d.hrd_valid.value == 1 and d.hrd_ready.value == 1:
                assert int(d.c_hrd_tag.value) in self.foreign, "the window is asked of the host"
                self.held.append([self.cycle + random.randint(1, 60), int(d.c_hrd_tag.value), list(self.foreign[int(d.c_hrd_tag.value)])])
            valid = int(d.db_valid.value)
            if valid:
                self.bell(valid.bit_length() - 1, int(d.db_queue.value), int(d.db_cq.value), int(d.db_value.value), valid)

    def bell(self, core, queue, cq, value, valid):
        assert valid & (valid - 1) == 0
        if self.f_bell:
            assert self.f_bell == (core, queue, cq, value), "a guest's doorbell is not delivered at once"
            self.passed += 1
            return
        (s,) = [p.space for p in self.programs if (p.core, p.local << 2) == (core, queue)]
        q = self.queues[s]
        if cq:
            moved = (value - q.c_head) % 32
            assert 0 < moved <= q.unseen
            q.c_head, q.unseen = value, q.unseen - moved
        else:
            assert value < 32 and (value - q.head) % 32 >= (q.tail - q.head) % 32, "a tail moves back"
            q.tail = value
        if random.random() < 0.7:
            self.fetch(s)
        else:
            self.due.append((self.cycle + random.randint(0, 50), s, None, None, None))

    async def run(self):
        d = self.dut
        self.f_bell = None
        while True:
            await RisingEdge(d.clk)
            self.cycle += 1
            d.hrd_ready.value = int(not self.pauses.rests())
            d.bar_valid.value = d.f_db_valid.value = d.hrr_valid.value = 0
            self.f_bell = None
            if d.rst.value == 1 or self.resets:
                self.held = []
                continue
            if self.bar and random.random() >= self.pace:
                d.bar_valid.value = 1
                d.bar_function.value, d.bar_offset.value, d.bar_data.value = self.bar.pop(0)
            self.strangers()
            ready = [ask for ask in self.held if ask[0] <= self.cycle]
            if ready:
                ask = random.choice(ready)
                d.hrr_valid.value, d.hrr_tag.value = 1, ask[1]
                d.hrr_data.value, d.hrr_last.value, d.hrr_error.value = ask[2].pop(0)
                if not ask[2]:
                    self.held.remove(ask)
            for item in [item for item in self.due if item[0] <= self.cycle]:
                self.due.remove(item)
                if item[2] is None:
                    self.fetch(item[1])
                else:
                    self.post(*item[1:])
                    self.due.append((self.cycle + random.randint(0, 50), item[1], None, None, None))

    def strangers(self):
        """Traffic that is no space's."""
        d = self.dut
        if random.random() < self.others / 4 and len(self.asks.words) < 8:
            tag, beats = self.tag(), random.randint(1, 16)
            self.foreign[tag] = [(random.getrandbits(128), int(i == beats - 1), random.getrandbits(1)) for i in range(beats)]
            self.asks.send(dict(addr=random.choice([random.getrandbits(47), WINDOW - 16, WINDOW + (1 << 21), WINDOW | 1 << 50]), beats=beats, tag=tag))
        if random.random() < self.others and len(self.posts.words) < 8:
            kind = random.getrandbits(1)
            address = random.getrandbits(24) | (WINDOW if kind else 0) if random.random() < 0.5 else random.choice([WINDOW - 16, WINDOW + (1 << 21)])
            word = dict(kind=kind, addr=address, data=random.getrandbits(128), bytes=random.randint(1, 16))
            if not any(p.ring <= address < p.ring + 512 for p in self.programs):
                self.posts.send(word)
                self.passing.append(word)
        if random.random() < self.others:
            self.f_bell = (random.randrange(self.cores), random.getrandbits(6), random.getrandbits(1), random.getrandbits(16))
            core, d.f_db_queue.value, d.f_db_cq.value, d.f_db_value.value = self.f_bell
            d.f_db_valid.value = 1 << core


async def work(bench, count, each=None):
    for _ in range(count):
        program, tag = random.choice(bench.programs), random.randrange(32)
        while len(bench.bar) > 8 or tag in program.outstanding:
            await RisingEdge(bench.dut.clk)
            program, tag = random.choice(bench.programs), random.randrange(32)
        bench.send(program, (each or any_request)(tag, program.pages, program.block))


async def requests(dut, count, **options):
    bench = Bench(dut, **options)
    await bench.begin()
    for program in bench.programs:
        await bench.open(program)
    await work(bench, count)
    await bench.quiet()
    for program in bench.programs:
        await bench.statistics(program)
        assert await bench.access(0xF7C03 + 0x40 * program.space) == 0
    assert sum(p.done for p in bench.programs) == count < bench.commands and sum(p.failed for p in bench.programs)
    assert bench.lists > 10 and bench.passed > count


@cocotb.test()
async def slow(dut):
    await requests(dut, 400, pace=0.5, delay=2000)


@cocotb.test()
async def fast(dut):
    await requests(dut, 600, pace=0.0, others=0.1, delay=40)


@cocotb.test()
async def depth(dut):
    """All tags of a space at once, small reads: the rings are as full as they get, and a tag more is refused."""
    bench = Bench(dut, pace=0.0, others=0.0, delay=3000, fails=0.0)
    await bench.begin()
    program = bench.programs[-1]
    await bench.open(program)
    for lap in range(6):
        for tag in range(32):
            bench.send(program, Request(tag, random.choice([READ, WRITE]), 4096 * tag % 65536, lap * 1000 + tag, 1))
        bench.send(program, Request(31, READ, 0, 0, 1))  # the last one, which cannot have ended yet
        while bench.bar:
            await RisingEdge(dut.clk)
        for _ in range(12):
            await RisingEdge(dut.clk)
        assert await bench.access(0xF7C03 + 0x40 * program.space) >> 16 == program.refused == lap + 1
        await bench.quiet()
    assert program.done == 192
    await bench.statistics(program)


@cocotb.test()
async def refused(dut):
    bench = Bench(dut, others=0.0, fails=0.0)
    await bench.begin()
    program = bench.programs[0]
    for offset in (0x800, 0x80C):   # no space yet: the front's
        dut.bar_function.value, dut.bar_offset.value = program.function, offset
        await FallingEdge(dut.clk)
        assert dut.bar_mine.value == 0
    await bench.open(program)
    for offset, mine in ((0x800, 1), (0xFFC, 1), (0x7FC, 0), (8, 0)):
        await RisingEdge(dut.clk)
        dut.bar_function.value, dut.bar_offset.value = program.function, offset
        await FallingEdge(dut.clk)
        assert dut.bar_mine.value == mine
        dut.bar_function.value = (program.function + 1) % 256 if len(bench.programs) == 1 else next(f for f in range(256) if f not in [p.function for p in bench.programs])
        await FallingEdge(dut.clk)
        assert dut.bar_mine.value == 0
    for offset in (0x810, 0x801, 0x803, 0x80E, 0xFFC, 0x820, 0xC0C):
        bench.bar.append((program.function, offset, random.getrandbits(32)))
        program.refused += 1
    for tag in (32, 33, 64, 1 << 15):
        bench.bar.append((program.function, 0x80C, READ | tag << 16))
        program.refused += 1
    while bench.bar:
        await RisingEdge(dut.clk)
    for _ in range(8):
        await RisingEdge(dut.clk)
    assert await bench.access(0xF7C03 + 0x40 * program.space) == program.refused << 16
    # A word without its brothers, and good again.
    for missing in range(3):
        bench.send(program, Request(missing, READ, 0, 0, 1, missing=missing))
    bench.send(program, Request(9, FLUSH))
    bench.send(program, Request(10, ZEROES, 0xFFFFFFFF, 5, 65535 if program.block == 512 else 9000))
    await bench.quiet()
    assert program.done == 5 and program.failed == 3


@cocotb.test()
async def spaces(dut):
    """Spaces are closed and opened again while others work; registers say what they are."""
    bench = Bench(dut, pace=0.2, delay=200)
    await bench.begin()
    for program in bench.programs:
        await bench.open(program)
    for _ in range(6):
        for program in bench.programs:
            assert await bench.access(0xF7C00 + 0x40 * program.space) == 1 << 63 | program.function << 16 | program.core << 8 | program.local
        worker = cocotb.start_soon(work(bench, 40))
        await worker
        program = random.choice(bench.programs)
        while bench.bar:
            await RisingEdge(dut.clk)
        for _ in range(5):
            await RisingEdge(dut.clk)
        await bench.close(program)
        assert not program.outstanding
        assert await bench.access(0xF7C00 + 0x40 * program.space) >> 63 == 0
        await bench.statistics(program)
        await bench.open(program)
        assert await bench.access(0xF7C03 + 0x40 * program.space) == 0
        await bench.statistics(program)
    assert await bench.access(0xF7C00 + 0x40 * 15) == 0 or bench.spaces == 16
    await bench.quiet()


@cocotb.test()
async def resets(dut):
    """Reset with requests in all stages: nothing of them comes back."""
    bench = Bench(dut, pace=0.2, delay=400)
    await bench.begin()
    for _ in range(8):
        for program in bench.programs:
            await bench.open(program)
        await work(bench, random.randint(1, 60))
        for _ in range(random.randint(0, 100)):
            await RisingEdge(dut.clk)
        await bench.reset()
        for program in bench.programs:
            program.reset()
    for program in bench.programs:
        await bench.open(program)
    await work(bench, 50)
    await bench.quiet()


def test_fastpath():
    harness.run("fastpath", sources=SOURCES, parameters={"SPACES": 3, "CORES": 2})
    harness.run("fastpath", sources=SOURCES, parameters={"SPACES": 1})
    harness.run("fastpath", sources=SOURCES, parameters={"SPACES": 16, "CORES": 16, "PAGES": 64})


if __name__ == "__main__":
    test_fastpath()
