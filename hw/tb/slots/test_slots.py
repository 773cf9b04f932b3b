"""slots.sv against a list of commands: no slot twice, the right owner, legs joined, the first failing status."""

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

import harness
from stream import Monitor, Pauses, Source, cycles, idle, start
from words import OWNER


class Bench:
    def __init__(self, dut, ends=0.0, hold=30, bad=0.3):
        self.dut, self.hold, self.bad, self.ssds = dut, hold, bad, int(os.environ["TEST_SSDS"])
        idle(dut, rst=1, slot_take=0, own_valid=0, own_slot=0, own=0, leg_valid=0, leg_slot=0, leg_count=0, free_valid=0, free_slot=0)
        self.end = Source(dut, "end", ("slot", "status"))
        self.done = Source(dut, "done", ("slot", "status"))
        Monitor(dut, "done", ("slot", "status"), on_word=self.leg_ended)
        self.ended = Monitor(dut, "cpl", ("slot", "owner", "status"), pauses=Pauses(ends), on_word=self.over)
        self.clear()

    def clear(self):
        self.live = {}     # slot: owner, legs left, status, ended
        self.freeing = []  # (when, slot)
        self.legs = []     # (when, slot): to be sent to done
        self.cycle, self.total, self.most = 0, 0, 0
        self.end.clear()
        self.done.clear()

    def status(self):
        return random.randrange(1, 0x8000) if random.random() < self.bad else 0

    def leg_ended(self, word):
        command = self.live[word["slot"]]
        command["legs"] -= 1
        command["status"] = command["status"] or word["status"]

    def over(self, word):
        command = self.live[word["slot"]]
        assert not command["ended"], f"slot {word['slot']} ended twice"
        assert command["legs"] == 0, f"slot {word['slot']} ended with {command['legs']} legs to come"
        assert word["owner"] == command["owner"] and word["status"] == command["status"], f"{word} for {command}"
        command["ended"] = True
        self.freeing.append((self.cycle + random.randint(1, self.hold), word["slot"]))

    async def run(self, count, rest=0.0, legs=16, early=0.3):
        """Takes slots as they become free until `count` commands were started."""
        d, pauses, started, fresh, split = self.dut, Pauses(rest), 0, [], []
        while started < count or self.live:
            await RisingEdge(d.clk)
            self.cycle += 1
            d.own_valid.value = d.leg_valid.value = d.free_valid.value = 0
            for signal in (d.own_slot, d.own, d.leg_slot, d.leg_count, d.free_slot):
                signal.value = random.getrandbits(len(signal))
            # Decode: one of those taken gets its owner, and a while later its legs or its end.
            if fresh and random.random() < 0.5:
                slot = fresh.pop(0)
                owner = OWNER.pack(queue=random.randrange(64), cid=random.getrandbits(16))
                self.live[slot] = {"owner": owner, "legs": 0, "status": 0, "ended": False}
                d.own_valid.value, d.own_slot.value, d.own.value = 1, slot, owner
                split.append(slot)
            elif split and random.random() < 0.8:
                slot = split.pop(random.randrange(len(split)))
                if random.random() < early:
                    self.live[slot]["status"] = status = self.status()
                    self.end.send({"slot": slot, "status": status})
                else:
                    n = random.randint(1, min(legs, self.ssds))
                    self.live[slot]["legs"] = n
                    d.leg_valid.value, d.leg_slot.value, d.leg_count.value = 1, slot, n
                    self.legs += [(self.cycle + random.randint(1, 60), slot) for _ in range(n)]
            self.legs.sort()
            while self.legs and self.legs[0][0] <= self.cycle:
                self.done.send({"slot": self.legs.pop(0)[1], "status": self.status()})
            self.freeing.sort()
            if self.freeing and self.freeing[0][0] <= self.cycle:
                slot = self.freeing.pop(0)[1]
                assert self.live.pop(slot)["ended"]
                d.free_valid.value, d.free_slot.value = 1, slot
            take = started < count and not pauses.rests()
            d.slot_take.value = 0
            # `slot_take` follows `slot_valid` in the same cycle, as in sq_fetch.
            await FallingEdge(d.clk)
            if take and d.slot_valid.value == 1:
                slot = int(d.slot.value)
                assert slot not in self.live and slot not in fresh, f"slot {slot} was given twice"
                d.slot_take.value = 1
                fresh.append(slot)
                started += 1
            self.most = max(self.most, len(self.live) + len(fresh))
        await RisingEdge(d.clk)
        d.slot_take.value = d.free_valid.value = 0
        await cycles(d, 4)
        assert d.slots_free.value == 64


@cocotb.test()
@cocotb.parametrize(ends=[0.0, 0.6], legs=[1, 16])
async def random_commands(dut, ends, legs):
    bench = Bench(dut, ends)
    await start(dut)
    await bench.run(600, 0.1, legs)


@cocotb.test()
async def all_taken(dut):
    bench = Bench(dut, 0.9, hold=200)
    await start(dut)
    await bench.run(400, 0.0, 2)
    assert bench.most == 64


@cocotb.test()
async def ends_do_not_starve_legs_nor_legs_ends(dut):
    bench = Bench(dut, 0.0, hold=1)
    await start(dut)
    for early in (0.0, 0.9, 0.1, 1.0):
        await bench.run(300, 0.0, 1, early)


@cocotb.test()
async def reset_in_mid_flight(dut):
    bench = Bench(dut, 0.3)
    await start(dut)
    for _ in range(6):
        task = cocotb.start_soon(bench.run(1000))
        await cycles(dut, random.randrange(80, 500))
        task.cancel()
        dut.rst.value = 1
        dut.slot_take.value = dut.own_valid.value = dut.leg_valid.value = dut.free_valid.value = 0
        await RisingEdge(dut.clk)
        bench.clear()
        await cycles(dut, 2)
        dut.rst.value = 0
        await bench.run(80)


def test_slots():
    for ssds in (16, 1):
        os.environ["TEST_SSDS"] = str(ssds)
        harness.run("slots", parameters={"SSDS": ssds})


if __name__ == "__main__":
    test_slots()
