"""ssd_memory.sv against a copy: three writers at once with their right of way, rings, reads in order with a beat a cycle."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge, Timer

import harness
from stream import Monitor, Pauses, Source, cycles, start


class World:
    def __init__(self, dut, pace):
        self.dut, self.pace = dut, pace
        for name in ("t_low_en", "t_high_en", "ring_en", "t_low_addr", "t_high_addr", "t_low_data", "t_high_data", "ring_index", "ring_slot"):
            getattr(dut, name).value = 0
        self.words = [[0, 0] for _ in range(512)]
        self.ring = [None] * 64
        self.functions = Source(dut, "f", ("addr", "data"), Pauses(pace))
        self.lists = Source(dut, "l", ("high", "addr", "data"), Pauses(pace))
        self.reads = Source(dut, "sdr", ("addr", "beats", "tag"), Pauses(pace))
        self.got = Monitor(dut, "sdd", ("tag", "data", "last"), Pauses(pace))
        dut.rst.value = 1

    async def begin(self):
        await Timer(1, "ns")
        await start(self.dut)

    async def write(self, count):
        """Random writes by all three; no two of one time to the same word."""
        dut = self.dut
        rows = random.sample(range(512), count)
        for row in rows:
            half, data = random.getrandbits(1), random.getrandbits(64)
            self.words[row][half] = data
            if row >= 256 or random.random() < 0.3:
                self.lists.send(dict(high=half, addr=row, data=data))
            elif half and random.random() < 0.5:
                self.functions.send(dict(addr=row, data=data))
            else:
                name = "high" if half else "low"
                getattr(dut, f"t_{name}_en").value = 1
                getattr(dut, f"t_{name}_addr").value, getattr(dut, f"t_{name}_data").value = row, data
                await RisingEdge(dut.clk)
                getattr(dut, f"t_{name}_en").value = 0
        for _ in range(10000):
            if not self.functions.words and not self.lists.words:
                return
            await RisingEdge(dut.clk)
        raise AssertionError("a write never got its turn")

    async def fill_rings(self):
        for index in random.sample(range(64), 64):
            self.ring[index] = random.getrandbits(6)
            self.dut.ring_en.value, self.dut.ring_index.value, self.dut.ring_slot.value = 1, index, self.ring[index]
            await RisingEdge(self.dut.clk)
        self.dut.ring_en.value = 0
        await RisingEdge(self.dut.clk)

    async def read(self, count):
        expected = []
        for _ in range(count):
            beats, tag = random.randint(1, 16), random.getrandbits(8)
            beat = random.choice([random.randrange(0, 256 - beats), random.randrange(256, 512 - beats)])
            self.reads.send(dict(addr=beat * 16 + 0, beats=beats, tag=tag))
            for at in range(beat, beat + beats):
                row = at if at >= 256 else self.ring[at >> 2] << 2 | at & 3
                low, high = self.words[row]
                expected.append(dict(tag=tag, data=low | high << 64, last=int(at == beat + beats - 1)))
        assert await self.got.get(len(expected)) == expected
        return len(expected)


@cocotb.test(timeout_time=2, timeout_unit="ms")
@cocotb.parametrize(pace=[0.0, 0.4])
async def copy(dut, pace):
    world = World(dut, pace)
    await world.begin()
    # Nothing is known of what lay there before but that it was zero at the start: write all once.
    for row in range(512):
        for half in (0, 1):
            world.words[row][half] = data = random.getrandbits(64)
            world.lists.send(dict(high=half, addr=row, data=data))
    await world.lists.wait()
    for _ in range(8):
        await world.write(random.randrange(1, 300))
        await world.fill_rings()
        await world.read(40)


@cocotb.test(timeout_time=1, timeout_unit="ms")
async def beat_a_cycle(dut):
    world = World(dut, 0.0)
    await world.begin()
    await world.fill_rings()
    for _ in range(20):
        world.reads.send(dict(addr=0x1000, beats=16, tag=1))
    await cycles(dut, 330)
    assert len(world.got.words) == 320, f"{len(world.got.words)} beats in 330 cycles"


@cocotb.test(timeout_time=1, timeout_unit="ms")
async def reset_in_a_read(dut):
    world = World(dut, 0.3)
    await world.begin()
    await world.fill_rings()
    for _ in range(10):
        world.reads.send(dict(addr=0, beats=16, tag=random.getrandbits(8)))
        await cycles(dut, random.randrange(1, 20))
        dut.rst.value = 1
        world.reads.clear()
        await cycles(dut, 3)
        world.got.words.clear()
        dut.rst.value = 0
        await cycles(dut, 3)
        assert dut.sdd_valid.value == 0 and dut.busy.value == 0


def test_ssd_memory():
    harness.run("ssd_memory")


if __name__ == "__main__":
    test_ssd_memory()
