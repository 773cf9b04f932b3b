"""completion.sv against rings in Python: where an entry goes, its phase, SQ head and identifiers; what follows from it, and in which order."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from stream import Monitor, Pauses, Source, cycles, idle, reset, start
from words import OWNER


class Ring:
    """A completion queue as the guest sees it."""

    def __init__(self):
        self.base = random.getrandbits(36) << 12
        self.size = random.choice([2, 3, 4, 63, 64, random.randint(2, 64)])
        self.reset()

    def reset(self):
        self.tail, self.phase, self.sq_head = 0, 1, 0

    def post(self):
        self.tail += 1
        if self.tail == self.size:
            self.tail, self.phase = 0, self.phase ^ 1


class Bench:
    def __init__(self, dut, writes=0.0, irqs=0.0, queues=64, comes=0.0):
        self.dut, self.queues = dut, random.sample(range(64), queues)
        self.rings = {queue: Ring() for queue in self.queues}
        self.expected, self.posted, self.irqs, self.frees = [], [], [], []
        idle(dut, rst=1, qc_wr_valid=0, qc_wr_en=0, qc_wr_addr=0, qc_wr_data=0, took_valid=0, took_queue=0, took_head=0)
        self.commands = Source(dut, "cpl", ("slot", "owner", "status"), pauses=Pauses(comes))
        Monitor(dut, "cpl", ("slot", "owner", "status"), on_word=self.taken)
        Monitor(dut, "cqe", ("addr", "data"), pauses=Pauses(writes), on_word=self.entry)
        Monitor(dut, "irq", ("queue",), pauses=Pauses(irqs), on_word=lambda word: self.pop(self.irqs, word["queue"]))
        cocotb.start_soon(self.follow())

    async def begin(self):
        await start(self.dut)
        for queue in self.queues:
            await self.enable(queue)

    async def write(self, queue, word, data):
        d = self.dut
        d.qc_wr_valid.value, d.qc_wr_addr.value, d.qc_wr_data.value = 1, queue * 4 + word, data
        await cycles(d, random.randint(1, 3))
        while True:
            # The others' readiness comes in the same cycle.
            await FallingEdge(d.clk)
            d.qc_wr_en.value = int(d.qc_wr_ready.value)
            done = d.qc_wr_ready.value == 1
            await RisingEdge(d.clk)
            if done:
                break
        d.qc_wr_en.value = d.qc_wr_valid.value = 0

    async def enable(self, queue):
        ring = self.rings[queue]
        await self.write(queue, 1, random.getrandbits(1) | ring.size << 8)
        await self.write(queue, 2, ring.base)
        await self.write(queue, 0, random.getrandbits(36) << 12 | 1)
        ring.reset()

    def send(self):
        self.commands.send({
            "slot": random.randrange(64), "status": random.getrandbits(15),
            "owner": OWNER.pack(queue=random.choice(self.queues), cid=random.getrandbits(16)),
        })

    def taken(self, word):
        owner = OWNER.unpack(word["owner"])
        # It may show any SQ head from here on.
        self.heads[owner["queue"]] = self.heads[owner["queue"]][-1:]
        self.expected.append((word["slot"], owner, word["status"]))

    def entry(self, word):
        slot, owner, status = self.expected.pop(0)
        ring, queue = self.rings[owner["queue"]], owner["queue"]
        assert word["addr"] == ring.base + ring.tail * 16, f"queue {queue}: entry {ring.tail} went to {word['addr']:#x}"
        dw = [word["data"] >> 32 * i & 0xFFFFFFFF for i in range(4)]
        assert dw[0] == 0 and dw[1] == 0
        assert dw[2] >> 16 == queue % 4 + 1
        assert dw[2] & 0xFFFF in self.heads[queue], f"queue {queue}: SQ head {dw[2] & 0xFFFF} of {self.heads[queue]}"
        assert dw[3] == owner["cid"] | ring.phase << 16 | status << 17
        ring.post()
        self.posted.append((queue, ring.tail, ring.phase))
        self.frees.append(slot)
        self.irqs.append(queue)

    def pop(self, expected, word):
        assert expected and expected.pop(0) == word

    heads = None

    async def follow(self):
        """SQ heads, and the pulses that follow an entry: in the cycle after it was taken."""
        d = self.dut
        taken = False
        self.heads = {queue: [0] for queue in self.queues}
        took = None
        while True:
            await RisingEdge(d.clk)
            if took:
                self.heads[took[0]].append(took[1])
            took = None
            d.took_valid.value = 0
            if random.random() < 0.2 and d.qc_wr_valid.value == 0 and d.rst.value == 0:
                took = random.choice(self.queues), random.randrange(64)
                d.took_valid.value, d.took_queue.value, d.took_head.value = 1, *took
            await FallingEdge(d.clk)
            assert d.posted_valid.value == d.free_valid.value
            if d.posted_valid.value == 1 and d.rst.value == 0:
                assert taken, "told of an entry that was not taken the cycle before"
                self.pulse = int(d.posted_queue.value), int(d.posted_tail.value), int(d.posted_phase.value), int(d.free_slot.value)
                cocotb.start_soon(self.compare(self.pulse))
            taken = d.cqe_valid.value == 1 and d.cqe_ready.value == 1

    async def compare(self, pulse):
        await RisingEdge(self.dut.clk)
        self.pop(self.posted, pulse[:3])
        self.pop(self.frees, pulse[3])

    async def drain(self):
        await self.commands.wait()
        for _ in range(5000):
            await RisingEdge(self.dut.clk)
            if self.dut.busy.value == 0 and not self.expected:
                break
        await cycles(self.dut, 3)
        assert not self.expected and not self.posted and not self.irqs and not self.frees, "something was never told"


@cocotb.test()
@cocotb.parametrize(writes=[0.0, 0.7], irqs=[0.0, 0.7])
async def rings(dut, writes, irqs):
    bench = Bench(dut, writes, irqs, comes=0.2)
    await bench.begin()
    for _ in range(600):
        bench.send()
    await bench.drain()


@cocotb.test()
async def laps(dut):
    bench = Bench(dut, 0.1, 0.1, queues=2)
    await bench.begin()
    for _ in range(400):
        bench.send()
    await bench.drain()


@cocotb.test()
async def full_speed(dut):
    bench = Bench(dut)
    await bench.begin()
    for _ in range(300):
        bench.send()
    await cycles(dut, 300)
    assert bench.commands.sent >= 97, "an entry every 3 cycles"
    await bench.drain()


@cocotb.test()
async def enabled_anew(dut):
    bench = Bench(dut, 0.3, 0.3, queues=6)
    await bench.begin()
    for _ in range(30):
        for _ in range(random.randint(1, 20)):
            bench.send()
        await bench.drain()
        queue = random.choice(bench.queues)
        bench.rings[queue].size = random.randint(2, 64)
        await bench.enable(queue)
        bench.heads[queue] = [0]


@cocotb.test()
async def reset_in_mid_flight(dut):
    bench = Bench(dut, 0.3, 0.3, queues=8)
    await bench.begin()
    for _ in range(10):
        for _ in range(40):
            bench.send()
        await cycles(dut, random.randrange(10, 150))
        await RisingEdge(dut.clk)
        dut.rst.value = 1
        bench.commands.clear()
        await cycles(dut, 2)
        for list_ in (bench.expected, bench.posted, bench.irqs, bench.frees):
            list_.clear()
        dut.rst.value = 0
        assert dut.cqe_valid.value == 0
        for queue in bench.queues:
            await bench.enable(queue)
            bench.heads[queue] = [0]
        for _ in range(40):
            bench.send()
        await bench.drain()


def test_completion():
    harness.run("completion")


if __name__ == "__main__":
    test_completion()
