"""Several streams of one kind whose signals are packed arrays ([lanes-1:0][width-1:0], lane 0 in the lowest bits), with random pauses.

    Sources(dut, "c_hrd", {"addr": 64, "tag": 8}, lanes=4).send(2, {"addr": 1, "tag": 7})
    Sinks(dut, "sdb", {"core": 4, "value": 16}, lanes=2).words[1]

As in stream.py: inputs change at the rising edge, everybody looks at the falling edge, and what is seen there is what the next rising
edge takes. With one lane the signals may as well be plain.
"""

import random

import cocotb
from cocotb.triggers import FallingEdge, RisingEdge

from stream import Pauses


class _Lanes:
    def __init__(self, dut, prefix, fields, lanes, ready=True):
        self.dut, self.name, self.lanes, self.fields = dut, prefix, lanes, fields
        self.valid = getattr(dut, f"{prefix}_valid")
        self.ready = getattr(dut, f"{prefix}_ready") if ready else None
        self.signals = {field: getattr(dut, f"{prefix}_{field}") for field in fields}

    def word(self, lane):
        return {f: int(s.value) >> lane * self.fields[f] & (1 << self.fields[f]) - 1 for f, s in self.signals.items()}


class Sources(_Lanes):
    """Offers each lane's words in order; what was taken is reported to `on_taken(lane, word)`."""

    def __init__(self, dut, prefix, fields, lanes, rate=0.0, on_taken=None, ready=True):
        super().__init__(dut, prefix, fields, lanes, ready)
        self.waiting = [[] for _ in range(lanes)]
        self.pauses = [Pauses(rate) for _ in range(lanes)]
        self.on_taken = on_taken
        self.valid.value = 0
        for signal in self.signals.values():
            signal.value = 0
        cocotb.start_soon(self._run())

    def send(self, lane, word):
        self.waiting[lane].append(word)

    def clear(self):
        for lane in self.waiting:
            lane.clear()

    async def drained(self):
        while any(self.waiting):
            await RisingEdge(self.dut.clk)

    async def _run(self):
        offered = [False] * self.lanes
        while True:
            await FallingEdge(self.dut.clk)
            ready = int(self.ready.value) if self.ready is not None else -1
            resets = int(self.dut.rst.value)
            taken = [offered[i] and ready >> i & 1 and not resets for i in range(self.lanes)]
            await RisingEdge(self.dut.clk)
            valid, values = 0, dict.fromkeys(self.fields, 0)
            for i in range(self.lanes):
                if taken[i] and self.waiting[i]:
                    word = self.waiting[i].pop(0)
                    if self.on_taken:
                        self.on_taken(i, word)
                if resets or not self.waiting[i]:
                    offered[i] = False
                elif taken[i] or not offered[i]:
                    offered[i] = not self.pauses[i].rests()
                valid |= int(offered[i]) << i
                for f, width in self.fields.items():
                    # What is not valid is noise, so that nobody looks at it.
                    values[f] |= (self.waiting[i][0][f] if offered[i] else random.getrandbits(width)) << i * width
            self.valid.value = valid
            for f, signal in self.signals.items():
                signal.value = values[f]


class Sinks(_Lanes):
    """Takes what each lane offers, notes it in `words[lane]` and calls `on_word(lane, word)`; checks that offers stand until taken."""

    def __init__(self, dut, prefix, fields, lanes, rate=0.0, on_word=None, ready=True):
        super().__init__(dut, prefix, fields, lanes, ready)
        self.words = [[] for _ in range(lanes)]
        self.pauses = [Pauses(rate) for _ in range(lanes)]
        self.on_word = on_word
        if ready:
            self.ready.value = 0
            cocotb.start_soon(self._drive())
        cocotb.start_soon(self._watch())

    async def _drive(self):
        while True:
            await RisingEdge(self.dut.clk)
            self.ready.value = sum(int(not p.rests()) << i for i, p in enumerate(self.pauses))

    async def _watch(self):
        offered = [None] * self.lanes
        while True:
            await FallingEdge(self.dut.clk)
            if int(self.dut.rst.value):
                offered = [None] * self.lanes
                continue
            valid = int(self.valid.value)
            ready = int(self.ready.value) if self.ready is not None else -1
            for i in range(self.lanes):
                if not valid >> i & 1:
                    assert offered[i] is None, f"{self.name}_valid[{i}] went away before it was taken"
                    continue
                word = self.word(i)
                assert offered[i] in (None, word), f"{self.name}[{i}] changed from {offered[i]} to {word} before it was taken"
                offered[i] = None if ready >> i & 1 else word
                if ready >> i & 1:
                    self.words[i].append(word)
                    if self.on_word:
                        self.on_word(i, word)
