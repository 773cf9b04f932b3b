"""Reads of 4 KiB through one core in steady state, for what is said of its pace (hw/rate.py, test_engine.py)."""

from cocotb.triggers import RisingEdge

from disk import READ
from system import REPLICATE, SHARE, THROTTLE, System

DISK = (1, 2)  # cycles from an entry to its completion: a disk's time is not the core's


async def cycles_a_command(dut, latency, functions, warm=400, measured=1200):
    """Guests whose queues are never empty, a host that answers each read after exactly so many cycles, an interrupt for each completion, nobody
    ever pausing. A cap that is never reached costs what one costs that is."""
    cap = 0xFFFFFFFF << 32 | 1
    placing = (lambda at: (0, 1, SHARE | THROTTLE | REPLICATE, (cap, cap))) if functions else (lambda at: (0, 1, SHARE))
    system = System(dut, guests=4, placing=placing, latency=(latency, 0), disk=DISK, rate=0.0, moves=False)
    await system.begin()
    for guest in system.guests:
        guest.lbads, guest.count = 12, 4096
        await system.configure(guest)
        for qid, queue in guest.queues.items():
            queue.vector = qid
            await system.enable(guest, qid, 64, 64)
    system.commands = lambda guest: guest.command(opcode=READ, blocks=1)
    system.load = 0.3

    async def posted(count):
        while sum(queue.posted for guest in system.guests for queue in guest.queues.values()) < count:
            await RisingEdge(dut.clk)
        return system.cycle

    first = await posted(warm)
    last = await posted(warm + measured)
    await system.settle()
    return (last - first) / measured
