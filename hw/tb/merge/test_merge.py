"""merge.sv: every word arrives once, with where it came from, in its input's order; nobody waits longer than a round; full speed."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb

import harness
from lanes import Sinks, Sources
from stream import cycles, reset, start


async def begin(dut, come=0.0, go=0.0):
    n = len(dut.in_valid)
    width = len(dut.out_data)
    out = Sinks(dut, "out", {"data": width, "from": len(dut.out_from)}, 1, go)
    sources = Sources(dut, "in", {"data": width}, n, come)
    dut.rst.value = 1
    await start(dut)
    return n, width, sources, out


def fill(sources, n, width, count):
    sent = [[random.getrandbits(width) for _ in range(count)] for _ in range(n)]
    for lane, words in enumerate(sent):
        for word in words:
            sources.send(lane, {"data": word})
    return sent


def split(n, words):
    came = [[] for _ in range(n)]
    for word in words:
        came[word["from"]].append(word["data"])
    return came


@cocotb.test()
@cocotb.parametrize(come=[0.0, 0.5], go=[0.0, 0.5])
async def order(dut, come, go):
    n, width, sources, out = await begin(dut, come, go)
    sent = fill(sources, n, width, 200)
    await sources.drained()
    await cycles(dut, 30)
    assert split(n, out.words[0]) == sent
    if come == 0:  # all offer all the time: turns
        assert all(len({word["from"] for word in out.words[0][i : i + n]}) == n for i in range(0, 100 * n, n))


@cocotb.test()
async def full_speed(dut):
    n, width, sources, out = await begin(dut)
    fill(sources, n, width, 100)
    await cycles(dut, 60)
    assert len(out.words[0]) >= 56


@cocotb.test()
async def reset_in_flight(dut):
    n, width, sources, out = await begin(dut, 0.2, 0.6)
    for _ in range(20):
        fill(sources, n, width, 20)
        await cycles(dut, random.randrange(1, 40))
        sources.clear()
        await reset(dut, 1)
        out.words[0].clear()
        sent = fill(sources, n, width, 5)
        await sources.drained()
        await cycles(dut, 30)
        assert split(n, out.words[0]) == sent


def test_merge():
    for n in (1, 3, 16):
        harness.run("merge", sources=["arbiter"], parameters={"N": n, "WIDTH": 23})


if __name__ == "__main__":
    test_merge()
