"""arbiter.sv against the sentence that defines it: the first that asks, counted from behind the last one taken."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from stream import start


@cocotb.test()
async def in_turn(dut):
    n = len(dut.request)
    dut.request.value, dut.take.value, dut.rst.value = 0, 0, 1
    await start(dut)
    last, taken = n - 1, [0] * n
    for cycle in range(4000):
        if cycle == 2000:
            dut.rst.value = 1
            await RisingEdge(dut.clk)
            dut.rst.value = 0
            last = n - 1
        asks = random.choice([0, random.getrandbits(n), random.getrandbits(n), (1 << n) - 1, 1 << random.randrange(n)])
        takes = random.randrange(2)
        dut.request.value, dut.take.value = asks, takes
        await FallingEdge(dut.clk)
        order = [(last + 1 + i) % n for i in range(n)]
        wanted = next((i for i in order if asks >> i & 1), None)
        assert int(dut.any.value) == (wanted is not None)
        assert int(dut.grant.value) == (0 if wanted is None else 1 << wanted), f"asks {asks:b}, last {last}"
        assert wanted is None or int(dut.index.value) == wanted
        if wanted is not None and takes:
            last = wanted
            taken[wanted] += 1
        await RisingEdge(dut.clk)
    assert min(taken) > 0


@cocotb.test()
async def fair(dut):
    """All ask all the time: everyone gets the same, in any window."""
    n = len(dut.request)
    dut.request.value, dut.take.value, dut.rst.value = (1 << n) - 1, 1, 1
    await start(dut)
    taken = [0] * n
    for _ in range(20 * n):
        await FallingEdge(dut.clk)
        taken[int(dut.grant.value).bit_length() - 1] += 1
    assert max(taken) - min(taken) <= 1, taken


def test_arbiter():
    for n in (1, 2, 5, 16):
        harness.run("arbiter", parameters={"N": n})


if __name__ == "__main__":
    test_arbiter()
