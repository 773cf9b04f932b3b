"""Drivers and monitors for valid/ready streams (docs/hardware.md, Interfaces), with random pauses.

          rising edge: drivers change inputs        falling edge: everybody looks; what is seen here is
              │                                          │        what the next rising edge will take
    clk  ─────┘‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾└──────────────────────┘‾‾‾

A stream is named by its prefix: `Source(dut, "in")` drives in_valid and in_<field> and obeys in_ready. A word is a dict of
field to integer; a stream of one field called `data` may also be given integers.
"""

import random

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import Event, FallingEdge, RisingEdge, Timer


async def start(dut, period=10):
    """Starts the clock and resets; inputs must have been given values before."""
    await Timer(period, "ns")  # the clock's first edge is no earlier than what was given: state is random, and so were the inputs
    cocotb.start_soon(Clock(dut.clk, period, unit="ns").start())
    await reset(dut)


async def reset(dut, cycles=3):
    await RisingEdge(dut.clk)
    dut.rst.value = 1
    for _ in range(cycles):
        await RisingEdge(dut.clk)
    dut.rst.value = 0


async def cycles(dut, count):
    for _ in range(count):
        await RisingEdge(dut.clk)


def idle(dut, **values):
    """Sets inputs before the first cycle."""
    for name, value in values.items():
        getattr(dut, name).value = value


class Pauses:
    """When one side of a stream rests. `rate` is the share of cycles; pauses come in runs of up to `longest`."""

    def __init__(self, rate=0.0, longest=8, seed=None):
        self.rate, self.longest, self.left = rate, longest, 0
        self.random = random.Random(random.getrandbits(64) if seed is None else seed)

    def rests(self):
        if self.left:
            self.left -= 1
            return True
        # A run lasts (longest + 1) / 2 cycles on average.
        if self.rate and self.random.random() < 2 * self.rate / ((1 - self.rate) * (self.longest + 1) + 2 * self.rate):
            self.left = self.random.randrange(self.longest)
            return True
        return False


class _Stream:
    def __init__(self, dut, prefix, fields, clock=None):
        self.clk = clock or dut.clk
        self.rst = dut.rst
        self.name = prefix
        self.valid = getattr(dut, f"{prefix}_valid")
        self.ready = getattr(dut, f"{prefix}_ready", None)
        self.fields = {field: getattr(dut, f"{prefix}_{field}") for field in fields}
        self.single = list(fields) == ["data"]

    def is_ready(self):
        return self.ready is None or self.ready.value == 1


class Source(_Stream):
    """Offers words in order: `send` returns at once, `wait` when all were taken. No ready signal: always taken."""

    def __init__(self, dut, prefix, fields=("data",), pauses=None, clock=None):
        super().__init__(dut, prefix, fields, clock)
        self.pauses = pauses or Pauses()
        self.words, self.sent = [], 0
        self.empty = Event()
        self.empty.set()
        self.valid.value = 0
        for signal in self.fields.values():
            signal.value = 0
        self.task = cocotb.start_soon(self._run())

    def send(self, word):
        self.words.append({"data": word} if not isinstance(word, dict) else word)
        self.empty.clear()

    async def wait(self):
        await self.empty.wait()

    def clear(self):
        """Forgets what has not been taken, for resets in mid-flight."""
        self.words.clear()
        self.empty.set()

    async def _run(self):
        offered = False
        while True:
            await FallingEdge(self.clk)
            taken = offered and self.is_ready() and self.rst.value == 0
            await RisingEdge(self.clk)
            if taken and self.words:
                self.words.pop(0)
                self.sent += 1
                if not self.words:
                    self.empty.set()
            if self.rst.value == 1 or not self.words:
                offered = False
            elif taken or not offered:
                offered = not self.pauses.rests()
            self.valid.value = int(offered)
            for field, signal in self.fields.items():
                # What is not valid is noise, so that nobody looks at it.
                signal.value = self.words[0][field] if offered else random.getrandbits(len(signal))


class Monitor(_Stream):
    """Notes every word that passes, and that `valid` stands and the word with it until it is taken.

    `words` has what passed; `on_word`, if given, is called with each. With `pauses` it is the receiver as well and drives ready.
    `means`, if given, makes of a word what it means: the rest of it may be anything.
    """

    def __init__(self, dut, prefix, fields=("data",), pauses=None, on_word=None, holds=True, clock=None, means=None):
        super().__init__(dut, prefix, fields, clock)
        self.words, self.on_word, self.holds, self.pauses, self.means = [], on_word, holds, pauses, means
        self.arrived = Event()
        if pauses is not None:
            self.ready.value = 0
            cocotb.start_soon(self._receive())
        cocotb.start_soon(self._watch())

    def _word(self):
        if self.single:
            return int(self.fields["data"].value)
        return {field: int(signal.value) for field, signal in self.fields.items()}

    async def get(self, count):
        """The next `count` words, taken out of `words`."""
        while len(self.words) < count:
            self.arrived.clear()
            await self.arrived.wait()
        taken, self.words[:count] = self.words[:count], []
        return taken

    async def _receive(self):
        while True:
            await RisingEdge(self.clk)
            self.ready.value = int(not self.pauses.rests())

    async def _watch(self):
        offered = None
        while True:
            await FallingEdge(self.clk)
            if self.rst.value == 1:
                offered = None
                continue
            if self.valid.value != 1:
                assert offered is None or not self.holds, f"{self.name}_valid went away before it was taken"
                continue
            word = self._word()
            if self.means:
                word = self.means(word)
            if offered is not None and self.holds:
                assert word == offered, f"{self.name} changed from {offered} to {word} before it was taken"
            offered = word
            if self.is_ready():
                offered = None
                self.words.append(word)
                if self.on_word:
                    self.on_word(word)
                self.arrived.set()


def host_write(word):
    """What a word of hwr_* means: an interrupt is its function and vector."""
    return {**word, "addr": word["addr"] & 0xFFFFFF, "data": None} if word["kind"] else word
