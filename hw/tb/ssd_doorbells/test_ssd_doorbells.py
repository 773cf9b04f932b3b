"""ssd_doorbells.sv: every move of a tail is told in the end, one write for all that came while it waited, heads when they are due."""

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge, Timer

import harness
from stream import Monitor, Pauses, cycles, start


class World:
    def __init__(self, dut, rest):
        self.dut, self.ssds = dut, int(os.environ["TEST_SSDS"])
        self.places = 64 // self.ssds
        self.width = max((self.places - 1).bit_length(), 1)
        for name in ("ssd_write", "tail_moved", "tail", "cq_due", "cq_head"):
            getattr(dut, name).value = 0
        self.tail, self.head, self.told = [0] * self.ssds, [0] * self.ssds, [0] * self.ssds
        self.told_heads = [None] * self.ssds
        self.due, self.moves, self.rings, self.heads = 0, 0, 0, 0
        self.bells = Monitor(dut, "sdb", ("ssd", "cq", "value"), Pauses(rest), on_word=self.on_bell)
        dut.rst.value = 1

    def on_bell(self, word):
        self.rings += 1
        disk = word["ssd"]
        if word["cq"]:
            assert word["value"] == self.told_heads[disk], "another head than was told"
            return
        ahead = (self.tail[disk] - self.told[disk]) % self.places
        assert 0 < (word["value"] - self.told[disk]) % self.places <= ahead, "a tail that is not ahead of the last"
        self.told[disk] = word["value"]

    async def drive(self, count, rate):
        dut = self.dut
        for _ in range(count):
            await FallingEdge(dut.clk)
            told = int(dut.cq_told.value)
            for disk in range(self.ssds):
                if told >> disk & 1:
                    assert self.due >> disk & 1
                    self.due ^= 1 << disk
                    self.told_heads[disk] = self.head[disk]
                    self.heads += 1
            await RisingEdge(dut.clk)
            packed = lambda values: sum(value << disk * self.width for disk, value in enumerate(values))
            # The new tail stands from the cycle after the pulse on.
            dut.tail.value = packed(self.tail)
            moved = 0
            for disk in range(self.ssds):
                if random.random() < rate and (self.tail[disk] + 1 - self.told[disk]) % self.places:
                    moved |= 1 << disk
                    self.tail[disk] = (self.tail[disk] + 1) % self.places
                    self.moves += 1
                if rate and random.random() < 0.02 and not self.due >> disk & 1:
                    self.due |= 1 << disk
                    self.head[disk] = random.randrange(self.places)
            dut.tail_moved.value, dut.cq_due.value, dut.cq_head.value = moved, self.due, packed(self.head)


@cocotb.test(timeout_time=1, timeout_unit="ms")
@cocotb.parametrize(rest=[0.0, 0.7])
async def told(dut, rest):
    world = World(dut, rest)
    await Timer(1, "ns")
    await start(dut)
    await world.drive(3000, 0.2)
    await world.drive(200, 0.0)
    assert world.told == world.tail, "a tail was never told"
    assert world.heads > 5
    assert dut.busy.value == 0
    if rest:
        assert world.rings < world.moves, "nothing was told together"


def test_ssd_doorbells():
    for ssds in (1, 4)[: 1 if os.environ.get("MILLRACE_QUICK") == "1" else None]:
        os.environ["TEST_SSDS"] = str(ssds)
        harness.run("ssd_doorbells", parameters={"SSDS": ssds})


if __name__ == "__main__":
    test_ssd_doorbells()
