"""fp_control.sv: which words become which requests, in which order, what is refused, and when a tag is free again. What makes commands
of requests, and what ends them, is played here."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from programs import FLUSH, READ, Program, Request, any_request
from stream import cycles, idle, start
from words import CONSTANTS, LAYOUTS

REQUEST = LAYOUTS["request_t"]
WRONG = {"FP_OPCODE": "ST_INVALID_OPCODE", "FP_FIELD": "ST_INVALID_FIELD", "FP_TRANSFER": "ST_DATA_TRANSFER_ERROR"}


class Bench:
    def __init__(self, dut, pace=0.3, takes=0.2):
        self.dut, self.pace, self.takes = dut, pace, takes
        self.spaces, self.cores = int(dut.SPACES.value), int(dut.CORES.value)
        idle(dut, rst=1, bar_valid=0, bar_function=0, bar_offset=0, bar_data=0, reg_valid=0, reg_write=0, reg_addr=0, reg_wdata=0, still=1,
             head_space=0, request_at=0, pop=0, bell_space=0, ended_valid=0, ended_at=0, ended_space=0, ring_space=0, stat_done=0, stat_data=0)
        functions = random.sample(range(256), self.spaces)
        self.programs = [Program(s, functions[s], random.randrange(self.cores), random.randrange(16), random.getrandbits(38) << 9, random.choice([1, 40, 3000, 1 << 18]), random.choice([512, 4096]))
                         for s in range(self.spaces)]
        self.bar, self.gone, self.decides = [], 0, 0
        self.clear()

    def clear(self):
        self.sent = [[] for _ in self.programs]     # requests in order, not yet taken
        self.taken = [[] for _ in self.programs]    # tags

    async def begin(self):
        await start(self.dut)
        cocotb.start_soon(self.run())
        cocotb.start_soon(self.watch())

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
        self.sent[program.space], self.taken[program.space] = [], []
        for register, value in program.setup():
            await self.access(register, value)

    def send(self, program, request):
        for offset, value in request.writes():
            self.bar.append((program.function, offset, value, None))
        # What becomes of it is decided with the go: nothing may end until that has gone through.
        function, offset, value, _ = self.bar.pop()
        self.bar.append((function, offset, value, (program, request)))

    def goes(self, program, request):
        if request.tag in program.outstanding:
            program.refused += 1
        else:
            program.outstanding[request.tag] = request
            self.sent[program.space].append(request)

    async def run(self):
        """Words, one a cycle at most."""
        d = self.dut
        while True:
            await RisingEdge(d.clk)
            d.bar_valid.value = 0
            d.still.value = int(random.random() < 0.5)
            self.decides = max(0, self.decides - 1)
            if d.rst.value == 0 and self.bar and random.random() >= self.pace:
                function, offset, value, request = self.bar.pop(0)
                d.bar_valid.value, d.bar_function.value, d.bar_offset.value, d.bar_data.value = 1, function, offset, value
                if request:
                    self.decides = 5
                    self.goes(*request)

    async def watch(self):
        """Takes requests and ends them; at most one of each a cycle."""
        d = self.dut
        while True:
            await RisingEdge(d.clk)
            d.pop.value = d.ended_valid.value = 0
            if d.rst.value == 1:
                continue
            space = random.randrange(self.spaces)
            d.head_space.value = space
            ends = [s for s in range(self.spaces) if self.taken[s]]
            if ends and random.random() < self.takes and not self.decides and not (self.bar and self.bar[0][3]):
                end = random.choice(ends)
                tag = self.taken[end].pop(random.randrange(len(self.taken[end])))
                d.ended_valid.value, d.ended_at.value, d.ended_space.value = 1, end * 32 + tag, end
                del self.programs[end].outstanding[tag]
                self.programs[end].done += 1
            await FallingEdge(d.clk)
            if d.rst.value == 1 or not int(d.pending.value) >> space & 1 or random.random() >= self.takes:
                continue
            tag = int(d.head_tag.value)
            await RisingEdge(d.clk)
            d.ended_valid.value, d.pop.value, d.request_at.value = 0, 1, space * 32 + tag
            await FallingEdge(d.clk)
            if d.rst.value == 1:
                continue
            self.take(space, tag, REQUEST.unpack(int(d.request.value)))

    def take(self, space, tag, found):
        program, request = self.programs[space], self.sent[space].pop(0)
        assert tag == request.tag
        self.taken[space].append(tag)
        self.gone += 1
        wrong = request.wrong(program.pages, program.block)
        names = [WRONG[name] for name in WRONG if CONSTANTS[name] == found["wrong"]]
        assert [CONSTANTS[name] for name in names] == ([wrong] if wrong else []), f"{vars(request)}: {names}"
        if wrong:
            return
        assert found["opcode"] == request.opcode and found["durable"] == request.durable
        if request.opcode != FLUSH:
            assert found["lba"] == request.lba and found["blocks_z"] == request.blocks - 1 and found["offset"] == (request.offset >> 2) % (1 << 28)

    async def quiet(self):
        for _ in range(20000):
            await FallingEdge(self.dut.clk)
            if not self.bar and not any(p.outstanding for p in self.programs):
                break
        else:
            raise AssertionError(f"left: {[p.outstanding for p in self.programs]}")
        await cycles(self.dut, 6)
        assert self.dut.busy.value == 0

    def any(self, reuse=0.05):
        program, tag = random.choice(self.programs), random.randrange(32)
        if tag in program.outstanding and random.random() >= reuse:
            return
        self.send(program, any_request(tag, program.pages, program.block, 40000))


@cocotb.test()
async def requests(dut):
    bench = Bench(dut)
    await bench.begin()
    for program in bench.programs:
        await bench.open(program)
    while bench.gone < 1500:
        await RisingEdge(dut.clk)
        if len(bench.bar) < 4:
            bench.any()
    await bench.quiet()
    for program in bench.programs:
        assert await bench.access(0xF7C03 + 0x40 * program.space) == program.refused % 65536 << 16
    assert sum(p.refused for p in bench.programs) > 10


@cocotb.test()
async def order(dut):
    """As many requests as there are tags wait, of every space, and leave in order; the words of spaces come mixed."""
    bench = Bench(dut, pace=0.0, takes=0.0)
    await bench.begin()
    for program in bench.programs:
        await bench.open(program)
    for lap in range(4):
        bench.takes = 0.0
        per = [[] for _ in bench.programs]
        for program in bench.programs:
            tags = random.sample(range(32), 32)
            for tag in tags + tags[:3]:
                request = Request(tag, READ, 0, random.getrandbits(48), 1)
                words = [(program.function, offset, value, None) for offset, value in request.writes()]
                per[program.space] += words[:-1] + [words[-1][:3] + ((program, request),)]
        while any(per):
            queue = random.choice([queue for queue in per if queue])
            bench.bar.append(queue.pop(0))
        while bench.bar:
            await RisingEdge(dut.clk)
        await cycles(dut, 5)
        assert int(dut.pending.value) == (1 << bench.spaces) - 1
        for program in bench.programs:
            assert await bench.access(0xF7C03 + 0x40 * program.space) == program.refused << 16 | 32 and program.refused == 3 * (lap + 1)
        bench.takes = 0.8
        await bench.quiet()


@cocotb.test()
async def whose(dut):
    """Only an enabled space's own function reaches it, and only from 800h on."""
    bench = Bench(dut)
    await bench.begin()
    for lap in range(30):
        for program in bench.programs:
            if random.random() < 0.5:
                await bench.open(program)
                program.open = True
            else:
                await bench.access(0xF7C00 + 0x40 * program.space, random.getrandbits(63))
                program.open = False
            if program.open:
                assert await bench.access(0xF7C00 + 0x40 * program.space) == 1 << 63 | program.function << 16 | program.core << 8 | program.local
            else:
                assert await bench.access(0xF7C00 + 0x40 * program.space) >> 63 == 0
            dut.bell_space.value = dut.ring_space.value = program.space
            await FallingEdge(dut.clk)
            if program.open:
                assert (int(dut.bell_core.value), int(dut.bell_local.value)) == (program.core, program.local)
                assert int(dut.ring_base.value) == program.ring >> 9 and int(dut.ring_refused.value) == 0
        for _ in range(40):
            await RisingEdge(dut.clk)
            function, offset = random.choice([random.getrandbits(8), *[p.function for p in bench.programs]]), random.getrandbits(12)
            dut.bar_function.value, dut.bar_offset.value = function, offset
            await FallingEdge(dut.clk)
            assert dut.bar_mine.value == int(offset >= 0x800 and any(p.function == function and p.open for p in bench.programs))
    # Words that are there when a space is enabled anew do not count.
    program = bench.programs[0]
    await bench.open(program)
    bench.bar.append((program.function, 0x800, 0, None))
    await cycles(dut, 8)
    await bench.open(program)
    bench.send(program, Request(1, READ, 0, 0, 1, missing=0))
    bench.takes = 0.5
    await bench.quiet()
    assert program.done == 1


@cocotb.test()
async def statistics(dut):
    bench = Bench(dut)
    await bench.begin()
    for _ in range(50):
        space, row, data = random.randrange(bench.spaces), random.randrange(32), random.getrandbits(64)

        async def answer():
            while dut.stat_valid.value == 0:
                await FallingEdge(dut.clk)
            assert int(dut.stat_at.value) == space * 32 + row
            await cycles(dut, random.randint(1, 6))
            dut.stat_done.value, dut.stat_data.value = 1, data
            await RisingEdge(dut.clk)
            dut.stat_done.value = 0

        cocotb.start_soon(answer())
        assert await bench.access(0xF7C20 + 0x40 * space + row) == data
    if bench.spaces < 16:
        assert await bench.access(0xF7C20 + 0x40 * bench.spaces) == 0


@cocotb.test()
async def resets(dut):
    bench = Bench(dut)
    await bench.begin()
    for _ in range(8):
        for program in bench.programs:
            await bench.open(program)
        for _ in range(random.randint(5, 200)):
            await RisingEdge(dut.clk)
            if len(bench.bar) < 4:
                bench.any()
        dut.rst.value = 1
        bench.bar.clear()
        for program in bench.programs:
            program.reset()
        bench.clear()
        await cycles(dut, 3)
        dut.rst.value = 0
        await cycles(dut, 2)
        assert int(dut.pending.value) == 0
    assert await bench.access(0xF7C00) >> 63 == 0
    for program in bench.programs:
        await bench.open(program)
    bench.gone = 0
    while bench.gone < 100:
        await RisingEdge(dut.clk)
        if len(bench.bar) < 4:
            bench.any()
    await bench.quiet()


def test_fp_control():
    harness.run("fp_control", sources=["one_of"], parameters={"SPACES": 3, "CORES": 2})
    harness.run("fp_control", sources=["one_of"])
    harness.run("fp_control", sources=["one_of"], parameters={"SPACES": 16, "CORES": 16})


if __name__ == "__main__":
    test_fp_control()
