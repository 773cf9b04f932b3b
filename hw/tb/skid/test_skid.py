"""skid.sv against a list: order under pauses on both sides, a word a cycle, reset with words inside."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge

import harness
from stream import Monitor, Pauses, Source, cycles, reset, start


async def begin(dut, come=0.0, go=0.0):
    source = Source(dut, "in", pauses=Pauses(come))
    sink = Monitor(dut, "out", pauses=Pauses(go, longest=3))
    dut.rst.value = 1
    await start(dut)
    return source, sink


@cocotb.test()
@cocotb.parametrize(come=[0.0, 0.5], go=[0.0, 0.5])
async def order(dut, come, go):
    source, sink = await begin(dut, come, go)
    sent = [random.getrandbits(len(dut.in_data)) for _ in range(1000)]
    for word in sent:
        source.send(word)
    assert await sink.get(len(sent)) == sent


@cocotb.test()
async def full_speed(dut):
    source, sink = await begin(dut)
    for _ in range(100):
        source.send(1)
    await sink.get(10)
    await cycles(dut, 50)
    assert 49 <= len(sink.words) <= 51, "a word a cycle"


@cocotb.test()
async def reset_with_words_inside(dut):
    source, sink = await begin(dut, 0.1, 0.6)
    for _ in range(20):
        for _ in range(30):
            source.send(0)
        await cycles(dut, random.randrange(1, 20))
        source.clear()
        await reset(dut, 1)
        sink.words.clear()
        await FallingEdge(dut.clk)
        assert dut.out_valid.value == 0 and dut.in_ready.value == 1


def test_skid():
    harness.run("skid", parameters={"WIDTH": 40})


if __name__ == "__main__":
    test_skid()
