"""doorbells.sv and queue_arbiter.sv against a model of all queues: every entry is picked once and in order, no completion queue is promised
more than it holds, wrong doorbells stop their queue, what a disabled queue shows is true, and turns go by weight."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from stream import Pauses, cycles, idle, start

QUEUES = 64
SQ_TAIL, CQ_HEAD, SQ_READ = 1, 2, 3


class Queue:
    def __init__(self):
        self.enabled = False
        self.enable(2, 2)
        self.enabled = False

    def enable(self, size, c_size):
        self.size, self.c_size, self.enabled, self.stopped = size, c_size, True, False
        self.tail = self.head = self.c_head = self.c_tail = 0
        self.phase, self.flight = 1, 0
        self.told = self.c_told = 0  # by good doorbells, some of which may be under way

    @property
    def entries(self):
        return (self.tail - self.head) % self.size

    @property
    def unconsumed(self):
        return (self.c_tail - self.c_head) % self.c_size


class Bench:
    def __init__(self, dut, picks=0.0, room=lambda: random.randint(0, 4), post=(5, 100), fails=0.0):
        self.dut, self.room, self.post, self.fails = dut, room, post, fails
        self.queues = [Queue() for _ in range(QUEUES)]
        self.bad_after = 1, 60
        self.rests = Pauses(picks)
        self.bells, self.posts, self.bads, self.faults = [], [], [], []
        self.picks = []   # (queue, index, count)
        self.taken = [0] * QUEUES
        self.cycle = 0
        self.read = None
        idle(dut, rst=1, db_valid=0, qc_wr_valid=0, qc_wr_en=0, qc_wr_addr=0, qc_wr_data=0, qc_rd_valid=0, qc_rd_queue=0, fc_wr_en=0,
             fc_wr_addr=0, fc_wr_data=0, room=0, pick_ready=0, bad_valid=0, posted_valid=0)
        cocotb.start_soon(self.run())

    async def begin(self):
        await start(self.dut)
        await cycles(self.dut, 70)

    # ---- The model, a step a cycle; what was offered in a cycle is in force after it
    async def run(self):
        d = self.dut
        bell, wait, was_valid, rooms = None, 0, False, [0, 0]   # of this cycle and the one before
        while True:
            await RisingEdge(d.clk)
            self.cycle += 1
            self.drive(was_valid or wait > 0)
            wait = max(0, wait - 1)
            await FallingEdge(d.clk)
            if d.rst.value == 1:
                bell, was_valid = None, False
                self.faults.clear()
                continue
            self.check_fault()
            if d.pick_valid.value == 1:
                if not was_valid:
                    self.offered(rooms[1])
                was_valid = True
                if d.pick_ready.value == 1:
                    self.picked()
                    was_valid, wait = False, 1
            else:
                assert not was_valid, "a pick went away"
            rooms = [int(d.room.value), rooms[0]]
            if bell:
                self.bell(*bell)
            bell = None
            if d.db_valid.value == 1:
                bell = int(d.db_queue.value), int(d.db_cq.value), int(d.db_value.value)
            if d.posted_valid.value == 1:
                queue = self.queues[int(d.posted_queue.value)]
                queue.c_tail, queue.phase = int(d.posted_tail.value), int(d.posted_phase.value)
                queue.flight -= 1
            if d.bad_valid.value == 1 and d.bad_ready.value == 1:
                at, count = self.bads.pop(0)[1:]
                queue = self.queues[at]
                queue.flight -= count
                if not queue.stopped:
                    self.faults.append((at, SQ_READ))
                queue.stopped = True
            if d.qc_wr_valid.value == 1:
                d.qc_wr_en.value = int(d.qc_wr_ready.value)
                if d.qc_wr_ready.value == 1:
                    self.written(int(d.qc_wr_addr.value), int(d.qc_wr_data.value))
            if d.qc_rd_valid.value == 1 and d.qc_rd_ready.value == 1:
                self.read = int(d.qc_rd_data.value)

    def drive(self, busy):
        d = self.dut
        d.qc_wr_en.value = 0
        d.room.value = 0 if busy else self.room()
        d.pick_ready.value = int(not self.rests.rests())
        d.db_valid.value = int(bool(self.bells))
        bell = self.bells.pop(0) if self.bells else [random.getrandbits(n) for n in (6, 1, 16)]
        d.db_queue.value, d.db_cq.value, d.db_value.value = bell
        d.posted_valid.value = 0
        self.posts.sort()
        if self.posts and self.posts[0][0] <= self.cycle:
            at = self.posts.pop(0)[1]
            queue = self.queues[at]
            tail = (queue.c_tail + 1) % queue.c_size
            d.posted_valid.value, d.posted_queue.value, d.posted_tail.value = 1, at, tail
            d.posted_phase.value = queue.phase ^ (tail == 0)
        self.bads.sort()
        d.bad_valid.value = int(bool(self.bads) and self.bads[0][0] <= self.cycle)
        if self.bads:
            d.bad_queue.value, d.bad_count.value = self.bads[0][1:]

    def bell(self, at, cq, value):
        queue = self.queues[at]
        if not queue.enabled or queue.stopped:
            return
        if not cq:
            good = value < queue.size
            if good:
                queue.tail = value
        else:
            good = value < queue.c_size and (value - queue.c_head) % queue.c_size <= queue.unconsumed
            if good:
                queue.c_head = value
        if not good:
            queue.stopped = True
            self.faults.append((at, CQ_HEAD if cq else SQ_TAIL))

    def check_fault(self):
        d = self.dut
        expected = self.faults.pop(0) if self.faults else None
        seen = (int(d.fault_queue.value), int(d.fault_code.value)) if d.fault_valid.value == 1 else None
        assert seen == expected, f"fault {seen} where {expected} was due"

    def offered(self, room):
        d = self.dut
        at, index, count = int(d.pick_queue.value), int(d.pick_index.value), int(d.pick_count.value)
        queue = self.queues[at]
        assert queue.enabled, f"queue {at} is picked, though disabled"
        assert index == queue.head, f"queue {at}: entry {index} is picked, {queue.head} was due"
        assert 1 <= count <= min(4, room), f"{count} picked where there was room for {room}"
        assert count <= min(queue.entries, queue.size - index), f"queue {at}: {count} picked of {queue.entries} entries at {index} of {queue.size}"
        assert d.pick_wrap.value == (index + count == queue.size)
        assert queue.flight + queue.unconsumed + count <= queue.c_size - 1, f"queue {at}: its CQ is promised too much"
        queue.head = (index + count) % queue.size
        queue.flight += count

    def picked(self):
        d = self.dut
        at, index, count = int(d.pick_queue.value), int(d.pick_index.value), int(d.pick_count.value)
        self.picks.append((at, index, count))
        self.taken[at] += count
        if random.random() < self.fails:
            self.bads.append((self.cycle + random.randint(*self.bad_after), at, count))
        else:
            self.posts += [(self.cycle + random.randint(*self.post), at) for _ in range(count)]

    def written(self, addr, data):
        queue = self.queues[addr // 4]
        if addr % 4 == 1:
            queue.sizes = (data & 0x7F or 64, data >> 8 & 0x7F)
        elif addr % 4 == 0:
            queue.enabled = bool(data & 1)
            if queue.enabled:
                assert queue.flight == 0
                queue.enable(*queue.sizes)

    # ---- What tests do
    async def write(self, at, word, data):
        d = self.dut
        d.qc_wr_valid.value, d.qc_wr_addr.value, d.qc_wr_data.value = 1, at * 4 + word, data
        while True:
            await FallingEdge(d.clk)
            done = d.qc_wr_ready.value == 1
            await RisingEdge(d.clk)
            if done:
                break
        d.qc_wr_valid.value = 0

    async def enable(self, at, size=None, c_size=None):
        await self.write(at, 1, (size or random.randint(2, 64)) | (c_size or random.randint(2, 64)) << 8)
        await self.write(at, 0, 0x1001)

    async def weight(self, function, weight):
        d = self.dut
        d.fc_wr_en.value, d.fc_wr_addr.value, d.fc_wr_data.value = 1, function * 8 + 1, weight | random.getrandbits(60) << 4
        await RisingEdge(d.clk)
        d.fc_wr_en.value = 0

    async def look(self, at):
        d = self.dut
        d.qc_rd_valid.value, d.qc_rd_queue.value = 1, at
        self.read = None
        while self.read is None:
            await RisingEdge(d.clk)
        d.qc_rd_valid.value = 0
        data = self.read
        return {"head": data & 63, "tail": data >> 8 & 63, "c_tail": data >> 16 & 63, "c_head": data >> 24 & 63, "phase": data >> 32 & 1,
                "flight": data >> 33 & 127, "stopped": bool(data >> 40 & 1)}

    async def compare(self, at):
        """Only while nothing of this queue changes."""
        seen, queue = await self.look(at), self.queues[at]
        assert seen == {name: getattr(queue, name) for name in seen}, f"queue {at}: {seen}, in truth {vars(queue)}"

    def ring(self, at, most=63):
        """A good doorbell: some more entries."""
        queue = self.queues[at]
        queue.told = (queue.told + random.randint(0, min(most, (queue.head - queue.told - 1) % queue.size))) % queue.size
        self.bells.append((at, 0, queue.told))

    def consume(self, at, all_=False):
        queue = self.queues[at]
        there = (queue.c_tail - queue.c_told) % queue.c_size
        queue.c_told = (queue.c_told + (there if all_ else random.randint(0, there))) % queue.c_size
        self.bells.append((at, 1, queue.c_told))

    async def settle(self, queues):
        """Guests take all completions until every entry is picked and posted."""
        for _ in range(400):
            for at in queues:
                self.consume(at, True)
            await cycles(self.dut, 100)
            left = [at for at in queues if self.queues[at].enabled and not self.queues[at].stopped
                    and (self.queues[at].entries or self.queues[at].unconsumed)]
            if not left and not self.posts and not self.bads:
                break
        else:
            assert False, f"queues {left} are forgotten"
        for _ in range(2000):
            await RisingEdge(self.dut.clk)
            if self.dut.busy.value == 0:
                return
        assert False, "busy for ever"


@cocotb.test()
@cocotb.parametrize(picks=[0.0, 0.6], count=[3, 64])
async def good_guests(dut, picks, count):
    bench = Bench(dut, picks)
    await bench.begin()
    queues = random.sample(range(QUEUES), count)
    for at in queues:
        await bench.enable(at)
    for _ in range(2500):
        at = random.choice(queues)
        if not bench.bells:
            random.choice((bench.ring, bench.consume))(at)
        await RisingEdge(dut.clk)
    await bench.settle(queues)
    assert sum(bench.taken) > 300 and not any(queue.stopped for queue in bench.queues)
    for at in queues:
        await bench.compare(at)


@cocotb.test()
async def completion_queues_fill(dut):
    bench = Bench(dut, post=(1, 3), room=lambda: 4)
    await bench.begin()
    for at in range(8):
        await bench.enable(at, 64, random.randint(2, 8))
    for at in range(8):
        bench.bells.append((at, 0, 63))
    await cycles(dut, 500)
    # As many as fit, and no more until the guest takes some.
    assert bench.taken[:8] == [queue.c_size - 1 for queue in bench.queues[:8]]
    assert dut.busy.value == 0
    for _ in range(800):
        bench.consume(random.randrange(8))
        await cycles(dut, 3)
    await bench.settle(range(8))


@cocotb.test()
async def bad_guests(dut):
    """Any value at any time, as fast as it goes, beside good guests; queues are disabled, drained and enabled again."""
    bench = Bench(dut, 0.2, fails=0.05)
    await bench.begin()
    for at in range(QUEUES):
        await bench.enable(at)
    stopped = 0
    for _ in range(60):
        for _ in range(40):
            at = random.randrange(QUEUES)
            if random.random() < 0.1:
                bench.bells.append((at, random.getrandbits(1), random.choice([random.randrange(70), random.getrandbits(16)])))
            elif len(bench.bells) < 3:
                random.choice((bench.ring, bench.consume))(at)
            if random.random() < 0.5:
                await RisingEdge(dut.clk)
        for at in [at for at in range(QUEUES) if bench.queues[at].stopped][:6]:
            stopped += 1
            assert (await bench.look(at))["stopped"]
            await bench.write(at, 0, 0x1000)
            while (await bench.look(at))["flight"]:
                pass
            assert bench.queues[at].flight == 0
            await bench.compare(at)
            await bench.enable(at)
    assert stopped > 30
    await bench.settle(range(QUEUES))


@cocotb.test()
async def a_queue_has_one_fault(dut):
    """Several bursts that cannot be read, and a wrong doorbell at every distance from them: the control processor is told once."""
    bench = Bench(dut, room=lambda: 4, fails=1.0)
    bench.bad_after = 80, 80
    await bench.begin()
    for distance in range(40):
        at = random.randrange(QUEUES)
        await bench.enable(at, 64, 64)
        bench.bells.append((at, 0, 40))
        await cycles(dut, 70)
        assert len(bench.bads) > 1
        await cycles(dut, bench.bads[0][0] - 20 + distance - bench.cycle)
        bench.bells.append((at, 0, 64))
        while bench.bads:
            await RisingEdge(dut.clk)
        await cycles(dut, 10)
        await bench.compare(at)
        assert bench.queues[at].stopped


@cocotb.test()
async def disabled_while_picked(dut):
    """When a disabled queue shows nothing in flight, nothing of it comes any more: its memory may be given away."""
    bench = Bench(dut, 0.5, post=(1, 40))
    await bench.begin()
    for at in range(4):
        await bench.enable(at, 64, 64)
    for turn in range(150):
        at = turn % 4
        for other in range(at, at + 3):
            bench.ring(other % 4, 20)
        await cycles(dut, random.randrange(12))
        await bench.write(at, 0, 0)
        while (await bench.look(at))["flight"]:
            pass
        assert bench.queues[at].flight == 0
        picks = len(bench.picks)
        bench.bells.append((at, 0, random.randrange(64)))
        await cycles(dut, 12)
        assert all(pick[0] != at for pick in bench.picks[picks:])
        await bench.enable(at, 64, 64)
        for other in range(4):
            bench.consume(other, True)
        await cycles(dut, 10)


@cocotb.test()
async def a_doorbell_in_every_cycle_of_a_pick(dut):
    """Each distance between two doorbells of a queue: the second is never lost, whatever the arbiter does just then."""
    bench = Bench(dut, room=lambda: 4, post=(1, 1))
    await bench.begin()
    await bench.enable(17, 64, 64)
    tail = 0
    for distance in range(1, 16):
        for _ in range(6):
            for step in (random.randint(1, 5), random.randint(1, 5)):
                tail = (tail + step) % 64
                bench.bells.append((17, 0, tail))
                await cycles(dut, distance)
            await cycles(dut, 30)
            assert bench.queues[17].entries == 0, f"forgotten, {distance} cycles after the first"
            bench.consume(17, True)
            await cycles(dut, 3)


async def share(dut, weights, functions, cycles_):
    bench = Bench(dut, room=lambda: 4, post=(1, 2))
    await bench.begin()
    for function, weight in zip(functions, weights):
        await bench.weight(function, weight)
        for queue in range(4):
            await bench.enable(function * 4 + queue, 64, 64)
    queues = [function * 4 + queue for function in functions for queue in range(4)]
    begun = None
    for turn in range(cycles_):
        at = random.choice(queues)
        if len(bench.bells) < 2:
            queue = bench.queues[at]
            bench.bells.append((at, 0, (queue.head - 1) % 64))
            bench.consume(at, True)
        if turn == cycles_ // 4:
            begun = list(bench.taken)
        await RisingEdge(dut.clk)
    return [[bench.taken[at] - begun[at] for at in range(function * 4, function * 4 + 4)] for function in functions]


@cocotb.test()
async def turns_by_weight(dut):
    weights = [1, 2, 3, 4, 8, 5, 0]
    taken = await share(dut, weights, [0, 3, 5, 6, 11, 14, 15], 6000)
    dut._log.info(f"weights {weights}: {taken}")
    unit = sum(taken[0])
    assert unit > 40
    for weight, queues in zip(weights, taken):
        assert abs(sum(queues) - max(1, weight) * unit) <= 2 * max(1, weight) + 4, f"weight {weight}: {sum(queues)} where 1 has {unit}"
        # Queues have the same picks, not the same entries: whose picks meet the ring's end within four entries has 17 picks for 16.
        assert max(queues) - min(queues) <= 10 + max(queues) // 16, f"queues of one function: {queues}"


@cocotb.test()
async def a_pick_every_4_cycles(dut):
    bench = Bench(dut, room=lambda: 4, post=(1, 2))
    bench.wait = 0
    await bench.begin()
    for at in range(QUEUES):
        await bench.enable(at, 64, 64)
    # Each queue has one entry at a time, as with guests that wait for each: so picks of one, as many as there are cycles for.
    bench.bells += [(at, 0, 1) for at in range(QUEUES)]
    while len(bench.picks) < 4:
        await RisingEdge(dut.clk)
    first, before = bench.cycle, len(bench.picks)
    while len(bench.picks) < QUEUES:
        await RisingEdge(dut.clk)
    took = (bench.cycle - first) / (QUEUES - before)
    dut._log.info(f"{took:.2f} cycles a pick")
    assert took <= 4.1


@cocotb.test()
async def reset_in_mid_flight(dut):
    bench = Bench(dut, 0.3)
    await bench.begin()
    for _ in range(6):
        for at in range(12):
            await bench.enable(at)
        for _ in range(200):
            if len(bench.bells) < 3:
                random.choice((bench.ring, bench.consume))(random.randrange(12))
            await RisingEdge(dut.clk)
        dut.rst.value = 1
        await RisingEdge(dut.clk)
        for list_ in (bench.posts, bench.bads, bench.bells, bench.faults):
            list_.clear()
        bench.queues[:] = [Queue() for _ in range(QUEUES)]
        await cycles(dut, 2)
        dut.rst.value = 0
        picks = len(bench.picks)
        bench.bells += [(at, 0, 1) for at in range(12)]
        await cycles(dut, 150)
        assert len(bench.picks) == picks, "after reset every queue is disabled"
        for at in (*range(12), 63):
            await bench.compare(at)
    await bench.enable(3, 8, 8)
    bench.bells.append((3, 0, 5))
    await bench.settle([3])


def test_doorbells():
    harness.run("doorbells", sources=["queue_arbiter"])


if __name__ == "__main__":
    test_doorbells()
