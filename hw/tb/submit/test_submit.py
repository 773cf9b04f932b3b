"""submit.sv: rings filled in order and never beyond the disk's head, legs told first, ends, disks that are not enabled."""

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge, Timer

import harness
from stream import Monitor, Pauses, start
from words import CONSTANTS, LAYOUTS

PASSED = LAYOUTS["passed_t"]


class World:
    def __init__(self, dut, pace):
        self.dut, self.ssds, self.pace = dut, int(os.environ["TEST_SSDS"]), pace
        self.places = 64 // self.ssds
        self.width = max((self.places - 1).bit_length(), 1)
        self.all = (1 << self.ssds) - 1
        for name in ("p_valid", "p", "ssd_write", "ssd_enabled", "wait_all", "head_valid", "head"):
            getattr(dut, name).value = 0
        self.end = Monitor(dut, "end", ("slot", "status"), Pauses(pace), on_word=self.on_end)
        self.enabled = self.all
        self.reads = 0.005 * self.ssds if pace == 0 else 0.1  # how often a disk tells how far it has read
        self.fresh()
        dut.rst.value = 1

    def fresh(self):
        self.now = None                        # the command that is offered
        self.left, self.legs = 0, False
        self.tail, self.head = [0] * self.ssds, [0] * self.ssds
        self.entries = [[] for _ in range(self.ssds)]
        self.gone = self.full = 0

    async def begin(self):
        await Timer(1, "ns")
        await start(self.dut)
        self.dut.ssd_enabled.value = self.enabled
        cocotb.start_soon(self.watch())

    def on_end(self, word):
        assert word["slot"] == self.now["slot"] and not self.legs
        if self.now["ended"]:
            assert word["status"] == self.now["status"]
        else:
            assert not self.now["ssds"] & self.enabled and word["status"] == CONSTANTS["ST_INTERNAL_ERROR"]

    async def watch(self):
        """Checks what happens in a cycle, and lets disks read on."""
        dut = self.dut
        while True:
            await FallingEdge(dut.clk)
            if dut.rst.value == 1:
                continue
            if dut.leg_valid.value == 1:
                assert not self.legs and not self.now["ended"] and dut.wait_all.value == 0
                self.left, self.legs = self.now["ssds"] & self.enabled, True
                assert int(dut.leg_count.value) == self.left.bit_count() > 0
                assert int(dut.leg_slot.value) == self.now["slot"]
            elif dut.ring_en.value == 1:
                assert self.legs
                at = int(dut.ring_index.value)
                disk, place = divmod(at, self.places)
                assert self.left >> disk & 1 and place == self.tail[disk] and int(dut.ring_slot.value) == self.now["slot"]
                assert int(dut.tail_moved.value) == 1 << disk
                self.left ^= 1 << disk
                self.tail[disk] = (place + 1) % self.places
                assert self.tail[disk] != self.head[disk], f"disk {disk}: the ring is overrun"
                self.full += (self.tail[disk] + 1) % self.places == self.head[disk]
            moved = 0
            disk = random.randrange(self.ssds)
            if random.random() < self.reads and self.head[disk] != self.tail[disk]:
                self.head[disk] = (self.head[disk] + random.randint(1, (self.tail[disk] - self.head[disk]) % self.places)) % self.places
                moved = 1 << disk
            await RisingEdge(dut.clk)
            # Sampled at the next edge; until then the module knows of less than the disk has read.
            dut.head_valid.value, dut.head.value = moved, self.head[disk] if moved else random.randrange(self.places)
            dut.wait_all.value = int(self.pace > 0 and random.random() < 0.1 and not (dut.p_valid.value == 1))

    async def send(self, **command):
        dut = self.dut
        self.now = dict(slot=random.getrandbits(6), ssds=random.randrange(1, self.all + 1), ended=0, status=0) | command
        self.legs = False
        dut.p.value = PASSED.pack(**self.now)
        dut.p_valid.value = 1
        for _ in range(3000):
            await FallingEdge(dut.clk)
            if dut.p_ready.value == 1:
                break
        else:
            raise AssertionError(f"{self.now} is never taken")
        ends = self.now["ended"] or not self.now["ssds"] & self.enabled
        await Timer(1, "ns")
        assert ends or (self.legs and not self.left), "taken before all disks have it"
        await RisingEdge(dut.clk)
        dut.p_valid.value = 0
        dut.p.value = random.getrandbits(len(dut.p))
        self.gone += 1
        while random.random() < self.pace:
            await RisingEdge(dut.clk)


@cocotb.test(timeout_time=2, timeout_unit="ms")
@cocotb.parametrize(pace=[0.0, 0.5])
async def rings(dut, pace):
    world = World(dut, pace)
    await world.begin()
    for _ in range(800):
        if random.random() < 0.15:
            await world.send(ended=1, status=random.getrandbits(15))
        else:
            await world.send()
    assert world.full > 3 or pace, "no ring was ever full"


@cocotb.test(timeout_time=1, timeout_unit="ms")
async def disks_come_and_go(dut):
    world = World(dut, 0.3)
    await world.begin()
    for _ in range(20):
        for disk in range(world.ssds):
            if random.random() < 0.5:
                await FallingEdge(dut.clk)
                await RisingEdge(dut.clk)
                world.enabled ^= 1 << disk
                dut.ssd_write.value = 1 << disk
                world.tail[disk] = world.head[disk] = 0
                dut.head_valid.value = 0
                await RisingEdge(dut.clk)
                dut.ssd_write.value = 0
                dut.ssd_enabled.value = world.enabled
                world.tail[disk] = world.head[disk] = 0
        for _ in range(20):
            await world.send()


def test_submit():
    for ssds in (1, 4, 3)[: 1 if os.environ.get("MILLRACE_QUICK") == "1" else None]:
        os.environ["TEST_SSDS"] = str(ssds)
        harness.run("submit", parameters={"SSDS": ssds})


if __name__ == "__main__":
    test_submit()
