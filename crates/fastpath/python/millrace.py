"""A volume of a running Millrace daemon for Python: libmillrace by ctypes (docs/fastpath.md).

    with millrace.Space("data") as space:
        space.write(0, b"x" * 4096, durable=True)
        assert space.read(0, 4096) == b"x" * 4096

What fails raises OSError with the number and the words of millrace.h; a number that its types do not hold, ValueError. A space may be used by
several threads: the interpreter's lock is not held while the library works.
"""

import ctypes
import math
import operator
import os
import threading
import weakref

READ, WRITE, FLUSH, DEALLOCATE, WRITE_ZEROES = range(5)
_DIRECT, _BLOCKING, _DURABLE = 1, 2, 4
_READ_ONLY, _EVENTS, _STATISTICS, _ENGINE = 1, 2, 4, 8

_u32, _u64, _i64, _size, _text, _space = (
    ctypes.c_uint, ctypes.c_uint64, ctypes.c_int64, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p)


class _Options(ctypes.Structure):
    _fields_ = [("size", _size), ("run_dir", _text), ("depth", _u32), ("flags", _u32), ("timeout_ms", _u32)]


class _Request(ctypes.Structure):
    _fields_ = [("operation", _u32), ("flags", _u32), ("offset", _u64), ("size", _u64), ("buffer", ctypes.c_void_p),
                ("iov", ctypes.c_void_p), ("iovcnt", _u32), ("tag", _u64)]


class _Completion(ctypes.Structure):
    _fields_ = [("tag", _u64), ("result", _i64), ("time_ns", _u64)]


class _Latencies(ctypes.Structure):
    _fields_ = [(name, _u64) for name in ("requests", "errors", "bytes", "min_ns", "mean_ns", "p50_ns", "p90_ns",
                                          "p99_ns", "p999_ns", "max_ns")]


class _Statistics(ctypes.Structure):
    _fields_ = [("reads", _Latencies), ("writes", _Latencies), ("others", _Latencies)]


_library = ctypes.CDLL(os.environ.get("MILLRACE_LIBRARY", "libmillrace.so.0"))


def _function(name, result, *arguments):
    function = getattr(_library, name)
    function.restype, function.argtypes = result, arguments
    return function


_open = _function("fastpath_open", _space, _text, _size, ctypes.POINTER(_Options))
_free = _function("fastpath_free", None, _space)
_buffer = _function("fastpath_buffer", ctypes.c_void_p, _space)
_buffer_size = _function("fastpath_buffer_size", _size, _space)
_block_size = _function("fastpath_block_size", _u32, _space)
_volume_size = _function("fastpath_volume_size", _i64, _space)
_pread = _function("fastpath_pread", _i64, _space, ctypes.c_void_p, _size, _u64, _u32)
_pwrite = _function("fastpath_pwrite", _i64, _space, ctypes.c_void_p, _size, _u64, _u32)
_flush = _function("fastpath_flush", ctypes.c_int, _space, _u32)
_deallocate = _function("fastpath_deallocate", ctypes.c_int, _space, _u64, _u64, _u32)
_write_zeroes = _function("fastpath_write_zeroes", ctypes.c_int, _space, _u64, _u64, _u32)
_submit = _function("fastpath_submit", ctypes.c_int, _space, ctypes.POINTER(_Request))
_reap = _function("fastpath_reap", ctypes.c_int, _space, ctypes.POINTER(_Completion), _u32, ctypes.c_int)
_eventfd = _function("fastpath_eventfd", ctypes.c_int, _space)
_connection = _function("fastpath_connection", ctypes.c_int, _space)
_statistics = _function("fastpath_statistics", ctypes.c_int, _space, ctypes.POINTER(_Statistics), ctypes.c_int)
_error = _function("fastpath_error", _text)
_error_number = _function("fastpath_error_number", ctypes.c_int)
_strerror = _function("fastpath_strerror", _text, ctypes.c_int)


def _whole(value, most, what):
    """A whole number that the library's type holds: ctypes cuts others off, and they would mean something else."""
    value = operator.index(value)
    if not 0 <= value <= most:
        raise ValueError(f"{what} is {value}, not 0 to {most}")
    return value


def _bytes(value, what):
    return _whole(value, 2**64 - 1, what)


def _milliseconds(seconds):
    """For the library; None: for ever. Never shorter than what was asked for, up to 24 days."""
    return -1 if seconds is None else max(0, math.ceil(min(seconds * 1000, 2**31 - 1)))


def _check(result):
    """The result of a call, or its failure as an exception."""
    if result < 0:
        raise OSError(-result, _error().decode())
    return result


_handles = weakref.WeakSet()


def _forked():
    """In a process that was forked the threads that were in calls are not there, and give no lock back."""
    for handle in _handles:
        handle._lock, handle._calls = threading.Lock(), 0


os.register_at_fork(after_in_child=_forked)


class _Handle:
    """A space of the library's, which is freed when it is closed, or nothing refers to it, and no call on it is under way."""

    def __init__(self, space):
        self._lock, self._space, self._calls, self._closed = threading.Lock(), space, 0, False
        _handles.add(self)

    def call(self, function, *arguments):
        with self._lock:
            if self._closed:
                raise ValueError("the space is closed")
            self._calls += 1
        try:
            return function(self._space, *arguments)
        finally:
            with self._lock:
                self._calls -= 1
                space = self._last()
            if space:
                _free(space)

    def _last(self):
        """The space, once, if it is to be freed now."""
        if not self._closed or self._calls:
            return None
        space, self._space = self._space, None
        return space

    def close(self):
        with self._lock:
            self._closed = True
            space = self._last()
        if space:
            _free(space)

    def __del__(self):
        self.close()


class Space:
    """A volume, open. `buffer` is the memory that it shares with the daemon: a writable memoryview, gone when the space is closed."""

    def __init__(
        self, volume, buffer=1 << 20, *, run_dir=None, depth=128, read_only=False, events=False, statistics=False, engine=False
    ):
        flags = (_READ_ONLY if read_only else 0) | (_EVENTS if events else 0) | (_STATISTICS if statistics else 0)
        flags |= _ENGINE if engine else 0
        depth = _whole(depth, 2**32 - 1, "the depth")
        buffer = _whole(buffer, ctypes.c_size_t(-1).value, "the buffer's size")
        options = _Options(ctypes.sizeof(_Options), None if run_dir is None else os.fsencode(run_dir), depth, flags, 0)
        space = _open(volume.encode(), buffer, options)
        if not space:
            raise OSError(_error_number(), _error().decode())
        self._handle = _Handle(space)
        self._address, size = self._handle.call(_buffer), self._handle.call(_buffer_size)
        memory = (ctypes.c_ubyte * size).from_address(self._address)
        # Whoever has a part of the buffer keeps it there.
        memory.handle = self._handle
        self.buffer = memoryview(memory).cast("B")
        self.block_size = self._handle.call(_block_size)

    def close(self):
        """Gives everything back, once calls of other threads have returned. A memoryview of the buffer that was sliced off must not be
        used any more."""
        self.buffer.release()
        self._handle.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def size(self):
        """The volume's size in bytes, as it is now."""
        return _check(self._handle.call(_volume_size))

    def read(self, offset, size):
        """`size` bytes from `offset` on."""
        data = bytearray(size)
        self.read_into(offset, data)
        return bytes(data)

    def read_into(self, offset, data):
        """Fills `data`, anything writable, from `offset` on."""
        size, offset = memoryview(data).nbytes, _bytes(offset, "the offset")
        view = (ctypes.c_ubyte * size).from_buffer(data)
        _check(self._handle.call(_pread, view, size, offset, _BLOCKING))

    def write(self, offset, data, *, durable=False):
        """Writes `data`, anything with bytes, at `offset`; durable when it returns, if so."""
        # Of a number, bytes() would make as many zeroes.
        data, offset = bytes(memoryview(data)), _bytes(offset, "the offset")
        _check(self._handle.call(_pwrite, data, len(data), offset, _BLOCKING | (_DURABLE if durable else 0)))

    def flush(self):
        """Makes durable what was written."""
        _check(self._handle.call(_flush, _BLOCKING))

    def deallocate(self, offset, size):
        """These bytes are not needed any more."""
        offset, size = _bytes(offset, "the offset"), _bytes(size, "the size")
        _check(self._handle.call(_deallocate, offset, size, _BLOCKING))

    def write_zeroes(self, offset, size, *, durable=False):
        """These bytes read as zeroes from now on; durably when it returns, if so."""
        offset, size = _bytes(offset, "the offset"), _bytes(size, "the size")
        _check(self._handle.call(_write_zeroes, offset, size, _BLOCKING | (_DURABLE if durable else 0)))

    def submit(self, operation, tag, offset=0, size=0, at=0, *, durable=False):
        """Begins a request on `size` bytes of the buffer from `at` on. Raises BlockingIOError when no more can be in progress."""
        operation = _whole(operation, 2**32 - 1, "the operation")
        tag, offset, size = _bytes(tag, "the tag"), _bytes(offset, "the offset"), _bytes(size, "the size")
        if operation in (READ, WRITE) and not 0 <= at <= at + size <= len(self.buffer):
            raise ValueError("not within the buffer")
        flags = _DIRECT | (_DURABLE if durable else 0)
        request = _Request(operation, flags, offset, size, self._address + at, None, 0, tag)
        _check(self._handle.call(_submit, request))

    def reap(self, most=64, timeout=0.0):
        """What has ended, as (tag, bytes or None, None or an OSError, nanoseconds). Waits up to `timeout` seconds; None: for ever."""
        most = _whole(most, 2**31 - 1, "the most to be taken")
        done = (_Completion * most)()
        count = _check(self._handle.call(_reap, done, most, _milliseconds(timeout)))
        return [(c.tag, *((c.result, None) if c.result >= 0 else (None, OSError(-c.result, _strerror(c.result).decode()))),
                 c.time_ns) for c in done[:count]]

    def fileno(self):
        """The event fd of a space with events, for select and asyncio: read its 8 bytes, then reap until nothing comes. Watch connection()
        beside it."""
        return _check(self._handle.call(_eventfd))

    def connection(self):
        """A descriptor that becomes readable, and hangs up, when the daemon has ended: what is in progress then ends with ENODEV at the next
        reap. Read nothing from it."""
        return _check(self._handle.call(_connection))

    def statistics(self, clear=False):
        """Latencies of reads, writes and others, of a space that measures."""
        found = _Statistics()
        _check(self._handle.call(_statistics, found, int(clear)))
        return {kind: {name: getattr(getattr(found, kind), name) for name, _ in _Latencies._fields_}
                for kind, _ in _Statistics._fields_}
