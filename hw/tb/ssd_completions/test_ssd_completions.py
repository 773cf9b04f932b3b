"""ssd_completions.sv: every entry once and in its disk's order, many times around; heads told; queues that start anew; CIDs that are no slots."""

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge, Timer

import harness
from stream import Monitor, Pauses, Source, cycles, start

# Of a status: there is more in the log of who gives it.
MORE = 1 << 13


class World:
    def __init__(self, dut, pace):
        self.dut, self.ssds, self.pace = dut, int(os.environ["TEST_SSDS"]), pace
        self.places = 64 // self.ssds
        dut.ssd_write.value = dut.ssd_enabled.value = dut.cq_told.value = 0
        self.writes = Source(dut, "sdw", ("addr", "data"), Pauses(pace))
        self.done = Monitor(dut, "done", ("slot", "status"), Pauses(pace), on_word=self.on_done)
        self.fresh()
        self.count = 0
        dut.rst.value = 1

    def fresh(self):
        self.tail, self.laps, self.told = ([0] * self.ssds for _ in range(3))
        self.expected = [[] for _ in range(self.ssds)]
        self.heads = [[] for _ in range(self.ssds)]
        self.taken = [0] * self.ssds

    async def begin(self):
        await Timer(1, "ns")
        await start(self.dut)
        await self.enable((1 << self.ssds) - 1)
        cocotb.start_soon(self.watch())

    async def enable(self, disks):
        self.dut.ssd_write.value = disks
        await RisingEdge(self.dut.clk)
        self.dut.ssd_write.value = 0
        self.dut.ssd_enabled.value = (1 << self.ssds) - 1

    async def watch(self):
        dut = self.dut
        while True:
            await FallingEdge(dut.clk)
            if dut.rst.value == 1:
                continue
            for disk in range(self.ssds):
                if int(dut.head_valid.value) >> disk & 1:
                    assert int(dut.head.value) == self.heads[disk].pop(0), "the SQ head is another entry's"
                    self.taken[disk] += 1
            due = int(dut.cq_due.value)
            told = due & random.getrandbits(self.ssds) if random.random() < 0.3 else 0
            dut.cq_told.value = told
            for disk in range(self.ssds):
                width = max((self.places - 1).bit_length(), 1)
                head = int(dut.cq_head.value) >> disk * width & (1 << width) - 1
                if told >> disk & 1:
                    # It is sampled at the next edge with what stands there now.
                    self.told[disk] = head
            await RisingEdge(dut.clk)
            dut.cq_told.value = 0

    def room(self, disk):
        return (self.tail[disk] + 1) % self.places != self.told[disk]

    def write(self, disk):
        slot, status, head = random.getrandbits(6), random.getrandbits(15), random.randrange(self.places)
        stranger = random.random() < 0.05
        cid = slot | random.randrange(1, 1 << 10) << 6 if stranger else slot
        last = head | random.getrandbits(16) << 16 | cid << 32 | (1 - self.laps[disk] % 2) << 48 | status << 49
        self.writes.send(dict(addr=0x2000 + (disk * self.places + self.tail[disk]) * 16, data=random.getrandbits(64) | last << 64))
        self.tail[disk] = (self.tail[disk] + 1) % self.places
        self.laps[disk] += self.tail[disk] == 0
        self.heads[disk].append(head)
        if not stranger:
            self.expected[disk].append(dict(slot=slot, status=status & ~MORE))

    def on_done(self, word):
        for entries in self.expected:
            if entries and entries[0] == word:
                entries.pop(0)
                self.count += 1
                return
        raise AssertionError(f"{word} is nobody's next entry")

    async def drive(self, count):
        while count:
            await RisingEdge(self.dut.clk)
            disk = random.randrange(self.ssds)
            if self.room(disk) and len(self.writes.words) < 4:
                self.write(disk)
                count -= 1

    async def settle(self):
        for _ in range(2000):
            if not any(self.expected) and not self.writes.words and not any(self.heads):
                return
            await RisingEdge(self.dut.clk)
        raise AssertionError(f"never seen: {self.expected}")


@cocotb.test(timeout_time=1, timeout_unit="ms")
@cocotb.parametrize(pace=[0.0, 0.5])
async def around(dut, pace):
    world = World(dut, pace)
    await world.begin()
    await world.drive(1000)
    await world.settle()
    assert world.count > 900


@cocotb.test(timeout_time=1, timeout_unit="ms")
async def starts_anew(dut):
    """A disk's queue starts anew in the middle of others' work; nothing of what lay there before is taken for new."""
    world = World(dut, 0.2)
    await world.begin()
    for _ in range(10):
        await world.drive(random.randrange(1, 150))
        await world.settle()
        disk = random.randrange(world.ssds)
        await world.enable(1 << disk)
        world.tail[disk] = world.laps[disk] = world.told[disk] = 0
        await cycles(dut, random.randrange(0, 80))
        assert dut.done_valid.value == 0, "an old entry was taken for a new one"
    dut.rst.value = 1
    world.writes.clear()
    await cycles(dut, 3)
    world.fresh()
    dut.rst.value = 0
    await world.drive(300)
    await world.settle()


def test_ssd_completions():
    for ssds in (1, 4, 3)[: 1 if os.environ.get("MILLRACE_QUICK") == "1" else None]:
        os.environ["TEST_SSDS"] = str(ssds)
        harness.run("ssd_completions", parameters={"SSDS": ssds})


if __name__ == "__main__":
    test_ssd_completions()
