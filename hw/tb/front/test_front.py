"""front.sv against a dictionary: which doorbell reaches which core and queue, what is refused and counted, whose interrupt it is."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from stream import reset, start


class Front:
    def __init__(self, dut):
        self.dut = dut
        self.functions, self.cores, self.lf, self.qp = (int(getattr(dut, p).value) for p in ("FUNCTIONS", "CORES", "LF", "QP"))
        self.places, self.refused, self.got, self.expected = {}, 0, [], []
        for name in ("bar_valid", "bar_function", "bar_offset", "bar_data", "irq_core", "irq_local", "reg_valid", "reg_write", "reg_addr", "reg_wdata"):
            getattr(dut, name).value = 0
        dut.rst.value = 1

    async def begin(self):
        await start(self.dut)
        cocotb.start_soon(self._watch())
        await self.settle()

    async def settle(self):
        while True:
            await FallingEdge(self.dut.clk)
            if not int(self.dut.busy.value):
                return

    async def _watch(self):
        dut = self.dut
        while True:
            await FallingEdge(dut.clk)
            valid = 0 if int(dut.rst.value) else int(dut.db_valid.value)
            assert valid & (valid - 1) == 0, "a doorbell reaches one core"
            if valid:
                self.got.append((valid.bit_length() - 1, int(dut.db_queue.value), int(dut.db_cq.value), int(dut.db_value.value)))

    async def access(self, address, value=None):
        dut = self.dut
        await RisingEdge(dut.clk)
        dut.reg_valid.value, dut.reg_write.value = 1, int(value is not None)
        dut.reg_addr.value, dut.reg_wdata.value = address, value or 0
        while True:
            await FallingEdge(dut.clk)
            if int(dut.reg_ready.value):
                break
        await RisingEdge(dut.clk)
        dut.reg_valid.value = 0
        await FallingEdge(dut.clk)
        assert int(dut.reg_rvalid.value)
        return int(dut.reg_rdata.value)

    async def place(self, function, core, local, enabled=True):
        await self.access(function, int(enabled) << 63 | core << 8 | local)
        if function < self.functions and core < self.cores and local < self.lf:
            self.places[function] = (core, local) if enabled else None

    async def ring(self, function, offset, value):
        dut = self.dut
        await RisingEdge(dut.clk)
        dut.bar_valid.value, dut.bar_function.value, dut.bar_offset.value, dut.bar_data.value = 1, function, offset, value
        place = self.places.get(function)
        if place and offset % 4 == 0 and 1 <= offset // 8 <= self.qp:
            self.expected.append((place[0], place[1] * self.qp + offset // 8 - 1, offset // 4 % 2, value if value < 65536 else 65535))
        else:
            self.refused += 1

    async def rest(self):
        await RisingEdge(self.dut.clk)
        self.dut.bar_valid.value = 0

    async def all_places(self):
        """Every function has a place of its own, as far as there are places."""
        places = [(c, l) for c in range(self.cores) for l in range(self.lf)]
        random.shuffle(places)
        for function, (core, local) in zip(range(self.functions), places):
            await self.place(function, core, local)


@cocotb.test()
async def doorbells(dut):
    front = Front(dut)
    await front.begin()
    await front.all_places()
    for _ in range(6000):
        if random.random() < 0.02:
            await front.rest()
            await front.settle()
            await front.place(random.randrange(front.functions), random.randrange(front.cores), random.randrange(front.lf), random.random() < 0.7)
        function = random.choice([random.randrange(front.functions), random.randrange(256)])
        offset = random.choice([8 * random.randrange(1, front.qp + 1) + 4 * random.randrange(2), random.randrange(4096), random.choice([0, 4, 8 * front.qp + 8])])
        await front.ring(function, offset, random.choice([random.randrange(64), random.getrandbits(16), random.getrandbits(32)]))
        if random.random() < 0.2:
            await front.rest()
    await front.rest()
    await front.settle()
    assert front.got == front.expected and len(front.got) > 300
    assert await front.access(0x800) == front.refused > 300
    assert await front.access(0x801) == int(dut.SSDS.value) << 32 | front.functions << 16 | front.cores


@cocotb.test()
async def tables(dut):
    front = Front(dut)
    await front.begin()
    for function in range(front.functions):
        assert await front.access(function) == 0, "nobody has a place after reset"
    await front.all_places()
    # Places that do not exist change nothing, functions that do not exist have none.
    await front.access(0, 1 << 63 | front.cores << 8)
    await front.access(0, 1 << 63 | front.lf)
    await front.access(0, 1 << 63 | 1 << 40)
    if front.functions < 256:
        await front.access(front.functions, 1 << 63)
        assert await front.access(front.functions) == 0
    for function, (core, local) in front.places.items():
        assert await front.access(function) == 1 << 63 | core << 8 | local
        dut.irq_core.value, dut.irq_local.value = core, local
        await FallingEdge(dut.clk)
        assert int(dut.irq_function.value) == function
    # Reset forgets all places.
    await reset(dut, 1)
    front.places.clear()
    await front.ring(0, 8, 1)
    await front.rest()
    await front.settle()
    assert front.got == [] and await front.access(0x800) == 1
    for function in range(front.functions):
        assert await front.access(function) == 0


def test_front():
    harness.run("front")
    harness.run("front", parameters={"FUNCTIONS": 253, "CORES": 16, "SSDS": 16})
    harness.run("front", parameters={"FUNCTIONS": 5, "CORES": 3, "LF": 4, "QP": 8})


if __name__ == "__main__":
    test_front()
