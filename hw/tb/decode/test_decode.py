"""decode.sv: every field of random entries, every refusal, one command each 4 cycles, reset between two beats."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import Timer

import harness
from stream import Monitor, Pauses, Source, cycles, reset, start
from words import COMMAND, CONSTANTS, OWNER


def entry():
    """An entry, and what decode is to make of it."""
    opcode = random.choice([0, 1, 2, 5, 8] * 3 + [random.getrandbits(8)])
    fuse, psdt = (random.choice([0] * 8 + [1, 2, 3]) for _ in range(2))
    prp1 = random.getrandbits(64) & ~(random.choice([0, 3, 3]))
    e = dict(slot=random.getrandbits(6), queue=random.getrandbits(6), opcode=opcode, nsid=random.getrandbits(32), prp1=prp1,
             prp2=random.getrandbits(64), slba=random.getrandbits(64), cdw12=random.getrandbits(32))
    cid = random.getrandbits(16)
    beats = [opcode | fuse << 8 | random.getrandbits(4) << 10 | psdt << 14 | cid << 16 | e["nsid"] << 32 | random.getrandbits(64) << 64,
             random.getrandbits(64) | prp1 << 64, e["prp2"] | e["slba"] << 64, e["cdw12"] | random.getrandbits(96) << 32]
    ended, late, status = 0, 0, "ST_SUCCESS"
    if opcode not in (0, 1, 2, 5, 8):
        ended, status = 1, "ST_INVALID_OPCODE"
    elif fuse or psdt:
        ended, status = 1, "ST_INVALID_FIELD"
    elif opcode == 8 and e["cdw12"] >> 23 & 1:
        late, status = 1, "ST_INVALID_FIELD"
    elif opcode in (1, 2, 5) and prp1 % 4:
        late, status = 1, "ST_PRP_OFFSET_INVALID"
    return e | dict(ended=ended, late=late, status=CONSTANTS[status]), cid, beats


class World:
    def __init__(self, dut, come, go):
        self.source = Source(dut, "f", ("beat", "slot", "queue", "data"), Pauses(come))
        self.dut, self.got, self.owned = dut, [], []
        self.sink = Monitor(dut, "d", (), Pauses(go), on_word=lambda _: self.got.append(COMMAND.unpack(int(dut.d.value))))
        self.own = Monitor(dut, "own", ("slot",), on_word=self.on_own, holds=False)
        dut.rst.value = 1

    def on_own(self, word):
        self.owned.append((word["slot"], OWNER.unpack(int(self.dut.own.value)), len(self.got)))

    async def run(self, count):
        sent = [entry() for _ in range(count)]
        for e, _, beats in sent:
            for beat, data in enumerate(beats):
                self.source.send(dict(beat=beat, slot=e["slot"], queue=e["queue"], data=data))
        for _ in range(count * 60):
            if len(self.got) == count:
                break
            await cycles(self.dut, 1)
        assert self.got == [e for e, _, _ in sent]
        for at, (e, cid, _) in enumerate(sent):
            assert self.owned[at][:2] == (e["slot"], dict(queue=e["queue"], cid=cid))
            assert self.owned[at][2] <= at, "its owner is told after it has left"
        self.got.clear()
        self.owned.clear()


@cocotb.test()
@cocotb.parametrize(come=[0.0, 0.5], go=[0.0, 0.6])
async def fields(dut, come, go):
    world = World(dut, come, go)
    await Timer(1, "ns")
    await start(dut)
    await world.run(400)


@cocotb.test()
async def full_speed(dut):
    world = World(dut, 0.0, 0.0)
    await Timer(1, "ns")
    await start(dut)
    for _ in range(50):
        e, _, beats = entry()
        for beat, data in enumerate(beats):
            world.source.send(dict(beat=beat, slot=e["slot"], queue=e["queue"], data=data))
    await cycles(dut, 205)
    assert len(world.got) == 50, f"{len(world.got)} in 205 cycles"


@cocotb.test()
async def reset_between_beats(dut):
    world = World(dut, 0.3, 0.3)
    await Timer(1, "ns")
    await start(dut)
    for _ in range(20):
        e, _, beats = entry()
        for beat, data in enumerate(beats):
            world.source.send(dict(beat=beat, slot=e["slot"], queue=e["queue"], data=data))
        await cycles(dut, random.randrange(1, 8))
        dut.rst.value = 1
        world.source.clear()
        await cycles(dut, 3)
        world.got.clear()
        world.owned.clear()
        dut.rst.value = 0
        await world.run(5)


def test_decode():
    harness.run("decode")


if __name__ == "__main__":
    test_decode()
