"""interrupts.sv: one message an entry where nothing holds it back; with coalescing after the threshold or the time; none while masked, and
what was held back once it is not; never one for nothing."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from stream import Monitor, Pauses, Source, cycles, idle, start

TICK = 700  # cycles to a unit of time, fewer than in life; a round of the scan takes 200


class Bench:
    def __init__(self, dut, goes=0.0, comes=0.0):
        self.dut = dut
        idle(dut, rst=1, tick=0, qc_wr_valid=0, qc_wr_en=0, qc_wr_addr=0, qc_wr_data=0, fc_wr_en=0, fc_wr_addr=0, fc_wr_data=0)
        self.entries = Source(dut, "irq", ("queue",), pauses=Pauses(comes))
        self.sent = []
        self.cycle, self.last_sent = 0, {}
        Monitor(dut, "msi", ("function", "vector"), pauses=Pauses(goes), on_word=self.message)
        cocotb.start_soon(self.time())

    def message(self, word):
        self.sent.append((word["function"], word["vector"]))
        self.last_sent[word["function"], word["vector"]] = self.cycle

    async def time(self):
        while True:
            await RisingEdge(self.dut.clk)
            self.cycle += 1
            self.dut.tick.value = self.cycle // TICK % 256

    async def write(self, queue, word, data):
        d = self.dut
        d.qc_wr_valid.value, d.qc_wr_addr.value, d.qc_wr_data.value = 1, queue * 4 + word, data
        while True:
            await FallingEdge(d.clk)
            d.qc_wr_en.value = int(d.qc_wr_ready.value)
            done = d.qc_wr_ready.value == 1
            await RisingEdge(d.clk)
            if done:
                break
        d.qc_wr_en.value = d.qc_wr_valid.value = 0

    async def queue(self, queue, vector, enabled=True):
        await self.write(queue, 1, vector << 24 | int(enabled) << 16 | 0x4040)
        await self.write(queue, 0, 0x1001)

    async def function(self, function, threshold=0, time=0, on=False, mask=0):
        d = self.dut
        d.fc_wr_en.value, d.fc_wr_addr.value = 1, function * 8
        d.fc_wr_data.value = threshold | time << 8 | int(on) << 16 | mask << 32 | random.getrandbits(15) << 17
        await RisingEdge(d.clk)
        d.fc_wr_en.value = 0

    async def enter(self, queue, count=1):
        for _ in range(count):
            self.entries.send({"queue": queue})
        await self.entries.wait()

    async def settle(self, limit=60000):
        """Until nothing is to be done any more; then nothing may come."""
        await self.entries.wait()
        for _ in range(limit):
            await FallingEdge(self.dut.clk)
            if self.dut.busy.value == 0:
                break
        else:
            assert False, "busy for ever"
        count = len(self.sent)
        await cycles(self.dut, 500)
        assert len(self.sent) == count and self.dut.busy.value == 0, "there was something to do, though not busy"

    def take(self):
        sent, self.sent = self.sent, []
        return sent


async def begin(dut, *rates):
    bench = Bench(dut, *rates)
    await start(dut)
    await cycles(dut, 70)
    return bench


@cocotb.test()
@cocotb.parametrize(goes=[0.0, 0.6])
async def one_an_entry(dut, goes):
    bench = await begin(dut, goes)
    vectors = {}
    for queue in range(64):
        vectors[queue] = random.randrange(256)
        await bench.queue(queue, vectors[queue], enabled=queue % 5 != 0)
    expected = []
    for _ in range(400):
        queue = random.randrange(64)
        bench.entries.send({"queue": queue})
        if queue % 5:
            expected.append((queue // 4, vectors[queue]))
    await bench.settle()
    # One at a time, so in the order of the entries.
    assert bench.take() == expected


@cocotb.test()
async def full_speed(dut):
    bench = await begin(dut)
    for queue in range(64):
        await bench.queue(queue, 1)
    for _ in range(300):
        bench.entries.send({"queue": random.randrange(64)})
    await cycles(dut, 400)
    assert bench.entries.sent >= 98, "an entry every 4 cycles"
    await bench.settle()


@cocotb.test()
async def threshold(dut):
    bench = await begin(dut, 0.3, 0.3)
    await bench.queue(9, 3)
    for limit in (0, 1, 2, 7, 255):
        await bench.function(2, threshold=limit, time=200, on=True)
        await bench.enter(9, limit)
        await cycles(dut, 1200)
        assert bench.take() == [], f"{limit} entries are not above {limit}"
        await bench.enter(9, 1 + 3 * (limit + 1))
        await cycles(dut, 600)
        assert bench.take() == [(2, 3)] * 4


@cocotb.test()
async def the_time(dut):
    bench = await begin(dut)
    await bench.queue(13, 2)
    await bench.function(3, threshold=100, time=3, on=True)
    await cycles(dut, 300)
    for _ in range(6):
        await cycles(dut, random.randrange(TICK))
        came = bench.cycle
        await bench.enter(13, random.randint(1, 20))
        assert bench.take() == []
        await bench.settle()
        assert bench.take() == [(3, 2)]
        after = bench.last_sent[3, 2] - came
        assert 2 * TICK <= after <= 3 * TICK + 400, f"after {after} cycles"
    # No time: no delay.
    await bench.function(3, threshold=100, time=0, on=True)
    await bench.enter(13, 2)
    await cycles(dut, 30)
    assert bench.take() == [(3, 2)] * 2


@cocotb.test()
async def vector_0_is_never_coalesced(dut):
    bench = await begin(dut)
    await bench.queue(20, 0)
    await bench.queue(21, 1)
    await bench.function(5, threshold=50, time=255, on=True)
    await bench.enter(21, 5)
    await bench.enter(20, 5)
    await cycles(dut, 600)
    assert bench.take() == [(5, 0)] * 5


@cocotb.test()
async def masked_waits(dut):
    bench = await begin(dut, 0.3)
    for queue, vector in ((4, 1), (5, 31), (6, 32), (7, 33)):
        await bench.queue(queue, vector)
    await bench.function(1, mask=0xFFFFFFFF)
    for queue in (4, 5, 6, 7):
        await bench.enter(queue, 3)
    await bench.settle()
    # Only the first 32 vectors have a mask.
    assert sorted(bench.take()) == [(1, 32)] * 3 + [(1, 33)] * 3
    await bench.function(1, mask=1 << 31)
    await bench.settle()
    assert bench.take() == [(1, 1)], "what waited goes out once"
    await bench.function(1)
    await bench.settle()
    assert bench.take() == [(1, 31)]
    await bench.function(1, mask=2)
    await bench.function(1)
    await bench.settle()
    assert bench.take() == []


@cocotb.test()
async def masked_and_coalesced(dut):
    bench = await begin(dut)
    await bench.queue(0, 1)
    await bench.function(0, threshold=3, time=2, on=True, mask=2)
    await bench.enter(0, 2)
    await bench.settle()
    assert bench.take() == []
    await bench.function(0, threshold=3, time=2, on=True)
    await bench.settle()
    assert bench.take() == [(0, 1)]
    # Counting starts anew.
    await bench.enter(0, 3)
    await cycles(dut, 100)
    assert bench.take() == []
    await bench.function(0)
    await bench.settle()
    assert bench.take() == [(0, 1)], "coalescing switched off lets go what it held"


@cocotb.test()
async def enabling_forgets(dut):
    bench = await begin(dut)
    await bench.queue(0, 1)
    await bench.function(0, mask=2)
    await bench.enter(0)
    await bench.settle()
    await bench.queue(0, 1)
    await bench.function(0)
    await bench.settle()
    assert bench.take() == []
    await bench.queue(0, 1, enabled=False)
    await bench.enter(0, 3)
    await bench.settle()
    assert bench.take() == []


@cocotb.test()
async def none_is_forgotten(dut):
    """Anything at any time: in the end every queue that had an entry since its last message has sent one."""
    bench = await begin(dut, 0.3, 0.2)
    for queue in range(64):
        await bench.queue(queue, queue % 4 + 1)
    owed = {}
    Monitor(dut, "irq", ("queue",), on_word=lambda word: owed.__setitem__(word["queue"], bench.cycle))
    counts = {}
    Monitor(dut, "irq", ("queue",), on_word=lambda word: counts.__setitem__(word["queue"], counts.get(word["queue"], 0) + 1))
    for _ in range(150):
        await bench.function(random.randrange(16), random.choice([0, 1, 5, 200]), random.choice([0, 1, 2]), random.random() < 0.6, random.getrandbits(6))
        for _ in range(random.randrange(12)):
            bench.entries.send({"queue": random.randrange(64)})
        await cycles(dut, random.randrange(60))
    for function in range(16):
        await bench.function(function)
    await bench.settle()
    for queue, cycle in owed.items():
        key = queue // 4, queue % 4 + 1
        assert bench.last_sent.get(key, -1) >= cycle, f"queue {queue} has an entry that nobody was told of"
        assert bench.sent.count(key) <= counts[queue], f"queue {queue} had more messages than entries"


@cocotb.test()
async def a_register_waits_for_entries(dut):
    """A write that other modules are not ready for: entries go on, because completion is not ready for the write before they went."""
    bench = await begin(dut)
    await bench.queue(9, 2)
    dut.qc_wr_valid.value, dut.qc_wr_addr.value = 1, 4 * 4
    for _ in range(20):
        bench.entries.send({"queue": 9})
    for _ in range(400):
        await FallingEdge(dut.clk)
        assert not (dut.qc_wr_ready.value == 1 and dut.irq_valid.value == 1), "ready for a write and for an entry"
        if not bench.entries.words:
            break
    assert not bench.entries.words, "entries wait for the register, and the register for them"
    await cycles(dut, 20)
    await FallingEdge(dut.clk)
    assert dut.qc_wr_ready.value == 1
    dut.qc_wr_valid.value = 0
    await bench.settle()
    assert bench.take() == [(2, 2)] * 20


@cocotb.test()
async def reset_in_mid_flight(dut):
    bench = await begin(dut, 0.5)
    for _ in range(8):
        for queue in range(8):
            await bench.queue(queue, 1 + queue)
        await bench.function(0, threshold=9, time=9, on=True)
        await bench.function(1, mask=0xFE)
        for _ in range(30):
            bench.entries.send({"queue": random.randrange(8)})
        await cycles(dut, random.randrange(1, 150))
        dut.rst.value = 1
        bench.entries.clear()
        await cycles(dut, 2)
        dut.rst.value = 0
        bench.take()
        for queue in range(8):
            bench.entries.send({"queue": queue})
        await bench.settle()
        assert bench.take() == [], "after reset nobody wants interrupts"
        await bench.queue(2, 7)
        await bench.enter(2)
        await bench.settle()
        assert bench.take() == [(0, 7)]


def test_interrupts():
    harness.run("interrupts")


if __name__ == "__main__":
    test_interrupts()
