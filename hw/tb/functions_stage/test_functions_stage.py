"""functions.sv with a chain whose verdicts are simple (fn_chain.sv here): order, holds, states, refusals.

Every command must leave once, with what its function's state says; those of a function in the order in which they came, and at its pace;
those of a function that has no limit never wait for another one's.
"""

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge, Timer

import harness
from stream import Monitor, Pauses, Source, cycles, reset, start
from words import CONSTANTS, LAYOUTS

PASSED = LAYOUTS["passed_t"]
UNIT = 16  # cycles of a unit of time here
LF = 4


class World:
    def __init__(self, dut, pace):
        self.dut, self.pace = dut, pace
        for name in ("cfg_wr_en", "cfg_wr_addr", "cfg_wr_data", "info_en", "now"):
            getattr(dut, name).value = 0
        for name in ("slot", "slba", "nsid", "nlb_z", "opcode"):
            getattr(dut, f"info_{name}").value = 0
        dut.p_valid.value, dut.p.value = 0, 0
        self.out_pauses = Pauses(pace)
        self.word = Monitor(dut, "f", ("addr", "data"), Pauses(pace), on_word=self.on_word)
        self.free = list(range(64))
        self.inside = {}
        self.order = [[] for _ in range(LF)]     # slots that are to pass, as they came
        self.passed = [0] * LF                   # since the state was wiped
        self.last = [None] * LF
        self.gap, self.share, self.disks, self.scale, self.status = ([0] * LF for _ in range(5))
        self.cycle = self.now = 0
        self.start = random.choice([0, 0xFFFFF, 0xFFFFFFF0])
        self.gone = 0
        self.slowest = 0
        dut.o_ready.value = 0
        dut.rst.value = 1

    async def begin(self):
        await Timer(1, "ns")
        await start(self.dut)
        cocotb.start_soon(self.tick())
        cocotb.start_soon(self.watch())

    async def tick(self):
        while True:
            await RisingEdge(self.dut.clk)
            self.cycle += 1
            self.now = (self.start + self.cycle // UNIT) & 0xFFFFFFFF
            self.dut.now.value = self.now
            self.dut.o_ready.value = int(not self.out_pauses.rests())

    async def watch(self):
        offered = None
        while True:
            await FallingEdge(self.dut.clk)
            if self.dut.rst.value == 1 or self.dut.o_valid.value != 1:
                assert offered is None or self.dut.rst.value == 1, "o_valid went away"
                offered = None
                continue
            word = int(self.dut.o.value)
            assert offered in (None, word), "o changed"
            offered = word
            if self.dut.o_ready.value == 1:
                offered = None
                self.on_out(PASSED.unpack(word))

    async def configure(self, lf, *, gap=0, status=0):
        """Everything anew; the function's commands must have left."""
        self.gap[lf], self.status[lf] = gap, status
        self.share[lf], self.disks[lf], self.scale[lf] = random.getrandbits(40), random.randrange(1, 16), random.randrange(256)
        for word, value in ((4, status), (3, gap), (2, self.share[lf]), (1, self.scale[lf]), (0, self.disks[lf] << 48)):
            await self.write(lf, word, value)
        self.passed[lf], self.last[lf] = 0, None

    async def write(self, lf, word, value):
        dut = self.dut
        dut.cfg_wr_en.value, dut.cfg_wr_addr.value, dut.cfg_wr_data.value = 1, lf * 16 + word, value
        await FallingEdge(dut.clk)
        while dut.cfg_wr_ready.value != 1:
            await FallingEdge(dut.clk)
        await RisingEdge(dut.clk)
        dut.cfg_wr_en.value = 0

    async def send(self, lf, ended=False, late=False):
        dut = self.dut
        began = self.cycle
        while not self.free:
            await RisingEdge(dut.clk)
            assert self.cycle < began + 20000, "nothing leaves any more"
        slot = self.free.pop(random.randrange(len(self.free)))
        slba, opcode, nlb_z = random.getrandbits(48), random.choice([0, 1, 2, 5, 8]), random.getrandbits(16)
        status = random.randrange(1, 1 << 15) if ended or late else 0
        info = dict(slba=slba, nsid=random.getrandbits(32), nlb_z=nlb_z, opcode=opcode, slot=slot)
        for name, value in info.items():
            getattr(dut, f"info_{name}").value = value
        dut.info_en.value = 1
        await RisingEdge(dut.clk)
        dut.info_en.value = 0
        dut.info_slba.value = random.getrandbits(64)
        self.inside[slot] = dict(lf=lf, slba=slba, ended=ended, late=late, status=status, came=self.cycle, word=None)
        if not ended and not late and not self.status[lf]:
            self.order[lf].append(slot)
        dut.p.value = PASSED.pack(slot=slot, queue=lf << 2 | random.getrandbits(2), ended=ended, late=late, status=status)
        dut.p_valid.value = 1
        await FallingEdge(dut.clk)
        while dut.p_ready.value != 1:
            await FallingEdge(dut.clk)
            assert self.cycle < began + 20000, f"slot {slot} is not taken"
        await RisingEdge(dut.clk)
        dut.p_valid.value = 0
        dut.p.value = random.getrandbits(len(dut.p))
        while random.random() < self.pace:
            await RisingEdge(dut.clk)

    def on_word(self, word):
        slot = word["addr"] >> 2
        assert word["addr"] & 3 == 2
        command = self.inside[slot]
        lf = command["lf"]
        assert not command["ended"] and not command["late"] and command["word"] is None
        assert self.order[lf][0] == slot, f"function {lf}: slot {slot} passed before {self.order[lf][0]}"
        self.order[lf].pop(0)
        expected = command["slba"] + self.share[lf] + self.passed[lf] * self.scale[lf]
        assert word["data"] == expected & (1 << 64) - 1, f"{word['data']:#x} is not {expected:#x}: a state was lost"
        self.passed[lf] += 1
        if self.gap[lf]:
            # What passes was asked a few cycles ago.
            if self.last[lf] is not None:
                since = (self.now - self.last[lf]) & 0xFFFFFFFF
                assert since + 2 >= self.gap[lf], f"function {lf}: {since} units after the last, {self.gap[lf]} are due"
            self.last[lf] = self.now
        command["word"] = word["data"]

    def on_out(self, out):
        command = self.inside.pop(out["slot"])
        lf = command["lf"]
        assert out["queue"] >> 2 == lf and not out["late"]
        if command["ended"]:
            assert out["ended"] and out["status"] == command["status"]
        elif self.status[lf]:
            assert out["ended"] and out["status"] == self.status[lf]
        elif command["late"]:
            assert out["ended"] and out["status"] == command["status"]
        else:
            assert not out["ended"] and out["ssds"] == self.disks[lf], out
            assert command["word"] is not None, "it left before its word was written"
            if not self.gap[lf]:
                self.slowest = max(self.slowest, self.cycle - command["came"])
        self.gone += 1
        self.free.append(out["slot"])

    async def settle(self):
        began = self.cycle
        while self.inside:
            await RisingEdge(self.dut.clk)
            assert self.cycle < began + 40000, f"never left: {self.inside}"


@cocotb.test()
@cocotb.parametrize(pace=[0.0, 0.5])
async def mixed(dut, pace):
    """Functions with and without limits, and one that is refused everything; configurations change between."""
    world = World(dut, pace)
    await world.begin()
    for _ in range(3):
        for lf in range(LF):
            await world.configure(lf, gap=random.choice([0, 0, 1, 3, 6]), status=random.choice([0, 0, 0, 0x4123]))
        for _ in range(150):
            kind = random.random()
            await world.send(random.randrange(LF), ended=kind < 0.1, late=0.1 <= kind < 0.2)
        await world.settle()
    assert world.gone == 450


@cocotb.test()
async def nobody_waits_for_others(dut):
    """One function is held for long; the others' commands pass as if it were not there."""
    world = World(dut, 0.0)
    await world.begin()
    await world.configure(0, gap=40)
    world.scale[0] = 0            # which of them pass before and after the state is wiped is not known
    await world.write(0, 1, 0)
    for lf in range(1, LF):
        await world.configure(lf)
    for _ in range(30):
        await world.send(0)
    for _ in range(200):
        await world.send(random.randrange(1, LF))
    assert len([command for command in world.inside.values() if command["lf"] == 0]) > 20, "they should still be held"
    # A turn of the ring, once a unit of time, is all that may come between.
    assert world.slowest <= 64, f"one took {world.slowest} cycles"
    began = world.cycle
    world.gap[0] = 0              # no limit any more, and the state wiped: those that wait are asked at once
    await world.write(0, 3, 0)
    await world.write(0, 0, world.disks[0] << 48)
    await world.settle()
    assert world.cycle - began < 30 * 12 + 3 * UNIT


@cocotb.test()
async def what_was_used_is_kept(dut):
    """Word 0 with its function on (bit 40) changes what it says and leaves the state; with the function off the state is new."""
    world = World(dut, 0.3)
    await world.begin()
    for lf in range(LF):
        await world.configure(lf, gap=random.choice([0, 2]))
        world.scale[lf] |= 1      # a state that begins anew is seen
        await world.write(lf, 1, world.scale[lf])
    for _ in range(4):
        for _ in range(40):
            await world.send(random.randrange(LF))
        await world.settle()
        for lf in range(LF):
            world.disks[lf] = random.randrange(1, 16)
            await world.write(lf, 0, 1 << 40 | world.disks[lf] << 48)
    for lf in range(LF):
        await world.write(lf, 0, world.disks[lf] << 48)
        world.passed[lf], world.last[lf] = 0, None
    for _ in range(40):
        await world.send(random.randrange(LF))
    await world.settle()


@cocotb.test()
async def full_speed(dut):
    """The stand-in's 3 cycles and one more, of one function."""
    world = World(dut, 0.0)
    await world.begin()
    await world.configure(0)
    world.on_out = lambda out: None
    world.word.on_word = None
    dut.p.value = PASSED.pack(slot=0, queue=0)
    dut.p_valid.value = 1
    taken = []
    for _ in range(400):
        await FallingEdge(dut.clk)
        taken.append(int(dut.p_ready.value))
    assert sum(taken[100:300]) == 50, f"{sum(taken[100:300])} in 200 cycles"


@cocotb.test()
async def reset_in_flight(dut):
    """After a reset nobody is held and every state is zero."""
    world = World(dut, 0.2)
    await world.begin()
    for round in range(4):
        for lf in range(LF):
            await world.configure(lf, gap=random.choice([0, 4]))
        sender = cocotb.start_soon(many(world))
        await cycles(dut, random.randrange(100, 400))
        sender.cancel()
        dut.p_valid.value = 0
        dut.info_en.value = 0
        dut.rst.value = 1
        await cycles(dut, 2)
        world.inside.clear()
        world.free = list(range(64))
        world.order = [[] for _ in range(LF)]
        world.passed, world.last = [0] * LF, [None] * LF
        dut.rst.value = 0
        await cycles(dut, 3)
        assert dut.o_valid.value == 0
        for _ in range(60):
            await world.send(random.randrange(LF))
        await world.settle()


async def many(world):
    while True:
        await world.send(random.randrange(LF))


def test_functions_stage():
    harness.run("functions", sources=["tb/functions_stage/fn_chain.sv"], parameters={"LF": LF, "SSDS": 4})


if __name__ == "__main__":
    test_functions_stage()
