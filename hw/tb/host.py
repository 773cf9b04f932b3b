"""Host memory behind hrd_* and hrr_* (docs/hardware.md, Host reads): answers after a time, beats of several tags in any mix.

    Host(dut, read)   read(addr) -> 16 bytes as an integer, or None: the read fails
"""

import random

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

from stream import Pauses


class Host:
    def __init__(self, dut, read, latency=20, jitter=0, mixed=True, refuse=None, rest=None, foreign=()):
        """`latency` and up to `jitter` more cycles from request to first beat; `mixed`: any request that is due goes on next, else the
        oldest. `refuse`: pauses of hrd_ready, `rest`: of answers. `foreign`: tags of answers to others, strewn in."""
        self.dut, self.read, self.latency, self.jitter, self.mixed = dut, read, latency, jitter, mixed
        self.refuse, self.rest, self.foreign = refuse or Pauses(), rest or Pauses(), foreign
        self.asked = []    # [due, tag, addresses still to be answered, failed beats]
        self.requests = 0
        self.most = 0      # in flight at once
        self.cycle = 0
        dut.hrd_ready.value = 0
        self._silent()
        cocotb.start_soon(self._run())

    def _silent(self):
        d = self.dut
        d.hrr_valid.value = 0
        for signal in (d.hrr_tag, d.hrr_data, d.hrr_last, d.hrr_error):
            signal.value = random.getrandbits(len(signal))

    def _take(self):
        d = self.dut
        if not (d.hrd_valid.value and d.hrd_ready.value):
            return
        tag, addr, beats = int(d.hrd_tag.value), int(d.hrd_addr.value), int(d.hrd_beats.value)
        assert 1 <= beats <= 16 and addr % 16 == 0
        assert addr // 4096 == (addr + beats * 16 - 1) // 4096, f"a read across a page: {addr:#x}, {beats} beats"
        assert all(tag != other[1] for other in self.asked), f"tag {tag} asked again before it was answered"
        self.asked.append([self.cycle + self.latency + random.randint(0, self.jitter), tag, [addr + 16 * i for i in range(beats)]])
        self.requests += 1
        self.most = max(self.most, len(self.asked))

    def _answer(self):
        d = self.dut
        self._silent()
        if self.foreign and random.random() < 0.2:
            d.hrr_valid.value = 1
            d.hrr_tag.value = random.choice(self.foreign)
            return
        if self.rest.rests():
            return
        due = [ask for ask in self.asked if ask[0] <= self.cycle]
        if not due:
            return
        ask = random.choice(due) if self.mixed else due[0]
        data = self.read(ask[2].pop(0))
        d.hrr_valid.value = 1
        d.hrr_tag.value = ask[1]
        d.hrr_data.value = random.getrandbits(128) if data is None else data
        d.hrr_error.value = int(data is None)
        d.hrr_last.value = int(not ask[2])
        if not ask[2]:
            self.asked.remove(ask)

    async def _run(self):
        while True:
            await FallingEdge(self.dut.clk)
            reset = self.dut.rst.value == 1
            if reset:
                self.asked.clear()
            else:
                self._take()
            await RisingEdge(self.dut.clk)
            self.cycle += 1
            self.dut.hrd_ready.value = int(not self.refuse.rests())
            if reset:
                self._silent()
            else:
                self._answer()
