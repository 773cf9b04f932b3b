"""The binding on $MILLRACE_VOLUME: everything that it has, once."""
import errno
import os
import select

import millrace

with millrace.Space(os.environ["MILLRACE_VOLUME"], 1 << 16, depth=8, events=True, statistics=True) as space:
    block = space.block_size
    data = bytes(range(256)) * (3 * block // 256)
    space.write(block, data, durable=True)
    assert space.read(block, len(data)) == data
    into = bytearray(block)
    space.read_into(2 * block, into)
    assert bytes(into) == data[block:2 * block]
    space.flush()
    space.write_zeroes(block, block)
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
