"""fifo.sv against a list: order, fill level, both ends full speed, reset with words inside."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from stream import Monitor, Pauses, Source, cycles, reset, start


class Level:
    """Follows `count` beside the words that pass."""

    def __init__(self, dut):
        self.dut, self.level, self.highest = dut, 0, 0
        cocotb.start_soon(self._run())

    async def _run(self):
        dut = self.dut
        while True:
            await FallingEdge(dut.clk)
            if dut.rst.value == 1:
                self.level = 0
                await RisingEdge(dut.clk)
                continue
            assert int(dut.count.value) == self.level
            self.highest = max(self.highest, self.level)
            self.level += int(dut.in_valid.value & dut.in_ready.value) - int(dut.out_valid.value & dut.out_ready.value)


async def begin(dut, come=0.0, go=0.0):
    source = Source(dut, "in", pauses=Pauses(come))
    sink = Monitor(dut, "out", pauses=Pauses(go))
    dut.rst.value = 1
    await start(dut)
    return source, sink, Level(dut)


def words(dut, count):
    return [random.getrandbits(len(dut.in_data)) for _ in range(count)]


@cocotb.test()
@cocotb.parametrize(come=[0.0, 0.3, 0.8], go=[0.0, 0.3, 0.8])
async def order(dut, come, go):
    source, sink, level = await begin(dut, come, go)
    sent = words(dut, 500)
    for word in sent:
        source.send(word)
    assert await sink.get(len(sent)) == sent
    if go > come:
        assert level.highest == 1 << (len(dut.count) - 1), "never full"


@cocotb.test()
async def full_speed(dut):
    source, sink, _ = await begin(dut)
    for word in words(dut, 100):
        source.send(word)
    await sink.get(10)
    await cycles(dut, 50)
    assert 49 <= len(sink.words) <= 51, "a word a cycle"


@cocotb.test()
async def reset_with_words_inside(dut):
    source, sink, _ = await begin(dut, 0.2, 0.7)
    for _ in range(20):
        for word in words(dut, 60):
            source.send(word)
        await cycles(dut, random.randrange(1, 60))
        source.clear()
        await reset(dut, 1)
        sink.words.clear()
        await FallingEdge(dut.clk)
        assert dut.out_valid.value == 0 and dut.in_ready.value == 1
        sent = words(dut, 30)
        for word in sent:
            source.send(word)
        assert await sink.get(len(sent)) == sent


def test_fifo():
    harness.run("fifo", parameters={"WIDTH": 8, "DEPTH": 16})
    harness.run("fifo", parameters={"WIDTH": 33, "DEPTH": 2})


if __name__ == "__main__":
    test_fifo()
