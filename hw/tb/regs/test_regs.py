"""regs.sv against a dictionary: what an address reaches, how long it waits, faults in order, counters, identity."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from stream import reset, start

STROBES = ("qc_wr_en", "fc_wr_en", "cfg_wr_en", "page_wr_en")


class Registers:
    def __init__(self, dut):
        self.dut = dut
        self.lf, self.qp, self.slots, self.ssds, self.pages = (int(getattr(dut, p).value) for p in ("LF", "QP", "SLOTS", "SSDS", "PAGES"))
        for name in ("reg_valid", "reg_write", "reg_addr", "reg_wdata", "qc_wr_ready", "qc_rd_ready", "qc_rd_data", "cfg_wr_ready", "in_flight",
                     "taken", "posted", "interrupted", "fault_valid", "fault_queue", "fault_code"):
            getattr(dut, name).value = 0
        dut.rst.value = 1
        self.writes, self.disks, self.lent = [], [], None
        cocotb.start_soon(self._modules())

    async def _modules(self):
        """The modules behind: ready now and then, word 3 of a queue is noise that is remembered."""
        dut = self.dut
        while True:
            await RisingEdge(dut.clk)
            for name in ("qc_wr_ready", "qc_rd_ready", "cfg_wr_ready"):
                getattr(dut, name).value = random.randrange(2)
            dut.qc_rd_data.value = random.getrandbits(64)
            await FallingEdge(dut.clk)
            if int(dut.rst.value):
                continue
            strobes = [name for name in STROBES if int(getattr(dut, name).value)]
            if strobes == ["cfg_wr_en"] and not int(dut.cfg_wr_ready.value):
                continue
            assert len(strobes) <= 1
            for name in strobes:
                self.writes.append((name, int(getattr(dut, name.replace("_en", "_addr")).value), int(dut.wr_data.value)))
            if int(dut.ssd_write.value):
                self.disks.append((int(dut.ssd_write.value).bit_length() - 1, int(dut.reg_wdata.value) & 1))
            if int(dut.qc_rd_valid.value) and int(dut.qc_rd_ready.value):
                self.lent = (int(dut.qc_wr_addr.value), int(dut.qc_rd_data.value))

    async def access(self, address, value=None):
        dut = self.dut
        await RisingEdge(dut.clk)
        dut.reg_valid.value, dut.reg_write.value = 1, int(value is not None)
        dut.reg_addr.value, dut.reg_wdata.value = address, value or 0
        for _ in range(200):
            await FallingEdge(dut.clk)
            assert not int(dut.reg_rvalid.value)
            if int(dut.reg_ready.value):
                break
        else:
            raise AssertionError(f"register {address:04x} is not answered")
        await RisingEdge(dut.clk)
        dut.reg_valid.value = 0
        await FallingEdge(dut.clk)
        assert int(dut.reg_rvalid.value)
        return int(dut.reg_rdata.value)


@cocotb.test()
async def addresses(dut):
    registers = Registers(dut)
    await start(dut)
    queues, lf = registers.lf * registers.qp, registers.lf
    enabled = {}
    for _ in range(1500):
        top = random.choice([0, 1, 1, 2, 3, 4, 7, 8, 9, 15])
        address = top << 12 | random.choice([random.getrandbits(12), random.randrange(4 * queues), random.randrange(8 * lf)])
        if top == 0:
            address = random.choice([0x10 + random.randrange(16), 0x20, 0x7, 0xFFF])
        value = random.getrandbits(64) if random.random() < 0.7 else None
        registers.writes.clear(), registers.disks.clear()
        registers.lent = None
        answer = await registers.access(address, value)
        wanted, inner = [], address & 0xFFF
        if value is not None:
            if top == 1 and inner < 4 * queues:
                wanted = [("qc_wr_en", inner, value)]
            if top == 2 and inner < 8 * lf:
                wanted = [("fc_wr_en", inner, value)]
            if top == 3:
                wanted = [("cfg_wr_en", inner, value)]
            if top >= 8 and address - 0x8000 < lf * registers.pages:
                wanted = [("page_wr_en", address - 0x8000, value)]
            assert answer == 0
        assert registers.writes == wanted, f"{address:04x}: {registers.writes}"
        disk = address - 0x10 if 0x10 <= address < 0x10 + registers.ssds else None
        if disk is not None and value is not None:
            enabled[disk] = value & 1
            assert registers.disks == [(disk, value & 1)]
            assert int(dut.ssd_enabled.value) >> disk & 1 == value & 1
        else:
            assert not registers.disks
        if value is None:
            if top == 1 and inner < 4 * queues and inner % 4 == 3:
                assert registers.lent == (inner, answer)
            elif disk is not None:
                assert answer == enabled.get(disk, 0)
            else:
                assert answer == 0 and registers.lent is None, f"{address:04x} reads {answer:x}"
    await reset(dut)
    for disk in range(registers.ssds):
        assert await registers.access(0x10 + disk) == 0


@cocotb.test()
async def own_words(dut):
    registers = Registers(dut)
    await start(dut)
    r = registers
    assert await r.access(0) == 1 | r.lf << 16 | r.qp << 24 | r.slots << 32 | r.ssds << 40 | r.pages << 48
    dut.in_flight.value = 37
    assert await r.access(1) == 37
    before = await r.access(3)
    for _ in range(640):
        await RisingEdge(dut.clk)
    assert await r.access(3) - before in (10, 11)
    counts = [0, 0, 0]
    for _ in range(500):
        await FallingEdge(dut.clk)
        for i, name in enumerate(("taken", "posted", "interrupted")):
            happens = random.randrange(2)
            getattr(dut, name).value = happens
            counts[i] += happens
    await FallingEdge(dut.clk)
    dut.taken.value = dut.posted.value = dut.interrupted.value = 0
    for _ in range(8):
        await RisingEdge(dut.clk)
    assert [await r.access(4 + i) for i in range(3)] == counts


@cocotb.test()
async def faults(dut):
    r = Registers(dut)
    await start(dut)
    assert await r.access(2) == 0 and not int(dut.fault.value)
    queues, waiting = r.lf * r.qp, []
    for _ in range(20):
        for _ in range(random.randrange(queues)):
            await FallingEdge(dut.clk)
            fault = (random.randrange(queues), random.randrange(1, 4))
            dut.fault_valid.value, dut.fault_queue.value, dut.fault_code.value = 1, *fault
            if len(waiting) < queues:  # the newest of too many is dropped
                waiting.append(fault)
            await FallingEdge(dut.clk)
            dut.fault_valid.value = 0
            await r.access(2, 0)  # a write takes none
        for _ in range(random.randrange(len(waiting) + 2)):
            assert int(dut.fault.value) == bool(waiting)
            wanted = 0
            if waiting:
                queue, code = waiting.pop(0)
                wanted = 1 << 63 | code << 16 | queue
            assert await r.access(2) == wanted
    await reset(dut)
    assert await r.access(2) == 0


def test_regs():
    harness.run("regs", sources=["counters", "fifo"])
    harness.run("regs", sources=["counters", "fifo"], parameters={"SSDS": 16, "PAGES": 2048})


if __name__ == "__main__":
    test_regs()
