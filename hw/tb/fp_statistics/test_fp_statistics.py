"""fp_statistics.sv against lists: what reads show, while requests end, and after a space was cleared."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from programs import rows
from stream import Pauses, Source, idle, start


class Bench:
    def __init__(self, dut, rate):
        self.dut, self.spaces = dut, int(dut.SPACES.value)
        idle(dut, rst=1, clear_valid=0, clear_at=0, read_valid=0, read_at=0)
        self.source = Source(dut, "in", ("space", "cycles"), Pauses(rate))
        self.sent = [[] for _ in range(self.spaces)]

    async def begin(self):
        await start(self.dut)
        for space in range(self.spaces):
            await self.clear(space)

    async def clear(self, space):
        d = self.dut
        await FallingEdge(d.clk)
        while d.still.value == 0:
            await FallingEdge(d.clk)
        for row in range(32):
            await RisingEdge(d.clk)
            d.clear_valid.value, d.clear_at.value = 1, space * 32 + row
        await RisingEdge(d.clk)
        d.clear_valid.value = 0
        self.sent[space] = []

    def send(self):
        space = random.randrange(self.spaces)
        cycles = random.getrandbits(random.randint(0, 32))
        self.sent[space].append(cycles)
        self.source.send(dict(space=space, cycles=cycles))

    async def read(self, space, row):
        d = self.dut
        await RisingEdge(d.clk)
        d.read_valid.value, d.read_at.value = 1, space * 32 + row
        for _ in range(40):
            await FallingEdge(d.clk)
            if d.read_done.value == 1:
                data = int(d.read_data.value)
                await RisingEdge(d.clk)
                d.read_valid.value = 0
                return data
        raise AssertionError("a read has no turn")

    async def check(self):
        await self.source.wait()
        await FallingEdge(self.dut.clk)
        for space in range(self.spaces):
            found = [await self.read(space, row) for row in range(32)]
            assert found == rows(self.sent[space]), f"space {space}: {found} after {self.sent[space]}"


@cocotb.test()
async def words(dut):
    bench = Bench(dut, 0.5)
    await bench.begin()
    await bench.check()
    for _ in range(12):
        for _ in range(random.randint(1, 30)):
            bench.send()
        # A read in between shows what was before or after, and takes nothing away.
        await bench.read(random.randrange(bench.spaces), random.randrange(32))
        await bench.check()
        if random.random() < 0.3:
            await bench.clear(random.randrange(bench.spaces))


@cocotb.test()
async def pace(dut):
    """One request in 6 cycles, and reads have their turn when there is a pause."""
    bench = Bench(dut, 0.0)
    await bench.begin()
    for _ in range(100):
        bench.send()
    cycles = 0
    while bench.source.words:
        await RisingEdge(dut.clk)
        cycles += 1
    assert cycles <= 610
    await bench.check()


def test_fp_statistics():
    harness.run("fp_statistics", parameters={"SPACES": 3})
    harness.run("fp_statistics")


if __name__ == "__main__":
    test_fp_statistics()
