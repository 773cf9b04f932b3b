"""sq_fetch.sv against a host that answers late and in any mix: every entry picked leaves once, in order, with its own data and slot;
bursts that cannot be read are told and leave nothing."""

import hashlib
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from host import Host
from stream import Monitor, Pauses, cycles, idle, reset, start

QUEUES = 64


def content(addr):
    """What lies at an address: 16 bytes that nobody else has."""
    return int.from_bytes(hashlib.blake2b(addr.to_bytes(8, "little"), digest_size=16).digest(), "little")


class Bench:
    def __init__(self, dut, host=None, entries=0.0, errors=0.0, hold=40, shape=None, bads=0.0):
        """`errors`: share of bursts that fail; `hold`: cycles that a slot stays taken; `shape`: how large picks are."""
        self.dut, self.hold, self.errors = dut, hold, errors
        self.shape = shape or (lambda: random.randint(1, 4))
        self.base = [random.getrandbits(36) << 12 for _ in range(QUEUES)]
        self.size = [random.randint(2, 64) for _ in range(QUEUES)]
        self.head = [0] * QUEUES
        self.broken = set()
        self.expected, self.bad, self.tooks, self.heads_due = [], [], [], []
        self.free, self.back, self.left = list(range(64)), [], 0
        self.slot_of_entry = None
        self.picked = 0
        idle(dut, rst=1, pick_valid=0, qc_wr_en=0, qc_wr_addr=0, qc_wr_data=0, slot_valid=0, slot=0, slots_free=0)
        self.host = Host(dut, self.read, **(host or {}))
        self.out = Monitor(dut, "f", ("beat", "slot", "queue", "data"), pauses=Pauses(entries), on_word=self.beat)
        Monitor(dut, "bad", ("queue", "count"), pauses=Pauses(bads), on_word=self.told)
        cocotb.start_soon(self.slots())
        cocotb.start_soon(self.heads())

    def read(self, addr):
        return None if addr in self.broken else content(addr)

    async def begin(self):
        await start(self.dut)
        for queue in range(QUEUES):
            await RisingEdge(self.dut.clk)
            self.dut.qc_wr_en.value = 1
            self.dut.qc_wr_addr.value = queue * 4
            self.dut.qc_wr_data.value = self.base[queue] | 1
        await RisingEdge(self.dut.clk)
        self.dut.qc_wr_en.value = 0

    async def slots(self):
        """The free list: a slot is taken by `slot_take` and comes back `hold` cycles after its entry left."""
        d, cycle = self.dut, 0
        taken = False
        while True:
            await RisingEdge(d.clk)
            cycle += 1
            if taken:
                self.slot_of_entry = self.free.pop(0)
            while self.back and self.back[0][0] <= cycle:
                self.free.append(self.back.pop(0)[1])
            d.slot_valid.value = int(bool(self.free))
            d.slot.value = self.free[0] if self.free else random.getrandbits(6)
            d.slots_free.value = len(self.free)
            await FallingEdge(d.clk)
            taken = d.slot_take.value == 1 and d.rst.value == 0
            assert not (taken and not self.free), "a slot taken that is not free"
            self.cycle = cycle

    async def heads(self):
        while True:
            await FallingEdge(self.dut.clk)
            if self.dut.took_valid.value == 1 and self.dut.rst.value == 0:
                self.tooks.append((int(self.dut.took_queue.value), int(self.dut.took_head.value)))

    def beat(self, word):
        queue, index, size = self.expected[0]
        beat = self.left
        assert word["beat"] == beat and word["queue"] == queue, f"{word} where beat {beat} of queue {queue} was due"
        assert word["data"] == content(self.base[queue] + index * 64 + beat * 16), f"beat {beat} of entry {index} of queue {queue} is another's"
        if beat == 0:
            self.slot = word["slot"]
            self.heads_due.append((queue, (index + 1) % size))
        assert word["slot"] == self.slot
        self.left = (beat + 1) % 4
        if beat == 3:
            self.expected.pop(0)
            self.back.append((self.cycle + random.randint(1, self.hold + 1) if self.hold else self.cycle, self.slot))
            self.back.sort()

    def told(self, word):
        assert self.bad.pop(0) == (word["queue"], word["count"])

    async def pick(self, count, rest=None):
        """Offers picks as doorbells does: none before `room` could have followed the one before."""
        d, done = self.dut, 0
        rest = rest or Pauses()
        while done < count:
            await FallingEdge(d.clk)
            room = int(d.room.value)
            await RisingEdge(d.clk)
            if room == 0 or rest.rests():
                continue
            queue = random.randrange(QUEUES)
            size, head = self.size[queue], self.head[queue]
            # As in life: an entry is not asked for again before it was read.
            asked = sum(entry[0] == queue for entry in self.expected) + sum(bad[1] for bad in self.bad if bad[0] == queue)
            n = min(self.shape(), room, size - head, count - done, size - 1 - asked)
            if n < 1:
                continue
            indices = range(head, head + n)
            if random.random() < self.errors:
                entry = random.choice(indices)
                self.broken.add(self.base[queue] + entry * 64 + 16 * random.randrange(4))
                self.bad.append((queue, n))
            else:
                self.broken -= {self.base[queue] + i * 64 + 16 * b for i in indices for b in range(4)}
                self.expected += [(queue, i, size) for i in indices]
            self.head[queue] = (head + n) % size
            done += n
            d.pick_valid.value, d.pick_queue.value, d.pick_index.value = 1, queue, head
            d.pick_count.value, d.pick_wrap.value = n, int(head + n == size)
            while True:
                await FallingEdge(d.clk)
                if d.pick_ready.value == 1:
                    break
            await RisingEdge(d.clk)
            d.pick_valid.value = 0
            for signal in (d.pick_queue, d.pick_index, d.pick_count, d.pick_wrap):
                signal.value = random.getrandbits(len(signal))
            await cycles(d, 2)

    async def drain(self, limit=20000):
        for _ in range(limit):
            if not self.expected and not self.bad:
                break
            await RisingEdge(self.dut.clk)
        assert not self.expected and not self.bad, f"{len(self.expected)} entries and {len(self.bad)} failures never came"
        await cycles(self.dut, 10)
        assert self.tooks == self.heads_due, "the heads told are not the entries'"
        assert self.dut.staged.value == 0 and self.dut.f_valid.value == 0


@cocotb.test()
@cocotb.parametrize(entries=[0.0, 0.7], latency=[2, 60, 250])
async def any_mix(dut, entries, latency):
    bench = Bench(
        dut, dict(latency=latency, jitter=latency, refuse=Pauses(0.3), rest=Pauses(0.2), foreign=[0x80, 0x85, 0xFF]), entries,
        errors=0.1, hold=200, bads=0.5,
    )
    await bench.begin()
    await bench.pick(600, Pauses(0.2))
    await bench.drain()


async def cycles_per_entry(dut, latency, shape, hold):
    bench = Bench(dut, dict(latency=latency, jitter=0, mixed=False), hold=hold, shape=shape)
    await bench.begin()
    cocotb.start_soon(bench.pick(100000))
    while len(bench.out.words) < 400:
        await RisingEdge(dut.clk)
    words, first = len(bench.out.words), bench.cycle
    while len(bench.out.words) < words + 1600:
        await RisingEdge(dut.clk)
    took = (bench.cycle - first) / 400
    dut._log.info(f"{took:.2f} cycles an entry at a latency of {latency}, {bench.host.most} reads in flight")
    return took


@cocotb.test()
async def an_entry_every_4_cycles(dut):
    # Four beats of 16 bytes an entry: the bus is never idle.
    assert await cycles_per_entry(dut, 40, lambda: 4, 0) <= 4.1


@cocotb.test()
async def latency_is_hidden(dut):
    assert await cycles_per_entry(dut, 250, lambda: 4, 0) <= 5.0


@cocotb.test()
async def latency_is_hidden_of_single_entries(dut):
    assert await cycles_per_entry(dut, 250, lambda: 1, 0) <= 6.0


@cocotb.test()
async def reset_in_mid_flight(dut):
    bench = Bench(dut, dict(latency=20, jitter=40), 0.3, errors=0.1, hold=20)
    await bench.begin()
    for _ in range(8):
        task = cocotb.start_soon(bench.pick(1000))
        await cycles(dut, random.randrange(20, 400))
        task.cancel()
        dut.pick_valid.value = 0
        await RisingEdge(dut.clk)
        dut.rst.value = 1
        await cycles(dut, 2)
        for list_ in (bench.expected, bench.bad, bench.tooks, bench.heads_due, bench.back):
            list_.clear()
        bench.left, bench.free[:] = 0, range(64)
        dut.rst.value = 0
        await bench.pick(60)
        await bench.drain()


def test_sq_fetch():
    harness.run("sq_fetch")
    harness.run("sq_fetch", parameters={"AHEAD": 64})


if __name__ == "__main__":
    test_sq_fetch()
