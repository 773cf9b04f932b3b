"""The queue side as guests see it: rings in memory, doorbells, completions, interrupts. What a guest may do, it does as early as it may:
it writes over an entry as soon as a completion's SQ head allows, moves the CQ head in the cycle after the entry came, gives a queue's memory
away as soon as the queue shows nothing in flight. The command side is the test."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from host import Host
from stream import Monitor, Pauses, Source, cycles, host_write, idle, start
from words import OWNER

SOURCES = ["queue_arbiter", "doorbells", "sq_fetch", "slots", "completion", "interrupts", "host_writes"]


class Queue:
    """One queue pair and the guest behind it."""

    def __init__(self, bench, at):
        self.bench, self.at = bench, at
        self.enabled = self.wants = False
        self.vector = random.choice([None, at % 4 + 1])
        self.done = self.faults = 0

    def place(self, size, c_size):
        self.size, self.c_size = size, c_size
        self.base, self.c_base = self.bench.page(), self.bench.page()
        self.bench.by_page[self.c_base] = self
        self.tail = self.head = self.c_head = 0
        self.phase = 1
        self.outstanding = {}   # cid: the entry
        self.unseen = 0         # completions in memory not yet taken
        self.stopped = False

    def free(self):
        return (self.head - self.tail - 1) % self.size

    def submit(self):
        """Writes an entry into its place; the doorbell is another matter."""
        cid = random.choice([n for n in random.choices(range(65536), k=4) if n not in self.outstanding])
        entry = [random.getrandbits(128) for _ in range(4)]
        entry[0] = entry[0] & ~(0xFFFF << 16) | cid << 16
        for beat in range(4):
            self.bench.memory[self.base + self.tail * 64 + beat * 16] = entry[beat]
        self.outstanding[cid] = {"entry": entry, "status": None}
        self.tail = (self.tail + 1) % self.size

    def take(self):
        """Takes every completion that lies there."""
        while True:
            entry = self.bench.memory.get(self.c_base + self.c_head * 16, 0)
            dw = [entry >> 32 * i & 0xFFFFFFFF for i in range(4)]
            if dw[3] >> 16 & 1 != self.phase:
                break
            command = self.outstanding.pop(dw[3] & 0xFFFF)
            assert command["status"] == dw[3] >> 17, f"queue {self.at}: status {dw[3] >> 17:#x}, it was {command['status']}"
            assert dw[2] >> 16 == self.at % 4 + 1
            head = dw[2] & 0xFFFF
            assert (head - self.head) % self.size <= (self.tail - self.head) % self.size, f"queue {self.at}: SQ head {head} beyond the tail"
            self.head = head
            self.c_head += 1
            if self.c_head == self.c_size:
                self.c_head, self.phase = 0, self.phase ^ 1
            if self not in self.bench.told:
                self.bench.told.append(self)
            self.unseen -= 1
            self.done += 1
        assert self.unseen == 0


class Bench:
    def __init__(self, dut, host=None, writes=0.0, commands=None, fails=0.0, f_rests=0.0):
        """`commands()`: how one goes: ("end", delay) or ("legs", [delays])."""
        self.dut, self.fails = dut, fails
        self.commands = commands or (lambda: random.choice([("end", random.randint(0, 30)), ("legs", random.choices(range(1, 200), k=random.randint(1, 4)))]))
        self.memory, self.by_page, self.broken, self.owned, self.gone = {}, {}, set(), set(), set()
        self.queues = [Queue(self, at) for at in range(64)]
        self.bells, self.owns, self.legs, self.ends, self.dones = [], [], [], [], []
        self.beats, self.slots, self.fault_queue, self.sent = [], {}, [], 0
        self.cycle, self.taken, self.read = 0, 0, None
        self.told, self.users = [], []  # queues whose CQ head is to be told; those in use
        idle(dut, rst=1, tick=0, db_valid=0, qc_wr_valid=0, qc_wr_addr=0, qc_wr_data=0, qc_rd_valid=0, qc_rd_queue=0, fc_wr_en=0,
             fc_wr_addr=0, fc_wr_data=0, own_valid=0, own_slot=0, own=0, leg_valid=0, leg_slot=0, leg_count=0)
        self.host = Host(dut, self.fetch, **(host or dict(latency=30, jitter=60, refuse=Pauses(0.2), rest=Pauses(0.1))))
        Monitor(dut, "f", ("beat", "slot", "queue", "data"), pauses=Pauses(f_rests), on_word=self.beat)
        self.end = Source(dut, "end", ("slot", "status"))
        self.leg = Source(dut, "done", ("slot", "status"))
        Monitor(dut, "hwr", ("kind", "addr", "data", "bytes"), pauses=Pauses(writes), on_word=self.write_, means=host_write)
        cocotb.start_soon(self.run())

    async def begin(self):
        await start(self.dut)
        await cycles(self.dut, 70)

    def page(self):
        while True:
            page = random.getrandbits(36) << 12
            if page not in self.owned:
                self.owned.add(page)
                return page

    def fetch(self, addr):
        assert addr & ~4095 not in self.gone, f"{addr:#x} is read, though given away"
        return None if addr in self.broken else self.memory[addr]

    def write_(self, word):
        if word["kind"]:
            self.sent += 1
            queue = self.queues[(word["addr"] >> 8 & 0xFFFF) * 4 + (word["addr"] & 0xFF) - 1]
            assert queue.vector == word["addr"] & 0xFF
            # An interrupt never overtakes its entry: it lies in memory now.
            if queue.enabled:
                queue.take()
            return
        assert word["addr"] & ~4095 not in self.gone, f"{word['addr']:#x} is written, though given away"
        assert word["bytes"] == 16
        queue = self.by_page[word["addr"] & ~4095]
        assert queue.enabled
        assert (word["addr"] - queue.c_base) // 16 < queue.c_size
        assert queue.unseen < queue.c_size - 1, f"queue {queue.at}: its CQ is overrun"
        self.memory[word["addr"]] = word["data"]
        queue.unseen += 1
        if queue.vector is None or random.random() < 0.3:
            queue.take()

    def beat(self, word):
        assert word["beat"] == len(self.beats)
        self.beats.append(word["data"])
        if word["beat"] != 3:
            return
        entry, self.beats = self.beats, []
        self.taken += 1
        queue, slot, cid = self.queues[word["queue"]], word["slot"], entry[0] >> 16 & 0xFFFF
        assert queue.outstanding[cid]["entry"] == entry and queue.outstanding[cid]["status"] is None, f"queue {queue.at}: an entry twice or another's"
        status = random.choice([0, 0, random.getrandbits(15)])
        queue.outstanding[cid]["status"] = status
        self.owns.append((slot, OWNER.pack(queue=queue.at, cid=cid)))
        how, when = self.commands()
        # The owner is told in the next cycle, what becomes of it after that.
        if how == "end":
            self.ends.append((self.cycle + 3 + when, slot, status))
        else:
            self.legs.append((slot, len(when)))
            # The last leg but the failing one are good.
            failing = random.randrange(len(when))
            self.dones += [(self.cycle + 6 + delay, slot, status if i == failing else 0) for i, delay in enumerate(when)]

    async def run(self):
        d = self.dut
        while True:
            await RisingEdge(d.clk)
            self.cycle += 1
            d.own_valid.value = d.leg_valid.value = 0
            if self.legs and self.legs[0][0] not in [own[0] for own in self.owns]:
                d.leg_valid.value = 1
                d.leg_slot.value, d.leg_count.value = self.legs.pop(0)
            if self.owns:
                d.own_valid.value = 1
                d.own_slot.value, d.own.value = self.owns.pop(0)
            for list_, stream in ((self.ends, self.end), (self.dones, self.leg)):
                list_.sort()
                while list_ and list_[0][0] <= self.cycle:
                    stream.send(dict(zip(("slot", "status"), list_.pop(0)[1:])))
            self.guests()
            d.db_valid.value = int(bool(self.bells))
            if self.bells:
                d.db_queue.value, d.db_cq.value, d.db_value.value = self.bells.pop(0)
            await FallingEdge(d.clk)
            if d.fault_valid.value == 1 and d.rst.value == 0:
                self.fault_queue.append((int(d.fault_queue.value), int(d.fault_code.value)))
            if d.qc_rd_valid.value == 1 and d.qc_rd_ready.value == 1:
                self.read = int(d.qc_rd_data.value)

    submits = 0.3

    def guests(self):
        for queue in self.told:
            if queue.enabled:
                self.bells.append((queue.at, 1, queue.c_head))
        self.told.clear()
        if self.submits and random.random() < self.submits:
            queue = random.choice(self.queues)
            if not queue.wants and self.users:
                queue = self.queues[random.choice(self.users)]
            if queue.wants and queue.free():
                for _ in range(random.randint(1, queue.free())):
                    if random.random() < self.fails:
                        self.broken.add(queue.base + queue.tail * 64 + 16 * random.randrange(4))
                    queue.submit()
                self.bells.append((queue.at, 0, queue.tail))

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

    async def look(self, at):
        d = self.dut
        d.qc_rd_valid.value, d.qc_rd_queue.value, self.read = 1, at, None
        while self.read is None:
            await RisingEdge(d.clk)
        d.qc_rd_valid.value = 0
        return self.read

    async def enable(self, at, size=None, c_size=None):
        queue = self.queues[at]
        queue.place(size or random.randint(2, 64), c_size or random.randint(2, 64))
        vector = 0 if queue.vector is None else queue.vector << 24 | 1 << 16
        await self.write(at, 1, queue.size | queue.c_size << 8 | vector)
        await self.write(at, 2, queue.c_base)
        queue.enabled = True
        await self.write(at, 0, queue.base | 1)
        queue.wants = True
        if at not in self.users:
            self.users.append(at)

    async def disable(self, at):
        """Disables, waits until nothing is in flight, gives the memory away."""
        queue = self.queues[at]
        if random.random() < 0.5:
            queue.wants = False  # else it goes on while the queue is disabled
        await self.write(at, 0, queue.base)
        for _ in range(4000):
            if not (await self.look(at)) >> 33 & 127:
                break
        else:
            assert False, f"queue {at} never ends"
        queue.wants = False
        queue.enabled = False
        self.gone |= {queue.base, queue.c_base}
        assert all(command["status"] is None for command in queue.outstanding.values()) or queue.unseen, f"queue {at}: a command taken, but not completed"

    async def settle(self, limit=30000):
        """No more commands; all that were given come back."""
        self.submits = 0.0
        for _ in range(limit):
            await RisingEdge(self.dut.clk)
            if not any(queue.enabled and not queue.stopped and queue.outstanding for queue in self.queues):
                break
        left = {queue.at: len(queue.outstanding) for queue in self.queues if queue.enabled and not queue.stopped and queue.outstanding}
        assert not left, f"queues and commands that never came back: {left}"
        for _ in range(3000):
            await RisingEdge(self.dut.clk)
            if self.dut.busy.value == 0:
                break
        assert self.dut.busy.value == 0 and self.dut.slots_free.value == 64


@cocotb.test()
@cocotb.parametrize(count=[1, 6, 64], writes=[0.0, 0.5])
async def guests(dut, count, writes):
    bench = Bench(dut, writes=writes, f_rests=0.2 * (writes > 0))
    await bench.begin()
    for at in random.sample(range(64), count):
        await bench.enable(at)
    await cycles(dut, 2000)
    await bench.settle()
    assert bench.taken == sum(queue.done for queue in bench.queues) > 10 * count and not bench.fault_queue


@cocotb.test()
async def tiny_queues(dut):
    """Rings of two and three entries: a CQ head races with every posting."""
    bench = Bench(dut, dict(latency=3, jitter=5), commands=lambda: ("end", random.randint(0, 3)))
    await bench.begin()
    for at in range(5):
        bench.queues[at].vector = None
        await bench.enable(at, random.randint(2, 3), random.randint(2, 3))
    bench.submits = 1.0
    await cycles(dut, 4000)
    await bench.settle()
    assert bench.taken > 300 and not bench.fault_queue


@cocotb.test()
@cocotb.parametrize(latency=[3, 100])
async def disabled_in_mid_flight(dut, latency):
    bench = Bench(dut, dict(latency=latency, jitter=latency), writes=0.3)
    await bench.begin()
    for at in range(12):
        await bench.enable(at)
    for _ in range(25):
        at = random.randrange(12)
        await cycles(dut, random.randrange(60))
        await bench.disable(at)
        await cycles(dut, random.randrange(20))
        await bench.enable(at)
    await bench.settle()
    assert not bench.fault_queue


@cocotb.test()
async def unreadable_entries(dut):
    """Of a burst that cannot be read nothing is taken; the queue stops and can be drained and enabled anew; others go on."""
    bench = Bench(dut, fails=0.01, writes=0.2)
    await bench.begin()
    for at in range(16):
        await bench.enable(at)
    stopped = 0
    for _ in range(5000):
        await RisingEdge(dut.clk)
        if bench.fault_queue:
            at, code = bench.fault_queue.pop(0)
            assert code == 3 and (await bench.look(at)) >> 40 & 1
            stopped += 1
            bench.queues[at].stopped = True
            await bench.disable(at)
            await bench.enable(at)
    bench.fails = 0.0
    assert stopped > 2
    for queue in bench.queues[:16]:
        # What was broken and not yet fetched stops its queue still.
        queue.stopped = any(beat & ~4095 == queue.base for beat in bench.broken)
    await bench.settle()


@cocotb.test()
async def reset_in_mid_flight(dut):
    bench = Bench(dut, writes=0.3)
    await bench.begin()
    for _ in range(5):
        for at in range(10):
            await bench.enable(at)
        await cycles(dut, random.randrange(100, 900))
        dut.rst.value = 1
        await RisingEdge(dut.clk)
        for list_ in (bench.bells, bench.owns, bench.legs, bench.ends, bench.dones, bench.beats):
            list_.clear()
        bench.end.clear()
        bench.leg.clear()
        for queue in bench.queues[:10]:
            queue.enabled = queue.wants = False
            bench.gone |= {queue.base, queue.c_base}
        await cycles(dut, 2)
        dut.rst.value = 0
        await cycles(dut, random.randrange(150))
    for at in range(10):
        await bench.enable(at)
    await cycles(dut, 500)
    await bench.settle()


async def cycles_per_command(dut, latency, queues, disk):
    bench = Bench(dut, dict(latency=latency, mixed=False), commands=lambda: ("legs", [disk]))
    bench.submits = 0.0
    await bench.begin()
    for at in queues:
        bench.queues[at].vector = at % 4 + 1
        await bench.enable(at, 64, 64)
    # Every ring full before the first doorbell, so that the guests are not what is measured.
    bench.submits = 1.0
    while bench.taken < 100:
        await RisingEdge(dut.clk)
    first, before = bench.cycle, bench.taken
    while bench.taken < before + 400:
        await RisingEdge(dut.clk)
    took = (bench.cycle - first) / 400
    dut._log.info(f"memory {latency}, command {disk}: {took:.2f} cycles a command")
    return took


@cocotb.test()
@cocotb.parametrize(latency=[10, 100, 250], disk=[1, 150])
async def throughput(dut, latency, disk):
    took = await cycles_per_command(dut, latency, range(16), disk)
    # 64 slots are what bounds it: a slot is reserved from the request on.
    assert took <= max(4.3, (latency + disk + 60) / 64 + 1)


def test_queue_side():
    harness.run("queue_side", sources=SOURCES)


if __name__ == "__main__":
    test_queue_side()
