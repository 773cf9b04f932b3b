"""The binding on $MILLRACE_VOLUME: everything that it has, once."""
import array
import errno
import gc
import os
import select
import signal
import threading

import millrace

with millrace.Space(os.environ["MILLRACE_VOLUME"], 1 << 16, depth=8, events=True, statistics=True) as space:
    block = space.block_size
    data = bytes(range(256)) * (3 * block // 256)
    space.write(block, data, durable=True)
    assert space.read(block, len(data)) == data
    into = bytearray(block)
    space.read_into(2 * block, into)
    assert bytes(into) == data[block:2 * block]
    # Of whatever elements it consists.
    words = array.array("I", bytes(2 * block))
    space.read_into(block, words)
    assert words.tobytes() == data[:2 * block]
    space.read_into(block, memoryview(words).cast("B")[block:])
    assert words.tobytes() == 2 * data[:block]
    space.flush()
    space.write_zeroes(block, block, durable=True)
    space.deallocate(2 * block, block)
    assert space.read(block, 2 * block) == bytes(2 * block)
    for tag in range(8):
        space.buffer[tag * block:(tag + 1) * block] = bytes([tag + 1]) * block
        space.submit(millrace.WRITE, tag, tag * block, block, tag * block)
    try:
        space.submit(millrace.READ, 9, 0, block)
        raise AssertionError("more than its depth")
    except BlockingIOError:
        pass
    ended = set()
    while len(ended) < 8:
        for tag, size, error, time_ns in space.reap():
            assert size == block and error is None and time_ns > 0
            ended.add(tag)
        if len(ended) < 8:
            assert select.select([space], [], [], 30)[0]
            try:
                os.read(space.fileno(), 8)
            except BlockingIOError:
                pass
    assert ended == set(range(8)) and space.read(7 * block, block) == bytes([8]) * block
    assert space.statistics()["writes"]["requests"] == 9
    for wrong, number in ((lambda: space.read(space.size, block), errno.ENXIO), (lambda: space.read(1, block), errno.EINVAL)):
        try:
            wrong()
            raise AssertionError("it cannot be")
        except OSError as error:
            assert error.errno == number, error
    # No bytes are none: a length, as other calls have one, is not so many zeroes.
    for wrong in (block, [0] * block, "0" * block):
        try:
            space.write(7 * block, wrong)
            raise AssertionError("it cannot be")
        except TypeError:
            pass
    assert space.read(7 * block, block) == bytes([8]) * block
    space.write(5 * block, words)
    assert space.read(5 * block, 2 * block) == words.tobytes()
    # Numbers that C's types do not hold would mean other bytes there.
    far = 2**64
    for wrong in (
        lambda: space.deallocate(far + block, block), lambda: space.deallocate(block, far + block), lambda: space.write(block - far, data),
        lambda: space.read(far + block, block), lambda: space.write_zeroes(-block, block), lambda: space.submit(millrace.WRITE, far, 0, block),
        lambda: space.submit(millrace.READ, 0, far, block), lambda: space.submit(2**32 + millrace.FLUSH, 0), lambda: space.reap(2**32 + 1),
        lambda: millrace.Space(os.environ["MILLRACE_VOLUME"], depth=2**32 + 1), lambda: millrace.Space(os.environ["MILLRACE_VOLUME"], -1),
    ):
        try:
            wrong()
            raise AssertionError("it cannot be")
        except ValueError:
            pass
    assert space.read(7 * block, block) == bytes([8]) * block
    # The library is asked to wait for at least as long, and not for ever.
    reap, asked = millrace._reap, []
    millrace._reap = lambda space, done, most, timeout_ms: asked.append(timeout_ms) or 0
    for timeout in (0.0005, 0, -1, 1.5, 3_000_000, float("inf"), None):
        assert space.reap(timeout=timeout) == []
    millrace._reap = reap
    assert asked == [1, 0, 0, 1500, 2**31 - 1, 2**31 - 1, -1], asked
# Closed while others are in calls: they end as they would have, or are told.
for _ in range(20):
    space = millrace.Space(os.environ["MILLRACE_VOLUME"], 1 << 16)
    told = []

    def read_on():
        try:
            while True:
                assert space.read(0, block) is not None
        except ValueError as error:
            told.append(str(error))

    threads = [threading.Thread(target=read_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    space.read(0, block)
    space.close()
    space.close()
    for thread in threads:
        thread.join()
    assert told == 3 * ["the space is closed"], told
# Forked while others are in calls: what they held there nobody gives back, and the child is told all the same.
with millrace.Space(os.environ["MILLRACE_VOLUME"], 1 << 16, depth=1) as space:
    space.read(0, block)
    enough = threading.Event()

    def read_until_enough():
        while not enough.is_set():
            space.read(0, block)

    threads = [threading.Thread(target=read_until_enough) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        child = os.fork()
        if child == 0:
            # One that waits for ever is ended.
            signal.alarm(60)
            status = 1
            try:
                space.read(0, block)
            except OSError as error:
                status = int(error.errno != errno.ENODEV)
            space.close()
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    enough.set()
    for thread in threads:
        thread.join()
    assert space.read(0, block) is not None
# Nobody closes them; a part of the buffer outlives its space.
descriptors = len(os.listdir("/proc/self/fd"))
parts = [millrace.Space(os.environ["MILLRACE_VOLUME"], 1 << 16).buffer[:16] for _ in range(3)]
gc.collect()
for part in parts:
    part[:] = bytes(16)
del part, parts
gc.collect()
assert len(os.listdir("/proc/self/fd")) == descriptors
try:
    millrace.Space(os.environ["MILLRACE_VOLUME"], engine=True)
    raise AssertionError("the daemon has no engine")
except OSError as error:
    assert error.errno == errno.EOPNOTSUPP, error
try:
    millrace.Space("none")
    raise AssertionError("there is none")
except FileNotFoundError as error:
    assert "none" in str(error)
print("well")
