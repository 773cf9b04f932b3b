"""engine.sv whole, between guests in host memory and disks that move their data (system.py, disk.py)."""

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from disk import READ, WRITE
from steady import cycles_a_command
from stream import cycles
from system import REPLICATE, SHARE, THROTTLE, System
from words import CONSTANTS

INTERNAL_ERROR = CONSTANTS["ST_INTERNAL_ERROR"]
SQ_TAIL, CQ_HEAD, SQ_READ = 1, 2, 3
QUICK = os.environ.get("MILLRACE_QUICK") == "1"


async def begun(dut, queues=2, sizes=(None, None), **arguments):
    system = System(dut, **arguments)
    await system.begin()
    for guest in system.guests:
        for qid in random.sample(range(1, system.qp + 1), queues):
            await system.enable(guest, qid, *sizes)
    return system


async def run(system, count, load=0.1):
    system.load = load
    goal = system.submitted + count
    for _ in range(4000):
        await cycles(system.dut, 25)
        if system.submitted >= goal:
            return
    assert False, f"{goal - system.submitted} of {count} commands find no place"


def queues(guest):
    return [queue for queue in guest.queues.values() if queue.enabled]


async def counters(system):
    """Taken, posted and sent are what the guests saw."""
    for core in range(system.cores):
        taken, posted, sent = [await system.read(core << 16 | word) for word in (4, 5, 6)]
        all_ = [queue for guest in system.guests if guest.core == core for queue in guest.queues.values()]
        assert taken == posted == sum(queue.posted for queue in all_)
        assert sent == sum(queue.posted for queue in all_ if queue.vector is not None) == sum(queue.told for queue in all_)


@cocotb.test()
async def guests_of_all_kinds(dut):
    """As many functions as have places, all opcodes and sizes, wrong commands among them, with pauses everywhere."""
    system = await begun(dut, guests=16)
    system.faulty = 0.15
    await run(system, 300 if QUICK else 500)
    await system.settle()
    assert len(system.ends) > 5 and system.disks.entries > 200, system.ends
    await counters(system)
    assert await system.read(0xF7801) == system.ssds << 32 | int(dut.FUNCTIONS.value) << 16 | system.cores
    for core in range(system.cores):
        assert await system.read(core << 16) == system.pages << 48 | system.ssds << 40 | 64 << 32 | system.qp << 24 | 16 << 16 | 1
    assert await system.read(0xE0000) == 0, "a core that does not exist"


@cocotb.test()
async def eight_cycles_a_command(dut):
    """At the longest latency of host memory that is promised, with all functions on; what it is otherwise: hw/rate.py."""
    took = await cycles_a_command(dut, 250, True, 200, 200 if QUICK else 600)
    assert took <= 8, f"{took:.2f} cycles a command"


@cocotb.test()
@cocotb.parametrize(latency=[(1, 1), (250, 0)])
async def a_core_for_each_disk(dut, latency):
    """The other mapping: a guest is where its disk is; no pauses, so that the pipelines are full."""
    ssds, cores = int(dut.SSDS.value), int(dut.CORES.value)
    system = await begun(dut, guests=8, rate=0.0, latency=latency, placing=lambda at: (at % ssds % cores, 1 << at % ssds, SHARE))
    await run(system, 200, 0.5)
    await system.settle()
    await counters(system)


@cocotb.test()
async def one_guest_without_functions(dut):
    system = await begun(dut, guests=1, queues=4, placing=lambda at: (0, 1, 0))
    await run(system, 150, 0.3)
    await system.settle()


@cocotb.test()
async def rings_of_two_and_three(dut):
    """Each entry is the ring's end; completion queues smaller than submission queues and the other way round."""
    system = await begun(dut, guests=4, queues=0, disk=(1, 5), latency=(2, 5))
    for guest in system.guests:
        for qid in range(1, system.qp + 1):
            await system.enable(guest, qid, random.randint(2, 3), random.choice([2, 3, 3, 64]))
    system.commands = lambda guest: guest.command(opcode=random.choice([READ, WRITE]), blocks=1)
    await run(system, 400, 0.5)
    await system.settle()
    await counters(system)


@cocotb.test()
async def completion_queues_fill(dut):
    """A guest that takes nothing gets as many entries as its queue holds and hinders nobody; when it takes them, it goes on."""
    system = await begun(dut, guests=3, queues=1)
    lazy = system.guests[0]
    queue = lazy.queues[next(qid for qid in lazy.queues if not lazy.queues[qid].enabled)]
    await system.enable(lazy, queue.qid, 64, 5)
    queue.lazy = True
    await run(system, 150)
    for _ in range(queue.room()):
        queue.submit(lazy.command(opcode=READ, blocks=1))
    queue.bell()
    await run(system, 100)
    system.load = 0.0
    for _ in range(200):
        await cycles(dut, 20)
        if all(other is queue for other in system.left()):
            break
    assert [other for other in system.left()] == [queue] and queue.unseen == 4, f"{queue.unseen} entries in a queue of 5"
    state = await system.state(lazy, queue.qid)
    assert (state["c_tail"], state["flight"], state["stopped"]) == (queue.c_tail, 0, 0)
    queue.lazy = False
    queue.take()
    await system.settle()


@cocotb.test()
async def caps(dut):
    """Over any time no more goes than the rate, one burst and one command; whoever has no cap is not held up by those who have."""
    units = 4  # of 64 cycles: a command's time, or 8 blocks'
    kinds = [(THROTTLE, (3 * units << 44 | units << 12, 0)), (THROTTLE, (0, 3 * units << 44 | units << 9)), (0, (0, 0))]
    flags, limits = zip(*kinds)
    system = await begun(dut, guests=3, queues=1, sizes=(32, 32), disk=(1, 1), placing=lambda at: (0, 1, SHARE | flags[at], limits[at]), rate=0.0)
    for guest in system.guests:
        guest.lbads = 9
        await system.configure(guest)
    system.commands = lambda guest: guest.command(opcode=READ, blocks=8)
    system.load = 0.5
    begun_at = system.cycle
    await cycles(dut, (25 if QUICK else 60) * units * 64)
    time, system.load = system.cycle - begun_at, 0.0
    for guest in system.guests[:2]:
        times = [arrival[0] for arrival in guest.arrived]
        for first in range(len(times)):
            for last in range(first, len(times)):
                # Times are in units, and a command is on its way for longer or shorter.
                most = (times[last] - times[first] + 300) / (64 * units) + 3 + 1
                assert last - first + 1 <= most, f"{last - first + 1} commands in {times[last] - times[first]} cycles"
        assert len(times) >= 0.9 * time / (64 * units), f"{len(times)} commands in {time} cycles"
    assert len(system.guests[2].arrived) > 5 * len(system.guests[0].arrived)
    await system.settle()


@cocotb.test()
async def replicas(dut):
    """Every disk has what was written; reads take turns; a leg's error is the guest's."""
    if int(dut.SSDS.value) < 2:
        return
    system = await begun(dut, guests=3, placing=lambda at: (at % int(dut.CORES.value), 3, SHARE | REPLICATE))
    system.guests[2].failures = 0.2
    await run(system, 400)
    await system.settle()
    one, two = (disk.blocks for disk in system.disks.disks[:2])
    for guest in system.guests:
        reads, writes = ([sum(1 for arrival in guest.arrived if arrival[1] == disk and (arrival[2] == READ) == kind and arrival[2] in (READ, WRITE))
                          for disk in (0, 1)] for kind in (True, False))
        assert writes[0] == writes[1] > 0
        single = [sum(1 for arrival in guest.arrived if arrival[1] == disk and arrival[2] in (2, 5)) for disk in (0, 1)]
        assert abs(single[0] - single[1]) <= 1 and reads[0] > 0, f"reads and compares by disk: {single}"
        known = [guest.first + lba for lba, content in guest.blocks.items() if content is not None]
        assert known and all(one.get(lba) == two.get(lba) for lba in known)
    assert any(status not in (0, 0x4285) for status in system.ends)


@cocotb.test()
async def wrong_doorbells(dut):
    """A guest rings everything that it can reach: what is not its own is refused, a wrong value stops its own queue, and nobody else notices."""
    system = await begun(dut, guests=8)
    bad = system.guests[0]
    refused = await system.read(0xF7800)
    await run(system, 50, 0.05)
    outside = [offset for offset in range(0, 4096) if offset % 4 or not 1 <= offset // 8 <= system.qp]
    missing = [n for n in range(256) if n not in system.by_number]
    for _ in range(60):
        system.bells.append(random.choice([(bad.number, random.choice(outside), random.getrandbits(32)), (random.choice(missing), random.randrange(8, 40, 4), 1)]))
    await cycles(dut, 300)
    assert await system.read(0xF7800) == refused + 60
    assert await system.faults(bad.core) == []
    for turn in range(3 if QUICK else 9):
        queue = random.choice(queues(bad))
        queue.stopped = True  # it gets no more
        while queue.outstanding:
            await cycles(dut, 20)
        while system.bells:
            await RisingEdge(dut.clk)
        await cycles(dut, 10)
        cq = turn % 3 == 0
        value = (queue.c_tail + 1 + random.randrange(queue.c_size - 1)) % queue.c_size if cq else queue.size + random.randrange(65536 - queue.size)
        if turn % 3 == 1:
            value = random.randrange(1, 65536) << 16 | random.randrange(queue.size)
        queue.bell(cq, value)
        await cycles(dut, 20)
        while system.bells:
            await RisingEdge(dut.clk)
        await cycles(dut, 20)
        assert (await system.state(bad, queue.qid))["stopped"]
        assert int(dut.fault.value) == 1 << bad.core
        assert await system.faults(bad.core) == [(bad.index(queue.qid), CQ_HEAD if cq else SQ_TAIL)]
        assert int(dut.fault.value) == 0
        queue.bell(value=random.randrange(queue.size))  # stopped is stopped
        await cycles(dut, 20)
        await system.disable(bad, queue.qid)
        await system.enable(bad, queue.qid)
    await system.settle()


@cocotb.test()
async def unreadable_queues(dut):
    """Of a burst that the host cannot read nothing is taken; the queue stops, once, and goes on when enabled anew."""
    system = await begun(dut, guests=6)
    system.commands = lambda guest: guest.command(fault="unread" if random.random() < 0.01 else None)
    system.load, stopped, wanted = 0.1, 0, 2 if QUICK else 5
    for _ in range(2000):
        await cycles(dut, 50)
        for core in range(system.cores):
            for index, code in await system.faults(core):
                guest = next(guest for guest in system.guests if (guest.core, guest.local) == (core, index // system.qp))
                qid = index % system.qp + 1
                assert code == SQ_READ and guest.queues[qid].enabled and (await system.state(guest, qid))["stopped"]
                await system.disable(guest, qid)
                await system.enable(guest, qid)
                stopped += 1
        if stopped >= wanted:
            system.load = 0.0
            if not system.left():
                break
    assert stopped >= wanted
    await system.settle()


@cocotb.test()
async def queues_come_and_go(dut):
    """Queues are disabled in mid-flight, drained, given other memory; registers are written and read under load; nothing waits for ever."""
    system = await begun(dut, guests=6, queues=3)
    system.load = 0.15
    for _ in range(6 if QUICK else 25):
        await cycles(dut, random.randrange(150))
        guest = random.choice(system.guests)
        queue = random.choice(queues(guest))
        await system.disable(guest, queue.qid)
        await cycles(dut, random.randrange(20))
        await system.enable(guest, queue.qid)
    await system.settle()
    assert sum(queue.posted for guest in system.guests for queue in guest.queues.values()) > 50


@cocotb.test()
async def reset_in_mid_flight(dut):
    system = await begun(dut, guests=6)
    for _ in range(2 if QUICK else 4):
        await run(system, 20)
        await cycles(dut, random.randrange(400))
        await system.reset()
        await cycles(dut, random.randrange(30))
        await system.program()
        for guest in system.guests:
            assert not (await system.state(guest, 1))["flight"]
            for qid in random.sample(range(1, system.qp + 1), 2):
                await system.enable(guest, qid)
    await run(system, 150)
    await system.settle()


@cocotb.test()
async def a_disk_is_reset(dut):
    """Without its disk a command ends with Internal Error; a queue pair that starts anew has neither heads nor phase of before."""
    system = await begun(dut, guests=6)
    for _ in range(1 if QUICK else 3):
        await run(system, 60)
        await system.settle()
        lost = random.randrange(system.ssds)
        for core in range(system.cores):
            await system.write(core << 16 | 0x10 + lost, 0)
        normal = system.commands

        def commands(guest):
            command = normal(guest)
            if command and guest.disks == 1 << lost:
                command["status"] = {INTERNAL_ERROR}
            return command

        system.commands = commands
        await run(system, 40)
        await system.settle()
        system.commands = normal
        system.disks.disks[lost].restart()
        for core in range(system.cores):
            await system.write(core << 16 | 0x10 + lost, 1)
            assert await system.read(core << 16 | 0x10 + lost) == 1
    await run(system, 100)
    await system.settle()


@cocotb.test()
async def a_disk_stands_still(dut):
    """Whose disk answers nothing waits; those of the other disk go on beside him, and when his goes on, all come back."""
    system = await begun(dut, guests=4, placing=lambda at: (0, 1 << at % int(dut.SSDS.value), SHARE))
    await run(system, 50)
    await system.settle()
    system.disks.stalled = 1
    system.depth = 3  # so few that they fill neither slots nor lists nor the ring
    await run(system, 6)
    others = [guest for guest in system.guests if guest.disks != 1]
    before = [sum(queue.done for queue in guest.queues.values()) for guest in others]
    system.load = 0.1
    await cycles(dut, 2500)
    system.load = 0.0
    after = [sum(queue.done for queue in guest.queues.values()) for guest in others]
    assert all(now > then for now, then in zip(after, before)), f"{before} to {after}"
    assert dut.busy.value == 1
    system.disks.stalled = 0
    await system.settle()


@cocotb.test()
async def interrupts_gather(dut):
    """Coalescing by threshold and by time; masked ones come once, when unmasked."""
    system = await begun(dut, guests=2, queues=0, rate=0.0, disk=(1, 10))
    guest, other = system.guests
    for one in system.guests:
        one.queues[3].vector = 3
        await system.enable(one, 3, 64, 64)
    queue = guest.queues[3]
    at = guest.core << 16 | 0x2000 + guest.local * 8

    async def commands(count):
        for _ in range(count):
            queue.submit(guest.command(opcode=READ, blocks=1))
        queue.bell()
        other.queues[3].submit(other.command(opcode=READ, blocks=1))
        other.queues[3].bell()
        await cycles(dut, 1200)
        assert queue.posted - begun_at[1] == count, "entries are posted, whatever becomes of interrupts"
        return queue.told - begun_at[0]

    for threshold in (0, 3, 6):
        begun_at = queue.told, queue.posted
        await system.write(at, threshold | 255 << 8 | 1 << 16)
        assert await commands(14) == 14 // (threshold + 1)
        await system.write(at, 0)  # what had gathered goes
        await cycles(dut, 1200)
        assert queue.untold == 0
    begun_at = queue.told, queue.posted
    await system.write(at, 1 << 35)
    assert await commands(9) == 0 and queue.untold == 9
    await system.write(at, 0)
    await cycles(dut, 1200)
    assert queue.told == begun_at[0] + 1 and queue.untold == 0
    # Time: its unit is 16,384 cycles; the first look that sees it over.
    begun_at = queue.told, queue.posted
    await system.write(at, 255 | 1 << 8 | 1 << 16)
    assert await commands(2) in (0, 1)  # the unit may just have ended
    for _ in range(20):
        await cycles(dut, 1000)
        if queue.untold == 0:
            break
    assert queue.untold == 0
    await system.settle()
    assert other.queues[3].told == other.queues[3].posted


def test_engine():
    harness.run("engine", parameters={"CORES": 2, "SSDS": 2, "PAGES": 16})
    harness.run("engine", parameters={"PAGES": 32, "LISTS": 4, "CHIP_BASE": "64'h0000_3f80_0000_0000"})
    harness.run("engine", parameters={"FUNCTIONS": 252, "CORES": 2, "SSDS": 3, "PAGES": 16})
    if not QUICK:
        harness.lint("engine", [harness.RTL / "millrace_pkg.sv", harness.RTL / "engine.sv"], {"FUNCTIONS": 252, "CORES": 16, "SSDS": 16})


if __name__ == "__main__":
    test_engine()
