"""crossbar.sv with random traffic on all ports at once: everything arrives once, at whom it is for, in the order that is promised."""

import random
import sys
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb

import harness
from lanes import Sinks, Sources
from stream import cycles, reset, start

HRD = {"addr": 64, "beats": 5, "tag": 8}
HRR = {"tag": 12, "data": 128, "last": 1, "error": 1}
HWR = {"kind": 1, "addr": 64, "data": 128, "bytes": 5}
SDB = {"ssd": 4, "cq": 1, "value": 16}
SDR = {"addr": 18, "beats": 5, "tag": 8}
SDD = {"tag": 8, "data": 128, "last": 1}
SDW = {"addr": 18, "data": 128}


class Crossbar:
    """All ports driven; `expected` has, by port and lane, what was taken and has not arrived."""

    def __init__(self, dut, rate):
        self.dut, self.cores, self.ssds = dut, len(dut.c_hrd_valid), len(dut.sdb_valid)
        self.expected = {}
        self.arrived = dict.fromkeys(("hrd", "hrr", "hwr", "sdb", "sdd", "sdw"), 0)
        self.asks, self.answers = [deque() for _ in range(self.ssds)], [deque() for _ in range(self.cores)]
        cores, ssds = self.cores, self.ssds
        on = lambda port: lambda lane, word: getattr(self, port)(lane, word)
        self.sources = [
            Sources(dut, "c_hrd", HRD, cores, rate(), lambda c, w: self.expect("hrd", c, w)),
            Sources(dut, "c_hwr", HWR, cores, rate(), lambda c, w: self.expect("hwr", c, w)),
            Sources(dut, "c_sdb", SDB, cores, rate(), lambda c, w: self.expect("sdb", (c, w["ssd"]), w)),
            Sources(dut, "hrr", HRR, 1, rate(), None, ready=False),
            Sources(dut, "sdr", SDR, ssds, rate(), lambda s, w: self.asks[s].append(w)),
            Sources(dut, "sdw", SDW, ssds, rate(), lambda s, w: self.expect("sdw", (s, w["addr"] >> 14), w)),
        ]
        self.core_answers = Sources(dut, "c_sdd", SDD, cores, rate())
        Sinks(dut, "hrd", {**HRD, "tag": 12}, 1, rate(), on("host_read"))
        Sinks(dut, "hwr", {**HWR, "core": len(dut.hwr_core)}, 1, rate(), on("host_write"))
        Sinks(dut, "sdb", {"core": 4, "cq": 1, "value": 16}, ssds, rate(), on("doorbell"))
        Sinks(dut, "c_sdr", {**SDR, "addr": 14}, cores, rate(), on("core_read"))
        Sinks(dut, "c_sdw", {**SDW, "addr": 14}, cores, rate(), on("core_write"))
        Sinks(dut, "sdd", SDD, ssds, rate(), on("answer"))
        self.hrr = Sinks(dut, "c_hrr", {}, cores, ready=False, on_word=on("host_answer"))

    def expect(self, port, lane, word):
        self.expected.setdefault((port, lane), deque()).append(word)

    def came(self, port, lane, word):
        waiting = self.expected.get((port, lane))
        assert waiting, f"{port} {lane}: {word} was never sent"
        wanted = waiting.popleft()
        assert word == wanted, f"{port} {lane}: {word} instead of {wanted}"
        self.arrived[port] += 1

    def host_read(self, _, word):
        self.came("hrd", word["tag"] >> 8, {**word, "tag": word["tag"] & 255})

    def host_write(self, _, word):
        core = word.pop("core")
        self.came("hwr", core, word)

    def doorbell(self, ssd, word):
        core = word.pop("core")
        self.came("sdb", (core, ssd), {**word, "ssd": ssd})

    def core_write(self, core, word):
        # From which disk is in the data.
        self.came("sdw", (word["data"] & 15, core), {**word, "addr": word["addr"] | core << 14})

    def core_read(self, core, word):
        """A core answers in order: core, address and beat in the data."""
        for beat in range(word["beats"]):
            data = core << 100 | word["addr"] << 32 | beat
            self.core_answers.send(core, {"tag": word["tag"], "data": data, "last": int(beat == word["beats"] - 1)})

    def answer(self, ssd, word):
        ask = self.asks[ssd][0]
        beat = ask.setdefault("came", 0)
        wanted = {
            "tag": ask["tag"], "last": int(beat == ask["beats"] - 1),
            "data": (ask["addr"] >> 14) << 100 | (ask["addr"] & 0x3FFF) << 32 | beat,
        }
        assert word == wanted, f"disk {ssd}: {word} instead of {wanted}"
        ask["came"] += 1
        if word["last"]:
            self.asks[ssd].popleft()
            self.arrived["sdd"] += 1

    def host_answer(self, core, _):
        dut = self.dut
        self.came("hrr", core, {f: int(getattr(dut, f"c_hrr_{f}").value) for f in HRR})

    def load(self, count):
        bits = random.getrandbits
        hrd, hwr, sdb, hrr, sdr, sdw = self.sources
        for _ in range(count):
            for c in range(self.cores):
                hrd.send(c, {"addr": bits(64), "beats": random.randrange(1, 17), "tag": bits(8)})
                hwr.send(c, {"kind": bits(1), "addr": bits(64), "data": bits(128), "bytes": random.randrange(1, 17)})
                sdb.send(c, {"ssd": random.randrange(self.ssds), "cq": bits(1), "value": bits(16)})
                word = {"tag": c << 8 | bits(8), "data": bits(128), "last": bits(1), "error": bits(1)}
                hrr.send(0, word)
                self.expect("hrr", c, {**word, "tag": word["tag"] & 255})
            for s in range(self.ssds):
                core = random.randrange(self.cores)
                sdr.send(s, {"addr": core << 14 | bits(14), "beats": random.choice([1, 4, 16]), "tag": bits(8)})
                sdw.send(s, {"addr": core << 14 | bits(14), "data": bits(124) << 4 | s})

    async def done(self, limit):
        for _ in range(limit):
            if not any(any(source.waiting) for source in [*self.sources, self.core_answers]) and not any(self.expected.values()) and not any(self.asks):
                return
            await cycles(self.dut, 1)
        left = {key: len(words) for key, words in self.expected.items() if words}
        raise AssertionError(f"stands still: {left}, asks {[len(a) for a in self.asks]}")

    def forget(self):
        for source in [*self.sources, self.core_answers]:
            source.clear()
        self.expected.clear()
        for asks in self.asks:
            asks.clear()


@cocotb.test()
@cocotb.parametrize(busy=[0.0, 0.5, 0.8])
async def all_at_once(dut, busy):
    crossbar = Crossbar(dut, lambda: random.choice([0.0, busy]))
    dut.rst.value = 1
    await start(dut)
    rounds = 20 if crossbar.cores > 8 else 60
    crossbar.load(rounds)
    await crossbar.done(40000)
    assert all(count >= rounds for count in crossbar.arrived.values()), crossbar.arrived
    await cycles(dut, 3)
    assert int(dut.busy.value) == 0


@cocotb.test()
async def reset_in_flight(dut):
    crossbar = Crossbar(dut, lambda: 0.4)
    dut.rst.value = 1
    await start(dut)
    for _ in range(4 if crossbar.cores > 8 else 15):
        crossbar.load(20)
        await cycles(dut, random.randrange(1, 150))
        dut.rst.value = 1
        await cycles(dut, 1)
        crossbar.forget()
        await cycles(dut, 2)
        crossbar.forget()
        dut.rst.value = 0
        crossbar.load(4)
        await crossbar.done(5000)


@cocotb.test()
async def fair(dut):
    """All cores want the host and the same disk without pause: each gets its share in every window."""
    crossbar = Crossbar(dut, lambda: 0.0)
    dut.rst.value = 1
    await start(dut)
    turns = {"hrd": [], "hwr": [], "sdb": []}
    crossbar.host_read = lambda _, word: turns["hrd"].append(word["tag"] >> 8)
    crossbar.host_write = lambda _, word: turns["hwr"].append(word["core"])
    crossbar.doorbell = lambda _, word: turns["sdb"].append(word["core"])
    for _ in range(50):
        for c in range(crossbar.cores):
            crossbar.sources[0].send(c, {"addr": 0, "beats": 1, "tag": 0})
            crossbar.sources[1].send(c, {"kind": 0, "addr": 0, "data": 0, "bytes": 1})
            crossbar.sources[2].send(c, {"ssd": crossbar.ssds - 1, "cq": 0, "value": 0})
    await cycles(dut, 50 * crossbar.cores + 20)
    for port, order in turns.items():
        assert len(order) == 50 * crossbar.cores, f"{port}: a transfer a cycle"
        for i in range(0, len(order), crossbar.cores):
            assert sorted(order[i : i + crossbar.cores]) == list(range(crossbar.cores)), f"{port}: {order[i:i + crossbar.cores]}"


def test_crossbar():
    for cores, ssds in ((1, 1), (4, 3), (2, 1), (16, 16)):
        harness.run("crossbar", sources=["one_of", "arbiter", "merge", "fifo"], parameters={"CORES": cores, "SSDS": ssds})


if __name__ == "__main__":
    test_crossbar()
