"""fp_complete.sv against a reference: entries of many requests' commands in any order, joined into records; requests without a command; entries
that are nobody's; clearing. fp_submit's, fp_control's and fp_statistics' sides are played here."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from stream import Monitor, Pauses, Source, cycles, idle, start


class Bench:
    def __init__(self, dut, pace=0.3, begins=0.1):
        self.dut, self.begins = dut, begins
        self.spaces = int(dut.SPACES.value)
        idle(dut, rst=1, clear_want=0, clear_valid=0, clear_at=0, look_busy=0, look_tag=0, issue_valid=0, issue_at=0, issue_all=0, issue_count=0,
             go_valid=0, go_at=0, ring_base=0, ring_refused=0, stat_ready=0)
        self.entries = Source(dut, "w", ("addr", "data"), Pauses(pace))
        self.ends = Source(dut, "end", ("space", "tag", "status"), Pauses(pace))
        Monitor(dut, "rec", ("addr", "data"), Pauses(pace), on_word=self.record)
        self.rings = [random.getrandbits(39) for _ in range(self.spaces)]
        self.clear()
        self.cycle, self.done, self.strays, self.largest = 0, 0, 0, 0
        self.pace = pace

    def clear(self):
        self.requests = {}                       # (space, tag): what it is
        self.owners = {}                         # (space, place): (tag, status), in flight
        self.places = [0] * self.spaces          # of the record rings
        self.c_tails = [0] * self.spaces
        self.to_go, self.took = [], []
        self.fields = []                         # of entries offered: what becomes of them
        self.entries.clear()
        self.ends.clear()

    async def begin(self):
        await start(self.dut)
        await self.sweep(range(self.spaces))
        cocotb.start_soon(self.run())

    async def sweep(self, spaces):
        d = self.dut
        d.clear_want.value = 1
        await FallingEdge(d.clk)
        while d.still.value == 0:
            await FallingEdge(d.clk)
        for space in spaces:
            for row in range(32):
                await RisingEdge(d.clk)
                d.clear_valid.value, d.clear_at.value = 1, space * 32 + row
        await RisingEdge(d.clk)
        d.clear_valid.value = d.clear_want.value = 0

    def new(self):
        """A request begins; its commands are made one after another."""
        space, tag = random.randrange(self.spaces), random.randrange(32)
        if (space, tag) in self.requests:
            return
        count = random.choice([0, 1, 1, 1, 2, 5, 40])
        self.requests[space, tag] = dict(left=count, made=0, count=count, statuses=[], began=None)
        self.to_go.append((space, tag))

    async def run(self):
        d = self.dut
        while True:
            await RisingEdge(d.clk)
            self.cycle += 1
            d.go_valid.value = d.issue_valid.value = 0
            d.stat_ready.value = int(random.random() >= self.pace) if d.rec_valid.value == 0 else 1
            if random.random() < self.begins:
                self.new()
            if self.to_go:
                space, tag = self.to_go.pop(0)
                request = self.requests[space, tag]
                request["began"] = self.cycle
                d.go_valid.value, d.go_at.value = 1, space * 32 + tag
                if not request["count"]:
                    request["statuses"].append(random.getrandbits(15) | 1)
                    self.ends.send(dict(space=space, tag=tag, status=request["statuses"][0]))
            self.make()
            self.complete()
            await FallingEdge(d.clk)
            self.look()
            space = int(d.ended_space.value) % self.spaces
            d.ring_base.value, d.ring_refused.value = self.rings[space], space + 7
            if d.took_valid.value == 1:
                assert (int(d.took_space.value), int(d.took_index.value)) == self.took.pop(0)

    def make(self):
        d = self.dut
        ready = [key for key, request in self.requests.items() if request["began"] is not None and request["made"] < request["count"] and request["began"] < self.cycle]
        if not ready or random.random() < 0.3:
            return
        space, tag = random.choice(ready)
        strays = [field[1] for field in self.fields if field[0] == space]
        free = [place for place in range(32) if (space, place) not in self.owners and place not in strays]
        if len(free) < 2:
            return
        request = self.requests[space, tag]
        request["made"] += 1
        d.issue_valid.value, d.issue_at.value, d.issue_count.value = 1, space * 32 + tag, request["made"]
        d.issue_all.value = int(request["made"] == request["count"])
        self.owners[space, random.choice(free)] = [tag, self.cycle + random.randint(2, 60), False]

    def complete(self):
        ready = [key for key, owner in self.owners.items() if owner[1] <= self.cycle and not owner[2]]
        if ready and random.random() < 0.4 and len(self.entries.words) < 40:
            space, place = random.choice(ready)
            self.owners[space, place][2] = True
            self.post(space, place, random.choice([0, 0, 0, random.getrandbits(15)]))
        elif self.begins and random.random() < 0.02:
            # Beside the queues, or of a command that is not there.
            space = random.randrange(self.spaces)
            idle_ = [place for place in range(32) if (space, place) not in self.owners]
            if random.random() < 0.5:
                self.entries.send(dict(addr=random.choice([space << 10, space << 10 | 1 << 9, self.spaces << 10 | 1 << 8]) % 16384 if self.spaces < 16 else space << 10, data=random.getrandbits(32)))
            elif idle_:
                self.strays += 1
                self.post(space, random.choice(idle_), 0)

    def post(self, space, place, status):
        index = self.c_tails[space]
        self.c_tails[space] = (index + 1) % 32
        self.took.append((space, index))
        self.fields.append((space, place, status))
        self.entries.send(dict(addr=space << 10 | 1 << 8 | index, data=status << 17 | random.getrandbits(1) << 16 | random.getrandbits(11) << 5 | place))

    def look(self):
        """fp_submit's answer, combinational: whose command is it."""
        d = self.dut
        space, place = int(d.look_at.value) // 32, int(d.look_at.value) % 32
        owner = self.owners.get((space, place))
        mine = bool(self.fields) and self.fields[0][:2] == (space, place)
        d.look_busy.value = int(bool(owner) and owner[2])
        d.look_tag.value = owner[0] if owner else random.getrandbits(5)
        # In the cycle after a change of `look_at`, what was set above is seen by the next rising edge: it is the one that counts.
        if mine and self.looking():
            space, place, status = self.fields.pop(0)
            if owner and owner[2]:
                del self.owners[space, place]
                request = self.requests[space, owner[0]]
                request["statuses"].append(status)
                request["left"] -= 1

    def looking(self):
        """Whether the module is in the step that looks: it says so by `look_done`, or goes on without."""
        return int(self.dut.step.value) == 1

    def record(self, word):
        d = self.dut
        space = int(d.ended_space.value)
        assert word["addr"] == self.rings[space] << 9 | self.places[space] % 32 << 4
        dw = [word["data"] >> 32 * i & 0xFFFFFFFF for i in range(4)]
        assert dw[3] >> 16 & 1 == 1 - self.places[space] // 32 % 2 and dw[2] == space + 7 and dw[1] == 0
        self.places[space] += 1
        tag = dw[3] & 0xFFFF
        assert int(d.ended_at.value) == space * 32 + tag and d.ended_valid.value == 1
        request = self.requests.pop((space, tag))
        assert request["left"] == 0 and request["made"] == request["count"], f"{request} ends early"
        assert dw[3] >> 17 == next((status for status in request["statuses"] if status), 0)
        assert dw[0] == int(d.stat_cycles.value) and 0 < dw[0] <= self.cycle - request["began"] + 1
        self.done += 1
        self.largest = max(self.largest, request["count"])

    async def quiet(self):
        self.begins = 0
        for _ in range(60000):
            await FallingEdge(self.dut.clk)
            if not self.requests and not self.fields and not self.entries.words:
                break
        else:
            raise AssertionError(f"left: {self.requests}")
        await cycles(self.dut, 10)
        assert self.dut.busy.value == 0 and not self.took


@cocotb.test()
async def joins(dut):
    bench = Bench(dut)
    await bench.begin()
    while bench.done < 400:
        await RisingEdge(dut.clk)
    await bench.quiet()
    assert bench.largest == 40 and bench.strays > 0


@cocotb.test()
async def fast(dut):
    bench = Bench(dut, pace=0.0, begins=0.3)
    await bench.begin()
    while bench.done < 400:
        await RisingEdge(dut.clk)
    await bench.quiet()


@cocotb.test()
async def clears(dut):
    """All of a module's spaces are begun anew, whatever half-joined requests they had."""
    bench = Bench(dut)
    await bench.begin()
    for _ in range(5):
        for _ in range(random.randint(50, 500)):
            await RisingEdge(dut.clk)
        begins, bench.begins = bench.begins, 0
        dut.rst.value = 1
        await cycles(dut, 2)
        bench.clear()
        await cycles(dut, 2)
        bench.clear()
        dut.rst.value = 0
        await bench.sweep(range(bench.spaces))
        bench.begins = begins
    await bench.quiet()


def test_fp_complete():
    harness.run("fp_complete", sources=["fifo"], parameters={"SPACES": 3})
    harness.run("fp_complete", sources=["fifo"])
    harness.run("fp_complete", sources=["fifo"], parameters={"SPACES": 16})


if __name__ == "__main__":
    test_fp_complete()
