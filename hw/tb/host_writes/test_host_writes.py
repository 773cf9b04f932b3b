"""host_writes.sv: nothing is lost, each side's order is kept, and what was taken first goes out first."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocotb

import harness
from stream import Monitor, Pauses, Source, cycles, host_write, reset, start


class Bench:
    def __init__(self, dut, rates):
        self.order = []
        self.entries = Source(dut, "cqe", ("addr", "data"), pauses=Pauses(rates[0]))
        self.messages = Source(dut, "msi", ("function", "vector"), pauses=Pauses(rates[1]))
        Monitor(dut, "cqe", ("addr", "data"), on_word=lambda w: self.order.append({"kind": 0, "bytes": 16, **w}))
        Monitor(dut, "msi", ("function", "vector"), on_word=lambda w: self.order.append({
            "kind": 1, "addr": w["function"] << 8 | w["vector"]}))
        self.out = Monitor(dut, "hwr", ("kind", "addr", "data", "bytes"), pauses=Pauses(rates[2]), on_word=self.goes, means=host_write)
        dut.rst.value = 1

    def goes(self, word):
        expected = self.order.pop(0)
        assert expected.items() <= word.items(), f"{word} where {expected} was due"

    def send(self, count):
        for _ in range(count):
            self.entries.send({"addr": random.getrandbits(64), "data": random.getrandbits(128)})
            self.messages.send({"function": random.getrandbits(4), "vector": random.getrandbits(8)})


@cocotb.test()
@cocotb.parametrize(rates=[(0, 0, 0), (0.5, 0, 0.5), (0, 0.5, 0.5), (0.7, 0.7, 0), (0.2, 0.2, 0.8)])
async def order(dut, rates):
    bench = Bench(dut, rates)
    await start(dut)
    bench.send(300)
    await bench.out.get(600)
    assert not bench.order


@cocotb.test()
async def reset_in_mid_flight(dut):
    bench = Bench(dut, (0.2, 0.2, 0.6))
    await start(dut)
    for _ in range(20):
        bench.send(20)
        await cycles(dut, random.randrange(5, 40))
        dut.rst.value = 1
        bench.entries.clear()
        bench.messages.clear()
        await reset(dut, 2)
        bench.order.clear()
        bench.out.words.clear()
        bench.send(10)
        await bench.out.get(20)


def test_host_writes():
    harness.run("host_writes")


if __name__ == "__main__":
    test_host_writes()
