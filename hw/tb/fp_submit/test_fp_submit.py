"""fp_submit.sv: into which commands requests are cut, what is read of the window, which doorbells are rung, and that a command's place is
used again only when it has completed. fp_control's and fp_complete's sides are played here."""

import itertools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from programs import COMPARE, READ, WRITE, Program, any_request
from stream import Monitor, Pauses, Source, cycles, idle, start
from words import CONSTANTS, LAYOUTS

REQUEST = LAYOUTS["request_t"]
WRONG = {0: "FP_GOOD", CONSTANTS["ST_INVALID_OPCODE"]: "FP_OPCODE", CONSTANTS["ST_INVALID_FIELD"]: "FP_FIELD", CONSTANTS["ST_DATA_TRANSFER_ERROR"]: "FP_TRANSFER"}


class Space(Program):
    def begin(self):
        self.reset()
        self.waiting = []              # requests in order
        self.tail = self.told = 0      # places made, told of by doorbells
        self.made = {}                 # place: (tag, command) until it has completed
        self.fetched = set()           # of these, whose entries, and lists, were read
        self.head = None               # the newest place taken of the CQ


class Bench:
    def __init__(self, dut, pace=0.3, completes=0.05):
        self.dut, self.completes = dut, completes
        self.count, self.pages = int(dut.SPACES.value), int(dut.PAGES.value)
        idle(dut, rst=1, clear_want=0, clear_valid=0, clear_at=0, pending=0, big=0, head_tag=0, request=0, look_at=0, look_done=0, took_valid=0, took_space=0, took_index=0)
        self.spaces = [Space(s, 0, 0, 0, 0, random.choice([64, 3000]), random.choice([512, 4096])) for s in range(self.count)]
        dut.big.value = sum((s.block == 4096) << s.space for s in self.spaces)
        for space in self.spaces:
            space.begin()
        self.asks = Source(dut, "ask", ("addr", "beats", "tag"), Pauses(pace / 2))
        Monitor(dut, "ans", ("tag", "data", "last"), Pauses(pace), on_word=self.answer)
        Monitor(dut, "end", ("space", "tag", "status"), Pauses(pace), on_word=self.end)
        Monitor(dut, "bell", ("space", "cq", "value"), Pauses(pace), on_word=self.bell)
        Monitor(dut, "issue", ("at", "all", "count"), on_word=self.issue, holds=False)
        self.reads, self.bells, self.lists, self.done, self.ended = [], 0, 0, 0, 0
        self.issued = {}

    async def begin(self):
        await start(self.dut)
        for row in range(32 * self.count):
            self.dut.clear_want.value = self.dut.clear_valid.value = 1
            self.dut.clear_at.value = row
            await RisingEdge(self.dut.clk)
        self.dut.clear_want.value = self.dut.clear_valid.value = 0
        cocotb.start_soon(self.run())

    def give(self):
        space = random.choice(self.spaces)
        free = [tag for tag in range(32) if tag not in space.outstanding]
        if free:
            request = any_request(random.choice(free), space.pages, space.block)
            space.waiting.append(request)
            space.accept(request)

    async def run(self):
        d = self.dut
        while True:
            await RisingEdge(d.clk)
            d.pending.value = sum(bool(s.waiting) << s.space for s in self.spaces)
            d.look_done.value = d.took_valid.value = 0
            flying = [s for s in self.spaces if s.fetched]
            done = random.random() < self.completes and flying
            if done:
                space = random.choice(flying)
                place = random.choice(sorted(space.fetched))
                d.look_at.value = space.space * 32 + place
            await FallingEdge(d.clk)
            # Combinational answers.
            s = int(d.head_space.value) % self.count
            if self.spaces[s].waiting:
                d.head_tag.value = self.spaces[s].waiting[0].tag
            s, tag = int(d.request_at.value) // 32 % self.count, int(d.request_at.value) % 32
            if self.spaces[s].waiting and self.spaces[s].waiting[0].tag == tag:
                d.request.value = self.pack(self.spaces[s], self.spaces[s].waiting[0])
            else:
                d.request.value = random.getrandbits(REQUEST.width)
            if done:
                tag, _ = space.made[place]
                assert d.look_busy.value == 1 and int(d.look_tag.value) == tag
                d.look_done.value, d.took_valid.value, d.took_space.value = 1, 1, space.space
                space.head = space.head + 1 & 31 if space.head is not None else 0
                d.took_index.value = space.head
                del space.made[place]
                space.fetched.remove(place)
                space.ended(tag, 0)
                self.done += 1
                if space.outstanding[tag][2] == 0:
                    del space.outstanding[tag]
            if d.pop.value == 1:
                self.spaces[int(d.head_space.value)].waiting.pop(0)

    def pack(self, space, request):
        wrong = request.wrong(space.pages, space.block) or 0
        return REQUEST.pack(wrong=CONSTANTS[WRONG[wrong]], opcode=request.opcode & 15, durable=request.durable, offset=(request.offset >> 2) % (1 << 28),
                            lba=request.lba, blocks_z=(request.blocks - 1) % 65536)

    def issue(self, word):
        space, tag = self.spaces[word["at"] // 32], word["at"] % 32
        of, command = space.expected.pop(0)
        assert of == tag
        count = self.issued[word["at"]] = self.issued.get(word["at"], 0) + 1
        assert word["count"] == count and word["all"] == (not space.expected or space.expected[0][0] != tag)
        if word["all"]:
            del self.issued[word["at"]]
        assert space.tail not in space.made, f"place {space.tail} is in use"
        space.made[space.tail] = tag, command
        space.tail = (space.tail + 1) % 32
        assert len(space.made) <= 31

    def end(self, word):
        space = self.spaces[word["space"]]
        request, statuses, left = space.outstanding.pop(word["tag"])
        assert word["status"] == statuses[0] != 0 and left == 0
        self.ended += 1

    def bell(self, word):
        space = self.spaces[word["space"]]
        self.bells += 1
        if word["cq"]:
            assert space.head is not None and (space.head + 1 - word["value"]) % 32 < 31
            space.c_told = word["value"]
            return
        assert (word["value"] - space.told) % 32 <= (space.tail - space.told) % 32, "a doorbell of places that are not made"
        while space.told != word["value"]:
            count = min((word["value"] - space.told) % 32, 32 - space.told, random.randint(1, 4))
            self.ask(space.space << 10 | space.told << 2, 4 * count, self.entries, space, space.told)
            space.told = (space.told + count) % 32

    # ---- Reads of the window

    def ask(self, address, beats, then, *arguments):
        tag = random.getrandbits(12)
        self.reads.append((tag, beats, [], then, arguments))
        self.asks.send(dict(addr=address, beats=beats, tag=tag))

    def answer(self, word):
        tag, beats, data, then, arguments = self.reads[0]
        data.append(word["data"])
        assert word["tag"] == tag and word["last"] == (len(data) == beats)
        if word["last"]:
            self.reads.pop(0)
            then(data, *arguments)

    def entries(self, data, space, place):
        for at in range(0, len(data), 4):
            index = place + at // 4
            _, (opcode, durable, offset, lba, blocks) = space.made[index]
            low = [word & (1 << 64) - 1 for word in data[at:at + 4]]
            high = [word >> 64 for word in data[at:at + 4]]
            assert low[0] == opcode | index << 16 | 1 << 32 and high[0] == low[1] == high[3] == 0 and high[2] == lba
            assert low[3] == blocks - 1 | durable << 30
            more = (offset % 4096 + blocks * space.block - 1) // 4096
            if opcode not in (READ, WRITE, COMPARE):
                more = 0
            else:
                assert high[1] == offset
            if more == 1:
                assert low[2] == offset // 4096 * 4096 + 4096
            if more < 2:
                space.fetched.add(index)
                continue
            assert low[2] == (self.pages - 1) << 21 | space.space << 14 | 1 << 13 | index << 8
            self.ask((low[2] & 0x3FFFF) >> 4, (more + 1) // 2, self.list, space, index, offset, more)

    def list(self, data, space, index, offset, more):
        found = [word >> 64 * half & (1 << 64) - 1 for word in data for half in range(2)]
        assert found[:more] == [(offset // 4096 + 1 + k) * 4096 for k in range(more)]
        space.fetched.add(index)
        self.lists += 1

    async def quiet(self):
        for _ in range(60000):
            await FallingEdge(self.dut.clk)
            if not any(s.outstanding for s in self.spaces):
                break
        else:
            raise AssertionError(f"left: {[s.outstanding for s in self.spaces]}")
        await cycles(self.dut, 60)
        assert self.dut.busy.value == 0
        for space in self.spaces:
            assert space.head is None or space.c_told == (space.head + 1) % 32


@cocotb.test()
async def mixed(dut):
    bench = Bench(dut)
    await bench.begin()
    for _ in range(12000):
        await RisingEdge(dut.clk)
        if random.random() < 0.03:
            bench.give()
    bench.completes = 0.5
    await bench.quiet()
    assert bench.done > 200 and bench.lists > 50 and bench.ended > 10


@cocotb.test()
async def full(dut):
    """Nothing completes: 31 commands of each space are made, and no more; then all the others."""
    bench = Bench(dut, pace=0.0, completes=0.0)
    await bench.begin()
    for lap in range(3):
        bench.completes = 0.0
        for _ in range(20000):
            await RisingEdge(dut.clk)
            bench.give()
            if all(len(space.made) == 31 for space in bench.spaces):
                break
        await cycles(dut, 500)
        assert all(len(space.made) == 31 for space in bench.spaces)
        bench.completes = 0.9
        await bench.quiet()


@cocotb.test()
async def turns(dut):
    """A space with large requests does not keep the others waiting: commands are made in turn."""
    bench = Bench(dut, pace=0.0, completes=1.0)
    await bench.begin()
    order = []
    Monitor(dut, "issue", ("at",), on_word=lambda word: order.append(word["at"] // 32), holds=False)
    for _ in range(3000):
        await RisingEdge(dut.clk)
        bench.give()
    longest = max(len(list(run)) for _, run in itertools.groupby(order[20:]))
    assert len(bench.spaces) == 1 or longest < 40, f"{longest} commands of one space after another"
    await bench.quiet()


def test_fp_submit():
    harness.run("fp_submit", sources=["arbiter"], parameters={"SPACES": 3})
    harness.run("fp_submit", sources=["arbiter"])
    harness.run("fp_submit", sources=["arbiter"], parameters={"SPACES": 16, "PAGES": 64})


if __name__ == "__main__":
    test_fp_submit()
