"""counters.sv: nothing that happened is lost, also when everything happens in every cycle."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from stream import reset, start


async def read(dut, index):
    dut.read_valid.value, dut.read_index.value = 1, index
    for _ in range(16 * len(dut.count) + 2):
        await RisingEdge(dut.clk)
        await FallingEdge(dut.clk)
        if int(dut.read_done.value):
            value = int(dut.read_data.value)
            dut.read_valid.value = 0
            return value
    raise AssertionError("a read is not answered")


@cocotb.test()
async def nothing_is_lost(dut):
    n = len(dut.count)
    dut.count.value, dut.read_valid.value, dut.read_index.value, dut.rst.value = 0, 0, 0, 1
    await start(dut)
    for _ in range(4):
        dut.count.value = 0
        await reset(dut)
        sums = [0] * n
        for cycle in range(1500):
            await FallingEdge(dut.clk)
            events = random.choice([(1 << n) - 1, random.getrandbits(n), 0])
            dut.count.value = events
            for i in range(n):
                sums[i] += events >> i & 1
        await FallingEdge(dut.clk)
        dut.count.value = 0
        for _ in range(8 * n + 2):
            await RisingEdge(dut.clk)
        for i in random.sample(range(n), n):
            assert await read(dut, i) == sums[i]


def test_counters():
    harness.run("counters", parameters={"N": 4})
    harness.run("counters", parameters={"N": 2})


if __name__ == "__main__":
    test_counters()
