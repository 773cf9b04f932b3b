"""engine.sv with FastPath: programs' requests, verified against what the disks have, beside guests with queues of their own."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge

import harness
from disk import COMPARE, COMPARE_FAILURE, FLUSH, READ, WRITE, ZEROES
from programs import Program, Request
from stream import cycles
from system import PAGE, SHARE, System
from words import CONSTANTS

WINDOW = 0xFFFF_FFE0_0000
PLACE = 320 << 10        # of a tag, in the buffer
BIG = 2 << 20


class Application(Program):
    """A program with its buffer, its blocks and its place in a core."""

    def __init__(self, system, space, function, core, local):
        self.system, self.disk = system, random.randrange(system.ssds)
        block = random.choice([512, 4096])
        super().__init__(space, function, core, local, system.memory.frame() << 21, 32 * PLACE // PAGE, block)
        self.first, self.count = (200 + space) << 24, 1 << 20
        self.frames = [system.memory.frame() for _ in range((32 * PLACE + BIG - 1) // BIG)]
        system.memory.give(self.ring)
        for at in range(0, 32 * PLACE, PAGE):
            system.memory.give(self.at(at))
        self.blocks, self.busy, self.flags, self.taken = {}, set(), 0, 0

    def at(self, offset):
        """Where a byte of the buffer is."""
        return self.frames[offset // BIG] << 21 | offset % BIG

    def bytes(self, offset, length):
        parts = []
        while length:
            here = min(length, PAGE - offset % PAGE)
            parts.append(self.system.memory.read(self.at(offset), here))
            offset, length = offset + here, length - here
        return b"".join(parts)

    def put(self, offset, data):
        while data:
            here = min(len(data), PAGE - offset % PAGE)
            self.system.memory.write(self.at(offset), data[:here])
            offset, data = offset + here, data[here:]

    def content(self, lba, blocks):
        return b"".join(self.blocks.get(at) or (self.first + at).to_bytes(8, "little") * (self.block // 8) for at in range(lba, lba + blocks))

    async def open(self):
        system, core = self.system, self.core << 16
        for page in range(system.pages):
            row = self.frames[page] << 21 | 3 if page < len(self.frames) else 0
            await system.write(core | 0x8000 + self.local * system.pages + page, WINDOW | 1 if page == system.pages - 1 else row)
        for word, value in enumerate([1 | (4 << 32 if self.block == 4096 else 0) | 1 << 40 | SHARE | 1 << 48 + self.disk, self.count, self.first, 0, 0]):
            await system.write(core | 0x3000 + 16 * self.local + word, value)
        queue = core | 0x1000 + 4 * self.local * system.qp
        window = WINDOW + 0x4000 * self.space
        for word, value in ((1, 32 | 32 << 8), (2, window + 0x1000), (0, window | 1)):
            await system.write(queue + word, value)
        self.reset()
        for register, value in self.setup():
            await system.write(register, value)

    async def close(self):
        base = 0xF7C00 + 0x40 * self.space
        await self.system.write(base, 0)
        while await self.system.read(base + 3) & 63:
            pass
        queue = self.core << 16 | 0x1000 + 4 * self.local * self.system.qp
        await self.system.write(queue, 0)
        while await self.system.read(queue + 3) >> 33 & 127:
            pass

    async def statistics(self):
        self.check_statistics([await self.system.read(0xF7C20 + 0x40 * self.space + row) for row in range(32)])

    # ---- Requests
    def submit(self):
        free = [tag for tag in range(32) if tag not in self.outstanding]
        if not free:
            return False
        tag = random.choice(free)
        opcode = random.choice([READ, READ, READ, WRITE, WRITE, WRITE, COMPARE, ZEROES, FLUSH])
        blocks = random.randint(1, random.choice([8, 4 * PAGE, 128 << 10, PLACE - PAGE]) // self.block or 1)
        lba = random.randrange(self.count - blocks)
        offset = tag * PLACE + 4 * random.randrange((PLACE - blocks * self.block) // 4 + 1)
        request = Request(tag, opcode, offset, lba, blocks, random.getrandbits(1))
        if opcode != FLUSH and random.random() < 0.05:
            request.lba = random.choice([self.count, self.count - blocks + 1, 1 << 40])
        elif random.random() < 0.05:
            request.offset = random.choice([offset | 1, 32 * PLACE, 1 << 29])
        elif opcode != FLUSH and self.busy & set(range(lba, lba + blocks)):
            return False
        self.busy.update(range(lba, lba + blocks))
        if opcode in (WRITE, COMPARE) and request.offset == offset:
            known = opcode == COMPARE and random.random() < 0.6
            request.data = self.content(lba, blocks) if known and request.lba == lba else random.randbytes(blocks * self.block)
            self.put(offset, request.data)
        self.accept(request)
        for word in request.writes():
            self.system.bells.append((self.function, *word))
        return True

    def record(self, address, data):
        """Checks a request's status and data."""
        tag, status = data >> 96 & 0xFFFF, data >> 113
        request = self.outstanding[tag][0]
        wrong = request.wrong(self.pages, self.block)
        beyond = request.opcode != FLUSH and request.lba + request.blocks > self.count
        expected = wrong or (CONSTANTS["ST_LBA_OUT_OF_RANGE"] if beyond else 0)
        content = self.content(request.lba, request.blocks)
        if not expected and request.opcode == COMPARE and request.data != content:
            expected = COMPARE_FAILURE
        assert status == expected, f"space {self.space}: {vars(request)} ends with {status:#x}, not {expected:#x}"
        self.outstanding[tag] = [request, [status], 0]
        super().record(address, data)
        self.expected = [entry for entry in self.expected if entry[0] != tag]
        self.busy.difference_update(range(request.lba, request.lba + request.blocks))
        self.taken += 1
        if status:
            # Commands of a request that fails may have been carried out.
            self.busy.difference_update(range(self.count))
            for at in range(request.lba, min(request.lba + request.blocks, self.count)) if request.opcode in (WRITE, ZEROES) and not wrong else ():
                self.blocks[at] = self.system.disks.disks[self.disk].blocks.get(self.first + at)
        elif request.opcode == READ:
            assert self.bytes(request.offset, request.blocks * self.block) == content, f"space {self.space}: {vars(request)}: wrong data"
        elif request.opcode in (WRITE, ZEROES):
            data = request.data if request.opcode == WRITE else bytes(request.blocks * self.block)
            for at in range(request.blocks):
                self.blocks[request.lba + at] = data[at * self.block : (at + 1) * self.block]


class Machine(System):
    """Guests and programs."""

    def __init__(self, dut, **arguments):
        super().__init__(dut, **arguments)
        used = {(guest.core, guest.local) for guest in self.guests}
        places = random.sample([(c, l) for c in range(self.cores) for l in range(16) if (c, l) not in used], int(dut.FASTPATH.value))
        functions = random.sample([f for f in range(256) if f not in self.by_number], len(places))
        self.programs = [Application(self, space, functions[space], *place) for space, place in enumerate(places)]
        self.durable = 0

    async def begin(self):
        await super().begin()
        for program in self.programs:
            await program.open()

    def program_of(self, entry):
        return next((p for p in self.programs if p.first <= entry["lba"] < p.first + p.count), None)

    def accepts(self, entry):
        program = self.program_of(entry) if entry["opcode"] != FLUSH else None
        if program is None:
            return super().accepts(entry)
        assert (entry["core"], entry["disk"]) == (program.core, program.disk)
        lba = entry["lba"] - program.first
        tag, command = next((tag, c) for tag, c in program.expected if (c[0], c[3], c[4]) == (entry["opcode"], lba, entry["nlb"]))
        assert entry["fua"] == command[1]
        self.durable += entry["fua"]
        entry["offset"] = command[2]
        return entry["nlb"] * program.block if entry["opcode"] in (READ, WRITE, COMPARE) else 0

    def addresses(self, entry, pages):
        program = self.program_of(entry) if entry["opcode"] != FLUSH else None
        if program is None:
            return super().addresses(entry, pages)
        if pages:
            first = entry["offset"]
            expected = [program.at(first)] + [program.at(first // PAGE * PAGE + PAGE * more) for more in range(1, len(pages))]
            assert pages == expected

    def block(self, entry):
        program = self.program_of(entry)
        return program.block if program else super().block(entry)

    def _written(self, word):
        assert word["addr"] >> 21 != WINDOW >> 21 or word["kind"], "the window is written outside"
        for program in self.programs:
            if not word["kind"] and program.ring <= word["addr"] < program.ring + 512:
                return program.record(word["addr"], word["data"])
        super()._written(word)

    async def rest(self):
        """All requests end, then all is quiet."""
        for _ in range(3000):
            if not any(program.outstanding for program in self.programs):
                break
            await cycles(self.dut, 20)
        assert not any(program.outstanding for program in self.programs), [list(p.outstanding) for p in self.programs]
        await self.settle()


@cocotb.test()
async def programs_and_guests(dut):
    machine = Machine(dut, guests=4)
    await machine.begin()
    for guest in machine.guests:
        await machine.enable(guest, random.randint(1, machine.qp))
    machine.load, submitted = 0.05, 0
    while submitted < 300:
        await cycles(dut, 10)
        if len(machine.bells) < 8:
            submitted += random.choice(machine.programs).submit()
    await machine.rest()
    for program in machine.programs:
        await program.statistics()
        assert program.taken > 50 and program.failed
    assert machine.durable > 20 and machine.submitted > 50 and await machine.read(0xF7800) == 0


@cocotb.test()
async def opened_and_closed(dut):
    """A program goes and another comes to its place, while others work; then its page is nobody's."""
    machine = Machine(dut, guests=1)
    await machine.begin()
    for _ in range(4):
        for _ in range(15):
            random.choice(machine.programs).submit()
            await cycles(dut, random.randint(1, 60))
        program = random.choice(machine.programs)
        while machine.bells:
            await cycles(dut, 1)
        await cycles(dut, 5)
        await program.close()
        assert not program.outstanding
        refused = await machine.read(0xF7800)
        machine.bells.append((program.function, 0x80C, 2))
        await cycles(dut, 20)
        assert await machine.read(0xF7800) == refused + 1
        await program.open()
    await machine.rest()


@cocotb.test()
async def resets(dut):
    """The whole engine is reset with requests in all stages."""
    machine = Machine(dut, guests=1)
    await machine.begin()
    for _ in range(3):
        for _ in range(random.randint(1, 20)):
            random.choice(machine.programs).submit()
            await cycles(dut, random.randint(1, 80))
        await machine.reset()
        await machine.program()
        for program in machine.programs:
            # What a disk had begun may have been done or not: it tells.
            for request, _, _ in program.outstanding.values():
                for at in range(request.lba, request.lba + request.blocks) if request.opcode in (WRITE, ZEROES) else ():
                    program.blocks[at] = machine.disks.disks[program.disk].blocks.get(program.first + at)
            program.busy.clear()
            await program.open()
    for _ in range(20):
        random.choice(machine.programs).submit()
        await cycles(dut, 20)
    await machine.rest()


@cocotb.test()
async def pace(dut):
    """Small reads of one program alone: how many cycles each takes."""
    machine = Machine(dut, guests=0, rate=0.0, disk=(100, 100))
    await machine.begin()
    program = machine.programs[0]
    begun, done = machine.cycle, 0
    while done < 600:
        for tag in [tag for tag in range(32) if tag not in program.outstanding]:
            request = Request(tag, READ, tag * PLACE, (done * 8) % program.count, PAGE // program.block)
            program.accept(request)
            machine.bells += [(program.function, *word) for word in request.writes()]
            done += 1
        await FallingEdge(dut.clk)
    taken = (machine.cycle - begun) / done
    dut._log.info(f"a request takes {taken:.1f} cycles")
    assert taken < 12
    while program.outstanding:
        await FallingEdge(dut.clk)


def test_fp_engine():
    harness.run("engine", parameters={"FASTPATH": 2, "CORES": 2, "SSDS": 2, "PAGES": 16})
    harness.run("engine", parameters={"FASTPATH": 1, "PAGES": 64, "LISTS": 4})


if __name__ == "__main__":
    test_fp_engine()
